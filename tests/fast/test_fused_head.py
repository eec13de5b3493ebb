"""RAE's head whose GEMMs modulate the residual stream and add to it, as on Hopper."""

import networks
import pytest
import test_large_dit
import test_rae
import torch
from networks import error, network_of
from test_rae import build, inputs, velocity

from accel import fast
from accel.families.rae.fast import FusedHead
from accel.fast import ops
from accel.fast.ops import DirectOps


@pytest.fixture
def fused(monkeypatch):
    """Use the fused head on every device; on a CPU its reference computes it."""
    monkeypatch.setattr(DirectOps, "updates_stream", True)


@pytest.mark.parametrize("qk_norm", (False, True))
def test_the_fused_head_computes_the_definition(qk_norm, fused):
    model = build(use_qknorm=qk_norm)
    network = network_of(model, "fp16")
    assert isinstance(network.head_stage, FusedHead)
    assert error(network.forward(*inputs()), velocity(model, *inputs())) < 2e-3


@pytest.mark.parametrize("tier, tolerance", (("fp16", 2e-3), ("bf16", 2e-2)))
def test_large_outer_layers_are_half_gemms(tier, tolerance, fused, monkeypatch):
    """All but the first embedding, as where they have hundreds of channels."""
    monkeypatch.setattr(ops, "splits", lambda weight: True)
    model = build()
    network = network_of(model, tier)
    assert error(network.forward(*inputs()), velocity(model, *inputs())) < tolerance
    for call in fast.warmup_calls(network, 2):
        call()


@pytest.mark.parametrize("family", (test_rae, test_large_dit))
def test_tokens_on_two_ranks(family, fused):
    """A rank has a part of a row's tokens, and gets all keys and values from an exchange."""
    model = family.build()
    network = network_of(model, "fp16")
    x, t, y = inputs() if family is test_rae else networks.inputs(model, 4)
    packed = []

    def attend(qkv, num_heads):
        packed.append(qkv)
        return qkv[..., : qkv.shape[-1] // 3].contiguous()

    condition = network.condition(t, y)
    whole = network.forward_blocks(network.embed(x), condition, attend)
    first = packed[:]
    packed.clear()
    parts = [
        network.forward_blocks(network.embed(x, part), condition, attend, part)
        for part in (slice(0, 6), slice(6, 16))
    ]
    assert error(torch.cat(parts, 1), whole.double()) < 1e-3
    halves = len(packed) // 2
    for both, early, late in zip(first, packed[:halves], packed[halves:]):
        assert error(torch.cat([early, late], 1), both.double()) < 2e-3
