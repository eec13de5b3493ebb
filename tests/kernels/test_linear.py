"""The linear layer's backends against float64, the tanh form of GELU; our kernel's tiles and their machine code."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import disassemble, needs_hopper

from accel.kernels import cuda
from accel.kernels.linear import Linear, hopper
from accel.kernels.linear.hopper import Tile
from accel.kernels.linear.tuner import KNOWN, Tuner
from accel.precision import true_float32

# One of each kind: blocks alone and in clusters, one MMA or two for a warpgroup, one warpgroup, chunks of every layout.
KINDS = (
    Tile(128, 216, 3),
    Tile(128, 72, 8, cluster=2),
    Tile(256, 112, 3, cluster=2),
    Tile(128, 112, 4, cluster=4),
    Tile(128, 64, 4),
    Tile(64, 144, 8, cluster=2, warpgroups=1),
)
WINNERS = [winner for known in KNOWN.values() for winner in known.values()]
TILES = tuple(dict.fromkeys((*KINDS, *(Tile(*winner["hopper"]) for winner in WINNERS if "hopper" in winner))))


def case(m, n, k, dtype, device, lead=()):
    generator = torch.Generator().manual_seed(m + n + k)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((*lead, m, k), (n, k), (n,)))
    return x.to(device, dtype), (weight / k**0.5).to(device, dtype), bias.to(device, dtype)


def formula(x, weight, bias, gelu):
    y = x.double() @ weight.double().t() + bias.double()
    return 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))) if gelu else y


@pytest.mark.parametrize("gelu", (False, True))
def test_the_reference(gelu):
    x, weight, bias = case(7, 24, 40, torch.float64, "cpu", (3,))
    layer = Linear(weight, bias, gelu)
    torch.testing.assert_close(layer(x), formula(x, weight, bias, gelu), rtol=1e-12, atol=1e-12)
    assert layer.shape(21) == (21, 24, 40, gelu) and list(layer.parameters()) == [weight, bias]


#################################################################################
#                       Our kernel's tiles, without a GPU                       #
#################################################################################


@pytest.mark.parametrize("tile", TILES)
def test_a_multiprocessor_holds_it(tile):
    assert tile.shared_bytes(True) <= cuda.SHARED_BYTES and tile.cluster <= 8
    # Whole MMAs, swizzles, stores.
    assert tile.rows % (64 * tile.warpgroups) == 0 and tile.columns % 8 == 0 and tile.columns % tile.chunk == 0
    assert max(tile.rows, tile.columns) <= 256  # lines of one load, columns of an MMA
    registers = cuda.registers(tile.warpgroups, producer=40)
    sums = tile.rows // 64 // tile.warpgroups * tile.columns // 2
    assert sums + 40 < registers["REGISTERS"]
    if tile.warpgroups > 1:
        assert 128 * (registers["REGISTERS"] * tile.warpgroups + registers["PRODUCER_REGISTERS"]) <= 65536


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("m, n", ((1024, 3456), (513, 1152), (8, 8)))
def test_blocks_cover_a_result_once(tile, m, n):
    """The index arithmetic of hopper.cu: every result is one block's, and the weights' lines that a block multiplies
    are what the blocks of its cluster load for it, by boxes of one of two sizes."""
    across, eights, done = -(-n // tile.columns), tile.columns // 8, Counter()
    for cluster in range(tile.clusters(m, n)):
        lines = []
        for rank in range(tile.cluster):
            done[(cluster // across * tile.cluster + rank) * tile.rows, cluster % across * tile.columns] += 1
            first, last = eights * rank // tile.cluster, eights * (rank + 1) // tile.cluster
            assert last - first in (eights // tile.cluster, -(-eights // tile.cluster))
            lines.extend(range(8 * first, 8 * last))
        assert lines == list(range(tile.columns))
    assert set(done.values()) == {1}
    assert {(row, column) for row in range(0, m, tile.rows) for column in range(0, n, tile.columns)} <= set(done)


def test_tiles_to_try(monkeypatch):
    """Few, that fit, and for what was measured among them what won or its like; none where the kernel does not run."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    for m, n, k, known in (
        (1024, 1152, 4608, (128, 72)),
        (1024, 4608, 1152, (256, 144)),
        (2048, 1152, 1152, (128, 144)),
        (24, 864, 216, None),
    ):
        found = hopper.tiles(m, n, k, "cuda")
        assert {tile.rows for tile in found} == {64, 128, 256} and len(found) == 3
        assert known is None or known in [(tile.rows, tile.columns) for tile in found]
        for tile in found:
            assert tile.shared_bytes(tile.clusters(m, n) * tile.cluster <= 132) <= cuda.SHARED_BYTES
    assert hopper.tiles(24, 12, 216, "cuda") == []
    monkeypatch.setattr(cuda, "capability", lambda device: (8, 0))
    assert hopper.tiles(24, 864, 216, "cuda") == []


