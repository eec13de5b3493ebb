"""Where the time of sampling goes: warm steps under torch.profiler, by kind of work, against what this machine can do.

    python bench/profile_step.py --output output/fast.json            # as sample.py runs it
    python bench/profile_step.py --baseline --output output/upstream.json
    python bench/profile_step.py --compare output/upstream.json output/fast.json

Beside the figures lies a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. bench/read_trace.py reads it.
"""

if not __package__:
    __import__("_as_module")

import json
import os
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

import models
from accel import precision, vae
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.options import SamplingOptions, check_writable, positive
from bench import measure, work
from bench.read_trace import DRAIN, OTHER, analyse, clip, load
from diffusion.respace import SpacedDiffusion

MOST_STEPS = 50  # whose trace viewers still open
WAIT, WARMUP = 1, 2  # steps before those that are recorded

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


def record(loop: Callable, decode: Callable, steps: int, device: torch.device, handler: Callable) -> None:
    """Profile `steps` warm steps of `loop`, and `decode()` after them. `handler(profiler)` writes the trace."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the second one crashes.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    total, done = WAIT + WARMUP + steps, 0

    def drain():
        with record_function(DRAIN):
            measure.synchronize(device)

    def on_step(*_):
        nonlocal done
        done += 1
        if done in (WAIT + WARMUP, total):
            drain()
        profiler.step()
        if done == total:
            raise measure.Enough

    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        record_shapes=True,
        profile_memory=True,
        on_trace_ready=handler,
        acc_events=True,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps + 1, repeat=1),
    ) as profiler:
        measure.run_until(loop, on_step)
        decode()
        drain()
        profiler.step()


def copy_tb_s(device: torch.device) -> float:
    """TB/s read and written by a large copy on the device."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(10):
        measure.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        measure.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times) / 1e12


