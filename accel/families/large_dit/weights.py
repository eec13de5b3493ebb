"""Recognise the files of a Large-DiT, and derive its sizes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from accel.families import large_dit
from accel.families.dit.weights import LAST, models_with, require_heads
from accel.families.large_dit.network import DiT_Llama, Large_DiT_models
from accel.families.recognise import Fit, OfModule, Recogniser
from accel.weights.shapes import Shapes

PATCHES = "x_embedder.weight"  # (D, C·p·p)
QK_NORM = "layers.0.attention.q_norm.weight"


class LargeDiTRecogniser(Recogniser):
    """Recognise weights of a Large-DiT."""

    family = large_dit.FAMILY
    models = Large_DiT_models

    def form(self, shapes: Shapes, metadata: Mapping[str, Any]) -> Fit:
        """Return the network of weights with these shapes, as Recogniser.form does.

        No tensor holds the number of heads, the patch and the channels. The metadata give
        them, else the model with this depth and width gives the heads, and patch and
        channels are 2 and 4.
        """
        depth = sum(name.endswith(".attention.wq.weight") for name in shapes)
        dim = shapes[PATCHES][0]
        sizes = dict(n_layers=depth, dim=dim)
        alike = models_with(self.models, **sizes)
        name = next(iter(alike), f"{self.family.name}-{depth}x{dim}/2")
        usual = next((config["n_heads"] for config in alike.values()), None)
        of_file = metadata.get("num_heads")
        heads = require_heads(of_file or usual, f"{self.family.name} of {depth} blocks", dim)
        qk_norm = QK_NORM in shapes
        if "qk_norm" in metadata and bool(metadata["qk_norm"]) != qk_norm:
            raise ValueError(
                f"model_args.pth says {'no ' * (not metadata['qk_norm'])}qk_norm, and the weights "
                f"{'have it' if qk_norm else 'have none'}; they are of two runs: copy the folder "
                "again, or remove it"
            )
        patch = metadata.get("patch_size", 2)
        channels = metadata.get("in_channels", 4)
        hidden = shapes["layers.0.feed_forward.w1.weight"][0]
        build = partial(
            DiT_Llama,
            **sizes,
            patch_size=patch,
            in_channels=channels,
            n_heads=heads,
            n_kv_heads=shapes["layers.0.attention.wk.weight"][0] * heads // dim,
            multiple_of=1,
            ffn_dim_multiplier=(hidden + 0.5) / int(8 * dim / 3),
            learn_sigma=shapes[LAST][0] == 2 * channels * patch**2,
            qk_norm=qk_norm,
        )
        return Fit(
            self.family, name, build, heads, assumes_heads=of_file is None, usual=heads == usual
        )

    def of_module(self, module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
        """Return the rules to read a module with a Large-DiT's entries, or None for another
        module.
        """
        if not state.keys() >= {*self.family.keys}:
            return None
        facts = dict(
            num_heads=len(state[PATCHES]) // module.layers[0].attention.head_dim,
            patch_size=module.patch_size,
            in_channels=module.in_channels,
        )
        return OfModule(self.family, facts, module.input_size)


RECOGNISER = LargeDiTRecogniser()
