"""All-gather by writing: one kernel stores a rank's part into every peer's memory over NVLink.

A library's all-gather launches a protocol. Between GPUs that map each other's memory a part of 1 to
5 MB needs only stores and one flag a program. Each program of the grid stores its chunk to all
peers and raises its flag there. Then it lowers the flags that the same program of each peer raises
here. So when the kernel has ended on one GPU, all parts have arrived. Flags go from 0 to 1 and back
and nothing counts, so a CUDA graph can replay it. The caller alternates between two buffers: a peer
can be one exchange ahead, not two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # few enough that a GPU runs them all at once, since they wait for each other
# Measured on H200s.
BLOCK = 1024
WARPS = 4


def push(
    part: Tensor, buffers: Tensor, flags: Tensor, rank: int, offset: int, programs: int = PROGRAMS
) -> None:
    """Write part (N, t, W) as tokens rank·t … of every rank's gathered (N, world·t, W).

    Waits until the peers' parts have arrived too; `reference` gives the result. part: tokens of W
    contiguous elements, all at one stride; they begin at multiples of 16 bytes. buffers, flags:
    (world,) int64 addresses by rank: of a buffer, at whose byte `offset` the gathered tensor
    starts, and of world · programs int32 flags, zero at first.
    """
    n, t, width = part.shape
    stride = part.stride(1)
    unit = 8 // part.element_size()  # elements of a word, of eight bytes
    aligned = width % (2 * unit) == 0 and stride % (2 * unit) == 0 and part.data_ptr() % 16 == 0
    assert aligned, "tokens start at 16 bytes"
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


def reference(parts: list[Tensor]) -> Tensor:
    """Return every rank's result of `push`: parts by rank, (N, t, W) each → (N, world·t, W)."""
    return torch.cat(list(parts), dim=1)


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
        for ahead in tl.static_range(WORLD):  # every rank begins with another peer
            peer = (rank + 1 + ahead) % WORLD
            base = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(tl.int64)), 16)
            tl.store(base + target, value, inside)
    tl.debug_barrier()  # all threads' stores come before the flag of one
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
