"""Norm and rotary embedding of queries and keys, in place on the packed projection.

The norm is optional: LayerNorm over all heads jointly, ε = 1e-5, or, with `rms_eps`, RMSNorm per
head. Then q and k are rotated (Su et al. 2021, arXiv:2104.09864).

    LayerNorm    x ← (x − mean(x)) / √(var(x) + ε) · weight + bias
    RMSNorm      x ← x / √(mean(x²) + ε) · weight + bias
    rotation     x_{2i} + j·x_{2i+1} ← (x_{2i} + j·x_{2i+1}) · exp(j·position·θ^(-2i/d))

Separate tensor operations would read or write q and k ten times; the kernel does it twice. All
arithmetic is in float32 or wider. For the exact tier q, k and v are returned split into high and
low.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.split_linear.high_low import LARGEST, HighLow, split

try:
    import triton
    import triton.language as tl

    from accel.kernels.split_linear.triton import store_high_low
except ImportError:  # torch for CPUs has no Triton: the reference is then the only backend
    triton = None

EPS = 1e-5


def qk_norm_rotary(
    qkv: Tensor,
    rotation: Tensor,
    first: int = 0,
    norms: Tensor | None = None,
    rms_eps: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Normalise and rotate q and k of qkv (N, t, 3·D) in place, and return qkv.

    q, k and v are concatenated, each head-major. rotation (T, d/2, 2): cosine and sine for every
    position. first: position of the first of the t tokens. norms (2, 2, D): weight and bias for q,
    then for k, or None. rms_eps: use RMSNorm per head with this ε instead of LayerNorm. The Triton
    kernel takes qkv in half precision or float32 and all other tensors in float32, contiguous; the
    reference takes any dtype.
    """
    if cuda.uses_triton(backend, qkv):
        _triton(qkv, rotation, first, norms, rms_eps)
    else:
        _torch(qkv, rotation, first, norms, rms_eps)
    return qkv


def qk_norm_rotary_split(
    qkv: Tensor,
    rotation: Tensor,
    overflow: Tensor,
    first: int = 0,
    norms: Tensor | None = None,
    rms_eps: float | None = None,
    backend: str = "auto",
) -> HighLow:
    """Apply `qk_norm_rotary` to a float32 projection, which may be overwritten.

    Return q, k and v (N, t, 3·D), split into high and low without scales. overflow: an int32 tensor
    of one element, set to 1 if a value is too large for float16.
    """
    if cuda.uses_triton(backend, qkv):
        pair = torch.empty(2, *qkv.shape, dtype=torch.float16, device=qkv.device)
        _triton(qkv, rotation, first, norms, rms_eps, pair, overflow)
        return HighLow(pair, None)
    _torch(qkv, rotation, first, norms, rms_eps)
    overflow |= (qkv.abs() > LARGEST).any().int()
    return split(qkv, per_row=False)


def _torch(qkv, rotation, first, norms, rms_eps):
    """Compute the reference, in place."""
    width = qkv.shape[-1] // 3
    cos, sin = rotation[first : first + qkv.shape[1], None].unbind(-1)  # each (t, 1, d/2)
    for part in (0, 1):
        x = qkv[..., part * width : (part + 1) * width]
        wide = x.to(rotation.dtype)
        if norms is not None and rms_eps is None:
            wide = F.layer_norm(wide, (width,), *norms[part], eps=EPS)
        elif norms is not None:
            wide = wide.unflatten(-1, (-1, 2 * rotation.shape[1]))  # (N, t, h, d)
            wide = F.rms_norm(wide, wide.shape[-1:], eps=rms_eps).flatten(2)
            wide = wide * norms[part, 0] + norms[part, 1]
        pairs = wide.unflatten(-1, (-1, *rotation.shape[1:]))  # (N, t, h, d/2, 2)
        real, imaginary = pairs.unbind(-1)
        turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        x.copy_(turned.flatten(2))


