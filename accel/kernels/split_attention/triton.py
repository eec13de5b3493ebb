"""Split attention by a Triton kernel, from sm_80 on."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.split_linear.triton import stages, store_high_low

TILE = dict(QUERIES=128, KEYS=32, num_warps=8, num_stages=2)


def attention(pair: Tensor, num_heads: int) -> Tensor:
    """pair (2, N, T, 3·D) float16 → (2, N, T, D)."""
    n, tokens, width = pair.shape[1:]
    dim = width // (3 * num_heads)
    out = torch.empty(2, n, tokens, num_heads * dim, dtype=torch.float16, device=pair.device)
    main = 1 << (dim.bit_length() - 1)
    config = {**TILE, **stages(pair, tokens % TILE["KEYS"] == 0 and dim == main)}
    numbers = pair[0].numel(), out[0].numel(), num_heads, 1 / (math.sqrt(dim) * math.log(2))
    rest = max(16, 1 << (dim - main - 1).bit_length()) if dim > main else 0
    with torch.cuda.device_of(pair):  # Triton launches on the current GPU
        grid = triton.cdiv(tokens, config["QUERIES"]), num_heads, n
        _split_attention[grid](pair, out, *numbers, TOKENS=tokens, DIM=dim, MAIN=main, REST=rest, **config)
    return out


@triton.jit
def _multiply(a_high, a_low, b_high, b_low, total):
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


# A head goes in two parts, 72 = 64 + 8 (of 16): Triton's tiles are powers of two.
@triton.jit
def _split_attention(
    qkv_ptr,
    out_ptr,
    low,
    out_low,
    heads,
    scale,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    step = 3 * heads * DIM  # from a token to the next
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    main = tl.arange(0, MAIN)
    qkv_ptr += sample * TOKENS * step + head * DIM
    k_ptr, v_ptr = qkv_ptr + heads * DIM, qkv_ptr + 2 * heads * DIM
    inside = (query < TOKENS)[:, None]
    at = query[:, None] * step + main[None, :]
    q_high, q_low = tl.load(qkv_ptr + at, inside, 0.0), tl.load(qkv_ptr + low + at, inside, 0.0)
    total = tl.zeros((QUERIES, MAIN), tl.float32)
    if REST:
        rest = MAIN + tl.arange(0, REST)
        in_rest = (rest < DIM)[None, :]
        at_rest = query[:, None] * step + rest[None, :]
        qr_high = tl.load(qkv_ptr + at_rest, inside & in_rest, 0.0)
        qr_low = tl.load(qkv_ptr + low + at_rest, inside & in_rest, 0.0)
        total_rest = tl.zeros((QUERIES, REST), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    for start in range(0, TOKENS, KEYS):
        key = start + tl.arange(0, KEYS)
        in_key = (key < TOKENS)[:, None]
        here = key[:, None] * step + main[None, :]
        k_high, k_low = tl.load(k_ptr + here, in_key, 0.0), tl.load(k_ptr + low + here, in_key, 0.0)
        s = _multiply(q_high, q_low, k_high.T, k_low.T, tl.zeros((QUERIES, KEYS), tl.float32))
        if REST:
            here_rest = key[:, None] * step + rest[None, :]
            kr_high = tl.load(k_ptr + here_rest, in_key & in_rest, 0.0)
            kr_low = tl.load(k_ptr + low + here_rest, in_key & in_rest, 0.0)
            s = _multiply(qr_high, qr_low, kr_high.T, kr_low.T, s)
        s = tl.where((key < TOKENS)[None, :], s * scale, float("-inf"))
        high = tl.maximum(top, tl.max(s, 1))
        factor = tl.exp2(top - high)
        p = tl.exp2(s - high[:, None] + 6)
        weight = weight * factor + tl.sum(p, 1)
        top = high
        p_high = p.to(tl.float16)
        p_low = (p - p_high.to(tl.float32)).to(tl.float16)
        v_high, v_low = tl.load(v_ptr + here, in_key, 0.0), tl.load(v_ptr + low + here, in_key, 0.0)
        total = total * factor[:, None] + _multiply(p_high, p_low, v_high, v_low, tl.zeros((QUERIES, MAIN), tl.float32))
        if REST:
            vr_high = tl.load(v_ptr + here_rest, in_key & in_rest, 0.0)
            vr_low = tl.load(v_ptr + low + here_rest, in_key & in_rest, 0.0)
            total_rest = total_rest * factor[:, None]
            total_rest += _multiply(p_high, p_low, vr_high, vr_low, tl.zeros((QUERIES, REST), tl.float32))
    out_ptr += (sample * TOKENS * heads + head) * DIM
    at = query[:, None] * heads * DIM + main[None, :]
    store_high_low(out_ptr + at, out_low, total / weight[:, None], inside)
    if REST:
        to = out_ptr + query[:, None] * heads * DIM + rest[None, :]
        store_high_low(to, out_low, total_rest / weight[:, None], inside & in_rest)
