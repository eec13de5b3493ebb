"""calibrate.py: the plan it finds is the best there is, and sample.py follows it."""

import itertools
import json

import numpy as np
import pytest
import torch
from forks import refused, succeeds

from accel.door import plan_settings
from accel.door.opening import open_weights
from accel.families.dit.network import DiT_models
from accel.request import GridRequest
from accel.sampling.strides import Strides
from scripts import calibrate
from scripts.calibrate import best_plans, compare, kinds_up_to, passes


@pytest.mark.parametrize("seed", range(4))
def test_the_best_plan_is_the_best_of_all(seed):
    """Dynamic programming against trying every plan of seven steps; how much a step
    counts differs by powers of ten.
    """
    generator = np.random.default_rng(seed)
    table = {kind: generator.random(7) for kind in kinds_up_to(4)}
    sensitivity = 10 ** generator.uniform(-2, 2, 8)
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
    for evaluations in range(1, 8):
        of_so_many = [plan for plan in every if sum(count for _, count in plan) == evaluations]
        assert (evaluations in plans) == bool(of_so_many)
        if of_so_many:
            best = plans[evaluations]
            assert loss(best) == pytest.approx(min(map(loss, of_so_many))) and best[0] == (1, 1)
            assert sum(k for k, _ in best) == 7 and sum(count for _, count in best) == evaluations


def test_what_a_comparison_counts():
    """Grids are eight pictures, the mean absolute error is of 0–1."""
    want = np.random.default_rng(0).integers(0, 200, (16, 16, 16, 3), dtype=np.uint8)
    got = want + np.uint8(1)
    got[15] = want[15] + np.uint8(51)
    figures = compare(want, got, thorough=True)
    assert len(figures["grid_psnr"]) == 2 and len(figures["tile_psnr"]) == 16
    assert figures["grids_over_40"] == 0.5 and figures["tiles_over_40"] == 15 / 16
    assert figures["mae_worst"] == pytest.approx(0.2) and figures["mae_mean"] == pytest.approx(
        (15 / 255 + 0.2) / 16
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--plan", "/proc/x.json"], "--plan /proc/x.json: No such file"),
        (["--pictures", "1" + 30 * "0"], "000000: must be from 1 to 1,000,000"),
        (["--each", "9"], "--each 9: must be a multiple of 8"),
        (["--margin", "nan"], "--margin nan: must be finite"),
        (["--num-sampling-steps", "3"], "--num-sampling-steps 3: too few"),
        (["--ckpt", "none.pt"], "--ckpt none.pt: no such file"),
        (
            ["--ckpt", "{folder}/no-sigma.pt"],
            "no-sigma.pt: has no learned sigma, which a plan needs",
        ),
        (
            ["--model", "SiT-Demo/2"],
            "--model SiT-Demo/2: is sampled by sde, and plans are for ddpm",
        ),
    ],
)
def test_refused_before_any_work(arguments, words, monkeypatch, here, tmp_path):
    torch.save(DiT_models["DiT-Demo/2"](learn_sigma=False).state_dict(), tmp_path / "no-sigma.pt")
    monkeypatch.setattr(calibrate, "Bench", lambda *_: pytest.fail("loaded"))
    model = [] if "--model" in arguments else ["--model", "DiT-Demo/2"]
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    assert words in refused(here("scripts/calibrate.py", *model, "--device", "cpu", *arguments))


@pytest.mark.parametrize(
    "guidance", [{}, dict(guidance_interval=(0.2, 0.7)), dict(guidance_channels=4)]
)
def test_what_is_measured_is_what_sample_makes(guidance):
    """To the bit: the recorded run, and strides of one evaluation and of two from its states."""
    options = open_weights(
        GridRequest(model="DiT-Demo/2", num_sampling_steps=8, **guidance), torch.device("cpu")
    )
    bench = calibrate.Bench(options, 2)
    plan = [(1, 1), (3, 2), (4, 1)]
    start = 0
    how = dict(labels=bench.labels(2), seed=calibrate.FIRST_SEED)
    run = calibrate.record(bench, 2)
    assert torch.equal(run["states"][-1][0], bench.reference.latents(**how))
    stride = bench.strides(run["labels"], plan)
    state = run["states"][0]
    for k, evaluations in plan:
        with torch.inference_mode():
            state = stride(start, state, run["noise"][start : start + k], evaluations)
        start += k
    want = bench.reference._replace(process=Strides(bench.diffusion, plan)).latents(**how)
    assert torch.equal(state[0], want)


def test_a_plan_that_sample_follows(tmp_path, here, monkeypatch):
    # so few steps leave none out at the criterion's 40 dB
    monkeypatch.setattr(calibrate, "THRESHOLD", 8)
    plan = tmp_path / "p.json"
    demo = ["--model", "DiT-Demo/2", "--device", "cpu", "--num-sampling-steps", 6, "--labels", 1, 4]
    demo += ["--guidance-interval", 0.2, 0.7]
    few = ["--pictures", 2, "--seeds", 1, "--each", 8]
    text = succeeds(here("scripts/calibrate.py", *demo, *few, "--plan", plan))
    made = json.loads(plan.read_text())
    assert made["strides"][0] == [1, 1] and made["evaluations"] == sum(
        count for _, count in made["strides"]
    )
    assert (
        made["evaluations"] < 6
        and made["evidence"]["seeds"] == [10_002]
        and len(made["evidence"]["tried"]) > 2
    )
    settings = open_weights(GridRequest(model="DiT-Demo/2"), torch.device("cpu"))
    assert made["weights"] == plan_settings(settings)["weights"]
    program, *typed = text.splitlines()[-1].removeprefix("python ").split()
    assert typed == [*map(str, demo), "--forecast", "plan", "--forecast-plan", str(plan)]
    text = succeeds(
        here(program, *typed, "--output-type", "latent", "--output", tmp_path / "l.npy")
    )
    assert f"({made['evaluations']} network evaluations)" in text


@pytest.mark.parametrize("name, share", [("grid_psnr", 0.99), ("tile_psnr", 0.93)])
def test_the_margin_is_asked_of_grids_and_of_pictures(name, share):
    """Of a hundred, as many as the share says exceed 40 dB and the margin; one less does not do."""
    enough = round(100 * share)
    figures = {"grid_psnr": [50.0] * 100, "tile_psnr": [50.0] * 100}
    for over, passing in ((enough, True), (enough - 1, False)):
        figures[name] = [40.6] * over + [40.4] * (100 - over)
        assert passes(figures, margin=0.5) == passing and passes(figures)
    figures[name] = [40.0] * 100
    assert not passes(figures)
