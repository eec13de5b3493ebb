"""Which steps of a run call the network: a plan made beforehand by scripts/calibrate.py, or error control while sampling."""

import hashlib
import json
from copy import copy
from pathlib import Path

import torch

from accel.options import ROOT, UsageError
from diffusion.forecast import Strides
from pretrained_models.download import find_model

KIND = "forecast plan, version 1"


def weights_hash(state):
    """A short hash of a few hundred values of every tensor of a state dict: the same for every tier and file format."""
    digest = hashlib.sha256()
    for name in sorted(name for name in state if name != "pos_embed"):  # the table is a function of the grid
        tensor = state[name].detach().flatten()
        digest.update(name.encode() + tensor[:: tensor.numel() // 256 + 1].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def plan_path(options):
    """Where the plan of the options' weights lies: --forecast-plan, or beside the checkpoint."""
    if options.forecast_plan is not None:
        return Path(options.forecast_plan)
    checkpoint = Path(options.ckpt or ROOT / "pretrained_models" / f"DiT-XL-2-{options.image_size}x{options.image_size}.pt")
    if not checkpoint.exists() and (ROOT / "pretrained_models" / checkpoint.name).exists():
        checkpoint = ROOT / "pretrained_models" / checkpoint.name
    return checkpoint / "forecast.json" if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.stem}.forecast.json")


def settings_of(options, name):
    """What a plan was made for and holds for; name: the weights, as find_model takes them."""
    return {"model": options.model, "image_size": options.image_size, "num_sampling_steps": options.num_sampling_steps,
            "cfg_scale": float(options.cfg_scale), "weights": weights_hash(find_model(name))}


def read_plan(options, name):
    """The gaps between the calls of the options' plan, in steps. Raises UsageError if there is none, if it is damaged, or if it was made for
    other weights, steps, guidance, size or model."""
    path = plan_path(options)
    flag = f"--forecast-plan {path}"
    try:
        plan = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{flag}: no such file; make it with scripts/calibrate.py, or use --forecast auto or off") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: cannot be read ({error}); make it again with scripts/calibrate.py") from None
    if not isinstance(plan, dict) or plan.get("kind") != KIND:
        raise UsageError(f"{flag}: is no {KIND}; make it with scripts/calibrate.py")
    want = settings_of(options, name)
    for key, value in want.items():
        if plan.get(key) != value:
            what = "was made for other weights" if key == "weights" else f"was made for --{key.replace('_', '-')} {plan.get(key)}, not {value}"
            raise UsageError(f"{flag}: {what}; make one with scripts/calibrate.py, or use --forecast auto or off")
    calls, steps = plan.get("calls"), options.num_sampling_steps
    if not isinstance(calls, list) or calls[:2] != [0, 1][:steps] or any(type(c) is not int for c in calls) or sorted(set(calls)) != calls or calls[-1] >= steps:
        raise UsageError(f"{flag}: calls must be increasing steps from 0, 1 to {steps - 1}; make it again with scripts/calibrate.py")
    return [after - before for before, after in zip(calls, [*calls[1:], steps])]


def write_plan(path, settings, gaps, evidence):
    """gaps: as read_plan gives them; evidence: JSON that says how good the plan was found to be."""
    calls = [sum(gaps[:i]) for i in range(len(gaps))]
    path.write_text(json.dumps({"kind": KIND, **settings, "calls": calls, "evidence": evidence}) + "\n")


