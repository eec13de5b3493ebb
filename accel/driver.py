"""The CUDA driver before torch is imported: the number of GPUs, and a context that is made
while torch is imported.
"""

import gc
import os
import sys
import threading
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


def import_torch(device: str | None) -> None:
    """Import torch while the driver makes the context of this process's GPU.

    device: as the user gave it. The garbage collector is off during the import, and the
    objects are frozen: they live until exit.
    """
    if "torch" in sys.modules:  # in a notebook, whose own garbage must not be frozen
        return
    device_type, _, number = (device or "cuda").partition(":")
    if device_type == "cuda":
        threading.Thread(target=_make_context, args=(number,), daemon=True).start()
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()


def _make_context(number):
    """Make the context of GPU `number`, "" for this process's own, before torch asks for it.
    torch meets the same failures and reports them better.
    """
    with suppress(Exception):
        visible = count_gpus()
        from cuda.bindings import driver

        number = number or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        device = driver.cuDeviceGet(int(number) % visible)[1]
        driver.cuDevicePrimaryCtxRetain(device)
