"""Profile sampling steps and read the trace: see scripts/profile.py.

A trace is read as torch.profiler writes it (Chrome's format), so that what the tables say can be looked up in the viewer. Kinds of GPU work
are told by the kernels' names; idle is the window less the union of what ran. A host that waits is shown as waiting, with the operator
that made it wait: the time inside such a call is the GPU's queue draining, not the call's own work.
"""

import bisect
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

import models
from accel import engine, precision, vae, work
from accel.options import (
    OneLineParser,
    SamplingOptions,
    UsageError,
    check_writable,
    partial_file,
    positive,
    user_errors,
)
from diffusion import create_diffusion
from diffusion.respace import SpacedDiffusion
from models import DiT_models
from scripts.benchmark import Enough, build, copy_bandwidth, git, network_of, random_decoder, seconds

TRACE_LIMIT = 200e6  # bytes of JSON that viewers still open
WAIT, WARMUP = 1, 2  # steps before those that are recorded
STRETCH = 0.5  # seconds of steps that are timed as one
DRAIN = "profile: drain the queue"  # this script's own waits, which are no finding

#################################################################################
#                                Reading a trace                                #
#################################################################################

# The first kind whose pattern a kernel's name contains. Attention before products: its kernels are named after both.
KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|softmax|mha_fwd"),
    ("communication", r"nccl"),
    ("copies", r"^Mem(cpy|set)|CatArray|direct_copy|copy_kernel|copy_device|FillFunctor"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_linear|xmma|wgmma|conv|winograd|implicit"),
)
OTHER = "norm/elementwise"
# The same for operators, where there are no kernels to go by (CPU).
OPERATORS = (
    ("attention", r"attention|softmax"),
    ("GEMM", r"addmm|::mm|bmm|linear|matmul|conv"),
    ("copies", r"copy|::to$|::cat$|clone|contiguous|::fill|::zero"),
)
WAITS = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize|^cudaMemcpy(2D)?$|^cudaMemcpy(2D)?Async")
STAGED = (
    50  # microseconds: an asynchronous copy from or to the host that takes it longer than this has waited for the GPU
)


def kind_of(name, table=KINDS):
    return next((kind for kind, pattern in table if re.search(pattern, name, re.I)), OTHER)


def load_trace(path):
    """The events of a trace that torch.profiler wrote, .json or .json.gz. Raises UsageError."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as file:
            return json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UsageError(f"{path}: not a trace of torch.profiler ({error})") from None


def union(intervals):
    """Length of the union of (start, end)."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def by_total(rows, count):
    """name → durations, as the `count` most expensive: name, calls, total and average in ms."""
    table = [
        dict(name=name, calls=len(times), total_ms=sum(times) / 1e3, average_ms=sum(times) / len(times) / 1e3)
        for name, times in rows.items()
    ]
    return sorted(table, key=lambda row: -row["total_ms"])[:count]


def self_times(events):
    """Each host event with its own time, less what runs inside it, and the names of the operators around it, outermost first."""
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


