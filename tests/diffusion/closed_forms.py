"""Models in closed form: nonlinear in x and dependent on t and y, so that a wrong timestep or label shows."""

import torch


def columns(t, x):
    return t.to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def wavy(x, t, y=0.3):
    """(N, 2C, ...): a prediction and variance values in [-1, 1]."""
    t = columns(t, x) / 1000
    prediction = torch.sin(1.3 * x + 2 * t) + 0.2 * x * t + y
    values = torch.cos(2.1 * x - 3 * t + y)
    return torch.cat([prediction, values], dim=1)


def wavy_mean(x, t, y=0.3):
    """(N, C, ...): the prediction alone."""
    return wavy(x, t, y)[:, : x.shape[1]]


def slope(x, t, y=0.3):
    """A cond_fn: a gradient like x."""
    return torch.cos(x + columns(t, x) / 500) * y


class Gaussian:
    """The exact model for data N(mean, std^2), elementwise; abar: the trained process's, by original timestep."""

    def __init__(self, mean, std, abar):
        self.mean, self.variance, self.abar = mean, std**2, torch.as_tensor(abar)

    def moments(self, x, t):
        """abar_t and the variance of x_t."""
        abar = columns(self.abar[t], x)
        return abar, abar * self.variance + 1 - abar

    def eps(self, x, t, **kwargs):
        """E[noise | x_t] = -sqrt(1 - abar) grad log p(x_t)."""
        abar, spread = self.moments(x, t)
        return (1 - abar).sqrt() * (x - abar.sqrt() * self.mean) / spread

    def x0(self, x, t):
        """Mean and variance of x_0 given x_t."""
        abar, spread = self.moments(x, t)
        mean = self.mean + abar.sqrt() * self.variance / spread * (x - abar.sqrt() * self.mean)
        return mean, self.variance * (1 - abar) / spread
