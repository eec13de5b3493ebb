import inspect
from functools import partial

import pytest
import torch
from reference import columns, slope, wavy
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion import create_diffusion

SHAPE = (4, 4, 8, 8)
LOOPS = {"p_sample_loop": {}, "ddim_sample_loop": {}, "ddim_sample_loop eta": dict(eta=0.6)}


def loop_of(d, name):
    return getattr(d, name.split()[0])


@pytest.mark.parametrize("noise_given", [True, False])
@pytest.mark.parametrize("name", LOOPS)
def test_random_stream_draw_by_draw(name, noise_given):
    # x_T if none is given, then per step what the model itself draws (dropout) and one whole batch: at t = 0 and for
    # eta = 0 too, where it goes unused.
    d = create_diffusion("20")
    kwargs = dict(clip_denoised=False, model_kwargs=dict(y=0.1), **LOOPS[name])
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) if noise_given else None

    def model(x, t, y, drawn=None):
        return wavy(x, t, y) + 0.1 * (torch.randn(8, 8) if drawn is None else drawn)

    torch.manual_seed(7)
    sample = loop_of(d, name)(model, SHAPE, start, device="cpu", **kwargs)
    after = torch.get_rng_state()

    torch.manual_seed(7)
    x = start if noise_given else torch.randn(SHAPE)
    step = d.p_sample if name == "p_sample_loop" else d.ddim_sample
    for i in reversed(range(20)):
        drawn, noise = torch.randn(8, 8), torch.randn(SHAPE)
        x = step(partial(model, drawn=drawn), x, torch.full((4,), i), noise=noise, **kwargs)["sample"]
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(x, sample)


def test_progressive_loops_yield_every_step_and_leave_the_grad_mode_alone():
    d = create_diffusion("6")
    z = torch.randn(SHAPE)
    weight = torch.ones((), requires_grad=True)
    for name in ("p_sample_loop", "ddim_sample_loop"):
        outs = []
        torch.manual_seed(0)
        for out in getattr(d, name + "_progressive")(lambda x, t: weight * wavy(x, t), SHAPE, z, device="cpu"):
            assert torch.is_grad_enabled() and not out["sample"].requires_grad
            outs.append(out)
        torch.manual_seed(0)
        assert len(outs) == 6 and torch.equal(outs[-1]["sample"], getattr(d, name)(wavy, SHAPE, z, device="cpu"))
        assert all(set(out) == {"sample", "pred_xstart"} for out in outs)


def test_progress_shows_a_bar(capsys):
    create_diffusion("6").p_sample_loop(wavy, SHAPE, device="cpu", progress=True)
    assert "6/6" in capsys.readouterr().err
    create_diffusion("6").p_sample_loop(wavy, SHAPE, device="cpu")
    assert capsys.readouterr().err == ""


def test_device_follows_noise_or_parameters():
    class Model(torch.nn.Linear):
        def forward(self, x, t):
            return wavy(super().forward(x), t)

    d = create_diffusion("3")
    assert d.p_sample_loop(Model(8, 8), SHAPE).device == torch.device("cpu")
    assert d.ddim_sample_loop(wavy, SHAPE, torch.randn(SHAPE)).shape == SHAPE
    with pytest.raises(ValueError, match="device"):
        d.p_sample_loop(wavy, SHAPE)


def test_timesteps_of_a_step_are_the_models_own():
    # A model may scale t in place; the next step must not see it.
    d = create_diffusion("5")
    seen = []

    def model(x, t):
        seen.append(t.tolist())
        t.zero_()
        return wavy(x, t)

    d.p_sample_loop(model, SHAPE, device="cpu")
    assert seen == [[i] * 4 for i in reversed(d.timestep_map)]


