"""Where the time of sampling goes: profile warm steps, by kind of work, against what this machine can do.

    python scripts/profile.py --output output/fast.json               # the fast path; DiT-XL/2 with random weights unless --ckpt
    python scripts/profile.py --baseline --output output/upstream.json
    python scripts/profile.py --compare output/upstream.json output/fast.json
    python scripts/profile.py --model DiT-Demo/2 --device cpu          # anywhere

Beside the figures lies a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. The work is in scripts/profiling.py.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "profile":
    # Not this script is wanted, but the standard library's module of that name: cProfile imports it, torch's compiler imports cProfile, and
    # for every script beside this one this folder is the first place where Python looks.
    spec = importlib.util.spec_from_file_location("profile", Path(sysconfig.get_path("stdlib"), "profile.py"))
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["profile"])

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from scripts.profiling import main
    main()
