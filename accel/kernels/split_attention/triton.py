"""Triton kernels before, between and after the two cuBLAS GEMMs of split attention.

They use no tensor cores, so they compile for any GPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.split_linear.triton import store_high_low, store_stack

LIFT = 2.0**15  # factor of the weights before the split, so that small ones keep their low parts
V_SCALE = 0.5  # factor of v − mean, which may be twice as large as v
ROWS = 32  # tokens per program
CENTRE_ROWS = 128  # tokens per iteration of `centre`, whose few programs must hide memory latency


def tile(dim: int) -> dict[str, int]:
    """Return launch constants for a head dim."""
    return {"DIM": dim, "LANES": triton.next_power_of_2(dim), "ROWS": ROWS}


def centre(pair: Tensor, num_heads: int) -> Tensor:
    """Return v's mean over the tokens, from its high half: (N, h, d) float32.

    It is exact enough, because operands subtract and merge adds the same numbers.
    """
    n, tokens, width = pair.shape[1:]
    out = torch.empty(n, num_heads, width // (3 * num_heads), device=pair.device)
    with torch.cuda.device_of(pair):  # Triton launches on the current GPU
        _attention_centre[(n * num_heads,)](
            pair,
            out,
            num_heads,
            TOKENS=tokens,
            num_warps=8,
            **tile(out.shape[-1]) | {"ROWS": CENTRE_ROWS},
        )
    return out


def operands(pair: Tensor, centre: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k (G, T, 3·d) and v − mean (G, 2·T, 2·d), float16, for G = `count` heads.

    The heads of all samples are numbered consecutively; `first` is the first of the group.
    """
    _, heads, dim = centre.shape
    tokens = pair.shape[2]
    q = pair.new_empty(count, tokens, 3 * dim)
    k = pair.new_empty(count, tokens, 3 * dim)
    v = pair.new_empty(count, tokens, 4 * dim)
    with torch.cuda.device_of(pair):
        _attention_operands[triton.cdiv(tokens, ROWS), count](
            pair,
            centre,
            q,
            k,
            v,
            tokens,
            heads,
            first,
            pair[0].numel(),  # from high to low
            SCALE=V_SCALE,
            **tile(dim),
        )
    return q, k, v.view(count, 2 * tokens, 2 * dim)


