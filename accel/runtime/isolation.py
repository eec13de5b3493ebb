"""Isolates library calls from the caller's threads and global torch settings."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from accel.runtime.precision import preserve_switches

# Backend switches, default dtype and CUDA graph capture are process-wide.
_LOCK = threading.RLock()


@contextmanager
def exclusive() -> Iterator[None]:
    """Run the with-block in one thread at a time, with default torch settings.

    Autocast, inference mode, gradients, default dtype and default device of the caller have no
    effect in the block. The backend switches are restored after it.
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
