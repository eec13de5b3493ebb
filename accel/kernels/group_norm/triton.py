"""The decoder's sum and GroupNorm by Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.group_norm.reference import EPS, Sum

PIXELS = 32  # per tile
CHANNELS = 64
TILE = {"PIXELS": PIXELS, "CHANNELS": CHANNELS, "num_warps": 4}
# Approximate number of programs in a pass with statistics: enough for the largest GPU, and few
# partial statistics to combine.
PROGRAMS = 1024


def chunks(pixels: int, channels: int) -> tuple[int, int]:
    """Return the number of chunks that cover `pixels` pixels, and the number of tiles per chunk.

    They depend only on the picture's size, so that all GPUs round alike.
    """
    tiles = -(-pixels // PIXELS)
    max_chunks = max(1, PROGRAMS * CHANNELS // max(channels, CHANNELS))
    tiles_per_chunk = -(-tiles // max_chunks)
    return -(-tiles // tiles_per_chunk), tiles_per_chunk


def add(
    x: Tensor, bias: Tensor, branch: Tensor | None, dtype: torch.dtype | None, statistics: bool
) -> Sum:
    """Launch the kernel of accel.kernels.group_norm.add."""
    _, channels, height, width = x.shape
    pixels = height * width
    parts, tiles = chunks(pixels, channels)
    out = x if dtype is None else torch.empty_like(x, dtype=dtype)
    partial = torch.empty(2, parts, channels, device=x.device) if statistics else None
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        _add[(parts, triton.cdiv(channels, CHANNELS))](
            x,
            x if branch is None else branch,
            bias,
            out,
            bias if partial is None else partial,
            pixels,
            channels,
            tiles,
            parts * channels,
            BRANCH=branch is not None,
            WRITE=dtype is not None,
            STATISTICS=statistics,
            **TILE,
        )
    return Sum(out, bias if dtype is None else None, partial)


def group_norm(
    total: Sum, weight: Tensor, bias: Tensor, groups: int, silu: bool, dtype: torch.dtype
) -> Tensor:
    """Launch the kernels of accel.kernels.group_norm.group_norm."""
    x = total.value
    assert len(x) == 1 and x.is_contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    pixels = height * width
    parts, tiles = chunks(pixels, channels)
    out = torch.empty_like(x, dtype=dtype)
    affine = torch.empty(2, channels, device=x.device)
    # At least 16, so that one compiled kernel serves all common decoders.
    in_group = max(16, triton.next_power_of_2(channels // groups))
    with torch.cuda.device_of(x):
        _join[(groups,)](
            total.partial,
            weight if total.bias is None else total.bias,
            weight,
            affine,
            pixels,
            channels,
            parts,
            tiles * PIXELS,
            channels // groups,
            float(total.bias is not None),
            IN_GROUP=in_group,
            ROWS=max(1, 2048 // in_group),
            EPS=EPS,
            num_warps=4,
        )
        _normalise[(triton.cdiv(pixels, PIXELS), triton.cdiv(channels, CHANNELS))](
            x,
            affine,
            bias,
            out,
            pixels,
            channels,
            int(silu),
            **TILE,
        )
    return out


def compile_ahead(device: torch.device) -> None:
    """Compile all kernels for float16 decoding, or load them from Triton's disk cache.

    With an empty cache this takes seconds, so a thread does it during sampling. Nothing is loaded
    onto the GPU, because that would wait for the queued steps.
    """
    half = torch.float16
    wide = torch.float32
    grid = (1,)

    def compile_add(x, branch=None, out=None, statistics=True):
        return _add.warmup(
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
            STATISTICS=statistics,
            **TILE,
            grid=grid,
        )

    def compile_normalise(x):
        return _normalise.warmup(x, wide, wide, half, 1024, 128, 1, **TILE, grid=grid)

    with torch.cuda.device(device):
        kernels = [
            compile_normalise(half),
            compile_normalise(wide),
            compile_add(half),
            compile_add(wide, branch=half, out=wide),
            compile_add(half, branch=half, out=wide),
            compile_add(wide, branch=half, out=half, statistics=False),
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
                grid=grid,
            ),
        ]
        for kernel in kernels:  # the host's launcher, built by a C compiler
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
    # Every lane accumulates its own pixels (Welford 1962), so that no barrier is needed.
    mean = tl.zeros((PIXELS, CHANNELS), tl.float32)
    square = tl.zeros((PIXELS, CHANNELS), tl.float32)
    turn = 0
    while turn < turns:  # Triton's interpreter has no range over a runtime value
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
        # number of pixels per lane
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


@triton.jit(do_not_specialize=["pixels", "channels", "parts", "chunk", "in_group", "is_pending"])
def _join(
    partial_ptr,
    pending_ptr,
    weight_ptr,
    affine_ptr,
    pixels,
    channels,
    parts,
    chunk,
    in_group,
    is_pending,
    IN_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Store for each channel: mean of its group − pending bias, and weight / standard deviation."""
    lane = tl.arange(0, IN_GROUP)
    inside = lane < in_group
    channel = tl.program_id(0) * in_group + lane
    total = tl.zeros((ROWS, IN_GROUP), tl.float32)
    first = 0
    while first < parts:
        part = first + tl.arange(0, ROWS)
        here = (part < parts)[:, None] & inside[None, :]
        count = tl.maximum(tl.minimum(pixels - part * chunk, chunk), 0).to(tl.float32)[:, None]
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
        count = tl.maximum(tl.minimum(pixels - part * chunk, chunk), 0).to(tl.float32)[:, None]
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
