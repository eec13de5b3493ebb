"""All-gather by writing: one kernel stores a rank's part into every peer's memory over NVLink.

GPUs that map each other's memory can exchange parts of 1 to 5 MB with plain stores and one flag per
program, which is faster than a library's protocol. Each program of the grid stores its chunk to all
peers and raises its flag there. Then it waits for the flags that the same program of each peer
raises here, and lowers them. So when the kernel ends on one GPU, all parts have arrived there.
Flags go from 0 to 1 and back and there is no counter, so a CUDA graph can replay the kernel. The
caller alternates between two buffers, because a peer can be one exchange ahead, but not two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # all of them must run at once, since they wait for each other
# Measured on H200s.
BLOCK = 1024
WARPS = 4


def push(
    part: Tensor, buffers: Tensor, flags: Tensor, rank: int, offset: int, programs: int = PROGRAMS
) -> None:
    """Write part (N, t, W) to tokens rank·t … (rank + 1)·t of every rank's result (N, world·t, W).

    Wait until the peers' parts have arrived too. part: tokens have W contiguous elements and a
    uniform stride, and are aligned to 16 bytes. buffers (world,) int64: address of each rank's
    buffer; the result starts at its byte `offset`. flags (world,) int64: address of each rank's
    world · programs int32 flags, initially zero.
    """
    n, t, width = part.shape
    stride = part.stride(1)
    unit = 8 // part.element_size()  # elements per word of eight bytes
    aligned = width % (2 * unit) == 0 and stride % (2 * unit) == 0 and part.data_ptr() % 16 == 0
    assert aligned, "tokens must be aligned to 16 bytes"
    words = n * t * width // unit
    with torch.cuda.device_of(part):  # Triton launches on the current GPU
        _push[(programs,)](
            part.view(torch.int64),
            buffers,
            flags,
            rank,
            offset // 8,
            n * t,
            t,
            stride // unit,
            WIDTH=width // unit,
            WORLD=len(buffers),
            BLOCK=BLOCK,
            TURNS=-(-words // (programs * BLOCK)),
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["rank"])
def _push(
    part,
    buffers,
    flags,
    rank,
    offset,
    rows,
    tokens,
    stride,
    WIDTH: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Write this rank's tokens to its peers.

    All sizes are in words of eight bytes; rows = N·t, tokens = t.
    """
    program = tl.program_id(0)
    total = rows * WIDTH
    for turn in range(TURNS):
        element = (turn * tl.num_programs(0) + program) * BLOCK + tl.arange(0, BLOCK)
        row = element // WIDTH
        column = element % WIDTH
        inside = element < total
        value = tl.load(part + row * stride + column, inside)
        target = (
            offset
            + (row // tokens * WORLD * tokens + rank * tokens + row % tokens) * WIDTH
            + column
        )
        for ahead in tl.static_range(WORLD):  # each rank starts with a different peer
            peer = (rank + 1 + ahead) % WORLD
            base = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(tl.int64)), 16)
            tl.store(base + target, value, inside)
    tl.debug_barrier()  # the stores of all threads precede the flag
    for ahead in tl.static_range(WORLD - 1):
        peer = (rank + 1 + ahead) % WORLD
        flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * WORLD + rank
        while tl.atomic_cas(flag, 0, 1, sem="release", scope="sys") != 0:
            pass
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * WORLD
    for ahead in tl.static_range(WORLD - 1):
        peer = (rank + 1 + ahead) % WORLD
        while tl.atomic_cas(mine + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass
