"""Ops of a tier, with which accel/fast/network.py computes.

    DirectOps   operands in one dtype: half precision with float32 sums; float32, for fp32-fused;
                float64, for tests
    SplitOps    float32 accuracy on float16 tensor cores: GEMMs and attention use high/low splits

Both have the attributes

    device, tuner
    dtype            dtype in which families load the weights of GEMMs
    stream           dtype of the residual stream, norms, conditioning and last layer
    adaln            the fused adaLN kernel before a GEMM
    last_adaln       the fused adaLN kernel before the last layer
    attention        packed q, k, v → attention
    block            weights of four GEMMs → Block
    linear           weights of a GEMM → layer
    operand          tensor → input of a layer
    splits_outer_layers  whether float32 layers outside blocks may be split GEMMs
    overflowed       returns the name of a layer with values out of range, or None
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda, gpu
from accel.kernels.adaln import adaln, adaln_split
from accel.kernels.attention import attention
from accel.kernels.linear import Linear, Tuner
from accel.kernels.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_split
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import HighLow, SplitLinear, balance, choose_backend, split_rows
from accel.kernels.swiglu import swiglu_split
from accel.runtime.precision import true_float32


class GemmWeights(NamedTuple):
    """Weights of a GEMM, packed by a family."""

    name: str  # names the layer in errors
    weight: Tensor  # (N, K)
    bias: Tensor | None = None  # (N,)

    def bias_or_zeros(self) -> Tensor:
        """Return the bias, or zeros."""
        return self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias


# Minimum number of weights for which a split GEMM is faster than a float32 GEMM.
MIN_SPLIT_WEIGHTS = 1 << 18


def splits(weight: Tensor) -> bool:
    """Return whether a float32 layer with this weight is faster as a split GEMM.

    This is the case for large layers on Hopper, e.g. of networks whose latents have hundreds of
    channels: a float32 GEMM would take as long as several blocks.
    """
    large = weight.dtype == torch.float32 and weight.numel() >= MIN_SPLIT_WEIGHTS
    supported = all(side % 8 == 0 for side in weight.shape)
    return large and supported and choose_backend(weight.device) == "hopper"


class Float32Linear:
    """A layer x (…, K) → (…, N) with the dtype and accuracy of the residual stream, in any tier.

    split: compute with SplitLinear; by default decided by `splits`. half: SplitLinear may use x and
    weight in half precision; sums and results remain float32.
    """

    def __init__(self, gemm: GemmWeights, split: bool | None = None, half: bool = False):
        weight = gemm.weight
        split = splits(weight) if split is None else split
        plain = [weight] if gemm.bias is None else [weight, gemm.bias]
        self.split: SplitLinear | None = None
        if split:
            self.split = SplitLinear(weight, gemm.bias_or_zeros(), low=not half, name=gemm.name)
        self.tensors = list(self.split.parameters()) if self.split else plain

    def prepare(self, m: int) -> None:
        """Compile and load the kernels for M tokens, with a call on zeros."""
        if self.split is None:
            return
        if self.split.low:
            self(torch.zeros(m, self.split.depth, device=self.split.bias.device))
        else:  # its operand is not made by split_rows
            self.split.prepare(m)

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        return iter(self.tensors)

    def operand(self, x: Tensor | HighLow) -> Tensor | HighLow:
        """Convert x (…, K) to the layer's input."""
        if self.split is None or isinstance(x, HighLow):
            return x
        if x.dtype in cuda.HALF_TYPES:
            return HighLow(x.half()[None], None)
        return split_rows(x)

    def __call__(self, x: Tensor | HighLow, position: Tensor | None = None) -> Tensor:
        """Apply the layer to x (…, K), or to its `operand`.

        With `half`, x may be in half precision. position (t, N): added to the result (…, t, N); the
        layer has no bias then.
        """
        if self.split is not None:
            return self.split(self.operand(x), position)  # type: ignore[arg-type, return-value]
        value = x.value() if isinstance(x, HighLow) else x
        with true_float32():
            y = F.linear(value.to(self.tensors[0].dtype), *self.tensors)
        return y if position is None else y + position


class BlockGemms(NamedTuple):
    """The four GEMMs of a block."""

    qkv: GemmWeights
    proj: GemmWeights
    fc1: GemmWeights  # two matrices for SwiGLU, stacked
    fc2: GemmWeights


