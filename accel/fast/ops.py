"""A tier's ops: all that the loop over blocks (network.py) computes with, and a block's GEMMs.

    Half     operands in half precision, sums in float32; float32 and float64 are for tests
    Split    float32's accuracy from float16 tensor cores: GEMMs and attention take and give
             high/low splits

Both have the attributes

    device, tuner
    dtype            of a GEMM's weights as a family gives them
    stream           dtype of the residual stream, norms, conditioning and last layer
    adaln            the fused adaLN kernel before a GEMM
    last_adaln       the same before the last layer
    attention
    block            four GEMMs → a block
    linear           weights → a layer
    operand          a tensor → as a layer takes it
    overflowed       names a layer whose values left the number format's range
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.adaln import adaln, adaln_split
from accel.kernels.attention import attention
from accel.kernels.linear import Linear, Tuner
from accel.kernels.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_split
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import HighLow, SplitLinear, balance, choose_backend, split_rows
from accel.kernels.swiglu import swiglu_split
from accel.runtime.precision import true_float32


class GemmWeights(NamedTuple):
    """A GEMM as a family packs it."""

    name: str  # of the layer, for errors
    weight: Tensor  # (N, K)
    bias: Tensor | None = None  # (N,)

    def bias_or_zeros(self) -> Tensor:
        """Return the bias, zeros if there is none."""
        return self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias


# From this number of weights on, the split GEMM is faster than float32's own.
LARGE = 1 << 18


def splits(weight: Tensor) -> bool:
    """Return whether a float32 layer of this weight is faster as a split GEMM.

    It is for large ones on Hopper, as networks of latents with hundreds of channels have. There
    float32's own GEMM takes as long as several blocks.
    """
    large = weight.dtype == torch.float32 and weight.numel() >= LARGE
    in_eights = all(side % 8 == 0 for side in weight.shape)  # as the kernel takes them
    return large and in_eights and choose_backend(weight.device) == "hopper"


class Float32Linear:
    """A layer x (…, K) → (…, N) with the dtype and accuracy of the residual stream, in any tier.

    split: compute it by a split GEMM, a SplitLinear; by default where `splits` says so. half: x and
    the weight may be taken in half precision there; sums and results stay in float32.
    """

    def __init__(self, gemm: GemmWeights, split: bool | None = None, half: bool = False):
        weight = gemm.weight
        split = splits(weight) if split is None else split
        plain = [weight] if gemm.bias is None else [weight, gemm.bias]
        self.split: SplitLinear | None = None
        if split:
            bias = gemm.bias_or_zeros()
            self.split = SplitLinear(weight, bias, low=not half, name=gemm.name)
        self.tensors = list(self.split.parameters()) if self.split else plain

    def prepare(self, m: int) -> None:
        """Compile and load the kernels for M tokens, by a call on zeros."""
        if self.split is None:
            return
        if self.split.low:
            self(torch.zeros(m, self.split.depth, device=self.split.bias.device))
        else:  # another kernel makes its operand
            self.split.prepare(m)

    def parameters(self) -> Iterator[Tensor]:
        """Return the layer's tensors."""
        return iter(self.tensors)

    def operand(self, x: Tensor | HighLow) -> Tensor | HighLow:
        """Return x (…, K) as the layer takes it."""
        if self.split is None or isinstance(x, HighLow):
            return x
        if x.dtype in cuda.HALF_TYPES:
            return HighLow(x.half()[None], None)
        return split_rows(x)

    def __call__(self, x: Tensor | HighLow, position: Tensor | None = None) -> Tensor:
        """Apply the layer to a tensor, with `half` also to one in half precision, or an `operand`.

        position (t, N): added to the result (…, t, N) of a layer without bias.
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
    fc1: GemmWeights  # for SwiGLU two matrices, one below the other
    fc2: GemmWeights


class Rotation(NamedTuple):
    """The rotation of queries and keys, and their norm before it."""

    rotation: Tensor  # (T, d/2, 2): cosine and sine
    norms: Tensor | None = None  # (2, 2, D): weight and bias of the norm of queries, then of keys
    rms_eps: float | None = None  # ε of RMSNorm over each head; None: LayerNorm over all


class Block(NamedTuple):
    """A block of the network, between its norms."""

    qkv: Linear | SplitLinear
    proj: Linear | SplitLinear
    fc1: Linear | SplitLinear
    fc2: Linear | SplitLinear
    # (packed projection, first=its first token) → q and k rotated; None: qkv does it, or nobody.
    rotate: Callable | None
    activate: Callable | None  # between fc1 and fc2; None: fc1 does it
    rotation: Rotation | None  # its tensors depend on the weights

    @property
    def gemms(self) -> tuple[Linear | SplitLinear, ...]:
        """Return the GEMMs in the order of computation."""
        return self.qkv, self.proj, self.fc1, self.fc2


class HalfOps:
    """Half precision with float32 sums.

    tuner: chooses the GEMMs' algorithms. gemm: their backend.
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

    @property
    def updates_stream(self) -> bool:
        """Return whether GEMMs modulate the residual stream and add to it in their epilogues."""
        on_hopper = self.device.type == "cuda" and cuda.capability(self.device) == (9, 0)
        return on_hopper and self.dtype in cuda.HALF_TYPES and self.gemm == "auto"

    def block(
        self,
        gemms: BlockGemms,
        gated: bool = False,
        rotation: Rotation | None = None,
        updates_stream: bool = False,
    ) -> Block:
        """Return a block of four GEMMs.

        gated: SwiGLU in place of GELU; fc1 is then two matrices. updates_stream: both branches are
        added to the residual stream by their last GEMMs.
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
        """Return the layer of a GEMM. epilogue, rotation: as Linear has them."""
        return Linear(gemm.weight, gemm.bias, epilogue, rotation, self.tuner, self.gemm)

    def operand(self, x: Tensor) -> Tensor:
        """Return x (…, K) as a layer takes it."""
        return x.to(self.dtype)

    def overflowed(self) -> str | None:
        """Return None: an overflow shows as an output that is not finite."""
        return None


class SplitOps:
    """High/low splits of float16. gemm: the backend of the GEMMs."""

    dtype = torch.float32
    stream = torch.float32
    tuner = None

    def __init__(self, device: torch.device, gemm: str = "auto"):
        self.device = device
        self.gemm = choose_backend(device) if gemm == "auto" else gemm
        self.watched: dict[str, Tensor] = {}  # name of a layer → a flag on the device
        self.stack = self.gemm == "cublas"  # its GEMMs take high, low, high
        self.adaln = partial(adaln_split, stack=self.stack)
        self.last_adaln = partial(adaln, dtype=torch.float32)
        self.attention = split_attention

    def block(
        self, gemms: BlockGemms, gated: bool = False, rotation: Rotation | None = None
    ) -> Block:
        """Return a block of four GEMMs, as HalfOps.block does.

        Powers of two move between neighbouring GEMMs: from q to k, from v to proj, from GELU's
        output to fc2. They change no bit of the function, but the values that are split get
        similar magnitudes. SwiGLU's output is scaled by the token. Raises ValueError, naming the
        layer, for weights that are not finite.
        """
        qkv_bias = gemms.qkv.bias_or_zeros()
        factors = _balanced(gemms.qkv.weight, qkv_bias, rotation)
        overflow = self._watch(gemms.qkv.name)
        rotate = None
        if rotation is not None:  # its kernel splits the projection and watches it
            rotation = rotation._replace(norms=factors.norms)
            rotate = partial(qk_norm_rotary_split, overflow=overflow, **rotation._asdict())
            overflow = None
        qkv = self.linear(
            gemms.qkv._replace(
                weight=gemms.qkv.weight * factors.outputs[:, None],
                bias=qkv_bias * factors.outputs,
            ),
            overflow=overflow,
        )
        v_factors = factors.outputs.chunk(3)[2]
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
        """Return the layer of a GEMM. variant: SplitLinear's arguments."""
        return SplitLinear(
            gemm.weight,
            gemm.bias_or_zeros(),
            name=gemm.name,
            backend=self.gemm,
            **variant,
        )

    def operand(self, x: Tensor) -> HighLow:
        """Return x (…, K) as a layer takes it."""
        return split_rows(x, self.stack)

    def _watch(self, layer):
        """Return a flag that kernels set where a value of `layer` leaves float16's range."""
        self.watched[layer] = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.watched[layer]

    def overflowed(self) -> str | None:
        """Return the first layer with a value too large for a split, or None.

        Waits for the device.
        """
        flags = torch.cat([*self.watched.values()]).tolist()
        return next((layer for layer, flag in zip(self.watched, flags) if flag), None)


