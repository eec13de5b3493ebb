"""A GEMM fused with its epilogue, as a kernel for Hopper (hopper.cu)."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels import cuda, gpu
from accel.kernels.linear.reference import TWO_MATRICES, EpilogueArgs

FILE = Path(__file__).with_suffix(".cu")
FUSED_EPILOGUES = ("silu", "swiglu", "rotate", "modulate", "residual")  # numbered as in hopper.cu
SHARED_BYTES = 227 << 10  # maximum per block
MAX_STAGES = 8
MAX_HEAD_DIM = 128  # for "rotate"
CLUSTER = 2


class Tile(NamedTuple):
    """Compile-time shape of the kernel; hopper.cu documents the fields."""

    height: int
    columns: int
    pingpong: bool = True
    warpgroups: int = 2

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def rows(self) -> int:
        """Return the number of rows in a tile."""
        return 64 * self.height * (1 if self.pingpong else self.warpgroups)

    def column_tiles(self, outputs: int, epilogue: str) -> int:
        """Return the number of tiles that cover `outputs` result columns."""
        columns = self.columns // 2 if epilogue in TWO_MATRICES else self.columns
        return -(-outputs // columns)

    def clusters(self, m: int, outputs: int, epilogue: str) -> int:
        """Return the number of cluster tiles in a result (M, outputs)."""
        return -(-m // (self.rows * CLUSTER)) * self.column_tiles(outputs, epilogue)

    @property
    def slots(self) -> int:
        """Return the number of slots for the stream and gates that an epilogue reads."""
        return 1 if self.pingpong else 2  # the other consumer's MMAs hide the loads

    def _outside_stages(self, epilogue, head):
        """Return the size of barriers, biases, slots and, for "rotate", angles."""
        biases = -(-8 * self.warpgroups * self.columns // 1024) * 1024
        line = head // 2 + -(head // 2 - 4) % 32  # words per row of angles
        of_row = {"modulate": 128, "residual": 128 + 64}.get(epilogue, 0)  # bytes of a slot's row
        return 1024 + biases + self.rows * (self.slots * of_row + (4 * line if head else 0))

    def stages(self, epilogue: str, head: int = 0) -> int:
        """Return the number of stages that fit in shared memory, at most MAX_STAGES."""
        stage = 128 * (self.rows + self.columns)
        return min(MAX_STAGES, (SHARED_BYTES - self._outside_stages(epilogue, head)) // stage)

    def shared_bytes(self, epilogue: str, head: int = 0) -> int:
        """Return the size of a block's shared memory."""
        stages = self.stages(epilogue, head) * 128 * (self.rows + self.columns)
        return self._outside_stages(epilogue, head) + stages


# The last three are for few tokens. Measured in log/h100/rae.json.
TILES = (
    Tile(height=2, columns=192),
    Tile(height=2, columns=128),
    Tile(height=1, columns=192, pingpong=False),
    Tile(height=1, columns=128, pingpong=False),
    Tile(height=1, columns=64, pingpong=False),
)


def supports(weight: Tensor, epilogue: str, rotation: Tensor | None = None) -> bool:
    """Return whether the kernel supports a layer with this weight (N, K) and rotation."""
    if not weight.is_cuda or weight.dtype not in cuda.HALF_TYPES:
        return False
    fits = (
        weight.shape[0] % (16 if epilogue in TWO_MATRICES else 8) == 0 and weight.shape[1] % 8 == 0
    )
    if rotation is not None:
        head = 2 * rotation.shape[1]
        fits = fits and head % 8 == 0 and head <= MAX_HEAD_DIM
    return fits and gpu.capability(weight.device) == (9, 0)


