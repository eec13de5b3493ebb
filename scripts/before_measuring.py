"""For scripts/measure.sh: this machine's GPUs and tiers, and whether its measurements can go
on in a folder.

    python scripts/before_measuring.py FOLDER [--ckpt WEIGHTS --vae DECODER --image-size PX]

Prints the number of GPUs, then the tiers. A folder with measurements of another GPU, model,
size or weights is refused by name: a report is of one machine and one network.
"""

if not __package__:
    __import__("_as_module")

from argparse import Namespace
from pathlib import Path

import torch

from accel import gpu, precision
from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.flags import positive
from accel.opening import choose_device
from bench import harness

OF_THE_NETWORK = "profile", "steps", "contest"  # kinds of records


def require_continuable(folder: Path, expected: dict, gpus: int) -> None:
    """Raise UsageError if a record in `folder` differs from a new one. expected: entries of a
    new record. gpus: the number of processes of a record of several.
    """
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify/verify.json")]):
        record = harness.read(path, str(path), "remove it")
        names = ["gpu"]
        if record.get("kind") in OF_THE_NETWORK:
            names += ["model", "image_size", "weights"]
        for name in names:
            require(path, name, record.get(name), expected[name])
        for name in ("decoder", "steps"):  # of the contest's job
            if record.get("kind") == "contest" and name in record:
                require(path, name, record[name], expected[name])
        if record.get("gpus", 1) > 1:
            require(path, "gpus", record["gpus"], gpus)


def require(path: Path, name: str, recorded: object, expected: object) -> None:
    """Raise UsageError unless a record's entry is that of a new record."""
    if recorded != expected:
        raise UsageError(
            f"{path} is of {name} {recorded or 'CPU'}, and this run of {expected or 'CPU'}; name "
            "another folder, or remove that one"
        )


def facts(args: Namespace, device: torch.device) -> dict:
    """Return the entries of a new record that must not change within a folder."""
    args.model = args.model or ("DiT-XL/2" if device.type == "cuda" else "DiT-Demo/2")
    harness.complete(args)
    return dict(
        gpu=gpu.name(device) if device.type == "cuda" else None,
        model=args.model,
        image_size=args.image_size,
        weights=harness.name_of(args.ckpt),
        decoder=harness.name_of(harness.decoder_of(args)),
        steps=args.steps,
    )


def main() -> None:
    parser = OneLineParser(prog="measure.sh", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    harness.add_arguments(parser)
    parser.add_argument("--vae", help="decoder, as in sample.py")
    parser.add_argument(
        "--num-sampling-steps",
        dest="steps",
        type=positive,
        default=harness.STEPS,
        help="steps of whole runs (default: %(default)s)",
    )
    args = parser.parse_args()
    with user_errors(parser):
        device = choose_device(args.device)
        count = torch.cuda.device_count()
        require_continuable(args.folder, facts(args, device), count or 2)
        tiers = [tier for tier in precision.TIERS if precision.supports(tier, device)]
        print(count, *tiers)


if __name__ == "__main__":
    main()
