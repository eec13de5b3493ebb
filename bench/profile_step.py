"""Profile warm sampling steps with torch.profiler: time by kind of work, against the measured limits of this machine.

    python bench/profile_step.py --output output/fast.json            # as sample.py runs it
    python bench/profile_step.py --baseline ../DiT --output output/upstream.json

--baseline profiles the loop of a checkout of upstream; without a folder this repository's own models.py in the loop of
its diffusion/. Prints the profiler's table of the ten most expensive functions. Beside --output lies a trace for
Perfetto (ui.perfetto.dev). A kernel's name tells its kind of work; idle is the time between the first kernel's start
and the last kernel's end in which none runs.
"""

if not __package__:
    __import__("_as_module")

import importlib
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, schedule

from accel import precision
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.families import ROOT
from accel.files import atomic_write
from accel.flags import positive
from bench import harness, seen_as, work

WAIT, WARMUP = 1, 2  # steps before the recorded ones
STEP = "ProfilerStep*"  # the profiler's name for a step
# The first kind whose pattern a kernel's name contains. Attention comes first: its kernels are named after GEMMs too.
KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|softmax|mha_fwd"),
    ("communication", r"nccl"),
    ("copies", r"^Mem(cpy|set)|CatArray|direct_copy|copy_kernel|copy_device|FillFunctor"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_linear|xmma|wgmma|conv|winograd|implicit"),
)
OPERATORS = (  # the same for operators, where there are no kernels to go by (CPU)
    ("attention", r"attention|softmax"),
    ("GEMM", r"addmm|::mm|bmm|linear|matmul|conv"),
    ("copies", r"copy|::to$|::cat$|clone|contiguous|::fill|::zero"),
)
OTHER = "norm/elementwise"
# cudaDeviceSynchronize is the profiler's own.
WAITS = r"^cu(da)?(Stream|Event|Ctx)Synchronize|^cudaMemcpy"
STAGED = 50  # µs: an asynchronous copy that takes the host longer than this has waited for the GPU


def upstream_loop(folder: Path, model: torch.nn.Module, args: Namespace, device: torch.device) -> Callable:
    """Return the sampling run of the checkout of upstream in `folder` as `loop(on_step)`: its models.py with `model`'s
    weights in the loop of its diffusion/. Modules of ours with these names stay what they are."""

    if not all((folder / name).exists() for name in ("models.py", "diffusion")):
        raise UsageError(f"--baseline {folder}: no models.py and diffusion/ there; name a checkout of upstream")

    def named_alike():
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in ("models", "diffusion")}

    ours = named_alike()
    sys.path.insert(0, str(folder))
    try:
        theirs, make = importlib.import_module("models"), importlib.import_module("diffusion").create_diffusion
    except ImportError as error:
        raise UsageError(f"--baseline {folder}: {error}") from None
    finally:
        sys.path.remove(str(folder))
        named_alike()
        sys.modules.update(ours)
    if args.model not in theirs.DiT_models:
        raise UsageError(f"--baseline {folder}: has no {args.model}; take --model DiT-XL/2")
    side = args.image_size // 8
    with torch.device(device):
        network = theirs.DiT_models[args.model](input_size=side, num_classes=args.num_classes)
    network.load_state_dict(model.state_dict())
    network.eval()
    y = torch.arange(args.pictures, device=device) % args.num_classes
    kwargs = dict(y=torch.cat([y, torch.full_like(y, args.num_classes)]), cfg_scale=args.cfg_scale)
    z = torch.randn(args.pictures, 4, side, side, device=device).repeat(2, 1, 1, 1)
    diffusion = make(str(harness.STEPS))

    def loop(on_step):
        arguments = dict(clip_denoised=False, model_kwargs=kwargs, device=device)
        for out in diffusion.p_sample_loop_progressive(network.forward_with_cfg, z.shape, z, **arguments):
            on_step(out["sample"])

    return torch.no_grad()(loop)