def _triton(qkv, rotation, first, norms, rms_eps, pair=None, overflow=None):
    """Launch the kernel, in place or into `pair`."""
    for tensor in (qkv, rotation, norms):
        assert tensor is None or tensor.is_contiguous()
    n, tokens, packed = qkv.shape
    high_low = pair is not None
    parts = 3 if high_low else 2  # number of parts to write, of q, k and v
    constants = config(packed // 3, 2 * rotation.shape[1])
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU
        _qk_norm_rotary[(n * tokens, parts)](
            qkv,
            pair if high_low else qkv,
            norms,
            rotation,
            overflow,
            tokens,
            first,
            qkv.numel(),  # from high to low
            NORM=norms is not None,
            OVER_HEADS=rms_eps is None,
            EPS=EPS if rms_eps is None else rms_eps,
            HIGH_LOW=high_low,
            **constants,
        )


def config(width: int, head: int) -> dict[str, int]:
    """Return launch constants. A program computes q, k or v of a token, 16 numbers per thread."""
    heads = width // head
    columns = triton.next_power_of_2(head)
    rows = triton.next_power_of_2(heads)
    return {
        "HEADS": heads,
        "HEAD": head,
        "ROWS": rows,
        "COLUMNS": columns,
        "num_warps": max(1, min(8, rows * columns // 512)),
    }


if triton:

    @triton.jit(do_not_specialize=["tokens", "first", "low"])
    def _qk_norm_rotary(
        qkv_ptr,
        out_ptr,
        norms_ptr,
        rotation_ptr,
        overflow_ptr,
        tokens,
        first,
        low,
        HEADS: tl.constexpr,
        HEAD: tl.constexpr,
        NORM: tl.constexpr,
        OVER_HEADS: tl.constexpr,
        EPS: tl.constexpr,
        HIGH_LOW: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Compute the heads of one token, a tile (ROWS, COLUMNS) with one head per row.

        OVER_HEADS: LayerNorm over all heads if true, else RMSNorm per head.
        """
        width: tl.constexpr = HEADS * HEAD
        token = tl.program_id(0)
        part = tl.program_id(1)
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        inside = (row < HEADS) & (column < HEAD)
        lane = row * HEAD + column
        place = (token.to(tl.int64) * 3 + part) * width + lane
        x = tl.load(qkv_ptr + place, inside, 0.0).to(tl.float32)
        value = x
        if NORM:
            if OVER_HEADS:
                x = tl.where(inside, x - tl.sum(tl.sum(x, 1), 0) / width, 0.0)
                square = tl.sum(tl.sum(x * x, 1), 0) / width
            else:
                square = (tl.sum(x * x, 1) / HEAD)[:, None]
            normed = inside & (part < 2)  # values have no norm
            weight = tl.load(norms_ptr + part * (2 * width) + lane, normed, 0.0)
            bias = tl.load(norms_ptr + part * (2 * width) + width + lane, normed, 0.0)
            x = x * tl.rsqrt(square + EPS) * weight + bias
        # A row of the table has d numbers; cosines and sines alternate, like the pairs of x.
        line = rotation_ptr + (first + token % tokens) * HEAD
        angle = tl.load(line + column, column < HEAD, 0.0)
        cos, sin = tl.split(tl.reshape(angle, (1, COLUMNS // 2, 2)))
        real, imaginary = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
        turned = tl.interleave(real * cos - imaginary * sin, real * sin + imaginary * cos)
        if HIGH_LOW:
            value = tl.where(part < 2, turned, value)
            store_high_low(out_ptr + place, low, value, inside)
            beyond = tl.max(tl.max((inside & (tl.abs(value) > 65504.0)).to(tl.int32), 1), 0)
            tl.store(overflow_ptr, 1, beyond > 0)
        else:
            tl.store(out_ptr + place, turned.to(out_ptr.dtype.element_ty), inside)
