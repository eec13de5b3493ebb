"""Where the time of sampling goes: profile warm steps, by kind of work, against what this machine can do.

    python scripts/profile.py --output output/fast.json               # the fast path; DiT-XL/2 with random weights unless --ckpt
    python scripts/profile.py --baseline --output output/upstream.json
    python scripts/profile.py --compare output/upstream.json output/fast.json
    python scripts/profile.py --model DiT-Demo/2 --device cpu          # anywhere

Beside the figures lies a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. The work is in scripts/profiling.py.
"""

if not __package__:
    __import__("_as_module")

if __name__ == "__main__":
    from scripts.profiling import main

    main()
