"""Where the time of sampling goes: warm steps under torch.profiler, by kind of work, against what this machine can do.

    python bench/profile_step.py --output output/fast.json            # as sample.py runs it
    python bench/profile_step.py --baseline --output output/upstream.json

Beside the figures lies a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. The figures are those of the
profiler's own averages: kernels' names tell the kind of GPU work; idle is the time between the first kernel's start and
the last one's end in which none runs. A host that waits is shown with the operator that made it wait: the time inside
such a call is the GPU's queue draining, not the call's own work. scripts/report.py shows profiles side by side.
"""

if not __package__:
    __import__("_as_module")

import os
import re
import subprocess
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

import models
from accel import precision, vae
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.flags import check_writable, positive
from accel.options import SamplingOptions
from bench import measure, work
from diffusion.respace import SpacedDiffusion

MOST_STEPS = 50  # whose trace viewers still open
WAIT, WARMUP = 1, 2  # steps before those that are recorded
STEP = "ProfilerStep*"  # the profiler's name for a step
ITS_OWN = (STEP, "cudaDeviceSynchronize", "Activity Buffer Request")  # what the profiler itself does on the host

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

#################################################################################
#                           What is run and recorded                            #
#################################################################################


class UploadingDiffusion(SpacedDiffusion):
    """The process with upstream's traffic: every table is copied from the host whenever it is looked up, eight times a
    step, and so is the map of timesteps. Same numbers."""

    def _at(self, name, t, x):
        table = np.log(self.betas) if name == "log_betas" else getattr(self, name)
        return torch.from_numpy(table).to(t.device)[t.long()].float().view(-1, *[1] * (x.ndim - 1))

    def _posterior_mean(self, x_start, x_t, t):
        for name in ("posterior_variance", "posterior_log_variance_clipped"):  # looked up there, and not used
            self._at(name, t, x_t)
        return super()._posterior_mean(x_start, x_t, t)

    def original_timesteps(self, t: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.timestep_map, device=t.device)[t]


@torch.inference_mode()
def upstream_loop(model, diffusion, z, labels, cfg_scale, null_label, *, on_step) -> torch.Tensor:
    """Upstream's loop: 2n batch rows updated; timesteps, tables and frequencies sent from the host at every step."""
    x = torch.cat([z, z])
    kwargs = dict(y=torch.cat([labels, torch.full_like(labels, null_label)]), cfg_scale=cfg_scale)
    frequencies, models._frequencies = models._frequencies, models._frequencies.__wrapped__
    try:
        for index in reversed(range(diffusion.num_timesteps)):
            t = torch.tensor([index] * len(x), device=z.device)
            out = diffusion.p_sample(model.forward_with_cfg, x, t, clip_denoised=False, model_kwargs=kwargs)
            x = out["sample"]
            on_step(index, x)
    finally:
        models._frequencies = frequencies
    return x


def record(loop: Callable, steps: int, device: torch.device) -> profile:
    """`steps` warm steps of `loop` under the profiler."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the second one crashes.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    done = 0

    def on_step(*_):
        nonlocal done
        done += 1
        if done == WAIT + WARMUP:  # the steps before are not the recorded ones' work
            measure.synchronize(device)
        profiler.step()
        if done == WAIT + WARMUP + steps:
            raise measure.Enough

    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        record_shapes=True,
        profile_memory=True,
        acc_events=True,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps, repeat=1),
    ) as profiler:
        measure.run_until(loop, on_step)
    return profiler


def keep_trace(profiler: profile, args: Namespace) -> None:
    """The trace beside --output, and in --tensorboard's folder under a name that TensorBoard looks for."""
    targets = [Path(args.output).with_suffix(".trace.json.gz")] if args.output else []
    if args.tensorboard:
        targets.append(Path(args.tensorboard) / f"{args.precision}.{time.time_ns()}.pt.trace.json.gz")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        for target in targets:
            with atomic_write(target) as file:
                file.write(trace.read_bytes())


#################################################################################
#                              What the profile says                            #
#################################################################################


def kind_of(name: str, table: tuple = KINDS) -> str:
    return next((kind for kind, pattern in table if re.search(pattern, name, re.I)), OTHER)


