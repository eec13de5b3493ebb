"""The loops: their random stream, arguments, generators."""

import inspect
from functools import partial

import pytest
import torch
from reference import wavy

from diffusion import create_diffusion

SHAPE = (4, 4, 8, 8)
LOOPS = {"p_sample_loop": {}, "ddim_sample_loop": {}, "ddim_sample_loop eta": dict(eta=0.6)}


@pytest.mark.parametrize("layout", [None, torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LOOPS)
def test_random_stream_draw_by_draw(name, layout):
    """x_T if none is given, then at each step the model's own draw (dropout) and one
    whole batch: at t = 0 and for eta = 0 too, where it goes unused. A model may scale t
    in place; the next step does not see it. The first draw has the memory order of the
    noise given, later ones do not.
    """
    d = create_diffusion("20")
    kwargs = dict(clip_denoised=False, model_kwargs=dict(y=0.1), **LOOPS[name])
    given = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    start = given.contiguous(memory_format=layout) if layout else None

    def model(x, t, y, drawn=None):
        out = wavy(x, t, y) + 0.1 * (torch.randn(8, 8) if drawn is None else drawn)
        t.zero_()
        return out

    torch.manual_seed(7)
    sample = getattr(d, name.split()[0])(model, SHAPE, start, device="cpu", **kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    x = start if layout else torch.randn(SHAPE)
    step = d.p_sample if name == "p_sample_loop" else d.ddim_sample
    for i in reversed(range(20)):
        drawn = torch.randn(8, 8)
        noise = torch.randn_like(x) if i == 19 else torch.randn(SHAPE)
        x = step(partial(model, drawn=drawn), x, torch.full((4,), i), noise=noise, **kwargs)[
            "sample"
        ]
    assert torch.equal(torch.get_rng_state(), after) and torch.equal(x, sample)


def test_progressive_loops_yield_every_step_and_leave_the_grad_mode_alone():
    d = create_diffusion("6")
    z = torch.randn(SHAPE)
    weight = torch.ones((), requires_grad=True)
    for name in ("p_sample_loop", "ddim_sample_loop"):
        torch.manual_seed(0)
        outs = []
        for out in getattr(d, name + "_progressive")(
            lambda x, t: weight * wavy(x, t), SHAPE, z, device="cpu"
        ):
            assert torch.is_grad_enabled() and not out["sample"].requires_grad
            outs.append(out)
        torch.manual_seed(0)
        assert len(outs) == 6 and torch.equal(
            outs[-1]["sample"], getattr(d, name)(wavy, SHAPE, z, device="cpu")
        )
        assert all(set(out) == {"sample", "pred_xstart"} for out in outs)


def test_device_follows_noise_or_parameters_and_progress_shows_a_bar(capsys):
    class Model(torch.nn.Linear):
        def forward(self, x, t):
            return wavy(super().forward(x), t)

    d = create_diffusion("3")
    assert d.p_sample_loop(Model(8, 8), SHAPE).device == torch.device("cpu")
    assert d.ddim_sample_loop(wavy, SHAPE, torch.randn(SHAPE)).shape == SHAPE
    assert capsys.readouterr().err == ""
    d.p_sample_loop(wavy, SHAPE, device="cpu", progress=True)
    assert "3/3" in capsys.readouterr().err


def test_argument_names_order_and_defaults_are_the_published_ones():
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
        "p_sample_loop_progressive": loop,
        "ddim_sample_loop_progressive": f"{loop} eta",
        "training_losses": "model x_start t model_kwargs noise",
        "calc_bpd_loop": "model x_start clip_denoised model_kwargs",
    }.items():
        parameters = inspect.signature(getattr(d, name)).parameters
        assert list(parameters) == arguments.split(), name
        assert "clip_denoised" not in parameters or parameters["clip_denoised"].default is True, (
            name
        )
    names = (
        "timestep_respacing noise_schedule use_kl sigma_small predict_xstart learn_sigma "
        "rescale_learned_sigmas"
    )
    assert list(inspect.signature(create_diffusion).parameters) == [
        *names.split(),
        "diffusion_steps",
    ]
