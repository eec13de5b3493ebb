"""Programs for users. `python -m scripts.X` begins here, `python scripts/X.py` in _as_module.py."""

import sys

if sys.argv[0] == "-m":  # while Python looks for the module that it was asked to run
    __import__("accel.launch").launch.begin()