def clip(name: str, width: int = 72) -> str:
    """A kernel's name without what all of torch's have in common, at most `width` long."""
    name = re.sub(r"void |at::native::|\(anonymous namespace\)::", "", name)
    return name if len(name) <= width else name[: width - 1] + "…"


def on_device(event: FunctionEvent) -> bool:
    """Whether it is a kernel, a copy or a fill on the GPU; `event` may be an average too."""
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def analyse(events: EventList, steps: int) -> dict:
    """Times by kind, the most expensive functions and the host's waits, of `steps` profiled steps. Milliseconds;
    `kinds` are a step's."""
    averages, times = events.key_averages(), defaultdict(float)
    host = [row for row in averages if row.device_type == DeviceType.CPU]
    device = [row for row in averages if on_device(row)]
    functions = [row for row in host if row.key not in ITS_OWN]
    result = dict(steps=steps, host=most_expensive(functions, "self_cpu_time_total"), waits=waits(events, steps))
    if device:
        for row in device:
            times[kind_of(row.key)] += row.self_device_time_total
        spans = [(event.time_range.start, event.time_range.end) for event in events if on_device(event)]
        window = max(end for _, end in spans) - min(start for start, _ in spans)
        times["idle"] = window - union(spans)
        copied = sum(row.self_device_time_total for row in device if re.match("Memcpy (HtoD|DtoH)", row.key))
        result |= dict(kernels=most_expensive(device, "self_device_time_total"), host_copies_ms=copied / steps / 1e3)
        result["launches_per_step"] = sum(row.count for row in device) / steps
    else:
        for row in functions:
            times[kind_of(row.key, OPERATORS)] += row.self_cpu_time_total
        [whole] = (row for row in host if row.key == STEP)
        window, times["host, outside operators"] = whole.cpu_time_total, whole.self_cpu_time_total
    result["window_ms"] = window / steps / 1e3
    result["kinds"] = {kind: time / steps / 1e3 for kind, time in sorted(times.items(), key=lambda item: -item[1])}
    return result


def most_expensive(averages: list, key: str, count: int = 10) -> list[dict]:
    """The `count` averages with most time in their field `key`: calls, total and average in ms."""
    rows = sorted(averages, key=lambda row: -getattr(row, key))[:count]
    totals = [(row, getattr(row, key) / 1e3) for row in rows]
    return [dict(name=row.key, calls=row.count, total_ms=ms, average_ms=ms / row.count) for row, ms in totals]


def union(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def waits(events: EventList, steps: int) -> list[dict]:
    """Where in a step the host waits for the GPU, longest first."""
    # A copy within the device is queued like a kernel, however long the host takes to do it.
    queued = {event.id for event in events if on_device(event) and event.name.startswith("Memcpy DtoD")}
    found = defaultdict(list)
    for event in events:
        if event.device_type != DeviceType.CPU or not WAITS.search(event.name):
            continue
        if "Async" in event.name and (event.self_cpu_time_total <= STAGED or event.id in queued):
            continue
        outermost, *names = around(event)
        if outermost == STEP:  # the wait after the last step is the profiler's
            found[" → ".join(names)].append(event.self_cpu_time_total)
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:10]
    return [dict(where=name, per_step=len(us) / steps, ms_per_step=sum(us) / steps / 1e3) for name, us in longest]


def around(event: FunctionEvent) -> list[str]:
    """The names of the functions around an event, outermost first, and its own."""
    return [*(around(event.cpu_parent) if event.cpu_parent else []), event.name]


def ceilings(tier: str, device: torch.device) -> dict:
    """What this machine reaches on a large GEMM in the tier's arithmetic, after seconds of it, and on a large copy."""
    cuda = device.type == "cuda"
    side, dtype, parts = 8192 if cuda else 1024, precision.TIERS[tier].dtype, 1
    if tier == "exact":
        dtype, parts = torch.float16, 3  # high·high, high·low and low·high
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    out, seconds = torch.empty_like(a), (1.5, 1.0) if cuda else (0.1, 0.1)
    gemm = measure.time_steps(measure.repeated(lambda: torch.mm(a, b, out=out)), device, *seconds)
    size = 1 << 30 if cuda else 1 << 26
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    copy = measure.time_steps(measure.repeated(lambda: target.copy_(source)), device, load=0.0, window=0.05)
    tflops, tb_s = 2 * side**3 / parts / gemm["ms"] / 1e9, 2 * size / copy["ms"] / 1e9
    return dict(gemm_tflops=tflops, gemm=f"{side}³ {tier}", copy_tb_s=tb_s)


