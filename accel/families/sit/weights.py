"""Identify a SiT from its weights, which have a DiT's tensor names."""

from functools import partial

from accel.families import sit
from accel.families.dit.weights import NETWORK, TRAINING, identify
from accel.families.sit.network import SiT, SiT_models
from accel.families.spec import FamilyWeights

# Arguments of create_transport.
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


WEIGHTS = FamilyWeights(
    models=SiT_models,
    identify=partial(identify, sit.FAMILY, SiT, SiT_models),
    arguments=ARGUMENTS,
)
