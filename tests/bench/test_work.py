"""Operations and bytes, counted another way."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from accel.families.dit.network import DiT_models
from bench import work


def test_work_is_that_of_the_modules():
    """GEMMs and attention counted by torch's own counter on the real network."""
    with torch.device("meta"):
        model = DiT_models["DiT-Demo/2"]()
        x, t, y = torch.empty(6, 4, 16, 16), torch.zeros(6), torch.zeros(6, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(x, t, y)
    counts = {str(name): value for name, value in counter.get_flop_counts()["Global"].items()}
    shape = work.Shape.of(model, 6)
    conditioning = 2 * 6 * (256 * 216 + 216 * 216 + 6 * 6 * 216 * 216 + 2 * 216 * 216)
    attention = sum(value for name, value in counts.items() if "attention" in name or "bmm" in name)
    assert attention == work.attention_flops(shape)
    assert sum(counts.values()) - attention == work.gemm_flops(shape) + conditioning
