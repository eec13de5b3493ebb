"""Recognise the files of a DiT, and derive its sizes."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from accel.families import dit
from accel.families.dit.network import DiT, DiT_models, get_2d_sincos_pos_embed
from accel.families.recognise import Form, OfModule, Recogniser
from accel.weights.shapes import Shapes

PATCHES = "x_embedder.proj.weight"  # a convolution (D, C, p, p)
LAST = "final_layer.linear.weight"
GAUSSIAN = {  # arguments of training → their supported values
    "predict_xstart": (False,),
    "noise_schedule": ("linear",),
    "diffusion_steps": (1000,),
    # In diffusers' and other programs' words. rescale_timesteps is missing: of 1000 steps it
    # changes nothing.
    "prediction_type": ("epsilon", "eps", "noise"),
    "parameterization": ("eps", "epsilon", "noise"),
}


def require_heads(heads: int | None, what: str, width: int) -> int:
    """Return the number of heads. Raises ValueError if it is unknown, or does not divide
    the width.
    """
    if heads is None:
        raise ValueError(
            f"is a {what} of width {width}, and no tensor says how many heads it has; give "
            "`num_heads`, or load it into its class and use accel.Sampler(module)"
        )
    if width % heads:
        raise ValueError(
            f"says {heads} heads, which do not divide its width {width}; correct its configuration"
        )
    return heads


class DiTRecogniser(Recogniser):
    """Recognise weights with a DiT's entries. network: the class of the reference network."""

    family = dit.FAMILY
    models = DiT_models
    network: ClassVar[type[DiT]] = DiT
    computed = GAUSSIAN

    def form(self, shapes: Shapes, metadata: Mapping[str, Any]) -> Form:
        """Return the network of weights with these shapes, as Recogniser.form does. The
        heads are the file's, else those of the model with this depth, width and patch.
        """
        if len(shapes[PATCHES]) != 4:
            raise ValueError(f"{PATCHES} is {shapes[PATCHES]}, must have four dimensions")
        width, channels, patch, _ = shapes[PATCHES]
        depth = sum(name.endswith(".attn.qkv.weight") for name in shapes)
        sizes = dict(depth=depth, hidden_size=width, patch_size=patch)
        # The model of these sizes, else one with another patch: it has as many heads.
        configs = [(name, build.config) for name, build in self.models.items()]
        named = _with(configs, sizes)
        alike = named or _with(configs, dict(depth=depth, hidden_size=width))
        usual = alike[0][1]["num_heads"] if alike else None
        unnamed = f"{self.family.name}-{depth}x{width}/{patch}", {}
        name, config = named[0] if named else unnamed
        mlp_ratio = self.mlp_ratio(shapes, width)
        of_file = self.heads(shapes, metadata)
        what = f"{self.family.name} of {depth} blocks"
        heads = require_heads(of_file or usual, what, width)
        build = partial(
            self.network,
            **sizes,
            in_channels=channels,
            num_heads=heads,
            mlp_ratio=mlp_ratio,
            learn_sigma=shapes[LAST][0] == 2 * channels * patch**2,
            input_size=config.get("input_size", 16 * patch),
            **self.options(shapes),
        )
        standard = bool(named) and heads == usual
        return Form(name, build, heads, assumes_heads=of_file is None, usual=standard)

    def heads(self, shapes: Shapes, metadata: Mapping[str, Any]) -> int | None:
        """Return the number of heads that a file says, or None."""
        return metadata.get("num_heads")

    def mlp_ratio(self, shapes: Shapes, width: int) -> float:
        """Return the constructor's `mlp_ratio`, which it multiplies by the width and rounds
        down.
        """
        return (shapes["blocks.0.mlp.fc1.weight"][0] + 0.5) / width

    def options(self, shapes: Shapes) -> dict[str, Any]:
        """Return further arguments of the constructor."""
        return {}

    def converted(
        self, state: dict[str, torch.Tensor], metadata: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return `state` with the position table, which diffusers' layout lacks, computed
        for the latent's side.
        """
        if "pos_embed" in state or "latent_size" not in metadata or PATCHES not in state:
            return state
        kernel = state[PATCHES]  # (D, C, p, p)
        table = get_2d_sincos_pos_embed(len(kernel), metadata["latent_size"] // kernel.shape[-1])
        return {**state, "pos_embed": torch.from_numpy(table).to(kernel.dtype).unsqueeze(0)}

    def sampled(
        self, state: dict[str, torch.Tensor], metadata: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return `state` with the position table: a file of ours has one."""
        return self.converted(state, metadata)

    def of_module(self, module: nn.Module, state: dict[str, torch.Tensor]) -> OfModule | None:
        """Return the rules to read a DiT: this repository's, the original or diffusers'.
        None for another module.
        """
        if hasattr(module, "transformer_blocks"):
            from accel.families.dit import diffusers_module  # files do not need it

            return diffusers_module.of_module(module)
        return self.of_entries(module, state)

    def of_entries(
        self, module: nn.Module, state: dict[str, torch.Tensor], **rules: Any
    ) -> OfModule | None:
        """Return the rules to read a module with the family's entries, or None for another
        module. rules: other fields of OfModule.
        """
        if not all(name in state for name in self.family.keys):
            return None
        return OfModule(self.family, dict(num_heads=module.num_heads), **rules)


RECOGNISER = DiTRecogniser()


def _with(configs, sizes):
    """Return the models, (name, configuration), that have these sizes."""
    return [(name, config) for name, config in configs if sizes.items() <= config.items()]
