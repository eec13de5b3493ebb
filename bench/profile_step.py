"""Profile warm sampling steps with torch.profiler.

    python bench/profile_step.py --output output/fast.json                   # as sample.py runs it
    python bench/profile_step.py --precision fp32 --output output/fp32.json  # models.py, eager

Prints the ten functions that take the most time, and the time of a step without the
profiler. Beside --output lies a trace for Perfetto (ui.perfetto.dev).
"""

if not __package__:
    __import__("_as_module")

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from accel import precision
from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.flags import positive
from bench import harness

WARMUP = 3  # steps before the recorded ones
MOST = 10  # functions in the table and the record


def record(loop: Callable, steps: int, device: torch.device) -> profile:
    """Return the profile of `steps` warm steps of `loop`."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the
    # second one crashes.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")

    cuda = device.type == "cuda"

    def on_step():
        # earlier steps' kernels must not be recorded
        if cuda and profiler.step_num == WARMUP - 1:
            torch.cuda.synchronize(device)
        profiler.step()

    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda,
        acc_events=True,
        schedule=schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
    ) as profiler:
        harness.run_steps(loop, WARMUP + steps, on_step)
    return profiler


def most_expensive(profiler: profile, steps: int, device: torch.device) -> list[dict]:
    """Return the functions that take the most time: kernels, copies and fills on a GPU, else
    torch's operators. Each has its name, ms and calls per step.
    """
    on_cpu = device.type == "cpu"
    time = attrgetter("self_cpu_time_total" if on_cpu else "self_device_time_total")
    functions = [
        row
        for row in profiler.key_averages()
        if (row.device_type == DeviceType.CPU) == on_cpu
        and not (row.is_user_annotation or row.key.startswith("ProfilerStep"))
    ]
    functions.sort(key=time, reverse=True)
    return [
        dict(name=row.key, ms=time(row) / steps / 1e3, calls=row.count / steps)
        for row in functions[:MOST]
    ]


def save_trace(profiler: profile, path: Path) -> None:
    """Write the trace, whole or not at all."""
    with tempfile.NamedTemporaryFile(suffix=".json.gz") as trace:
        profiler.export_chrome_trace(trace.name)
        with atomic_write(path) as file:
            file.write(Path(trace.name).read_bytes())


def run(args: Namespace, device: torch.device) -> dict:
    """Return the record of a profile; the trace goes beside --output."""
    model = harness.model_of(args, device)
    network = harness.build(args.model, model, args.precision, device)
    loop = harness.sampling(network, args, device)
    timed = harness.time_steps(loop, device, args.load, args.window)
    profiler = record(loop, args.steps, device)
    if args.output:
        save_trace(profiler, Path(args.output).with_suffix(".trace.json.gz"))
    return dict(
        **harness.about("profile", args, device),
        batch_rows=2 * args.pictures,
        tier=args.precision,
        steps=args.steps,
        timed=timed,
        functions=most_expensive(profiler, args.steps, device),
    )


def describe(record: dict) -> list[str]:
    """Return the lines that a profile prints."""
    timed = record["timed"]
    lines = [
        f"{row['ms']:12.3f} ms {row['calls']:8.0f} ×  {row['name']:.72}"
        for row in record["functions"]
    ]
    lines.append(
        f"{record['model']}, {record['image_size']} px, {record['batch_rows']} batch rows, "
        f"{record['tier']}, {record['gpu'] or 'CPU'}: {timed['ms']:.2f} ms per step "
        f"[{timed['p10']:.2f}, {timed['p90']:.2f}]"
    )
    return lines


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    harness.add_batch(parser)
    parser.add_argument(
        "--precision",
        choices=tuple(precision.TIERS),
        help="tier (default: sample.py's); fp32 and tf32 are upstream's arithmetic",
    )
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps in the trace, after the warm-up"
    )
    args = parser.parse_args()
    with user_errors(parser):
        if args.output and Path(args.output).suffix != ".json":
            raise UsageError(f"--output {args.output}: must end in .json")
        device = harness.prepare(args)
        args.precision = args.precision or precision.default_tier(device)
        precision.require("precision", args.precision, device)
        result = run(args, device)
        print(*describe(result), sep="\n")
        harness.write(args.output, result)


if __name__ == "__main__":
    main()
