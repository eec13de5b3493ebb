"""Traces of the networks: they have the networks' values, and leave the tables of later callers."""

import pytest
import torch
from conftest import fill
from networks import CLASSES, error
from torch._subclasses.fake_tensor import FakeTensorMode

from accel import accelerate
from accel.families.jit.network import JiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.rae.network import DiTwDDTHead

SMALL = dict(hidden_size=72, depth=1, num_heads=2)
ARGUMENTS = {
    DiT_Llama: dict(dim=72, n_layers=1, n_heads=2, patch_size=1),
    DiTwDDTHead: dict(hidden_size=(72, 96), depth=(1, 1), num_heads=(2, 2)),
    JiT: dict(**SMALL, patch_size=1, bottleneck_dim=8, in_context_len=4, in_context_start=1)
    | dict(depth=2),
}


def export(model, inputs):
    return torch.export.export(model, inputs).module()


def run_fake(model, inputs):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(*inputs)
    return accelerate(model, "fp32")


@pytest.mark.parametrize("kind", CLASSES)
# Other tests' sides have tables by now.
@pytest.mark.parametrize("trace, side", ((export, 7), (run_fake, 11)))
@torch.no_grad()
def test_a_trace_leaves_tables_with_values(kind, trace, side):
    def make():
        given = ARGUMENTS.get(kind, dict(**SMALL, patch_size=1))
        return fill(kind(input_size=side, in_channels=4, num_classes=8, **given)).eval()

    def inputs():
        return torch.randn(2, 4, side, side), torch.tensor([0.3, 0.7]), torch.tensor([1, 8])

    model = make()
    given = inputs()
    traced = trace(model, given)
    want = model(*given)
    assert type(want) is torch.Tensor and want.std() > 0.01
    assert error(traced(*given), want.double()) < 1e-5
    with FakeTensorMode():  # nor does it find their tables
        assert make()(*inputs()).shape == want.shape