class Rotation(NamedTuple):
    """Rotary embedding of queries and keys, and the norm before it."""

    rotation: Tensor  # (T, d/2, 2): cosine and sine for every position
    norms: Tensor | None = None  # (2, 2, D): weight and bias for queries, then for keys
    rms_eps: float | None = None  # ε of RMSNorm per head; None: LayerNorm over all heads


class Block(NamedTuple):
    """The layers of a transformer block, without its norms."""

    qkv: Linear | SplitLinear
    proj: Linear | SplitLinear
    fc1: Linear | SplitLinear
    fc2: Linear | SplitLinear
    # (packed projection, first=position of its first token) → rotated; None if qkv rotates, or if
    # there is no rotation.
    rotate: Callable | None
    activate: Callable | None  # between fc1 and fc2; None if it is an epilogue of fc1
    rotation: Rotation | None  # its tensors are among the parameters

    @property
    def gemms(self) -> tuple[Linear | SplitLinear, ...]:
        """Return the GEMMs in the order of computation."""
        return self.qkv, self.proj, self.fc1, self.fc2


class DirectOps:
    """Ops on operands of one dtype. GEMMs of half precision sum in float32.

    tuner: chooses the algorithms of GEMMs. gemm: the backend of GEMMs.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        tuner: Tuner | None = None,
        gemm: str = "auto",
    ):
        self.dtype = dtype
        self.device = device
        self.tuner = tuner or Tuner()
        self.gemm = gemm
        self.stream = torch.promote_types(dtype, torch.float32)
        self.adaln = partial(adaln, dtype=dtype)
        self.last_adaln = partial(adaln, dtype=self.stream)
        self.attention = attention
        self.splits_outer_layers = dtype in cuda.HALF_TYPES

    @property
    def updates_stream(self) -> bool:
        """Return whether epilogues can modulate the residual stream and add to it."""
        on_hopper = self.device.type == "cuda" and gpu.capability(self.device) == (9, 0)
        return on_hopper and self.dtype in cuda.HALF_TYPES and self.gemm == "auto"

    def block(
        self,
        gemms: BlockGemms,
        gated: bool = False,
        rotation: Rotation | None = None,
        updates_stream: bool = False,
    ) -> Block:
        """Return a block of four GEMMs.

        gated: SwiGLU instead of GELU; fc1 then consists of two matrices. updates_stream: proj and
        fc2 add their results to the residual stream.
        """
        last = "residual" if updates_stream else ""
        qkv = self.linear(gemms.qkv)
        rotate = None
        if rotation is not None and rotation.norms is None:
            qkv = self.linear(gemms.qkv, "rotate", rotation.rotation)
        elif rotation is not None:
            rotate = partial(qk_norm_rotary, **rotation._asdict())
        return Block(
            qkv=qkv,
            proj=self.linear(gemms.proj, last),
            fc1=self.linear(gemms.fc1, "swiglu" if gated else "gelu"),
            fc2=self.linear(gemms.fc2, last),
            rotate=rotate,
            activate=None,
            rotation=rotation,
        )

    def linear(
        self, gemm: GemmWeights, epilogue: str = "", rotation: Tensor | None = None
    ) -> Linear:
        """Return the layer of a GEMM. epilogue, rotation: arguments of Linear."""
        return Linear(gemm.weight, gemm.bias, epilogue, rotation, self.tuner, self.gemm)

    def operand(self, x: Tensor) -> Tensor:
        """Convert x (…, K) to a layer's input."""
        return x.to(self.dtype)

    def overflowed(self) -> str | None:
        """Return None. Overflows make the output infinite or NaN instead."""
        return None


