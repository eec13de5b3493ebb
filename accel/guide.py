"""The guide, the second network of autoguidance: its weights, family and sizes. Where its file
does not say them, they are those of the network that it guides.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from accel.config import Config
from accel.errors import UsageError, shown
from accel.families.recognise import (
    Fit,
    choose_family,
    families_with,
    recognise,
    recogniser_of,
    shipped_as,
)
from accel.sampling import solvers
from accel.weights import Weights
from accel.weights.checkpoint import Checkpoint
from accel.weights.shapes import shapes_of

log = logging.getLogger(__name__)

CONVERTER = "scripts/convert_checkpoint.py"
# What errors and notices about a file of weights say → what is true of a guide's: most options
# change the guided network alone.
OF_GUIDE = {
    "`ckpt": "`guide",
    "give `num_heads`": f"give --model and --num-heads to {CONVERTER}",
    "give `num_classes`": "save it again",
    "give `model`": f"give --model to {CONVERTER}",
    "give `weights_entry`": f"give --weights-entry to {CONVERTER}",
    ": --num-heads N": f": give --model NAME and --num-heads N to {CONVERTER}",
    ": --weights-entry NAME": f": give --weights-entry NAME to {CONVERTER}",
    "accel.Sampler(module)": "accel.Sampler(…, guide=module)",
}
# The modules whose notices name such options.
NOTICES = "accel.families.recognise", "accel.weights.training_layout"


class Guide(NamedTuple):
    """The second network of autoguidance."""

    weights: Weights
    fit: Fit  # family and sizes of the weights

    def digest(self) -> str:
        """Return 16 hex digits, as Fit does."""
        with about_guide():
            return self.fit.digest(self.weights)


@contextmanager
def about_guide() -> Iterator[None]:
    """Let errors and notices about a file of weights name the parameter `guide`, and remedies
    that change the guide.
    """
    loggers = [logging.getLogger(name) for name in NOTICES]
    for logger in loggers:
        logger.addFilter(_reworded)
    try:
        yield
    except UsageError as error:
        raise UsageError(_of_guide(error.marked)) from None
    finally:
        for logger in loggers:
            logger.removeFilter(_reworded)


def _of_guide(text: str) -> str:
    for of_network, of_guide in OF_GUIDE.items():
        text = text.replace(of_network, of_guide)
    return text


def _reworded(record: logging.LogRecord) -> bool:
    """Reword a notice, as a filter of logging."""
    record.msg = _of_guide(record.msg)
    return True


def open_guide(weights: Weights, guided: Weights, fit: Fit, config: Config) -> Guide:
    """Return the guide with these weights, of a file or of a module.

    guided, fit: the guided network's weights, and their family and sizes. config: the user's
    options. Raises UsageError for a guide of another family, or of other classes, latents,
    noise or steps.
    """
    with about_guide():
        of_guide = _fit_of_guide(weights, guided.name, fit, config)
        if of_guide.schedule is not None:
            solvers.require_schedule(f"`ckpt={weights.name}`", of_guide.schedule)
    if config.config is not None:
        from accel.families.config_file import require_network  # few runs have one

        require_network(config.config, "guide", weights.name, of_guide)
    _require_noise(weights.name, of_guide, guided.name, fit, config)
    _say_assumed_divisor(weights.name, of_guide, fit, config)
    if (
        isinstance(weights, Checkpoint)
        and isinstance(guided, Checkpoint)
        and guided.entry is None
        and os.path.samefile(weights.path, guided.path)
    ):
        log.warning(
            f"{shown(weights.name, 300)}: is the file of the network that it guides; both "
            "estimates are equal, so guidance changes nothing"
        )
    return Guide(weights, of_guide)


def _require_noise(name: str, guide: Fit, guided: str, fit: Fit, config: Config) -> None:
    """Raise UsageError for a guide that was trained with noise of another scale, unless the user
    gives one scale for both. Print the scale that is assumed.
    """
    if fit.family.prediction != "data" or config.noise_scale is not None:
        return
    scale = guide.recipe.get("noise_scale")
    of_guided = fit.recipe.get("noise_scale", fit.defaults.noise_scale)
    if scale is None:
        log.warning(
            f"{shown(name, 300)}: says no scale of the first noise, taken for {of_guided:g}, as "
            "the network that it guides has"
        )
    elif scale != of_guided:
        raise UsageError(
            f"`guide={name}`: was trained with noise_scale {scale:g}, and {guided} with "
            f"{of_guided:g}; give another guide, or `noise_scale` for both"
        )


def _say_assumed_divisor(name: str, guide: Fit, fit: Fit, config: Config) -> None:
    """Print which t_eps divides the guide's estimates, if it was trained with another one."""
    trained = guide.recipe.get("t_eps")
    used = config.t_eps or fit.recipe.get("t_eps", fit.defaults.t_eps)
    if trained not in (None, used):
        log.warning(
            f"{shown(name, 300)}: was trained with t_eps {trained:g}; {used:g} is used for both "
            "networks; for another: --t-eps N"
        )


def _fit_of_guide(weights: Weights, guided: str, fit: Fit, config: Config) -> Fit:
    """Return family and sizes of a guide's weights. Arguments and errors are open_guide's."""
    is_file = isinstance(weights, Checkpoint)
    guide = _recognised(weights, fit) if is_file else weights.fit  # type: ignore
    size = fit.recipe.get("image_size", fit.image_size)
    if config.image_size is not None and not fit.family.any_size:
        size = config.image_size
    compared = {
        "the family": (guide.family.name, fit.family.name),
        "num_classes": (guide.num_classes, fit.num_classes),
        "channels of latents": (guide.in_channels, fit.in_channels),
        "channels of its output": (guide.out_channels, fit.out_channels),
        "a side of trained latents": (guide.latent_size, fit.latent_size),
        "image_size": (guide.recipe.get("image_size", guide.image_size), size),
        # Without a configuration latents are those of the family's decoder.
        "latent_scale": (guide.recipe.get("latent_scale", 1), fit.recipe.get("latent_scale", 1)),
        "latent_norm": (guide.recipe.get("latent_norm", True), fit.recipe.get("latent_norm", True)),
    }
    for fact, (value, of_guided) in compared.items():
        if None not in (value, of_guided) and value != of_guided:
            raise UsageError(
                f"`guide={weights.name}`: has {fact} {value}, and {guided} {of_guided}; a guide "
                "has the family, classes and latents of the network that it guides"
            )
    return guide


def _recognised(weights: Checkpoint, fit: Fit) -> Fit:
    """Return what a file says, and print what follows from the guided network's `fit`."""
    name = weights.name
    metadata = weights.metadata
    shapes = shapes_of(weights.state)
    shipped = shipped_as(name)
    family, assumed = choose_family(name, shapes, metadata, None, shipped)
    if assumed and fit.family in families_with(shapes):
        family = fit.family
        log.warning(
            f"{shown(name, 300)}: names no family, taken for a {family.name}, as the network that "
            "it guides"
        )
    recogniser = recogniser_of(family)
    classes = None
    rows = shapes[recogniser.labels][0]
    if "num_classes" not in metadata and rows in (fit.num_classes, fit.num_classes + 1):
        classes = fit.num_classes
        if rows == classes:
            log.warning(
                f"{shown(name, 300)}: has a label table of {rows} rows, taken for {rows} classes "
                "and no null class, as the network that it guides has so many classes"
            )
    metadata = {**metadata, "family": family.name}
    # Its notices are not printed: its steps and guidance are not used.
    return recognise(name, weights.state, metadata, None, classes, shipped, weights.path)
