"""The guide, the second network of autoguidance: its weights, family and sizes. Where its file
does not say them, they are those of the network that it guides.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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
    """Let errors about a file of weights name the parameter `guide`."""
    try:
        yield
    except UsageError as error:
        text = error.marked.replace("`ckpt", "`guide")
        # that option is of the guided network
        converter = "give --num-heads to scripts/convert_checkpoint.py"
        raise UsageError(text.replace("give `num_heads`", converter)) from None


def open_guide(weights: Weights, guided: str, fit: Fit) -> Guide:
    """Return the guide with these weights, of a file or of a module.

    guided, fit: name, and family and sizes, of the guided network's weights. Raises UsageError
    for a guide of another family, or of other classes, latents or steps.
    """
    with about_guide():
        of_guide = _fit_of_guide(weights, guided, fit)
        if of_guide.schedule is not None:
            solvers.require_schedule(f"`ckpt={weights.name}`", of_guide.schedule)
    return Guide(weights, of_guide)


def _fit_of_guide(weights: Weights, guided: str, fit: Fit) -> Fit:
    """Return family and sizes of a guide's weights. Arguments and errors are open_guide's."""
    is_file = isinstance(weights, Checkpoint)
    guide = _recognised(weights, fit) if is_file else weights.fit  # type: ignore
    compared = {
        "a family": (guide.family.name, fit.family.name),
        "num_classes": (guide.num_classes, fit.num_classes),
        "channels of latents": (guide.in_channels, fit.in_channels),
        "channels of its output": (guide.out_channels, fit.out_channels),
        "a side of trained latents": (guide.latent_size, fit.latent_size),
    }
    for what, (its, wanted) in compared.items():
        if None not in (its, wanted) and its != wanted:
            raise UsageError(
                f"`guide={weights.name}`: has {what} {its}, and {guided} {wanted}; a guide has the "
                "family, classes and latents of the network that it guides"
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
    classes = None
    rows = shapes[recogniser_of(family).labels][0]
    if "num_classes" not in metadata and rows in (fit.num_classes, fit.num_classes + 1):
        classes = fit.num_classes
    if classes == rows:
        log.warning(
            f"{shown(name, 300)}: has a label table of {rows} rows, taken for {rows} classes and "
            "no null class, as the network that it guides has so many classes"
        )
    metadata = {**metadata, "family": family.name}
    return recognise(name, weights.state, metadata, None, classes, shipped)
