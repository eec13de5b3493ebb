"""
The diffusion process in float64, straight from the papers' equations: one timestep, one scalar table entry at a time.

Where a closed form can be had another way it is: the posterior by Bayes' rule, the KL by torch.distributions, the
respacing in exact fractions, the normal distribution function by erf.
"""

import math
from fractions import Fraction

import torch
from torch.distributions import Normal, kl_divergence

from diffusion import create_diffusion
from diffusion import gaussian_diffusion as gd
from diffusion.respace import SpacedDiffusion


def linear_betas(steps):
    first, last = 0.1 / steps, 20.0 / steps  # Ho, section 4: 1e-4 and 0.02 of 1000 steps
    return [first + (last - first) * i / (steps - 1) for i in range(steps)]


def cosine_betas(steps):
    def f(i):  # Nichol, eq. 17
        return math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2

    return [min(1 - f(i + 1) / f(i), 0.999) for i in range(steps)]


def even_positions(size, count, start=0):
    """Where `count` evenly spaced timesteps of a section lie, first and last included, as fractions."""
    if count == 1:
        return [Fraction(start)]
    return [start + Fraction(k * (size - 1), count - 1) for k in range(count)]


class Reference:
    """betas: of the trained process; timesteps: those kept, all if None. Its own t counts the kept ones."""

    def __init__(self, betas, timesteps=None):
        self.timesteps = list(range(len(betas))) if timesteps is None else sorted(timesteps)
        self.abars = []
        for kept in self.timesteps:
            product = 1.0
            for beta in betas[: kept + 1]:
                product *= 1.0 - beta
            self.abars.append(product)

    def __len__(self):
        return len(self.timesteps)

    def abar(self, t):
        return 1.0 if t < 0 else 0.0 if t >= len(self) else self.abars[t]

    def beta(self, t):
        return 1.0 - self.abar(t) / self.abar(t - 1)

    def posterior(self, x0, xt, t):
        """N(x_t; sqrt(alpha) x, beta) N(x; sqrt(abar') x0, 1 - abar') as a Gaussian in x: mean, variance."""
        if t == 0:
            return x0 + 0 * xt, 0.0
        alpha, spread = 1 - self.beta(t), 1 - self.abar(t - 1)
        precision = alpha / self.beta(t) + 1 / spread
        mean = (math.sqrt(alpha) / self.beta(t) * xt + math.sqrt(self.abar(t - 1)) / spread * x0) / precision
        return mean, 1 / precision

    def posterior_variance(self, t):
        return self.posterior(torch.zeros(()), torch.zeros(()), t)[1]

    def noised(self, x0, t, noise):
        return math.sqrt(self.abar(t)) * x0 + math.sqrt(1 - self.abar(t)) * noise

    def x0(self, xt, t, eps):
        return (xt - math.sqrt(1 - self.abar(t)) * eps) / math.sqrt(self.abar(t))

    def x0_of(self, mean, prediction, xt, t):
        """x_0 from a model's prediction of "EPSILON", "START_X" or "PREVIOUS_X"."""
        if mean == "EPSILON":
            return self.x0(xt, t, prediction)
        if mean == "START_X":
            return prediction
        at_zero, at_one = (self.posterior(torch.full_like(xt, v), xt, t)[0] for v in (0.0, 1.0))
        return (prediction - at_zero) / (at_one - at_zero)  # the posterior's mean is linear in x_0

    def eps(self, xt, t, x0):
        return (xt - math.sqrt(self.abar(t)) * x0) / math.sqrt(1 - self.abar(t))

    def log_variance(self, kind, t, v=None):
        """kind: of ModelVarType; v: the model's values."""
        small = math.log(self.posterior_variance(max(t, 1)))  # t = 0: its neighbour's
        if kind == "LEARNED_RANGE":
            return (1 + v) / 2 * math.log(self.beta(t)) + (1 - v) / 2 * small
        if kind == "LEARNED":
            return v
        return small if kind == "FIXED_SMALL" or t == 0 else math.log(self.beta(t))

    def guided_eps(self, xt, t, x0, gradient):
        """The prediction whose score has a classifier's gradient added."""
        return self.eps(xt, t, x0) - math.sqrt(1 - self.abar(t)) * gradient

    def ddim(self, xt, t, x0, eta, noise):
        now, before = self.abar(t), self.abar(t - 1)
        sigma = eta * math.sqrt((1 - before) / (1 - now) * (1 - now / before))
        x = math.sqrt(before) * x0 + math.sqrt(max(1 - before - sigma**2, 0.0)) * self.eps(xt, t, x0)
        return x if t == 0 else x + sigma * noise

    def ddim_up(self, xt, t, x0):
        after = self.abar(t + 1)
        return math.sqrt(after) * x0 + math.sqrt(1 - after) * self.eps(xt, t, x0)

    def bound_term(self, x0, xt, t, mean, log_variance):
        """Bits per dimension of one row, Ho eq. 5: the two Gaussians' KL or, at t = 0, the coded length of x0."""
        sigma = torch.exp(torch.as_tensor(log_variance, dtype=torch.float64) / 2).expand(x0.shape)
        if t == 0:
            return -level_log_probability(x0, mean, sigma).mean() / math.log(2)
        q_mean, q_variance = self.posterior(x0, xt, t)
        return kl_divergence(Normal(q_mean, math.sqrt(q_variance)), Normal(mean, sigma)).mean() / math.log(2)

    def prior_term(self, x0):
        last = len(self) - 1
        q = Normal(math.sqrt(self.abar(last)) * x0, math.sqrt(1 - self.abar(last)))
        return kl_divergence(q, Normal(torch.zeros_like(x0), 1.0)).mean() / math.log(2)


def level_log_probability(x, mean, sigma):
    """Ho, eq. 13, with the exact normal distribution function."""
    phi = torch.special.ndtr
    upper = torch.where(x > 0.999, torch.ones_like(x), phi((x + 1 / 255 - mean) / sigma))
    lower = torch.where(x < -0.999, torch.zeros_like(x), phi((x - 1 / 255 - mean) / sigma))
    return (upper - lower).log()


# ---- models in closed form: nonlinear in x and dependent on t and y, so that a wrong timestep or label shows ----


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
    kept, betas = create_diffusion(respacing).timestep_map, linear_betas(1000)
    kinds = dict(
        model_mean_type=gd.ModelMeanType[mean], model_var_type=gd.ModelVarType[variance], loss_type=gd.LossType[loss]
    )
    return SpacedDiffusion(use_timesteps=kept, betas=betas, **kinds), Reference(betas, kept)


def batch(d, seed=0):
    """t at the first, second, middle and last step; x, x_0 at 8-bit levels and noise, each (N, 3, 4, 4) float64."""
    t = torch.tensor(sorted({0, min(1, d.num_timesteps - 1), d.num_timesteps // 2, d.num_timesteps - 1}))
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, len(t), 3, 4, 4, generator=generator, dtype=torch.float64)
    levels = torch.randint(0, 256, x.shape, generator=generator)
    levels[:, 0, 0, :2] = torch.tensor([0, 255])  # both ends, where a level is the whole tail
    return t, x, levels.double() / 127.5 - 1, noise


def rows(t, function, *tensors):
    """The reference's function of one timestep, row by row."""
    return torch.stack([torch.as_tensor(function(int(t[i]), *(a[i] for a in tensors))) for i in range(len(t))])
