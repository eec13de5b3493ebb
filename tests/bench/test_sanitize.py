"""What the sanitizers look at: every kernel runs, launched and captured."""

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [[], ["--captured"]])
def test_every_kernel_runs(run, mode):
    done = run("bench/sanitize.py", *mode, "--batch-rows", 1, 2, "--side", 16)
    assert done.returncode == 0, done.stderr
