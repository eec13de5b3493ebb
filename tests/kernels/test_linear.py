"""Products: every route against float64, the tanh form of GELU, the measured algorithms and their file."""

import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from accel.kernels import linear as module
from accel.kernels.linear import linear
from accel.precision import true_float32


def case(m, n, k, dtype, device, lead=()):
    generator = torch.Generator().manual_seed(m + n + k)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((*lead, m, k), (n, k), (n,)))
    return x.to(device, dtype), (weight / k**0.5).to(device, dtype), bias.to(device, dtype)


def reference(x, weight, bias, gelu):
    y = x.double() @ weight.double().t() + bias.double()
    return 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))) if gelu else y


@pytest.mark.parametrize("gelu", (False, True))
def test_plain(gelu):
    x, weight, bias = case(7, 24, 40, torch.float64, "cpu", (3,))
    torch.testing.assert_close(linear(x, weight, bias, gelu), reference(x, weight, bias, gelu), rtol=1e-12, atol=1e-12)


def test_routes_refuse_what_they_cannot_do():
    x, weight, bias = case(7, 24, 40, torch.float32, "cpu")
    with pytest.raises(ValueError, match="take 'plain'"):
        linear(x, weight, bias, gelu=True, route="epilogue")
    with pytest.raises(ValueError, match="on a GPU"):
        linear(x, weight, bias, route="tuned")
    with pytest.raises(ValueError, match="one of auto"):
        linear(x, weight, bias, route="quick")


def test_the_file_of_measurements(tmp_path):
    """Written whole, read back equal, and a damaged or foreign one counts as none."""
    file = tmp_path / "deep" / "products.json"
    known = {"8x8x8 float16": module.Algorithm((1, 2**63, 3, 4, 5, 6, 7, 8), 64)}
    module._write(file, known)
    assert module._read(file) == known and os.listdir(file.parent) == [file.name]
    for text in ("", "{", "[1]", json.dumps({"8x8x8 float16": 3})):
        file.write_text(text)
        assert module._read(file) == {}
    assert module._read(tmp_path / "absent.json") == {}
    module._write(
        tmp_path / "deep" / "products.json" / "below-a-file.json", known
    )  # cannot be written: no error, nothing there
    assert file.is_file()


