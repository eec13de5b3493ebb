"""Flags and errors of commands. What each command refuses: tests/test_commands.py."""

import re

import pytest
from forks import refused, succeeds

from accel.errors import UsageError


def test_an_error_is_worded_for_its_door():
    error = UsageError(
        "must be 16",
        "`tf32=False` or `tf32`, `num_classes=8`",
        parameter="image_size",
        value=17,
    )
    assert str(error) == "image_size=17: must be 16; tf32=False or tf32, num_classes=8"
    assert error.by_flags() == "--image-size 17: must be 16; --no-tf32 or --tf32, --num-classes 8"
    assert str(UsageError("give one", parameter="labels")) == "labels: give one"


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--num-sampling-step", "--num-sampling-steps"),
        ("--imagesize", "--image-size"),
        ("--cfg-scal", "--cfg-scale"),
        ("--mode", "--model"),
        ("--class", "--num-classes or --class-names"),
        ("--num-steps", "--num-sampling-steps"),
        ("--steps", "--num-sampling-steps"),
        ("--batch", "--batch-size"),
        ("--cfg", "--cfg-scale"),
        ("--xyzzy", None),
    ],
)
def test_an_abbreviation_is_refused_with_the_nearest_flag(flag, meant, here):
    """What an abbreviation means changes where a flag is added."""
    line = refused(here("sample.py", flag, 3))
    ending = f"; did you mean {meant}?" if meant else ""
    assert line == f"sample.py: unrecognized arguments: {flag} 3{ending}\n"


def test_help_breaks_no_flag(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = succeeds(here("sample_ddp.py", "--help"))
    assert "--num-fid-samples" in text and not re.search(r"--[\w-]+-$", text, re.M)
