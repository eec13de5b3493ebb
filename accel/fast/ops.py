"""A tier's ops: all that the loop over blocks (network.py) computes with, and how a
block's four GEMMs are laid out.

    Half     operands in half precision, sums in float32; float32 and float64 are for tests
    Split    float32's accuracy from float16 tensor cores: GEMMs and attention take and give
             high/low splits

Both have `device`, `part` and `tuner`; `dtype`, of a GEMM's weights as a family gives
them; `stream`, of the residual stream, norms, conditioning and last layer; `exchanges`,
the token exchanges that keep the tier's accuracy; the ops `adaln`, before a GEMM,
`last_adaln` and `attention`; `block` and `overflowed`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from accel.kernels.adaln import adaln, adaln_split
from accel.kernels.attention import attention
from accel.kernels.linear import Linear, Tuner
from accel.kernels.qk_norm_rotary import normalise, qk_norm_rotary, qk_norm_rotary_split
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import SplitLinear, balance, choose
from accel.kernels.swiglu import swiglu, swiglu_split
from accel.network import WHOLE, BlockNetwork, Part

# by name: weight (N, K) and bias (N,) of qkv, proj, fc1 and fc2
Gemms = dict[str, tuple[Tensor, Tensor | None]]


class Block(NamedTuple):
    """A block of the network, between its norms."""

    gemms: tuple[Linear | SplitLinear, ...]  # qkv, proj, fc1, fc2
    # (packed projection, its first token) → the same with q and k rotated; None: no
    # rotation
    rotate: Callable | None
    activate: Callable | None  # between fc1 and fc2; None: GELU, in the epilogue of fc1
    norms: Tensor | None  # (2, 2, D): weight and bias of the norm of queries, then of keys


class Rotation(NamedTuple):
    """The rotation of queries and keys, and their norm before it."""

    table: Tensor  # (T, d/2, 2): cosine and sine
    norms: Tensor | None = None  # as Block has them
    rms_eps: float | None = None  # ε of RMSNorm over each head; None: LayerNorm over all


class Half:
    """Half precision with float32 sums. tuner: chooses the GEMMs' algorithms. gemm: their
    backend.
    """

    exchanges = BlockNetwork.exchanges

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        tuner: Tuner | None = None,
        gemm: str = "auto",
        part: Part = WHOLE,
    ):
        self.dtype = dtype
        self.device = device
        self.tuner = tuner or Tuner()
        self.gemm = gemm
        self.part = part
        self.stream = torch.promote_types(dtype, torch.float32)
        self.adaln = partial(adaln, dtype=dtype)
        self.last_adaln = partial(adaln, dtype=self.stream)
        self.attention = attention

    def block(self, gemms: Gemms, gated: bool = False, rotation: Rotation | None = None) -> Block:
        """Return a block of a rank's part of four GEMMs. gated: fc1 is two matrices one
        below the other, for SwiGLU in place of GELU.
        """
        layers = tuple(
            Linear(weight, bias, gelu=index == 2 and not gated, tuner=self.tuner, backend=self.gemm)
            for index, (weight, bias) in enumerate(gemms.values())
        )
        rotate = rotation and partial(_rotate, qk_norm_rotary, self.part, rotation)
        return Block(layers, rotate, swiglu if gated else None, rotation and rotation.norms)

    def overflowed(self) -> str | None:
        """Return None: an overflow shows as an output that is not finite."""
        return None


class Split:
    """High/low splits of float16."""

    exchanges = ("ulysses",)  # the others' attention takes half precision
    dtype = stream = torch.float32

    def __init__(self, device: torch.device, gemm: str = "auto", part: Part = WHOLE):
        self.device = device
        self.part = part
        self.tuner = None
        self.watched = {}
        self.gemm = choose(device) if gemm == "auto" else gemm
        self.adaln = partial(adaln_split, stack=self.gemm == "cublas")
        self.last_adaln = partial(adaln, dtype=torch.float32)
        self.attention = split_attention

    def block(self, gemms: Gemms, gated: bool = False, rotation: Rotation | None = None) -> Block:
        """Lay out a block as Half.block does. Raises ValueError, naming the layer, for
        weights that are not finite.

        Powers of two move between neighbouring GEMMs: from q to k, from v to proj, from
        GELU's output to fc2. They change no bit of the function, but the values that are
        split get similar magnitudes. SwiGLU's output is scaled by the token.
        """
        names = list(gemms)
        layer = partial(SplitLinear, backend=self.gemm)
        (qkv, bq), (proj, bp), (fc1, b1), (fc2, b2) = (
            (weight, weight.new_zeros(len(weight)) if bias is None else bias)
            for weight, bias in gemms.values()
        )
        overflow = self._watch(names[0])
        rotate = None
        activate = None
        factor, norms = _balanced(qkv, bq, rotation)
        if rotation:  # its kernel splits and watches
            kernel = partial(qk_norm_rotary_split, overflow=overflow)
            overflow = None
            rotate = partial(_rotate, kernel, self.part, rotation._replace(norms=norms))
        attention = (
            layer(qkv * factor[:, None], bq * factor, overflow=overflow, name=names[0]),
            layer(proj / factor.chunk(3)[2], bp, scaled=False, name=names[1]),
        )
        if gated:
            activate = partial(swiglu_split, stack=self.gemm == "cublas")
            mlp = layer(fc1, b1, name=names[2]), layer(fc2, b2, name=names[3])
        else:
            after = balance(fc1, b1)
            mlp = (
                layer(fc1, b1, overflow=self._watch(names[2]), after=after, name=names[2]),
                layer(fc2 / after, b2, scaled=False, name=names[3]),
            )
        return Block((*attention, *mlp), rotate, activate, norms)

    def _watch(self, layer):
        """Return a flag that kernels set where a value of `layer` leaves float16's range."""
        self.watched[layer] = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.watched[layer]

    def overflowed(self) -> str | None:
        """Return the first layer with a value too large for a split, or None. Wait for
        the device.
        """
        flags = torch.cat([*self.watched.values()]).tolist()
        return next((layer for layer, flag in zip(self.watched, flags) if flag), None)


