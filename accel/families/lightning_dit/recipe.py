"""Read how a LightningDiT's training run samples, from the configuration in its
checkpoint or a YAML file beside it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.errors import UsageError
from accel.families.config_file import Reader, in_words, plain, read_yaml
from accel.families.lightning_dit import FAMILY
from accel.families.recognise import Recipe
from accel.weights.checkpoint import FILE_SUFFIXES

log = logging.getLogger(__name__)

# Entry → its computed value, which the training code takes where the entry is missing.
COMPUTED = {
    "transport.path_type": "Linear",
    "transport.prediction": "velocity",
    "sample.mode": "ODE",
    "sample.reverse": False,
}
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
    name = "its configuration"
    content = metadata.get("config")
    if content is None:
        file = _beside(path)
        if file is None:
            return Recipe(PUBLISHED.get(path.stem.lower(), {}))
        name = f"{file.name} beside it"
        try:
            content = read_yaml(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"`ckpt={path}`: {name} cannot be read ({error}); mend it") from None
    sections = content if isinstance(content, dict) else {}
    if not all(isinstance(sections.get(section), dict) for section in ("model", "sample")):
        return Recipe({})  # another program's configuration
    entries = Reader(sections, f"`ckpt={path}`: {name}")
    named = entries.get("model.model_type")
    if named != model and named in [*FAMILY.models] and model in FAMILY.models:
        raise UsageError(f"{entries.where} describes {named}, and the weights are {model}; move it")
    for entry, computed in COMPUTED.items():
        reason = entries.otherwise(entry, computed, computed)
        if reason:
            raise UsageError(f"{entries.where} {reason} here; move it")
    options = _options(entries)
    return Recipe(options, (f"{name} says {in_words(options)}; flags override it",))


def _options(entries: Reader) -> dict[str, Any]:
    """Return options by name. The file's times run from 0 at noise to 1 at data; a noise
    level is 1 − time.
    """
    start = entries.number("sample.cfg_interval_start", 0, 0, 0.999)
    options = {
        "guidance_interval": (0.0, 1.0 - start),
        "timestep_shift": entries.number("sample.timestep_shift", 0, 0, 100) or 1.0,
    }
    if "cfg_scale" in entries.section("sample"):
        options["cfg_scale"] = entries.number("sample.cfg_scale", 1, 0, 10**6)
    if "num_sampling_steps" in entries.section("sample"):
        # A number of points: one more than steps.
        points = entries.number("sample.num_sampling_steps", 250, 2, 1001, int)
        options["num_sampling_steps"] = points - 1
    method = entries.get("sample.sampling_method", USUAL_METHOD)
    if method != USUAL_METHOD:
        options["sampler"] = plain(method)  # refused, unless the user names another
    # Latents are as VA-VAE's, normalised by their statistics, or multiplied alone.
    scale = entries.number("data.latent_multiplier", USUAL_MULTIPLIER, 1e-6, 1e6)
    normed = entries.get("data.latent_norm", False) is True
    if entries.get("data") is not None and not (normed and scale == 1):
        options |= {"latent_scale": scale, "latent_norm": normed}
    return options


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
