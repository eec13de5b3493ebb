"""Identify weights of a SiT, and derive its sizes. The entries are a DiT's, so facts and names
decide.
"""

from functools import partial

from torch import nn

from accel.families import sit
from accel.families.dit.weights import NETWORK, TRAINING, identify, of_entries
from accel.families.sit.network import SiT, SiT_models
from accel.families.spec import NAMED, FamilyWeights, ModuleRules, StateDict

# Arguments of create_transport, and all.
TRANSPORT: dict[str, tuple | str | None] = {
    "path_type": ("Linear",),
    "prediction": ("velocity",),
    **dict.fromkeys(("loss_weight", "train_eps", "sample_eps")),
}
ARGUMENTS = {
    **NETWORK,
    **TRAINING,
    **TRANSPORT,
    **dict.fromkeys(("sample_every", "cfg_scale", "wandb", "ckpt")),
}
DIRECTION = (
    "does not say which way its time runs, taken for a SiT's, from noise to data; if it runs from "
    "data to noise: give the module an attribute path_type"
)


def of_module(module: nn.Module, state: StateDict) -> ModuleRules | None:
    """Return the rules to read a SiT, recognised by its class: its entries are a DiT's. None for
    another module.
    """
    if not is_sit(module):
        return None
    # The original keeps this argument, and classes that reverse time lack it.
    assumed = "" if hasattr(module, "learn_sigma") else DIRECTION
    return of_entries(sit.FAMILY, module, state, strength=NAMED, assumed=assumed)


def is_sit(module: nn.Module) -> bool:
    """Return whether the name of the module's class or of a base class has SiT in it."""
    return any("SiT" in base.__name__ for base in type(module).__mro__)


WEIGHTS = FamilyWeights(
    models=SiT_models,
    identify=partial(identify, sit.FAMILY, SiT, SiT_models),
    of_module=of_module,
    arguments=ARGUMENTS,
)