def _rotate(kernel, part, rotation, qkv, first):
    """Normalise and rotate q and k of the packed projection by `kernel`. A norm over
    heads that ranks divide is applied before, by tensor operations with the statistics of
    all ranks.
    """
    norms = rotation.norms
    if norms is not None and part.ranks > 1 and not rotation.rms_eps:
        normalise(qkv, norms, lambda mean: part.sum(mean) / part.ranks)
        norms = None
    return kernel(qkv, rotation.table, first=first, norms=norms, rms_eps=rotation.rms_eps)


def _balanced(qkv, bias, rotation):
    """Return powers of two for the outputs of qkv (3·D,), and the norms with theirs.
    Outputs that are rotated into each other have the same.
    """
    q, k, v = balance(qkv, bias).chunk(3)  # each (D,)
    norms = rotation and rotation.norms
    if norms is not None:
        q, k = (_balance_pairs(norm[0, :, None], norm[1]) for norm in norms)
    elif rotation:
        q, k = map(_balance_pairs, qkv.chunk(3)[:2], bias.chunk(3))
    even = torch.exp2(torch.log2(q / k).div(2).round())
    if norms is None:
        return torch.cat([even, 1 / even, v]), None
    one = torch.ones_like(even)
    return torch.cat([one, one, v]), norms * torch.stack([even, 1 / even])[:, None]


def _balance_pairs(weight, bias):
    """Balance weight (D, K) and bias (D,) with the same power of two for outputs 2i and 2i + 1."""
    # (D/2, 2·(K + 1))
    both = torch.cat([weight, bias[:, None]], 1).unflatten(0, (-1, 2)).flatten(1)
    return balance(both, both.new_zeros(len(both))).repeat_interleave(2)
