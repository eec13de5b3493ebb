"""The tiers: which hardware has them, and the switches they set. The decoder's arithmetic: test_half.py."""

import pytest
import torch

from accel import precision

GPU = torch.device("cuda")


@pytest.fixture
def switches():
    """(GEMMs, convolutions) that may take TF32; put back afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


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


def test_refusals_name_the_flag_and_the_remedy(monkeypatch):
    monkeypatch.setattr(precision, "capability", lambda device: (7, 0))
    with pytest.raises(ValueError, match="precision=bf16: cuda has no bfloat16 .*; choose fp32"):
        precision.apply_precision("bf16", GPU)
    with pytest.raises(ValueError, match="precision=int8: choose from fp32, exact"):
        precision.apply_precision("int8", GPU)
