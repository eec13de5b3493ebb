"""DiT in diffusers' layout: a DiTTransformer2DModel or a DiTPipeline, saved by
save_pretrained.
"""

import os
from pathlib import Path
from typing import Any

import torch

from accel.checkpoints import Contents
from accel.errors import InputRef, UsageError, shown
from accel.tensors.diffusers_names import (
    COMPUTED,
    DEFAULT_SIDE,
    SCHEDULE,
    check_config,
    from_diffusers,
    with_table,
)
from accel.tensors.tensor_files import floats_of, read_json, read_tensors, weight_files

CLASSES = COMPUTED["_class_name"]


def matches(folder: Path) -> bool:
    """Return whether `folder` has config.json, or a pipeline's transformer/."""
    return not {"config.json", "transformer"}.isdisjoint(os.listdir(folder))


def read(folder: Path, given: InputRef, entry: str | None = None) -> Contents:
    """Return the state dict of models.DiT, and facts from the configuration. The files contain no
    position table, so compute it for `sample_size`. Raises UsageError.
    """
    if entry is not None:
        raise UsageError(
            "is for a file; this is a folder", "drop it", parameter="weights_entry", value=entry
        )
    folder = folder / "transformer" if (folder / "transformer").is_dir() else folder
    config = read_json(folder / "config.json", given.option)
    name = config.get("_class_name", CLASSES[0])
    if name not in CLASSES:
        raise InputRef(str(folder / "config.json"), given.option).error(
            f"is of a {shown(name)}, and in this layout only a {CLASSES[0]} is read",
            "give the checkpoint of the model's own repository",
        )
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(folder, given.option):
        state |= read_tensors(file, given.option)
    try:
        state = from_diffusers(floats_of(state, given))
        facts = check_config(config, state)
        state = with_table(state, config.get("sample_size", DEFAULT_SIDE))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise InputRef(str(folder / "config.json"), given.option).error(str(error)) from None
    if folder.name == "transformer":
        facts |= _of_pipeline(folder.parent, given.option)
    return Contents(state, facts)


def has_vae(folder: Path, parameter: str) -> bool:
    """Return whether the index of a pipeline lists a decoder."""
    index = folder / "model_index.json"
    return index.exists() and read_json(index, parameter).get("vae") not in (None, [None, None])


def _of_pipeline(folder: Path, parameter: str) -> dict[str, Any]:
    """Return the decoder, the schedule and the names of the classes that a DiTPipeline's
    folder contains.
    """
    facts: dict[str, Any] = {}
    if (folder / "vae" / "config.json").is_file():
        facts["vae"] = str(folder / "vae")
    if (folder / SCHEDULE).is_file():
        facts["schedule"] = read_json(folder / SCHEDULE, parameter)
    index = folder / "model_index.json"
    names = read_json(index, parameter).get("id2label") if index.exists() else None
    if not isinstance(names, dict):
        return facts
    numbers = range(len(names))
    if {str(number) for number in numbers} != names.keys() or not all(
        isinstance(name, str) for name in names.values()
    ):
        raise UsageError(
            f"id2label must name classes 0 to {len(names) - 1}",
            "fix it, or remove it",
            parameter=parameter,
            value=index,
        )
    return facts | {"class_names": [names[str(number)] for number in numbers]}
