"""The tiers: which hardware has them, and the switches they set. The decoder's arithmetic: test_half.py."""

import torch

from accel import precision

GPU = torch.device("cuda")


def test_no_tf32_but_where_it_is_asked_for(monkeypatch, switches):
    monkeypatch.setattr(precision, "capability", lambda device: (9, 0))
    for tier, gemms, convolutions in (
        ("fp32", False, False),
        ("exact", False, False),
        ("tf32", True, True),
        ("fp16", False, True),
        ("bf16", False, True),
    ):
        precision.apply_precision(tier, GPU)
        assert switches() == (gemms, convolutions), tier
    precision.apply_precision("tf32", GPU)
    with precision.true_float32():
        assert switches() == (False, True)
    assert switches() == (True, True)
