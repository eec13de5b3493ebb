"""Calls into the library from a caller's own program: one thread at a time, and the process's
settings of torch are as they were afterwards.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from accel.precision import switches_kept

# Backend switches, default dtype and the capture of a CUDA graph belong to the process.
_ALONE = threading.RLock()
_changes: list[ExitStack] = []  # of the process, by the thread that holds the lock


@contextmanager
def alone() -> Iterator[None]:
    """Run the block in one thread of the process at a time, without the caller's
    autocast, inference mode, gradients, default dtype and default device. Restore the
    backend switches after it.
    """
    with (
        _ALONE,
        _process_kept(),
        torch.inference_mode(False),
        torch.no_grad(),
        ExitStack() as stack,
    ):
        for device_type in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps")):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def _process_kept():
    """Restore the switches and the default dtype after the block."""
    with ExitStack() as changes:
        changes.enter_context(switches_kept())
        changes.callback(torch.set_default_dtype, torch.get_default_dtype())
        _changes.append(changes)
        try:
            yield
        finally:
            _changes.pop()


def _after_fork():
    """In a child process, free the lock of a thread that was not forked, and undo its
    changes.
    """
    if _ALONE.acquire(blocking=False):  # free, or this thread's
        _ALONE.release()
        return
    _ALONE._at_fork_reinit()  # as the standard library frees its own
    while _changes:
        _changes.pop().close()


os.register_at_fork(after_in_child=_after_fork)
