"""The decoder's passes between two convolutions: biases, residual sum, GroupNorm (Wu & He 2018, arXiv:1803.08494) and SiLU.

Half convolutions want their channels innermost, where torch's GroupNorm would turn the picture over and back. Here the sum is made and both statistics of
each channel are taken in one pass, each program over its own stretch of places; a small kernel joins them into a group's (mean and variance from centred
values, joined exactly as Chan et al. 1979 do); and one more pass normalises, applies SiLU and leaves what the next convolution reads. Sums and statistics
are float32 whatever goes in and out. No atomics: the same bits every time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every platform; the twin is then the only route
    triton = None

EPS = 1e-6
PLACES, CHANNELS, WARPS = 32, 64, 4  # a program's tile
PROGRAMS = 1024  # of a pass that takes statistics, about: enough for the largest GPU, few partial statistics to join


class Sum(NamedTuple):
    """What `add` gives and `group_norm` takes."""

    value: torch.Tensor  # (1, C, H, W)
    bias: torch.Tensor | None  # (C,) float32, not yet in `value`
    partial: torch.Tensor | None  # (2, parts, C) float32: each stretch's mean, and sum of squares about it


def add(x, bias, branch=None, dtype=None, statistics=True, route="auto"):
    """x + branch + bias, and what GroupNorm needs to know of it → Sum.

    x, branch (1, C, H, W): half or float32, channels innermost (channels_last); bias (C,) float32. The sum is float32 and is written in `dtype`; without
    one (then without branch) x stays as it is and the bias is left to group_norm. statistics: False where no norm follows. route: "triton", "torch"
    (the plain twin, any layout), or "auto": triton on a GPU.
    """
    return {"triton": _add_triton, "torch": _add_torch}[_choose(route, x)](x, bias, branch, dtype, statistics)


def group_norm(total, weight, bias, groups, silu=True, dtype=torch.float16, route="auto"):
    """GroupNorm with ε = 1e-6 over a Sum, then SiLU if asked for → (1, C, H, W) in `dtype`, channels innermost. weight, bias (C,) float32."""
    return {"triton": _norm_triton, "torch": _norm_torch}[_choose(route, total.value)](
        total, weight, bias, groups, silu, dtype
    )


def _choose(route, x):
    return ("triton" if triton and x.is_cuda else "torch") if route == "auto" else route


def _add_torch(x, bias, branch, dtype, statistics):
    if dtype is None:
        return Sum(x, bias, None)
    total = x.float() + bias[:, None, None]
    return Sum((total if branch is None else total + branch.float()).to(dtype), None, None)


def _norm_torch(total, weight, bias, groups, silu, dtype):
    x = total.value.float() if total.bias is None else total.value.float() + total.bias[:, None, None]
    y = F.group_norm(x, groups, weight, bias, EPS)
    return (F.silu(y) if silu else y).to(dtype).contiguous(memory_format=torch.channels_last)


def _check(*tensors):
    if triton is None:
        raise RuntimeError("the decoder's kernels need Triton: pip install triton, or take route='torch'")
    for x in tensors:
        if len(x) != 1 or not x.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("the decoder's kernels take one picture, its channels innermost")


def _stretch(places, channels):
    """(parts, tiles of each) that cover `places`; a function of the picture alone, so that no GPU rounds otherwise for having more multiprocessors."""
    tiles, most = -(-places // PLACES), max(1, PROGRAMS * CHANNELS // max(channels, CHANNELS))
    turns = -(-tiles // most)
    return -(-tiles // turns), turns


def _add_triton(x, bias, branch, dtype, statistics):
    _check(x, *(() if branch is None else (branch,)))
    _, channels, height, width = x.shape
    parts, turns = _stretch(height * width, channels)
    out = x if dtype is None else torch.empty_like(x, dtype=dtype)
    partial = torch.empty(2, parts, channels, device=x.device) if statistics else None
    with torch.cuda.device_of(x):
        _add[(parts, triton.cdiv(channels, CHANNELS))](
            x,
            x if branch is None else branch,
            bias,
            out,
            bias if partial is None else partial,
            height * width,
            channels,
            turns,
            parts * channels,
            BRANCH=branch is not None,
            WRITE=dtype is not None,
            STATISTICS=statistics,
            PLACES=PLACES,
            CHANNELS=CHANNELS,
            num_warps=WARPS,
        )
    return Sum(out, bias if dtype is None else None, partial)


def _norm_triton(total, weight, bias, groups, silu, dtype):
    x, pending, partial = total
    _check(x)
    _, channels, height, width = x.shape
    parts, turns = _stretch(height * width, channels)
    out, affine = torch.empty_like(x, dtype=dtype), torch.empty(2, channels, device=x.device)
    in_group = max(16, triton.next_power_of_2(channels // groups))  # one compiled kernel for all that decoders have
    with torch.cuda.device_of(x):
        _join[(groups,)](
            partial,
            weight if pending is None else pending,
            weight,
            affine,
            height * width,
            channels,
            parts,
            turns * PLACES,
            channels // groups,
            float(pending is not None),
            IN_GROUP=in_group,
            ROWS=max(1, 2048 // in_group),
            EPS=EPS,
            num_warps=4,
        )
        _normalise[(triton.cdiv(height * width, PLACES), triton.cdiv(channels, CHANNELS))](
            x, affine, bias, out, height * width, channels, int(silu), PLACES=PLACES, CHANNELS=CHANNELS, num_warps=WARPS
        )
    return out


def compile_ahead(device):
    """Compile, or fetch from Triton's disk cache, all that decoding in float16 launches: seconds of work with an empty cache, made for a thread beside the
    sampling. Nothing is loaded to the GPU, which would wait there for the steps that are queued."""
    half, wide, tile = torch.float16, torch.float32, dict(PLACES=PLACES, CHANNELS=CHANNELS, num_warps=WARPS, grid=(1,))
    with torch.cuda.device(device):
        kernels = [
            _add.warmup(
                x,
                branch or x,
                wide,
                out or x,
                wide,
                1024,
                128,
                1,
                1024,
                BRANCH=branch is not None,
                WRITE=out is not None,
                STATISTICS=out != half,
                **tile,
            )
            for x, branch, out in ((half, None, None), (wide, half, wide), (half, half, wide), (wide, half, half))
        ]
        kernels.append(
            _join.warmup(
                wide,
                wide,
                wide,
                wide,
                1024,
                128,
                1,
                1024,
                4,
                1.0,
                IN_GROUP=16,
                ROWS=128,
                EPS=EPS,
                num_warps=4,
                grid=(1,),
            )
        )
        kernels += [_normalise.warmup(x, wide, wide, half, 1024, 128, 1, **tile) for x in (half, wide)]
        for kernel in kernels:
            triton.runtime.driver.active.launcher_cls(
                kernel.src, kernel.metadata
            )  # the host's part, which a C compiler makes


if triton:

    @triton.jit(do_not_specialize=["places", "turns", "partial_stride"])
    def _add(
        x_ptr,
        branch_ptr,
        bias_ptr,
        out_ptr,
        partial_ptr,
        places,
        channels,
        turns,
        partial_stride,
        BRANCH: tl.constexpr,
        WRITE: tl.constexpr,
        STATISTICS: tl.constexpr,
        PLACES: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):
        part = tl.program_id(0)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        row = tl.arange(0, PLACES)
        inside = channel < channels
        bias = tl.load(bias_ptr + channel, inside, 0.0)[None, :]
        # Every lane follows its own places (Welford 1962), so that a tile costs no barrier.
        mean = tl.zeros((PLACES, CHANNELS), tl.float32)
        square = tl.zeros((PLACES, CHANNELS), tl.float32)
        turn = 0
        while turn < turns:  # the interpreter has no range over a value
            place = (part * turns + turn) * PLACES + row
            here = (place < places)[:, None] & inside[None, :]
            offset = place.to(tl.int64)[:, None] * channels + channel[None, :]
            y = tl.load(x_ptr + offset, here, 0.0).to(tl.float32) + bias
            if BRANCH:
                y += tl.load(branch_ptr + offset, here, 0.0).to(tl.float32)
            if WRITE:
                tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), here)
            if STATISTICS:
                away = tl.where(here, y - mean, 0.0)
                mean += away * (1.0 / (turn + 1))
                square += tl.where(here, away * (y - mean), 0.0)
            turn += 1
        if STATISTICS:
            first = part * turns * PLACES
            count = tl.minimum(places - first, turns * PLACES)
            mine = tl.maximum((count - row + PLACES - 1) // PLACES, 0).to(tl.float32)[
                :, None
            ]  # places that a lane has seen
            whole = tl.sum(mine * mean, 0) / count
            away = mean - whole[None, :]
            tl.store(partial_ptr + part * channels + channel, whole, inside)
            tl.store(
                partial_ptr + partial_stride + part * channels + channel, tl.sum(square + mine * away * away, 0), inside
            )

    @triton.jit(do_not_specialize=["places", "channels", "parts", "stretch", "in_group", "is_pending"])
    def _join(
        partial_ptr,
        pending_ptr,
        weight_ptr,
        affine_ptr,
        places,
        channels,
        parts,
        stretch,
        in_group,
        is_pending,
        IN_GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        EPS: tl.constexpr,
    ):
        """One group: its mean, less the bias that its channels still wait for, and weight over deviation, by channel."""
        lane = tl.arange(0, IN_GROUP)
        inside = lane < in_group
        channel = tl.program_id(0) * in_group + lane
        total = tl.zeros((ROWS, IN_GROUP), tl.float32)
        first = 0
        while first < parts:
            part = first + tl.arange(0, ROWS)
            here = (part < parts)[:, None] & inside[None, :]
            count = tl.maximum(tl.minimum(places - part * stretch, stretch), 0).to(tl.float32)[:, None]
            total += count * tl.load(partial_ptr + part[:, None] * channels + channel[None, :], here, 0.0)
            first += ROWS
        size = places.to(tl.float32) * in_group
        mean = tl.sum(total) / size
        total = tl.zeros((ROWS, IN_GROUP), tl.float32)
        first = 0
        while first < parts:
            part = first + tl.arange(0, ROWS)
            here = (part < parts)[:, None] & inside[None, :]
            count = tl.maximum(tl.minimum(places - part * stretch, stretch), 0).to(tl.float32)[:, None]
            offset = part[:, None] * channels + channel[None, :]
            away = tl.load(partial_ptr + offset, here, 0.0) - mean
            total += tl.where(
                here, tl.load(partial_ptr + parts * channels + offset, here, 0.0) + count * away * away, 0.0
            )
            first += ROWS
        scale = tl.rsqrt(tl.sum(total) / size + EPS)
        tl.store(affine_ptr + channel, mean - is_pending * tl.load(pending_ptr + channel, inside, 0.0), inside)
        tl.store(affine_ptr + channels + channel, scale * tl.load(weight_ptr + channel, inside, 0.0), inside)

    @triton.jit(do_not_specialize=["places", "silu"])
    def _normalise(
        x_ptr, affine_ptr, bias_ptr, out_ptr, places, channels, silu, PLACES: tl.constexpr, CHANNELS: tl.constexpr
    ):
        place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        here = (place < places)[:, None] & inside[None, :]
        offset = place.to(tl.int64)[:, None] * channels + channel[None, :]
        x = tl.load(x_ptr + offset, here, 0.0).to(tl.float32)
        centre = tl.load(affine_ptr + channel, inside, 0.0)[None, :]
        scale = tl.load(affine_ptr + channels + channel, inside, 0.0)[None, :]
        y = (x - centre) * scale + tl.load(bias_ptr + channel, inside, 0.0)[None, :]
        y = tl.where(silu != 0, y / (1 + tl.exp(-y)), y)
        tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), here)
