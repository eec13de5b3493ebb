"""Read how a LightningDiT's training run samples, from the configuration in its checkpoint."""

from pathlib import Path
from typing import Any

from accel.errors import UsageError, shown
from accel.families.lightning_dit import FAMILY

# (section, entry, value if it is missing, supported value)
COMPUTED = (
    ("transport", "path_type", "Linear", "Linear"),
    ("transport", "prediction", "velocity", "velocity"),
    ("sample", "mode", "ODE", "ODE"),
    ("sample", "sampling_method", "euler", "euler"),
    ("sample", "reverse", False, False),
    ("data", "latent_multiplier", 0.18215, 1.0),
)
# Published files come without a configuration. This file's values differ from the family's.
PUBLISHED = {"lightningdit-xl-imagenet256-64ep": dict(cfg_scale=10.0, guidance_interval=(0.0, 0.9))}


def recipe(model: str, metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of options that a checkpoint's configuration implies, and print them; {} without configuration.

    model: the name of the weights' model. metadata: entries of the checkpoint. path: its file. Raises UsageError for a
    configuration that is damaged, of another model, or with an unsupported sampler.
    """
    content = metadata.get("config")
    if content is None:
        return PUBLISHED.get(path.stem.lower(), {})
    where = f"`ckpt={path}`: its configuration"
    if not isinstance(content, dict) or not all(isinstance(content.get(one), dict) for one in ("model", "sample")):
        return {}  # another program's configuration
    named = content["model"].get("model_type")
    if isinstance(named, str) and {named, model} <= FAMILY.models.keys() and named != model:
        raise UsageError(f"{where} describes {named}, and the weights are {model}; save it again")
    for section, name, usual, computed in COMPUTED:
        if isinstance(content.get(section), dict) and (value := content[section].get(name, usual)) != computed:
            raise UsageError(f"{where} says {name} {shown(value)}, and only {computed} is computed here")
    found = _values(where, content["sample"])
    low, high = found["guidance_interval"]
    words = f"cfg scale {found['cfg_scale']:g}, " * ("cfg_scale" in found) + f"guidance at levels {low:g} to {high:g}, "
    words += f"timestep shift {found['timestep_shift']:g}, {found.get('num_sampling_steps', 'the usual')} steps"
    print(f"{where.partition(': ')[2]} says {words}; flags override it")
    return found


def _values(where: str, sample: dict) -> dict[str, Any]:
    """Return options by name from the section `sample`. Its times run from 0 at noise to 1 at data; a noise level is
    1 − time."""

    def number(name, low, high, usual):
        value = sample.get(name, usual)
        if not (type(value) in (int, float) and low <= value <= high):
            raise UsageError(f"{where} says {name} {shown(value)}, which must be from {low} to {high}; save it again")
        return value

    found = {
        "guidance_interval": (0.0, 1.0 - number("cfg_interval_start", 0, 0.999, 0)),
        "timestep_shift": float(number("timestep_shift", 0, 100, 0)) or 1.0,
    }
    if "cfg_scale" in sample:
        found["cfg_scale"] = float(number("cfg_scale", 1, 10**6, 1))
    if "num_sampling_steps" in sample:  # a number of points: one more than steps
        found["num_sampling_steps"] = int(number("num_sampling_steps", 2, 1001, 250)) - 1
    return found