def analyse(events, steps):
    """Times by kind, the most expensive functions and the host's waits, of a trace whose first `steps` ProfilerStep ranges are denoising
    steps and whose next one, if there is one, decodes pictures. Milliseconds; `kinds` are a step's."""
    events = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")
    )
    if len(ranges) < steps:
        raise UsageError(f"the trace holds {len(ranges)} steps, not {steps}; profile again")
    begin, end = ranges[0][0], ranges[steps - 1][1]
    decoding = ranges[steps] if len(ranges) > steps else None
    drains = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation" and e["name"] == DRAIN
    )

    def draining(event):
        index = bisect.bisect(drains, (event["ts"], float("inf"))) - 1
        return index >= 0 and event["ts"] < drains[index][1]

    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= begin]
    on_steps = [e for e in device if e["ts"] < (decoding[0] if decoding else float("inf"))]
    host = list(
        self_times(
            [
                e
                for e in events
                if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver") and e["ts"] >= begin and not draining(e)
            ]
        )
    )
    in_steps = [one for one in host if one[0]["ts"] < end]
    result = dict(steps=steps, window_ms=(end - begin) / steps / 1e3)

    # A copy within the device is queued like a kernel, however long the host takes to do it.
    queued = {e.get("args", {}).get("correlation") for e in device if e["name"].startswith("Memcpy DtoD")} - {None}

    def waiting(event, own):
        if event["cat"] == "cpu_op" or not WAITS.search(event["name"]):
            return False
        return "Async" not in event["name"] or own > STAGED and event.get("args", {}).get("correlation") not in queued

    functions, waits = defaultdict(list), defaultdict(list)
    for event, own, outer in in_steps:
        wait = waiting(event, own)
        functions[f"{event['name']} (waiting)" if wait else event["name"]].append(own)
        if wait:
            waits[" → ".join([*outer, event["name"]])].append(own)
    result["host"] = by_total(functions, 10)
    result["waits"] = [
        dict(where=row["name"], per_step=row["calls"] / steps, ms_per_step=row["total_ms"] / steps)
        for row in by_total(waits, 10)
    ]

    times = defaultdict(float)
    if device:
        kernels = defaultdict(list)
        for event in on_steps:
            times[kind_of(event["name"])] += event["dur"]
            kernels[event["name"]].append(event["dur"])
        result["kernels"] = by_total(kernels, 10)
        result["launches_per_step"] = len(on_steps) / steps
        result["host_copies_ms"] = (
            sum(e["dur"] for e in on_steps if re.match(r"Memcpy (HtoD|DtoH)", e["name"])) / steps / 1e3
        )
        times["idle"] = end - begin - union([(e["ts"], e["ts"] + e["dur"]) for e in on_steps])
    else:
        for event, own, _ in in_steps:
            times[kind_of(event["name"], OPERATORS)] += own
        times["host, outside operators"] = max(0.0, end - begin - sum(times.values()))
    result["kinds"] = {kind: time / steps / 1e3 for kind, time in sorted(times.items(), key=lambda item: -item[1])}
    if decoding:
        busy = union([(e["ts"], e["ts"] + e["dur"]) for e in device if e["ts"] >= decoding[0]])
        result["decode"] = dict(window_ms=(decoding[1] - decoding[0]) / 1e3, busy_ms=busy / 1e3 if device else None)
    return result


#################################################################################
#                           What is run and recorded                            #
#################################################################################


class UploadingDiffusion(SpacedDiffusion):
    """The process with upstream's traffic: every table is copied from the host whenever it is looked up, eight times a step, and so is
    the map of timesteps. Same numbers."""

    def _at(self, name, t, x):
        import numpy as np

        table = np.log(self.betas) if name == "log_betas" else getattr(self, name)
        return torch.from_numpy(table).to(t.device)[t.long()].float().view(-1, *[1] * (x.ndim - 1))

    def _posterior_mean(self, x_start, x_t, t):
        (
            self._at("posterior_variance", t, x_t),
            self._at("posterior_log_variance_clipped", t, x_t),
        )  # looked up there, and not used
        return super()._posterior_mean(x_start, x_t, t)

    def original_timesteps(self, t):
        return torch.tensor(self.timestep_map, device=t.device)[t]


@torch.inference_mode()
def upstream_loop(model, diffusion, z, labels, cfg_scale, null_label, progress):
    """The loop as upstream has it: 2n rows updated, timesteps, tables and frequencies sent from the host at every step."""
    x = torch.cat([z, z])
    y = torch.cat([labels, torch.full_like(labels, null_label)])
    frequencies, models._frequencies = models._frequencies, models._frequencies.__wrapped__
    try:
        for index in reversed(range(diffusion.num_timesteps)):
            t = torch.tensor([index] * len(x), device=z.device)
            x = diffusion.p_sample(
                model.forward_with_cfg, x, t, clip_denoised=False, model_kwargs=dict(y=y, cfg_scale=cfg_scale)
            )["sample"]
            progress()
    finally:
        models._frequencies = frequencies
    return x


def until(loop, progress):
    """Run `loop(progress)` again and again until `progress` has had enough."""
    try:
        while True:
            loop(progress)
    except Enough:
        pass


