"""Compiling, keeping and loading CUDA text; the version that marks what depends on the
kernels' sources.
"""

from itertools import cycle

import pytest
import torch
from kernel_testing import disassemble, needs_hopper

from accel import kernels
from accel.kernels import cuda
from accel.kernels.attention import hopper as attention
from accel.kernels.attention import simt
from accel.kernels.linear import hopper as linear
from accel.kernels.split_attention import hopper as split_attention
from accel.kernels.split_linear import hopper as split_linear

CONFIGS = attention.LONG, attention.SHORT, attention.SINGLE
SPLIT_TILES = split_linear.TILE, split_linear.FEW_ROWS, split_linear.HIGH_ONLY
# (kernel, its text): each configuration, with one epilogue or result of each tile.
TEXTS = [("attention", attention.source(config, torch.float16)) for config in CONFIGS]
TEXTS += [("attention", attention.source(attention.LONG, torch.bfloat16))]
TEXTS += [("split_attention", split_attention.source())]
TEXTS += [("split_linear", split_linear.source(0, tile)) for tile in SPLIT_TILES]
TEXTS += [("split_linear", split_linear.source(2))]
TEXTS += [
    ("linear", linear.source(tile, epilogue, dtype, 72))
    for tile, epilogue in zip(linear.TILES, cycle(linear.FUSED_EPILOGUES))
    for dtype in (torch.float16, torch.bfloat16)[: 1 + (epilogue == "silu")]
]
TEXT = 'extern "C" __global__ void fill(int *to, int value, float scale) {{ {body} }}'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and the list of compiled kernels."""
    compiled = []
    compile_cubin = cuda.compile_cubin
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        cuda, "compile_cubin", lambda *text: compiled.append(text) or compile_cubin(*text)
    )
    return tmp_path / "dit", compiled


def test_a_cubin_is_kept_and_checked(cache):
    """Compiled once; anew where a byte of the file is wrong, where the text is another,
    and where the file cannot be read.
    """
    folder, compiled = cache
    text = TEXT.format(body="to[0] = value;")
    cubin = cuda.cached_cubin(text, "fill")
    assert (
        cubin[:4] == b"\x7fELF" and cuda.cached_cubin(text, "fill") == cubin and len(compiled) == 1
    )
    [file] = folder.iterdir()
    for damaged in (file.read_bytes()[:-1] + b"?", b"", file.read_bytes()[:40], cubin):
        file.write_bytes(damaged)
        assert cuda.cached_cubin(text, "fill") == cubin and file.read_bytes()[32:] == cubin
    assert len(compiled) == 5
    cuda.cached_cubin(TEXT.format(body="to[0] = 0;"), "fill")
    assert len(compiled) == 6 and len(list(folder.iterdir())) == 2


def test_the_version_sees_every_source(tmp_path, monkeypatch):
    """Files in subfolders count too; FID jobs record the version."""
    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    (tmp_path / "op" / "deep").mkdir(parents=True)
    seen = {kernels.version()}
    for name in ("a.py", "op/b.cu", "op/deep/c.cuh", "op/known.json"):
        (tmp_path / name).write_text(name)
        seen.add(kernels.version())
    assert len(seen) == 5
    (tmp_path / "op" / "notes.txt").write_text("no source")
    assert kernels.version() in seen


@pytest.mark.parametrize(
    "name, text", TEXTS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(TEXTS)]
)
def test_hoppers_kernels_compile_for_tensor_cores_and_spill_little(name, text):
    code = disassemble(cuda.compile_cubin(text, name))
    assert "HGMMA" in code and code.count("STL") + code.count("LDL") <= 8


@pytest.mark.parametrize("target", ("sm_75", "sm_90a"))
def test_float32_attention_compiles_without_tensor_cores_and_spills(target):
    code = disassemble(cuda.compile_cubin(simt.source(72), "attention", target))
    assert code.count("FFMA") > 1000
    assert not any(word in code for word in ("MMA.", "LDL", "STL"))


def test_a_multiprocessor_has_the_shared_memory():
    for config in CONFIGS:
        assert config.blocks * (config.shared_bytes + 1024) <= 228 * 1024
    for tile in (*SPLIT_TILES, split_attention.CONFIG):
        assert tile.shared_bytes <= 227 * 1024


@pytest.mark.gpu
def test_a_kernel_gets_its_arguments(cache):
    needs_hopper()
    text = TEXT.format(body="if (to) to[3] = int(value * scale) + blockIdx.x;")
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    device = torch.device("cuda", 0)
    for _ in range(2):  # compiled, then from the cache
        kernel = cuda.Kernel(text, "fill", 1, 0, device)
        kernel.launch(1, out, -6, 0.5)
        kernel.launch(1, None, 9, 1.0)
        assert out.tolist() == [0, 0, 0, -3]
    assert len(cache[1]) == 1


@pytest.mark.gpu
def test_a_first_use_inside_a_graph_is_refused():
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="run the step once"),
    ):
        cuda.Kernel(TEXT.format(body=""), "fill", 1, 0, torch.device("cuda", 0))
