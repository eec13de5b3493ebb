"""Recognise the files of a SiT, and derive its sizes. The entries are a DiT's, so what lies beside them decides."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.families import sit
from accel.families.dit.weights import KEYS, LABELS, converted, latent_size, of_dit, sizes_of
from accel.families.loaded_module import OfModule
from accel.families.recognise import NAMED
from accel.families.sit.network import SiT, SiT_models
from accel.weights.shapes import Shapes

__all__ = ["KEYS", "LABELS", "MODELS", "claim", "converted", "latent_size", "of_module", "sizes"]
MODELS = SiT_models  # name → constructor
COMPUTED = {"path_type": ("Linear", "linear"), "prediction": ("velocity", "v")}  # of the arguments of a training run


def claim(shapes: Shapes, metadata: dict[str, Any]) -> tuple[int, str] | None:
    """Return the claim of a training run that names a path between noise and data."""
    return (NAMED, f"path_type {metadata['path_type']}") if "path_type" in metadata else None


def sizes(shapes: Shapes, metadata: dict[str, Any]) -> tuple[str, Callable[..., torch.nn.Module], int]:
    """Return (name, constructor, heads) of the model with weights of these shapes, as families/recognise.py asks."""
    require_computable(metadata)
    return sizes_of(shapes, metadata.get("num_heads"), SiT, sit.FAMILY.name, SiT_models)


def require_computable(metadata: dict[str, Any]) -> None:
    """Raise ValueError for a flow on another path, or with another prediction, than is sampled here."""
    for name, known in COMPUTED.items():
        if metadata.get(name, known[0]) not in known:
            raise ValueError(f"was trained with {name} {metadata[name]}, and only {known[0]} is sampled")


def of_module(module: nn.Module, state: dict[str, torch.Tensor]) -> OfModule | None:
    """Return how a module is read if it is a SiT, and None otherwise: by its class, since its entries are a DiT's."""
    return of_dit(sit.FAMILY, module, state, strength=NAMED) if is_sit(module) else None


def is_sit(module: nn.Module) -> bool:
    """Whether the module's class, or one that it derives from, is called SiT."""
    return any(kind.__name__ == "SiT" for kind in type(module).__mro__)
