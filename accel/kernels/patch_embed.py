"""The patch embedding in one pass: latents → tokens with their position, for both halves of a guided batch at once.

    token = W·patch + position        (Peebles & Xie 2023, arXiv:2212.09748, section 3.2; `position` holds the bias too)

A patch is 16 numbers and a token a thousand. As a GEMM, a sum and copies the tokens cross memory several times, here
once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.kernels import cuda
from accel.kernels.cuda import BACKENDS

try:
    import triton
    import triton.language as tl
except ImportError:  # on Windows and macOS: the reference is then the only backend
    triton = None

__all__ = ["BACKENDS", "patch_embed"]
TOKENS, COLUMNS = 16, 128  # of a program


def patch_embed(
    x: Tensor, weight: Tensor, position: Tensor, first: int = 0, copies: int = 1, backend: str = "auto"
) -> Tensor:
    """x (n, C, H, W), weight (D, C·p·p) as a convolution's → tokens (copies·n, T, D), the batch `copies` times.

    The T tokens are those from `first` on; their positions are position (T, D). Triton's kernel takes contiguous
    float32, the reference any dtype.
    """
    n, channels, height, width = x.shape
    (tokens, columns), patch = position.shape, round((weight.shape[1] / channels) ** 0.5)
    if not cuda.by_triton("patch_embed", backend, x):
        patches = F.pixel_unshuffle(x, patch).flatten(2).transpose(1, 2)[:, first : first + tokens]  # (n, T, C·p·p)
        out = F.linear(patches, weight)
        return (out.expand(copies, *out.shape) + position).flatten(0, 1)
    out = torch.empty(copies * n, tokens, columns, device=x.device)
    shape = dict(CHANNELS=channels, HEIGHT=height, WIDTH=width, PATCH=patch, D=columns, COPIES=copies)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        grid = triton.cdiv(columns, COLUMNS), triton.cdiv(tokens, TOKENS), n
        _patch_embed[grid](x, weight, position, out, n, first, tokens, **shape, TOKENS=TOKENS, COLUMNS=COLUMNS)
    return out


if triton:

    @triton.jit(do_not_specialize=["n", "first"])
    def _patch_embed(
        x_ptr,
        weight_ptr,
        position_ptr,
        out_ptr,
        n,
        first,
        tokens,
        CHANNELS: tl.constexpr,
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
        PATCH: tl.constexpr,
        D: tl.constexpr,
        COPIES: tl.constexpr,
        TOKENS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        SIDE: tl.constexpr = WIDTH // PATCH
        DEPTH: tl.constexpr = CHANNELS * PATCH * PATCH
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        picture = tl.program_id(2).to(tl.int64)
        in_column, in_token = column < D, token < tokens
        inside = in_token[:, None] & in_column[None, :]
        place = token[:, None] * D + column[None, :]
        total = tl.load(position_ptr + place, inside, 0.0)
        token += first
        corner = picture * (CHANNELS * HEIGHT * WIDTH) + token // SIDE * PATCH * WIDTH + token % SIDE * PATCH
        for k in range(DEPTH):  # on tensor cores this would be TF32 or float16
            at = x_ptr + corner + k // (PATCH * PATCH) * (HEIGHT * WIDTH) + k // PATCH % PATCH * WIDTH + k % PATCH
            pixel = tl.load(at, in_token, 0.0)
            total += pixel[:, None] * tl.load(weight_ptr + column * DEPTH + k, in_column, 0.0)[None, :]
        for copy in tl.static_range(COPIES):
            tl.store(out_ptr + (copy * n + picture) * tokens * D + place, total, inside)
