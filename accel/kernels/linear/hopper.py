"""A GEMM by our kernel for few tokens on Hopper (hopper.cu), in tiles of many shapes."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from accel import kernels
from accel.kernels import cuda

FILE = Path(__file__).with_suffix(".cu")


class Tile(NamedTuple):
    """Compile-time shape of the kernel; hopper.cu says what each means."""

    rows: int
    columns: int
    stages: int
    cluster: int = 1
    warpgroups: int = 2

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def chunk(self) -> int:
        """Columns of one store. Lines of 64 columns are swizzled; those of an odd number of eights need not be."""
        return next(chunk for chunk in (64, 72, self.columns) if self.columns % chunk == 0)

    def shared_bytes(self, alone: bool) -> int:
        """Of a block; `alone`: it computes one tile, and results take the operands' memory."""
        start = 1024 + -(-4 * self.warpgroups * self.columns // 1024) * 1024  # barriers, biases
        operands, results = self.stages * 128 * (self.rows + self.columns), 2 * self.rows * self.columns
        return start + (max(operands, results) if alone else operands + results)

    def clusters(self, m: int, n: int) -> int:
        """How many clusters an (M, N) result takes."""
        return -(-m // (self.rows * self.cluster)) * -(-n // self.columns)


def source(tile: Tile, dtype: torch.dtype, gelu: bool, alone: bool) -> str:
    """The whole CUDA text of a variant; `alone`: a block computes one tile."""
    half, registers = cuda.HALF[dtype], cuda.registers(tile.warpgroups, producer=40)
    functions = cuda.wgmma("multiply", tile.columns, half), cuda.conversions(half)
    return cuda.source((FILE,), tile, functions, CHUNK=tile.chunk, ALONE=alone, GELU=gelu, **registers)


@lru_cache(None)
def _kernel(tile, dtype, gelu, alone, device):
    """A variant on a device, and how many of its clusters run there at a time."""
    text = source(tile, dtype, gelu, alone)
    kernel = cuda.Kernel(text, "linear", tile.threads, tile.shared_bytes(alone), device, tile.cluster)
    return kernel, kernel.concurrent_clusters()


@lru_cache(None)
def version() -> str:
    """Changes with whatever a tile's speed depends on."""
    shared = Path(cuda.__file__)
    return kernels.version(FILE, Path(__file__), shared, shared.with_name("hopper.cuh"))


class Gemm:
    """y = x·Wᵀ + b, and GELU if asked for, for one shape on one GPU of capability 9.0, N and K in eights."""

    def __init__(self, m: int, n: int, k: int, gelu: bool, dtype: torch.dtype, device: torch.device):
        self.shape, self.gelu, self.dtype, self.device = (m, n, k), gelu, dtype, device

    def candidates(self) -> list[Tile]:
        """Tiles that are worth measuring; none where the kernel does not run."""
        return tiles(*self.shape, self.device)

    def find(self, wanted: list[int]) -> Tile:
        """The tile with these numbers."""
        return Tile(*wanted)

    def load(self, tile: Tile) -> tuple[cuda.Kernel, int]:
        """The kernel, compiled if it is not on disk yet, and how many clusters to launch."""
        m, n, _ = self.shape
        count = tile.clusters(m, n)
        one_wave = count * tile.cluster <= cuda.multiprocessors(self.device)
        alone = one_wave or tile.shared_bytes(False) > cuda.SHARED_BYTES
        kernel, most = _kernel(tile, self.dtype, self.gelu, alone, self.device)
        return kernel, count if alone else min(count, most)

    def run(self, tile: Tile, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, overlap: bool = True) -> None:
        """Launch one of the candidates. Operands: contiguous, of this shape, dtype and device.

        overlap: start, and load weights, while the kernel before still runs, which may write x but not the weights.
        """
        m, n, k = self.shape
        if not m:
            return
        kernel, clusters = self.load(tile)
        eights = tile.columns // 8

        def operand(tensor, rows, box_rows):
            return cuda.tensor_map(tensor, (k, rows), (2 * k,), (64, box_rows), 128)

        x_map = operand(x, m, tile.rows)
        shares = -(-eights // tile.cluster), eights // tile.cluster  # of the weights' lines, in eights, for a block
        weight_maps = [operand(weight, n, 8 * share) for share in shares]
        out_map = cuda.tensor_map(out, (n, m), (2 * n,), (tile.chunk, 16), 128 if tile.chunk == 64 else 0)
        kernel.launch(clusters * tile.cluster, x_map, *weight_maps, out_map, bias, m, n, k, overlap=overlap)


# Cycles, fitted to log/products-few-rows-h200.json: of a launch, and of a further tile of a block.
LAUNCH, NEXT_TILE = 5000, 3000
SHARED_RATE = 128  # bytes a cycle from shared memory


def cycles(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Estimated time of a GEMM.

    Tensor cores take n/2 cycles for an MMA of 64 rows × n columns × 16 and read 32·(64 + n) bytes for it, while the
    next operands arrive: the slower of the two decides.
    """
    multiply = tile.rows * tile.columns / 32  # a stage, 64 of the inner dimension
    feed = 128 * (tile.rows + tile.columns + tile.rows / 64 * (64 + tile.columns)) / SHARED_RATE
    turns = -(-tile.clusters(m, n) // (multiprocessors // tile.cluster))
    return LAUNCH + turns * -(-k // 64) * max(multiply, feed) + (turns - 1) * NEXT_TILE


def _fitting(tile, m, n, multiprocessors):
    """The tile with the most stages that shared memory holds, or None."""
    alone = tile.clusters(m, n) * tile.cluster <= multiprocessors
    deepest_first = (tile._replace(stages=stages) for stages in range(8, 2, -1))
    return next((one for one in deepest_first if one.shared_bytes(alone) <= cuda.SHARED_BYTES), None)


def tiles(m: int, n: int, k: int, device: torch.device) -> list[Tile]:
    """The most promising tile of each height for a GEMM, best first; none where the kernel does not run."""
    if cuda.capability(device) != (9, 0) or n % 8 or k % 8:
        return []
    multiprocessors = cuda.multiprocessors(device)

    def estimate(tile):
        return cycles(tile, m, n, k, multiprocessors)

    best = []
    for rows, warpgroups, widest in ((64, 1, 216), (128, 2, 216), (256, 2, 144)):
        shapes = [
            Tile(rows, columns, 8, cluster, warpgroups) for columns in range(40, widest + 8, 8) for cluster in (2, 1)
        ]
        fitting = filter(None, (_fitting(tile, m, n, multiprocessors) for tile in shapes))
        best.append(min(fitting, key=estimate))
    return sorted(best, key=estimate)