def record(loop: Callable, steps: int, device: torch.device) -> profile:
    """Run `steps` warm steps of `loop` under the profiler."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the second one crashes.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    done = 0

    def on_step(*_):
        nonlocal done
        done += 1
        if done == WAIT + WARMUP:  # the steps before are not the recorded ones' work
            harness.synchronize(device)
        profiler.step()
        if done == WAIT + WARMUP + steps:
            raise harness.Enough

    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        record_shapes=True,
        acc_events=True,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1),
    ) as profiler:
        harness.run_until(loop, on_step)
    return profiler


def kind_of(name: str, table: tuple = KINDS) -> str:
    """Return the kind of work of a kernel or operator."""
    return next((kind for kind, pattern in table if re.search(pattern, name, re.I)), OTHER)


def on_device(event) -> bool:
    """Whether an event or average is of a kernel, a copy or a fill on the GPU."""
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def analyse(events: EventList, steps: int) -> dict:
    """Return the times of `steps` profiled steps by kind of work, and the host's waits, in milliseconds a step."""
    averages, times = events.key_averages(), defaultdict(float)
    host = [row for row in averages if row.device_type == DeviceType.CPU]
    device = [row for row in averages if on_device(row)]
    waits = [row for row in host if re.search(WAITS, row.key)]
    waits = [row for row in waits if "Async" not in row.key or row.self_cpu_time_total > STAGED * row.count]
    result = dict(steps=steps)
    result["waits"] = [
        dict(where=row.key, per_step=row.count / steps, ms_per_step=row.self_cpu_time_total / steps / 1e3)
        for row in sorted(waits, key=lambda row: -row.self_cpu_time_total)
    ]
    if device:
        for row in device:
            times[kind_of(row.key)] += row.self_device_time_total
        spans = sorted((event.time_range.start, event.time_range.end) for event in events if on_device(event))
        reach, idle = spans[0][0], 0.0
        for start, end in spans:
            idle += max(0.0, start - reach)
            reach = max(reach, end)
        window, times["idle"] = reach - spans[0][0], idle
        copied = sum(row.self_device_time_total for row in device if re.match("Memcpy (HtoD|DtoH)", row.key))
        result["host_copies_ms"] = copied / steps / 1e3
        result["launches_per_step"] = sum(row.count for row in device) / steps
    else:
        [whole] = (row for row in host if row.key == STEP)
        window, times["host, outside operators"] = whole.cpu_time_total, whole.self_cpu_time_total
        for row in host:
            if row.key != STEP:
                times[kind_of(row.key, OPERATORS)] += row.self_cpu_time_total
    result["window_ms"] = window / steps / 1e3
    result["kinds"] = {kind: time / steps / 1e3 for kind, time in sorted(times.items(), key=lambda item: -item[1])}
    return result


def ceilings(tier: str, device: torch.device) -> dict:
    """Measure what this machine reaches on a large GEMM in the tier's arithmetic, after seconds of it, and on a large
    copy."""
    cuda = device.type == "cuda"
    side, dtype, parts = 8192 if cuda else 1024, precision.TIERS[tier].dtype, 1
    if tier == "exact":
        dtype, parts = torch.float16, 3  # high·high, high·low and low·high
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    out, seconds = torch.empty_like(a), (1.5, 1.0) if cuda else (0.1, 0.1)
    gemm = harness.time_steps(harness.repeated(lambda: torch.mm(a, b, out=out)), device, *seconds)
    size = 1 << 30 if cuda else 1 << 26
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    copy = harness.time_steps(harness.repeated(lambda: target.copy_(source)), device, load=0.0, window=0.05)
    tflops, tb_s = 2 * side**3 / parts / gemm["ms"] / 1e9, 2 * size / copy["ms"] / 1e9
    return dict(gemm_tflops=tflops, gemm=f"{side}³ {tier}", copy_tb_s=tb_s)


def rates(result: dict, shape: work.Shape, value_bytes: int, ceiling: dict) -> None:
    """Add to each kind of a step the work that it must do, and how fast it was done."""
    flops = {"GEMM": work.gemm_flops(shape), "attention": work.attention_flops(shape)}
    for kind, ms in result["kinds"].items():
        row = result["kinds"][kind] = dict(ms=ms, share=ms / result["window_ms"])
        if kind in flops and ms:
            row["tflops"] = flops[kind] / ms / 1e9
            row["of_ceiling"] = row["tflops"] / ceiling["gemm_tflops"]
        elif kind == OTHER and ms:
            row["gb_s"] = work.adaln_bytes(shape, value_bytes) / ms / 1e6
            row["of_ceiling"] = row["gb_s"] / 1e3 / ceiling["copy_tb_s"]
    result["floor_ms"] = work.floor_ms(shape, value_bytes, ceiling["gemm_tflops"], ceiling["copy_tb_s"])