def test_argument_names_and_order_are_the_published_ones():
    d = create_diffusion("2")
    step = "model x t clip_denoised denoised_fn"
    loop = "model shape noise clip_denoised denoised_fn cond_fn model_kwargs device progress"
    for name, arguments in {
        "q_mean_variance": "x_start t",
        "q_sample": "x_start t noise",
        "q_posterior_mean_variance": "x_start x_t t",
        "p_mean_variance": f"{step} model_kwargs",
        "condition_mean": "cond_fn p_mean_var x t model_kwargs",
        "condition_score": "cond_fn p_mean_var x t model_kwargs",
        "p_sample": f"{step} cond_fn model_kwargs noise",
        "ddim_sample": f"{step} cond_fn model_kwargs eta noise",
        "ddim_reverse_sample": f"{step} cond_fn model_kwargs eta",
        "p_sample_loop": loop,
        "p_sample_loop_progressive": loop,
        "ddim_sample_loop": f"{loop} eta",
        "ddim_sample_loop_progressive": f"{loop} eta",
        "training_losses": "model x_start t model_kwargs noise",
        "calc_bpd_loop": "model x_start clip_denoised model_kwargs",
    }.items():
        parameters = inspect.signature(getattr(d, name)).parameters
        assert list(parameters) == arguments.split(), name
        if name in ("p_sample", "ddim_sample"):
            assert parameters["noise"].kind is inspect.Parameter.KEYWORD_ONLY
    names = "timestep_respacing noise_schedule use_kl sigma_small predict_xstart learn_sigma rescale_learned_sigmas"
    assert list(inspect.signature(create_diffusion).parameters) == [*names.split(), "diffusion_steps"]


class Record(TorchDispatchMode):
    """Which operations ran, and which of them move data to or from the device."""

    MAKING = {"lift", "lift_fresh", "lift_fresh_copy", "scalar_tensor", "copy_", "from_file"}

    def __init__(self, device):
        super().__init__()
        self.device, self.names, self.found = torch.device(device), [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        self.names.append(name)
        tensors = [a for a in (*args, out) if isinstance(a, torch.Tensor)]
        crosses = any(a.device != self.device for a in tensors)
        moves = name == "_to_copy" and kwargs.get("device") is not None
        if crosses or moves or name in self.MAKING:
            self.found.append(name)
        return out


@pytest.fixture
def device(monkeypatch):
    """A CUDA device of shapes alone, where whatever leaves it is seen; reading a value raises."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with FakeTensorMode():
        yield "cuda:0"


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("learn_sigma", [True, False])
def test_no_copy_and_no_wait_in_the_loop(device, name, guided, learn_sigma):
    d = create_diffusion("10", learn_sigma=learn_sigma)
    d.prepare(device)

    def model(x, t):
        return wavy(x, t) if learn_sigma else torch.sin(x + columns(t, x))

    with Record(device) as ops:
        d_out = loop_of(d, name)(model, SHAPE, device=device, cond_fn=slope if guided else None, **LOOPS[name])
    assert d_out.device == torch.device(device)
    assert not ops.found
    assert ops.names.count("randn_like") == 10 and ops.names.count("randn") == 1
    assert ops.names.count("arange") == 1  # all timesteps at once, on the device


def test_no_copy_and_no_wait_in_losses_and_bound(device):
    d = create_diffusion("10")
    d.prepare(device)
    x, t = torch.randn(SHAPE, device=device), torch.arange(4, device=device)
    with Record(device) as ops:
        d.training_losses(wavy, x, t)
        d.calc_bpd_loop(wavy, x)
    assert not ops.found and ops.names.count("randn_like") == 11


def test_the_recorder_sees_copies_and_waits(device):
    table = create_diffusion("10").betas
    t = torch.arange(4, device=device)
    for sin in (
        lambda: torch.from_numpy(table).to(device, torch.float32)[t],
        lambda: torch.tensor([1, 2], device=device),
    ):
        with Record(device) as ops:
            sin()
        assert ops.found
    with pytest.raises(DataDependentOutputException):
        bool((t < 0).any())