def choose_tile(m: int, outputs: int, depth: int, epilogue: str, multiprocessors: int) -> Tile:
    """Return the tile with the smallest estimated number of cycles.

    Accesses to shared memory dominate. For every 64 of the depth a stage is filled once, and each
    MMA of 64 rows reads 64 rows of x and all columns of W.
    """

    def cycles(tile):
        turns = -(-tile.clusters(m, outputs, epilogue) // (multiprocessors // CLUSTER))
        reads = tile.rows // 64 * (64 + tile.columns)
        multiply = -(-depth // 64) * (tile.rows + tile.columns + reads)
        if tile.pingpong:
            finish = tile.rows * tile.columns // 5
            return turns * max(multiply, (multiply + finish) // 2) + finish
        return turns * (multiply + tile.rows * tile.columns // 6)

    return min(TILES, key=cycles)


def source(tile: Tile, epilogue: str, dtype: torch.dtype, head: int = 0) -> str:
    """Return the complete CUDA source of a variant. head: the head dim for "rotate", else 0."""
    half = cuda.HALF_TYPES[dtype]
    return cuda.source(
        (FILE,),
        tile,
        cuda.wgmma("multiply", tile.columns, half),
        half,
        CLUSTER=CLUSTER,
        STAGES=tile.stages(epilogue, head),
        SLOTS=tile.slots,
        EPILOGUE=FUSED_EPILOGUES.index(epilogue),
        HEAD=head,
        BFLOAT16=half == "bf16",
        **cuda.registers(tile.warpgroups, producer=40),
    )


@lru_cache(None)
def _kernel(
    tile: Tile,
    epilogue: str,
    dtype: torch.dtype,
    device: torch.device,
    head: int = 0,
) -> cuda.Kernel:
    """Return a variant of the kernel, loaded on a device."""
    return cuda.Kernel(
        source(tile, epilogue, dtype, head),
        "linear",
        tile.threads,
        tile.shared_bytes(epilogue, head),
        device,
    )


def load(tile: Tile, layer: Any) -> None:
    """Compile and load the kernel of a Linear."""
    head = 0 if layer.rotation is None else 2 * layer.rotation.shape[1]
    weight = layer.weight
    _kernel(tile, layer.epilogue, weight.dtype, weight.device, head)


def launch(
    tile: Tile,
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor | None,
    args: EpilogueArgs,
) -> None:
    """Launch a variant on the current stream.

    x (M, K), weight (N, K), bias (N,): contiguous, in half precision. out: (M, N), or (M, N/2) for
    two matrices; None for "residual". The kernel starts and loads weights while its predecessor is
    still running, which must therefore not write weight, bias or rotation.
    """
    columns, depth = weight.shape
    m = x.numel() // depth
    outputs = columns // 2 if epilogue in TWO_MATRICES else columns

    def row_map(tensor, width, rows, box, gaps=False):
        strides = (tensor.element_size() * tensor.stride(-2),)
        swizzle = tensor.element_size() * box[0]
        return cuda.tensor_map(tensor, (width, rows), strides, box, swizzle, gaps)

    rows_of_x = row_map(x, depth, m, (64, tile.rows))
    old_stream = gates = rows_of_x  # unused by the epilogue
    if args.stream is not None:
        old_stream = row_map(args.stream, outputs, m, (32, tile.rows))
    if args.gate is not None:
        gates = row_map(args.gate, outputs, m, (32, tile.rows), gaps=True)
    head = 0 if args.rotation is None else 2 * args.rotation.shape[1]
    max_clusters = cuda.multiprocessors(x.device) // CLUSTER
    clusters = min(tile.clusters(m, outputs, epilogue), max_clusters)
    _kernel(tile, epilogue, x.dtype, x.device, head).launch(
        clusters * CLUSTER,
        rows_of_x,
        row_map(weight, depth, columns, (64, tile.columns // 2)),
        old_stream,
        gates,
        out,
        bias,
        args.rotation,
        args.stream,
        args.squares,
        m,
        outputs,
        depth,
        args.tokens,
        args.first,
        0 if args.squares is None else len(args.squares),
        args.eps,
        overlap=True,
    )
