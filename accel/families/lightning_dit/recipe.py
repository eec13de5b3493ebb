"""Read how a LightningDiT's training run samples, from the configuration in its
checkpoint or a YAML file beside it.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accel.errors import UsageError, shown
from accel.families.config_file import read_yaml
from accel.families.lightning_dit import FAMILY
from accel.families.recognise import Recipe
from accel.weights.checkpoint import FILE_SUFFIXES

log = logging.getLogger(__name__)

# (section, entry, value if it is missing, supported value)
COMPUTED = (
    ("transport", "path_type", "Linear", "Linear"),
    ("transport", "prediction", "velocity", "velocity"),
    ("sample", "mode", "ODE", "ODE"),
    ("sample", "reverse", False, False),
)
# What the training code takes where the configuration says nothing.
USUAL_METHOD = "euler"
USUAL_MULTIPLIER = 0.18215
# Published files come without a configuration. This file's values differ from the
# family's.
PUBLISHED = {"lightningdit-xl-imagenet256-64ep": dict(cfg_scale=10.0, guidance_interval=(0.0, 0.9))}


def recipe(model: str, metadata: Mapping[str, Any], path: Path) -> Recipe:
    """Return the options that a checkpoint's configuration implies; none without configuration.

    model: the name of the weights' model. metadata: entries of the checkpoint. path: its
    file. Raises UsageError for a configuration that is damaged, of another model, or with
    an unsupported sampler.
    """
    where = f"`ckpt={path}`: its configuration"
    content = metadata.get("config")
    if content is None:
        file = _beside(path)
        if file is None:
            return Recipe(PUBLISHED.get(path.stem.lower(), {}))
        where = f"`ckpt={path}`: {file.name} beside it"
        content = _read(file, path)
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name), dict) for name in ("model", "sample")
    ):
        return Recipe({})  # another program's configuration
    named = content["model"].get("model_type")
    if isinstance(named, str) and {named, model} <= FAMILY.models.keys() and named != model:
        raise UsageError(f"{where} describes {named}, and the weights are {model}; move it")
    for section, name, usual, computed in COMPUTED:
        if not isinstance(content.get(section), dict):
            continue
        value = content[section].get(name, usual)
        if value != computed:
            raise UsageError(
                f"{where} says {name} {_plain(value)}, and only {computed} is computed here; move "
                "it"
            )
    values = _values(where, content["sample"]) | _latents(where, content.get("data"))
    low, high = values["guidance_interval"]
    steps = values.get("num_sampling_steps", "the usual")
    words = [f"guidance at levels {low:g} to {high:g}"]
    words.append(f"timestep shift {values['timestep_shift']:g}, {steps} steps")
    if "cfg_scale" in values:
        words.insert(0, f"cfg scale {values['cfg_scale']:g}")
    if "sampler" in values:
        words.append(f"sampler {values['sampler']}")
    if "latent_scale" in values:
        words.append(f"latents times {values['latent_scale']:g}")
    notice = f"{where.partition(': ')[2]} says {', '.join(words)}; flags override it"
    return Recipe(values, (notice,))


def _values(where: str, sample: dict) -> dict[str, Any]:
    """Return options by name from the section `sample`. Its times run from 0 at noise to
    1 at data; a noise level is 1 − time.
    """

    number = partial(_number, where, sample)
    options = {
        "guidance_interval": (0.0, 1.0 - number("cfg_interval_start", 0, 0.999, 0)),
        "timestep_shift": float(number("timestep_shift", 0, 100, 0)) or 1.0,
    }
    if "cfg_scale" in sample:
        options["cfg_scale"] = float(number("cfg_scale", 0, 10**6, 1))
    method = sample.get("sampling_method", USUAL_METHOD)
    if method != USUAL_METHOD:
        options["sampler"] = _plain(method)  # refused, unless the user names another
    if "num_sampling_steps" in sample:  # a number of points: one more than steps
        options["num_sampling_steps"] = int(number("num_sampling_steps", 2, 1001, 250)) - 1
    return options


def _latents(where: str, data: Any) -> dict[str, Any]:
    """Return how the section `data` scales latents, {} if as VA-VAE's: normalised by their
    statistics. Others are multiplied alone.
    """
    if not isinstance(data, dict):
        return {}
    scale = float(_number(where, data, "latent_multiplier", 1e-6, 1e6, USUAL_MULTIPLIER))
    normed = data.get("latent_norm", False) is True
    if normed and scale == 1:
        return {}
    return {"latent_scale": scale, "latent_norm": normed}


def _number(where, section, name, low, high, usual):
    """Return a number of a section of the configuration."""
    value = section.get(name, usual)
    if not (type(value) in (int, float) and low <= value <= high):
        raise UsageError(
            f"{where} says {name} {_plain(value)}, which must be from {low} to {high}; mend it"
        )
    return value


def _plain(value):
    """Return a value as text; of lists and mappings, which in YAML can be huge, the type alone."""
    return (
        shown(str(value))
        if isinstance(value, (str, int, float, bool))
        else f"of type {type(value).__name__}"
    )


def _beside(path: Path) -> Path | None:
    """Return the YAML file of a checkpoint: the file with its name, else the only one in
    its folder that has no other checkpoint's name, else None.
    """
    same_name = path.with_suffix(".yaml")
    if same_name.is_file():
        return same_name
    others = []
    for file in sorted(path.parent.glob("*.yaml")):
        if not any(file.with_suffix(suffix).is_file() for suffix in FILE_SUFFIXES):
            others.append(file)
    if len(others) > 1:
        log.warning(
            f"{path.parent} has {len(others)} YAML files and none is called {same_name.name}: they "
            "are not read"
        )
    return others[0] if len(others) == 1 else None


def _read(file: Path, path: Path) -> Any:
    try:
        return read_yaml(file)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"`ckpt={path}`: {file.name} beside it cannot be read ({error}); mend it"
        ) from None
