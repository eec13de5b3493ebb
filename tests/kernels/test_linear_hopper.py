"""Our product for few rows on Hopper: its tiles cover what they say, its machine code, and on a GPU every tile against float64."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from test_attention import disassemble, needs_hopper
from test_linear import case, reference

from accel.kernels import cuda as hopper
from accel.kernels import linear
from accel.kernels.linear import hopper as module
from accel.kernels.linear.hopper import Tile, linear_hopper

# One of each kind: blocks alone and in clusters, one product or two for a warpgroup, one warpgroup, chunks of every layout.
KINDS = (
    Tile(128, 216, 3),
    Tile(128, 72, 8, cluster=2),
    Tile(256, 112, 3, cluster=2),
    Tile(128, 112, 4, cluster=4),
    Tile(128, 64, 4),
    Tile(64, 144, 8, cluster=2, warpgroups=1),
)
PINNED = tuple(
    dict.fromkeys(tile for known in linear.KNOWN.values() for tile in known.values() if isinstance(tile, Tile))
)


@pytest.mark.parametrize("tile", dict.fromkeys(KINDS + PINNED))
def test_a_multiprocessor_holds_it(tile):
    assert tile.shared_bytes(True) <= module.SHARED_BYTES and tile.cluster <= 8
    assert (
        tile.rows % (64 * tile.warpgroups) == 0 and tile.columns % 8 == 0 and tile.columns % tile.chunk == 0
    )  # whole products, swizzles, stores
    assert max(tile.rows, tile.columns) <= 256  # lines that a copy takes, columns of a product
    registers = hopper.registers(tile.warpgroups, 40)
    sums = tile.rows // 64 // tile.warpgroups * tile.columns // 2
    assert sums + 40 < registers["REGISTERS"]
    if tile.warpgroups > 1:
        assert 128 * (registers["REGISTERS"] * tile.warpgroups + registers["COPY_REGISTERS"]) <= 65536


@pytest.mark.parametrize("tile", dict.fromkeys(KINDS + PINNED))
@pytest.mark.parametrize("m, n", ((1024, 3456), (513, 1152), (8, 8)))
def test_blocks_cover_a_product_once(tile, m, n):
    """The index arithmetic of linear_hopper.cu: every result is one block's, and the weights' lines that a block multiplies are what the blocks of its
    cluster copy to it, by boxes of one of two sizes."""
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


def test_candidates(monkeypatch):
    """Few, that fit, and for what was measured among them what won or its like; none where the kernel does not run."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for m, n, k, known in (
        (1024, 1152, 4608, (128, 72)),
        (1024, 4608, 1152, (256, 144)),
        (2048, 1152, 1152, (128, 144)),
        (24, 864, 216, None),
    ):
        found = module.tiles.__wrapped__(m, n, k, "cuda")
        assert {tile.rows for tile in found} == {64, 128, 256} and len(found) == 3
        assert known is None or known in [(tile.rows, tile.columns) for tile in found]
        for tile in found:
            alone = tile.clusters(m, n) * tile.cluster <= 132
            assert tile.shared_bytes(alone) <= module.SHARED_BYTES
    assert module.tiles.__wrapped__(24, 12, 216, "cuda") == ()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert module.tiles.__wrapped__(24, 864, 216, "cuda") == ()


@pytest.mark.parametrize(
    "tile, dtype, gelu, alone",
    (
        (Tile(256, 144, 3, cluster=2), torch.float16, True, False),
        (Tile(64, 72, 8, cluster=2, warpgroups=1), torch.bfloat16, False, True),
    ),
)
def test_machine_code(tile, dtype, gelu, alone, tmp_path):
    """One stage's products are issued before the last one's are awaited and without waiting for addresses, nothing is spilled, and weights are
    copied to a whole cluster."""
    (tmp_path / "cubin").write_bytes(hopper.compile_cubin(module.source(tile, dtype, gelu, alone), module.SOURCE.name))
    code = disassemble(tmp_path / "cubin")
    products = re.findall(r"HGMMA\.(64x\d+x16)\.F32(\.BF16)?", code)
    assert {shape for shape, _ in products} == {f"64x{tile.columns}x16"}
    assert all(bool(bf16) == (dtype == torch.bfloat16) for _, bf16 in products)
    assert code.count("WARPGROUP.DEPBAR") <= len(products) / 4 and "STL" not in code and "LDL" not in code
    assert (
        "R2UR" not in code[code.index("HGMMA") : code.rindex("HGMMA")]
    )  # addresses of operands are computed in registers of the whole warp
    assert "UTMALDG.2D.MULTICAST" in code and "UTMASTG.2D" in code and ("MUFU.EX2" in code) == gelu
    assert "ACQBULK" in code and "PREEXIT" in code  # programmatic dependent launch


def test_choices_travel_as_plain_numbers(tmp_path):
    """Between ranks and through the file of measurements, beside cuBLASLt's."""
    known = {
        "1x8x8 float16": Tile(128, 72, 4, cluster=2),
        "2x8x8 bfloat16 gelu": linear.Algorithm((1, 2**63, 3, 4, 5, 6, 7, 8), 64),
    }
    linear._write(tmp_path / "products.json", known)
    assert linear._read(tmp_path / "products.json") == known
    for algorithm in known.values():
        restored = linear._restored(linear._plain(algorithm))
        assert restored == algorithm and type(restored) is type(algorithm)


def test_a_changed_kernel_is_measured_anew(tmp_path, monkeypatch):
    before = module.version()
    changed = tmp_path / module.SOURCE.name
    changed.write_text(module.SOURCE.read_text() + "\n")
    monkeypatch.setattr(module, "SOURCE", changed)
    assert module.version.__wrapped__() != before


#################################################################################
#                                     GPU                                       #
#################################################################################


def run(x, weight, bias, gelu, tile, overlap=True):
    out = torch.full(
        (*x.shape[:-1], len(bias)), float("nan"), dtype=x.dtype, device=x.device
    )  # an element left unwritten shows
    linear_hopper(x, weight, bias, out, gelu, tile, overlap)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 5e-4), (torch.bfloat16, 4e-3)))
@pytest.mark.parametrize("tile", dict.fromkeys(KINDS + PINNED))
def test_every_tile(tile, dtype, tolerance):
    """Sides that tiles fit and that they do not, odd numbers of rows, fewer than a tile; GELU; the same bits every time."""
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
        got, want = run(x, weight, bias, gelu, tile), reference(x, weight, bias, gelu)
        assert (got.double() - want).norm() <= tolerance * want.norm(), (m, n, k)
        assert all(torch.equal(run(x, weight, bias, gelu, tile), got) for _ in range(5)), (m, n, k)


@pytest.mark.gpu
def test_a_chain_in_a_graph_with_and_without_overlap():
    """Each kernel begins while the one before still runs: in a chain of products whose results lie in two buffers in turn, one that did not await
    its input, or wrote while the one before last was still being read, would show."""
    needs_hopper()
    x, weight, bias = case(1024, 1152, 1152, torch.float16, "cuda")
    tile, buffers = KINDS[1], [torch.empty_like(x) for _ in range(2)]

    def chain(overlap):
        source = x
        for i in range(40):
            linear_hopper(source, weight, bias, buffers[i % 2], False, tile, overlap)
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
    assert (
        results[0].isfinite().all()
        and results[0].norm() > 0
        and all(torch.equal(result, results[0]) for result in results)
    )


@pytest.mark.gpu
def test_the_route_by_name(tmp_path, monkeypatch):
    needs_hopper()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear, "_chosen", {})
    x, weight, bias = case(300, 864, 288, torch.float16, "cuda", (2,))
    want = reference(x, weight, bias, True)
    got = linear.linear(x, weight, bias, True, "hopper")
    [(_, tile)] = linear._chosen.values()
    assert isinstance(tile, Tile) and (got.double() - want).norm() <= 5e-4 * want.norm()
    linear.linear(x, weight, bias, True, "cublaslt")
    assert [type(algorithm) for _, algorithm in linear._chosen.values()] == [Tile, linear.Algorithm]
    with pytest.raises(ValueError, match="sides in eights"):
        linear.linear(*case(64, 12, 20, torch.float16, "cuda"), route="hopper")
    key = 600, 864, 288, True, torch.float16, x.device
    chosen = linear.choice(*key)
    monkeypatch.setattr(linear, "_chosen", {})  # as in another process
    linear.adopt(*key, chosen)
    assert linear.choice(*key) == chosen
