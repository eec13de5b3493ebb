"""Gaussian densities in nats, elementwise."""

import math

import torch
from torch import Tensor


def normal_kl(
    mean1: Tensor | float, logvar1: Tensor | float, mean2: Tensor | float, logvar2: Tensor | float
) -> Tensor:
    """Return KL(N(mean1, exp(logvar1)) || N(mean2, exp(logvar2))) in nats, elementwise.
    Up to three of them may be numbers.

        KL = 1/2 (log var2 - log var1 - 1 + var1 / var2 + (mean1 - mean2)^2 / var2)

    Raises TypeError if no argument is a tensor.
    """
    like = next((a for a in (mean1, logvar1, mean2, logvar2) if isinstance(a, Tensor)), None)
    if like is None:
        raise TypeError("normal_kl: at least one argument must be a tensor")
    # full() fills on the device; tensor() would copy a number from the host and wait.
    logvar1, logvar2 = (
        v if isinstance(v, Tensor) else torch.full((), v, dtype=like.dtype, device=like.device)
        for v in (logvar1, logvar2)
    )
    return 0.5 * (
        -1.0
        + logvar2
        - logvar1
        + torch.exp(logvar1 - logvar2)
        + (mean1 - mean2) ** 2 * torch.exp(-logvar2)
    )


def approx_standard_normal_cdf(x: Tensor) -> Tensor:
    """Return P(z < x), z ~ N(0, 1), by the tanh form of Page (1977). The absolute error
    is below 2e-4.
    """
    return 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def continuous_gaussian_log_likelihood(x: Tensor, *, means: Tensor, log_scales: Tensor) -> Tensor:
    """Return log N(x; means, exp(log_scales)^2) in nats, elementwise: -z^2/2 - log sigma
    - log(2 pi)/2.
    """
    z = (x - means) * torch.exp(-log_scales)
    return -0.5 * z**2 - log_scales - 0.5 * math.log(2.0 * math.pi)


def discretized_gaussian_log_likelihood(x: Tensor, *, means: Tensor, log_scales: Tensor) -> Tensor:
    """Return the log probability (nats, elementwise) of the 8-bit level at x, Ho et al.
    2020, eq. 13: the mass of N(means, exp(log_scales)^2) within half a level (1/255) of
    x. The outermost levels take the whole tail.

    x: levels of [0, 255] scaled linearly to [-1, 1]; means, log_scales: like x. Raises
    ValueError if shapes differ.
    """
    if not x.shape == means.shape == log_scales.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, means {tuple(means.shape)} and log_scales "
            f"{tuple(log_scales.shape)} must have one shape"
        )
    centred = x - means
    inv_sigma = torch.exp(-log_scales)
    below = approx_standard_normal_cdf(inv_sigma * (centred - 1.0 / 255.0))
    above = approx_standard_normal_cdf(inv_sigma * (centred + 1.0 / 255.0))
    mass = torch.where(x < -0.999, above, torch.where(x > 0.999, 1.0 - below, above - below))
    return torch.log(mass.clamp(min=1e-12))  # far tails underflow to zero mass
