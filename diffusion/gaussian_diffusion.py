"""The Gaussian diffusion process: tables, reverse steps, sampling loops and losses.

    Ho        Ho et al. 2020, Denoising diffusion probabilistic models, 2006.11239
    Nichol    Nichol & Dhariwal 2021, Improved denoising diffusion probabilistic models, 2102.09672
    Song      Song et al. 2021, Denoising diffusion implicit models, 2010.02502
    Dhariwal  Dhariwal & Nichol 2021, Diffusion models beat GANs on image synthesis, 2105.05233

x is (N, C, ...), and t is an integer tensor (N,) on x's device with 0 <= t < num_timesteps.
q is the noising process and p the model's. `model` is any callable (x, t,
**model_kwargs) -> (N, C, ...), or (N, 2C, ...) if it predicts the variance too. alpha_t =
1 - beta_t, abar_t = alpha_0 ... alpha_t; t counts from 0.

Tables are read on t's device, so a step neither copies from the host nor waits for the device. It
can be captured in a CUDA graph after `prepare(device)`.
"""

import enum
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor


class ModelMeanType(enum.Enum):
    """The model's prediction."""

    PREVIOUS_X = enum.auto()  # the mean of x_{t-1}
    START_X = enum.auto()  # x_0
    EPSILON = enum.auto()  # the noise in x_t


class ModelVarType(enum.Enum):
    """The variance of p(x_{t-1} | x_t). Learned variances are channels C ... 2C of the
    model's output.
    """

    LEARNED = enum.auto()  # its log
    FIXED_SMALL = enum.auto()  # the posterior's
    FIXED_LARGE = enum.auto()  # beta_t
    # its log interpolates between that of the posterior variance (-1) and that of beta_t (1)
    LEARNED_RANGE = enum.auto()


class LossType(enum.Enum):
    """The training loss. "The bound" is the variational bound, Ho eq. 5."""

    MSE = enum.auto()  # squared error (and the bound's term, as is, for a learned variance)
    RESCALED_MSE = enum.auto()  # the same with the bound's term times num_timesteps / 1000
    KL = enum.auto()  # the bound's term, in bits per dimension
    RESCALED_KL = enum.auto()  # the same times num_timesteps: an estimate of the whole bound

    def is_vb(self) -> bool:
        """Return whether the loss is only the variational bound."""
        return self in (LossType.KL, LossType.RESCALED_KL)


def mean_flat(tensor: Tensor) -> Tensor:
    """Return the mean over all dimensions but the first: (N, ...) -> (N,)."""
    return tensor.mean(dim=list(range(1, tensor.ndim)))


# ---- beta schedules: float64 (T,) ----


def get_beta_schedule(
    beta_schedule: str, *, beta_start: float, beta_end: float, num_diffusion_timesteps: int
) -> np.ndarray:
    """Return float64 betas (num_diffusion_timesteps,) from beta_start to beta_end by
    name: "linear"; "quad" (linear in the square root); "warmup10", "warmup50" (linear
    over the first 10 or 50 %, then constant); "const" (beta_end); "jsd" (1/T, 1/(T-1),
    ..., 1). Raises ValueError for another name.
    """
    steps = num_diffusion_timesteps
    if beta_schedule == "linear":
        return np.linspace(beta_start, beta_end, steps, dtype=np.float64)
    if beta_schedule == "quad":
        return np.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=np.float64) ** 2
    if beta_schedule in ("warmup10", "warmup50"):
        betas = np.full(steps, beta_end, dtype=np.float64)
        warm = int(steps * (0.1 if beta_schedule == "warmup10" else 0.5))
        betas[:warm] = np.linspace(beta_start, beta_end, warm, dtype=np.float64)
        return betas
    if beta_schedule == "const":
        return np.full(steps, beta_end, dtype=np.float64)
    if beta_schedule == "jsd":
        return 1.0 / np.linspace(steps, 1, steps, dtype=np.float64)
    raise ValueError(
        f'beta schedule "{beta_schedule}": expected linear, quad, warmup10, warmup50, const or jsd'
    )


