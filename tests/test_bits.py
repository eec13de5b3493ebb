"""A failed bit-equality says the largest difference and where."""

import forks
import numpy as np
import pytest
import torch
from bits import describe
from conftest import ROOT


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_what_is_said(kind):
    a, b = kind([[1.0, 2.0], [3.0, 4.0]]), kind([[1.0, 2.5], [3.0, 8.0]])
    assert describe(a, b) == "2 of 4 values differ, most by 4 at (1, 1): 4 against 8"
    assert describe(a, a[0]) == "shapes (2, 2) and (2,)"
    assert "1 of 2 values differ, most by inf at (1,)" in describe(a[0], kind([1.0, float("nan")]))
    assert "most by 1 at (0,)" in describe(kind([True]), kind([False]))


def test_a_failing_test_says_it(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import torch\n\ndef test_it():\n    x = torch.zeros(2, 3)\n    y = x.clone()\n    y[1, 2] = 0.5\n"
        "    assert all(torch.equal(*pair) for pair in [(x, x), (x, y)])\n"
    )
    done = forks.run(["-m", "pytest", "-q", "-p", "bits", "test_it.py"], tmp_path, PYTHONPATH=str(ROOT / "tests"))
    assert done.returncode == 1 and "1 of 6 values differ, most by 0.5 at (1, 2): 0 against 0.5" in done.stdout
