"""Attention by a Triton kernel for Ampere and Ada. Head dim 72 costs 80 in q·kᵀ and in p·v; libraries pad it to 96.

Compiled for Hopper (Triton 3.6) it is wrong by 50 % and more, with masked loads and without asynchronous copies too.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = dict(QUERIES=128, KEYS=64, num_warps=4, num_stages=2)  # log/ampere-h200.json


def attention(qkv: Tensor, kv: Tensor | None, num_heads: int) -> Tensor:
    """qkv (N, t, 3·D) half, contiguous → (N, t, D). kv (N, T, 2·D): keys and values in place of the packed ones."""
    keys = qkv if kv is None else kv
    if not qkv.is_contiguous() or not keys.is_contiguous():
        raise ValueError("attention: backend 'triton' takes contiguous tensors")
    n, queries, packed = qkv.shape
    width = packed // 3
    dim, tokens, out = width // num_heads, keys.shape[1], qkv.new_empty(n, queries, width)
    main = 1 << (dim.bit_length() - 1)
    rest = max(16, 1 << (dim - main - 1).bit_length()) if dim > main else 0
    tensors = qkv, qkv[..., width:] if kv is None else kv, out
    numbers = queries, num_heads, packed, keys.shape[2], 1 / (math.sqrt(dim) * math.log(2))
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU
        grid = triton.cdiv(queries, TILE["QUERIES"]), num_heads, n
        _attention[grid](*tensors, *numbers, TOKENS=tokens, DIM=dim, MAIN=main, REST=rest, **TILE)
    return out


# A head goes in two parts, 72 = 64 + 8 (of 16): Triton's tiles are powers of two. The first column that is left over
# is 1 in every value: what p·v gives there is the sum of the weights.
@triton.jit
def _attention(
    q_ptr,
    kv_ptr,
    out_ptr,
    queries,
    heads,
    q_step,
    kv_step,
    scale,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    SPARE: tl.constexpr = MAIN + REST > DIM
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, key = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    main = tl.arange(0, MAIN)[None, :]
    inside = (query < queries)[:, None]
    q_ptr += sample * queries * q_step + head * DIM + query[:, None] * q_step
    kv_ptr += sample * TOKENS * kv_step + head * DIM + key[:, None] * kv_step
    q = tl.load(q_ptr + main, inside, 0.0)
    total = tl.zeros((QUERIES, MAIN), tl.float32)
    if REST:
        rest = MAIN + tl.arange(0, REST)[None, :]
        in_rest = rest < DIM
        q_rest = tl.load(q_ptr + rest, inside & in_rest, 0.0)
        total_rest = tl.zeros((QUERIES, REST), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    for start in range(0, TOKENS, KEYS):
        k_ptr = kv_ptr + start * kv_step
        v_ptr = k_ptr + heads * DIM
        in_key = (start + key < TOKENS)[:, None] if TOKENS % KEYS else tl.full((KEYS, 1), True, tl.int1)
        s = tl.dot(q, tl.load(k_ptr + main, in_key, 0.0).T)
        if REST:
            s = tl.dot(q_rest, tl.load(k_ptr + rest, in_key & in_rest, 0.0).T, s)
        if TOKENS % KEYS:
            s = tl.where((start + key < TOKENS)[None, :], s, float("-inf"))
        high = tl.maximum(top, tl.max(s, 1) * scale)
        factor = tl.exp2(top - high)
        p = tl.exp2(s * scale - high[:, None])
        top = high
        if not SPARE:
            weight = weight * factor + tl.sum(p, 1)
        p = p.to(q.dtype)
        total = tl.dot(p, tl.load(v_ptr + main, in_key, 0.0), total * factor[:, None])
        if REST:
            v_rest = tl.load(v_ptr + rest, in_key & in_rest, 0.0)
            if SPARE:
                v_rest = tl.where(in_rest, v_rest, 1.0)
            total_rest = tl.dot(p, v_rest, total_rest * factor[:, None])
    if SPARE:
        weight = tl.sum(tl.where(rest == DIM, total_rest, 0.0), 1)
    out_ptr += sample * queries * heads * DIM + head * DIM + query[:, None] * heads * DIM
    tl.store(out_ptr + main, (total / weight[:, None]).to(q.dtype), inside)
    if REST:
        tl.store(out_ptr + rest, (total_rest / weight[:, None]).to(q.dtype), inside & in_rest)
