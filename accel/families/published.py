"""Published weights: their names, and upstream's functions that read and fetch weights by name."""

from pathlib import Path

import torch

from accel.errors import UsageError
from accel.families import Family
from accel.families.recognise import choose_family, families_with, recogniser_of
from accel.weights.checkpoint import open_checkpoint, pretrained_models
from accel.weights.shapes import shapes_of


def find_model(name_or_path: str | Path) -> dict[str, torch.Tensor]:
    """Return a state dict under the names of its family's reference network, as
    upstream's function of this name does; weights of no family are returned unchanged.
    name_or_path: as for open_checkpoint. Raises UsageError.
    """
    checkpoint = open_checkpoint(name_or_path)
    state = checkpoint.state
    shapes = shapes_of(checkpoint.state)
    if not families_with(shapes):
        return state
    family, _ = choose_family(checkpoint.name, shapes, checkpoint.metadata, None, None)
    return recogniser_of(family).converted(state, checkpoint.metadata)


def download_model(name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of published weights, as upstream's function of this name
    does. Download them on first use. Raises UsageError for another name.
    """
    if name not in pretrained_models:
        raise UsageError(
            f"`ckpt={name}`: not published; the names are {', '.join(sorted(pretrained_models))}"
        )
    return find_model(name)


def published_name(family: Family, model: str, image_size: int, num_classes: int) -> str:
    """Return the name of a model's published weights for a size in pixels. Raises
    UsageError if there are none.
    """
    implied = family.models[model]
    if image_size in implied.published and num_classes == implied.num_classes:
        return implied.published[image_size]
    if family.fetch:
        raise UsageError(
            f"`ckpt`: {model} needs a file; the family's are fetched by: {family.fetch}"
        )
    there = [
        (name, sorted(defaults.published))
        for name, defaults in family.models.items()
        if defaults.published
    ]
    listed = "".join(
        f" (there are {name} at {' and '.join(map(str, sizes))})" for name, sizes in there
    )
    raise UsageError(
        f"`ckpt`: no published weights for {model} at {image_size} px with {num_classes} "
        f"classes{listed}; give a file or a folder"
    )
