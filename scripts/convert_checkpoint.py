"""Convert weights of a network between .pt, .safetensors and, of a DiT, diffusers'
layout; read the result back and compare. Family, prediction, classes and guided channels
are written beside the tensors.

python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output DiT-XL-2-512.safetensors
python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output DiT-XL-2-512/ --pipeline
--vae ema
"""

if not __package__:
    __import__("_as_module")

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError, path_errors, shown
from accel.families import family_of, model_names
from accel.families.recognise import (
    Fit,
    recognise,
    recogniser_of,
    reference_state,
)
from accel.files import atomic_write, is_utf8, repeated, require_name
from accel.flags import positive
from accel.latents.autoencoder_kl import KIND as AUTOENCODER_KL
from accel.latents.files import find
from accel.opening import fit_of_file
from accel.weights import Weights
from accel.weights.checkpoint import open_checkpoint
from accel.weights.diffusers_layout import config_of, to_diffusers
from accel.weights.digests import digest
from accel.weights.metadata import OWN, to_header
from accel.weights.positions import require_sinusoid
from accel.weights.tensor_files import WEIGHTS, mode_of, weight_files

# DiT's diffusion process.
SCHEDULER = {
    "_class_name": "DDIMScheduler",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "clip_sample": False,
}


def write_folder(
    state: dict[str, torch.Tensor], fit: Fit, folder: Path, pipeline: bool, vae: Path | None
) -> None:
    """Write a folder in diffusers' layout: transformer/, for a pipeline also index,
    scheduler and `vae` if given.
    """
    files = {
        "transformer/config.json": config_of(state, fit.num_heads, fit.latent_size, fit.num_classes)
    }
    if pipeline:
        parts = {
            "transformer": "DiTTransformer2DModel",
            "scheduler": "DDIMScheduler",
            "vae": "AutoencoderKL",
        }
        index = {"_class_name": "DiTPipeline"}
        for part, name in parts.items():
            index[part] = ["diffusers", name]
        if vae is None:
            index["vae"] = [None, None]
        files["model_index.json"] = index
        files["scheduler/scheduler_config.json"] = SCHEDULER
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    # The blocks' copies of the embedders share memory here; safetensors wants each tensor
    # to own its bytes.
    tensors = {name: tensor.clone() for name, tensor in to_diffusers(state).items()}
    # Not by save_file, which makes a file that its owner alone may read.
    (folder / "transformer" / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    if vae:
        (folder / "vae").mkdir()
        for file in (vae / "config.json", *weight_files(vae, "vae"), *vae.glob("*.index.json")):
            shutil.copyfile(file, folder / "vae" / file.name)


def write(
    state: dict[str, torch.Tensor], fit: Fit, target: Path, pipeline: bool, vae: Path | None
) -> None:
    """Write the file or folder that `target` names. It is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix:
        with atomic_write(target) as file:
            if target.suffix == ".pt":
                torch.save({"ema": state, OWN: fit.metadata()}, file)
            else:
                file.write(save(state, metadata={"format": "pt", **to_header(fit.metadata())}))
        return
    partial = target.with_name(f".{repeated(target.name)}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_folder(state, fit, partial, pipeline, vae)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert(
    ckpt: str,
    output: str,
    model: str | None,
    pipeline: bool,
    vae: str | None,
    weights_entry: str | None,
    num_heads: int | None,
) -> None:
    """Check, write, read back and compare. Raises UsageError."""
    target = Path(output)
    if mode_of(target, "output"):
        raise UsageError(f"`output={target}`: exists; remove it or choose another name")
    if target.suffix not in (".pt", ".safetensors", "") or target.name in (".pt", ".safetensors"):
        raise UsageError(f"`output={target}`: must end in .pt or .safetensors, or name a folder")
    with path_errors("output", target):
        require_name(target)
    if not is_utf8(target):
        raise UsageError(
            f"`output={target}`: is not UTF-8, and neither torch nor safetensors opens such a "
            "name; choose another"
        )
    if pipeline and target.suffix or vae and not pipeline:
        raise UsageError(
            "`pipeline`: writes a folder, so `output` must name one; `vae` needs `pipeline`"
        )
    if vae:
        decoder = find(vae).decoder
        if decoder.kind is not AUTOENCODER_KL or decoder.path.is_file():
            raise UsageError(
                f"`vae={vae}`: a pipeline needs the folder of an AutoencoderKL; give one"
            )
        vae = decoder.path
    weights = open_checkpoint(ckpt, entry=weights_entry)
    fit = fit_of_file(weights, model, num_heads=num_heads)
    if target.suffix:
        state = recogniser_of(fit.family).sampled(weights.state, weights.metadata)
        dropped = weights.state.keys() - state.keys()
        if dropped:
            print(
                f"{shown(ckpt)}: left out {len(dropped)} entries that only training needs, such "
                f"as {min(dropped)}"
            )
    else:
        state = diffusers_state(ckpt, weights, fit)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    require_finite(ckpt, state)
    try:
        write(state, fit, target, pipeline, vae)
    # torch and safetensors have their own for a full disk
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(
            f"`output={target}`: cannot write there ({reason}); choose another, or free space"
        ) from None
    try:
        require_equal(target, state, fit)
    except BaseException:  # what cannot be read back is no result
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        raise
    total = sum(tensor.numel() for tensor in state.values())
    print(f"{target}: {fit.model}, {len(state)} tensors, {total:,} values, read back equal")
    written = fit.metadata().get("vae") if target.suffix else None  # a folder has no place for it
    if vae is None and fit.vae not in (None, "ema", written):
        print(f"{target}: does not say which decoder it needs; sample with --vae {fit.vae}")
    if pipeline and fit.num_classes != 1000:
        null = f"DiTPipeline takes 1000 for the null class, and here it is {fit.num_classes}"
        print(f"{target}: {null}: it cannot guide these")


def diffusers_state(ckpt: str, weights: Weights, fit: Fit) -> dict[str, torch.Tensor]:
    """Return the weights without their position table, which diffusers' class computes.
    Raises UsageError for weights that the class cannot compute.
    """
    if fit.family is not family_of("DiT-XL/2"):
        raise UsageError(
            f"`output`: diffusers has no {fit.family.name}; name a .pt or .safetensors file"
        )
    if not fit.null_class:
        raise UsageError(
            "`output`: diffusers' class has a null class, these weights have none; name a "
            ".safetensors"
        )
    state = reference_state(weights, fit)
    off = require_sinusoid(
        ckpt, state["pos_embed"], "diffusers computes the latter; name a .pt or .safetensors file"
    )
    if off:
        print(
            f"{shown(ckpt)}: its position table is up to {off:.1g} off the sine-cosine table, an "
            "average's rounding"
        )
    return state


def require_finite(ckpt: str, state: dict[str, torch.Tensor]) -> None:
    """Raise UsageError for weights with NaN or infinities."""
    # In float32: float8 has no isfinite.
    nonfinite = [name for name, tensor in state.items() if not tensor.float().isfinite().all()]
    if nonfinite:
        raise UsageError(
            f"`ckpt={ckpt}`: {nonfinite[0]} holds NaN or infinity ({len(nonfinite)} of "
            f"{len(state)} tensors do); take another checkpoint"
        )


def require_equal(target: Path, state: dict[str, torch.Tensor], fit: Fit) -> None:
    """Read `target` back. Raise UsageError unless it has the same tensors of the same kind."""
    weights = open_checkpoint(target)
    again = recognise(str(target), weights.state, weights.metadata)
    back = weights.state
    if not target.suffix:
        state = {name: tensor for name, tensor in state.items() if name != "pos_embed"}
    wrong = sorted(state.keys() ^ back.keys()) or [
        name for name in state if digest({name: state[name]}) != digest({name: back[name]})
    ]
    wrong += [
        name
        for name, value in fit.metadata().items()
        if target.suffix and again.metadata().get(name) != value
    ]
    if wrong:
        raise UsageError(
            f"`output={target}`: reading it back gave another {', '.join(wrong[:3])}; report this"
        )


def main() -> None:
    parser = OneLineParser(description="Convert weights and prove the round trip.")
    add = parser.add_argument
    add(
        "--ckpt",
        required=True,
        help="file, diffusers' folder, published name or hub id (owner/name)",
    )
    add(
        "--output",
        required=True,
        help="NAME.pt, NAME.safetensors, or a folder for diffusers' layout",
    )
    add(
        "--model",
        choices=model_names(),
        metavar="NAME",
        help="what the weights are, if they do not say",
    )
    add(
        "--pipeline",
        action="store_true",
        help="into a folder: all that diffusers.DiTPipeline loads",
    )
    add(
        "--vae",
        help="for --pipeline: ema, mse or a folder; without it pass vae= to from_pretrained",
    )
    add("--weights-entry", metavar="NAME", help="entry of a training file, such as ema or model")
    add("--num-heads", type=positive, metavar="N", help="attention heads, if the file does not say")
    args = parser.parse_args()
    with user_errors(parser):
        convert(**vars(args))


if __name__ == "__main__":
    main()
