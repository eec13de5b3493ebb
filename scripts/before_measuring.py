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


def require_continuable(folder: Path, expected: dict) -> None:
    """Raise UsageError if a record in `folder` differs from a new one. expected: entries of a
    new record; its gpus are those of a record of several.
    """
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify/verify.json")]):
        record = harness.read(path, str(path), "remove it")
        names = ["gpu"]
        if record.get("kind") in OF_THE_NETWORK:
            names += ["model", "image_size", "weights"]
        if record.get("kind") == "contest":
            names += [name for name in ("decoder", "steps") if name in record]
        if record.get("gpus", 1) > 1:
            names.append("gpus")
        for name in names:
            if record.get(name) != expected[name]:
                raise UsageError(
                    f"{path} is of {name} {record.get(name) or 'CPU'}, and this run of "
                    f"{expected[name] or 'CPU'}; name another folder, or remove that one"
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
        gpus=torch.cuda.device_count() or 2,
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
        require_continuable(args.folder, facts(args, device))
        tiers = [tier for tier in precision.TIERS if precision.supports(tier, device)]
        print(torch.cuda.device_count(), *tiers)


if __name__ == "__main__":
    main()