def ceilings(tier: str, device: torch.device) -> dict:
    """What this machine reaches on a large GEMM in the tier's arithmetic, after seconds of it, and on a large copy."""
    cuda = device.type == "cuda"
    side, dtype, parts = 8192 if cuda else 1024, precision.TIERS[tier].dtype, 1
    if tier == "exact":
        dtype, parts = torch.float16, 3  # high·high, high·low and low·high
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    out, rates, started = torch.empty_like(a), [], time.perf_counter()
    while time.perf_counter() - started < (2.5 if cuda else 0.2) or len(rates) < 4:
        measure.synchronize(device)
        begin = time.perf_counter()
        for _ in range(5):
            torch.mm(a, b, out=out)
        measure.synchronize(device)
        rates.append(5 * 2 * side**3 / parts / (time.perf_counter() - begin) / 1e12)
    late = statistics.median(rates[len(rates) // 2 :])
    return dict(gemm_tflops=late, gemm=f"{side}³ {tier}", copy_tb_s=copy_tb_s(device))


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


def decoding(args: Namespace, device: torch.device) -> Callable:
    """Decodes a picture in the arithmetic that goes with `args`; the first run, which chooses algorithms, is over."""
    decoder, side = measure.decoder_of(args, device), args.image_size // 8
    if not args.baseline:
        float32 = precision.float32_decoder(args.precision, device)
        decoder = vae.CheckedDecoder(decoder, precision.decoder_precision("auto", args.precision, device), float32)
    latents = torch.randn(1, 4, side, side, device=device)
    vae.decode(decoder, latents)
    return lambda: vae.decode(decoder, latents)


def run(args: Namespace, device: torch.device) -> dict:
    """The record of a profile; its trace goes beside --output and into --tensorboard."""
    precision.apply_precision(args.precision, device)
    model = measure.model_of(args, device)
    if args.baseline:
        loop = measure.sampling(model, args, device, upstream_loop, UploadingDiffusion)
    else:
        loop = measure.sampling(measure.build(model, args.precision, device), args, device)
    decode = decoding(args, device)
    with tempfile.TemporaryDirectory() as folder:
        timed = measure.time_steps(loop, device, args.load, args.window)
        ceiling = ceilings(args.precision, device)
        traces = Path(args.tensorboard or folder)
        record(loop, decode, args.steps, device, tensorboard_trace_handler(str(traces), use_gzip=True))
        trace = max(traces.glob("*.pt.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        result = analyse(load(trace), args.steps)
        if args.output:
            with atomic_write(Path(args.output).with_suffix(".trace.json.gz")) as file:
                file.write(trace.read_bytes())
    shape = work.Shape.of(model, 2 * args.pictures)
    rates(result, shape, precision.TIERS[args.precision].dtype.itemsize, ceiling)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (
        subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] if device.type == "cuda" else None
    )
    return dict(
        kind="profile",
        **measure.provenance(device, args.commit),
        driver=driver,
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


def describe(record: dict) -> list[str]:
    """The lines that a profile prints."""
    timed, ceiling = record["timed"], record["ceilings"]
    where = (
        record["gpu"]
        or f"CPU, {record['threads']} threads, no GPU here: times by operator, nothing about kernels or idle"
    )
    about = "upstream's arithmetic and its host→device copies" if record["baseline"] else "as sample.py runs it"
    lines = [
        " · ".join([record["model"], f"{record['image_size']} px, {record['batch_rows']} batch rows", record["tier"]]),
        f"{about} · {where}",
        f"{timed['ms']:.2f} ms a step [{timed['p10']:.2f}, {timed['p90']:.2f}]; profiled {record['window_ms']:.2f}; "
        f"floor {record['floor_ms']:.2f} ({ceiling['gemm']} GEMM {ceiling['gemm_tflops']:.3g} TFLOP/s, copy "
        f"{ceiling['copy_tb_s']:.3g} TB/s, both measured here)",
        "",
    ]
    if "kernels" in record:
        lines += functions(f"Ten most expensive kernels, {record['steps']} steps", record["kernels"])
    lines += functions(f"Ten most expensive host functions, own time, {record['steps']} steps", record["host"])
    lines += [f"Where time goes, a step{'ms':>15}{'share':>8}   achieved, of the ceiling"]
    for kind, row in record["kinds"].items():
        speed = (
            f"{row['tflops']:.3g} TFLOP/s" if "tflops" in row else f"{row['gb_s']:.4g} GB/s" if "gb_s" in row else ""
        )
        ceiling = f"  {row['of_ceiling']:.0%}" if "of_ceiling" in row else ""
        lines += [f"  {kind:24}{row['ms']:12.3f}{row['share']:8.1%}   {speed}{ceiling}"]
    job = {kind: row["ms"] * record["num_sampling_steps"] / 1e3 for kind, row in record["kinds"].items()}
    job["VAE"] = record["decode"]["window_ms"] * record["pictures"] / 1e3
    parts = " + ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(job.items(), key=lambda item: -item[1]))
    text = f"The job, {record['num_sampling_steps']} steps and {record['pictures']} pictures decoded"
    lines += [f"{text}: {sum(job.values()):.2f} s = {parts}"]
    if record["gpu"] and not record["waits"]:
        lines += ["", "The host never waits for the GPU in these steps."]
    elif record["gpu"]:
        times, ms = (sum(wait[key] for wait in record["waits"]) for key in ("per_step", "ms_per_step"))
        lines += [
            "",
            f"The host waits for the GPU {times:.1f} times a step, {ms:.2f} ms, while the queue of kernels drains.",
        ]
        lines += [f"The copies between host and GPU themselves take {record['host_copies_ms']:.3f} ms a step."]
        lines += [
            f"  {wait['ms_per_step']:9.3f} ms, {wait['per_step']:.1f} × a step: {wait['where']}"
            for wait in record["waits"]
        ]
    return lines


def compare(paths: list[str]) -> list[str]:
    """Two profiles side by side. Raises UsageError for a file that is none."""
    records = []
    for path in paths:
        try:
            records.append(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not JSON"
            raise UsageError(
                f"--compare {path}: {reason}; make it with bench/profile_step.py --output {path}"
            ) from None
        if not isinstance(records[-1], dict) or records[-1].get("kind") != "profile":
            raise UsageError(f"--compare {path}: not a file of bench/profile_step.py --output")
    lines = [f"{'':26}" + "".join(f"{Path(path).stem[:24]:>26}" for path in paths) + f"{'ratio':>9}"]
    for what in ("gpu", "torch", "model", "image_size", "batch_rows", "tier", "commit"):
        a, b = (str(record[what])[:24] for record in records)
        lines.append(f"{what:26}{a:>26}{b:>26}" + "   differ" * (a != b and what not in ("tier", "commit")))
    rows = {
        "ms a step": [record["timed"]["ms"] for record in records],
        "floor, ms": [record["floor_ms"] for record in records],
    }
    for kind in dict.fromkeys(kind for record in records for kind in record["kinds"]):
        rows[f"  {kind}"] = [record["kinds"].get(kind, {}).get("ms", 0.0) for record in records]
    for name, key in (("host waits, ms", "ms_per_step"), ("host waits, times", "per_step")):
        rows[name] = [sum(wait[key] for wait in record["waits"]) for record in records]
    rows["kernels and copies"] = [record.get("launches_per_step", 0.0) for record in records]
    for name, (a, b) in rows.items():
        lines.append(f"{name:26}{a:>26.3f}{b:>26.3f}" + (f"{a / b:8.2f}×" if a and b else ""))
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
    parser.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="two profiles side by side; runs nothing"
    )
    args = parser.parse_args()
    with user_errors(parser):
        if args.compare:
            print(*compare(args.compare), sep="\n")
            return
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
