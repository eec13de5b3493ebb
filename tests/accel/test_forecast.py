"""--forecast: off is as before to the bit; plans are followed, refused, resumed and
shared by ranks. The mathematics of strides is in tests/diffusion, how plans are found in
tests/scripts.
"""

import json
import re

import numpy as np
import pytest
import torch
from forks import succeeds
from jobs import run
from networks import fast_network, sample, small

from accel.diffusion import create_diffusion
from accel.door import opening, plan_path, plan_settings, process_of
from accel.errors import UsageError
from accel.forecast import KIND, write_plan
from accel.network import Plain
from accel.request import GridRequest
from accel.sampling.ancestral import Ancestral
from accel.sampling.strides import Strides

CPU = torch.device("cpu")
STRIDES = [(1, 1), (2, 1), (4, 2), (2, 1), (1, 1)]  # of ten steps, six evaluations


def settings_of(weights, **more):
    common = dict(
        model="DiT-Demo/2",
        ckpt=str(weights),
        num_sampling_steps=10,
        forecast="plan",
        output_type="latent",
    )
    return opening.open_weights(GridRequest(**{**common, **more}), CPU)


@pytest.fixture
def plan(weights):
    """A plan beside the weights."""
    settings = settings_of(weights)
    path = plan_path(settings)
    write_plan(path, plan_settings(settings), STRIDES, {})
    yield path
    path.unlink()


def latents_of(network, process, device=CPU, scale=3.0, **how):
    torch.manual_seed(4)
    z = torch.randn(3, 4, 8, 8, device=device)
    labels = torch.tensor([1, 5, 2], device=device)
    return sample(network, process, z, labels, scale, **how)


@pytest.mark.parametrize("scale", (3.0, None))
def test_a_plan_that_evaluates_every_step_is_no_forecast_bit_for_bit(scale):
    """With models.DiT and with the accelerated network and its hoisted conditioning; the
    random stream is the same for every plan.
    """
    diffusion = create_diffusion("10")
    every = Strides(diffusion, [(1, 1)] * 10)
    fewer = Strides(diffusion, STRIDES)
    for network in (Plain(small()), fast_network(small(), torch.float16)):
        want = latents_of(network, Ancestral(diffusion), scale=scale)
        state = torch.get_rng_state()
        got = latents_of(network, every, scale=scale)
        assert torch.equal(want, got) and torch.equal(torch.get_rng_state(), state)
        got = latents_of(network, fewer, scale=scale)
        assert (
            torch.equal(torch.get_rng_state(), state)
            and not torch.equal(got, want)
            and got.isfinite().all()
        )


REFUSED = {
    "no file": (None, "no such file; make one with scripts/calibrate.py, or use forecast=off"),
    "not json": ("{", "cannot be read"),
    "steps": ({"num_sampling_steps": "10"}, "num_sampling_steps=10, not 10"),
    "strides of strings": ({"strides": [["1", "1"], [9, 2]]}, "strides must be pairs"),
    "no gain": ({"strides": [[1, 1], [2, 2], [7, 2]]}, "[1, 1] or up to two evaluations"),
    "weights": ({"weights": "0" * 16}, "made for other weights"),
    "interval": ({"guidance_interval": [0.2, 0.7]}, "guidance_interval=[0.2, 0.7], not [0.0, 1.0]"),
    "channels": ({"guidance_channels": 4}, "guidance_channels=4, not 3"),
    "lines": ({"model": "DiT\n-XL/2"}, r"model='DiT\n-XL/2', not DiT-Demo/2"),
    "first": ({"strides": [[2, 1], [8, 2]]}, "must begin with [1, 1] and make 10 steps"),
    "sum": ({"strides": [[1, 1], [8, 2]]}, "make 10 steps"),
    "an older plan": ({"kind": "forecast plan, version 1"}, f"is not a {KIND}"),
}


@pytest.mark.parametrize("change, words", REFUSED.values(), ids=REFUSED)
def test_plans_that_do_not_fit_are_refused(change, words, weights, plan, tmp_path):
    file = tmp_path / "p.json"
    if change is not None:
        file.write_text(
            change
            if isinstance(change, str)
            else json.dumps({**json.loads(plan.read_text()), **change})
        )
    with pytest.raises(UsageError, match="^forecast_plan=.*" + re.escape(words)) as error:
        process_of(settings_of(weights, forecast_plan=str(file)))
    assert "\n" not in str(error.value)


def test_the_demos_plan_is_for_the_demo():
    """The plan that ships fits the weights that ship. Its evidence says that it passes,
    and with how many evaluations.
    """
    settings = opening.open_weights(GridRequest(model="DiT-Demo/2", forecast="plan"), CPU)
    plan = json.loads(plan_path(settings).read_text())
    strides = process_of(settings).moves
    assert (
        sum(steps for steps, _ in strides) == 250
        and sum(count for _, count in strides) == plan["evaluations"]
    )
    assert (
        plan["evidence"]["passes"]
        and plan["evidence"]["calibration"]["seed"] not in plan["evidence"]["seeds"]
    )


def test_ranks_follow_one_plan(weights, plan, tmp_path, here):
    """Two ranks make sample.py's latents."""
    common = ["--model", "DiT-Demo/2", "--device", "cpu", "--ckpt", weights, "--labels", 1, 5, 2]
    common += ["--num-sampling-steps", 10, "--forecast", "plan", "--output-type", "latent"]
    assert "(6 network evaluations)" in succeeds(
        here("sample.py", *common, "--output", tmp_path / "one.npy")
    )
    assert "2 ranks" in run(2, *common, "--output", tmp_path / "two.npy")
    want, got = (np.load(tmp_path / name) for name in ("one.npy", "two.npy"))
    assert np.abs(want).max() > 0.5 and np.abs(want - got).max() < 1e-4 * np.abs(want).max()


def test_an_fid_folder_knows_a_plan_by_its_strides():
    """Folders keep this text: another one would refuse to resume them."""
    process = Strides(create_diffusion("5"), [(1, 1), (2, 1), (2, 1)])
    assert process.setting == "plan 9a2649a2 of 3 network evaluations"
