"""--forecast: off is as before to the bit, plans are followed and refused, resumed and shared by ranks, auto holds its tolerance, calibrate.py finds plans."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, fill
from safetensors.torch import save_file

from accel import engine
from accel.conditioning import HoistedConditioning
from accel.fast import FastDiT, Optimisations
from accel.forecast import KIND, Auto, Plan, plan_path, read_plan, settings_of, write_plan
from accel.options import DistributedOptions, SamplingOptions, UsageError
from diffusion import create_diffusion
from models import DiT, DiT_models
from scripts import calibrate
from scripts.calibrate import best_plans, kinds_up_to

CPU = torch.device("cpu")
STRIDES = [(1, 1), (2, 1), (4, 2), (2, 1), (1, 1)]  # of ten steps, six calls


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "demo.safetensors"
    save_file(fill(DiT_models["DiT-Demo/2"]()).state_dict(), path)
    return path


def options_of(weights, **more):
    return SamplingOptions(
        **{"model": "DiT-Demo/2", "ckpt": str(weights), "num_sampling_steps": 10, "forecast": "plan", **more}
    ).resolve()


@pytest.fixture
def plan(weights):
    """A plan beside the weights."""
    options = options_of(weights)
    path = plan_path(options)
    write_plan(path, settings_of(options, str(weights)), STRIDES, {})
    yield path
    path.unlink()


def sample(network, diffusion, forecast, device=CPU, guided=True, **how):
    z = engine.draw_latents(3, 8, 4, device)
    return engine.denoise(
        network, diffusion, z, torch.tensor([1, 5, 2], device=device), 3.0, 8, guided=guided, forecast=forecast, **how
    )


def small():
    return fill(DiT(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=8))


@pytest.mark.parametrize("guided", (True, False))
def test_a_plan_that_calls_every_step_is_no_forecast_bit_for_bit(guided):
    """With models.DiT and with the accelerated network and its hoisted conditioning; the random stream is the same for every plan."""
    model, diffusion = small(), create_diffusion("10")
    for network in (model, FastDiT(model.state_dict(), 2, torch.float16, CPU)):
        want, state = sample(network, diffusion, None, guided=guided), torch.get_rng_state()
        got = sample(network, diffusion, Plan(diffusion, [(1, 1)] * 10), guided=guided)
        assert torch.equal(want, got) and torch.equal(torch.get_rng_state(), state)
        fewer = sample(network, diffusion, Plan(diffusion, STRIDES), guided=guided)
        assert torch.equal(torch.get_rng_state(), state) and not torch.equal(fewer, want) and fewer.isfinite().all()


def test_calls_are_counted_and_tiers_agree():
    """The network is called as often as the plan says; the accelerated one, whose table knows the plan's timesteps alone, makes the same latents."""
    model, diffusion, seen = small(), create_diffusion("10"), []
    fast = FastDiT(model.state_dict(), 2, torch.float32, CPU)
    forward, model.forward = model.forward, lambda x, t, y: (seen.append(int(t[0])), forward(x, t, y))[1]
    ticks = []
    want = sample(model, diffusion, Plan(diffusion, STRIDES), progress=lambda: ticks.append(1))
    assert (
        seen == Plan(diffusion, STRIDES).timesteps()
        and len(seen) == Plan(diffusion, STRIDES).calls == 6
        and len(ticks) == 10
    )
    assert seen[0] == diffusion.timestep_map[-1] and all(a > b for a, b in zip(seen, seen[1:]))
    assert torch.allclose(want, sample(fast, diffusion, Plan(diffusion, STRIDES)), atol=1e-4 * float(want.abs().max()))
    part = sample(model, diffusion, Plan(diffusion, STRIDES), rows=slice(1, 3))
    assert torch.allclose(want[1:], part, atol=1e-4 * float(want.abs().max()))


