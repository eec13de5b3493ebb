"""The CUDA driver, asked before torch is imported: the number of GPUs, and a context."""

import os
from contextlib import suppress


def count_gpus() -> int:
    """Return the driver's count of visible GPUs: it takes a tenth of a second, torch's takes
    seconds.
    """
    with suppress(ImportError, RuntimeError):  # a torch without CUDA, a machine without a driver
        from cuda.bindings import driver

        if driver.cuInit(0)[0] == 0:
            return int(driver.cuDeviceGetCount()[1])
    return 0


def make_context(number: str) -> None:
    """Make the context of GPU `number`, "" for this process's own, before torch asks for it.
    torch meets the same failures and reports them better.
    """
    with suppress(Exception):
        visible = count_gpus()
        from cuda.bindings import driver

        number = number or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        device = driver.cuDeviceGet(int(number) % visible)[1]
        driver.cuDevicePrimaryCtxRetain(device)
