"""`python scripts/verify.py` runs as `python -m scripts.verify` does: with the root on
the path, not the folder.
"""

import runpy
import sys
from pathlib import Path

_file = Path(sys.argv[0]).resolve()
sys.path[0] = str(_file.parents[1])
__import__("accel.launch").launch.begin()
runpy.run_module(f"{_file.parent.name}.{_file.stem}", run_name="__main__", alter_sys=True)
sys.exit()