class SplitOps:
    """Ops on high/low splits of float16. gemm: the backend of GEMMs."""

    dtype = torch.float32
    stream = torch.float32
    tuner = None
    splits_outer_layers = True

    def __init__(self, device: torch.device, gemm: str = "auto"):
        self.device = device
        self.gemm = choose_backend(device) if gemm == "auto" else gemm
        self.watched: dict[str, Tensor] = {}  # name of a layer → flag on the device
        self.stack = self.gemm == "cublas"  # its operands are [high, low, high]
        self.adaln = partial(adaln_split, stack=self.stack)
        self.last_adaln = partial(adaln, dtype=torch.float32)
        self.attention = split_attention

    def block(
        self, gemms: BlockGemms, gated: bool = False, rotation: Rotation | None = None
    ) -> Block:
        """Return a block of four GEMMs; see DirectOps.block.

        Powers of two are moved between neighbouring GEMMs: from q to k, from v to proj, and from
        GELU's output to fc2. This does not change the function, but brings the values to be split
        to similar magnitudes. SwiGLU's output has a scale per token instead. Raises ValueError,
        naming the layer, if weights are not finite.
        """
        qkv_bias = gemms.qkv.bias_or_zeros()
        factors, norms = _balanced(gemms.qkv.weight, qkv_bias, rotation)
        overflow = self._watch(gemms.qkv.name)
        rotate = None
        if rotation is not None:  # its kernel splits the projection and sets the flag
            rotation = rotation._replace(norms=norms)
            rotate = partial(qk_norm_rotary_split, overflow=overflow, **rotation._asdict())
            overflow = None
        qkv = self.linear(
            gemms.qkv._replace(
                weight=gemms.qkv.weight * factors[:, None],
                bias=qkv_bias * factors,
            ),
            overflow=overflow,
        )
        v_factors = factors.chunk(3)[2]
        proj = self.linear(
            gemms.proj._replace(weight=gemms.proj.weight / v_factors),
            scaled=False,
        )
        if gated:
            fc1 = self.linear(gemms.fc1)
            fc2 = self.linear(gemms.fc2)
            activate = partial(swiglu_split, stack=self.stack)
        else:
            gelu_scale = balance(gemms.fc1.weight, gemms.fc1.bias_or_zeros())
            fc1 = self.linear(
                gemms.fc1, overflow=self._watch(gemms.fc1.name), gelu_scale=gelu_scale
            )
            fc2 = self.linear(
                gemms.fc2._replace(weight=gemms.fc2.weight / gelu_scale),
                scaled=False,
            )
            activate = None
        return Block(qkv, proj, fc1, fc2, rotate, activate, rotation)

    def linear(self, gemm: GemmWeights, **variant: Any) -> SplitLinear:
        """Return the layer of a GEMM. variant: arguments of SplitLinear."""
        return SplitLinear(
            gemm.weight,
            gemm.bias_or_zeros(),
            name=gemm.name,
            backend=self.gemm,
            **variant,
        )

    def operand(self, x: Tensor) -> HighLow:
        """Convert x (…, K) to a layer's input."""
        return split_rows(x, self.stack)

    def _watch(self, layer):
        """Return a flag that kernels set if a value of `layer` exceeds float16's range."""
        self.watched[layer] = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.watched[layer]

    def overflowed(self) -> str | None:
        """Return the first layer with a value too large for a split, or None.

        Synchronises with the device.
        """
        flags = torch.cat([*self.watched.values()]).tolist()
        return next((layer for layer, flag in zip(self.watched, flags) if flag), None)


def _balanced(weight, bias, rotation):
    """Return powers of two that bring q, k and v of a projection to similar magnitudes: factors
    (3·D,) for its outputs, and `Rotation.norms` multiplied by the factors of q and k.

    weight (3·D, K), bias (3·D,). Two outputs that form a rotated pair have the same factor.
    """
    *weights, v_weight = weight.chunk(3)  # of q and k
    *biases, v_bias = bias.chunk(3)
    norms = None if rotation is None else rotation.norms
    if norms is not None:  # they determine the magnitudes of q and k
        weights = norms[:, 0, :, None]
        biases = norms[:, 1]
    q, k = map(balance if rotation is None else _balance_pairs, weights, biases)  # each (D,)
    q_factors = torch.exp2(torch.log2(q / k).div(2).round())
    factors = torch.stack([q_factors, 1 / q_factors])  # (2, D): of q, then of k
    if norms is not None:
        norms = norms * factors[:, None]
        factors = torch.ones_like(factors)
    return torch.cat([*factors, balance(v_weight, v_bias)]), norms


def _balance_pairs(weight, bias):
    """Return `balance` of weight (D, K) and bias (D,), equal for outputs 2i and 2i + 1."""
    rows = torch.cat([weight, bias[:, None]], 1)  # (D, K + 1)
    pairs = rows.unflatten(0, (-1, 2)).flatten(1)  # (D/2, 2·(K + 1))
    return balance(pairs, pairs.new_zeros(len(pairs))).repeat_interleave(2)
