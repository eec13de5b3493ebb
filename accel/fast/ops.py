"""A tier's ops: all that the loop over blocks (network.py) computes with, and how a block's four GEMMs are laid out.

    Half     operands in half precision, sums in float32; float32 and float64 are for tests
    Split    float32's accuracy from float16 tensor cores: GEMMs and attention take and give high/low splits

Both have `device`, `part` and `tuner`; `dtype`, of a GEMM's weights as a family gives them; `stream`, of the residual
stream, norms, conditioning and last layer; `exchanges`, the token exchanges that keep the tier's accuracy; the ops
`adaln`, before a GEMM, `last_adaln` and `attention`; `block` and `overflowed`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.adaln import adaln, adaln_split
from accel.kernels.attention import attention
from accel.kernels.linear import Linear, Tuner
from accel.kernels.qk_norm_rotary import normalise, qk_norm_rotary
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import SplitLinear, balance, choose
from accel.kernels.swiglu import swiglu
from accel.network import WHOLE, BlockNetwork, Part
from accel.precision import TIERS

Gemms = dict[str, tuple[Tensor, Tensor | None]]  # by name: weight (N, K) and bias (N,) of qkv, proj, fc1 and fc2


class Block(NamedTuple):
    """A block of the network, between its norms."""

    gemms: tuple[Linear | SplitLinear, ...]  # qkv, proj, fc1, fc2
    rotate: Callable | None  # (packed projection, its first token) → the same with q and k rotated; None: no rotation
    activate: Callable | None  # between fc1 and fc2; None: GELU, in the epilogue of fc1
    norms: Tensor | None  # (2, 2, D): weight and bias of the norm of queries, then of keys


def of_tier(
    tier: str, device: torch.device, tuner: Tuner | None = None, gemm: str = "auto", part: Part = WHOLE
) -> "Half | Split":
    """The ops of an accelerated tier. tuner: chooses the GEMMs' algorithms. gemm: their backend."""
    return Split(device, gemm, part) if tier == "exact" else Half(TIERS[tier].dtype, device, tuner, gemm, part)


class Half:
    """Half precision with float32 sums."""

    exchanges = BlockNetwork.exchanges

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        tuner: Tuner | None = None,
        gemm: str = "auto",
        part: Part = WHOLE,
    ):
        self.dtype, self.device, self.tuner, self.gemm, self.part = dtype, device, tuner or Tuner(), gemm, part
        self.stream = torch.promote_types(dtype, torch.float32)
        self.adaln, self.last_adaln = partial(adaln, dtype=dtype), partial(adaln, dtype=self.stream)
        self.attention = attention

    def block(
        self, gemms: Gemms, gated: bool = False, rotation: Tensor | None = None, norms: Tensor | None = None
    ) -> Block:
        """A block of a rank's part of four GEMMs.

        gated: fc1 is two matrices one below the other, for SwiGLU in place of GELU. rotation (T, d/2, 2): of queries
        and keys. norms: as Block has them.
        """
        layers = tuple(
            Linear(weight, bias, gelu=index == 2 and not gated, tuner=self.tuner, backend=self.gemm)
            for index, (weight, bias) in enumerate(gemms.values())
        )
        rotate = None if rotation is None else partial(self._rotate, rotation, norms)
        return Block(layers, rotate, swiglu if gated else None, norms)

    def _rotate(self, rotation, norms, qkv, first):
        if norms is not None and self.part.ranks > 1:
            normalise(qkv, norms, lambda mean: self.part.sum(mean) / self.part.ranks)
            norms = None
        return qk_norm_rotary(qkv, rotation, first, norms)

    def overflowed(self) -> str | None:
        """None: what overflows is not finite in the output."""
        return None


class Split:
    """High/low splits of float16."""

    exchanges = ("ulysses",)  # the others' attention takes half precision
    dtype = stream = torch.float32

    def __init__(self, device: torch.device, gemm: str = "auto", part: Part = WHOLE):
        self.device, self.part, self.tuner, self.watched = device, part, None, {}
        self.gemm = choose(device) if gemm == "auto" else gemm
        self.adaln = partial(adaln_split, stack=self.gemm == "cublas")
        self.last_adaln, self.attention = partial(adaln, dtype=torch.float32), split_attention

    def block(
        self, gemms: Gemms, gated: bool = False, rotation: Tensor | None = None, norms: Tensor | None = None
    ) -> Block:
        """As Half.block. Raises ValueError, naming the layer, for weights that are not finite.

        Powers of two move between neighbouring GEMMs. They change no bit of the function, but bring what a high/low
        split has to hold to a like size: from q to k, from v to proj, from GELU's output to fc2.
        """
        if gated or rotation is not None:
            raise ValueError("precision 'exact' is for DiT only; take 'fp32'")
        (qkv, bq), (proj, bp), (fc1, b1), (fc2, b2) = gemms.values()
        q, k, v = balance(qkv, bq).chunk(3)  # each (D,)
        even = torch.exp2(torch.log2(q / k).div(2).round())
        factor = torch.cat([even, 1 / even, v])  # (3·D,)
        after, names = balance(fc1, b1), list(gemms)
        of_qkv, of_fc1 = (self._watch(names[index]) for index in (0, 2))
        layer = partial(SplitLinear, backend=self.gemm)
        layers = (
            layer(qkv * factor[:, None], bq * factor, result="high_low", overflow=of_qkv, name=names[0]),
            layer(proj / v, bp, name=names[1]),
            layer(fc1, b1, gelu=True, after=after, result="high_low", overflow=of_fc1, name=names[2]),
            layer(fc2 / after, b2, name=names[3]),
        )
        return Block(layers, None, None, None)

    def _watch(self, layer):
        """A flag that kernels set where a value of `layer` leaves float16's range."""
        self.watched[layer] = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.watched[layer]

    def overflowed(self) -> str | None:
        """The first layer with a value too large for a split, or None. Waits for the device."""
        flags = torch.cat([*self.watched.values()]).tolist()
        return next((layer for layer, flag in zip(self.watched, flags) if flag), None)
