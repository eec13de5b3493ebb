"""Packings that leave a tensor unread."""

import pytest
import torch
from networks import SMALL, pack_of, small

from accel import fast
from accel.fast.ops import DirectOps

WIDTH = SMALL["hidden_size"]


def test_a_packing_reads_every_tensor():
    model = small()
    ops = DirectOps(torch.float32, torch.device("cpu"))
    extra = {f"blocks.{i}.norm1.weight": torch.ones(WIDTH) for i in range(5)}
    with pytest.raises(ValueError, match=r"not use 5 of .* as blocks\.0\.norm1\.weight; use"):
        fast.assemble({**model.state_dict(), **extra}, model, pack_of(model), ops)