def test_two_jobs_take_one_choice(tmp_path, monkeypatch):
    """Two jobs for FID with folders of their own, on one machine: the second does not measure, as another algorithm would round differently. A job that
    goes on elsewhere, and has measured otherwise there, goes by its folder. The library and the GPU are stand-ins: this is about files."""
    measured = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "_library", lambda: SimpleNamespace(cublasLtGetVersion=lambda: 1))
    monkeypatch.setattr(module, "_kept_in", None)
    monkeypatch.setattr(
        module,
        "Product",
        lambda *key: SimpleNamespace(
            known=lambda: None, fastest=lambda: measured.append(key) or module.Algorithm((len(measured),) * 8, 0)
        ),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 1/2")
    for name in ("device", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def choose(folder, home="home"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        monkeypatch.setattr(module, "_chosen", {})  # as in a process of its own
        monkeypatch.setattr(module, "_kept_in", None)
        product = 8, 8, 8, torch.float16, False, torch.device("cuda"), "tuned"
        module._choose(*product)  # the check of the weights, which comes before the folder is known
        module.keep_measurements(tmp_path / folder)
        return module._choose(*product)[1].words[0]

    assert [choose("one"), choose("two"), choose("one")] == [1, 1, 1] and len(measured) == 1
    assert [
        choose("three", "elsewhere"),
        choose("one", "elsewhere"),
        choose("two", "elsewhere"),
        choose("four", "elsewhere"),
    ] == [2, 1, 1, 2]
    assert len(list(tmp_path.rglob("products-GPU-1-2-*.json"))) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", ((torch.float16, 5e-4), (torch.bfloat16, 4e-3)))
@pytest.mark.parametrize("gelu", (False, True))
@pytest.mark.parametrize(
    "m, n, k", ((4096, 4608, 1152), (4096, 1152, 4608), (64, 648, 216), (16, 1536, 384), (9, 864, 216))
)
def test_every_route_on_a_gpu(m, n, k, gelu, dtype, tolerance, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_chosen", {})
    x, weight, bias = case(m, n, k, dtype, "cuda", (2,))
    want = reference(x, weight, bias, gelu)
    for route in ("plain", "epilogue", "tuned"):
        got = linear(x, weight, bias, gelu, route)
        assert got.shape == want.shape and (got.double() - want).norm() <= tolerance * want.norm(), route
    [file] = (tmp_path / "dit").glob("products-*.json")  # compiled tiles lie beside it
    assert len(json.loads(file.read_text())) == 1


@pytest.mark.gpu
def test_the_epilogue_is_the_tanh_form():
    """In float32 the two forms of GELU lie 1.5e-4 apart, far over the rounding."""
    x, weight, bias = case(256, 512, 128, torch.float32, "cuda")
    with true_float32():
        got = linear(x, weight, bias, True, "epilogue").double()
    assert (got - reference(x, weight, bias, True)).norm() < 1e-5 * got.norm()
    assert (got - F.gelu(x.double() @ weight.double().t() + bias.double())).norm() > 5e-5 * got.norm()


@pytest.mark.gpu
def test_every_candidate_is_right_and_the_choice_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_chosen", {})
    x, weight, bias = case(3072, 4608, 1152, torch.float16, "cuda")  # not among the known ones
    product = module.Product(3072, 4608, 1152, torch.float16, True, x.device)
    want, candidates = reference(x, weight, bias, True), product.candidates()
    assert len(candidates) > 4
    for algorithm in candidates:
        out = torch.full(
            (3072, 4608), float("nan"), dtype=torch.float16, device="cuda"
        )  # an element left unwritten shows
        product.run(x, weight, bias, out, algorithm)
        assert (out.double() - want).norm() <= 5e-4 * want.norm(), algorithm
    state = torch.cuda.get_rng_state()
    first = linear(x, weight, bias, True, "tuned")
    assert torch.equal(torch.cuda.get_rng_state(), state)  # a run's noise does not depend on whether it had to measure
    monkeypatch.setattr(module, "_chosen", {})  # as in the next process
    monkeypatch.setattr(module.Product, "fastest", lambda self: pytest.fail("measured again"))
    assert torch.equal(linear(x, weight, bias, True, "tuned"), first)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", ((512, 216, 864), (256, 648, 216), (2048, 1152, 4608)))
def test_the_same_bits_every_time(m, n, k):
    """Algorithms that split a small product's K must not depend on which part comes first."""
    x, weight, bias = case(m, n, k, torch.float16, "cuda")
    product = module.Product(m, n, k, torch.float16, False, x.device)
    for algorithm in product.candidates():
        results = []
        for _ in range(20):
            results.append(torch.empty(m, n, dtype=torch.float16, device="cuda"))
            product.run(x, weight, bias, results[-1], algorithm)
        assert all(torch.equal(result, results[0]) for result in results), algorithm


@pytest.mark.gpu
def test_measuring_leaves_the_random_stream_alone():
    """A product may first be met in the middle of a sampling run: the run's pictures must not depend on what was measured before."""
    from accel.kernels.linear import Product

    torch.manual_seed(5)
    want = torch.randn(8, device="cuda")
    torch.manual_seed(5)
    Product(256, 144, 72, torch.float16, False, torch.device("cuda", 0)).fastest()
    assert torch.equal(torch.randn(8, device="cuda"), want)


@pytest.mark.gpu
def test_known_algorithms_are_taken_without_measuring(monkeypatch):
    gpu = torch.cuda.get_device_name()
    if gpu not in module.KNOWN:
        pytest.skip(f"nothing is recorded for {gpu}")
    monkeypatch.setattr(module, "_chosen", {})
    monkeypatch.setattr(module.Product, "fastest", lambda self: pytest.fail("measured"))
    for (m, n, k, gelu), configuration in module.KNOWN[gpu].items():
        x, weight, bias = case(m, n, k, torch.float16, "cuda")
        linear(x, weight, bias, gelu, "tuned")
        _, algorithm = module._chosen[m, n, k, torch.float16, gelu, x.device, "tuned"]
        assert (algorithm if isinstance(algorithm, module.Tile) else module._configuration(algorithm)) == configuration
