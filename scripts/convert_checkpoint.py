"""Convert DiT weights between .pt, .safetensors and a folder in diffusers' layout, and prove it by reading the result back.

python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output DiT-XL-2-512.safetensors
python scripts/convert_checkpoint.py --ckpt DiT-XL-2-512x512.pt --output DiT-XL-2-512/     # diffusers' layout
"""

if not __package__:
    __import__("_as_module")

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from accel.options import OneLineParser, UsageError, partial_file, user_errors
from models import DiT_models
from pretrained_models.download import find_model, to_diffusers


def config_of(state):
    """The config of diffusers' DiTTransformer2DModel for a state dict in this repository's keys.

    The head count is in no tensor: it is that of the model in DiT_models with this width and depth.
    """
    width, channels, patch_size, _ = state["x_embedder.proj.weight"].shape
    depth = sum(key.endswith("attn.qkv.weight") for key in state)
    with torch.device("meta"):
        heads = next(
            (
                model.num_heads
                for model in (build() for build in DiT_models.values())
                if (model.pos_embed.shape[-1], len(model.blocks)) == (width, depth)
            ),
            None,
        )
    if heads is None:
        raise UsageError(f"--ckpt: width {width} and depth {depth} are no model of {', '.join(DiT_models)}")
    return {
        "_class_name": "DiTTransformer2DModel",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": width // heads,
        "dropout": 0.0,
        "in_channels": channels,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "norm_num_groups": 32,
        "norm_type": "ada_norm_zero",
        "num_attention_heads": heads,
        "num_embeds_ada_norm": len(state["y_embedder.embedding_table.weight"]) - 1,
        "num_layers": depth,
        "out_channels": state["final_layer.linear.weight"].shape[0] // patch_size**2,
        "patch_size": patch_size,
        "sample_size": round(state["pos_embed"].shape[1] ** 0.5) * patch_size,
        "upcast_attention": False,
    }


def write(state, target):
    """Write `state` as the kind of file that `target`'s name asks for; a folder appears only when it is whole."""
    from safetensors.torch import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix in (".pt", ".safetensors"):
        with partial_file(target) as partial:
            partial.touch()  # an OSError that says why, where torch and safetensors raise their own
            save_file(state, partial) if target.suffix == ".safetensors" else torch.save(state, partial)
        return
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "transformer").mkdir(parents=True)
        # The blocks' copies of the embedders share memory here; safetensors wants each tensor to own its bytes.
        tensors = {key: tensor.clone() for key, tensor in to_diffusers(state).items()}
        save_file(tensors, partial / "transformer" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        (partial / "transformer" / "config.json").write_text(json.dumps(config_of(state), indent=2) + "\n")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main():
    parser = OneLineParser(description="Convert DiT weights and prove the round trip.")
    parser.add_argument(
        "--ckpt", required=True, help="a .pt or .safetensors file, a published name, or a folder in diffusers' layout"
    )
    parser.add_argument(
        "--output", required=True, help="what to write: NAME.pt, NAME.safetensors, or a folder for diffusers' layout"
    )
    args = parser.parse_args()
    with user_errors(parser):
        target = Path(args.output)
        if target.exists():
            raise UsageError(f"--output {target}: exists; remove it or choose another name")
        if target.suffix not in (".pt", ".safetensors", ""):
            raise UsageError(f"--output {target}: must end in .pt or .safetensors, or name a folder")
        state = {key: tensor.contiguous() for key, tensor in find_model(args.ckpt).items()}
        if "x_embedder.proj.weight" not in state:
            raise UsageError(f"--ckpt {args.ckpt}: holds no DiT (no x_embedder.proj.weight)")
        try:
            write(state, target)
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors have their own for a full disk
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise UsageError(
                f"--output {target}: cannot write there ({reason}); choose another path, or free some space"
            ) from None
        back = find_model(target)
        wrong = [
            key
            for key in {**state, **back}
            if key not in state or key not in back or not torch.equal(state[key], back[key])
        ]
        if wrong:
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            raise UsageError(
                f"--output {target}: reading it back gave other tensors: {', '.join(wrong[:3])} ({len(wrong)} in all)"
            )
        total = sum(tensor.numel() for tensor in state.values())
        print(f"{target}: {len(state)} tensors, {total:,} values, read back equal")


if __name__ == "__main__":
    main()