def rates(result: dict, shape: work.Shape, value_bytes: int, ceiling: dict) -> None:
    """Add to each kind of a step the work that it must do, and how fast it was done."""
    flops = {"GEMM": work.gemm_flops(shape), "attention": work.attention_flops(shape)}
    for kind, ms in result["kinds"].items():
        row = result["kinds"][kind] = dict(ms=ms, share=ms / result["window_ms"])
        if kind in flops and ms:
            row |= dict(tflop=flops[kind] / 1e12, tflops=flops[kind] / ms / 1e9)
            row["of_ceiling"] = row["tflops"] / ceiling["gemm_tflops"]
        elif kind == OTHER and ms:
            size = work.adaln_bytes(shape, value_bytes)
            row |= dict(gb=size / 1e9, gb_s=size / ms / 1e6, of_ceiling=size / ms / 1e9 / ceiling["copy_tb_s"])
    result["floor_ms"] = work.floor_ms(shape, value_bytes, ceiling["gemm_tflops"], ceiling["copy_tb_s"])


def decoding_ms(args: Namespace, device: torch.device) -> float:
    """Milliseconds to decode a picture in the arithmetic that goes with `args`."""
    decoder, side = measure.decoder_of(args, device), args.image_size // 8
    if not args.baseline:
        float32 = precision.float32_decoder(args.precision, device)
        decoder = vae.CheckedDecoder(decoder, precision.decoder_precision("auto", args.precision, device), float32)
    latents = torch.randn(1, 4, side, side, device=device)
    loop = measure.repeated(lambda: vae.decode(decoder, latents))
    return measure.time_steps(loop, device, args.load / 10, args.window / 10)["ms"]


