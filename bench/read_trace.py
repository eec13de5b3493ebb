"""Reading a torch.profiler trace: where the GPU's time goes, by kind of work, and where the host waits for it.

A trace is read as torch.profiler writes it (Chrome's format), so that what the tables say can be looked up in a
viewer. Kernels' names tell the kind of GPU work; idle is the window less the union of what ran. A host that waits is
shown as waiting, with the operator that made it wait: the time inside such a call is the GPU's queue draining, not
the call's own work.
"""

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from accel.errors import UsageError

DRAIN = "profile: drain the queue"  # the profiler's own waits, which are no finding

# The first kind whose pattern a kernel's name contains. Attention comes first: its kernels are named after GEMMs too.
KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|softmax|mha_fwd"),
    ("communication", r"nccl"),
    ("copies", r"^Mem(cpy|set)|CatArray|direct_copy|copy_kernel|copy_device|FillFunctor"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_linear|xmma|wgmma|conv|winograd|implicit"),
)
OTHER = "norm/elementwise"
OPERATORS = (  # the same for operators, where there are no kernels to go by (CPU)
    ("attention", r"attention|softmax"),
    ("GEMM", r"addmm|::mm|bmm|linear|matmul|conv"),
    ("copies", r"copy|::to$|::cat$|clone|contiguous|::fill|::zero"),
)
WAITS = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize|^cudaMemcpy(2D)?$|^cudaMemcpy(2D)?Async")
STAGED = 50  # µs: an asynchronous copy from or to the host that takes it longer than this has waited for the GPU


def kind_of(name: str, table=KINDS) -> str:
    return next((kind for kind, pattern in table if re.search(pattern, name, re.I)), OTHER)


def load(path: Path) -> list[dict]:
    """The events of a .json.gz trace that torch.profiler wrote."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def clip(name: str, width: int = 72) -> str:
    """A kernel's name without what all of torch's have in common, at most `width` long."""
    name = re.sub(r"void |at::native::|\(anonymous namespace\)::", "", name)
    return name if len(name) <= width else name[: width - 1] + "…"


def union(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def most_expensive(durations: dict[str, list[float]], count: int = 10) -> list[dict]:
    """name → durations in µs, as the most expensive names: calls, total and average in ms."""
    table = [
        dict(name=name, calls=len(times), total_ms=sum(times) / 1e3, average_ms=sum(times) / len(times) / 1e3)
        for name, times in durations.items()
    ]
    return sorted(table, key=lambda row: -row["total_ms"])[:count]


def self_times(events: list[dict]) -> Iterator[tuple[dict, float, list[str]]]:
    """Each host event with its own time, less what runs inside it, and the operators around it, outermost first."""
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for some in threads.values():
        stack = []
        for event in sorted(some, key=lambda e: (e["ts"], -e["dur"])):
            while stack and event["ts"] >= stack[-1][0]["ts"] + stack[-1][0]["dur"]:
                yield tuple(stack.pop())
            if stack:
                stack[-1][1] -= event["dur"]
            stack.append([event, event["dur"], [outer["name"] for outer, *_ in stack]])
        while stack:
            yield tuple(stack.pop())


def span(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def analyse(events: list[dict], steps: int) -> dict:
    """Times by kind, the most expensive functions and the host's waits, of a trace whose first `steps` ProfilerStep
    ranges are denoising steps and whose next one, if there is one, decodes pictures. Milliseconds; `kinds` are a
    step's."""
    events = [event for event in events if event.get("ph") == "X"]
    notes = [event for event in events if event.get("cat") == "user_annotation"]
    ranges = sorted(span(event) for event in notes if event["name"].startswith("ProfilerStep"))
    if len(ranges) < steps:
        raise UsageError(f"the trace holds {len(ranges)} steps, not {steps}; profile again")
    begin, end = ranges[0][0], ranges[steps - 1][1]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= begin]
    result = dict(steps=steps, window_ms=(end - begin) / steps / 1e3)
    if len(ranges) > steps:
        start, stop = ranges[steps]
        busy = union([span(event) for event in device if event["ts"] >= start])
        result["decode"] = dict(window_ms=(stop - start) / 1e3, busy_ms=busy / 1e3 if device else None)
        device = [event for event in device if event["ts"] < start]
    drains = sorted(span(event) for event in notes if event["name"] == DRAIN)

    def draining(event):
        index = bisect.bisect(drains, (event["ts"], float("inf"))) - 1
        return index >= 0 and event["ts"] < drains[index][1]

    host = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver") and e["ts"] >= begin]
    own_times = [one for one in self_times([e for e in host if not draining(e)]) if one[0]["ts"] < end]
    result |= host_functions(own_times, device, steps)
    times = defaultdict(float)
    for event in device:
        times[kind_of(event["name"])] += event["dur"]
    if device:
        kernels = defaultdict(list)
        for event in device:
            kernels[event["name"]].append(event["dur"])
        copied = sum(e["dur"] for e in device if re.match(r"Memcpy (HtoD|DtoH)", e["name"])) / steps / 1e3
        result |= dict(kernels=most_expensive(kernels), launches_per_step=len(device) / steps, host_copies_ms=copied)
        times["idle"] = end - begin - union([span(event) for event in device])
    else:
        for event, own, _ in own_times:
            times[kind_of(event["name"], OPERATORS)] += own
        times["host, outside operators"] = max(0.0, end - begin - sum(times.values()))
    result["kinds"] = {kind: time / steps / 1e3 for kind, time in sorted(times.items(), key=lambda item: -item[1])}
    return result


def host_functions(own_times: list[tuple], device: list[dict], steps: int) -> dict:
    """The most expensive host functions by their own time, and where the host waits for the GPU."""
    # A copy within the device is queued like a kernel, however long the host takes to do it.
    queued = {e.get("args", {}).get("correlation") for e in device if e["name"].startswith("Memcpy DtoD")} - {None}
    functions, waits = defaultdict(list), defaultdict(list)
    for event, own, outer in own_times:
        wait = event["cat"] != "cpu_op" and WAITS.search(event["name"])
        if wait and "Async" in event["name"]:
            wait = own > STAGED and event.get("args", {}).get("correlation") not in queued
        functions[f"{event['name']} (waiting)" if wait else event["name"]].append(own)
        if wait:
            waits[" → ".join([*outer, event["name"]])].append(own)
    waits = [
        dict(where=row["name"], per_step=row["calls"] / steps, ms_per_step=row["total_ms"] / steps)
        for row in most_expensive(waits)
    ]
    return dict(host=most_expensive(functions), waits=waits)
