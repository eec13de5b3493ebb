"""Plans, files that say at which steps of a run the network is evaluated.
scripts/calibrate.py makes them, diffusion/strides.py has the mathematics.
"""

import json
from pathlib import Path

from accel.errors import UsageError, shown
from accel.files import atomic_write, read_json
from accel.sampling.guidance import Guidance
from accel.sampling.process import Kind

KIND = "forecast plan, version 3"
# Defaults of entries that older plans lack.
LATER = {"guidance_interval": list(Guidance.interval), "guidance_channels": Guidance.channels}


def read_plan(path: Path, settings: dict) -> list[Kind]:
    """Return the strides of a plan. settings: model, image_size, num_sampling_steps,
    guidance and the weights' digest. Raises UsageError if there is no plan, if it is
    damaged, or if it was made for other settings.
    """
    where = f"`forecast_plan={path}`"
    remedy = "make one with scripts/calibrate.py, or use `forecast=off`"
    try:
        plan = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{where}: no such file; {remedy}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{where}: cannot be read ({reason}); {remedy}") from None
    if plan.get("kind") != KIND:
        raise UsageError(f"{where}: is not a {KIND}; {remedy}")
    plan = LATER | plan
    for key, value in settings.items():
        if plan.get(key) != value:
            what = (
                "other weights"
                if key == "weights"
                else f"`{key}={shown(plan.get(key))}`, not {shown(value)}"
            )
            raise UsageError(f"{where}: was made for {what}; {remedy}")
    strides = plan.get("strides")
    if not isinstance(strides, list) or not all(map(_is_stride, strides)):
        raise UsageError(
            f"{where}: strides must be pairs [steps, evaluations], [1, 1] or up to two "
            f"evaluations; {remedy}"
        )
    steps = settings["num_sampling_steps"]
    if strides[:1] != [[1, 1]] or sum(made for made, _ in strides) != steps:
        raise UsageError(f"{where}: must begin with [1, 1] and make {steps} steps; {remedy}")
    return [tuple(stride) for stride in strides]


def _is_stride(item):
    if not (
        isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)
    ):
        return False
    steps, evaluations = item
    return item == [1, 1] or 1 <= evaluations <= 2 and evaluations < steps


def write_plan(path: Path, settings: dict, strides: list[Kind], evidence: dict) -> None:
    """Write a plan whole or not at all. evidence: JSON of the quality that was measured."""
    plan = {
        "kind": KIND,
        **settings,
        "evaluations": sum(count for _, count in strides),
        "strides": strides,
    }
    with atomic_write(path, "w") as file:
        file.write(json.dumps({**plan, "evidence": evidence}) + "\n")
