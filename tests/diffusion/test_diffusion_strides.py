"""Strides against their equations written out in float64, one step at a time."""

import numpy as np
import pytest
import torch
from reference import wavy

from diffusion import create_diffusion
from diffusion.strides import Strides


def by_hand(diffusion, x, t, m, values, noise, evaluations):
    """Equations 1 to 6 in float64 for one row's timestep t (int)."""
    k = len(noise)
    abar = diffusion.alphas_cumprod
    trained = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    c = diffusion.posterior_mean_coef1
    d = diffusion.posterior_mean_coef2
    b = diffusion.posterior_log_variance_clipped
    steps = [t - j for j in range(k)]
    taus = np.array([(1 - abar[s]) / abar[s] for s in steps])

    def sigma(values, s):
        return torch.exp(
            0.5 * ((values + 1) / 2 * np.log(diffusion.betas[s]) + (1 - values) / 2 * b[s])
        )

    def walk(x, x0, values, m, unseen):
        """The path in u, then where it ends and the last m; x0: what D is along it, or
        None for m.
        """
        path = []
        for s, z, share in zip(steps, noise, unseen):
            path.append(x / np.sqrt(abar[s]))
            x = c[s] * (m if x0 is None else x0) + d[s] * x + sigma(values, s) * z * (s != 0)
            learned = sigma(values, s)
            m = m + share * (1 - np.exp(b[s]) / learned**2).clamp(min=0) * learned / c[s] * z * (
                s != 0
            )
        return path, x, m

    def unseen(a):
        return [1 - min(max(sum(j * one for j, one in enumerate(a)) - j, 0), 1) for j in range(k)]

    def evaluate(a, point, m):
        theta = sum(a[i] * a[j] * min(taus[i], taus[j]) for i in range(k) for j in range(k))
        level = min(max(a @ taus, taus[-1]), taus[0])
        original = (
            int(np.argmin(abs(np.log((1 - trained) / trained / level))))
            if k > 1
            else diffusion.timestep_map[t]
        )
        tau = (1 - trained[original]) / trained[original]
        at = (m + np.sqrt(tau / theta) * (point - m)) * np.sqrt(trained[original])
        eps, fresh = wavy(at, torch.full((len(x),), original)).chunk(2, 1)
        return (at - np.sqrt(1 - trained[original]) * eps) / np.sqrt(trained[original]), fresh

    def at(a, path):
        return sum(one * u for one, u in zip(a, path))

    weights = np.array([c[s] * np.prod([d[r] for r in steps if r < s]) for s in steps])
    weights /= weights.sum()
    path = walk(x, None, values, m, [1] * k)[0]
    if evaluations == 1:
        x0, fresh = evaluate(weights, at(weights, path), m)
        last = x0
        place = weights
    else:
        # The path's covariance from independent increments; its largest axis as a
        # combination of the path's points.
        covariance = taus[0] - taus[np.minimum.outer(np.arange(k), np.arange(k))]
        centred = np.eye(k) - np.outer(np.ones(k), weights)
        covariance = centred @ covariance @ centred.T
        half = np.sqrt(weights)
        variance, axes = np.linalg.eigh(half[:, None] * covariance * half)
        # of each point of the path on the axis, in standard deviations
        coordinates = axes[:, -1] / half
        coordinates *= np.sign(coordinates[-1])
        # the axis times its standard deviation: the mean of coordinate times point
        e = weights * coordinates
        first = weights - e
        x1, v1 = evaluate(first, at(first, path), m)
        better = walk(x, None, v1, x1, unseen(first))[0]
        last, v2 = evaluate(weights + e, 2 * at(weights, better) - at(first, path), x1)
        x0 = (x1 + last) / 2
        fresh = (v1 + v2) / 2
        place = weights + e
    _, x, m = walk(x, x0, fresh, last, unseen(place))
    return x, m, fresh


CASES = [
    (20, 19, 1, 1),
    (20, 19, 4, 1),
    (20, 5, 2, 1),
    (20, 2, 3, 1),
    (20, 0, 1, 1),
    (20, 19, 4, 2),
    (20, 6, 3, 2),
]
# where the nearest level is another one by its logarithm
CASES += [(100, 27, 3, 1), (100, 16, 3, 2)]


@pytest.mark.parametrize("steps, t, k, evaluations", CASES)
def test_equations(steps, t, k, evaluations):
    diffusion = create_diffusion(str(steps))
    generator = torch.Generator().manual_seed(10 * t + k)
    x, m, values, *noise = (
        torch.randn(3, 4, 5, 5, generator=generator, dtype=torch.float64) for _ in range(3 + k)
    )
    # below -1 a variance is less than x_0's certainty allows: its noise says nothing
    values = 1.5 * values.tanh()
    strides = Strides(diffusion, [(k, evaluations)])
    got = strides.stride(
        wavy,
        x.float(),
        torch.full((3,), t),
        m.float(),
        values.float(),
        torch.stack(noise).float(),
        evaluations,
    )
    for have, want in zip(got, by_hand(diffusion, x, t, m, values, noise, evaluations)):
        assert float((have.double() - want).norm() / want.norm()) < 3e-6


def test_what_is_not_a_stride_is_refused():
    with pytest.raises(ValueError, match="learned range"):
        Strides(create_diffusion("10", learn_sigma=False), [(2, 1)])
    with pytest.raises(ValueError, match="predicts the noise"):
        Strides(create_diffusion("10", predict_xstart=True), [(2, 1)])
    for kind in ((2, 2), (0, 1), (4, 3), (1, 0)):
        with pytest.raises(ValueError, match="is not a kind of stride"):
            Strides(create_diffusion("10"), [kind])
