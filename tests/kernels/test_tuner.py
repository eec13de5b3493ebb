"""The choices of the tuner and their files: with stand-ins for the library and the GPU,
or on a GPU.
"""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_linear import case, formula

from accel.io.filesystem import cache_folder
from accel.kernels.linear import Linear, cublaslt, tuner
from accel.kernels.linear.cublaslt import Algorithm
from accel.kernels.linear.tuner import Choice, Tuner
from accel.runtime.graphs import capture

GEMM = 8, 8, 8, False, torch.float16, torch.device("cuda", 0)
WORDS = [1, 2**63, 3, 4, 5, 6, 7, 8]


def stand_in(m, n, k, gelu, dtype, device):
    return SimpleNamespace(name=f"{m}x{n}x{k} {str(dtype).removeprefix('torch.')}", device=device)


SHAPES = (256, 64), (128, 64), (128,)  # of x, weight, bias


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A GPU and a library that are not there; the GEMMs that are measured. Each
    measurement finds an algorithm with another workspace.
    """
    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cublaslt, "version", lambda: 1)
    monkeypatch.setattr(cublaslt, "Gemm", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 1/2")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def fastest(gemm):
        found.append(gemm)
        return Choice(None, Algorithm(tuple(WORDS), len(found)))

    monkeypatch.setattr(tuner, "_fastest", fastest)
    return found


def test_a_choice_is_made_once(measured, tmp_path):
    """A process remembers its choice, and the next reads it. Corrupt files are ignored."""
    first = Tuner()
    assert (
        first.choose(*GEMM) is first.choose(*GEMM[:5], torch.device("cuda", 0))
        and len(measured) == 1
    )
    assert Tuner().choose(*GEMM).algorithm == first.choose(*GEMM).algorithm and len(measured) == 1
    [file] = (tmp_path / "home" / "dit").iterdir()
    assert file.name == "products-GPU-1-2-cublaslt-1.json"
    assert json.loads(file.read_text()) == {"8x8x8 float16": [WORDS, 1]}
    assert Tuner([]).choose(*GEMM).algorithm.workspace == 2  # no folder: measured by every process
    entries = 3, [], [WORDS[:2], 64], [WORDS, "64"], [WORDS, -1], [["1"] * 8, 64]
    damaged = "", "{", "[1]", *(json.dumps({"8x8x8 float16": entry}) for entry in entries)
    for workspace, text in enumerate(damaged, start=3):
        file.write_text(text)
        assert Tuner().choose(*GEMM).algorithm.workspace == workspace, text
        assert json.loads(file.read_text()) == {"8x8x8 float16": [WORDS, workspace]}


def test_two_jobs_take_one_choice(measured, tmp_path, monkeypatch):
    """Two FID jobs with folders of their own, on one machine: the second does not
    measure, as another algorithm would round differently. A job that resumes elsewhere,
    where another was measured, goes by its folder.
    """

    def choose(folder, home="home"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        return Tuner([tmp_path / folder, cache_folder()]).choose(*GEMM).algorithm.workspace

    assert [choose("one"), choose("two"), choose("one")] == [1, 1, 1] and len(measured) == 1
    assert [choose(folder, "elsewhere") for folder in ("three", "one", "two", "four")] == [
        2,
        1,
        1,
        2,
    ]
    assert len(list(tmp_path.rglob("products-GPU-1-2-*.json"))) == 6


def test_choices_travel_as_plain_numbers(measured):
    """Rank 0's choices reach other ranks, and files, as plain numbers."""
    Tuner([], share=lambda make: json.loads(json.dumps(make()))).share_choices([GEMM])
    other = Tuner([], share=lambda make: [[WORDS, 64]])
    other.share_choices([GEMM])
    assert other.choose(*GEMM).algorithm == Algorithm(tuple(WORDS), 64) and len(measured) == 1


@pytest.mark.gpu
def test_every_candidate_is_right_and_the_choice_is_remembered(tmp_path):
    x, weight, bias = case(3072, 4608, 1152, torch.float16, "cuda")  # not among the known ones
    gemm = 3072, 4608, 1152, True, torch.float16, x.device
    want = formula(x, weight, bias, "gelu")
    one = cublaslt.Gemm(*gemm)
    choices = [Choice(one, algorithm) for algorithm in one.candidates()]
    assert len(choices) > 4
    for choice in choices:
        # an unwritten element shows
        out = torch.full((3072, 4608), float("nan"), dtype=torch.float16, device="cuda")
        choice.gemm.run(choice.algorithm, x, weight, bias, out)
        assert (out.double() - want).norm() <= 5e-4 * want.norm(), choice.algorithm
    state = torch.cuda.get_rng_state()
    first = Linear(weight, bias, "gelu", tuner=Tuner([tmp_path]))(x)
    # a run's noise does not depend on whether it had to measure
    assert torch.equal(torch.cuda.get_rng_state(), state)
    [file] = tmp_path.iterdir()
    assert list(json.loads(file.read_text())) == ["3072x4608x1152 float16 gelu"]
    assert torch.equal(Linear(weight, bias, "gelu", tuner=Tuner([tmp_path]))(x), first)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", ((512, 216, 864), (256, 648, 216), (2048, 1152, 4608)))
def test_the_same_bits_every_time(m, n, k):
    """Algorithms that split a small GEMM's K must not depend on which part comes first."""
    x, weight, bias = case(m, n, k, torch.float16, "cuda")
    gemm = cublaslt.Gemm(m, n, k, False, torch.float16, x.device)
    for algorithm in gemm.candidates():
        results = [torch.empty(m, n, dtype=torch.float16, device="cuda") for _ in range(20)]
        for result in results:
            gemm.run(algorithm, x, weight, bias, result)
        assert all(torch.equal(result, results[0]) for result in results), algorithm


@pytest.mark.gpu
def test_a_captured_launch_outlives_its_gemm():
    x, weight, bias = (torch.randn(*shape, device="cuda").half() for shape in SHAPES)
    out = x.new_empty(256, 128)
    gemm = cublaslt.Gemm(256, 128, 64, False, x.dtype, x.device)
    launch = partial(gemm.run, gemm.candidates()[0], x, weight, bias, out)
    _, replay = capture(launch)
    want = out.clone()
    del gemm, launch
    out.zero_()
    replay()
    assert torch.equal(out, want) and want.std() > 0
