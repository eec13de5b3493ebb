"""Recognise the files of a SiT, and derive its sizes. The entries are a DiT's, so
metadata and names decide.
"""

from typing import Any

from torch import Tensor, nn

from accel.families import sit
from accel.families.dit.weights import KEYS, LABELS, converted, of_dit, sizes_of
from accel.families.loaded_module import OfModule
from accel.families.recognise import NAMED, Sizes
from accel.families.sit.network import SiT, SiT_models
from accel.weights.shapes import Shapes

__all__ = ["KEYS", "LABELS", "MODELS", "claim", "converted", "of_module", "sizes"]
MODELS = SiT_models  # name → constructor
# supported values of arguments
COMPUTED = {"path_type": ("Linear", "linear"), "prediction": ("velocity", "v")}


def claim(shapes: Shapes, metadata: dict[str, Any]) -> tuple[int, str] | None:
    """Return a claim if the training run's arguments name a path between noise and data,
    else None.
    """
    return (NAMED, f"path_type {metadata['path_type']}") if "path_type" in metadata else None


def sizes(shapes: Shapes, metadata: dict[str, Any]) -> Sizes:
    """Return (name, constructor, heads) of the model with weights of these shapes, as
    families/recognise.py asks.
    """
    require_computable(metadata)
    return sizes_of(shapes, metadata.get("num_heads"), SiT, sit.FAMILY.name, SiT_models)


def require_computable(metadata: dict[str, Any]) -> None:
    """Raise ValueError for a flow with an unsupported path or prediction."""
    for name, known in COMPUTED.items():
        if metadata.get(name, known[0]) not in known:
            raise ValueError(
                f"was trained with {name} {metadata[name]}, and only {known[0]} is sampled"
            )


def of_module(module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
    """Return the rules to read a SiT, recognised by its class: its entries are a DiT's.
    None for another module.
    """
    return of_dit(sit.FAMILY, module, state, strength=NAMED) if is_sit(module) else None


def is_sit(module: nn.Module) -> bool:
    """Return whether the name of the module's class or of a base class has SiT in it."""
    return any("SiT" in kind.__name__ for kind in type(module).__mro__)