def driver() -> str:
    """Return the version of the GPU's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def run(args: Namespace, device: torch.device) -> dict:
    """Return the record of a profile, and print the profiler's table; the trace goes beside --output."""
    precision.apply_precision(args.precision, device)
    model = harness.model_of(args, device)
    if args.baseline:
        loop = upstream_loop(args.baseline, model, args, device)
    else:
        loop = harness.batch(harness.build(model, args.precision, device), args, device)
    timed = harness.time_steps(loop, device, args.load, args.window)
    ceiling = ceilings(args.precision, device)
    profiler = record(loop, args.steps, device)
    if args.output:
        with tempfile.NamedTemporaryFile(suffix=".json.gz") as trace:
            profiler.export_chrome_trace(trace.name)
            with atomic_write(Path(args.output).with_suffix(".trace.json.gz")) as file:
                file.write(Path(trace.name).read_bytes())
    events, shape = profiler.events(), work.Shape.of(model, 2 * args.pictures)
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(events.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=72))
    result = analyse(events, args.steps)
    rates(result, shape, precision.TIERS[args.precision].dtype.itemsize, ceiling)
    if args.seen_as:
        names = {event.name for event in events if on_device(event)}
        result["newer"] = seen_as.newer(sorted(names), args.seen_as)
    about = {key: getattr(args, key) for key in ("model", "image_size", "pictures")}
    return dict(
        kind="profile",
        **harness.provenance(device, args.commit),
        **about,
        driver=driver() if device.type == "cuda" else None,
        weights=Path(args.ckpt).name if args.ckpt else "random, seed 0",
        batch_rows=shape.batch_rows,
        tier=args.precision,
        baseline=bool(args.baseline),
        checkout=args.baseline and args.baseline.resolve().name,
        num_sampling_steps=harness.STEPS,
        shape=vars(shape),
        timed=timed,
        ceilings=ceiling,
        **result,
    )


def describe(record: dict) -> list[str]:
    """Return the lines that a profile prints below the profiler's table."""
    timed, ceiling = record["timed"], record["ceilings"]
    lines = [
        f"{record['model']}, {record['image_size']} px, {record['batch_rows']} batch rows, {record['tier']}, "
        f"{record['gpu'] or 'CPU: times by operator, nothing about kernels or idle'}",
        f"{timed['ms']:.2f} ms a step [{timed['p10']:.2f}, {timed['p90']:.2f}]; profiled {record['window_ms']:.2f}; "
        f"floor {record['floor_ms']:.2f} ({ceiling['gemm']} GEMM {ceiling['gemm_tflops']:.3g} TFLOP/s, copy "
        f"{ceiling['copy_tb_s']:.3g} TB/s, both measured here)",
    ]
    for kind, row in record["kinds"].items():
        rate = f"  {row['of_ceiling']:.0%} of the ceiling" if "of_ceiling" in row else ""
        lines.append(f"  {kind:24}{row['ms']:12.3f} ms{row['share']:8.1%}{rate}")
    if record["gpu"] and not record["waits"]:
        lines.append("The host never waits for the GPU in these steps.")
    for one in record["waits"]:
        lines.append(f"  the host waits {one['per_step']:.1f} × a step, {one['ms_per_step']:.3f} ms, in {one['where']}")
    return lines + [f"a kernel of a newer generation: {name}" for name in record.get("newer", [])]


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    text = "default: sample.py's; --baseline: upstream's"
    parser.add_argument("--precision", choices=tuple(precision.TIERS), help=text)
    text = "instead: the loop of this checkout of upstream (default: of this repository)"
    parser.add_argument("--baseline", nargs="?", type=Path, const=ROOT, metavar="FOLDER", help=text)
    parser.add_argument("--steps", type=positive, default=3, help="steps in the trace, after the warm-up")
    args = parser.parse_args()
    with user_errors(parser):
        if args.output and Path(args.output).suffix != ".json":
            raise UsageError(f"--output {args.output}: must end in .json")
        device = harness.prepare(args)
        upstream = "tf32" if precision.supports("tf32", device) else "fp32"
        args.precision = args.precision or (upstream if args.baseline else precision.default_tier(device))
        if args.baseline and args.precision not in ("fp32", "tf32"):
            raise UsageError(f"--precision {args.precision}: upstream samples in fp32 or tf32; choose one of these")
        result = run(args, device)
        print(*describe(result), sep="\n")
        harness.write(args.output, result)
        sys.exit(bool(result.get("newer")))


if __name__ == "__main__":
    main()
