"""Family and sizes of a guide's weights: those of the network that it guides, where the file does
not say them.
"""

import logging

from accel.errors import UsageError, shown
from accel.families.recognise import Fit, choose_family, families_with, recognise, recogniser_of
from accel.weights import Weights
from accel.weights.checkpoint import Checkpoint
from accel.weights.shapes import shapes_of

log = logging.getLogger(__name__)


def fit_of_guide(weights: Weights, guided: str, fit: Fit, shipped_as: str | None) -> Fit:
    """Return family and sizes of a guide's weights, of a file or of a module.

    guided, fit: name, and family and sizes, of the guided network's weights. shipped_as: as for
    `recognise`. Raises UsageError for a guide of another family, or of other classes or latents.
    """
    if isinstance(weights, Checkpoint):
        guide = _recognised(weights, fit, shipped_as)
    else:
        guide = weights.fit  # type: ignore[attr-defined]  # of a module
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


def _recognised(weights: Checkpoint, fit: Fit, shipped_as: str | None) -> Fit:
    """Return what a file says, and print what follows from the guided network's `fit`."""
    name = weights.name
    metadata = weights.metadata
    shapes = shapes_of(weights.state)
    family, assumed = choose_family(name, shapes, metadata, None, shipped_as)
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
    return recognise(name, weights.state, metadata, None, classes, shipped_as)
