"""From flags to a request, and from errors to one line and an exit status."""

import pytest

from accel.command_line import OneLineParser, add_arguments, refuse_given, request_from, user_errors
from accel.errors import INTERRUPTED, USAGE, UsageError
from accel.request import FidRequest, GridRequest


def parsed(*arguments, **how):
    parser = OneLineParser(prog="command")
    add_arguments(parser, **how)
    return parser, parser.parse_args(map(str, arguments))


def test_flags_become_a_request():
    parser, args = parsed("--labels", 1, 5, "--model", "DiT-Demo/2", "--seed", 3, "--cfg-scale", 2)
    request = request_from(args)
    assert (request.labels, request.seed, request.cfg_scale, request.image_size) == (("1", "5"), 3, 2.0, None)
    assert "(default: 0)" in parser.format_help() and "(default: None)" not in parser.format_help()
    _, args = parsed("--global-seed", 4, "--tf32", ranks=True)
    request = request_from(args)
    assert (request.seed, request.tier) == (4, "tf32")


def test_one_parser_serves_two_kinds_of_job():
    """Each flag once; what the other kind lacks is refused by its flag."""
    parser = OneLineParser(prog="command")
    groups = add_arguments(parser, GridRequest, FidRequest, ranks=True)
    flags = [one.option_strings for group in groups.values() for one in group._group_actions]
    assert len(flags) == len({names[0] for names in flags}) and ["--global-seed", "--seed"] in flags
    args = parser.parse_args(["--seeds", "1", "2", "--num-fid-samples", "4"])
    refuse_given(parser.parse_args([]), GridRequest, FidRequest, "no")
    with pytest.raises(UsageError) as error:
        refuse_given(args, GridRequest, FidRequest, "give a `seed`")
    assert (
        parser.worded(error.value) == "--seeds: give a --global-seed" and str(error.value) == "seed_list: give a seed"
    )


def test_an_error_is_worded_for_its_door():
    error = UsageError("`image_size=17`: must be 16; `tf32=False` or `tf32`, `num_classes=8`")
    assert str(error) == "image_size=17: must be 16; tf32=False or tf32, num_classes=8"
    assert error.by_flags() == "--image-size 17: must be 16; --no-tf32 or --tf32, --num-classes 8"


def test_a_command_leaves_out_what_it_has_no_use_for(capsys):
    parser, args = parsed("--seed", 3, leave_out=("output", "labels"))
    assert "--output " not in parser.format_help() and request_from(args).outputs == ("sample.png",)
    with pytest.raises(SystemExit):
        parsed("--labels", 3, leave_out=("labels",))
    assert "--labels" in capsys.readouterr().err


def test_the_same_flag_twice_is_no_mistake():
    assert parsed("--ckpt", "a.pt", "--ckpt", "a.pt")[1].ckpt == "a.pt"


@pytest.mark.parametrize(
    "raised, status, text",
    [
        (UsageError("`labels=9`: too large"), USAGE, "command: --labels 9: too large\n"),
        (KeyboardInterrupt(), INTERRUPTED, "\ncommand: interrupted\n"),
    ],
)
def test_errors_become_a_line_and_a_status(raised, status, text, capsys):
    with pytest.raises(SystemExit) as stop, user_errors(OneLineParser(prog="command")):
        raise raised
    assert stop.value.code == status and capsys.readouterr().err == text


def test_other_errors_pass():
    """A fault of ours is not dressed up as the user's."""
    with pytest.raises(ValueError, match="fault"), user_errors(OneLineParser(prog="command")):
        raise ValueError("a fault")
