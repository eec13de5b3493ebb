"""
Several ancestral steps by one call of the network, on the noise that they would have drawn anyway.

Write c_t, d_t for the two coefficients of the posterior mean (Ho et al. 2020, 2006.11239, eq. 7). k steps from x_t are

    x_{s-1} = c_s D(x_s, s) + d_s x_s + sigma_s z_s,    s = t, t-1, ..., t-k+1                                (1)

with D(x_s, s) the network's x_0. Where they end depends on the k values of D through one sum only,

    x_{t-k} = ... + W sum_s w_s D(x_s, s),    w_s ~ c_s d_{s-1} ... d_{t-k+1},  sum_s w_s = 1.                (2)

The noise moves D from step to step: D(x_s, s) is a martingale under p, so no extrapolation from past calls can foresee it. But the noise is
known: it is the run's random stream, which may be drawn ahead. D is smooth in u = x / sqrt(abar), x_0 plus noise of variance
tau = (1 - abar) / abar. Expanded to first order about the path's weighted mean,

    u* = sum_s w_s u_s,    tau* = sum_s w_s tau_s,                                                            (3)

all first-order terms of (2) cancel: sum_s w_s D(u_s, tau_s) = D(u*, tau*) + O(2). So one call, at the timestep of the trained process nearest to
tau* and at sqrt(abar*) u*, stands for k. What is left is the curvature of D over k steps, not its slope times the noise.

The path u_s needs D itself. There its place is taken by a forecast m_s, and an error of m enters (3) only through the small steps it is multiplied
with. m_t is the last call's x_0; along the path it takes in what the noise says about x_0. The learned variance holds the network's
own uncertainty of x_0, sigma_s^2 = b_s + c_s^2 Var(x_0 | x_s), b_s being the posterior's variance given x_0 (eq. 7); so by the rule
for Gaussians, pixel by pixel,

    m_{s-1} = m_s + (1 - b_s / sigma_s^2) (sigma_s / c_s) z_s.                                                (4)

The call's x_0 then gives a better path, and a mean u' of it. What D would be there is not asked again: errors of m lie where data vary, and along those
directions a network that sees little noise gives back what it is given, D(u') - D(u*) = u' - u*. So

    x_0 <- x_0 + u' - u*.                                                                                     (5)

With k = 1, u* = u_t: the ancestral step itself, to the bit.
"""
import numpy as np
import torch