def softmax(scores: Tensor, dim: int) -> Tensor:
    """Return LIFT · softmax(scores/√d) as [low, high] (G, T, 2·T) float16.

    It overwrites scores (G, T, T) float32.
    """
    count, tokens, _ = scores.shape
    weights = scores.view(torch.float16)
    block = triton.next_power_of_2(tokens)
    with torch.cuda.device_of(scores):
        _attention_softmax[tokens, count](
            scores,
            weights,
            tokens,
            1 / (math.sqrt(dim) * math.log(2)),  # the kernel uses exp2
            LIFT=LIFT,
            BLOCK=block,
            num_warps=min(16, max(1, block // 1024)),  # few, so that sums need no barrier
        )
    return weights


def merge(mixed: Tensor, centre: Tensor, out: Tensor, first: int) -> None:
    """Write the sum of both parts of mixed (G, T, 2·d) float32, unscaled, plus the mean.

    out (2, N, T, D): a `new_stack`; only the G heads from `first` on are written.
    """
    _, heads, dim = centre.shape
    count, tokens, _ = mixed.shape
    with torch.cuda.device_of(mixed):
        _attention_merge[triton.cdiv(tokens, ROWS), count](
            mixed,
            centre,
            out,
            tokens,
            heads,
            first,
            SCALE=1 / (LIFT * V_SCALE),
            **tile(dim),
        )


@triton.jit
def _place(first, heads):
    """Return the sample and the head of a program."""
    return ((first + tl.program_id(1)) // heads).to(tl.int64), (first + tl.program_id(1)) % heads


@triton.jit
def _attention_centre(
    pair_ptr,
    out_ptr,
    heads,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    sample = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    lane = tl.arange(0, LANES)
    pair_ptr += sample * TOKENS * (3 * heads * DIM) + (2 * heads + head) * DIM + lane[None, :]
    total = tl.zeros((ROWS, LANES), tl.float32)
    for start in range(0, TOKENS, ROWS):
        token = start + tl.arange(0, ROWS)
        inside = (token < TOKENS)[:, None] & (lane < DIM)[None, :]
        total += tl.load(pair_ptr + token[:, None] * (3 * heads * DIM), inside, 0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) * DIM + lane, tl.sum(total, 0) / TOKENS, lane < DIM)


@triton.jit(do_not_specialize=["first"])
def _attention_operands(
    pair_ptr,
    centre_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tokens,
    heads,
    first,
    low,
    SCALE: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    sample, head = _place(first, heads)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (token < tokens)[:, None] & (lane < DIM)[None, :]
    width = heads * DIM
    pair_ptr += (sample * tokens + token)[:, None] * (3 * width) + head * DIM + lane[None, :]
    q_high = tl.load(pair_ptr, inside)
    q_low = tl.load(pair_ptr + low, inside)
    k_high = tl.load(pair_ptr + width, inside)
    k_low = tl.load(pair_ptr + width + low, inside)
    v = tl.load(pair_ptr + 2 * width, inside, 0.0).to(tl.float32)
    v += tl.load(pair_ptr + 2 * width + low, inside, 0.0).to(tl.float32)
    mean = tl.load(centre_ptr + (first + tl.program_id(1)) * DIM + lane, lane < DIM, 0.0)
    v = (v - mean[None, :]) * SCALE
    group = tl.program_id(1).to(tl.int64) * tokens * DIM
    at = group * 3 + token[:, None] * (3 * DIM) + lane[None, :]
    tl.store(q_ptr + at, q_high, inside)
    tl.store(q_ptr + at + DIM, q_low, inside)
    tl.store(q_ptr + at + 2 * DIM, q_high, inside)
    tl.store(k_ptr + at, k_low, inside)
    tl.store(k_ptr + at + DIM, k_high, inside)
    tl.store(k_ptr + at + 2 * DIM, k_high, inside)
    v_ptr += group * 4 + token[:, None] * (2 * DIM) + lane[None, :]
    store_high_low(v_ptr, DIM, v, inside)
    store_high_low(v_ptr + tokens * (2 * DIM), DIM, v, inside)


@triton.jit
def _attention_softmax(
    scores_ptr, weights_ptr, tokens, scale, LIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Replace the scores of a row with its weights, in place.

    This is safe because no weight is stored before all scores are loaded.
    """
    row = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    key = tl.arange(0, BLOCK)
    inside = key < tokens
    s = tl.load(scores_ptr + row * tokens + key, inside, float("-inf")) * scale
    p = tl.exp2(s - tl.max(s, 0))
    p = p * (LIFT / tl.sum(p, 0))
    low_ptr = weights_ptr + row * (2 * tokens) + key
    store_high_low(low_ptr + tokens, -tokens, p, inside)


@triton.jit(do_not_specialize=["first"])
def _attention_merge(
    mixed_ptr,
    centre_ptr,
    out_ptr,
    tokens,
    heads,
    first,
    SCALE: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    sample, head = _place(first, heads)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    inside = (token < tokens)[:, None] & (lane < DIM)[None, :]
    mixed_ptr += (tl.program_id(1).to(tl.int64) * tokens + token)[:, None] * (2 * DIM) + lane[
        None, :
    ]
    y = (tl.load(mixed_ptr, inside, 0.0) + tl.load(mixed_ptr + DIM, inside, 0.0)) * SCALE
    y += tl.load(centre_ptr + (first + tl.program_id(1)) * DIM + lane, lane < DIM, 0.0)[None, :]
    width = heads * DIM
    out_ptr += (sample * tokens + token)[:, None] * (3 * width) + head * DIM + lane[None, :]
    store_stack(out_ptr, width, y, inside)
