"""The denoising loop: noise → latents.

    for t = T-1 … 0:   x_{t-1} = mean(x_t, network(x_t, t, y)) + [t ≠ 0] · sigma · noise

Ancestral sampling (Ho et al. 2020, arXiv:2006.11239, algorithm 2) or DDIM (Song et al. 2021, arXiv:2010.02502), with
classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598). With a plan (accel/forecast.py) one or two network
evaluations serve several ancestral steps.

The random stream is upstream's. The null half of a guided batch is never updated, since the network reads only the
first half of x; its noise is drawn all the same, and so is DDIM's where η = 0.
"""

from collections.abc import Callable

import torch

from accel.network import Network
from diffusion.respace import SpacedDiffusion

OnStep = Callable[[int, torch.Tensor], None]


def initial_noise(n: int, channels: int, latent_size: int, generator: torch.Generator) -> torch.Tensor:
    """The first normal of a run, z (n, C, L, L), on the generator's device."""
    shape = n, channels, latent_size, latent_size
    return torch.randn(shape, generator=generator, device=generator.device)


@torch.inference_mode()
def denoise(
    network: Network,
    diffusion: SpacedDiffusion,
    z: torch.Tensor,
    labels: torch.Tensor,
    cfg_scale: float,
    null_label: int,
    *,
    guided: bool = True,
    rows: slice = slice(None),
    generator: torch.Generator | None = None,
    draw: Callable[[], torch.Tensor] | None = None,
    eta: float | None = None,
    plan=None,
    steps: int | None = None,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Sample the latents (n', C, L, L) of the part `rows` of a batch.

    z (n, C, L, L): the noise of the whole batch; labels (n,), on z's device. guided: whether the network is evaluated
    with guidance, on 2n rows. generator: draws the steps' noise; default: torch's own, of z's device. draw: gives the
    noise of a step for `rows`, (n', C, L, L), in place of upstream's stream. eta: DDIM's η; None is ancestral sampling.
    plan: an accel.forecast.StridePlan, for ancestral sampling; without one every step evaluates the network. steps:
    stop after so many, for warm-up. on_step(i, x): called when step i has been queued, with its result x
    (n', C, L, L).
    """
    x, y = z[rows], labels[rows]
    if guided:
        y = torch.cat([y, torch.full_like(y, null_label)])  # (2n',)
    drawn = (2 * len(z) if guided else len(z), *z.shape[1:])

    def noise_of_step():
        # Draw 2n rows, use these n': upstream's random stream.
        return draw() if draw is not None else torch.randn(drawn, generator=generator, device=z.device)[: len(z)][rows]

    scale = cfg_scale if guided else None
    loop, how = (_each_step, eta) if plan is None else (_strides, plan)
    steps = min(steps or diffusion.num_timesteps, diffusion.num_timesteps)
    return loop(network, diffusion, how, x, y, scale, noise_of_step, steps, on_step)


def evaluate(
    network: Network, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, cfg_scale: float | None
) -> torch.Tensor:
    """The network at x (n, C, L, L), t (n,), y (n,) or with guidance (2n,) → (n, C', L, L)."""
    if cfg_scale is None:
        return network.forward(x, t, y)
    return network.forward_with_cfg(torch.cat([x, x]), torch.cat([t, t]), y, cfg_scale)[: len(x)]


def _each_step(network, diffusion, eta, x, y, cfg_scale, noise_of_step, steps, on_step):
    """One network evaluation a step."""
    fused = network.fuses_update and diffusion.learns_range
    if fused:
        from accel.kernels.ancestral_update import ancestral_update  # brings Triton: other tiers need not wait for it

        if eta is None:
            coefficients = diffusion.ancestral_coefficients(x.device)
        else:
            coefficients = diffusion.ddim_coefficients(x.device, eta)

    def step(x, t, y, noise):
        if fused:
            tokens = network.tokens(x, diffusion.original_timesteps(t).repeat(len(y) // len(x)), y)
            return ancestral_update(tokens, x, noise, t, coefficients, cfg_scale)

        def model(x, t):
            return evaluate(network, x, t, y, cfg_scale)

        if eta is None:
            return diffusion.p_sample(model, x, t, clip_denoised=False, noise=noise)["sample"]
        return diffusion.ddim_sample(model, x, t, clip_denoised=False, eta=eta, noise=noise)["sample"]

    if network.captures and x.is_cuda:
        diffusion.prepare(x.device)
        step = network.replayed(("step", diffusion, cfg_scale, eta), step)
    timesteps = torch.arange(diffusion.num_timesteps - 1, -1, -1, device=x.device)
    with network.sampling_run(diffusion.timestep_map[::-1], y.tolist()) as advance:
        for index in range(steps):
            advance(index)
            x = step(x, timesteps[index].expand(len(x)), y, noise_of_step())
            if on_step is not None:
                on_step(index, x)
    return x


def _strides(network, diffusion, plan, x, y, cfg_scale, noise_of_step, steps, on_step):
    """Strides of several steps by one or two network evaluations (diffusion/strides.py)."""

    def stride(x, t, y, forecast, values, noise, evaluations):
        def model(x, t):
            return evaluate(network, x, t, y, cfg_scale)

        return plan.strides.stride(model, x, t, forecast, values, noise, evaluations)

    if network.captures and x.is_cuda:
        plan.strides.prepare(x.device)
        stride = network.replayed(("stride", diffusion, tuple(plan.strides.kinds), cfg_scale), stride)
    timesteps = torch.arange(diffusion.num_timesteps - 1, -1, -1, device=x.device)
    (forecast, values), index, evaluation = plan.strides.start(x), 0, 0
    with network.sampling_run(plan.timesteps, y.tolist(), at_once=2) as advance:
        for length, evaluations in plan.kinds:
            if index >= steps:
                break
            advance(*range(evaluation, evaluation + evaluations))
            noise = torch.stack([noise_of_step() for _ in range(length)])  # drawn ahead, in the stream's order
            t = timesteps[index].expand(len(x))
            x, forecast, values = stride(x, t, y, forecast, values, noise, evaluations)
            index, evaluation = index + length, evaluation + evaluations
            if on_step is not None:
                on_step(index - 1, x)
    return x
