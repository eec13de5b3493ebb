"""A failed comparison of bits says how far apart they are: the largest difference, and where.

A pytest plugin (conftest.py loads it): torch.equal and numpy.array_equal are as before, but a failing test's report
ends with the last pair that they found unequal.
"""

import numpy as np
import pytest
import torch

_unequal = []


def describe(a, b) -> str:
    """Two arrays that are not equal: shapes that differ, else the largest difference, where, and how many differ."""
    a, b = (np.asarray(one.detach().cpu().double() if isinstance(one, torch.Tensor) else one) for one in (a, b))
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    if not all(np.issubdtype(one.dtype, np.number) or one.dtype == bool for one in (a, b)):
        return f"dtypes {a.dtype} and {b.dtype}"
    a, b = a.astype(float), b.astype(float)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b))
    apart[np.isnan(apart)] = np.inf  # no number, or infinite on one side only
    place = tuple(map(int, np.unravel_index(np.argmax(apart), apart.shape)))
    count = f"{np.count_nonzero(apart)} of {apart.size} values differ"
    return f"{count}, most by {apart[place]:.6g} at {place}: {a[place]:.9g} against {b[place]:.9g}"


def _remembering(equal):
    def remember(a, b, *args, **more):
        same = equal(a, b, *args, **more)
        if not same:
            _unequal[:] = [describe(a, b)]
        return same

    return remember


@pytest.fixture(autouse=True)
def unequal_bits_are_described(monkeypatch):
    _unequal.clear()
    monkeypatch.setattr(torch, "equal", _remembering(torch.equal))
    monkeypatch.setattr(np, "array_equal", _remembering(np.array_equal))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" and report.failed and _unequal:
        report.sections.append(("last unequal bits", _unequal[-1]))
