"""Start of `python scripts/NAME.py`: import modules from the repository's folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from accel import launch

launch.begin()
import numpy  # noqa: F401 (before torch's C++ does, which drops a signal's SystemExit)
