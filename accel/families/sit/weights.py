"""Recognise the files of a SiT, and derive its sizes. The entries are a DiT's, so metadata
and names decide.
"""

from torch import Tensor, nn

from accel.families import sit
from accel.families.dit.weights import DiTRecogniser
from accel.families.recognise import NAMED, OfModule
from accel.families.sit.network import SiT, SiT_models

DIRECTION = (
    "does not say which way its time runs, taken for a SiT's, from noise to data; if it runs from "
    "data to noise: give the module an attribute path_type"
)


class SiTRecogniser(DiTRecogniser):
    """Recognise SiT's weights."""

    family = sit.FAMILY
    models = SiT_models
    network = SiT

    def of_module(self, module: nn.Module, state: dict[str, Tensor]) -> OfModule | None:
        """Return the rules to read a SiT, recognised by its class: its entries are a DiT's.
        None for another module.
        """
        if not is_sit(module):
            return None
        # The original keeps this argument, and classes that reverse time lack it.
        assumed = "" if hasattr(module, "learn_sigma") else DIRECTION
        return self.of_entries(module, state, strength=NAMED, assumed=assumed)


RECOGNISER = SiTRecogniser()


def is_sit(module: nn.Module) -> bool:
    """Return whether the name of the module's class or of a base class has SiT in it."""
    return any("SiT" in base.__name__ for base in type(module).__mro__)
