"""A request to a run: what is refused and when, what is checked of weights and latents,
what loading costs.
"""

import forks
import pytest
import torch
from networks import build, fast_network, large_inside, opened, ready, small

from accel.config.options import Options
from accel.errors import UsageError
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
    "wrong, words",
    [
        (dict(ckpt="no/such.pt"), "ckpt=no/such.pt"),
        (
            dict(precision="exact"),
            "precision=exact: cpu has no float16 tensor cores .*; choose fp32",
        ),
        (dict(vae_precision="fp16"), "vae_precision=fp16"),
        (dict(model="DiT-S/8"), "contains the weights of DiT-Demo/2, not of DiT-S/8"),
    ],
)
def test_what_flags_decide_comes_before_weights_that_are_fetched(
    wrong, words, weights, monkeypatch
):
    for function in ("from_hub", "download"):
        monkeypatch.setattr(fetch, function, lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr("accel.decoders.loading.FOLDER", weights.parent)  # where no decoder lies
    with pytest.raises(UsageError, match=words):
        ready(**options_of(weights, **{"vae": "ema", **wrong}))


def test_loading_imports_no_compiler():
    """Making the network on the meta device, to check the weights against, must not cost
    seconds. The compiler can be imported whole afterwards.
    """
    code = (
        "import sys, torch\nfrom accel.run.opening import open_run\n"
        "from accel.config.rules import Request\n"
        "from accel.config.options import Options\nfrom accel.pipeline import Pipeline\n"
        "run = open_run(Request.open(Options(model='DiT-Demo/2', device='cpu')))\n"
        "print(len(Pipeline.load(run).network.stages[0].blocks))\n"
        "print({'torch._dynamo', 'triton', 'diffusers'} & set(sys.modules))\n"
        "print(torch.compile(torch.cos, backend='eager')(torch.zeros(1)).item())"
    )
    done = forks.run(["-c", code])
    assert done.stdout.splitlines() == ["6", "set()", "1.0"], done.stdout + done.stderr


def test_loading_costs_the_file(tmp_path):
    """Peak memory of loading 131M parameters from a .pt is at most 1.2 times the file,
    the interpreter and torch aside.
    """
    path = tmp_path / "b.pt"
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in DiT_models["DiT-B/2"](input_size=64).state_dict().items()
        }
    torch.save({name: torch.full(shape, 0.01) for name, shape in shapes.items()}, path)
    code = (
        "import resource, sys, torch\nfrom accel.run.opening import open_run\n"
        "from accel.config.rules import Request\n"
        "from accel.config.options import Options\nfrom accel.pipeline import Pipeline\n"
        f"options = Options(ckpt={str(path)!r}, device='cpu', output_type='latent')\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "network = Pipeline.load(open_run(Request.open(options))).network\n"
        "total = sum(p.sum().item() for p in network.model.parameters())\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)"
    )
    done = forks.run(["-c", code])
    assert path.stat().st_size > 5e8
    assert 0.9 * path.stat().st_size < int(done.stdout) < 1.2 * path.stat().st_size, done.stderr
    path.unlink()


def test_latents_that_are_not_finite_name_the_step(weights):
    _, pipeline = ready(**options_of(weights, labels=(1,), output_type="latent"))
    condition = pipeline.network.condition
    pipeline.network.condition = lambda t, y: condition(t, y) * (float("nan") if t[0] < 600 else 1)
    with pytest.raises(
        UsageError, match="precision=fp32: .* not finite from step 3 of 5 on; check the weights"
    ):
        pipeline.latents((1,), 0)


def test_the_check_for_overflow_leaves_the_random_stream_alone():
    """By the reference implementations: float16 overflows where bfloat16 and float32 do
    not. The run's noise is the same whether or not there was a check.
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
    "how, message",
    [
        (dict(labels=range(6)), "batch_size=6: does not fit in free GPU memory; use a smaller one"),
        (dict(labels=range(6), batch_size=2), "batch_size=2: does not fit in free GPU memory; use"),
        (dict(labels=(1,)), "batch_size=1: .*, or a smaller image_size than 128$"),
        (
            dict(num_fid_samples=100, per_proc_batch_size=48),
            "per_proc_batch_size=48: does not fit in free GPU memory; use a smaller one",
        ),
    ],
)
def test_too_little_memory_names_what_made_the_batch(how, message, weights):
    run = opened(Options(**options_of(weights, **how)), CPU)
    pipeline = Pipeline.load(run, sizes={3})

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has ...")

    pipeline.network.forward_tokens = full
    z = torch.randn(3, 4, 16, 16)
    with pytest.raises(UsageError, match=f"^{message}"):
        pipeline.denoise(z, torch.arange(3), lambda: torch.randn(3, 4, 16, 16))


@pytest.mark.gpu
def test_weights_that_overflow_float16_are_found(tmp_path, capsys):
    torch.save(large_inside(build("DiT-Demo/2")).state_dict(), tmp_path / "large.pt")
    how = options_of(tmp_path / "large.pt", device="cuda", output_type="latent")
    _, pipeline = ready(**how)
    assert pipeline.tier == "bf16" and "overflow" in capsys.readouterr().out
    assert pipeline.latents((1,), 0).isfinite().all()
    with pytest.raises(UsageError, match="precision=fp16: overflows.*bf16"):
        ready(**how, precision="fp16")
