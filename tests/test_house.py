"""The house rules that import-linter does not check: flags end at the door, a variant is no flag, nothing is long."""

import ast
import re

import pytest
from conftest import ROOT, tracked

PROGRAM = tracked("*.py")
PROGRAM = [file for file in PROGRAM if not file.startswith("tests/")]
DOORS = {"sample.py", "sample_ddp.py", *(f"accel/{name}.py" for name in ("options", "command_line", "api", "door"))}
BEHIND_DOORS = "bench/", "scripts/", "pretrained_models/demo/"
OF_SAMPLING = "accel/sampling/", "diffusion/"
VARIANTS = "eta is None", "plan is None", "learns_range", "guided="
MOST_LINES = {ast.ClassDef: 150, ast.FunctionDef: 60}
OWN_LENGTH = "GaussianDiffusion", "Strides"  # the mathematics of diffusion/, under upstream's names


def test_flags_end_at_the_door():
    """Options are seen where they are made and turned into values; accel itself asks for a path and its version."""
    importing = {file for file in PROGRAM if re.search(r"accel\.options|accel import .*\boptions\b", text_of(file))}
    below = {file for file in importing - DOORS if not file.startswith(BEHIND_DOORS)}
    assert DOORS - {"accel/options.py"} <= importing and below <= {"accel/__init__.py"}


def test_a_variant_is_no_flag():
    """Which process and guidance it is, is known to themselves."""
    found = [
        f"{file}: {variant}"
        for file in PROGRAM
        if file not in DOORS and not file.startswith(OF_SAMPLING)
        for variant in VARIANTS
        if variant in text_of(file)
    ]
    assert found == []


@pytest.mark.parametrize("kind", MOST_LINES, ids=lambda kind: kind.__name__)
def test_nothing_is_long(kind):
    found = []
    for file in PROGRAM:
        if kind is ast.FunctionDef and file.startswith("accel/kernels/"):
            continue
        for node in ast.walk(ast.parse(text_of(file))):
            lines = node.end_lineno - node.lineno + 1 if isinstance(node, kind) else 0
            if lines > MOST_LINES[kind] and node.name not in OWN_LENGTH:
                found.append(f"{file}: {node.name} has {lines} lines")
    assert found == []


def text_of(file):
    return (ROOT / file).read_text()
