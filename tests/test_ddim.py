"""Upstream's loops with the same seed, for both families, alone and on two ranks; DDIM's
own settings.
"""

import numpy as np
import pytest
from conftest import fill
from forks import succeeds
from networks import upstream
from safetensors.torch import save_file

from accel.families import constructor_of

LABELS = (1, 5, 7)
STEPS = 10
SEED = 3
SCALE = 2.5


@pytest.fixture(scope="module", params=("DiT-Demo/2", "Large-DiT-Demo/2"))
def demo(request, tmp_path_factory):
    """The flags for a network with random weights, and the network."""
    path = tmp_path_factory.mktemp("weights") / "demo.safetensors"
    model = fill(constructor_of(request.param)())
    save_file(model.state_dict(), path)
    flags = [
        "--model",
        request.param,
        "--ckpt",
        path,
        "--device",
        "cpu",
        "--labels",
        *LABELS,
        "--seed",
        SEED,
    ]
    return [
        *flags,
        "--num-sampling-steps",
        STEPS,
        "--cfg-scale",
        SCALE,
        "--output-type",
        "latent",
    ], model


@pytest.mark.parametrize("eta, steps", ((None, 5), (0.0, 5), (0.5, 5), (1.0, 2)))
def test_equals_the_loop_that_people_write(demo, eta, steps, tmp_path, here):
    """Bit for bit. In two steps rounding makes a variance negative."""
    flags, model = demo
    flags = [*flags, "--num-sampling-steps", steps]
    ddim = [] if eta is None else ["--sampler", "ddim", "--eta", eta]
    text = succeeds(here("sample.py", *flags, *ddim, "--output", tmp_path / "l.npy"))
    assert (f"{steps} DDIM steps" in text) == (eta is not None)
    want = upstream(model, LABELS, SEED, steps, SCALE, eta).numpy()
    assert np.array_equal(np.load(tmp_path / "l.npy"), want) and want.std() > 0.1
