"""A request to a run: what is refused and when, what is checked of weights and latents,
what loading costs.
"""

import forks
import pytest
import torch
from conftest import mistake
from networks import build, fast_network, large_inside, opened, ready, small

from accel.config.options import Options
from accel.families.dit import FAMILY
from accel.families.dit.network import DiT_models
from accel.pipeline import Pipeline
from accel.runtime.network import Batch
from accel.runtime.overflow import overflows
from accel.tensors import fetch

CPU = torch.device("cpu")


def options_of(weights, **options):
    common = dict(model="DiT-Demo/2", ckpt=str(weights), device="cpu", num_sampling_steps=5)
    return {**common, **options}


@pytest.mark.parametrize(
    "wrong, parameter, name",
    [
        (dict(ckpt="no/such.pt"), "ckpt", "no/such.pt"),
        (dict(precision="exact"), "precision", "fp32"),
        (dict(vae_precision="fp16"), "vae_precision", "fp32"),
        (dict(model="DiT-S/8"), "ckpt", "DiT-S/8"),
    ],
)
def test_what_flags_decide_comes_before_weights_that_are_fetched(
    wrong, parameter, name, weights, monkeypatch
):
    for function in ("from_hub", "download"):
        monkeypatch.setattr(fetch, function, lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr("accel.decoders.loading.FOLDER", weights.parent)  # where no decoder lies
    with mistake(parameter, name):
        ready(**options_of(weights, **{"vae": "ema", **wrong}))


def test_loading_imports_no_compiler():
    """Making the network on the meta device, to check the weights against, must not cost
    seconds.
    """
    code = (
        "import sys, torch\nfrom accel.run.opening import open_run\n"
        "from accel.config.rules import Request\n"
        "from accel.config.options import Options\nfrom accel.pipeline import Pipeline\n"
        "run = open_run(Request.open(Options(model='DiT-Demo/2', device='cpu')))\n"
        "print(len(Pipeline.load(run).network.stages[0].blocks))\n"
        "print({'torch._dynamo', 'triton', 'diffusers'} & set(sys.modules))"
    )
    done = forks.run(["-c", code])
    assert done.stdout.splitlines() == ["6", "set()"], done.stdout + done.stderr


def test_loading_costs_the_file(tmp_path):
    """131M parameters from a .pt cost at most 1.2 times the file, the interpreter and torch aside;
    while they are copied, also the pages of the mapped file.
    """
    path = tmp_path / "b.pt"
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in DiT_models["DiT-B/2"](input_size=64).state_dict().items()
        }
    torch.save({name: torch.full(shape, 0.01) for name, shape in shapes.items()}, path)
    code = (
        "import re, resource, sys, torch\nfrom accel.run.opening import open_run\n"
        "from accel.config.rules import Request\n"
        "from accel.config.options import Options\nfrom accel.pipeline import Pipeline\n"
        f"options = Options(ckpt={str(path)!r}, device='cpu', output_type='latent')\n"
        "def own():\n"
        "    return int(re.search(r'RssAnon:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "own_base = own()\n"
        "network = Pipeline.load(open_run(Request.open(options))).network\n"
        "total = sum(p.sum().item() for p in network.model.parameters())\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)\n"
        "print((own() - own_base) * 1024)"
    )
    done = forks.run(["-c", code])
    assert path.stat().st_size > 5e8
    most, own = (int(line) / path.stat().st_size for line in done.stdout.splitlines())
    assert most < 2.2 and 0.9 < own < 1.2, done.stderr
    path.unlink()


def test_the_check_for_overflow_leaves_the_random_stream_alone():
    """In the reference implementations float16 overflows where bfloat16 and float32 do not. The
    run's noise is the same with and without a check.
    """
    models = small(), large_inside(small())
    before = torch.get_rng_state()
    found = []
    for model in models:
        networks = (
            fast_network(model, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)
        )
        found.append(
            [
                overflows(network, Batch([(1, 2)], 8, 8), CPU, FAMILY.some_times)
                for network in networks
            ]
        )
    assert found == [[False] * 3, [True, False, False]] and torch.equal(
        torch.get_rng_state(), before
    )


@pytest.mark.parametrize(
    "how, names",
    [
        (dict(labels=range(6)), ["batch_size=6"]),
        (dict(labels=range(6), batch_size=2), ["batch_size=2"]),
        (dict(labels=(1,)), ["batch_size=1", "image_size", "128"]),
        (dict(num_fid_samples=100, per_proc_batch_size=48), ["per_proc_batch_size=48"]),
    ],
)
def test_too_little_memory_names_what_made_the_batch(how, names, weights):
    run = opened(Options(**options_of(weights, **how)), CPU)
    pipeline = Pipeline.load(run, sizes={3})

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has ...")

    pipeline.network.forward_tokens = full
    z = torch.randn(3, 4, 16, 16)
    with mistake("", *names):
        pipeline.denoise(z, torch.arange(3), lambda: torch.randn(3, 4, 16, 16))


@pytest.mark.gpu
def test_weights_that_overflow_float16_are_found(tmp_path, capsys):
    torch.save(large_inside(build("DiT-Demo/2")).state_dict(), tmp_path / "large.pt")
    how = options_of(tmp_path / "large.pt", device="cuda", output_type="latent")
    _, pipeline = ready(**how)
    assert pipeline.tier == "bf16" and "overflow" in capsys.readouterr().out
    assert pipeline.latents((1,), 0).isfinite().all()
    with mistake("precision", "fp16", "bf16"):
        ready(**how, precision="fp16")
