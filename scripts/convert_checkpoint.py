"""Convert DiT weights between .pt, .safetensors and diffusers' layout, and prove it by reading the result back.
Large-DiT's, from a file or a folder of its training, become .pt or .safetensors.

python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output DiT-XL-2-512.safetensors
python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output DiT-XL-2-512/ --pipeline --vae ema
"""

if not __package__:
    __import__("_as_module")

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.vae import find_vae
from accel.weights.checkpoint import Checkpoint, find_model
from accel.weights.diffusers_layout import WEIGHTS, config_of, to_diffusers, weight_files
from accel.weights.identity import is_flow
from accel.weights.tensor_files import digest, mode_of

# DiT's diffusion process.
SCHEDULER = {"_class_name": "DDIMScheduler", "beta_start": 0.0001, "beta_end": 0.02, "clip_sample": False}


def write_folder(state: dict[str, torch.Tensor], folder: Path, pipeline: bool, vae: Path | None) -> None:
    """A new folder in diffusers' layout: transformer/, for a pipeline also index, scheduler and `vae` if given."""
    files = {"transformer/config.json": config_of(state)}
    if pipeline:
        parts = {"transformer": "DiTTransformer2DModel", "scheduler": "DDIMScheduler", "vae": "AutoencoderKL"}
        index = {part: ["diffusers", name] for part, name in parts.items()} | ({} if vae else {"vae": [None, None]})
        files["model_index.json"] = {"_class_name": "DiTPipeline"} | index
        files["scheduler/scheduler_config.json"] = SCHEDULER
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    # The blocks' copies of the embedders share memory here; safetensors wants each tensor to own its bytes.
    tensors = {name: tensor.clone() for name, tensor in to_diffusers(state).items()}
    # Not by save_file, which makes a file that its owner alone may read.
    (folder / "transformer" / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    if vae:
        (folder / "vae").mkdir()
        for file in (vae / "config.json", *weight_files(vae, "vae"), *vae.glob("*.index.json")):
            shutil.copyfile(file, folder / "vae" / file.name)


def write(state: dict[str, torch.Tensor], target: Path, pipeline: bool, vae: Path | None) -> None:
    """Write what the name of `target` asks for. It is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix:
        with atomic_write(target) as file:
            torch.save(state, file) if target.suffix == ".pt" else file.write(save(state))
        return
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_folder(state, partial, pipeline, vae)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert(ckpt: str, output: str, pipeline: bool, vae: str | None, allow_nonfinite: bool) -> None:
    """Check, write, read back and compare. Raises UsageError."""
    target = Path(output)
    if mode_of(target, "output"):
        raise UsageError(f"--output {target}: exists; remove it or choose another name")
    if target.suffix not in (".pt", ".safetensors", "") or target.name in (".pt", ".safetensors"):
        raise UsageError(f"--output {target}: must end in .pt or .safetensors, or name a folder")
    if pipeline and target.suffix or vae and not pipeline:
        raise UsageError("--pipeline: writes a folder, so --output must name one; --vae needs --pipeline")
    vae = find_vae(vae) if vae else None
    weights = Checkpoint(ckpt)
    state = {name: tensor.contiguous() for name, tensor in weights.state.items()}
    dit, large_dit = (state.get(name, torch.empty(0)).ndim for name in ("x_embedder.proj.weight", "x_embedder.weight"))
    if dit != 4 and large_dit != 2:
        raise UsageError(f"--ckpt {ckpt}: holds no DiT (no x_embedder.proj.weight)")
    if dit != 4 and not target.suffix:
        raise UsageError(f"--output {target}: diffusers has no Large-DiT; name a .pt or .safetensors file")
    if not target.suffix and is_flow(ckpt, weights.said):
        raise UsageError(f"--output {target}: diffusers has no SiT; name a .pt or .safetensors file")
    nonfinite = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if nonfinite and not allow_nonfinite:
        raise UsageError(
            f"--ckpt {ckpt}: {nonfinite[0]} holds NaN or infinity ({len(nonfinite)} of {len(state)} tensors do); "
            "take another checkpoint, or add --allow-nonfinite"
        )
    try:
        write(state, target, pipeline, vae)
    except KeyError as error:
        raise UsageError(f"--ckpt {ckpt}: is not a whole DiT, it lacks {error}; save it again") from None
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(
            f"--output {target}: cannot write there ({reason}); choose another path, or free space"
        ) from None
    back = find_model(target)
    wrong = sorted(state.keys() ^ back.keys()) or [
        name for name in state if digest({name: state[name]}) != digest({name: back[name]})
    ]
    if wrong:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        raise UsageError(f"--output {target}: reading it back gave other tensors: {', '.join(wrong[:3])}")
    total = sum(tensor.numel() for tensor in state.values())
    print(f"{target}: {len(state)} tensors, {total:,} values, read back equal")
    rows = len(state["y_embedder.embedding_table.weight"])
    if pipeline and rows != 1001:
        print(f"{target}: DiTPipeline takes 1000 for the null class, and here it is {rows - 1}: it cannot guide these")


def main() -> None:
    parser = OneLineParser(description="Convert DiT weights and prove the round trip.")
    parser.add_argument("--ckpt", required=True, help="file, diffusers' folder, published name or hub id (owner/name)")
    parser.add_argument("--output", required=True, help="NAME.pt, NAME.safetensors, or a folder for diffusers' layout")
    parser.add_argument("--pipeline", action="store_true", help="into a folder: all that diffusers.DiTPipeline loads")
    parser.add_argument("--vae", help="for --pipeline: ema, mse or a folder; without it pass vae= to from_pretrained")
    parser.add_argument("--allow-nonfinite", action="store_true", help="convert weights with NaN or infinities, too")
    args = parser.parse_args()
    with user_errors(parser):
        convert(**vars(args))


if __name__ == "__main__":
    main()
