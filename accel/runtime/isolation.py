"""Calls into the library from a caller's own program: one thread at a time, and the process's
settings of torch are as they were afterwards.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from accel.runtime.precision import preserve_switches

# Backend switches, default dtype and the capture of a CUDA graph belong to the process.
_LOCK = threading.RLock()


@contextmanager
def exclusive() -> Iterator[None]:
    """Run the block in one thread of the process at a time, without the caller's
    autocast, inference mode, gradients, default dtype and default device. Restore the
    backend switches after it.
    """
    with (
        _LOCK,
        preserve_switches(),
        torch.inference_mode(False),
        torch.no_grad(),
        ExitStack() as stack,
    ):
        for device_type in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield
