"""The row kernel against float64, through Triton's interpreter on a CPU and compiled on a GPU; and compiled ahead of time for three GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel.graphs import capture
from accel.kernels import adaln as norm
from accel.kernels import cuda as hopper
from accel.kernels.adaln import Modulation, norm_modulate, tile_config
from accel.kernels.adaln import hopper as norm_hopper

WIDTHS = (1152, 216, 384, 768, 1024, 100)
# (N, T): odd shapes, one row, more rows of a sample than a program takes and a last program that has fewer.
SHAPES = ((2, 9), (1, 1), (3, 64), (5, 17))


def case(width, n, tokens, branches, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    x = draw(n, tokens, width) * 3 + 5  # a mean that a one-pass variance would lose
    pairs = [(draw(n, tokens, width).to(dtype).to(device), gate) for gate in (2, 5)[:branches]]
    entry = torch.arange(n) * 2 % 3  # shared between samples, out of order
    return x.to(device), Modulation(draw(4, 6, width).to(device), entry.to(device)), pairs


def check(width, n, tokens, branches, update, dtype, device, tolerance, route="triton", result=None):
    x, modulation, pairs = case(width, n, tokens, branches, dtype, device)
    dtype = result or dtype
    wide = x.double()
    want = norm_modulate(
        wide, Modulation(modulation.table.double(), modulation.entry), 3, 4, pairs, update, route="torch"
    )
    before = x.clone()
    got = norm_modulate(x, modulation, 3, 4, pairs, update, dtype, route=route)
    assert got.dtype == dtype and got.isfinite().all()
    assert (got.double() - want).norm() <= tolerance * want.norm()
    if update:
        assert (x - wide).norm() <= 1e-6 * wide.norm() and not torch.equal(x, before)
    else:
        assert torch.equal(x, before)


def reference(x, modulation, pairs):
    """The module's formula written out, with vector 3 as shift and 4 as scale."""
    row = modulation.table[modulation.entry].double()[:, :, None]  # (N, V, 1, D)
    total = x.double() + sum(row[:, gate] * branch.double() for branch, gate in pairs)
    centred = total - total.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + row[:, 4]) + row[:, 3]


