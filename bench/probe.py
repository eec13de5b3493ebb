"""sample_ddp.py, noting when things happened: what bench/jobs.py launches. Seconds since $START go to $NOTES/RANK."""

if not __package__:
    __import__("_as_module")

import json
import os
import time
from pathlib import Path

import torch

import sample_ddp
from accel import engine

notes = dict(runs=[])
denoise, start = engine.denoise, float(os.environ["START"])


def now() -> float:
    """Seconds since the job was launched, the GPU's queue drained."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time() - start


def noted(*args, progress=None, **how):
    """engine.denoise, its beginning and end noted, and once the end of its first step."""

    def step():
        if "first step" not in notes:
            notes["first step"] = now()
        if progress is not None:
            progress()

    begin = now()
    latents = denoise(*args, progress=step, **how)
    notes["runs"].append((begin, now()))
    return latents


if __name__ == "__main__":
    engine.denoise = noted
    try:
        sample_ddp.main()
    finally:
        Path(os.environ["NOTES"], os.environ.get("RANK", "0")).write_text(json.dumps(notes))
