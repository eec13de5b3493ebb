"""The patch embedding in one pass: latents → tokens with their position, for both halves of a guided batch at once.

    token = W·patch + position        (Peebles & Xie 2023, arXiv:2212.09748, section 3.2; the projection's bias is part of `position` here)

A patch is 16 numbers and a token a thousand: as a product, a sum and copies the tokens cross the memory several times, here once.
"""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every platform; the twin is then the only route
    triton = None

TOKENS, COLUMNS = 16, 128  # of a program


def patch_embed(x, weight, position, first=0, copies=1, route="auto"):
    """x (n, C, H, W), weight (D, C·p·p) as a convolution's → tokens (copies·n, T, D), the batch `copies` times over: the T of them from `first`
    on, whose positions are position (T, D).

    `route`: "triton" (float32, contiguous), "torch" (the plain twin, any dtype), or "auto": triton for float32 on a GPU.
    """
    if route == "auto":
        route = "triton" if triton and x.is_cuda and x.dtype == torch.float32 else "torch"
    patch = round((weight.shape[1] / x.shape[1]) ** 0.5)
    return {"triton": _triton, "torch": _torch}[route](x, weight, position, first, copies, patch)


def _torch(x, weight, position, first, copies, patch):
    patches = F.pixel_unshuffle(x, patch).flatten(2).transpose(1, 2)[:, first : first + len(position)]  # (n, T, C·p·p)
    tokens = F.linear(patches, weight)
    return (tokens.expand(copies, *tokens.shape) + position).flatten(0, 1)


def _triton(x, weight, position, first, copies, patch):
    if triton is None:
        raise RuntimeError("the embedding's kernel needs Triton: pip install triton, or take route='torch'")
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in (x, weight, position)):
        raise TypeError("the embedding's kernel takes contiguous float32 tensors")
    n, channels, height, width = x.shape
    tokens, columns = position.shape
    out = torch.empty(copies * n, tokens, columns, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _patch_embed[(triton.cdiv(columns, COLUMNS), triton.cdiv(tokens, TOKENS), n)](
            x,
            weight,
            position,
            out,
            n,
            first,
            tokens,
            CHANNELS=channels,
            HEIGHT=height,
            WIDTH=width,
            PATCH=patch,
            D=columns,
            COPIES=copies,
            TOKENS=TOKENS,
            COLUMNS=COLUMNS,
        )
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
        for k in range(DEPTH):  # products of tensor cores would be TF32 or float16
            pixel = tl.load(
                x_ptr + corner + k // (PATCH * PATCH) * (HEIGHT * WIDTH) + k // PATCH % PATCH * WIDTH + k % PATCH,
                in_token,
                0.0,
            )
            total += pixel[:, None] * tl.load(weight_ptr + column * DEPTH + k, in_column, 0.0)[None, :]
        for copy in tl.static_range(COPIES):
            tl.store(out_ptr + (copy * n + picture) * tokens * D + place, total, inside)
