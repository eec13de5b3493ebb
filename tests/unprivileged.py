"""This process with fewer rights or less room. Tests run as root in CI, and root may read
everything.
"""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run the block with the rights of any other user."""
    if os.geteuid():
        yield
        return
    gc.collect()  # what removes a folder of its own when it is collected needs the right to
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def limited(kind: str, most: int) -> Iterator[None]:
    """Run the block with a limit of this process: bytes of a file (`FSIZE`), which stops
    a write in its middle as a full disk does, or bytes of memory (`AS`).
    """
    number = getattr(resource, f"RLIMIT_{kind}")
    usual = resource.getrlimit(number)
    resource.setrlimit(number, (most, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(number, usual)
