"""Recognise the files of a DiT, and derive its sizes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from accel.families import dit
from accel.families.dit.network import DiT, DiT_models
from accel.families.recognise import Fit, OfModule, Recogniser
from accel.weights.shapes import Shapes

PATCHES = "x_embedder.proj.weight"  # a convolution (D, C, p, p)
LAST = "final_layer.linear.weight"


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


def models_with(
    models: Mapping[str, Callable[..., nn.Module]], **sizes: Any
) -> dict[str, dict[str, Any]]:
    """Return the models that have these sizes: name → configuration."""
    configs = {name: build.config for name, build in models.items()}  # type: ignore
    return {name: config for name, config in configs.items() if sizes.items() <= config.items()}


class DiTRecogniser(Recogniser):
    """Recognise weights with a DiT's entries. network: the class of the reference network."""

    family = dit.FAMILY
    models = DiT_models
    network: ClassVar[type[DiT]] = DiT

    def form(self, shapes: Shapes, metadata: Mapping[str, Any]) -> Fit:
        """Return the network of weights with these shapes, as Recogniser.form does. The
        heads are the file's, else those of the model with this depth, width and patch.
        """
        if len(shapes[PATCHES]) != 4:
            raise ValueError(f"{PATCHES} is {shapes[PATCHES]}, must have four dimensions")
        width, channels, patch, _ = shapes[PATCHES]
        depth = sum(name.endswith(".attn.qkv.weight") for name in shapes)
        sizes = dict(depth=depth, hidden_size=width, patch_size=patch)
        # The model of these sizes, else one with another patch: it has as many heads.
        named = models_with(self.models, **sizes)
        alike = named or models_with(self.models, depth=depth, hidden_size=width)
        usual = next((config["num_heads"] for config in alike.values()), None)
        options = self.options(shapes)
        of_file = options.pop("num_heads", metadata.get("num_heads"))
        heads = require_heads(of_file or usual, f"{self.family.name} of {depth} blocks", width)
        build = partial(
            self.network,
            **sizes,
            **options,
            in_channels=channels,
            num_heads=heads,
            learn_sigma=shapes[LAST][0] == 2 * channels * patch**2,
            input_size=16 * patch,
        )
        name = next(iter(named), f"{self.family.name}-{depth}x{width}/{patch}")
        standard = bool(named) and heads == usual
        return Fit(self.family, name, build, heads, assumes_heads=of_file is None, usual=standard)

    def options(self, shapes: Shapes) -> dict[str, Any]:
        """Return arguments of the constructor that only this family's entries say; num_heads
        among them if they do. The constructor multiplies mlp_ratio by the width and rounds down.
        """
        width = shapes[PATCHES][0]
        return {"mlp_ratio": (shapes["blocks.0.mlp.fc1.weight"][0] + 0.5) / width}

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
        if not state.keys() >= {*self.family.keys}:
            return None
        return OfModule(self.family, dict(num_heads=module.num_heads), **rules)


RECOGNISER = DiTRecogniser()
