"""By which strides a run goes: a plan made beforehand by scripts/calibrate.py, or error control while sampling."""

import hashlib
import json
from copy import copy
from pathlib import Path

import torch

from accel.checkpoint import Checkpoint
from accel.options import ROOT, UsageError
from diffusion.forecast import Strides

KIND = "forecast plan, version 3"


def plan_path(options):
    """Where the plan of the options' weights lies: --forecast-plan, or beside the checkpoint."""
    if options.forecast_plan is not None:
        return Path(options.forecast_plan)
    checkpoint = Path(
        options.ckpt or ROOT / "pretrained_models" / f"DiT-XL-2-{options.image_size}x{options.image_size}.pt"
    )
    if not checkpoint.exists() and (ROOT / "pretrained_models" / checkpoint.name).exists():
        checkpoint = ROOT / "pretrained_models" / checkpoint.name
    return (
        checkpoint / "forecast.json"
        if checkpoint.is_dir()
        else checkpoint.with_name(f"{checkpoint.stem}.forecast.json")
    )


def settings_of(options, name):
    """What a plan was made for and holds for; name: the weights, as find_model takes them."""
    return {
        "model": options.model,
        "image_size": options.image_size,
        "num_sampling_steps": options.num_sampling_steps,
        "cfg_scale": float(options.cfg_scale),
        "weights": Checkpoint(name).digest(),
    }


def read_plan(options, name):
    """The strides of the options' plan, (steps, calls) each. Raises UsageError if there is none, if it is damaged, or if it was made for
    other weights, steps, guidance, size or model."""
    path = plan_path(options)
    flag = f"--forecast-plan {path}"
    try:
        plan = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{flag}: no such file; make it with scripts/calibrate.py, or use --forecast auto or off"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: cannot be read ({error}); make it again with scripts/calibrate.py") from None
    if not isinstance(plan, dict) or plan.get("kind") != KIND:
        raise UsageError(f"{flag}: is no {KIND}; make it with scripts/calibrate.py")
    want = settings_of(options, name)
    for key, value in want.items():
        if plan.get(key) != value:
            what = (
                "was made for other weights"
                if key == "weights"
                else f"was made for --{key.replace('_', '-')} {plan.get(key)}, not {value}"
            )
            raise UsageError(f"{flag}: {what}; make one with scripts/calibrate.py, or use --forecast auto or off")
    strides, steps = plan.get("strides"), options.num_sampling_steps
    kinds = isinstance(strides, list) and all(
        isinstance(s, list)
        and len(s) == 2
        and all(type(v) is int for v in s)
        and (s == [1, 1] or 1 <= s[1] <= 2 and s[1] < s[0])
        for s in strides
    )
    if not kinds or sum(k for k, _ in strides) != steps or strides[0] != [1, 1]:
        raise UsageError(
            f"{flag}: strides must be [steps, calls], the first [1, 1], {steps} steps in all, others two by one call or more by one or two; "
            "make it again with scripts/calibrate.py"
        )
    return [tuple(stride) for stride in strides]


def write_plan(path, settings, strides, evidence):
    """strides: as read_plan gives them; evidence: JSON that says how good the plan was found to be."""
    path.write_text(
        json.dumps(
            {"kind": KIND, **settings, "calls": sum(c for _, c in strides), "strides": strides, "evidence": evidence}
        )
        + "\n"
    )


class Plan:
    """A fixed list of strides (steps, calls), the same for every picture and rank."""

    def __init__(self, diffusion, strides):
        self.plan = [tuple(kind) for kind in strides]
        self.strides = Strides(diffusion, self.plan)
        self.steps = diffusion.num_timesteps
        self.calls = sum(calls for _, calls in self.plan)

    def __str__(self):
        return f"{self.calls} calls"

    @property
    def setting(self):
        """What decides the bits of a picture, as an FID job records it."""
        return f"plan {hashlib.sha256(repr(self.plan).encode()).hexdigest()[:8]} of {self}"

    def timesteps(self):
        """The original timesteps that will be called, in order."""
        found, index = [], 0
        for kind in self.plan:
            found += self.strides.timesteps(self.steps - 1 - index, kind)
            index += kind[0]
        return found

    def places(self, call, index, kind):
        """Where in `timesteps` the calls stand, from the run's `call`-th on, of a stride of `kind` from step `index`."""
        return range(call, call + kind[1])

    def run(self):
        """The strides of one run."""
        return iter(self.plan)

    def observe(self, error, index, kind):
        """Of no use to a fixed plan."""

    def each_kind_once(self):
        """A short run that meets every kind of stride, for warm-up."""
        short = copy(self)
        short.plan = self.strides.kinds  # (1, 1) is the first
        return short


