"""Which files and modules hold a Toy."""

from accel.families.spec import FamilyWeights, ModelSpec

from . import FAMILY
from .network import Toy

LABELS = "labels.weight"


def identify(shapes, facts):
    """Return the spec of weights of these shapes."""
    width = shapes[LABELS][1]
    return ModelSpec(FAMILY, "Toy/2", Toy, arguments={"width": width}, num_heads=Toy.num_heads)


WEIGHTS = FamilyWeights({"Toy/2": Toy}, identify, labels=LABELS)
