"""The beginning of `python scripts/NAME.py`: modules are those of the repository's folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from accel import launch

launch.begin()
import numpy  # noqa: F401 (torch's C++ imports it first otherwise, and drops a signal's SystemExit)
