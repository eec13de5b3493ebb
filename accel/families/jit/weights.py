"""Recognise the files and modules of a JiT, derive its sizes, and read how it is sampled."""

from collections.abc import Mapping
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accel.errors import UsageError, shown
from accel.families import Defaults, jit
from accel.families.config_file import in_words
from accel.families.dit.weights import PATCHES, DiTRecogniser, models_with
from accel.families.jit.network import JiT, JiT_models
from accel.families.lightning_dit.weights import swiglu_ratio
from accel.families.recognise import STRUCTURE, Fit, OfModule, Recipe
from accel.weights.metadata import RECIPE
from accel.weights.shapes import Shapes

FIRST, SECOND, FRONT = jit.FAMILY.keys[:3]  # the two projections of patches, and label positions
START = "in_context_start"  # the first block that sees the label's tokens: no tensor says it
OPTIONS = {  # arguments of training → options; interval_min and interval_max make another
    "img_size": "image_size",
    "cfg": "cfg_scale",
    "noise_scale": "noise_scale",
    "t_eps": "t_eps",
    "num_sampling_steps": "num_sampling_steps",
    "sampling_method": "sampler",
}


class JiTRecogniser(DiTRecogniser):
    """Recognise weights of a JiT. The norm of queries says how wide a head is."""

    family = jit.FAMILY
    models = JiT_models
    network = JiT
    # A SiLU between the projections, without an entry, and of other codes blocks in other orders.
    computed = {
        "use_nonlinear": (False,),
        "JiT_branch": ("none", "base", "False"),
        "loop_indices": ("[]", "()"),
        "loop_count": (1, 0),
    }

    def form(self, shapes: Shapes, metadata: Mapping[str, Any]) -> Fit:
        """Return the network of weights with these shapes, as Recogniser.form does."""
        width = shapes[SECOND][0]
        form = super().form({**shapes, PATCHES: (width, *shapes[FIRST][1:])}, metadata)
        depth = sum(name.endswith(".attn.qkv.weight") for name in shapes)
        alike = models_with(self.models, depth=depth, hidden_size=width)
        starts = [config[START] for config in alike.values()]
        start = metadata.get(START, *starts[:1])
        if not isinstance(start, int) or not 0 < start < depth:
            raise ValueError(
                f"is a JiT of {depth} blocks of width {width}, and no tensor says at which block "
                f"its label tokens enter; save {START} in its args, or load it into its class "
                "and use accel.Sampler(module)"
            )
        facts = {} if start in starts else {START: start}
        return form._replace(build=partial(form.build, in_context_start=start), facts=facts)

    def options(self, shapes: Shapes) -> dict[str, Any]:
        """Return arguments of the constructor that only this family's entries say."""
        width = shapes[SECOND][0]
        return dict(
            num_heads=width // shapes["blocks.0.attn.q_norm.weight"][0],
            mlp_ratio=swiglu_ratio(shapes, width),
            bottleneck_dim=shapes[FIRST][0],
            in_context_len=shapes[FRONT][1],
        )

    def recipe(self, fit: Fit, metadata: Mapping[str, Any], path: Path) -> Recipe:
        """Return the options that the arguments of the training run imply."""
        notices = []
        options = {option: metadata[name] for name, option in OPTIONS.items() if name in metadata}
        low = metadata.get("interval_min", 0)
        high = metadata.get("interval_max", 1)
        for name, value in {**options, "guidance_interval": (low, high)}.items():
            if not RECIPE[name](value):
                raise UsageError(
                    f"`ckpt={path}`: its training arguments say {name} {shown(value)}, which "
                    "cannot be; mend it"
                )
        says = {**metadata.get("recipe", {}), **options}
        if "noise_scale" not in says:
            notices.append(f"{path}: {assumed_noise(fit.defaults, fit.latent_size)}")
        if metadata.keys() & {"interval_min", "interval_max"}:  # of times: a level is 1 − time
            options["guidance_interval"] = 1 - high, 1 - low
        if options:
            notices.append(
                f"{path}: its training arguments say {in_words(options)}; flags override it"
            )
        return Recipe(options, tuple(notices))

    def of_module(self, module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
        """Return the rules to read a module with a JiT's entries, None for another module."""
        if not state.keys() >= {*self.family.keys}:
            return None
        facts: dict[str, Any] = {"num_heads": module.num_heads, START: module.in_context_start}
        model = self.form({name: tuple(state[name].shape) for name in state}, facts).model
        if model in self.family.models:
            facts["recipe"] = dict(cfg_scale=self.family.models[model].cfg_scale)
        side = isqrt(state["pos_embed"].shape[1]) * state[FIRST].shape[-1]
        assumed = assumed_noise(self.family.of_latents(self.family.recipe, 3, side), side)
        return OfModule(self.family, facts, strength=STRUCTURE, assumed=assumed)


RECOGNISER = JiTRecogniser()


def assumed_noise(defaults: Defaults, side: int | None) -> str:
    """Return the notice about the first noise's scale, which no tensor says."""
    return (
        f"says no scale of the first noise, taken for {defaults.noise_scale:g} as at {side} px; "
        "if it has another: --noise-scale N"
    )
