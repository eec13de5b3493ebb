"""What the sanitizers look at: every kernel runs, launched and captured."""

import pytest
from forks import succeeds


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [[], ["--captured"]])
def test_every_kernel_runs(run, mode):
    succeeds(run("bench/sanitize.py", *mode, "--batch-rows", 1, 2, "--side", 16))
