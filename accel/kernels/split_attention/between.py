"""What runs around cuBLAS's two GEMMs of split attention, by Triton kernels without tensor cores, which any GPU
compiles. The reference implementations are in reference.py."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.split_attention.reference import LIFT
from accel.kernels.split_linear.triton import store_high_low, store_stack

TOKENS = 32  # of a head that a program rearranges


def operands(pair: Tensor, num_heads: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `count` heads of all samples from `first` on: q, k (G, T, 3·d) and v (G, 2·T, 2·d) float16."""
    tokens, dim = pair.shape[2], pair.shape[3] // (3 * num_heads)
    q, k, v = (pair.new_empty(count, tokens, size * dim) for size in (3, 3, 4))
    tile = dict(DIM=dim, LANES=triton.next_power_of_2(dim), ROWS=TOKENS)
    with torch.cuda.device_of(pair):  # Triton launches on the current GPU
        _operands[triton.cdiv(tokens, TOKENS), count](pair, q, k, v, tokens, num_heads, first, pair[0].numel(), **tile)
    return q, k, v.view(count, 2 * tokens, 2 * dim)


def softmax(scores: Tensor, dim: int) -> Tensor:
    """scores (G, T, T) float32 → LIFT · softmax(scores/√d): low, high (G, T, 2·T) float16, in the scores' memory."""
    count, tokens, _ = scores.shape
    weights, block = scores.view(torch.float16), triton.next_power_of_2(tokens)
    with torch.cuda.device_of(scores):
        scale = 1 / (math.sqrt(dim) * math.log(2))
        _softmax[tokens, count](scores, weights, tokens, scale, LIFT=LIFT, BLOCK=block, num_warps=warps(block))
    return weights


def warps(block: int) -> int:
    """One warp to 1024 keys: its sums need no barrier."""
    return min(16, max(1, block // 1024))


def merge(mixed: Tensor, out: Tensor, num_heads: int, first: int) -> None:
    """mixed (G, T, 2·d) float32, two parts of a sum, divided by LIFT → the heads of out (2, N, T, D), a `new_stack`."""
    count, tokens, dim = len(mixed), mixed.shape[1], mixed.shape[2] // 2
    tile = dict(LIFT=LIFT, DIM=dim, LANES=triton.next_power_of_2(dim), ROWS=TOKENS)
    with torch.cuda.device_of(mixed):
        _merge[triton.cdiv(tokens, TOKENS), count](mixed, out, tokens, num_heads, first, **tile)


@triton.jit
def _place(first, heads):
    """The sample and the head that a program has."""
    return ((first + tl.program_id(1)) // heads).to(tl.int64), (first + tl.program_id(1)) % heads


@triton.jit(do_not_specialize=["first"])
def _operands(
    pair_ptr, q_ptr, k_ptr, v_ptr, tokens, heads, first, low, DIM: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    sample, head = _place(first, heads)
    token, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = (token < tokens)[:, None] & (lane < DIM)[None, :]
    width = heads * DIM
    pair_ptr += (sample * tokens + token)[:, None] * (3 * width) + head * DIM + lane[None, :]
    q_high, q_low = tl.load(pair_ptr, inside), tl.load(pair_ptr + low, inside)
    k_high, k_low = tl.load(pair_ptr + width, inside), tl.load(pair_ptr + width + low, inside)
    v_high, v_low = tl.load(pair_ptr + 2 * width, inside), tl.load(pair_ptr + 2 * width + low, inside)
    group = tl.program_id(1).to(tl.int64) * tokens * DIM
    at = group * 3 + token[:, None] * (3 * DIM) + lane[None, :]
    tl.store(q_ptr + at, q_high, inside)
    tl.store(q_ptr + at + DIM, q_low, inside)
    tl.store(q_ptr + at + 2 * DIM, q_high, inside)
    tl.store(k_ptr + at, k_low, inside)
    tl.store(k_ptr + at + DIM, k_high, inside)
    tl.store(k_ptr + at + 2 * DIM, k_high, inside)
    v_ptr += group * 4 + token[:, None] * (2 * DIM) + lane[None, :]
    again = v_ptr + tokens * (2 * DIM)
    tl.store(v_ptr, v_high, inside)
    tl.store(v_ptr + DIM, v_low, inside)
    tl.store(again, v_high, inside)
    tl.store(again + DIM, v_low, inside)


@triton.jit
def _softmax(scores_ptr, weights_ptr, tokens, scale, LIFT: tl.constexpr, BLOCK: tl.constexpr):
    """A row's weights take its scores' memory. None is stored before all are loaded: each needs their sum."""
    row = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    key = tl.arange(0, BLOCK)
    inside = key < tokens
    s = tl.load(scores_ptr + row * tokens + key, inside, float("-inf")) * scale
    p = tl.exp2(s - tl.max(s, 0))
    p = p * (LIFT / tl.sum(p, 0))
    low_ptr = weights_ptr + row * (2 * tokens) + key
    store_high_low(low_ptr + tokens, -tokens, p, inside)


@triton.jit(do_not_specialize=["first"])
def _merge(
    mixed_ptr,
    out_ptr,
    tokens,
    heads,
    first,
    LIFT: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    sample, head = _place(first, heads)
    token, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = (token < tokens)[:, None] & (lane < DIM)[None, :]
    mixed_ptr += (tl.program_id(1).to(tl.int64) * tokens + token)[:, None] * (2 * DIM) + lane[None, :]
    y = (tl.load(mixed_ptr, inside, 0.0) + tl.load(mixed_ptr + DIM, inside, 0.0)) * (1 / LIFT)
    width = heads * DIM
    out_ptr += (sample * tokens + token)[:, None] * (3 * width) + head * DIM + lane[None, :]
    store_stack(out_ptr, width, y, inside)
