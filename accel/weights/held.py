"""A network that the caller holds, in a Checkpoint's place: models.DiT, large_dit.DiT_Llama, sit.SiT, the original
classes, REPA's, the DiT of diffusers and pipelines with one."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accel.errors import UsageError
from accel.families.dit.network import DiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.sit.network import SiT
from accel.network import unwrapped
from accel.weights.diffusers_layout import check_config, from_diffusers
from accel.weights.identity import (
    LABELS,
    QK_NORM,
    Identity,
    different,
    like_dit,
    shapes_of,
    shapes_only,
)
from accel.weights.repa import is_repa, to_sit

FIRST = "blocks.0.attn.qkv.weight", "layers.0.attention.wq.weight"  # a weight of every DiT, of every Large-DiT
COMPARED = "eps", "approximate"  # attributes of submodules that decide their function, and are in no weight


class Held:
    """The weights of a network that the caller holds, and what they imply.

    module: wrapped and compiled ones are unwrapped; of a pipeline its transformer. `state`: the weights under the names
    of models.DiT or large_dit.DiT_Llama, not copied unless `copy`; REPA's are turned into a SiT's. `build` makes a
    model of their shape, as an entry of network.MODELS does; `model` is one without values. Raises UsageError, naming
    what differs, for another network.
    """

    def __init__(self, module: nn.Module, copy: bool = False):
        self.class_names = ()
        if not isinstance(module, nn.Module):
            self.class_names = _names(getattr(module, "labels", None))
            module = getattr(module, "transformer", module)  # a pipeline's
        if not isinstance(module, nn.Module):
            raise UsageError(f"{type(module).__name__}: is not a DiT; give a torch.nn.Module, or a pipeline with one")
        self.module = unwrapped(module)
        self.name = type(self.module).__name__
        self.config = getattr(self.module, "config", None) if hasattr(self.module, "transformer_blocks") else None
        self.flow, state = _is_flow(self.module), self.module.state_dict()
        self.of_repa = self.flow and is_repa(state)
        self.state = self.read(state)
        if copy:
            self.state = {name: value.clone() for name, value in self.state.items()}
        describe = next((read for first, read in zip(FIRST, (_dit, _large_dit)) if first in self.state), None)
        if describe is None:
            raise UsageError(f"{self.name}: is not a DiT: no {' and no '.join(FIRST)}")
        try:
            self.build, self.side = describe(self.module, self.state)
            if self.of_diffusers:
                self.build = partial(_like_diffusers, self.build)
        except (KeyError, AttributeError) as error:
            raise UsageError(f"{self.name}: is not a DiT: no {getattr(error, 'name', None) or error.args[0]}") from None
        rows = len(self.state[LABELS])
        embedder = getattr(self.module, "y_embedder", None)
        self.null_row = getattr(embedder, "num_classes", rows - 1) < rows  # the last, unless all are classes
        self.num_classes = rows - self.null_row
        if not self.null_row:
            self.build = partial(self.build, class_dropout_prob=0)
        with shapes_only():
            self.model = self.build(input_size=self.side, num_classes=self.num_classes)
        require_fit(self.name, self.state, self.model)
        self._require_attributes()

    def read(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the module → under our names. Raises UsageError if it is none."""
        state = {name: value.detach() for name, value in state.items()}
        if not self.of_diffusers:
            return to_sit(state) if self.of_repa else state
        try:
            state = from_diffusers(state, self.config.sample_size, self.config.patch_size)
            check_config(dict(self.config), state)
        except ValueError as error:
            raise UsageError(f"{self.name}: {str(error).removeprefix('ckpt: ')}") from None
        return state

    def identify(self, model: str | None = None, num_classes: int | None = None) -> Identity:
        """What options follow from the weights, as Checkpoint.identify. Raises UsageError."""
        if num_classes not in (None, self.num_classes):
            raise UsageError(f"`num_classes={num_classes}`: {self.name} has {self.num_classes} classes; drop it")
        how = self.num_classes, self.null_row, self.model.learn_sigma, self.side
        more = dict(class_names=self.class_names, flow=self.flow, channels=self.model.in_channels)
        return Identity(self.name, self.build, self.model.patch_size, *how, **more)

    def fetch(self) -> None:
        """They are here."""

    def close(self) -> None:
        """They stay until `release`."""

    def _require_attributes(self):
        theirs = dict(self.module.named_modules())
        for name, module in self.model.named_modules():
            for attribute in COMPARED:
                want = getattr(module, attribute, None)
                if want is not None and getattr(theirs.get(name), attribute, want) != want:
                    here = getattr(theirs[name], attribute)
                    raise UsageError(f"{self.name}: {name}.{attribute} is {here}, and only {want} is computed")

    @property
    def of_diffusers(self) -> bool:
        """Whether the module is diffusers' class: other names, other arguments, another embedding of t."""
        return self.config is not None

    def release(self) -> None:
        """Let go of the module and its weights. What they implied stays."""
        self.module = self.state = None

    def evaluate(self, x: Tensor, t: Tensor, y: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """The module's own output, of REPA's as a SiT's, or that with other `weights`, a state dict of the module."""
        inputs, named = (x, t, y), {}
        if self.of_diffusers:
            inputs, named = (x,), dict(timestep=t, class_labels=y)
        if self.of_repa:
            inputs = x, 1 - t, y
        if weights is None:  # not by __call__, which a module that was compiled in place compiles
            out = self.module.forward(*inputs, **named)
        else:
            out = functional_call(self.module, weights, inputs, named)
        if self.of_repa:
            return -out[0]
        return out.sample if self.of_diffusers else out


def _names(labels):
    """The name of every class by its number, from a DiTPipeline's numbers by name; () if a number has none."""
    names = [[] for _ in range(1 + max((labels or {}).values(), default=-1))]
    for name, number in (labels or {}).items():
        names[number].append(name)
    return tuple(map(", ".join, names)) if all(names) else ()


def require_fit(name: str, state: dict[str, Tensor], model: nn.Module) -> None:
    """Raise UsageError about `name` unless `state` has the entries of `model`, of their shapes, and no others."""
    wrong = different(shapes_of(state), model)
    if not wrong:
        return
    names = sorted(wrong, key=lambda name: wrong[name][0] is None)  # what the caller has is named first
    first, count = names[0], f" ({len(wrong)} entries differ)" if len(wrong) > 1 else ""
    have, want = wrong[first]
    if want is None:
        raise UsageError(f"{name}: {first} is no weight of a DiT, and would be ignored{count}")
    if have is None:
        raise UsageError(f"{name}: is not a DiT: no {first}{count}")
    raise UsageError(f"{name}: {first} is {have}, must be {want}{count}")


#################################################################################
#                        What weights and module say, by family                 #
#################################################################################


def _is_flow(module: nn.Module) -> bool:
    """Whether the module is a SiT: its keys and shapes are a DiT's, so its class says it."""
    return any(kind.__name__ == "SiT" for kind in type(module).__mro__)


def _dit(module: nn.Module, state: dict[str, Tensor]) -> tuple[Callable[..., nn.Module], int]:
    """A constructor of models.DiT or sit.SiT in the module's shape, and the side of its latents."""
    heads = module.config.num_attention_heads if hasattr(module, "transformer_blocks") else module.num_heads
    build = like_dit(shapes_of(state), heads, SiT if _is_flow(module) else DiT)
    return build, build.keywords["patch_size"] * isqrt(state["pos_embed"].shape[1])


def _large_dit(module: nn.Module, state: dict[str, Tensor]) -> tuple[Callable[..., nn.Module], int]:
    """The same of large_dit.DiT_Llama."""
    channels, patch, heads, dim = module.in_channels, module.patch_size, module.n_heads, len(state["x_embedder.weight"])
    hidden = len(state["layers.0.feed_forward.w1.weight"])
    shape = dict(patch_size=patch, in_channels=channels, dim=dim, n_heads=heads, qk_norm=QK_NORM in state)
    shape |= dict(
        n_layers=sum(name.endswith(".attention.wq.weight") for name in state),
        n_kv_heads=len(state["layers.0.attention.wk.weight"]) * heads // dim,
        multiple_of=1,
        ffn_dim_multiplier=(hidden + 0.5) / int(8 * dim / 3),
    )
    learn_sigma = len(state["final_layer.linear.weight"]) == 2 * channels * patch**2
    return partial(DiT_Llama, **shape, learn_sigma=learn_sigma), module.input_size


def _like_diffusers(build: Callable[..., nn.Module], **shape: Any) -> nn.Module:
    """A DiT that embeds timesteps as diffusers does, on the same weights another function of t."""
    model = build(**shape)
    model.t_embedder.timestep_embedding = diffusers_timestep_embedding
    return model


@lru_cache(maxsize=None)
def _frequencies(half, device):
    with torch.inference_mode(False):
        return torch.exp(-math.log(10000) * torch.arange(half, device="cpu") / (half - 1)).to(device)


def diffusers_timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """As models.TimestepEmbedder.timestep_embedding with frequencies 10000^(-i/(half-1)), where DiT has i/half: what
    diffusers' default frequency shift of 1 makes. t (N,) → (N, dim) float32, dim even."""
    args = t[:, None].float() * _frequencies(dim // 2, t.device)  # (N, dim/2)
    return torch.cat([args.cos(), args.sin()], dim=-1)
