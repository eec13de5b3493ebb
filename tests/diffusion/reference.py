"""The diffusion process in float64, straight from the papers' equations.

Where a closed form can be had another way it is: the posterior by Bayes' rule, the KL by
torch.distributions, the normal distribution function by erf. Throughout t is (N,), other
tensors are (N, C, H, W).
"""

import math

import torch
from torch.distributions import Normal, kl_divergence

from diffusion import create_diffusion
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion


def linear_betas(steps):
    # Ho, section 4: 1e-4 … 0.02 of 1000
    return torch.linspace(0.1 / steps, 20 / steps, steps, dtype=torch.float64)


def cosine_betas(steps):
    angles = (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2
    abar = angles.cos() ** 2  # Nichol, eq. 17
    return (1 - abar[1:] / abar[:-1]).clamp(max=0.999)


class Reference:
    """betas: of the trained process; timesteps: the kept ones, which t counts."""

    def __init__(self, betas, timesteps):
        abars = (1 - betas).cumprod(0)[sorted(timesteps)]
        # then those of t = T, noise, and of t = -1, none
        self.abars = torch.cat([abars, torch.tensor([0.0, 1.0])])

    def abar(self, t):
        return self.abars[t].view(-1, 1, 1, 1)

    def beta(self, t):
        return 1 - self.abar(t) / self.abar(t - 1)

    def posterior(self, x0, xt, t):
        """Return mean and variance in x of N(x_t; sqrt(alpha) x, beta) N(x; sqrt(abar')
        x0, 1 - abar').
        """
        beta = self.beta(t)
        before = self.abar(t - 1)
        both = (1 - beta) * (1 - before) + beta
        mean = ((1 - beta).sqrt() * (1 - before) * xt + before.sqrt() * beta * x0) / both
        return mean, beta * (1 - before) / both

    def noised(self, x0, t, noise):
        return self.abar(t).sqrt() * x0 + (1 - self.abar(t)).sqrt() * noise

    def eps(self, xt, t, x0):
        return (xt - self.abar(t).sqrt() * x0) / (1 - self.abar(t)).sqrt()

    def x0(self, xt, t, prediction, mean="EPSILON"):
        """Return x_0 from a model's prediction. mean: its ModelMeanType."""
        if mean == "EPSILON":
            return (xt - (1 - self.abar(t)).sqrt() * prediction) / self.abar(t).sqrt()
        if mean == "START_X":
            return prediction
        at_zero, at_one = (self.posterior(x0, xt, t)[0] for x0 in (0.0, 1.0))
        return (prediction - at_zero) / (at_one - at_zero)  # the posterior's mean is linear in x_0

    def log_variance(self, kind, t, v=None):
        """kind: a ModelVarType; v: the model's values."""
        small = self.posterior(0.0, 0.0, t.clamp(min=1))[1].log()
        large = self.beta(t).log()  # t = 0: its neighbour's
        if kind == "LEARNED_RANGE":
            return (1 + v) / 2 * large + (1 - v) / 2 * small
        if kind == "LEARNED":
            return v
        return small if kind == "FIXED_SMALL" else torch.where(self.abar(t - 1) == 1, small, large)

    def ddim(self, xt, t, x0, eta, noise):
        now = self.abar(t)
        before = self.abar(t - 1)
        sigma = eta * ((1 - before) / (1 - now) * (1 - now / before)).sqrt()
        return (
            before.sqrt() * x0
            + (1 - before - sigma**2).sqrt() * self.eps(xt, t, x0)
            + sigma * noise
        )

    def ddim_up(self, xt, t, x0):
        return self.noised(x0, t + 1, self.eps(xt, t, x0))

    def bound(self, x0, xt, t, mean, log_variance):
        """Return bits per dimension (N,), Ho eq. 5: the two Gaussians' KL or, at t = 0,
        the coded length of x0.
        """
        sigma = (log_variance / 2).exp()
        (q_mean, q_variance) = self.posterior(x0, xt, t)
        kl = kl_divergence(Normal(q_mean, q_variance.clamp(min=1e-99).sqrt()), Normal(mean, sigma))
        bits = torch.where(
            self.abar(t - 1) == 1, -level_log_probability(x0, mean, sigma), kl
        ) / math.log(2)
        return bits.mean((1, 2, 3))

    def prior_bound(self, x0):
        last = self.abars[-3]
        kl = kl_divergence(
            Normal(last.sqrt() * x0, (1 - last).sqrt()), Normal(torch.zeros_like(x0), 1.0)
        )
        return kl.mean((1, 2, 3)) / math.log(2)


def level_log_probability(x, mean, sigma):
    """Ho, eq. 13, with the exact normal distribution function."""
    phi = torch.special.ndtr
    upper = torch.where(x > 0.999, 1.0, phi((x + 1 / 255 - mean) / sigma))
    lower = torch.where(x < -0.999, 0.0, phi((x - 1 / 255 - mean) / sigma))
    return (upper - lower).log()


# ---- models in closed form: nonlinear in x and dependent on t and y, so that a wrong
# timestep or label shows ----


def wavy(x, t, y=0.3):
    """(N, 2C, ...): a prediction and variance values in [-1, 1]."""
    t = t.to(x.dtype).view(-1, *[1] * (x.ndim - 1)) / 1000
    prediction = torch.sin(1.3 * x + 2 * t) + 0.2 * x * t + y
    values = torch.cos(2.1 * x - 3 * t + y)
    return torch.cat([prediction, values], dim=1)


def slope(x, t, y=0.3):
    """A cond_fn: a gradient like x."""
    return torch.cos(x + t.to(x.dtype).view(-1, 1, 1, 1) / 500) * y


# ---- processes, with their references ----


def process(respacing="250", variance="LEARNED_RANGE", mean="EPSILON", loss="MSE"):
    kept = create_diffusion(respacing).timestep_map
    betas = linear_betas(1000)
    kinds = dict(
        model_mean_type=gd.ModelMeanType[mean],
        model_var_type=gd.ModelVarType[variance],
        loss_type=gd.LossType[loss],
    )
    return SpacedDiffusion(use_timesteps=kept, betas=betas.numpy(), **kinds), Reference(betas, kept)


def batch(d):
    """t at the first, second, middle and last step; x, x_0 at 8-bit levels and noise,
    each (N, 3, 4, 4) float64.
    """
    t = torch.tensor(
        sorted({0, min(1, d.num_timesteps - 1), d.num_timesteps // 2, d.num_timesteps - 1})
    )
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, len(t), 3, 4, 4, generator=generator, dtype=torch.float64)
    levels = torch.randint(0, 256, x.shape, generator=generator)
    levels[:, 0, 0, :2] = torch.tensor([0, 255])  # both ends, where a level is the whole tail
    return t, x, levels.double() / 127.5 - 1, noise