class Strides:
    """
    Ancestral sampling of `diffusion` (a SpacedDiffusion) that calls the network once in up to `longest` steps.

    x (n, C, ...) throughout; t: a timestep of `diffusion`, (n,) int64, from which k steps lead to t - k. ValueError for a process that predicts
    anything but the noise and a variance within its range.
    """

    def __init__(self, diffusion, longest):
        if not diffusion.learns_range:
            raise ValueError("strides: need a network that predicts the noise and a learned range of variance")
        self.diffusion, self.longest = diffusion, min(longest, diffusion.num_timesteps)
        self.weight, self.total, self.timestep = self._plan(diffusion)
        self._device_tables = {}

    def _plan(self, diffusion):
        """Of every (t, k), float64: w_s, s = t ... t-k+1 (T, K+1, K), zeros where there are fewer; W (T, K+1); and the original
        timestep called (T, K+1) int64."""
        c, d, abar = diffusion.posterior_mean_coef1, diffusion.posterior_mean_coef2, diffusion.alphas_cumprod
        trained = diffusion.original_alphas_cumprod
        weight = np.zeros((diffusion.num_timesteps, self.longest + 1, self.longest))
        total, timestep = np.zeros(weight.shape[:2]), np.zeros(weight.shape[:2], dtype=np.int64)
        for t in range(diffusion.num_timesteps):
            for k in range(1, min(self.longest, t + 1) + 1):
                s = np.arange(t, t - k, -1)
                w = c[s] * np.append(np.cumprod(d[s[:0:-1]])[::-1], 1.0)  # eq. 2
                total[t, k] = w.sum()
                weight[t, k, :k] = w = w / w.sum()
                tau = float(w @ ((1 - abar[s]) / abar[s]))
                timestep[t, k] = diffusion.timestep_map[t] if k == 1 else np.abs(np.log((1 - trained) / trained / tau)).argmin()
        return weight, total, timestep

    def prepare(self, device):
        """Upload the tables to `device`, as GaussianDiffusion.prepare does."""
        self.diffusion.prepare(device)
        self._tables(torch.empty(0, device=device).device)

    def _tables(self, device):
        if device not in self._device_tables:
            trained = self.diffusion.original_alphas_cumprod[self.timestep]  # (T, K+1)
            s = np.arange(len(self.weight))[:, None] - np.arange(self.longest)  # (T, K)
            root = np.sqrt(self.diffusion.alphas_cumprod[s.clip(0)])
            mix = self.weight * np.sqrt(trained)[..., None] / root[:, None]  # of x_s in the point of the call: (T, K+1, K)
            centre = (self.weight * np.arange(self.longest)).sum(2, keepdims=True)  # steps to the call's place, weighted
            later = np.arange(self.longest) >= centre - 1e-9  # noise that the call has not seen
            tables = dict(mix=mix, later=later, total=self.total, root=np.sqrt(trained), noise=np.sqrt(1 - trained), timestep=self.timestep)
            with torch.inference_mode(False):  # these outlive the mode of whoever comes first
                self._device_tables[device] = {
                    name: torch.from_numpy(value).to(torch.int64 if name == "timestep" else torch.float32).to(device)
                    for name, value in tables.items()}
        return self._device_tables[device]

    def start(self, x):
        """What a run carries from stride to stride, before its first: the forecast of x_0 and the values of the learned variance, each like x. The
        first stride must be one step: there is nothing yet to forecast from."""
        return torch.zeros_like(x), torch.zeros_like(x)

    def point(self, x, t, m, values, noise):
        """Eq. 3: where k = len(noise) steps from x at t call the network: sqrt(abar*) u*, like x, and the original timestep (n,). noise (k, n, C, ...)."""
        k, tables = len(noise), self._tables(x.device)
        if k == 1:
            return x, tables["timestep"][t, 1]
        mix = tables["mix"][t, k]  # (n, K)
        at = _like(mix[:, 0], x) * x
        for j in range(1, k):
            x, m = self._advance(x, t - (j - 1), m, values, noise[j - 1])
            at = at + _like(mix[:, j], x) * x
        return at, tables["timestep"][t, k]

    def stride(self, model, x, t, m, values, noise):
        """
        k = len(noise) steps from x at t by one call of `model`: (x, original t) -> (n, 2C, ...).

        m, values: of the stride before, or of `start` with k = 1. noise (k, n, C, ...): what each step draws; the one of t = 0 is masked.
        Returns x_{t-k}, the next m and values, each like x, and the error (n,) of the forecast: the mean square of the call's x_0 minus m at its place.
        """
        k, tables, d = len(noise), self._tables(x.device), self.diffusion
        at, original = self.point(x, t, m, values, noise)
        eps, fresh = d._split_output(model(at, original), x)
        if k == 1:
            x0 = d._predict_xstart_from_eps(x, t, eps)
        else:
            x0 = (at - _like(tables["noise"][t, k], x) * eps) / _like(tables["root"][t, k], x)
        error = (x0 - m).flatten(1).square().mean(1)
        m, mix, later, moved = x0, tables["mix"][t, k], tables["later"][t, k], -at  # (n, K)
        for j in range(k):
            moved = moved + _like(mix[:, j], x) * x
            x, news = self._advance(x, t - j, x0, fresh, noise[j])
            m = m + _like(later[:, j], x) * (news - x0)
        if k > 1:  # eq. 5; x is linear in x_0
            shift = moved / _like(tables["root"][t, k], x)
            x, m = x + _like(tables["total"][t, k], x) * shift, m + shift
        return x, m, fresh, error

    def _advance(self, x, t, x0, values, noise):
        """Eq. 1 with x_0 given, and eq. 4: x_{t-1} and what its noise makes of x_0."""
        d = self.diffusion
        log_variance = d._range_log_variance(values, x, t)
        not_last = (t != 0).float().view(-1, *[1] * (x.ndim - 1))
        step = not_last * torch.exp(0.5 * log_variance) * noise
        share = 1 - torch.exp(d._at("posterior_log_variance_clipped", t, x) - log_variance)
        news = share.clamp(min=0) * step / d._at("posterior_mean_coef1", t, x)
        return d._posterior_mean(x0, x, t) + step, x0 + news


def _like(values, x):
    """(n,) to broadcast with x (n, ...)."""
    return values.view(-1, *[1] * (x.ndim - 1))
