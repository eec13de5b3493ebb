"""Attention by a Triton kernel for Ampere and Ada.

Head dim 72 costs 80 in q·kᵀ and in p·v; libraries pad it to 96. Compiled for Hopper (Triton 3.6)
the kernel is wrong by 50 % and more, also without asynchronous copies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.attention.hopper import HEAD_DIM, SCORE_SCALE

# Measured in log/ampere-h200.json. A head goes in two parts, 72 = 64 + 8 (of 16): Triton's tiles
# are powers of two.
TILE = {
    "DIM": HEAD_DIM,
    "MAIN": 64,
    "REST": 16,
    "QUERIES": 128,
    "KEYS": 64,
    "num_warps": 4,
    "num_stages": 2,
}


def attention(qkv: Tensor, kv: Tensor | None, num_heads: int) -> Tensor:
    """Launch the kernel: qkv (N, t, 3·H·72) half, contiguous → (N, t, H·72).

    kv (N, T, 2·H·72): keys and values in place of the packed ones.
    """
    keys = qkv if kv is None else kv
    assert qkv.is_contiguous() and keys.is_contiguous()
    n, queries, packed = qkv.shape
    width = num_heads * HEAD_DIM
    out = qkv.new_empty(n, queries, width)
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU
        _attention[(triton.cdiv(queries, TILE["QUERIES"]), num_heads, n)](
            qkv,
            qkv[..., width:] if kv is None else kv,
            out,
            queries,
            num_heads,
            packed,
            keys.shape[2],
            SCORE_SCALE,
            TOKENS=keys.shape[1],
            **TILE,
        )
    return out


# The first of the columns that are left over is 1 in every value: there p·v is the sum of the
# weights.
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
    head = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    key = tl.arange(0, KEYS)
    main = tl.arange(0, MAIN)[None, :]
    inside = (query < queries)[:, None]
    q_ptr += sample * queries * q_step + head * DIM + query[:, None] * q_step
    kv_ptr += sample * TOKENS * kv_step + head * DIM + key[:, None] * kv_step
    q = tl.load(q_ptr + main, inside, 0.0)
    total = tl.zeros((QUERIES, MAIN), tl.float32)
    rest = MAIN + tl.arange(0, REST)[None, :]
    in_rest = rest < DIM
    q_rest = tl.load(q_ptr + rest, inside & in_rest, 0.0)
    total_rest = tl.zeros((QUERIES, REST), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    for start in range(0, TOKENS, KEYS):
        k_ptr = kv_ptr + start * kv_step
        v_ptr = k_ptr + heads * DIM
        in_key = (
            (start + key < TOKENS)[:, None] if TOKENS % KEYS else tl.full((KEYS, 1), True, tl.int1)
        )
        s = tl.dot(q, tl.load(k_ptr + main, in_key, 0.0).T)
        s = tl.dot(q_rest, tl.load(k_ptr + rest, in_key & in_rest, 0.0).T, s)
        if TOKENS % KEYS:
            s = tl.where((start + key < TOKENS)[None, :], s, float("-inf"))
        high = tl.maximum(top, tl.max(s, 1) * scale)
        factor = tl.exp2(top - high)
        p = tl.exp2(s * scale - high[:, None]).to(q.dtype)
        top = high
        total = tl.dot(p, tl.load(v_ptr + main, in_key, 0.0), total * factor[:, None])
        v_rest = tl.where(in_rest, tl.load(v_ptr + rest, in_key & in_rest, 0.0), 1.0)
        total_rest = tl.dot(p, v_rest, total_rest * factor[:, None])
    weight = tl.sum(tl.where(rest == DIM, total_rest, 0.0), 1)[:, None]
    out_ptr += sample * queries * heads * DIM + head * DIM + query[:, None] * heads * DIM
    tl.store(out_ptr + main, (total / weight).to(q.dtype), inside)
    tl.store(out_ptr + rest, (total_rest / weight).to(q.dtype), inside & in_rest)
