"""Profile warm sampling steps with torch.profiler: time by kind of work, against the
measured limits of this machine.

    python bench/profile_step.py --output output/fast.json                  # as sample.py runs it
    python bench/profile_step.py --baseline --output output/baseline.json   # upstream's arithmetic:
                                                                            models.py, eager

Prints the profiler's table of the ten most expensive functions. Beside --output lies a
trace for Perfetto (ui.perfetto.dev). On a GPU a kernel's name tells its kind of work;
idle is the time between the first kernel's start and the last kernel's end in which none
runs.
"""

if not __package__:
    __import__("_as_module")

import os
import re
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from accel import precision
from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.flags import positive
from accel.network import BlockNetwork
from bench import harness

WAIT = 1
WARMUP = 2  # steps before the recorded ones
# The first kind whose pattern a kernel's name contains. Attention comes first: its
# kernels are named after GEMMs too.
KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|softmax|mha_fwd"),
    ("copies", r"^Mem(cpy|set)|CatArray|direct_copy|copy_kernel|copy_device|FillFunctor"),
    (
        "GEMM",
        r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_linear|xmma|wgmma|conv|winograd|implicit",
    ),
)
OTHER = "norm/elementwise"


def record(loop: Callable, steps: int, device: torch.device) -> profile:
    """Return the profile of `steps` warm steps of `loop`."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the
    # second one crashes.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")

    cuda = device.type == "cuda"

    def on_step(*_):
        # earlier steps' kernels must not be recorded
        if cuda and profiler.step_num == WAIT + WARMUP - 1:
            torch.cuda.synchronize(device)
        profiler.step()

    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda,
        acc_events=True,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1),
    ) as profiler:
        harness.run_steps(loop, WAIT + WARMUP + steps, on_step)
    return profiler


def on_device(event) -> bool:
    """Return whether an event or average is of a kernel, a copy or a fill on the GPU."""
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def analyse(events: EventList, steps: int) -> dict:
    """Return the time of `steps` profiled steps on a GPU by kind of work, in ms per step."""
    kernels = [row for row in events.key_averages() if on_device(row)]
    times = defaultdict(float)  # by kind of work, in µs
    for row in kernels:
        times[kind_of(row.key)] += row.self_device_time_total
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in events if on_device(event)
    )
    first, _ = spans[0]
    reach = first
    for start, end in spans:
        times["idle"] += max(0.0, start - reach)
        reach = max(reach, end)
    window = reach - first
    kinds = {}
    for kind, time in sorted(times.items(), key=lambda item: -item[1]):
        kinds[kind] = dict(ms=time / steps / 1e3, share=time / window)
    return dict(
        window_ms=window / steps / 1e3,
        launches_per_step=sum(row.count for row in kernels) / steps,
        kinds=kinds,
    )


def kind_of(kernel: str) -> str:
    """Return the kind of work of a kernel by its name."""
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.I):
            return kind
    return OTHER


def ceilings(tier: str, device: torch.device) -> dict:
    """Measure this machine's ceilings: a large GEMM in the tier's arithmetic, after
    seconds of it, and a large copy.
    """

    def milliseconds(work, load, window):
        def loop(on_step):
            work()
            on_step()

        return harness.time_steps(loop, device, load, window)["ms"]

    side = 1024
    size = 1 << 26
    load = 0.1
    window = 0.1
    if device.type == "cuda":
        side = 8192
        size = 1 << 30
        load = 1.5
        window = 1.0
    dtype = precision.TIERS[tier].dtype
    parts = 1
    if tier == "exact":
        dtype = torch.float16
        parts = 3  # high·high, high·low and low·high
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    gemm = milliseconds(lambda: torch.mm(a, b, out=out), load, window)
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    copy = milliseconds(lambda: target.copy_(source), 0.0, 0.05)
    tflops = 2 * side**3 / parts / gemm / 1e9
    tb_s = 2 * size / copy / 1e9
    return dict(gemm_tflops=tflops, gemm=f"{side}³ {tier}", copy_tb_s=tb_s)


@torch.no_grad()
def flops(model: torch.nn.Module, args: Namespace, device: torch.device) -> dict[str, int]:
    """Return the floating-point operations of a step, 2 a multiply-add, as torch counts
    them on the reference network (conditioning, which a run computes ahead, is 0.05 % of
    XL/2).
    """
    x = torch.zeros(2, model.in_channels, args.latent_size, args.latent_size, device=device)
    # attention: two batched GEMMs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x.new_full((2,), 500), torch.zeros(2, dtype=torch.int64, device=device))
    whole = counter.get_total_flops()
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    return {"GEMM": args.pictures * (whole - attention), "attention": args.pictures * attention}


def adaln_bytes(network: BlockNetwork, row_tokens: int, value_bytes: int) -> int:
    """Return the fewest bytes that move between the GEMMs of a step if each pass over the
    tokens is one fused adaLN kernel, as in accel/fast: the float32 residual stream, and
    branches and GEMM inputs of `value_bytes` a value.
    """
    stream = 4
    middle = stream + 2 * value_bytes  # reads x and a, writes h
    joined = 2 * stream + 3 * value_bytes  # reads x, a and m, writes x and h
    of_blocks = sum(stage.width * len(stage.blocks) for stage in network.stages)
    last = network.stages[-1].width * (stream + value_bytes)
    return row_tokens * (of_blocks * (middle + joined) + last)


def save_trace(profiler: profile, path: Path) -> None:
    """Write the trace, whole or not at all."""
    with tempfile.NamedTemporaryFile(suffix=".json.gz") as trace:
        profiler.export_chrome_trace(trace.name)
        with atomic_write(path) as file:
            file.write(Path(trace.name).read_bytes())


def run(args: Namespace, device: torch.device) -> dict:
    """Return the record of a profile, and print the profiler's table; the trace goes
    beside --output.
    """
    model = harness.model_of(args, device)
    cuda = device.type == "cuda"
    tier = precision.TIERS[args.precision]
    network = harness.build(args.model, model, args.precision, device)
    loop = harness.sampling(network, args, device)
    timed = harness.time_steps(loop, device, args.load, args.window)
    ceiling = ceilings(args.precision, device)
    work = flops(model, args, device)
    profiler = record(loop, args.steps, device)
    if args.output:
        save_trace(profiler, Path(args.output).with_suffix(".trace.json.gz"))
    averages = profiler.key_averages()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    print(averages.table(sort_by=order, row_limit=10, max_name_column_width=72))
    row_tokens = 2 * args.pictures * (args.latent_size // network.patch_size) ** 2
    moved = adaln_bytes(network, row_tokens, tier.dtype.itemsize)
    about = dict(
        **harness.about("profile", args, device),
        baseline=args.baseline,
        batch_rows=2 * args.pictures,
        tier=args.precision,
        steps=args.steps,
        timed=timed,
        ceilings=ceiling,
        flops=work,
        # No arrangement of the same arithmetic is faster: GEMMs and attention at the
        # speed of a large GEMM, all other bytes at the speed of a large copy.
        floor_ms=(sum(work.values()) / ceiling["gemm_tflops"] + moved / ceiling["copy_tb_s"]) / 1e9,
    )
    if not cuda:
        [whole] = [row for row in averages if row.key == "ProfilerStep*"]
        return {**about, "window_ms": whole.cpu_time_total / args.steps / 1e3}
    events = profiler.events()
    result = {**about, **analyse(events, args.steps)}
    for kind, row in result["kinds"].items():
        if kind in work:
            row["tflops"] = work[kind] / row["ms"] / 1e9
            row["of_ceiling"] = row["tflops"] / ceiling["gemm_tflops"]
        elif kind == OTHER:
            row["gb_s"] = moved / row["ms"] / 1e6
            row["of_ceiling"] = row["gb_s"] / 1e3 / ceiling["copy_tb_s"]
    return result


def describe(record: dict) -> list[str]:
    """Return the lines that a profile prints below the profiler's table."""
    timed = record["timed"]
    ceiling = record["ceilings"]
    lines = [
        f"{record['model']}, {record['image_size']} px, {record['batch_rows']} batch rows, "
        f"{record['tier']}, {record['gpu'] or 'CPU'}",
        f"{timed['ms']:.2f} ms per step [{timed['p10']:.2f}, {timed['p90']:.2f}]; profiled "
        f"{record['window_ms']:.2f}; floor {record['floor_ms']:.2f} ({ceiling['gemm']} GEMM "
        f"{ceiling['gemm_tflops']:.3g} TFLOP/s, copy {ceiling['copy_tb_s']:.3g} TB/s, both "
        "measured here)",
    ]
    for kind, row in record.get("kinds", {}).items():
        rate = f"  {row['of_ceiling']:.0%} of the ceiling" if "of_ceiling" in row else ""
        lines.append(f"  {kind:24}{row['ms']:12.3f} ms{row['share']:8.1%}{rate}")
    return lines


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    harness.add_batch(parser)
    parser.add_argument(
        "--precision",
        choices=tuple(precision.TIERS),
        help="tier (default: sample.py's; --baseline: tf32 where the device has it, else fp32)",
    )
    parser.add_argument(
        "--baseline", action="store_true", help="upstream's arithmetic: models.py, step by step"
    )
    parser.add_argument(
        "--steps", type=positive, default=3, help="steps in the trace, after the warm-up"
    )
    args = parser.parse_args()
    with user_errors(parser):
        if args.output and Path(args.output).suffix != ".json":
            raise UsageError(f"--output {args.output}: must end in .json")
        device = harness.prepare(args)
        if args.precision is None and args.baseline:
            args.precision = "tf32" if precision.supports("tf32", device) else "fp32"
        args.precision = args.precision or precision.default_tier(device)
        if args.baseline and precision.TIERS[args.precision].accelerated:
            raise UsageError(
                f"--precision {args.precision}: upstream samples in fp32 or tf32; choose one of "
                "these"
            )
        result = run(args, device)
        print(*describe(result), sep="\n")
        harness.write(args.output, result)


if __name__ == "__main__":
    main()
