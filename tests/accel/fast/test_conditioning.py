"""The table of modulation vectors that a sampling run computes ahead."""

from types import SimpleNamespace

import pytest
import torch
from networks import error, small

from accel.fast import dit
from accel.fast.conditioning import ConditioningTable
from accel.fast.dit import FastDiT
from diffusion import create_diffusion


@pytest.fixture
def fast():
    return FastDiT(small().state_dict(), 2, torch.float64, torch.device("cpu"))


def entry_bytes(network):
    """Of one pair of timestep and label."""
    return network.conditioning.bias.numel() * 8


@pytest.mark.parametrize("entries", (3, 7, 5000))
def test_chunks_give_what_every_evaluation_gives(fast, entries):
    """One step in the table, two, or all ten; and over two runs with other labels through the same table."""
    table = fast.table = ConditioningTable(fast.conditioning, entries * entry_bytes(fast))
    timesteps = create_diffusion("10").timestep_map[::-1]
    for labels in ([1, 4, 8], [7, 2, 2]):
        y = torch.tensor(labels)
        x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
        direct = [fast.forward(x, torch.full((3,), timestep), y) for timestep in timesteps]
        with fast.sampling_run(timesteps, labels) as advance:
            assert fast.table is table and table.chunk == entries // len(set(labels))
            for index, timestep in enumerate(timesteps):
                advance(index)
                assert error(fast.forward(x, torch.full((3,), timestep), y), direct[index]) < 1e-12


def test_what_is_not_in_the_table_is_nan_never_a_picture(fast):
    x, y = torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.tensor([1, 8])
    with fast.sampling_run([900, 500], [1, 8]):
        assert fast.forward(x, torch.tensor([900, 500]), y).isfinite().all()
        for t, labels in (([900, 499], [1, 8]), ([900, 500], [1, 2]), ([5000, -3], [1, 8])):
            out = fast.forward(x, torch.tensor(t), torch.tensor(labels))
            assert out[-1].isnan().all()
    assert fast.forward(x, torch.tensor([3, 4]), torch.tensor([1, 2])).isfinite().all()  # known outside


def test_more_labels_than_a_table_usually_holds(fast, monkeypatch):
    """A large batch of an FID job. What was captured on the old table is dropped. What fits the usual size is computed
    in the same chunks whether or not a larger batch came before: the bits do not depend on what came before."""
    monkeypatch.setattr(dit, "ConditioningTable", lambda c, **how: ConditioningTable(c, 5 * c.bias.numel() * 8, **how))
    fast._replayed["a step"] = step = SimpleNamespace(graphs={})
    x, y = torch.randn(9, 4, 8, 8, dtype=torch.float64), torch.arange(9)
    found = []
    for n, at_once, chunk in ((2, 1, 2), (9, 1, 1), (9, 2, 2), (2, 1, 2)):
        step.graphs["shapes"] = "a graph"
        grows = fast.table is None or fast.table.capacity < n * at_once
        with fast.sampling_run([900, 500, 20], range(n), at_once) as advance:
            assert fast.table.chunk == chunk and bool(step.graphs) != grows
            for index, t in enumerate((900, 500, 20)):
                advance(*range(index, min(3, index + at_once)))
                found.append(fast.forward(x[:n], torch.full((n,), t), y[:n]))
        assert error(found[-1], fast.forward(x[:n], torch.full((n,), 20), y[:n])) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[-3:]))


def test_memory_is_bounded(fast):
    table = ConditioningTable(fast.conditioning, 10 * entry_bytes(fast))
    assert table.table.numel() * 8 <= 11 * entry_bytes(fast)
    with pytest.raises(ValueError, match="11 labels do not fit in a table of 10 entries"):
        table.begin([5], range(11))
    with pytest.raises(ValueError, match="timestep 1000: the table is for 1000 steps"):
        table.begin([1000], [1])