def get_named_beta_schedule(schedule_name: str, num_diffusion_timesteps: int) -> np.ndarray:
    """Return the betas of a published schedule, float64 (num_diffusion_timesteps,).

    "linear": Ho's 1e-4 ... 0.02 for 1000 steps; scaled by 1000 / T for T steps, so that
    the end is as noisy. "squaredcos_cap_v2": Nichol eq. 17, abar(u) = cos^2(pi/2 (u +
    0.008) / 1.008). Raises ValueError for another name.
    """
    if schedule_name == "linear":
        scale = 1000 / num_diffusion_timesteps
        return get_beta_schedule(
            "linear",
            beta_start=scale * 0.0001,
            beta_end=scale * 0.02,
            num_diffusion_timesteps=num_diffusion_timesteps,
        )
    if schedule_name == "squaredcos_cap_v2":
        return betas_for_alpha_bar(
            num_diffusion_timesteps, lambda u: math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
        )
    raise ValueError(f'noise schedule "{schedule_name}": expected linear or squaredcos_cap_v2')


def betas_for_alpha_bar(
    num_diffusion_timesteps: int, alpha_bar: Callable[[float], float], max_beta: float = 0.999
) -> np.ndarray:
    """Return beta_t = min(1 - abar((t+1)/T) / abar(t/T), max_beta), float64 (T,): Nichol
    section 3.2. alpha_bar: the function abar on [0, 1].
    """
    edges = [
        alpha_bar(step / num_diffusion_timesteps) for step in range(num_diffusion_timesteps + 1)
    ]
    return np.array([min(1 - after / before, max_beta) for before, after in zip(edges, edges[1:])])