class Auto:
    """
    Error control while sampling, for weights without a plan. The mean square of a call's x_0 minus its forecast, of the worst picture, over the steps
    since the call before, is the rate r at which x_0 moves. What one or two calls for k steps miss is quadratic in that move, so a stride is taken where

        sqrt(S_t) W_{t,k} miss_k r <= tolerance,    S_t = (1 - abar_t)^2 + 0.1,

    with W of diffusion.forecast. S is how much of an error of x is left in the picture, miss what a kind of stride leaves out, both in shape; they were
    read off the demo (scripts/calibrate.py measures both on any weights). Near the end a stride is at most 1 + t / 8 steps: the trained timesteps,
    among which a call takes its place, lie too far apart there.
    The error travels to the host beside the next call, so that the device never waits: a stride is chosen from the calls up to the last but one.
    """

    KINDS = {
        (1, 1): 0.0,
        (3, 2): 0.33,
        (2, 1): 0.75,
        (4, 2): 0.45,
        (6, 2): 0.75,
    }  # → miss; from the one that calls most to the one that calls least

    def __init__(self, diffusion, tolerance):
        self.strides, self.tolerance, self.steps = Strides(diffusion, self.KINDS), tolerance, diffusion.num_timesteps
        self.sensitivity = (1 - diffusion.alphas_cumprod) ** 2 + 0.1
        self.agree = None  # over ranks that make one grid: replaces a number on the device by its maximum over all
        self.calls = self.pending = self.rate = None
        self.met = sorted(
            {step for t in range(self.steps) for kind in self._open(t) for step in self.strides.timesteps(t, kind)},
            reverse=True,
        )
        self.place_of = {step: place for place, step in enumerate(self.met)}

    def __str__(self):
        return f"calls by error, tolerance {self.tolerance:g}"

    @property
    def setting(self):
        return f"auto, tolerance {self.tolerance:g}"

    def timesteps(self):
        """All that may be called: which will be is not known ahead."""
        return self.met

    def places(self, call, index, kind):
        return [self.place_of[step] for step in self.strides.timesteps(self.steps - 1 - index, kind)]

    def each_kind_once(self):
        short = copy(self)
        short.agree, short.pending = None, []
        short.run = short._kinds_once
        return short

    def _kinds_once(self):
        index = 0
        for kind in [(1, 1), *sorted(self.KINDS, reverse=True)[:-1]]:
            if kind in self._open(self.steps - 1 - index):
                yield kind
                index += kind[0]

    def run(self):
        self.pending, self.rate, self.calls, index = [], None, 0, 0
        while index < self.steps:
            if len(self.pending) > 1:
                self._take_in()
            kind = self._allowed(self.steps - 1 - index)
            yield kind
            index, self.calls = index + kind[0], self.calls + kind[1]

    def observe(self, error, index, kind):
        """error (n,) of the stride of `kind` at step `index`, on the device."""
        worst = error.max()
        if self.agree is not None:
            self.agree(worst)
        host = torch.empty_like(worst, device="cpu", pin_memory=worst.is_cuda)
        host.copy_(worst, non_blocking=True)
        event = torch.cuda.Event() if worst.is_cuda else None
        if event:
            event.record()
        self.pending.append((host, event, kind, index))

    def _take_in(self):
        host, event, (steps, _), index = self.pending.pop(0)
        if event:
            event.synchronize()  # of a call that the device has left behind
        if index:  # the first call has no forecast
            self.rate = float(host) / steps

    def _open(self, t):
        """The kinds that fit before the end."""
        return [kind for kind in self.KINDS if kind[0] <= 1 + t // 8]

    def _allowed(self, t):
        allowed = [(1, 1)]  # also where the rate is not a number
        if self.rate is not None:
            scale = self.sensitivity[t] ** 0.5 * self.rate
            allowed += [
                kind
                for kind in self._open(t)
                if scale * self.strides.total(t, kind) * self.KINDS[kind] <= self.tolerance
            ]
        return allowed[-1]
