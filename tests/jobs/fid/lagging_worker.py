"""sample_ddp.py on a rank whose node shows files as they were before the job was begun,
as a network file system may.

Opening a file by its name asks the server.
"""

import os
import sys
from pathlib import Path
from tempfile import mkdtemp

EMPTY = mkdtemp()
exists = Path.exists
scandir = os.scandir


def hidden(path):
    return "lagging" in os.fspath(path) and Path(path).suffix in (".png", ".jsonl", ".npz")


if os.environ["RANK"] == os.environ["LAGGING"]:
    Path.exists = lambda path, **how: not hidden(path) and exists(path, **how)
    os.scandir = lambda path=".": scandir(EMPTY if "lagging" in os.fspath(path) else path)

import sample_ddp  # noqa: E402

sys.argv[0] = sample_ddp.__file__
sample_ddp.main()
