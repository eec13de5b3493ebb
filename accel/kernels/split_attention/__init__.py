"""Self-attention at float32 accuracy on tensor cores, from and to split terms (accel.kernels.split_linear).

softmax(q·kᵀ/√d)·v: scores of three products, float32 softmax; weights are split too, and every tile's p·v is summed by itself and then added to the
output in float32, since tensor cores truncate when they accumulate. Weights run up to 2⁶, not 1, so that the low terms of small ones are not
lost; the sums carry the same factor.
"""

import math
from functools import lru_cache

import torch

from accel.kernels.split_linear import Terms, split, split_multiply, stages

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TRITON = dict(QUERIES=128, KEYS=32, num_warps=8, num_stages=2)  # Triton's tile
ROUTES = ("auto", "hopper", "triton", "cublas", "torch")


@lru_cache(None)
def choose(device, dim):
    """The route that "auto" takes."""
    if device.type != "cuda":
        return "torch"
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0) and dim == 72:
        return "hopper"
    return "triton" if triton and capability >= (8, 0) else "cublas"


def split_attention(qkv, num_heads, route="auto"):
    """qkv Terms (N, T, 3·D) without scales: q, k, v side by side, each head-major → Terms (N, T, D) without scales.

    `route`: "hopper" (our kernel: capability 9.0, head dim 72), "triton" (from sm_80 on), "cublas" (any GPU with float16 tensor cores; stores a
    sample's (H, T, T) weights), "torch" (the twin, in float64), or "auto". Vaswani et al. 2017, arXiv:1706.03762, eq. 1.
    """
    pair = qkv.pair
    dim = pair.shape[-1] // (3 * num_heads)
    if route == "auto":
        route = choose(pair.device, dim)
    if route not in ROUTES:
        raise ValueError(f"attention: route {route!r}: one of {', '.join(ROUTES)}")
    if route == "hopper":
        from accel.kernels.split_linear.hopper import attention_hopper

        return Terms(attention_hopper(pair, num_heads), None)
    return Terms({"triton": _triton, "cublas": _cublas, "torch": _torch}[route](pair, num_heads, dim), None)


def _torch(pair, num_heads, dim):
    q, k, v = (
        (pair[0].double() + pair[1].double()).unflatten(-1, (3, num_heads, dim)).permute(2, 0, 3, 1, 4).unbind(0)
    )  # each (N, h, T, d)
    out = (q @ k.mT / math.sqrt(dim)).softmax(-1) @ v
    return split(out.transpose(1, 2).flatten(2).float(), per_row=False).pair


def _cublas(pair, num_heads, dim):
    n, tokens = pair.shape[1:3]
    out = torch.empty(n, tokens, num_heads, dim, device=pair.device)
    scores = torch.empty(num_heads, tokens, tokens, device=pair.device)
    mixed = torch.empty(num_heads, tokens, dim, device=pair.device)
    for sample in range(n):
        q, k, v = (
            pair[:, sample].unflatten(-1, (3, num_heads, dim)).permute(2, 0, 3, 1, 4).unbind(0)
        )  # each (2, h, T, d)
        split_multiply(q, k, scores)
        weights = torch.softmax(scores * (1 / math.sqrt(dim)), -1)
        split_multiply(split(weights * 2.0**10, per_row=False).pair, v.mT, mixed)
        out[sample] = mixed.transpose(0, 1) * 2.0**-10
    return split(out.flatten(2), per_row=False).pair


def _triton(pair, num_heads, dim, config=None):
    if triton is None:
        raise RuntimeError("attention: route 'triton' needs Triton: pip install triton, or take route 'cublas'")
    n, tokens = pair.shape[1:3]
    out = torch.empty(2, n, tokens, num_heads * dim, dtype=torch.float16, device=pair.device)
    main = 1 << (dim.bit_length() - 1)
    config = config or {**TRITON, **stages(pair, tokens % TRITON["KEYS"] == 0 and dim == main)}
    with torch.cuda.device_of(pair):
        _split_attention[(triton.cdiv(tokens, config["QUERIES"]), num_heads, n)](
            pair,
            out,
            pair[0].numel(),
            out[0].numel(),
            num_heads,
            1 / (math.sqrt(dim) * math.log(2)),
            TOKENS=tokens,
            DIM=dim,
            MAIN=main,
            REST=max(16, 1 << (dim - main - 1).bit_length()) if dim > main else 0,
            **config,
        )
    return out


