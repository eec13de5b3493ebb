"""y = x·Wᵀ + b on Hopper for few rows (linear_hopper.cu), which accel.kernels.linear measures beside cuBLASLt's algorithms."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from accel import kernels
from accel.kernels import cuda as hopper

SOURCE = Path(__file__).with_suffix(".cu")
SHARED_BYTES = 232448  # of a multiprocessor, for one block


class Tile(NamedTuple):
    """Compile-time shape of linear_hopper.cu, which says what each means."""

    rows: int
    columns: int
    stages: int
    cluster: int = 1
    warpgroups: int = 2

    @property
    def threads(self):
        return 128 * (self.warpgroups + 1)

    @property
    def chunk(self):
        """Columns of one store: rows of 64 columns are swizzled, those of odd eights free of bank conflicts by themselves."""
        return next(chunk for chunk in (64, 72, self.columns) if self.columns % chunk == 0)

    def shared_bytes(self, alone):
        start = 1024 + -(-4 * self.warpgroups * self.columns // 1024) * 1024  # barriers, biases
        operands, results = self.stages * 128 * (self.rows + self.columns), 2 * self.rows * self.columns
        return start + (max(operands, results) if alone else operands + results)

    def clusters(self, m, n):
        """How many an (M, N) result takes."""
        return -(-m // (self.rows * self.cluster)) * -(-n // self.columns)


def source(tile, dtype, gelu, alone):
    """The whole CUDA text of a variant; `alone`: a block takes one tile."""
    constants = dict(
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        WARPGROUPS=tile.warpgroups,
        CLUSTER=tile.cluster,
        CHUNK=tile.chunk,
        ALONE=int(alone),
        GELU=int(gelu),
        **hopper.registers(tile.warpgroups, 40),
    )
    half = hopper.HALF[dtype]
    return hopper.text(
        SOURCE, constants, hopper.product("multiply", tile.columns, half, False, False, False), hopper.conversions(half)
    )


@lru_cache(None)
def _kernel(tile, dtype, gelu, alone, device):
    """A variant on a device, and how many of its clusters that holds."""
    shared = tile.shared_bytes(alone)
    function = hopper.load(source(tile, dtype, gelu, alone), SOURCE.name, "linear", shared, device)
    return function, hopper.clusters(function, tile.cluster, tile.threads, shared, device)


def kernel_for(tile, m, n, dtype, gelu, device):
    """The kernel of a product, loaded, and compiled if it is not on disk yet, the clusters to launch, and whether each block takes one tile."""
    count = tile.clusters(m, n)
    alone = (
        tile.shared_bytes(False) > SHARED_BYTES
        or count * tile.cluster <= torch.cuda.get_device_properties(device).multi_processor_count
    )
    function, most = _kernel(tile, dtype, gelu, alone, device)
    return function, count if alone else min(count, most), alone


@lru_cache(4096)
def _map(pointer, dtype, rows, columns, box_rows, box_columns, swizzle):
    return hopper.tensor_map(pointer, dtype, (columns, rows), (2 * columns,), (box_columns, box_rows), swizzle)


@lru_cache(None)
def version():
    """Changes with whatever a tile's speed depends on."""
    return kernels.version(SOURCE, Path(__file__), Path(hopper.__file__), Path(hopper.__file__).with_name("hopper.cuh"))


def linear_hopper(x, weight, bias, out, gelu, tile, overlap=True):
    """x (…, K), weight (N, K), bias (N,), float16 or bfloat16, contiguous, on a GPU of capability 9.0, K and N in eights → out (…, N).
    `overlap`: set up, and fetch weights, while the kernel before still runs, which therefore may write x but not the weights. Meet a shape once
    before capturing it in a graph."""
    (n, k), m = weight.shape, x.numel() // x.shape[-1]
    if not m:
        return
    function, clusters, alone = kernel_for(tile, m, n, x.dtype, gelu, x.device)
    eights, chunk = tile.columns // 8, tile.chunk
    maps = [
        _map(x.data_ptr(), x.dtype, m, k, tile.rows, 64, hopper.SWIZZLE_128),
        *(
            _map(weight.data_ptr(), x.dtype, n, k, 8 * share, 64, hopper.SWIZZLE_128)
            for share in (-(-eights // tile.cluster), eights // tile.cluster)
        ),
        _map(out.data_ptr(), x.dtype, m, n, 16, chunk, hopper.SWIZZLE_128 if chunk == 64 else 0),
    ]
    hopper.launch(
        function,
        clusters * tile.cluster,
        tile.threads,
        tile.shared_bytes(alone),
        x.device,
        (*maps, bias, *map(ctypes.c_int, (m, n, k))),
        tile.cluster,
        overlap,
    )


#################################################################################
#                               Which tiles to try                              #
#################################################################################

# Cycles, fitted to log/products-few-rows-h200.json: what a launch and a further tile of a block cost; bytes that shared memory gives in one.
LAUNCH, NEXT_TILE, SHARED_RATE = 5000, 3000, 128


def cycles(tile, m, n, k, multiprocessors):
    """Estimated time of a product. Tensor cores take a product of 64 rows × n columns × 16 in n/2 cycles and read 32·(64 + n) bytes for it, beside
    what is copied: the slower of the two decides."""
    multiply = tile.rows * tile.columns / 32  # a stage, 64 of the inner dimension
    feed = 128 * (tile.rows + tile.columns + tile.rows / 64 * (64 + tile.columns)) / SHARED_RATE
    turns = -(-tile.clusters(m, n) // (multiprocessors // tile.cluster))
    return LAUNCH + turns * -(-k // 64) * max(multiply, feed) + (turns - 1) * NEXT_TILE


@lru_cache(None)
def tiles(m, n, k, device):
    """Those worth measuring for a product, the most promising of each height; none where the kernel does not run."""
    if torch.cuda.get_device_capability(device) != (9, 0) or n % 8 or k % 8:
        return ()
    multiprocessors, best = torch.cuda.get_device_properties(device).multi_processor_count, []
    for rows, warpgroups, widest in ((64, 1, 216), (128, 2, 216), (256, 2, 144)):
        found = []
        for columns in range(40, widest + 8, 8):
            for cluster in (2, 1):
                tile = Tile(rows, columns, 8, cluster, warpgroups)
                alone = tile.clusters(m, n) * cluster <= multiprocessors
                stages = next(
                    (
                        stages
                        for stages in range(8, 2, -1)
                        if tile._replace(stages=stages).shared_bytes(alone) <= SHARED_BYTES
                    ),
                    None,
                )
                if stages:
                    found.append(tile._replace(stages=stages))
        best.append(min(found, key=lambda tile: cycles(tile, m, n, k, multiprocessors)))
    return tuple(sorted(best, key=lambda tile: cycles(tile, m, n, k, multiprocessors)))
