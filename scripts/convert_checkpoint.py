"""Convert weights of a network between .pt and .safetensors; read the result back and compare.
Family, prediction, classes and guided channels are written with the tensors.

    python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output weights.safetensors
"""

if __name__ == "__main__":
    import _start  # noqa: F401

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from accel.checkpoints.facts import LATENT_SETTINGS, METADATA_KEY, to_header
from accel.checkpoints.loading import WeightFiles
from accel.cli import OneLineParser, positive, user_errors
from accel.errors import InputRef, UsageError, shown
from accel.families import model_names
from accel.families.identify import UserFacts
from accel.families.spec import ModelSpec
from accel.io.filesystem import atomic_write, is_utf8
from accel.tensors.digests import digest
from accel.tensors.tensor_files import mode_of, require_finite_floats


def facts_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the facts to write with these weights, by name."""
    # Other settings of latents follow from tensors.
    latents = {
        name: spec.latent_settings[name] for name in LATENT_SETTINGS if name in spec.latent_settings
    }
    recipe = {**spec.recommended, **latents}
    is_path = spec.vae and (Path(spec.vae).is_absolute() or Path(spec.vae).exists())
    facts = {
        **spec.facts,
        "family": spec.family.name,
        "prediction": spec.family.prediction,
        "model": spec.model if spec.model in spec.family.models else None,
        "num_classes": spec.num_classes,
        "num_heads": spec.num_heads,
        "image_size": spec.image_size,
        "vae": Path(spec.vae).name if is_path else spec.vae,
        "class_names": list(spec.class_names) or None,
        "guidance_channels": recipe.pop("guidance_channels", None),
        "recipe": recipe or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def convert(
    ckpt: str, output: str, model: str | None, weights_entry: str | None, num_heads: int | None
) -> None:
    """Check, write, read back and compare. Raises UsageError."""
    target = Path(output)
    problems = {
        "exists": bool(mode_of(target, "output")),
        "does not end in .pt or .safetensors": target.suffix not in (".pt", ".safetensors"),
        "is not UTF-8: torch and safetensors cannot open it": not is_utf8(target),
    }
    for problem, applies in problems.items():
        if applies:
            raise UsageError(problem, "choose another name", parameter="output", value=target)
    weights = WeightFiles(InputRef(ckpt), entry=weights_entry)
    checkpoint = weights.checkpoint(UserFacts(model=model, num_heads=num_heads))
    spec = checkpoint.spec
    if checkpoint.family_notice:
        weights.given.warn(checkpoint.family_notice)
    state = spec.family.weights.sampled(weights.state)
    dropped = weights.state.keys() - state.keys()
    if dropped:
        print(
            f"{shown(ckpt)}: left out {len(dropped)} entries that only training needs, such as "
            f"{min(dropped)}"
        )
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    require_finite_floats(state, weights.given)
    facts = facts_of(spec)
    try:
        write(state, facts, target)
    # torch and safetensors have their own for a full disk
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(
            f"cannot write there ({reason})",
            "choose another, or free space",
            parameter="output",
            value=target,
        ) from None
    try:
        require_equal(target, state, facts)
    except BaseException:  # leave no file that cannot be read back
        target.unlink(missing_ok=True)
        raise
    total = sum(tensor.numel() for tensor in state.values())
    print(f"{target}: {spec.model}, {len(state)} tensors, {total:,} values, read back equal")
    if spec.vae not in (None, "ema", facts.get("vae")):
        print(f"{target}: the decoder is not recorded; sample with --vae {spec.vae}")


def write(state: dict[str, torch.Tensor], facts: dict[str, Any], target: Path) -> None:
    """Write the file `target`. It is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        if target.suffix == ".pt":
            torch.save({"ema": state, METADATA_KEY: facts}, file)
        else:
            file.write(save(state, metadata={"format": "pt", **to_header(facts)}))


def require_equal(target: Path, state: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    """Read `target` back. Raise UsageError unless it has the same tensors and facts."""
    weights = WeightFiles(InputRef(str(target)))
    if digest(weights.state) != digest(state) or facts_of(weights.checkpoint().spec) != facts:
        raise UsageError(
            "reading it back gave other values", "report this", parameter="output", value=target
        )


def main() -> None:
    parser = OneLineParser(description="Convert weights and prove the round trip.")
    add = parser.add_argument
    add(
        "--ckpt",
        required=True,
        help="file, diffusers' folder, published name or hub id (owner/name)",
    )
    add("--output", required=True, help="NAME.pt or NAME.safetensors")
    add(
        "--model",
        choices=model_names(),
        metavar="NAME",
        help="model of the weights, if the file does not name it",
    )
    add("--weights-entry", metavar="NAME", help="entry of a training file, such as ema or model")
    add(
        "--num-heads",
        type=positive,
        metavar="N",
        help="attention heads, if the file does not name them",
    )
    args = parser.parse_args()
    with user_errors(parser):
        convert(**vars(args))


if __name__ == "__main__":
    main()
