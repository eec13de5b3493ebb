"""Several ancestral steps by one or two network evaluations, on the noise that these
steps would have drawn.

Write c_t, d_t for the two coefficients of the posterior mean (Ho et al. 2020, 2006.11239,
eq. 7). k steps from x_t are

    x_{s-1} = c_s D(x_s, s) + d_s x_s + sigma_s z_s,    s = t, t-1, ..., t-k+1
                                                        (1)

with D(x_s, s) the network's x_0. The end depends on the k values of D through one sum
only,

    x_{t-k} = ... + W sum_s w_s D(x_s, s),    w_s ~ c_s d_{s-1} ... d_{t-k+1},  sum_s w_s = 1.
                                              (2)

The noise moves D from step to step: D(x_s, s) is a martingale under p, so no
extrapolation from past evaluations can predict it. But the noise is known: it is the
run's random stream, and can be drawn ahead. D is smooth in u = x / sqrt(abar), which is
x_0 plus noise of variance tau = (1 - abar) / abar. So (2) is an integral over the path
u_s with the weights w_s, and has quadratures: with n points p_i = sum_s a_is u_s, sum_s
a_is = 1,

    sum_s w_s D(u_s, tau_s) = (1/n) sum_i D(p_i, tau_i) + rest,    tau_i = sum_s a_is tau_s.
                                                                   (3)

One point, the path's weighted mean u*, cancels all terms of first order. Two points also
carry the path's spread along one direction, the one that holds most of it. The path's
increments are independent, of variance tau_s - tau_{s-1}, so its covariance is known
before its noise is, and

    p_1, p_2 = u* -+ e,    e the largest principal axis of the u_s, times its standard deviation.
                           (4)

For k = 3 this leaves a ninth of the curvature that a pair of steps leaves.

Averaging removes noise: p_i holds noise of variance theta_i = sum_sr a_is a_ir min(tau_s,
tau_r) < tau_i, less than its timestep says. D at a point with too little noise has a
bias, of the same sign at every stride. So p_i is moved away from the forecast m of x_0
until its noise is that of the timestep, the trained timestep nearest to tau_i:

    p_i <- m + sqrt(tau_i / theta_i) (p_i - m).
                                                                                                              (5)

The path u_s needs D itself. A forecast m_s takes its place there; an error of m enters
(3) only through the small steps that multiply it. m_t is the x_0 of the last evaluation.
Along the path it is updated by the noise's information on x_0. The learned variance holds
the network's own uncertainty of x_0, sigma_s^2 = b_s + c_s^2 Var(x_0 | x_s), with b_s the
posterior's variance given x_0 (eq. 7). So by the rule for Gaussians, pixel by pixel,

    m_{s-1} = m_s + (1 - b_s / sigma_s^2) (sigma_s / c_s) z_s.
                                                                                                              (6)

The first of two evaluations gives a better path. The second point is then 2 u* - p_1 on
that path, and the mean of both is right although p_1 was not. With k = 1, u* = u_t: the
ancestral step itself, to the bit.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .respace import ByValue, SpacedDiffusion

Kind = tuple[int, int]  # (steps, network evaluations) of a stride


class Strides(ByValue):
    """Ancestral sampling of `diffusion` by strides.

    moves: the strides of a run, in order. Each is (1, 1), or k > 1 steps by one
    evaluation, or k > 2 steps by two. x (n, C, ...) throughout. t (n,) int64: a timestep
    of `diffusion`, from which k steps lead to t - k. Raises ValueError for another kind,
    and for a process without noise prediction and a learned range of variance.
    """

    def __init__(self, diffusion: SpacedDiffusion, moves: list[Kind]):
        if not diffusion.learns_range:
            raise ValueError(
                "strides: need a network that predicts the noise and a learned range of variance"
            )
        self.diffusion = diffusion
        self.moves = [tuple(kind) for kind in moves]
        self.kinds = sorted({(1, 1), *self.moves})
        for k, evaluations in self.kinds:
            if not (k == evaluations == 1 or 1 <= evaluations <= 2 and evaluations < k):
                raise ValueError(
                    f"strides: {k} steps by {evaluations} evaluations is not a kind of stride"
                )
        self.tables = {kind: _tables_of(diffusion, *kind) for kind in self.kinds}
        self._device_tables = {}

    @property
    def _values(self):
        return self.diffusion, *self.moves

    def times(self) -> list[int]:
        """Return the original timestep of every evaluation of a run, in order."""
        found = []
        t = self.diffusion.num_timesteps - 1
        for kind in self.moves:
            found += self.tables[kind]["timestep"][t].tolist()
            t -= kind[0]
        return found

    def prepare(self, device: torch.device | str) -> None:
        """Upload the tables to `device`, as GaussianDiffusion.prepare does."""
        self.diffusion.prepare(device)
        for kind in self.kinds:
            self._tables(kind, torch.empty(0, device=device).device)

    def _tables(self, kind, device):
        if (kind, device) not in self._device_tables:
            with torch.inference_mode(False):  # later callers may be in another mode
                self._device_tables[kind, device] = {
                    name: torch.from_numpy(value)
                    .to(torch.int64 if name == "timestep" else torch.float32)
                    .to(device)
                    for name, value in self.tables[kind].items()
                }
        return self._device_tables[kind, device]

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return placeholders for the forecast of x_0 and the learned variance's values,
        each like x. The first stride must be one step: nothing can be forecast yet.
        """
        return torch.zeros_like(x), torch.zeros_like(x)

    def stride(
        self,
        model: Callable,
        x: Tensor,
        t: Tensor,
        m: Tensor,
        values: Tensor,
        noise: Tensor,
        evaluations: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make k = len(noise) steps from x at t by `evaluations` of `model`: (x, original
        t) -> (n, 2C, ...).

        m, values: from the stride before, or from `start` with k = 1. noise (k, n, C,
        ...): each step's draw; at t = 0 it is masked. Returns x_{t-k} and the next m and
        values, each like x.
        """
        k = len(noise)
        d = self.diffusion
        tables = self._tables((len(noise), evaluations), x.device)
        if k == 1:
            eps, fresh = d._split_output(model(x, tables["timestep"][t, 0]), x)
            x0 = last = d._predict_xstart_from_eps(x, t, eps)
        else:
            path = self._path(x, t, m, values, noise)
            point = _weighted(tables["mean" if evaluations == 1 else "first"][t], path)
            x0, fresh = self._evaluate(model, point, m, tables, t, 0)
            last = x0
            if evaluations == 2:
                path = self._path(x, t, x0, fresh, noise, tables["later"][t, 0])
                last, second = self._evaluate(
                    model, 2 * _weighted(tables["mean"][t], path) - point, x0, tables, t, 1
                )
                x0 = (x0 + last) / 2
                fresh = (fresh + second) / 2
        m = last
        later = tables["later"][t, -1]
        for j in range(k):
            x, news = self._advance(x, t - j, x0, fresh, noise[j])
            m = m + _like(later[:, j], x) * news
        return x, m, fresh

    def _path(self, x, t, m, values, noise, later=None):
        """Return the list of x_s by eq. 1, with m_s of eq. 6 in place of D. later (n, k):
        the share of each step's noise that m does not hold yet; default: all.
        """
        path = [x]
        for j in range(len(noise) - 1):
            x, news = self._advance(x, t - j, m, values, noise[j])
            m = m + (news if later is None else _like(later[:, j], x) * news)
            path.append(x)
        return path

    def _evaluate(self, model, point, m, tables, t, i):
        """Apply eq. 5 to the i-th point (in u) of a stride; return x_0 and the variance's
        values there.
        """
        root, noise, widen = (
            _like(tables[name][t, i], point) for name in ("root", "noise", "widen")
        )
        at = root * (m + widen * (point - m))
        eps, values = self.diffusion._split_output(model(at, tables["timestep"][t, i]), at)
        return (at - noise * eps) / root, values

    def _advance(self, x, t, x0, values, noise):
        """Return x_{t-1} of eq. 1 with x_0 given, and the change of x_0 that its noise
        makes, eq. 6.
        """
        d = self.diffusion
        log_variance = d._range_log_variance(values, x, t)
        not_last = _like((t != 0).float(), x)
        step = not_last * torch.exp(0.5 * log_variance) * noise
        share = 1 - torch.exp(d._at("posterior_log_variance_clipped", t, x) - log_variance)
        news = share.clamp(min=0) * step / d._at("posterior_mean_coef1", t, x)
        return d._posterior_mean(x0, x, t) + step, news


def _tables_of(d, k, evaluations):
    """Return the tables of one kind of stride from every t, by name: (T, ...) float64,
    `timestep` int64; zeros where fewer than k steps are left. d: the diffusion.
    """
    steps = d.num_timesteps
    c1 = d.posterior_mean_coef1
    c2 = d.posterior_mean_coef2
    abar = d.alphas_cumprod
    trained = d.original_alphas_cumprod
    level = (1 - trained) / trained  # tau of the trained process
    mean = np.zeros((steps, k))
    first = np.zeros((steps, k))  # of x_s in u* and in p_1
    of_points = steps, evaluations
    widen = np.zeros(of_points)
    root = np.ones(of_points)
    noise = np.zeros(of_points)
    seen = np.zeros((*of_points, k))
    timestep = np.zeros(of_points, dtype=np.int64)
    for t in range(k - 1, steps):
        s = np.arange(t, t - k, -1)
        tau = (1 - abar[s]) / abar[s]
        w = c1[s] * np.append(np.cumprod(c2[s[:0:-1]])[::-1], 1.0)  # eq. 2
        w = w / w.sum()
        points = [w] if evaluations == 1 else [w - _axis(w, tau), w + _axis(w, tau)]
        for i, a in enumerate(points):
            theta = a @ np.minimum.outer(tau, tau) @ a
            # after a large step a point can lie beyond the path's ends
            at = np.clip(a @ tau, tau[-1], tau[0])
            timestep[t, i] = d.timestep_map[t] if k == 1 else np.abs(np.log(level / at)).argmin()
            widen[t, i] = np.sqrt(level[timestep[t, i]] / theta)
            root[t, i], noise[t, i] = (
                np.sqrt(trained[timestep[t, i]]),
                np.sqrt(1 - trained[timestep[t, i]]),
            )
            # how much of each step's noise is in the point
            seen[t, i] = (a @ np.arange(k) - np.arange(k)).clip(0, 1)
        mean[t], first[t] = w / np.sqrt(abar[s]), points[0] / np.sqrt(abar[s])
    return dict(
        mean=mean,
        first=first,
        widen=widen,
        root=root,
        noise=noise,
        later=1 - seen,
        timestep=timestep,
    )


def _axis(w, tau):
    """Return e of eq. 4 as weights (k,) of the path's points, with sum 0; it points to
    the path's end. w, tau (k,).
    """
    k = len(w)
    scale = np.sqrt(-np.diff(tau))  # standard deviations of the increments
    # each point in terms of increments of variance 1
    path = np.tril(np.ones((k, k - 1)), -1) * scale
    path -= w @ path
    variances, axes = np.linalg.eigh((path.T * w) @ path)
    # of the increments
    e = axes[:, -1] * np.sign(axes[:, -1].sum()) * np.sqrt(max(variances[-1], 0)) / scale
    return np.append(0, e) - np.append(e, 0)


def _weighted(weights, path):
    """Return the weighted sum (n, ...) of a path of k tensors (n, ...). weights (n, k)."""
    return sum(_like(weights[:, j], x) * x for j, x in enumerate(path))


def _like(values, x):
    """Reshape values (n,) to broadcast with x (n, ...)."""
    return values.view(-1, *[1] * (x.ndim - 1))
