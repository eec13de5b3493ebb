"""Calls of the CUDA driver before torch is imported: count GPUs, create a context."""

import os
from contextlib import suppress


def count_gpus() -> int:
    """Count the visible GPUs in 0.1 s; importing torch for this takes seconds."""
    with suppress(ImportError, RuntimeError):  # no cuda.bindings, or no driver
        from cuda.bindings import driver

        if driver.cuInit(0)[0] == 0:
            return int(driver.cuDeviceGetCount()[1])
    return 0


def make_context(number: str) -> None:
    """Create the context of GPU `number`, or of this rank's GPU for "". Errors are ignored, since
    torch reports them later.
    """
    with suppress(Exception):
        visible = count_gpus()
        from cuda.bindings import driver

        number = number or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        device = driver.cuDeviceGet(int(number) % visible)[1]
        driver.cuDevicePrimaryCtxRetain(device)