class _Factors(NamedTuple):
    """Powers of two that balance q, k and v."""

    outputs: Tensor  # (3·D,), of the outputs of qkv
    norms: Tensor | None  # the norms of queries and keys, multiplied by theirs


def _balanced(weight, bias, rotation):
    """Return the factors of q, k and v for the projection weight (3·D, K), bias (3·D,).

    Outputs that are rotated into each other have the same factor.
    """
    *weights, v_weight = weight.chunk(3)  # of q and k
    *biases, v_bias = bias.chunk(3)
    norms = None if rotation is None else rotation.norms
    if norms is not None:  # they decide the size
        weights = norms[:, 0, :, None]
        biases = norms[:, 1]
    q, k = map(balance if rotation is None else _balance_pairs, weights, biases)  # each (D,)
    even = torch.exp2(torch.log2(q / k).div(2).round())
    factors = torch.stack([even, 1 / even])  # (2, D), of q and k
    if norms is not None:
        norms = norms * factors[:, None]
        factors = torch.ones_like(factors)
    return _Factors(torch.cat([*factors, balance(v_weight, v_bias)]), norms)


def _balance_pairs(weight, bias):
    """Return `balance` of weight (D, K), bias (D,), the same for outputs 2i and 2i + 1."""
    rows = torch.cat([weight, bias[:, None]], 1)  # (D, K + 1)
    pairs = rows.unflatten(0, (-1, 2)).flatten(1)  # (D/2, 2·(K + 1))
    return balance(pairs, pairs.new_zeros(len(pairs))).repeat_interleave(2)