@pytest.mark.parametrize(
    "tile, dtype, gelu, alone",
    (
        (Tile(256, 144, 3, cluster=2), torch.float16, True, False),
        (Tile(64, 72, 8, cluster=2, warpgroups=1), torch.bfloat16, False, True),
    ),
)
def test_machine_code(tile, dtype, gelu, alone):
    """One stage's MMAs are issued before the last one's are awaited and without waiting for addresses, nothing is
    spilled, and weights are multicast to a cluster."""
    code = disassemble(cuda.compile_cubin(hopper.source(tile, dtype, gelu, alone), "linear"))
    multiplied = re.findall(r"HGMMA\.(64x\d+x16)\.F32(\.BF16)?", code)
    assert {shape for shape, _ in multiplied} == {f"64x{tile.columns}x16"}
    assert all(bool(bf16) == (dtype == torch.bfloat16) for _, bf16 in multiplied)
    assert code.count("WARPGROUP.DEPBAR") <= len(multiplied) / 4 and "STL" not in code and "LDL" not in code
    # Addresses of operands are computed in registers of the whole warp.
    assert "R2UR" not in code[code.index("HGMMA") : code.rindex("HGMMA")]
    assert "UTMALDG.2D.MULTICAST" in code and "UTMASTG.2D" in code and ("MUFU.EX2" in code) == gelu
    assert "ACQBULK" in code and "PREEXIT" in code  # programmatic dependent launch


#################################################################################
#                                     GPU                                       #
#################################################################################


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 5e-4), (torch.bfloat16, 4e-3)))
@pytest.mark.parametrize("gelu", (False, True))
@pytest.mark.parametrize(
    "m, n, k", ((4096, 4608, 1152), (4096, 1152, 4608), (64, 648, 216), (16, 1536, 384), (9, 864, 216))
)
def test_every_backend_on_a_gpu(m, n, k, gelu, dtype, tolerance, tmp_path):
    x, weight, bias = case(m, n, k, dtype, "cuda", (2,))
    want = formula(x, weight, bias, gelu)
    for backend in ("torch", "epilogue", "cublaslt", "tuned"):
        got = Linear(weight, bias, gelu, Tuner([tmp_path]), backend)(x)
        assert got.shape == want.shape and (got.double() - want).norm() <= tolerance * want.norm(), backend


def run(x, weight, bias, gelu, tile, overlap=True):
    (n, k), m = weight.shape, x.numel() // x.shape[-1]
    out = torch.full((m, n), float("nan"), dtype=x.dtype, device=x.device)  # an element left unwritten shows
    hopper.Gemm(m, n, k, gelu, x.dtype, x.device).run(tile, x, weight, bias, out, overlap)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 5e-4), (torch.bfloat16, 4e-3)))
@pytest.mark.parametrize("tile", TILES)
def test_every_tile(tile, dtype, tolerance):
    """Sides that tiles fit and that they do not, odd numbers of tokens, fewer than a tile; GELU; the same bits every
    time."""
    needs_hopper()
    for m, n, k, gelu in (
        (1024, 1152, 1152, False),
        (1, 8, 8, False),
        (257, 648, 216, True),
        (1000, 1536, 384, True),
        (512, 1152, 4608, False),
        (4096, 384, 72, False),
    ):
        x, weight, bias = case(m, n, k, dtype, "cuda")
        got, want = run(x, weight, bias, gelu, tile), formula(x, weight, bias, gelu)
        assert (got.double() - want).norm() <= tolerance * want.norm(), (m, n, k)
        assert all(torch.equal(run(x, weight, bias, gelu, tile), got) for _ in range(5)), (m, n, k)


@pytest.mark.gpu
def test_a_chain_in_a_graph_with_and_without_overlap():
    """Each kernel begins while the one before still runs: in a chain of GEMMs whose results lie in two buffers in turn,
    one that did not await its input, or wrote while the one before last was still being read, would show."""
    needs_hopper()
    x, weight, bias = case(1024, 1152, 1152, torch.float16, "cuda")
    buffers, gemm = [torch.empty_like(x) for _ in range(2)], hopper.Gemm(1024, 1152, 1152, False, x.dtype, x.device)

    def chain(overlap):
        source = x
        for i in range(40):
            gemm.run(KINDS[1], source, weight, bias, buffers[i % 2], overlap)
            source = buffers[i % 2]
        return source

    results = []
    for overlap in (False, True):
        chain(overlap)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            last = chain(overlap)
        for _ in range(20):
            last.zero_()
            graph.replay()
            results.append(last.clone())
    assert results[0].isfinite().all() and results[0].norm() > 0
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu
def test_the_epilogue_is_the_tanh_form():
    """In float32 the two forms of GELU lie 1.5e-4 apart, far over the rounding."""
    x, weight, bias = case(256, 512, 128, torch.float32, "cuda")
    with true_float32():
        got = Linear(weight, bias, True, backend="epilogue")(x).double()
    assert (got - formula(x, weight, bias, True)).norm() < 1e-5 * got.norm()
    assert (got - F.gelu(x.double() @ weight.double().t() + bias.double())).norm() > 5e-5 * got.norm()
