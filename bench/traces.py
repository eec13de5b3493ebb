"""Traces of torch.profiler: the work of the device and the calls of the CPU, read from a file."""

import gzip
import json
import re
from pathlib import Path
from typing import NamedTuple

STEPS = 3  # that a trace records
# A kind of work and the functions that do it. Attention comes first: its kernels are named after
# GEMMs too.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa|softmax|mha_fwd",
    "GEMM": r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_linear|xmma|wgmma|conv(?!ert)|winograd"
    r"|::(add)?mm$|::bmm$",
    "element-wise": "",  # norms, gates, residuals, copies, the sampler
}
ON_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"
ON_HOST = "cuda_runtime", "cuda_driver"


class Event(NamedTuple):
    """A kernel or an operator."""

    start: float  # ms
    ms: float  # without the operators that it calls
    name: str
    kind: str


class Trace(NamedTuple):
    """Three steps. work: of a GPU, else torch's operators. host: calls of CUDA."""

    work: list[Event]
    host: list[Event]


def read(path: Path) -> Trace:
    """Return the events of a trace, in order of time."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    of = {cat: [event for event in events if event["cat"] in cat] for cat in (ON_DEVICE, ON_HOST)}
    work = of[ON_DEVICE] or exclusive([event for event in events if event["cat"] == "cpu_op"])
    return Trace(*([event_of(event) for event in part] for part in (work, of[ON_HOST])))


def event_of(event: dict) -> Event:
    """Return an event of a trace file, with its kind of work by its name."""
    name = event["name"]
    kind = next(kind for kind, names in KINDS.items() if re.search(names, name, re.I))
    return Event(event["ts"] / 1e3, event["dur"] / 1e3, name, kind)


def exclusive(events: list[dict]) -> list[dict]:
    """Return operators in order of time without the time of the operators that they call."""
    found = [dict(event) for event in events]
    calling = {}  # thread → operators that have not ended
    for event, own in zip(events, found):
        stack = calling.setdefault(event["tid"], [])
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            stack[-1][1]["dur"] -= event["dur"]
        stack.append((event["ts"] + event["dur"], own))
    return found


def summary(trace: Trace) -> dict:
    """Return ms and calls per step of every kind of work, and of the ten longest functions."""
    kinds = {}
    functions = {}
    for event in trace.work:
        kinds.setdefault(event.kind, []).append(event)
        functions.setdefault(event.name, []).append(event)

    def row(events):
        return dict(ms=sum(event.ms for event in events) / STEPS, calls=len(events) / STEPS)

    rows = [
        dict(name=name, kind=events[0].kind) | row(events) for name, events in functions.items()
    ]
    return dict(
        kinds={kind: row(events) for kind, events in kinds.items()},
        functions=sorted(rows, key=lambda each: -each["ms"])[:10],
    )
