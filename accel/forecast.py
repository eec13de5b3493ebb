"""Plans: at which steps of a run the network is evaluated. scripts/calibrate.py makes them, diffusion/strides.py has
the mathematics."""

import json
from pathlib import Path

from accel.errors import UsageError
from accel.files import read_json
from accel.options import GridOptions
from accel.sampling.process import Kind
from accel.weights.checkpoint import Checkpoint

KIND = "forecast plan, version 3"


def plan_path(options: GridOptions, checkpoint: Checkpoint) -> Path:
    """Where the plan of the weights lies: --forecast-plan, or beside the checkpoint."""
    if options.forecast_plan is not None:
        return Path(options.forecast_plan)
    path = checkpoint.path
    return path / "forecast.json" if path.is_dir() else path.with_name(f"{path.stem}.forecast.json")


def settings_of(options: GridOptions, checkpoint: Checkpoint) -> dict:
    """What a plan was made for."""
    return {
        "model": options.model,
        "image_size": options.image_size,
        "num_sampling_steps": options.num_sampling_steps,
        "cfg_scale": float(options.cfg_scale),
        "weights": checkpoint.digest(),
    }


def read_plan(options: GridOptions, checkpoint: Checkpoint) -> list[Kind]:
    """The strides of the options' plan. Raises UsageError if there is none, if it is damaged, or if it was made for
    other weights, steps, guidance, size or model."""
    path = plan_path(options, checkpoint)
    flag, remedy = f"--forecast-plan {path}", "make one with scripts/calibrate.py, or use --forecast off"
    try:
        plan = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{flag}: no such file; {remedy}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{flag}: cannot be read ({reason}); {remedy}") from None
    if plan.get("kind") != KIND:
        raise UsageError(f"{flag}: is not a {KIND}; {remedy}")
    for key, value in settings_of(options, checkpoint).items():
        if plan.get(key) != value:
            what = "other weights" if key == "weights" else f"--{key.replace('_', '-')} {plan.get(key)}, not {value}"
            raise UsageError(f"{flag}: was made for {what}; {remedy}")
    strides = plan.get("strides")
    if not isinstance(strides, list) or not all(map(_is_stride, strides)):
        raise UsageError(
            f"{flag}: strides must be pairs [steps, evaluations], [1, 1] or up to two evaluations; {remedy}"
        )
    if strides[:1] != [[1, 1]] or sum(steps for steps, _ in strides) != options.num_sampling_steps:
        raise UsageError(f"{flag}: must begin with [1, 1] and make {options.num_sampling_steps} steps; {remedy}")
    return [tuple(stride) for stride in strides]


def _is_stride(item):
    if not (isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)):
        return False
    steps, evaluations = item
    return item == [1, 1] or 1 <= evaluations <= 2 and evaluations < steps


def write_plan(path: Path, settings: dict, strides: list[Kind], evidence: dict) -> None:
    """evidence: JSON that says how good the plan was found to be."""
    plan = {"kind": KIND, **settings, "evaluations": sum(count for _, count in strides), "strides": strides}
    path.write_text(json.dumps({**plan, "evidence": evidence}) + "\n")