@pytest.mark.parametrize("branches", (0, 1, 2))
def test_the_twin_is_the_formula(branches):
    x, modulation, pairs = case(216, 3, 10, branches, torch.float64, "cpu")
    got = norm_modulate(x.double(), Modulation(modulation.table.double(), modulation.entry), 3, 4, pairs, route="torch")
    torch.testing.assert_close(got, reference(x, modulation, pairs), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("branches, update", ((0, False), (1, False), (2, False), (2, True)))
@pytest.mark.parametrize("width", (*WIDTHS, 1536, 2304, 4096))
def test_compiled_kernel(width, branches, update):
    for n, tokens in (*SHAPES, (16, 1024), (1009, 9)):
        check(width, n, tokens, branches, update, torch.float16, "cuda", 3e-4)
        if width in (1152, 216):
            check(width, n, tokens, branches, update, torch.bfloat16, "cuda", 2.5e-3)
            check(width, n, tokens, branches, update, torch.float32, "cuda", 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("branches, update", ((0, False), (1, False), (2, False), (2, True)))
@pytest.mark.parametrize("width", (1152, 384, 768, 1024, 2048))
def test_kernel_for_few_rows(width, branches, update):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("our kernel needs a GPU of capability 9.0")
    for n, tokens in (*SHAPES, (1, 1024), (2, 1024), (4, 1024), (1009, 9)):
        check(width, n, tokens, branches, update, torch.float16, "cuda", 3e-4, "hopper")
        check(width, n, tokens, branches, update, torch.bfloat16, "cuda", 2.5e-3, "hopper")
        if branches:
            check(width, n, tokens, branches, update, torch.float16, "cuda", 1e-6, "hopper", torch.float32)


@pytest.mark.parametrize("branches, half, wide", ((1, torch.float16, False), (2, torch.bfloat16, True)))
def test_machine_code_for_few_rows(branches, half, wide, tmp_path):
    """Nothing is read before the kernel that wrote it is done, and columns go four at a time, none by way of local memory."""
    from test_attention import disassemble

    (tmp_path / "cubin").write_bytes(
        hopper.compile_cubin(norm_hopper.source(1152, branches, branches == 2, half, wide, norm.EPS), "hopper.cu")
    )
    code = disassemble(tmp_path / "cubin")
    assert code.index("ACQBULK") < code.index("LDG") and code.count("LDG.E.128") == 9 * (3 + branches)
    assert "STL" not in code and "LDL" not in code


def test_few_rows_refuse_what_they_cannot_do():
    x, modulation, pairs = case(216, 2, 9, 1, torch.float16, "cpu")
    with pytest.raises(ValueError, match="capability 9.0; take 'triton'"):
        norm_modulate(x, modulation, 3, 4, pairs, dtype=torch.float16, route="hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("branches, update, element_bytes", ((1, False, 4 + 2 + 2), (2, True, 4 + 4 + 2 + 2 + 2)))
def test_bandwidth(branches, update, element_bytes):
    """XL's rows of 16 × 1024 tokens at 85 % or more of the bandwidth that a copy of the residual stream reaches."""
    cases = [
        case(1152, 16, 1024, branches, torch.float16, "cuda", seed) for seed in range(4)
    ]  # more than any cache holds
    copies = [torch.empty_like(x) for x, _, _ in cases]

    def milliseconds(step):
        outputs = []
        replay = capture(
            lambda: outputs.extend(step(index) for index in range(4))
        )  # launched one by one they would wait for the host
        times = []
        for _ in range(2000):
            replay()  # an idle GPU runs at a fraction of its clock
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 4)
        return sorted(times)[10]

    def kernel(index):
        x, modulation, pairs = cases[index]
        return norm_modulate(x, modulation, 3, 4, pairs, update, torch.float16, route="triton")

    elements = cases[0][0].numel()
    copied = 8 * elements / milliseconds(lambda index: copies[index].copy_(cases[index][0]))
    moved = element_bytes * elements / milliseconds(kernel)
    assert moved >= 0.85 * copied, f"{moved / 1e9:.2f} TB/s, a copy {copied / 1e9:.2f}"


@pytest.mark.gpu
def test_auto_takes_the_kernel_on_a_gpu(monkeypatch):
    launched = []
    monkeypatch.setattr(norm, "_triton", lambda *arguments: launched.append(arguments))
    x, modulation, pairs = case(216, 2, 9, 1, torch.float16, "cuda")
    norm_modulate(x, modulation, 3, 4, pairs, dtype=torch.float16)
    assert len(launched) == 1


def test_interpreted_kernel():
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_adaln; test_adaln.interpret()"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": _path()},
    )
    assert done.returncode == 0 and "interpreted" in done.stdout, done.stdout + done.stderr


def interpret():
    norm.tile_config = lambda width, rows: tile_config(width, 8192 if rows > 10 else rows)  # both forms, on few rows
    for width in WIDTHS:
        for n, tokens in SHAPES[:2]:
            for branches, update in ((0, False), (1, False), (1, True), (2, True)):
                # The interpreter cuts float32 to bfloat16 where hardware rounds: twice the error.
                for dtype, tolerance in ((torch.float16, 3e-4), (torch.bfloat16, 5e-3), (torch.float32, 1e-6)):
                    check(width, n, tokens, branches, update, dtype, "cpu", tolerance)
    print("interpreted")


def _path():
    return str(Path(__file__).parents[2])


@pytest.mark.parametrize("capability, dtype", ((70, "fp16"), (70, "terms"), (80, "fp16"), (90, "fp16")))
def test_compiles_ahead_of_time(capability, dtype, tmp_path):
    """On any machine, for V100, A100 and H100: neither tensor-core products nor bfloat16 where a V100 has none, no spills."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ahead_of_time.py")), str(capability), "1152", dtype, "2", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": _path()},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["target"].startswith(f"sm_{capability}") and report["cubin_bytes"] > 1000
    assert report["tensor_core_products"] == 0 and not report["bf16"] and report["spills"] == 0
    assert report["wide_loads"] >= 9  # 16 bytes a load for x and both branches


def test_tiles_cover_every_width_without_idle_halves():
    for width in range(1, 5000):
        config = tile_config(width)
        main, tail = config["MAIN"], config["TAIL"]
        assert width <= main + tail < 2 * width or width == main and tail == 0
    assert tile_config(1152) == dict(MAIN=1024, TAIL=128, TURNS=2, num_warps=1)


def test_wrong_inputs_are_refused():
    x, modulation, _ = case(216, 2, 9, 0, torch.float16, "cpu")
    with pytest.raises(TypeError, match="float32 residual"):
        norm_modulate(x.half(), modulation, 0, 1, route="triton")
    with pytest.raises(ValueError, match="contiguous"):
        norm_modulate(x.transpose(0, 1), modulation, 0, 1, route="triton")
