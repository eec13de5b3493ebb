"""Published weights: their names, and upstream's functions to download and read them."""

import logging
import sys
from pathlib import Path

import torch

from accel.checkpoints import loading
from accel.checkpoints.loading import WeightFiles, pretrained_models
from accel.errors import InputRef, UsageError
from accel.families import Family
from accel.families.identify import choose_family, families_with
from accel.tensors.shapes import shapes_of

log = logging.getLogger(__name__)


def find_model(name_or_path: str | Path) -> dict[str, torch.Tensor]:
    """Load a state dict under the reference network's names, as upstream's `find_model`. If no
    family matches, return it unchanged. name_or_path: as for --ckpt. Raises UsageError.
    """
    weights = WeightFiles(InputRef(str(name_or_path)))
    shapes = shapes_of(weights.state)
    if not families_with(shapes):
        return weights.state
    family, *_ = choose_family(weights.given, shapes, weights.contents.facts)
    return family.weights.convert(weights.state)


def download_model(name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of published weights, as upstream's `download_model`. Download them on
    first use. Raises UsageError for an unknown name.
    """
    if name not in pretrained_models:
        raise InputRef(name).error(
            f"not published; the names are {', '.join(sorted(pretrained_models))}"
        )
    return find_model(name)


def fetch_published() -> None:
    """Download all missing published weights, and print the paths (`python download.py`)."""
    for name in sorted(pretrained_models):
        try:
            log.info(str(WeightFiles(InputRef(str(loading.FOLDER / name))).fetch()))
        except UsageError as error:
            sys.exit(f"download.py: {error.by_flags()}")


def published_name(family: Family, model: str, image_size: int, num_classes: int) -> str:
    """Return the name of a model's published weights. Raises UsageError if there are none."""
    implied = family.models[model]
    if image_size in implied.published and num_classes == implied.num_classes:
        return implied.published[image_size]
    if family.fetch:
        raise UsageError(
            f"{model} needs a file",
            f"the family's are fetched by: {family.fetch}",
            parameter="ckpt",
        )
    raise UsageError(
        f"no published weights for {model} at {image_size} px with {num_classes} classes; the "
        f"names are {', '.join(sorted(pretrained_models))}",
        "give a file or a folder",
        parameter="ckpt",
    )
