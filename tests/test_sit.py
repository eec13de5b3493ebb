"""SiT's keys and shapes. Its equations: fast/test_fast.py; guidance and training:
test_families.py.
"""

import torch

from accel.families.dit.network import DiT_models
from accel.families.sit import network as sit
from accel.families.sit.network import SiT, SiT_models


def test_configurations_have_dits_keys_and_shapes():
    assert [name.replace("SiT", "DiT") for name in SiT_models] == list(DiT_models)
    for name, build in SiT_models.items():
        assert getattr(sit, name.replace("-", "_").replace("/", "_")) is build
        how = {} if name != "SiT-Demo/2" else dict(learn_sigma=False)
        with torch.device("meta"):
            model = build(depth=2)
            of_dit = DiT_models[name.replace("SiT", "DiT")](depth=2, **how)
        want = {key: value.shape for key, value in of_dit.state_dict().items()}
        assert {key: value.shape for key, value in model.state_dict().items()} == want
        assert (
            type(model) is SiT
            and model.num_heads == of_dit.num_heads
            and model.learn_sigma == (not how)
        )