def driver() -> str:
    """The GPU driver's version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def run(args: Namespace, device: torch.device) -> dict:
    """The record of a profile; its trace goes beside --output and into --tensorboard."""
    precision.apply_precision(args.precision, device)
    model = measure.model_of(args, device)
    if args.baseline:
        loop = measure.sampling(model, args, device, upstream_loop, UploadingDiffusion)
    else:
        loop = measure.sampling(measure.build(model, args.precision, device), args, device)
    timed = measure.time_steps(loop, device, args.load, args.window)
    ceiling = ceilings(args.precision, device)
    profiler = record(loop, args.steps, device)
    keep_trace(profiler, args)
    result = analyse(profiler.events(), args.steps)
    shape = work.Shape.of(model, 2 * args.pictures)
    rates(result, shape, precision.TIERS[args.precision].dtype.itemsize, ceiling)
    return dict(
        kind="profile",
        **measure.provenance(device, args.commit),
        driver=driver() if device.type == "cuda" else None,
        threads=torch.get_num_threads(),
        model=args.model,
        weights=Path(args.ckpt).name if args.ckpt else "random, seed 0",
        image_size=args.image_size,
        pictures=args.pictures,
        batch_rows=shape.batch_rows,
        tier=args.precision,
        baseline=args.baseline,
        num_sampling_steps=SamplingOptions.num_sampling_steps,
        shape=vars(shape),
        timed=timed,
        ceilings=ceiling,
        decoding_ms=decoding_ms(args, device),
        **result,
    )


#################################################################################
#                               What is printed                                 #
#################################################################################


def functions(title: str, rows: list[dict]) -> list[str]:
    lines = [f"{title:74}{'calls':>7}{'total ms':>11}{'average ms':>12}"]
    for row in rows:
        lines.append(f"  {clip(row['name']):72}{row['calls']:7}{row['total_ms']:11.3f}{row['average_ms']:12.4f}")
    return [*lines, ""]


def kind_line(kind: str, row: dict) -> str:
    speed = f"{row['tflops']:.3g} TFLOP/s" if "tflops" in row else f"{row['gb_s']:.4g} GB/s" if "gb_s" in row else ""
    ceiling = f"  {row['of_ceiling']:.0%}" if "of_ceiling" in row else ""
    return f"  {kind:24}{row['ms']:12.3f}{row['share']:8.1%}   {speed}{ceiling}"


def describe(record: dict) -> list[str]:
    """The lines that a profile prints."""
    timed, ceiling, steps = record["timed"], record["ceilings"], record["num_sampling_steps"]
    here = f"CPU, {record['threads']} threads, no GPU here: times by operator, nothing about kernels or idle"
    about = "upstream's arithmetic and its host→device copies" if record["baseline"] else "as sample.py runs it"
    lines = [
        " · ".join([record["model"], f"{record['image_size']} px, {record['batch_rows']} batch rows", record["tier"]]),
        f"{about} · {record['gpu'] or here}",
        f"{timed['ms']:.2f} ms a step [{timed['p10']:.2f}, {timed['p90']:.2f}]; profiled {record['window_ms']:.2f}; "
        f"floor {record['floor_ms']:.2f} ({ceiling['gemm']} GEMM {ceiling['gemm_tflops']:.3g} TFLOP/s, copy "
        f"{ceiling['copy_tb_s']:.3g} TB/s, both measured here)",
        "",
    ]
    if "kernels" in record:
        lines += functions(f"Ten most expensive kernels, {record['steps']} steps", record["kernels"])
    lines += functions(f"Ten most expensive host functions, own time, {record['steps']} steps", record["host"])
    lines += [f"Where time goes, a step{'ms':>15}{'share':>8}   achieved, of the ceiling"]
    lines += [kind_line(kind, row) for kind, row in record["kinds"].items()]
    sampling, decoding = steps * timed["ms"] / 1e3, record["pictures"] * record["decoding_ms"] / 1e3
    lines += [
        f"The job: {steps} steps {sampling:.2f} s, {record['pictures']} pictures decoded by the VAE {decoding:.2f} s"
    ]
    if record["gpu"] and not record["waits"]:
        lines += ["", "The host never waits for the GPU in these steps."]
    elif record["gpu"]:
        times, ms = (sum(wait[key] for wait in record["waits"]) for key in ("per_step", "ms_per_step"))
        lines += [
            "",
            f"The host waits for the GPU {times:.1f} times a step, {ms:.2f} ms, while the queue of kernels drains.",
            f"The copies between host and GPU themselves take {record['host_copies_ms']:.3f} ms a step.",
        ]
        lines += [
            f"  {one['ms_per_step']:9.3f} ms, {one['per_step']:.1f} × a step: {one['where']}" for one in record["waits"]
        ]
    return lines


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    measure.add_arguments(parser)
    parser.add_argument("--vae", help="decoder: ema, mse or a folder (default: random weights; the demo's own)")
    parser.add_argument(
        "--precision", choices=tuple(precision.TIERS), help="default: sample.py's; --baseline: upstream's"
    )
    parser.add_argument("--baseline", action="store_true", help="upstream's arithmetic and host→device copies instead")
    parser.add_argument("--steps", type=positive, default=3, help="steps in the trace, after the warm-up")
    parser.add_argument("--tensorboard", metavar="DIR", help="also leave the trace where TensorBoard's profiler looks")
    args = parser.parse_args()
    with user_errors(parser):
        if args.output and Path(args.output).suffix != ".json":
            raise UsageError(f"--output {args.output}: must end in .json")
        if args.tensorboard:
            check_writable(Path(args.tensorboard) / "trace", "--tensorboard")
        if args.steps > MOST_STEPS:
            raise UsageError(f"--steps {args.steps}: no viewer opens such a trace; use {MOST_STEPS} or fewer")
        device = measure.prepare(args)
        upstream = "tf32" if precision.supports("tf32", device) else "fp32"
        args.precision = args.precision or (upstream if args.baseline else precision.default_tier(device))
        if args.baseline and args.precision not in ("fp32", "tf32"):
            raise UsageError(f"--precision {args.precision}: upstream samples in fp32 or tf32; choose one of these")
        result = run(args, device)
        print(*describe(result), sep="\n")
        measure.write(args.output, result)


if __name__ == "__main__":
    main()
