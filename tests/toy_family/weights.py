"""Which files and modules hold a Toy."""

from functools import partial

from accel.families.recognise import Fit, OfModule, Recogniser

from . import FAMILY
from .network import Toy


class ToyRecogniser(Recogniser):
    family = FAMILY
    models = {"Toy/2": Toy}
    labels = "labels.weight"

    def form(self, shapes, metadata):
        """The model with weights of these shapes."""
        return Fit(FAMILY, "Toy/2", partial(Toy, width=shapes[self.labels][1]), Toy.num_heads)

    def of_module(self, module, state):
        """How a module is read if it is a Toy."""
        return OfModule(FAMILY, {}, module.input_size) if self.family.keys[0] in state else None


RECOGNISER = ToyRecogniser()
