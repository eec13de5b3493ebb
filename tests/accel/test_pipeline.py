"""A request to a run: what is refused and when, what is checked of weights and latents,
what loading costs.
"""

from dataclasses import replace
from types import SimpleNamespace

import forks
import pytest
import torch
from networks import build, fast_network, filled, large_inside, small
from unprivileged import limited

from accel import overflow
from accel.config import FidJob, Grid
from accel.errors import UsageError
from accel.families.dit import FAMILY
from accel.families.dit.network import DiT_models
from accel.grid import ready, save
from accel.network import Batch
from accel.opening import open_model
from accel.overflow import overflows
from accel.pipeline import Pipeline
from accel.progress import Stopwatch
from accel.weights import fetch

CPU = torch.device("cpu")


def job_of(weights, kind=Grid, **options):
    common = dict(model="DiT-Demo/2", ckpt=str(weights), device="cpu", num_sampling_steps=5)
    return kind.of(**{**common, **options})


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(ckpt="no/such.pt"), "ckpt=no/such.pt"),
        (
            dict(precision="exact"),
            "precision=exact: cpu has no float16 tensor cores .*; choose fp32",
        ),
        (dict(vae_precision="fp16"), "vae_precision=fp16"),
        (dict(model="DiT-S/8"), "holds the weights of DiT-Demo/2, not of DiT-S/8"),
    ],
)
def test_what_flags_decide_comes_before_weights_that_are_fetched(
    wrong, words, weights, monkeypatch
):
    for function in ("from_hub", "download"):
        monkeypatch.setattr(fetch, function, lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr("accel.latents.files.FOLDER", weights.parent)  # where no decoder lies
    with pytest.raises(UsageError, match=words):
        job = job_of(weights, **{"vae": "ema", **wrong})
        job.check()
        ready(job)


def test_loading_imports_no_compiler():
    """Making the network on the meta device, to check the weights against, must not cost
    seconds, and diffusers' import no more than it must. Both can be imported whole
    afterwards.
    """
    code = (
        "import sys, torch\nfrom accel.config import Grid\nfrom accel.grid import ready\n"
        "for sampler in ('ddpm', 'unipc'):\n"
        "    grid = Grid.of('DiT-Demo/2', device='cpu', sampler=sampler)\n"
        "    blocks = ready(grid).pipeline.network.stages[0].blocks\n"
        "    print(len(blocks), {'torch._dynamo', 'triton', 'diffusers'} & set(sys.modules))\n"
        "from diffusers import DiTTransformer2DModel\n"
        "print(torch.compile(torch.cos, backend='eager')(torch.zeros(1)).item())"
    )
    done = forks.run(["-c", code])
    assert done.stdout.splitlines() == ["6 set()", "6 {'diffusers'}", "1.0"], (
        done.stdout + done.stderr
    )


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
        "import resource, sys, torch\nfrom accel.config import Grid\nfrom accel.grid import ready\n"
        f"grid = Grid.of('DiT-B/2', ckpt={str(path)!r}, device='cpu', output_type='latent')\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "network = ready(grid).pipeline.network\n"
        "total = sum(p.sum().item() for p in network.model.parameters())\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)"
    )
    done = forks.run(["-c", code])
    assert path.stat().st_size > 5e8
    assert 0.9 * path.stat().st_size < int(done.stdout) < 1.2 * path.stat().st_size, done.stderr
    path.unlink()


def test_latents_that_are_not_finite_name_the_step(weights, monkeypatch):
    run = ready(job_of(weights, labels=(1,), output_type="latent")).pipeline
    condition = run.network.condition
    run.network.condition = lambda t, y: condition(t, y) * (float("nan") if t[0] < 600 else 1)
    with pytest.raises(
        UsageError, match="precision=fp32: .* not finite from step 3 of 5 on; check the weights"
    ):
        run.latents((1,), 0)
    run = run.with_(tier="fp16")  # on a GPU, with bfloat16 and, like a V100, without
    for supported, remedy in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(
            overflow, "supports", lambda tier, device, supported=supported: supported
        )
        with pytest.raises(
            UsageError, match=f"fp16: .* not finite from step 3 of 5 on; use precision={remedy}"
        ):
            run.latents((1,), 0)


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
        (
            dict(labels=range(6)),
            "batch_size=6: does not fit in free GPU memory; use a smaller one, or a smaller "
            "image_size than 128",
        ),
        (
            dict(labels=range(6), batch_size=2),
            "batch_size=2: does not fit in free GPU memory; use a smaller one, or a smaller "
            "image_size than 128",
        ),
        (
            dict(labels=(1,)),
            "batch_size=1: does not fit in free GPU memory; use a smaller one, or a smaller "
            "image_size than 128",
        ),
        (
            dict(kind=FidJob, num_fid_samples=100, per_proc_batch_size=48),
            "per_proc_batch_size=48: does not fit in free GPU memory; use a smaller one",
        ),
    ],
)
def test_too_little_memory_names_what_made_the_batch(how, message, weights):
    job = job_of(weights, **how)
    opened = open_model(job.config, CPU)
    job = job.filled(opened.config, opened.fit)
    run = Pipeline.load(opened, {3}, too_large=job.too_large)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has ...")

    run.network.tokens = full
    with pytest.raises(UsageError, match=f"^{message}$"):
        run.denoise(torch.randn(3, 4, 16, 16), torch.arange(3), lambda: torch.randn(3, 4, 16, 16))


def test_a_disk_that_is_full_is_a_line(tmp_path):
    """Here a limit on the size of files."""
    output = str(tmp_path / "x.npy")
    grid = filled(Grid.of("DiT-Demo/2", output_type="latent"))
    words = f"output={output}: .*; free some space, or choose another path"
    with limited("FSIZE", 4096), pytest.raises(UsageError, match=words):
        save(grid, output, torch.randn(8, 4, 128, 128), Stopwatch(CPU))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_weights_that_overflow_float16_are_found(tmp_path, capsys):
    torch.save(large_inside(build("DiT-Demo/2")).state_dict(), tmp_path / "large.pt")
    grid = job_of(
        tmp_path / "large.pt", device="cuda", output_type="latent", output=str(tmp_path / "x.npy")
    )
    run = ready(grid).pipeline
    assert (
        run.tier == "bf16"
        and "overflow" in capsys.readouterr().out
        and run.latents((1,), 0).isfinite().all()
    )
    with pytest.raises(UsageError, match="precision=fp16: overflows.*bf16"):
        ready(replace(grid, config=replace(grid.config, precision="fp16")))


@pytest.mark.parametrize("bad", FAMILY.some_times)
@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_an_overflow_at_any_of_three_timesteps_is_seen(bad, value):
    def tokens(x, t, y):
        out = torch.ones(len(y), 4, 8)
        out[-1, -1, -1] = value if int(t[0]) == bad and y.tolist() == [0, 8] else 1
        return out

    assert overflows(
        SimpleNamespace(tokens=tokens, in_channels=4), Batch([(1, 2)], 8, 8), CPU, FAMILY.some_times
    )
