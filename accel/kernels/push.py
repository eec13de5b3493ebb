"""All-gather by writing: one kernel copies a rank's part into every peer's memory over NVLink, tells them, and waits for theirs.

A library's all-gather is a launch of its own protocol; between GPUs that map each other's memory a part of 1 to 5 MB needs no more than stores
and one flag a program. Each program of the grid copies its chunk to all peers, raises its flag there, then takes down the flags that the same
program of each peer raises here; so what has ended on one GPU has arrived on it. Flags go from 0 to 1 and back, nothing counts, and
a CUDA graph replays it. The caller alternates between two buffers: a peer can be one exchange ahead, not two.
"""

import ctypes

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every platform; a library's all-gather serves there
    triton = None

PROGRAMS, BLOCK, WARPS = (
    128,
    1024,
    4,
)  # measured on H200s; few enough to be on a chip all at once, as waiting for each other asks


def push(part, buffers, flags, rank, offset, programs=PROGRAMS):
    """Write part (N, t, W) as tokens rank·t … of every rank's gathered (N, world·t, W), contiguous, and wait until all parts have come.

    part: rows of W contiguous elements, at any stride; W elements are a multiple of 16 bytes. buffers, flags: (world,) int64 addresses, by rank, of
    the memory that ranks map of each other: of a buffer, at whose byte `offset` the gathered tensor starts, and of world · programs int32 flags,
    zero at first. `push_twin` is its plain meaning.
    """
    n, t, width = part.shape
    unit = 8 // part.element_size()
    if part.stride(2) != 1 or width % (2 * unit) or part.stride(1) % (2 * unit) or part.data_ptr() % 16:
        raise ValueError("push: takes rows that start at multiples of 16 bytes")
    if n > 1 and part.stride(0) != t * part.stride(1):
        raise ValueError("push: takes rows at one stride")
    world = len(buffers)
    with torch.cuda.device_of(part):
        _push[(programs,)](
            part.view(torch.int64),
            buffers,
            flags,
            rank,
            offset // 8,
            n * t,
            t,
            part.stride(1) // unit,
            WIDTH=width // unit,
            WORLD=world,
            BLOCK=BLOCK,
            TURNS=-(-(n * t * width // unit) // (programs * BLOCK)),
            num_warps=WARPS,
        )


def reaches(index, peer):
    """Whether GPU `index` of this process can write into GPU `peer` and change its words atomically, as flags need: over NVLink, seldom over PCIe."""
    driver, values = ctypes.CDLL("libcuda.so.1"), []
    for attribute in (2, 3):  # CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, …_NATIVE_ATOMIC_SUPPORTED
        devices, value = (ctypes.c_int * 2)(), ctypes.c_int()
        for i, ordinal in enumerate((index, peer)):
            if driver.cuDeviceGet(ctypes.byref(devices, 4 * i), ordinal):
                return False
        values.append(
            driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, devices[0], devices[1]) == 0
            and value.value == 1
        )
    return all(values)


def push_twin(parts):
    """What lies in every rank's memory after `push`: parts, by rank, (N, t, W) each → (N, world·t, W)."""
    return torch.cat(list(parts), dim=1)


if triton:

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
        """All sizes in elements of eight bytes; rows = N·t, tokens = t."""
        program = tl.program_id(0)
        total = rows * WIDTH
        for turn in range(TURNS):
            element = (turn * tl.num_programs(0) + program) * BLOCK + tl.arange(0, BLOCK)
            row, column = element // WIDTH, element % WIDTH
            inside = element < total
            value = tl.load(part + row * stride + column, inside)
            target = offset + (row // tokens * WORLD * tokens + rank * tokens + row % tokens) * WIDTH + column
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