def test_auto_calls_more_for_less_error_and_decides_ahead():
    model, diffusion = small(), create_diffusion("60")
    counts, fast = [], FastDiT(model.state_dict(), 2, torch.float32, CPU)
    for tolerance in (1e-9, 1, 1e9):
        auto = Auto(diffusion, tolerance)
        taken, observe = [], auto.observe
        auto.observe = lambda error, index, kind: (
            taken.append((kind, float(error.max()))),
            observe(error, index, kind),
        )
        latents = sample(fast, diffusion, auto)
        assert (
            sum(k for (k, _), _ in taken) == 60
            and latents.isfinite().all()
            and auto.calls == sum(calls for (_, calls), _ in taken)
        )
        counts.append(auto.calls)
        # The last error that a stride was chosen from is that of the last but one.
        rates = [error / k for (k, _), error in taken]
        index = taken[0][0][0]
        for stride in range(1, len(taken)):
            auto.rate = rates[stride - 2] if stride > 2 else None
            assert taken[stride][0] == auto._allowed(59 - index)
            index += taken[stride][0][0]
        auto.rate = float("nan")
        assert auto._allowed(59) == (1, 1)
    assert counts[0] == 60 > counts[1] > counts[2] >= 60 / 3


def test_a_small_table_serves_strides_whose_calls_lie_far_apart():
    """The conditioning of two calls is there at once, in a table of hardly more; latents are those of a table that holds all. For one too small there is another."""
    diffusion, plan, labels = create_diffusion("60"), [(1, 1), (8, 2), (1, 1)] * 6, 4  # three labels and the null label
    networks = [FastDiT(small().state_dict(), 2, torch.float32, CPU) for _ in range(3)]
    vector = networks[0].conditioning.bias.numel() * 4
    for network, entries in zip(networks, (1000, 2 * labels, labels)):
        network.table = HoistedConditioning(network.conditioning, vector * entries)
    want, got = (sample(network, diffusion, Auto(diffusion, 1e9)) for network in networks[:2])
    assert torch.equal(want, got)
    assert torch.equal(
        sample(networks[0], diffusion, Plan(diffusion, plan)), sample(networks[1], diffusion, Plan(diffusion, plan))
    )
    assert torch.equal(
        sample(networks[0], diffusion, Plan(diffusion, plan)), sample(networks[2], diffusion, Plan(diffusion, plan))
    )


#################################################################################
#                                   Plan files                                  #
#################################################################################


def test_plan_beside_the_weights_is_read(weights, plan):
    assert plan.name == "demo.forecast.json" and read_plan(options_of(weights), str(weights)) == STRIDES


