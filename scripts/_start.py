"""Start of `python scripts/NAME.py`: import modules from the repository's folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from accel import launch

launch.begin()
