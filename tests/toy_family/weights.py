"""Which files and modules hold a Toy."""

from accel.families.spec import FamilyWeights, ModelSpec, common_fields

from . import FAMILY
from .network import Toy

LABELS = "labels.weight"


def identify(shapes, facts):
    """Return the spec of weights of these shapes."""
    width = shapes[LABELS][1]
    return ModelSpec(
        FAMILY,
        "Toy/2",
        Toy,
        arguments={"width": width},
        num_heads=Toy.num_heads,
        in_channels=Toy.in_channels,
        learn_sigma=False,
        **common_fields(shapes, facts, Toy.patch_size, LABELS),
    )


WEIGHTS = FamilyWeights({"Toy/2": Toy}, identify, labels=LABELS)