class Plan:
    """A fixed list of gaps, the same for every picture and rank."""

    def __init__(self, diffusion, gaps):
        self.gaps = list(gaps)
        self.strides = Strides(diffusion, max(self.gaps))
        self.steps = diffusion.num_timesteps

    def __str__(self):
        return f"{len(self.gaps)} calls"

    @property
    def setting(self):
        """What decides the bits of a picture, as an FID job records it."""
        return f"plan {hashlib.sha256(bytes(self.gaps)).hexdigest()[:8]} of {self}"

    def timesteps(self):
        """The original timesteps that will be called, in order."""
        starts = [self.steps - 1 - sum(self.gaps[:i]) for i in range(len(self.gaps))]
        return [int(self.strides.timestep[t, k]) for t, k in zip(starts, self.gaps)]

    def place(self, call, index, gap):
        """Where in `timesteps` the call stands that is the `call`-th and serves `gap` steps from step `index`."""
        return call

    def run(self):
        """The gaps of one run."""
        return iter(self.gaps)

    def observe(self, error, index, gap):
        """Of no use to a fixed plan."""

    def each_length_once(self):
        """A short run that meets every length of gap, for warm-up."""
        short = copy(self)
        short.gaps = [1, *sorted(set(self.gaps) - {1})]
        return short


class Auto:
    """
    Error control while sampling, for weights without a plan. The mean square of a call's x_0 minus its forecast, of the worst picture, over the steps
    since the call before, is the rate r at which x_0 moves. What one call for k steps misses is quadratic in that move, so a gap is allowed where

        sqrt(S_t) W_{t,k} (k - 1) r <= tolerance,    S_t = (1 - abar_t)^2 + 0.1,

    with W of diffusion.forecast. S is how much of an error of x is left in the picture, in shape; it was read off the demo (scripts/calibrate.py measures it
    on any weights). Near the end a gap is at most 1 + t / 8 steps: the trained timesteps, among which a call takes its place, lie too far apart there.
    The error travels to the host beside the next call, so that the device never waits: a gap is chosen from the calls up to the last but one.
    """

    LONGEST = 4

    def __init__(self, diffusion, tolerance):
        self.strides, self.tolerance, self.steps = Strides(diffusion, self.LONGEST), tolerance, diffusion.num_timesteps
        self.sensitivity = (1 - diffusion.alphas_cumprod) ** 2 + 0.1
        self.agree = None  # over ranks that make one grid: replaces a number on the device by its maximum over all
        self.calls = self.pending = self.rate = None

    def __str__(self):
        return f"calls by error, tolerance {self.tolerance:g}"

    @property
    def setting(self):
        return f"auto, tolerance {self.tolerance:g}"

    def timesteps(self):
        """All that may be called: which will be is not known ahead."""
        return range(self.strides.diffusion.original_num_steps - 1, -1, -1)

    def place(self, call, index, gap):
        return self.strides.diffusion.original_num_steps - 1 - int(self.strides.timestep[self.steps - 1 - index, gap])

    def each_length_once(self):
        short = copy(self)
        short.run = lambda: iter([1, *range(2, self.LONGEST + 1)])
        short.agree = None
        return short

    def run(self):
        self.pending, self.rate, self.calls, index = [], None, 0, 0
        while index < self.steps:
            if len(self.pending) > 1:
                self._take_in()
            gap = self._allowed(self.steps - 1 - index)
            yield gap
            index, self.calls = index + gap, self.calls + 1

    def observe(self, error, index, gap):
        """error (n,) of the call at step `index` that serves `gap` steps, on the device."""
        worst = error.max()
        if self.agree is not None:
            self.agree(worst)
        host = torch.empty_like(worst, device="cpu", pin_memory=worst.is_cuda)
        host.copy_(worst, non_blocking=True)
        event = torch.cuda.Event() if worst.is_cuda else None
        if event:
            event.record()
        self.pending.append((host, event, gap, index))

    def _take_in(self):
        host, event, gap, index = self.pending.pop(0)
        if event:
            event.synchronize()  # of a call that the device has left behind
        if index:  # the first call has no forecast
            self.rate = float(host) / gap

    def _allowed(self, t):
        if self.rate is None:
            return 1
        gap = 1
        for k in range(2, min(self.LONGEST, 1 + t // 8) + 1):
            if self.sensitivity[t] ** 0.5 * self.strides.total[t, k] * (k - 1) * self.rate <= self.tolerance:
                gap = k
        return gap
