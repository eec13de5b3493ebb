"""The table of modulation vectors that a sampling run computes ahead."""

import pytest
import torch
from networks import error, fast_network, small

from accel.fast import network as module
from accel.fast.conditioning import ConditioningTable


@pytest.fixture
def fast():
    return fast_network(small(), torch.float64)


def test_what_is_not_in_the_table_is_nan_never_a_picture(fast):
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    y = torch.tensor([1, 8])
    # times may be fractions, and the same twice
    run = fast.prepare([900.5, 500, 500], [1, 8])
    assert fast.forward(x, torch.tensor([0, 2]), y, run).isfinite().all()
    for index, labels in (([0, 3], [1, 8]), ([0, 1], [1, 2]), ([4095, -1], [1, 8])):
        out = fast.forward(x, torch.tensor(index), torch.tensor(labels), run)
        assert out[-1].isnan().all()
    # known outside
    assert fast.forward(x, torch.tensor([3, 4]), torch.tensor([1, 2])).isfinite().all()
    run = fast.prepare([500], [2])  # forgets the labels of the run before
    out = fast.forward(x, torch.tensor([0, 0]), torch.tensor([2, 8]), run)
    assert out[-1].isnan().all()


def test_more_labels_than_a_table_usually_holds(fast, monkeypatch):
    """A large batch of an FID job. The bits of what fits the usual size do not depend on whether a
    larger batch came before.
    """
    small_table = lambda c, **how: ConditioningTable(c, 5 * c.bias.numel() * 8, **how)
    monkeypatch.setattr(module, "ConditioningTable", small_table)
    x = torch.randn(9, 4, 8, 8, dtype=torch.float64)
    y = torch.arange(9)
    found = []
    for n, at_once in ((2, 1), (9, 1), (9, 2), (2, 1)):
        run = fast.prepare([900, 500, 20], range(n), at_once)
        for index in range(3):
            run.advance(*range(index, min(3, index + at_once)))
            found.append(fast.forward(x[:n], torch.full((n,), index), y[:n], run))
        assert error(found[-1], fast.forward(x[:n], torch.full((n,), 20), y[:n])) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[-3:]))
