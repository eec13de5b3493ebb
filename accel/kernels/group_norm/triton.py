"""The decoder's sum and GroupNorm by Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.group_norm.reference import EPS, Sum

PIXELS = 32
CHANNELS = 64  # a program's tile
TILE = dict(PIXELS=PIXELS, CHANNELS=CHANNELS, num_warps=4)
# of a pass that takes statistics, about: enough for the largest GPU, few partial
# statistics to join
PROGRAMS = 1024


def stretches(pixels: int, channels: int) -> tuple[int, int]:
    """Return (stretches, tiles a stretch) that cover `pixels` pixels, by the picture's
    size alone, so that every GPU rounds alike.
    """
    tiles = -(-pixels // PIXELS)
    most = max(1, PROGRAMS * CHANNELS // max(channels, CHANNELS))
    turns = -(-tiles // most)
    return -(-tiles // turns), turns


def add(
    x: Tensor, bias: Tensor, branch: Tensor | None, dtype: torch.dtype | None, statistics: bool
) -> Sum:
    """Launch the kernel of accel.kernels.group_norm.add."""
    _, channels, height, width = x.shape
    parts, turns = stretches(height * width, channels)
    out = x if dtype is None else torch.empty_like(x, dtype=dtype)
    partial = torch.empty(2, parts, channels, device=x.device) if statistics else None
    tensors = x, x if branch is None else branch, bias, out, bias if partial is None else partial
    numbers = height * width, channels, turns, parts * channels
    forms = dict(BRANCH=branch is not None, WRITE=dtype is not None, STATISTICS=statistics)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _add[(parts, triton.cdiv(channels, CHANNELS))](*tensors, *numbers, **forms, **TILE)
    return Sum(out, bias if dtype is None else None, partial)


def group_norm(
    total: Sum, weight: Tensor, bias: Tensor, groups: int, silu: bool, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel of accel.kernels.group_norm.group_norm."""
    x, pending, partial = total
    assert len(x) == 1 and x.is_contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    parts, turns = stretches(height * width, channels)
    out = torch.empty_like(x, dtype=dtype)
    affine = torch.empty(2, channels, device=x.device)
    # one compiled kernel for all that decoders have
    in_group = max(16, triton.next_power_of_2(channels // groups))
    tensors = partial, weight if pending is None else pending, weight, affine
    numbers = (
        height * width,
        channels,
        parts,
        turns * PIXELS,
        channels // groups,
        float(pending is not None),
    )
    with torch.cuda.device_of(x):
        _join[(groups,)](
            *tensors,
            *numbers,
            IN_GROUP=in_group,
            ROWS=max(1, 2048 // in_group),
            EPS=EPS,
            num_warps=4,
        )
        grid = triton.cdiv(height * width, PIXELS), triton.cdiv(channels, CHANNELS)
        _normalise[grid](x, affine, bias, out, height * width, channels, int(silu), **TILE)
    return out


def compile_ahead(device: torch.device) -> None:
    """Compile, or fetch from Triton's disk cache, all kernels of decoding in float16.

    With an empty cache this takes seconds; a thread does it during sampling. Nothing is
    loaded to the GPU, where loading waits for the queued steps.
    """
    half = torch.float16
    wide = torch.float32
    tile = dict(**TILE, grid=(1,))
    # x, branch, out
    sums = (half, None, None), (wide, half, wide), (half, half, wide), (wide, half, half)
    with torch.cuda.device(device):
        kernels = [
            _normalise.warmup(x, wide, wide, half, 1024, 128, 1, **tile) for x in (half, wide)
        ]
        for x, branch, out in sums:
            forms = dict(BRANCH=branch is not None, WRITE=out is not None, STATISTICS=out != half)
            pointers = x, branch or x, wide, out or x, wide
            kernels.append(_add.warmup(*pointers, 1024, 128, 1, 1024, **forms, **tile))
        sizes = (1024, 128, 1, 1024, 4, 1.0)
        constants = dict(IN_GROUP=16, ROWS=128, EPS=EPS, num_warps=4)
        kernels.append(_join.warmup(*[wide] * 4, *sizes, **constants, grid=(1,)))
        for kernel in kernels:  # the host's part, which a C compiler makes
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


@triton.jit(do_not_specialize=["pixels", "turns", "partial_stride"])
def _add(
    x_ptr,
    branch_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    pixels,
    channels,
    turns,
    partial_stride,
    BRANCH: tl.constexpr,
    WRITE: tl.constexpr,
    STATISTICS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.arange(0, PIXELS)
    inside = channel < channels
    bias = tl.load(bias_ptr + channel, inside, 0.0)[None, :]
    # Every lane follows its own pixels (Welford 1962), so that a tile costs no barrier.
    mean = tl.zeros((PIXELS, CHANNELS), tl.float32)
    square = tl.zeros((PIXELS, CHANNELS), tl.float32)
    turn = 0
    while turn < turns:  # the interpreter has no range over a value
        pixel = (part * turns + turn) * PIXELS + row
        here = (pixel < pixels)[:, None] & inside[None, :]
        offset = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
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
        first = part * turns * PIXELS
        count = tl.minimum(pixels - first, turns * PIXELS)
        # pixels of a lane
        seen = tl.maximum((count - row + PIXELS - 1) // PIXELS, 0).to(tl.float32)[:, None]
        whole = tl.sum(seen * mean, 0) / count
        away = mean - whole[None, :]
        at = partial_ptr + part * channels + channel
        tl.store(at, whole, inside)
        tl.store(
            partial_ptr + partial_stride + part * channels + channel,
            tl.sum(square + seen * away * away, 0),
            inside,
        )


@triton.jit(do_not_specialize=["pixels", "channels", "parts", "stretch", "in_group", "is_pending"])
def _join(
    partial_ptr,
    pending_ptr,
    weight_ptr,
    affine_ptr,
    pixels,
    channels,
    parts,
    stretch,
    in_group,
    is_pending,
    IN_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Return by channel a group's mean, less the bias that its channels still lack, and
    weight over deviation.
    """
    lane = tl.arange(0, IN_GROUP)
    inside = lane < in_group
    channel = tl.program_id(0) * in_group + lane
    total = tl.zeros((ROWS, IN_GROUP), tl.float32)
    first = 0
    while first < parts:
        part = first + tl.arange(0, ROWS)
        here = (part < parts)[:, None] & inside[None, :]
        count = tl.maximum(tl.minimum(pixels - part * stretch, stretch), 0).to(tl.float32)[:, None]
        total += count * tl.load(
            partial_ptr + part[:, None] * channels + channel[None, :], here, 0.0
        )
        first += ROWS
    size = pixels.to(tl.float32) * in_group
    mean = tl.sum(total) / size
    total = tl.zeros((ROWS, IN_GROUP), tl.float32)
    first = 0
    while first < parts:
        part = first + tl.arange(0, ROWS)
        here = (part < parts)[:, None] & inside[None, :]
        count = tl.maximum(tl.minimum(pixels - part * stretch, stretch), 0).to(tl.float32)[:, None]
        offset = part[:, None] * channels + channel[None, :]
        away = tl.load(partial_ptr + offset, here, 0.0) - mean
        square = tl.load(partial_ptr + parts * channels + offset, here, 0.0)
        total += tl.where(here, square + count * away * away, 0.0)
        first += ROWS
    scale = tl.rsqrt(tl.sum(total) / size + EPS)
    tl.store(
        affine_ptr + channel,
        mean - is_pending * tl.load(pending_ptr + channel, inside, 0.0),
        inside,
    )
    tl.store(
        affine_ptr + channels + channel, scale * tl.load(weight_ptr + channel, inside, 0.0), inside
    )


@triton.jit(do_not_specialize=["pixels", "silu"])
def _normalise(
    x_ptr,
    affine_ptr,
    bias_ptr,
    out_ptr,
    pixels,
    channels,
    silu,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    here = (pixel < pixels)[:, None] & inside[None, :]
    offset = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + offset, here, 0.0).to(tl.float32)
    centre = tl.load(affine_ptr + channel, inside, 0.0)[None, :]
    scale = tl.load(affine_ptr + channels + channel, inside, 0.0)[None, :]
    y = (x - centre) * scale + tl.load(bias_ptr + channel, inside, 0.0)[None, :]
    y = tl.where(silu != 0, y / (1 + tl.exp(-y)), y)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), here)