def time_steps(loop, device, load, repeats=5):
    """Milliseconds a step without the profiler: after `load` seconds, the median and spread of `repeats` stretches of steps."""
    started, count, stretch, times, mark = time.perf_counter(), 0, None, [], 0.0

    def progress():
        nonlocal count, stretch, mark
        count += 1
        if stretch is None:
            if count in (2, 4):
                engine.synchronize(device)
                now = time.perf_counter()
                if count == 4:
                    stretch = max(1, min(50, round(STRETCH / ((now - mark) / 2))))
                    count = 0
                mark = now
        elif count == stretch:
            engine.synchronize(device)
            now, count = time.perf_counter(), 0
            if now - started > load:
                times.append(1e3 * (now - mark) / stretch)
            mark = now
            if len(times) == repeats + 1:  # the first may have begun before the load was over
                raise Enough

    until(loop, progress)
    times = sorted(times[1:])
    return dict(ms=statistics.median(times), least=times[0], most=times[-1], stretches=repeats, steps_each=stretch)


def record(loop, decode, steps, device, handler):
    """Profile `steps` warm steps of `loop`, and `decode()` after them. `handler(profiler)` writes the trace."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the second one crashes; torch's compiler does the same for its graphs.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    total, done = WAIT + WARMUP + steps, 0

    def progress():
        nonlocal done
        done += 1
        if done in (WAIT + WARMUP, total):
            with record_function(DRAIN):
                engine.synchronize(device)
        profiler.step()
        if done == total:
            raise Enough

    with profile(
        activities=activities,
        record_shapes=True,
        profile_memory=True,
        on_trace_ready=handler,
        acc_events=True,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=steps + (decode is not None), repeat=1),
    ) as profiler:
        until(loop, progress)
        if decode is not None:
            decode()
            with record_function(DRAIN):
                engine.synchronize(device)
            profiler.step()


def ceilings(tier, device):
    """What this machine reaches on a large product in the tier's arithmetic, after seconds of it, and on a large copy: TFLOP/s, TB/s."""
    side, dtype = (8192, precision.HALF.get(tier, torch.float32)) if device.type == "cuda" else (1024, torch.float32)
    products = 1
    if tier == "exact" and device.type == "cuda":
        dtype, products = torch.float16, 3  # each product is three of float16 terms
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    rates, started = [], time.perf_counter()
    while time.perf_counter() - started < (2.5 if device.type == "cuda" else 0.2) or len(rates) < 4:
        engine.synchronize(device)
        begin = time.perf_counter()
        for _ in range(5):
            torch.mm(a, b, out=out)
        engine.synchronize(device)
        rates.append(5 * 2 * side**3 / products / (time.perf_counter() - begin) / 1e12)
    late = rates[len(rates) // 2 :]
    return dict(gemm_tflops=statistics.median(late), gemm=f"{side}³ {tier}", copy_tb_s=copy_rate(device))


def copy_rate(device):
    """TB/s, bytes read and written."""
    if device.type == "cuda":
        return copy_bandwidth(device) / 1e12
    source, target = torch.ones(2, 64 << 20, dtype=torch.uint8)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return 2 * source.numel() / statistics.median(times) / 1e12


#################################################################################
#                                     Report                                    #
#################################################################################


def rates(result, shape, narrow, ceiling):
    """Adds to each kind of a step the work that it must do, and how fast it was done."""
    need = {"GEMM": work.gemm_flops(shape), "attention": work.attention_flops(shape)}
    table = {}
    for kind, ms in result["kinds"].items():
        row = dict(ms=ms, share=ms / result["window_ms"])
        if kind in need and ms:
            row |= dict(tflop=need[kind] / 1e12, tflops=need[kind] / ms / 1e9)
            row["of_ceiling"] = row["tflops"] / ceiling["gemm_tflops"]
        elif kind == OTHER and ms:
            needed = work.adaln_bytes(shape, narrow)
            row |= dict(gb=needed / 1e9, gb_s=needed / ms / 1e6)
            row["of_ceiling"] = row["gb_s"] / 1e3 / ceiling["copy_tb_s"]
        table[kind] = row
    result["kinds"] = table
    result["floor_ms"] = work.floor_ms(shape, narrow, ceiling["gemm_tflops"], ceiling["copy_tb_s"])


def job(record):
    """Seconds of a whole picture job by kind: all steps, then the decoder on every picture."""
    parts = {kind: row["ms"] * record["num_sampling_steps"] / 1e3 for kind, row in record["kinds"].items()}
    if "decode" in record:
        decode = record["decode"]
        busy = decode["busy_ms"] if decode["busy_ms"] is not None else decode["window_ms"]
        parts["VAE"] = busy * record["pictures"] / 1e3
        if "idle" in parts:
            parts["idle"] += (decode["window_ms"] - busy) * record["pictures"] / 1e3
    return parts


def clip(name, width=72):
    name = re.sub(r"void |at::native::|\(anonymous namespace\)::", "", name)
    return name if len(name) <= width else name[: width - 1] + "…"


def function_lines(title, rows):
    return [
        f"{title:74}{'calls':>7}{'total ms':>11}{'average ms':>12}",
        *(f"  {clip(row['name']):72}{row['calls']:7}{row['total_ms']:11.3f}{row['average_ms']:12.4f}" for row in rows),
    ]


def speed(row):
    if "tflops" in row:
        return f"{row['tflops']:8.3g} TFLOP/s  {row['of_ceiling']:5.0%} of a large product's"
    if "gb_s" in row:
        return f"{row['gb_s']:8.4g} GB/s     {row['of_ceiling']:5.0%} of a large copy's"
    return ""


def describe(record):
    """The lines that a profile prints."""
    where = (
        record["gpu"]
        or f"CPU, {record['threads']} threads (no GPU here: times by operator, nothing about kernels or idle)"
    )
    about = "upstream's arithmetic and its host→device copies" if record["baseline"] else "as sample.py runs it"
    unit = "GPU time" if record["gpu"] else "time"
    lines = [
        f"{record['model']} · {record['image_size']} px · {record['batch_rows']} rows · {record['tier']} · {about} · {where} · torch {record['torch']}",
        f"{record['timed']['ms']:.2f} ms a step [{record['timed']['least']:.2f}, {record['timed']['most']:.2f}]; under the profiler "
        f"{record['window_ms']:.2f}; floor {record['floor_ms']:.2f} ({record['ceilings']['gemm']} product "
        f"{record['ceilings']['gemm_tflops']:.3g} TFLOP/s, copy {record['ceilings']['copy_tb_s']:.3g} TB/s, both measured here)",
        "",
        *(
            function_lines(f"Ten most expensive kernels, {record['steps']} steps", record["kernels"]) + [""]
            if "kernels" in record
            else []
        ),
        *function_lines(f"Ten most expensive host functions, own time, {record['steps']} steps", record["host"]),
        "",
        f"Where {unit} goes, a step{'ms':>12}{'share':>8}   work that must be done / time",
    ]
    lines += [
        f"  {kind:24}{row['ms']:12.3f}{row['share']:8.1%}   {speed(row)}" for kind, row in record["kinds"].items()
    ]
    parts = job(record)
    total = sum(parts.values())
    lines += [
        f"The job, {record['num_sampling_steps']} steps and {record['pictures']} pictures decoded: {total:.2f} s = "
        + " + ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(parts.items(), key=lambda item: -item[1]))
    ]
    lines += ["", *wait_lines(record)]
    return lines


def wait_lines(record):
    if not record["gpu"]:
        return []
    if not record["waits"]:
        return ["The host never waits for the GPU in these steps."]
    lines = [
        f"WARNING: the host waits for the GPU {sum(w['per_step'] for w in record['waits']):.1f} times a step, "
        f"{sum(w['ms_per_step'] for w in record['waits']):.2f} ms of it. This is the queue of kernels draining, not the named operators' work: "
        f"the copies between host and GPU themselves take {record['host_copies_ms']:.3f} ms a step."
    ]
    return lines + [
        f"  {wait['ms_per_step']:9.3f} ms, {wait['per_step']:.1f} × a step: {wait['where']}" for wait in record["waits"]
    ]


def compare(paths):
    """Two profiles side by side. Raises UsageError for a file that is none."""
    records = []
    for path in paths:
        try:
            record = json.loads(Path(path).read_text())
            record["kinds"], record["timed"], record["waits"]  # noqa: B018
        except OSError as error:
            raise UsageError(
                f"--compare {path}: {error.strerror}; make it with scripts/profile.py --output {path}"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"--compare {path}: not a file of scripts/profile.py --output") from None
        records.append(record)
    a, b = records
    names = [Path(path).stem for path in paths]
    lines = [f"{'':26}{names[0][:24]:>26}{names[1][:24]:>26}{'ratio':>9}"]
    for what in ("gpu", "torch", "model", "image_size", "batch_rows", "tier", "commit"):
        lines.append(
            f"{what:26}{str(a[what])[:24]:>26}{str(b[what])[:24]:>26}"
            + "   differ" * (a[what] != b[what] and what not in ("tier", "commit"))
        )

    def row(name, first, second):
        ratio = f"{first / second:8.2f}×" if first and second else ""
        return f"{name:26}{first:>26.3f}{second:>26.3f}{ratio:>9}"

    lines += [row("ms a step", a["timed"]["ms"], b["timed"]["ms"]), row("floor, ms", a["floor_ms"], b["floor_ms"])]
    for kind in dict.fromkeys([*a["kinds"], *b["kinds"]]):
        lines.append(row("  " + kind, *(r["kinds"].get(kind, {}).get("ms", 0.0) for r in records)))
    lines.append(row("host waits, ms", *(sum(w["ms_per_step"] for w in r["waits"]) for r in records)))
    lines.append(row("host waits, times", *(sum(w["per_step"] for w in r["waits"]) for r in records)))
    if "launches_per_step" in a and "launches_per_step" in b:
        lines.append(row("kernels and copies", a["launches_per_step"], b["launches_per_step"]))
    return lines


#################################################################################
#                                    Command                                    #
#################################################################################


def driver():
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.stdout.split("\n")[0]


def prepare(args, device):
    """→ loop(progress), decode(), tier, the network's shape and options."""
    tier = args.precision or (
        "tf32"
        if args.baseline and precision.supports("tf32", device)
        else "fp32"
        if args.baseline
        else precision.default_tier(device)
    )
    if args.baseline and tier not in ("fp32", "tf32"):
        raise UsageError(
            f"--precision {tier}: upstream samples in fp32 or tf32; leave out --baseline or choose one of these"
        )
    options = SamplingOptions(
        model=args.model,
        image_size=args.image_size,
        num_classes=args.num_classes,
        ckpt=args.ckpt,
        vae=args.vae,
        device=str(device),
        precision=tier,
        labels=(0,),
        num_sampling_steps=args.num_sampling_steps,
    ).resolve()
    engine.choose_precision(options, device)
    _, model = network_of(args, device)
    shape = work.Shape.of(model, 2 * args.pictures)
    generator = torch.Generator(device).manual_seed(0)
    z = torch.randn(args.pictures, 4, options.latent_size, options.latent_size, generator=generator, device=device)
    labels = torch.arange(args.pictures, device=device) % options.num_classes
    diffusion = create_diffusion(str(options.num_sampling_steps))
    if args.baseline:
        diffusion.__class__ = UploadingDiffusion

        def loop(progress):
            upstream_loop(model, diffusion, z, labels, options.cfg_scale, options.num_classes, progress)
    else:
        network = build(model, tier, fast_switches(tier), device)

        def loop(progress):
            engine.denoise(network, diffusion, z, labels, options.cfg_scale, options.num_classes, progress=progress)

    decode = None
    if not args.no_decoder:
        decoder = (
            random_decoder(device)
            if args.vae is None and options.vae == "ema"
            else vae.load_vae(vae.find_vae(options.vae), device)
        )
        if not args.baseline:
            decoder = vae.CheckedDecoder(
                decoder, precision.decoder_precision("auto", tier, device), precision.float32_decoder(tier, device)
            )

        def decode():
            vae.decode(decoder, z[:1])

    return loop, decode, tier, shape, options


def fast_switches(tier):
    """What sample.py gives a tier: the accelerated network for the half tiers, models.DiT for the others."""
    from accel.fast import Optimisations

    return Optimisations() if tier in precision.FAST else None


def run(args, device):
    loop, decode, tier, shape, options = prepare(args, device)
    narrow = 2 if tier in precision.HALF else 4
    if decode is not None:
        decode()  # its first run chooses algorithms
    with tempfile.TemporaryDirectory() as work_folder:
        # One step tells how large the trace of all will be, before anyone waits for it.
        probe = Path(work_folder) / "probe.json"
        record(loop, None, 1, device, lambda profiler: profiler.export_chrome_trace(str(probe)))
        size = probe.stat().st_size
        if size * (args.steps + 1) > TRACE_LIMIT:
            raise UsageError(
                f"--steps {args.steps}: the trace would have about {size * (args.steps + 1) / 1e6:.0f} MB, which no viewer opens "
                f"({TRACE_LIMIT / 1e6:.0f} MB is the limit); use --steps {max(1, int(TRACE_LIMIT / size) - 1)} or fewer"
            )
        timed = time_steps(loop, device, args.load)
        ceiling = ceilings(tier, device)
        folder = args.tensorboard or work_folder
        record(loop, decode, args.steps, device, tensorboard_trace_handler(str(folder), use_gzip=True))
        trace = max(Path(folder).glob("*.pt.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        result = analyse(load_trace(trace), args.steps)
        if args.output:
            beside = Path(args.output).with_suffix(".trace.json.gz")
            with partial_file(beside) as partial:
                partial.write_bytes(trace.read_bytes())
    rates(result, shape, narrow, ceiling)
    return dict(
        kind="profile",
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        threads=torch.get_num_threads(),
        driver=driver() if device.type == "cuda" else None,
        torch=torch.__version__,
        commit=args.commit,
        command=" ".join(["python", *sys.argv]),
        model=args.model,
        weights=options.ckpt and Path(options.ckpt).name or "random, seed 0",
        image_size=options.image_size,
        pictures=args.pictures,
        batch_rows=shape.batch_rows,
        tier=tier,
        baseline=args.baseline,
        num_sampling_steps=options.num_sampling_steps,
        shape=vars(shape),
        timed=timed,
        ceilings=ceiling,
        **result,
    )


def main():
    parser = OneLineParser(prog="profile.py", description="Where the time of sampling goes, by kind of work.")
    parser.add_argument("--model", default="DiT-XL/2", choices=DiT_models, help="network to profile")
    parser.add_argument("--ckpt", help="its weights (default: random, not zero; the demo's own)")
    parser.add_argument(
        "--vae", help="decoder: ema, mse or a folder (default: random weights of the same size; the demo's own)"
    )
    parser.add_argument("--no-decoder", action="store_true", help="leave out the decoder")
    parser.add_argument("--image-size", type=int, help="side of a picture in pixels")
    parser.add_argument("--num-classes", type=int, help="number of classes")
    parser.add_argument(
        "--pictures", type=positive, default=8, help="pictures at a time; with guidance twice as many rows"
    )
    parser.add_argument(
        "--num-sampling-steps",
        type=positive,
        default=SamplingOptions.num_sampling_steps,
        help="steps of the job that is extrapolated to",
    )
    parser.add_argument(
        "--precision", choices=tuple(precision.TIERS), help="tier (default: sample.py's; with --baseline upstream's)"
    )
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="upstream's arithmetic and its host→device copies, instead of the fast path",
    )
    parser.add_argument("--steps", type=positive, default=3, help="steps in the trace, after the warm-up")
    parser.add_argument("--load", type=seconds, default=4.0, help="seconds of steps before those that are timed")
    parser.add_argument("--tensorboard", metavar="DIR", help="also leave the trace where TensorBoard's profiler looks")
    parser.add_argument(
        "--output", metavar="FILE.json", help="write the figures; the trace goes beside it, as FILE.trace.json.gz"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="put two profiles side by side; runs nothing"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument(
        "--commit",
        default=git("describe", "--always", "--dirty"),
        help="what to record as the commit, where git is not at hand",
    )
    args = parser.parse_args()
    with user_errors(parser):
        if args.compare:
            print(*compare(args.compare), sep="\n")
            return
        if args.output:
            if Path(args.output).suffix != ".json":
                raise UsageError(f"--output {args.output}: must end in .json")
            check_writable(args.output)
        if args.tensorboard:
            check_writable(Path(args.tensorboard) / "trace", "--tensorboard")
        result = run(args, engine.choose_device(args))
        print(*describe(result), sep="\n")
        if args.output:
            with partial_file(args.output) as partial:
                partial.write_text(json.dumps(result, indent=1) + "\n")