REFUSED = {
    "no file": (None, "no such file; make it with scripts/calibrate.py"),
    "not json": ("{", "cannot be read"),
    "another file": ("[]", f"is no {KIND}"),
    "weights": ({"weights": "0" * 16}, "made for other weights"),
    "steps": ({"num_sampling_steps": 250}, "--num-sampling-steps 250, not 10"),
    "guidance": ({"cfg_scale": 1.5}, "--cfg-scale 1.5, not 4.0"),
    "model": ({"model": "DiT-XL/2"}, "--model DiT-XL/2, not DiT-Demo/2"),
    "size": ({"image_size": 256}, "--image-size 256, not 128"),
    "first": ({"strides": [[2, 1], [8, 2]]}, "the first [1, 1], 10 steps in all"),
    "sum": ({"strides": [[1, 1], [8, 2]]}, "10 steps in all"),
    "kind": ({"strides": [[1, 1], [9, 3]]}, "others two by one call"),
    "no strides": ({"strides": [0, 1, 4]}, "strides must be"),
    "an older plan": ({"kind": "forecast plan, version 1"}, f"is no {KIND}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_that_do_not_fit_are_refused(case, weights, plan, tmp_path):
    change, words = REFUSED[case]
    file = tmp_path / "p.json"
    if change is not None:
        file.write_text(change if isinstance(change, str) else json.dumps({**json.loads(plan.read_text()), **change}))
    with pytest.raises(UsageError, match="^--forecast-plan .*" + re.escape(words)) as error:
        read_plan(options_of(weights, forecast_plan=str(file)), str(weights))
    assert "\n" not in str(error.value)


def test_flags_that_contradict_each_other(weights):
    with pytest.raises(UsageError, match="--forecast-plan x: is read with --forecast plan only"):
        options_of(weights, forecast="auto", forecast_plan="x")
    with pytest.raises(UsageError, match="--forecast-tolerance 0: must be over 0"):
        options_of(weights, forecast_tolerance=0.0)
    with pytest.raises(UsageError, match="--forecast plan: its calls lie further apart"):
        DistributedOptions(model="DiT-Demo/2", forecast="plan", parallel="stages=2,patches=4,warmup=1").resolve()


def test_the_demos_plan_is_for_the_demo():
    """The plan that ships fits the weights that ship; its evidence says that it passes, and with how many calls."""
    options = SamplingOptions(model="DiT-Demo/2", forecast="plan").resolve()
    strides = read_plan(options, options.ckpt)
    evidence = json.loads(plan_path(options).read_text())["evidence"]
    assert (
        sum(k for k, _ in strides) == 250
        and evidence["passes"]
        and evidence["grids_over_40"] >= 0.99
        and evidence["tiles_over_40"] >= 0.93
    )
    assert len(evidence["tile_psnr"]) == evidence["pictures"] == 512 and len(evidence["seeds"]) == 16
    assert np.mean(np.array(evidence["tile_psnr"]) > 40) == evidence["tiles_over_40"]
    assert evidence["calibration"]["seed"] not in evidence["seeds"]


#################################################################################
#                                    Commands                                   #
#################################################################################


def test_ranks_follow_one_plan(weights, plan, tmp_path, run):
    """Two ranks make sample.py's latents, by a plan and by errors that are measured on both."""
    common = [
        "--model",
        "DiT-Demo/2",
        "--device",
        "cpu",
        "--ckpt",
        weights,
        "--output-type",
        "latent",
        "--labels",
        1,
        5,
        2,
        "--num-sampling-steps",
        10,
    ]
    for forecast in (["plan"], ["auto", "--forecast-tolerance", 1000]):
        one = run(
            "sample.py",
            *common,
            "--forecast",
            *forecast,
            "--repeats",
            2,
            "--output",
            tmp_path / "one.npy",
            OMP_NUM_THREADS="1",
        )  # with a warm-up
        assert one.returncode == 0, one.stderr
        two = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node=2",
                str(ROOT / "sample_ddp.py"),
                *map(str, common),
                "--forecast",
                *map(str, forecast),
                "--output",
                str(tmp_path / "two.npy"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert two.returncode == 0, two.stderr
        assert ("(6 calls)" if forecast == ["plan"] else "calls by error") in one.stdout and "2 ranks" in two.stdout
        want, got = np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy")
        assert np.abs(want).max() > 0.5 and np.abs(want - got).max() < 1e-4 * np.abs(want).max()


def test_a_job_for_fid_resumes_and_refuses_another_forecast(weights, plan, tiny_vae, tmp_path, run):
    def job(*more, where):
        return run(
            "sample_ddp.py",
            "--model",
            "DiT-Demo/2",
            "--device",
            "cpu",
            "--ckpt",
            weights,
            "--vae",
            tiny_vae,
            "--num-sampling-steps",
            10,
            "--num-fid-samples",
            4,
            "--per-proc-batch-size",
            2,
            "--sample-dir",
            where,
            *more,
            OMP_NUM_THREADS="1",
        )

    done = job("--forecast", "plan", where=tmp_path / "a")
    assert done.returncode == 0, done.stderr
    [npz] = (tmp_path / "a").glob("*.npz")
    whole = npz.read_bytes()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    [again] = (tmp_path / "b").glob("*.npz")
    again.unlink()
    (tmp_path / "b" / npz.stem / "000002.png").unlink()  # the second batch is not whole
    refused = job(where=tmp_path / "b")
    assert refused.returncode == 2 and "--forecast off" in refused.stderr and "plan" in refused.stderr, refused.stderr
    assert job("--forecast", "plan", where=tmp_path / "b").returncode == 0
    assert again.read_bytes() == whole


def test_the_best_plan_is_the_best_of_all():
    """Dynamic programming against trying every plan of seven steps."""
    generator = np.random.default_rng(0)
    table, sensitivity = {kind: generator.random(7) for kind in kinds_up_to(4)}, generator.random(8)
    table[1, 1][:] = 0
    assert set(table) == {(1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2)}
    every = [
        plan
        for count in range(2, 8)
        for plan in itertools.product(table, repeat=count)
        if sum(k for k, _ in plan) == 7 and plan[0] == (1, 1)
    ]

    def loss(plan):
        ends = np.cumsum([k for k, _ in plan])
        return sum(table[kind][end - kind[0]] * sensitivity[end] for kind, end in zip(plan, ends))

    plans = best_plans(table, sensitivity)
    for calls in range(1, 8):
        of_so_many = [plan for plan in every if sum(c for _, c in plan) == calls]
        assert (calls in plans) == bool(of_so_many)
        if of_so_many:
            assert loss(plans[calls]) == pytest.approx(min(map(loss, of_so_many))) and plans[calls][0] == (1, 1)
            assert sum(k for k, _ in plans[calls]) == 7 and sum(c for _, c in plans[calls]) == calls


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--plan", "/proc/x.json"], "--plan /proc/x.json: cannot write"),
        (["--first-seed", str(2**63)], "--first-seed"),
        (["--margin", "nan"], "--margin nan"),
        (["--num-sampling-steps", "3"], "--num-sampling-steps 3: too few"),
    ],
)
def test_calibrate_refuses_before_any_work(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "Bench", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--model", "DiT-Demo/2", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        calibrate.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and words in error


def test_calibrate_writes_a_plan_that_sample_follows(tmp_path, run):
    plan, demo = (
        tmp_path / "p.json",
        ["--model", "DiT-Demo/2", "--device", "cpu", "--num-sampling-steps", 6, "--labels", 1, 4],
    )
    done = run(
        "scripts/calibrate.py",
        *demo,
        "--pictures",
        2,
        "--seeds",
        1,
        "--each",
        8,
        "--longest",
        3,
        "--margin",
        -25,
        "--plan",
        plan,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(plan.read_text())
    assert (
        made["strides"][0] == [1, 1]
        and made["calls"] == sum(c for _, c in made["strides"])
        and made["evidence"]["seeds"] == [10_002]
        and len(made["evidence"]["tried"]) > 2
    )
    assert (
        made["weights"]
        == settings_of(SamplingOptions(model="DiT-Demo/2").resolve(), ROOT / "pretrained_models/demo/dit.safetensors")[
            "weights"
        ]
    )
    follow = run(
        "sample.py",
        *demo,
        "--forecast",
        "plan",
        "--forecast-plan",
        plan,
        "--output-type",
        "latent",
        "--output",
        tmp_path / "l.npy",
    )
    assert follow.returncode == 0 and f"({made['calls']} calls)" in follow.stdout, follow.stderr


#################################################################################
#                                   On a GPU                                    #
#################################################################################


@pytest.mark.gpu
@pytest.mark.parametrize("guided", (True, False))
def test_captured_strides_are_the_direct_ones_bit_for_bit(guided):
    device, state, diffusion = torch.device("cuda"), small().state_dict(), create_diffusion("10")
    direct, captured = (FastDiT(state, 2, torch.float16, device, Optimisations(graph=graph)) for graph in (False, True))
    plain = FastDiT(
        state, 2, torch.float16, device, Optimisations(ends="torch")
    )  # strides end in tensor operations, as p_sample does
    off = sample(plain, diffusion, None, device, guided)
    assert torch.equal(off, sample(plain, diffusion, Plan(diffusion, [(1, 1)] * 10), device, guided))
    plan = Plan(diffusion, STRIDES)
    want, got = (sample(network, diffusion, plan, device, guided) for network in (direct, captured))
    assert torch.equal(want, got) and not torch.equal(got, off)
    diffusion = create_diffusion("60")  # auto takes long strides far from the end only
    auto = [sample(network, diffusion, Auto(diffusion, 0.2), device, guided) for network in (direct, captured)]
    assert torch.equal(*auto)


@pytest.mark.gpu
def test_no_wait_in_a_planned_run():
    """After the first run nothing waits for the device."""
    device, diffusion = torch.device("cuda"), create_diffusion("10")
    network, plan = FastDiT(small().state_dict(), 2, torch.float16, device), Plan(diffusion, STRIDES)
    z, labels = engine.draw_latents(3, 8, 4, device), torch.tensor([1, 5, 2], device=device)
    engine.denoise(network, diffusion, z, labels, 3.0, 8, forecast=plan)
    torch.cuda.synchronize()
    strides, x = plan.strides, z
    torch.cuda.set_sync_debug_mode("error")
    try:
        m, values = strides.start(x)
        replayed = network.captured[(strides, True, 3.0)]
        y = torch.cat([labels, torch.full_like(labels, 8)])
        t = torch.full((3,), 9, device=device)
        x, m, values, _ = replayed(x, t, y, m, values, torch.randn(1, *x.shape, device=device), 1)
        x, m, values, _ = replayed(x, t - 1, y, m, values, torch.randn(2, *x.shape, device=device), 1)
        replayed(x, t - 3, y, m, values, torch.randn(4, *x.shape, device=device), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
