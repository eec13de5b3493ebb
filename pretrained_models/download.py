"""The root's download.py in the place where the contest's fork has it. Run as a command,
it fetches the published weights.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("download", run_name="__main__")
else:
    from download import download_model, find_model, pretrained_models

    __all__ = ["download_model", "find_model", "pretrained_models"]
