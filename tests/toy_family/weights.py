"""Which files and modules hold a Toy."""

from accel.families.spec import FamilyWeights, ModelSpec, ModuleRules

from . import FAMILY
from .network import Toy

LABELS = "labels.weight"


def identify(shapes, facts):
    """Return the spec of weights of these shapes."""
    width = shapes[LABELS][1]
    return ModelSpec(FAMILY, "Toy/2", Toy, arguments={"width": width}, num_heads=Toy.num_heads)


def of_module(module, state):
    """Return how a module is read if it is a Toy."""
    return ModuleRules(FAMILY, {}, module.input_size) if FAMILY.keys[0] in state else None


WEIGHTS = FamilyWeights({"Toy/2": Toy}, identify, of_module, labels=LABELS)
