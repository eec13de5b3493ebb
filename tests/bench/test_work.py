"""Operations and bytes, counted another way."""

import pytest
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


def shape(batch_rows):
    return work.Shape(width=1152, depth=28, heads=16, patch=2, channels=4, tokens=1024, batch_rows=batch_rows)


def test_what_the_strategies_send():
    """Bytes summed by what one rank gives to the others, call by call."""
    plans = {plan["what"]: plan for plan in work.strategies(shape(2), 4, 2, {1: 4.0}, [])}
    token = 1152 * 2
    mine = 2 * 1024 // 4  # tokens of two batch rows that a rank keeps
    assert plans["kv"]["bytes"] == 28 * mine * 2 * token * 3 and plans["kv"]["message"] == mine * 2 * token
    assert plans["ulysses"]["bytes"] == 28 * mine * (3 + 1) * token * 3 // 4 and plans["ulysses"]["calls"] == 56
    assert plans["tensor"]["bytes"] == 28 * 2 * 2 * (2 * 1024 * token) * 3 // 4
    # Two ranks hold a guidance half each: one batch row of output goes to the other.
    assert plans["rows"]["bytes"] == 8 * 64 * 64 * 4 and plans["rows"]["compute"] == 2.0 and plans["rows"]["ideal"]
    assert plans["kv"]["compute"] == 1.0 and plans["kv"]["link"] is plans["kv"]["speedup"] is None  # no link measured
    assert plans["kv"]["break_even"] == pytest.approx(plans["kv"]["bytes"] / 3e-3 / 1e9)
    eight = {plan["what"]: plan for plan in work.strategies(shape(16), 4, 2, {2: 9.0, 8: 32.0}, [])}
    assert eight["rows"]["calls"] == eight["rows"]["bytes"] == eight["rows"]["link"] == 0
    assert eight["rows"]["compute"] == 9.0 and eight["rows"]["speedup"] == 32 / 9 and not eight["rows"]["ideal"]


def test_the_links_time_is_on_straight_lines():
    link = [dict(collective="all-gather", ranks=4, bytes=1 << 20, us=20.0)]
    assert work.collective_us(link, "all-gather", 4, 1 << 20) is None
    link += [dict(collective="all-gather", ranks=4, bytes=1 << 22, us=50.0)]
    for size, us in ((16, 20.0), ((1 << 20) + 3 * (1 << 19), 35.0), (1 << 24, 170.0)):  # the last line continues
        assert work.collective_us(link, "all-gather", 4, size) == pytest.approx(us)
    assert work.collective_us(link, "all-reduce", 4, 1 << 20) is work.collective_us(link, "all-gather", 2, 16) is None