class GaussianDiffusion:
    """The process of `betas` (T,), each in (0, 1], for a model with the given kinds of output.

    The tables are float64 numpy attributes (T,): betas, alphas_cumprod (abar_t) and functions of
    these. Each device that is used has float32 copies. Raises ValueError for invalid betas.
    """

    def __init__(
        self,
        *,
        betas: np.ndarray,
        model_mean_type: "ModelMeanType",
        model_var_type: "ModelVarType",
        loss_type: "LossType",
    ):
        self.model_mean_type = model_mean_type
        self.model_var_type = model_var_type
        self.loss_type = loss_type

        betas = np.array(betas, dtype=np.float64)
        if betas.ndim != 1 or len(betas) == 0 or not ((betas > 0) & (betas <= 1)).all():
            raise ValueError(
                "betas: expected a row of numbers in (0, 1]"
                + (f", got {betas.min():.3g} ... {betas.max():.3g}" if betas.size else ", got none")
            )
        self.betas = betas
        self.num_timesteps = len(betas)

        self.alphas_cumprod = np.cumprod(1.0 - betas)
        self.alphas_cumprod_prev = np.append(1.0, self.alphas_cumprod[:-1])
        self.alphas_cumprod_next = np.append(self.alphas_cumprod[1:], 0.0)

        # q(x_t | x_0), Ho eq. 4, and its inverse
        self.sqrt_alphas_cumprod = np.sqrt(self.alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(1.0 - self.alphas_cumprod)
        with np.errstate(divide="ignore"):  # infinite for beta = 1, which ends in pure noise
            self.log_one_minus_alphas_cumprod = np.log(1.0 - self.alphas_cumprod)
            self.sqrt_recip_alphas_cumprod = np.sqrt(1.0 / self.alphas_cumprod)
            self.sqrt_recipm1_alphas_cumprod = np.sqrt(1.0 / self.alphas_cumprod - 1)

        # q(x_{t-1} | x_t, x_0), Ho eq. 6 and 7
        self.posterior_variance = (
            betas * (1.0 - self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)
        )
        # It is 0 at t = 0. p has the variance of t = 1 there, which matters only for the
        # likelihood of x_0.
        self._first_variance = self.posterior_variance[1] if self.num_timesteps > 1 else betas[0]
        self.posterior_log_variance_clipped = np.log(
            np.append(self._first_variance, self.posterior_variance[1:])
        )
        self.posterior_mean_coef1 = (
            betas * np.sqrt(self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)
        )
        self.posterior_mean_coef2 = (
            (1.0 - self.alphas_cumprod_prev) * np.sqrt(1.0 - betas) / (1.0 - self.alphas_cumprod)
        )

        # device -> name -> float32 (T,)
        self._device_tables: dict[torch.device, dict[str, Tensor]] = {}

    # ---- tables on the device ----

    def prepare(self, device: torch.device | str) -> None:
        """Upload the tables to `device`, once. Without it, capturing a step in a CUDA graph raises
        RuntimeError.
        """
        self._tables(torch.empty(0, device=device).device)  # "cuda" becomes "cuda:0"

    def _tables(self, device):
        # A trace has separate tables: its tensors may be fake.
        in_trace = torch.jit.is_tracing() or type(torch.empty(0, device="cpu")) is not Tensor
        tables = None if in_trace else self._device_tables.get(device)
        if tables is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f'a CUDA graph is being captured: call diffusion.prepare("{device}") before'
                )
            with torch.inference_mode(False):  # later callers may train
                tables = self._upload(device)
            if not in_trace:
                self._device_tables[device] = tables
        return tables

    def _upload(self, device):
        """Return the tables by name, float32 (T,) on `device`, uploaded in one copy."""
        arrays = {
            name: table for name, table in vars(self).items() if isinstance(table, np.ndarray)
        }
        tables = {name: table for name, table in arrays.items() if len(table) == self.num_timesteps}
        large = self.betas.copy()
        large[0] = self._first_variance
        tables["log_betas"] = np.log(self.betas)
        tables["large_variance"], tables["log_large_variance"] = large, np.log(large)
        # (tables, T)
        rows = torch.from_numpy(np.stack(list(tables.values()))).to(torch.float32).to(device)
        return dict(zip(tables, rows.unbind(0)))

    def __getstate__(self):
        return {**vars(self), "_device_tables": {}}  # copies and pickles carry no device memory

    def _at(self, name, t, x):
        """Return table `name` at t, float32 (N, 1, ...), to broadcast with x (N, ...)."""
        return self._tables(t.device)[name][t.long()].view(-1, *[1] * (x.ndim - 1))

    # ---- q: the noising process ----

    def q_mean_variance(self, x_start: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and log variance of q(x_t | x_0) = N(sqrt(abar_t) x_0, (1
        - abar_t) I), Ho eq. 4.
        """
        mean = self._at("sqrt_alphas_cumprod", t, x_start) * x_start
        variance = self._at("sqrt_one_minus_alphas_cumprod", t, x_start) ** 2
        log_variance = self._at("log_one_minus_alphas_cumprod", t, x_start)
        return mean, variance.expand(x_start.shape), log_variance.expand(x_start.shape)

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, Ho eq. 4. noise: like
        x_start, drawn if None.
        """
        if noise is None:
            noise = torch.randn_like(x_start)
        return (
            self._at("sqrt_alphas_cumprod", t, x_start) * x_start
            + self._at("sqrt_one_minus_alphas_cumprod", t, x_start) * noise
        )

    def q_posterior_mean_variance(
        self, x_start: Tensor, x_t: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and log variance (clipped at t = 0) of q(x_{t-1} | x_t,
        x_0), Ho eq. 6 and 7:

            mean = (sqrt(abar_{t-1}) beta_t x_0 + sqrt(alpha_t) (1 - abar_{t-1}) x_t) / (1 - abar_t)
        """
        mean = (
            self._at("posterior_mean_coef1", t, x_t) * x_start
            + self._at("posterior_mean_coef2", t, x_t) * x_t
        )
        variance = self._at("posterior_variance", t, x_t)
        log_variance = self._at("posterior_log_variance_clipped", t, x_t)
        # Contiguous as upstream's: randn_like draws the next noise in x's memory order.
        return mean.contiguous(), variance.expand(x_t.shape), log_variance.expand(x_t.shape)

    # ---- p: from the model's output to a Gaussian over x_{t-1} ----

    def p_mean_variance(
        self,
        model: Callable,
        x: Tensor,
        t: Tensor,
        clip_denoised: bool = True,
        denoised_fn: Callable | None = None,
        model_kwargs: dict | None = None,
    ) -> dict[str, Tensor]:
        """Return p(x_{t-1} | x_t), Ho eq. 1, as a dict: mean, variance, log_variance,
        pred_xstart, each like x, and extra, the second item if the model returns a pair,
        else None.

        denoised_fn: applied to the predicted x_0. clip_denoised: then clamp it to [-1,
        1]. Raises ValueError if t or the model's output does not fit x.
        """
        if t.shape != x.shape[:1]:
            raise ValueError(
                f"t: expected one timestep per row of x, ({x.shape[0]},), got {tuple(t.shape)}"
            )
        output = model(x, self._scale_timesteps(t), **(model_kwargs or {}))
        output, extra = output if isinstance(output, tuple) else (output, None)
        prediction, variance_values = self._split_output(output, x)
        variance, log_variance = self._variance(variance_values, x, t)
        pred_xstart = self._predict_xstart(prediction, x, t)
        if denoised_fn is not None:
            pred_xstart = denoised_fn(pred_xstart)
        if clip_denoised:
            pred_xstart = pred_xstart.clamp(-1, 1)

        if self.model_mean_type is ModelMeanType.PREVIOUS_X:
            mean = prediction
        else:
            mean, _, _ = self.q_posterior_mean_variance(x_start=pred_xstart, x_t=x, t=t)
        return {
            "mean": mean,
            "variance": variance,
            "log_variance": log_variance,
            "pred_xstart": pred_xstart,
            "extra": extra,
        }

    def _split_output(self, output, x):
        """Split the output into the prediction and the learned variance's values, each
        like x; None if it is fixed.
        """
        learned = self.model_var_type in (ModelVarType.LEARNED, ModelVarType.LEARNED_RANGE)
        channels = x.shape[1] * (2 if learned else 1)
        if output.shape != (x.shape[0], channels, *x.shape[2:]):
            raise ValueError(
                f"the model's output is {tuple(output.shape)}; x {tuple(x.shape)} with "
                f"{self.model_var_type.name} variance needs {channels} channels and x's other sizes"
            )
        return output.split(x.shape[1], dim=1) if learned else (output, None)

    def _predict_xstart(self, prediction, x, t):
        """Return x_0 for a prediction of type `model_mean_type`."""
        if self.model_mean_type is ModelMeanType.EPSILON:
            return self._predict_xstart_from_eps(x_t=x, t=t, eps=prediction)
        if self.model_mean_type is ModelMeanType.START_X:
            return prediction
        # Solve Ho eq. 7 for x_0, given the posterior mean.
        return (prediction - self._at("posterior_mean_coef2", t, x) * x) / self._at(
            "posterior_mean_coef1", t, x
        )

    def _predict_xstart_from_eps(self, x_t, t, eps):
        """Solve Ho eq. 4: x_0 = (x_t - sqrt(1 - abar_t) eps) / sqrt(abar_t), contiguous as
        the mean.
        """
        scaled = self._at("sqrt_recip_alphas_cumprod", t, x_t) * x_t
        return (scaled - self._at("sqrt_recipm1_alphas_cumprod", t, x_t) * eps).contiguous()

    def _predict_eps_from_xstart(self, x_t, t, pred_xstart):
        """Solve Ho eq. 4: eps = (x_t - sqrt(abar_t) x_0) / sqrt(1 - abar_t)."""
        return (self._at("sqrt_recip_alphas_cumprod", t, x_t) * x_t - pred_xstart) / self._at(
            "sqrt_recipm1_alphas_cumprod", t, x_t
        )

    def _variance(self, values, x, t):
        """Return variance and log variance of p, like x. values: the model's for a
        learned variance, else None.
        """
        if self.model_var_type is ModelVarType.LEARNED_RANGE:
            # Nichol eq. 15: v log beta_t + (1 - v) log(posterior variance), v = (values + 1) / 2
            min_log = self._at("posterior_log_variance_clipped", t, x)
            max_log = self._at("log_betas", t, x)
            frac = (values + 1) / 2
            log_variance = frac * max_log + (1 - frac) * min_log
            return torch.exp(log_variance), log_variance
        if self.model_var_type is ModelVarType.LEARNED:
            return torch.exp(values), values
        # at t = 0 the variance is 0, its log clipped
        if self.model_var_type is ModelVarType.FIXED_SMALL:
            names = "posterior_variance", "posterior_log_variance_clipped"
        else:
            names = "large_variance", "log_large_variance"
        variance, log_variance = (self._at(name, t, x).expand(x.shape) for name in names)
        return variance, log_variance

    def _scale_timesteps(self, t):
        """Return the argument of model and cond_fn for t (N,). A subclass may scale it."""
        return t

    # ---- classifier guidance ----

    def condition_mean(
        self,
        cond_fn: Callable,
        p_mean_var: dict,
        x: Tensor,
        t: Tensor,
        model_kwargs: dict | None = None,
    ) -> Tensor:
        """Return mean + variance * grad log p(y | x), Dhariwal algorithm 1. cond_fn(x, t,
        **model_kwargs) returns the gradient, like x. p_mean_var: p_mean_variance's dict.
        """
        gradient = cond_fn(x, self._scale_timesteps(t), **(model_kwargs or {}))
        return p_mean_var["mean"] + p_mean_var["variance"] * gradient

    def condition_score(
        self,
        cond_fn: Callable,
        p_mean_var: dict,
        x: Tensor,
        t: Tensor,
        model_kwargs: dict | None = None,
    ) -> dict[str, Tensor]:
        """Return p_mean_var with pred_xstart and mean for eps - sqrt(1 - abar_t) grad log
        p(y | x), Dhariwal algorithm 2: guidance for deterministic steps. cond_fn: as in
        condition_mean.
        """
        eps = self._predict_eps_from_xstart(x, t, p_mean_var["pred_xstart"])
        gradient = cond_fn(x, self._scale_timesteps(t), **(model_kwargs or {}))
        eps = eps - (1 - self._at("alphas_cumprod", t, x)).sqrt() * gradient
        pred_xstart = self._predict_xstart_from_eps(x, t, eps)
        mean, _, _ = self.q_posterior_mean_variance(x_start=pred_xstart, x_t=x, t=t)
        return {**p_mean_var, "pred_xstart": pred_xstart, "mean": mean}

    # ---- samplers: one step each ----

    def p_sample(
        self,
        model: Callable,
        x: Tensor,
        t: Tensor,
        clip_denoised: bool = True,
        denoised_fn: Callable | None = None,
        cond_fn: Callable | None = None,
        model_kwargs: dict | None = None,
        *,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Make an ancestral step, Ho algorithm 2: x_{t-1} = mean + [t != 0]
        exp(log_variance / 2) z, z ~ N(0, I).

        noise: z, like x; if None it is drawn after the model's call, at t = 0 too.
        cond_fn: see condition_mean. Other arguments: see p_mean_variance. Returns a dict:
        sample (x_{t-1}) and pred_xstart, each like x.
        """
        out = self.p_mean_variance(
            model,
            x,
            t,
            clip_denoised=clip_denoised,
            denoised_fn=denoised_fn,
            model_kwargs=model_kwargs,
        )
        if noise is None:
            noise = torch.randn_like(x)
        mean = out["mean"]
        if cond_fn is not None:
            mean = self.condition_mean(cond_fn, out, x, t, model_kwargs=model_kwargs)
        # (N, 1, ...); the last step has no noise
        not_last = (t != 0).float().view(-1, *[1] * (x.ndim - 1))
        sample = mean + not_last * torch.exp(0.5 * out["log_variance"]) * noise
        return {"sample": sample, "pred_xstart": out["pred_xstart"]}

    def ddim_sample(
        self,
        model: Callable,
        x: Tensor,
        t: Tensor,
        clip_denoised: bool = True,
        denoised_fn: Callable | None = None,
        cond_fn: Callable | None = None,
        model_kwargs: dict | None = None,
        eta: float = 0.0,
        *,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Make a DDIM step, Song eq. 12 and 16, with abar' = abar_{t-1} and z ~ N(0, I):

            x_{t-1} = sqrt(abar') x_0 + sqrt(1 - abar' - sigma^2) eps + sigma z
            sigma = eta sqrt((1 - abar') / (1 - abar_t)) sqrt(1 - abar_t / abar')

        At t = 0 abar' is 1 and sigma 0.

        eta: 0 for deterministic, 1 for ancestral steps. noise: z, drawn for eta = 0 too.
        cond_fn: see condition_score. Other arguments and result: see p_sample.
        """
        out = self.p_mean_variance(
            model,
            x,
            t,
            clip_denoised=clip_denoised,
            denoised_fn=denoised_fn,
            model_kwargs=model_kwargs,
        )
        if cond_fn is not None:
            out = self.condition_score(cond_fn, out, x, t, model_kwargs=model_kwargs)
        # Computed from x_0, which may have been clipped.
        eps = self._predict_eps_from_xstart(x, t, out["pred_xstart"])
        abar = self._at("alphas_cumprod", t, x)
        abar_prev = self._at("alphas_cumprod_prev", t, x)
        sigma = eta * torch.sqrt((1 - abar_prev) / (1 - abar)) * torch.sqrt(1 - abar / abar_prev)
        if noise is None:
            noise = torch.randn_like(x)
        variance = 1 - abar_prev - sigma**2
        if eta <= 1:
            variance = variance.clamp(min=0)  # rounding may make it negative
        mean = out["pred_xstart"] * torch.sqrt(abar_prev) + torch.sqrt(variance) * eps
        sample = mean + sigma * noise
        return {"sample": sample, "pred_xstart": out["pred_xstart"]}

    def ddim_reverse_sample(
        self,
        model: Callable,
        x: Tensor,
        t: Tensor,
        clip_denoised: bool = True,
        denoised_fn: Callable | None = None,
        cond_fn: Callable | None = None,
        model_kwargs: dict | None = None,
        eta: float = 0.0,
    ) -> dict[str, Tensor]:
        """Make a step of DDIM's ODE towards noise, Song section 4.3, with abar_T = 0:

            x_{t+1} = sqrt(abar_{t+1}) x_0 + sqrt(1 - abar_{t+1}) eps

        Arguments and result (sample is x_{t+1}): see ddim_sample. Raises ValueError
        unless eta is 0.
        """
        if eta != 0.0:
            raise ValueError(f"eta {eta}: only the deterministic path (eta 0) runs in reverse")
        out = self.p_mean_variance(
            model,
            x,
            t,
            clip_denoised=clip_denoised,
            denoised_fn=denoised_fn,
            model_kwargs=model_kwargs,
        )
        if cond_fn is not None:
            out = self.condition_score(cond_fn, out, x, t, model_kwargs=model_kwargs)
        eps = self._predict_eps_from_xstart(x, t, out["pred_xstart"])
        abar_next = self._at("alphas_cumprod_next", t, x)
        sample = out["pred_xstart"] * torch.sqrt(abar_next) + torch.sqrt(1 - abar_next) * eps
        return {"sample": sample, "pred_xstart": out["pred_xstart"]}

    # ---- samplers: all steps ----

    def p_sample_loop(self, *arguments, **named) -> Tensor:
        """Make all steps of `p_sample_loop_progressive`, with its arguments, and return
        the last sample (shape).
        """
        *_, last = self.p_sample_loop_progressive(*arguments, **named)
        return last["sample"]

    def p_sample_loop_progressive(
        self,
        model: Callable,
        shape: tuple[int, ...],
        noise: Tensor | None = None,
        clip_denoised: bool = True,
        denoised_fn: Callable | None = None,
        cond_fn: Callable | None = None,
        model_kwargs: dict | None = None,
        device: torch.device | str | None = None,
        progress: bool = False,
    ) -> Iterator[dict[str, Tensor]]:
        """Make all p_sample steps from x_T = noise, drawn if None; yield p_sample's dict
        after each step.

        Draws x_T (shape), then one normal batch per step, the last included. device: default:
        the device of noise, else of the model's parameters. progress: show a bar. Other
        arguments: see p_sample.
        """
        step = partial(
            self.p_sample,
            model,
            clip_denoised=clip_denoised,
            denoised_fn=denoised_fn,
            cond_fn=cond_fn,
            model_kwargs=model_kwargs,
        )
        yield from self._loop(step, model, shape, noise, device, progress)

    def ddim_sample_loop(self, *arguments, **named) -> Tensor:
        """Make all steps of `ddim_sample_loop_progressive`, with its arguments, and
        return the last sample (shape).
        """
        *_, last = self.ddim_sample_loop_progressive(*arguments, **named)
        return last["sample"]

    def ddim_sample_loop_progressive(
        self,
        model: Callable,
        shape: tuple[int, ...],
        noise: Tensor | None = None,
        clip_denoised: bool = True,
        denoised_fn: Callable | None = None,
        cond_fn: Callable | None = None,
        model_kwargs: dict | None = None,
        device: torch.device | str | None = None,
        progress: bool = False,
        eta: float = 0.0,
    ) -> Iterator[dict[str, Tensor]]:
        """Make all ddim_sample steps; yield ddim_sample's dict after each. Arguments: see
        p_sample_loop_progressive.
        """
        step = partial(
            self.ddim_sample,
            model,
            clip_denoised=clip_denoised,
            denoised_fn=denoised_fn,
            cond_fn=cond_fn,
            model_kwargs=model_kwargs,
            eta=eta,
        )
        yield from self._loop(step, model, shape, noise, device, progress)

    def _loop(self, step, model, shape, noise, device, progress):
        """Yield step(x, t) for t = T-1 ... 0, each from the sample of the step before."""
        if device is None:
            device = next(model.parameters()).device if noise is None else noise.device
        self.prepare(device)
        x = torch.randn(*shape, device=device) if noise is None else noise
        for t in self._timesteps(shape[0], device, progress):
            with torch.no_grad():  # around the yield it would change the caller's mode
                out = step(x, t)
            yield out
            x = out["sample"]

    def _timesteps(self, batch_size, device, progress=False):
        """Yield t = T-1 ... 0 as (batch_size,) int64, rows of one tensor on the device."""
        steps = torch.arange(self.num_timesteps - 1, -1, -1, device=device)
        rows = steps[:, None].repeat(1, batch_size)  # (T, batch_size)
        indices = range(self.num_timesteps)
        if progress:
            from tqdm.auto import tqdm

            indices = tqdm(indices)
        for index in indices:
            yield rows[index]

    # ---- losses ----

    def training_losses(
        self,
        model: Callable,
        x_start: Tensor,
        t: Tensor,
        model_kwargs: dict | None = None,
        noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses at x_t = q_sample(x_start, t, noise) as a dict of (N,): loss;
        with MSE types also mse and, for a learned variance, vb, the bound's term in bits
        per dimension.

        With both the loss is Nichol's hybrid, eq. 16: the prediction in vb is detached,
        so vb trains only the variance. Raises ValueError if the model's output does not
        fit x_start.
        """
        if noise is None:
            noise = torch.randn_like(x_start)
        x_t = self.q_sample(x_start, t, noise=noise)
        if self.loss_type.is_vb():
            terms = self._vb_terms_bpd(
                model=model,
                x_start=x_start,
                x_t=x_t,
                t=t,
                clip_denoised=False,
                model_kwargs=model_kwargs,
            )
            if self.loss_type is LossType.RESCALED_KL:
                return {"loss": terms["output"] * self.num_timesteps}
            return {"loss": terms["output"]}

        output = model(x_t, self._scale_timesteps(t), **(model_kwargs or {}))
        prediction, variance_values = self._split_output(output, x_t)
        if self.model_mean_type is ModelMeanType.EPSILON:
            target = noise
        elif self.model_mean_type is ModelMeanType.START_X:
            target = x_start
        else:
            target, _, _ = self.q_posterior_mean_variance(x_start=x_start, x_t=x_t, t=t)
        mse = mean_flat((target - prediction) ** 2)
        if variance_values is None:
            return {"mse": mse, "loss": mse}

        frozen = torch.cat([prediction.detach(), variance_values], dim=1)
        terms = self._vb_terms_bpd(
            model=lambda *_: frozen,
            x_start=x_start,
            x_t=x_t,
            t=t,
            clip_denoised=False,
        )
        vb = terms["output"]
        if self.loss_type is LossType.RESCALED_MSE:
            # 1e-3 of the whole bound for any T: Nichol section 3.1
            vb = vb * (self.num_timesteps / 1000.0)
        return {"mse": mse, "vb": vb, "loss": mse + vb}

    def _vb_terms_bpd(self, model, x_start, x_t, t, clip_denoised=True, model_kwargs=None):
        """Return a dict: output, the bound's term (N,) in bits per dimension, and pred_xstart.

        The term is Ho's eq. 5: L_{t-1} = KL(q(x_{t-1} | x_t, x_0) || p) or, at t = 0,
        L_0 = -log p(x_0 | x_1) over 8-bit levels. Arguments: as p_mean_variance's.
        """
        # sampling needs neither
        from .diffusion_utils import discretized_gaussian_log_likelihood, normal_kl

        q_mean, _, q_log_variance = self.q_posterior_mean_variance(x_start=x_start, x_t=x_t, t=t)
        p = self.p_mean_variance(
            model,
            x_t,
            t,
            clip_denoised=clip_denoised,
            model_kwargs=model_kwargs,
        )
        kl = mean_flat(normal_kl(q_mean, q_log_variance, p["mean"], p["log_variance"]))
        log_p = discretized_gaussian_log_likelihood(
            x_start, means=p["mean"], log_scales=0.5 * p["log_variance"]
        )
        nats = torch.where(t == 0, mean_flat(-log_p), kl)
        return {"output": nats / math.log(2.0), "pred_xstart": p["pred_xstart"]}

    def _prior_bpd(self, x_start):
        """Return L_T = KL(q(x_T | x_0) || N(0, I)), Ho eq. 5, (N,) in bits per dimension."""
        from .diffusion_utils import normal_kl

        t = torch.full(
            (x_start.shape[0],), self.num_timesteps - 1, dtype=torch.int64, device=x_start.device
        )
        mean, _, log_variance = self.q_mean_variance(x_start, t)
        return mean_flat(normal_kl(mean, log_variance, 0.0, 0.0)) / math.log(2.0)

    def calc_bpd_loop(
        self,
        model: Callable,
        x_start: Tensor,
        clip_denoised: bool = True,
        model_kwargs: dict | None = None,
    ) -> dict[str, Tensor]:
        """Return the whole variational bound, Ho eq. 5, with one draw of noise per step, as
        a dict: total_bpd (N,), the sum of vb and prior_bpd; prior_bpd (N,); vb,
        xstart_mse and mse (of the noise), each (N, T) from t = T-1 to 0.
        """
        rows: dict[str, list[Tensor]] = {"vb": [], "xstart_mse": [], "mse": []}
        for t in self._timesteps(x_start.shape[0], x_start.device):
            noise = torch.randn_like(x_start)
            x_t = self.q_sample(x_start, t, noise=noise)
            with torch.no_grad():
                p = self._vb_terms_bpd(
                    model,
                    x_start=x_start,
                    x_t=x_t,
                    t=t,
                    clip_denoised=clip_denoised,
                    model_kwargs=model_kwargs,
                )
                rows["vb"].append(p["output"])
            eps = self._predict_eps_from_xstart(x_t, t, p["pred_xstart"])
            rows["xstart_mse"].append(mean_flat((p["pred_xstart"] - x_start) ** 2))
            rows["mse"].append(mean_flat((eps - noise) ** 2))
        terms = {name: torch.stack(of_name, dim=1) for name, of_name in rows.items()}  # each (N, T)
        prior_bpd = self._prior_bpd(x_start)
        return {"total_bpd": terms["vb"].sum(dim=1) + prior_bpd, "prior_bpd": prior_bpd, **terms}


def _extract_into_tensor(arr, timesteps, broadcast_shape):
    """Return a table's float32 values at timesteps (N,), expanded to broadcast_shape (N, ...).

    arr: float64 (T,), which is copied to the device at each call. Used by subclasses with their own
    tables.
    """
    values = torch.from_numpy(arr).to(timesteps.device)[timesteps].float()
    values = values.view(-1, *[1] * (len(broadcast_shape) - 1))
    return values + torch.zeros(broadcast_shape, device=timesteps.device)