if triton:

    @triton.jit
    def _three(a_high, a_low, b_high, b_low, total):
        total = tl.dot(a_low, b_high, total)
        total = tl.dot(a_high, b_low, total)
        return tl.dot(a_high, b_high, total)

    @triton.jit
    def _store_terms(high_ptr, term, y, inside):
        high = y.to(tl.float16)
        tl.store(high_ptr, high, inside)
        tl.store(high_ptr + term, (y - high.to(tl.float32)).to(tl.float16), inside)

    # A head's width goes in two parts, 72 = 64 + 8 (of 16): Triton's tiles are powers of two.
    @triton.jit
    def _split_attention(
        qkv_ptr,
        out_ptr,
        term,
        out_term,
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
        q_high, q_low = tl.load(qkv_ptr + at, inside, 0.0), tl.load(qkv_ptr + term + at, inside, 0.0)
        total = tl.zeros((QUERIES, MAIN), tl.float32)
        if REST:
            rest = MAIN + tl.arange(0, REST)
            in_rest = (rest < DIM)[None, :]
            at_rest = query[:, None] * step + rest[None, :]
            qr_high = tl.load(qkv_ptr + at_rest, inside & in_rest, 0.0)
            qr_low = tl.load(qkv_ptr + term + at_rest, inside & in_rest, 0.0)
            total_rest = tl.zeros((QUERIES, REST), tl.float32)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        for start in range(0, TOKENS, KEYS):
            key = start + tl.arange(0, KEYS)
            in_key = (key < TOKENS)[:, None]
            here = key[:, None] * step + main[None, :]
            k_high, k_low = tl.load(k_ptr + here, in_key, 0.0), tl.load(k_ptr + term + here, in_key, 0.0)
            s = _three(q_high, q_low, k_high.T, k_low.T, tl.zeros((QUERIES, KEYS), tl.float32))
            if REST:
                here_rest = key[:, None] * step + rest[None, :]
                kr_high = tl.load(k_ptr + here_rest, in_key & in_rest, 0.0)
                kr_low = tl.load(k_ptr + term + here_rest, in_key & in_rest, 0.0)
                s = _three(qr_high, qr_low, kr_high.T, kr_low.T, s)
            s = tl.where((key < TOKENS)[None, :], s * scale, float("-inf"))
            high = tl.maximum(top, tl.max(s, 1))
            factor = tl.exp2(top - high)
            p = tl.exp2(s - high[:, None] + 6)
            weight = weight * factor + tl.sum(p, 1)
            top = high
            p_high = p.to(tl.float16)
            p_low = (p - p_high.to(tl.float32)).to(tl.float16)
            v_high, v_low = tl.load(v_ptr + here, in_key, 0.0), tl.load(v_ptr + term + here, in_key, 0.0)
            total = total * factor[:, None] + _three(
                p_high, p_low, v_high, v_low, tl.zeros((QUERIES, MAIN), tl.float32)
            )
            if REST:
                vr_high = tl.load(v_ptr + here_rest, in_key & in_rest, 0.0)
                vr_low = tl.load(v_ptr + term + here_rest, in_key & in_rest, 0.0)
                total_rest = total_rest * factor[:, None] + _three(
                    p_high, p_low, vr_high, vr_low, tl.zeros((QUERIES, REST), tl.float32)
                )
        out_ptr += (sample * TOKENS * heads + head) * DIM
        at = query[:, None] * heads * DIM + main[None, :]
        _store_terms(out_ptr + at, out_term, total / weight[:, None], inside)
        if REST:
            _store_terms(
                out_ptr + query[:, None] * heads * DIM + rest[None, :],
                out_term,
                total_rest / weight[:, None],
                inside & in_rest,
            )
