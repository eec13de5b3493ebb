"""Read how a LightningDiT's training run samples, from the configuration in its checkpoint or a
YAML file beside it.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from accel.errors import Given
from accel.families.configuration import Entries, plain
from accel.families.lightning_dit import FAMILY
from accel.families.spec import ModelSpec, Says

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


def says(given: Given, spec: ModelSpec, facts: Mapping[str, Any]) -> Says:
    """Return what a configuration says of sampling; nothing without one, or of another program's.

    facts: `config`, of the checkpoint, or `beside`, of a YAML file, and its name. Raises UsageError
    for a configuration that is damaged, of another model, or with an unsupported sampler.
    """
    name = "its configuration"
    file = ""
    content = facts.get("config")
    if content is None and "beside" in facts:
        file, content = facts["beside"]
        name = f"{file} beside it"
    elif content is None:
        return Says(PUBLISHED.get(PurePath(given.name).stem.lower(), {}))
    sections = content if isinstance(content, dict) else {}
    if not all(isinstance(sections.get(section), dict) for section in ("model", "sample")):
        return Says()
    entries = Entries(sections, given, name)
    named = entries.get("model.model_type")
    if named != spec.model and named in [*FAMILY.models] and spec.model in FAMILY.models:
        raise given.error(f"{name} describes {named}, and the weights are {spec.model}", "move it")
    for entry, computed in COMPUTED.items():
        reason = entries.unsupported(entry, computed, computed)
        if reason:
            raise given.error(f"{name} {reason} here", "move it")
    return Says(_options(entries), _latent_settings(entries), file=file)


def _options(entries: Entries) -> dict[str, Any]:
    """Return values of options. The file's times run from 0 at noise to 1 at data; a noise level
    is 1 − time.
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
    return options


def _latent_settings(entries: Entries) -> dict[str, Any]:
    """Return the scale of latents, and whether they are normalised; nothing for VA-VAE's, which are
    normalised by their statistics. Others are multiplied alone.
    """
    scale = entries.number("data.latent_multiplier", USUAL_MULTIPLIER, 1e-6, 1e6)
    normed = entries.get("data.latent_norm", False) is True
    if entries.get("data") is None or normed and scale == 1:
        return {}
    return {"latent_scale": scale, "latent_norm": normed}
