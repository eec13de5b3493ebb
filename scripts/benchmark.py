"""The ladder: one optimisation after the other, each with its time, its error and its gate.

    python scripts/benchmark.py --image-size 512 --pictures 8 --compile max-autotune --output log/ladder.json
    python scripts/benchmark.py --model DiT-Demo/2 --gate 3
    python scripts/benchmark.py --only graph --vs compile,diffusers --output log/versus.json
    python scripts/benchmark.py --sweep-pictures 1 2 4 8 16 32 64 --sweep-sizes 256 512 1024 --output log/sweep.json
    python scripts/benchmark.py --contest fp32 fp16 --output log/contest.json
    python scripts/benchmark.py --decoder --output log/decoder.json
    torchrun --standalone --nproc_per_node=4 scripts/benchmark.py --parallel --gate --output log/parallel.json      # scripts/benchmark_parallel.py

Times are of denoising steps in the sampling loop that sample.py runs (guidance, update, noise draw included; no decoder): median, 10th and 90th
percentile, after --load seconds of the same steps, since a GPU under load runs slower than in a burst. Weights are random and not zero (a fresh
DiT outputs zeros) except the demo's. Errors are relative, ‖out − ref‖ / ‖ref‖, of one forward of the network against float64. The gate compares
250-step pictures of the demo with those of fp32, same noise: worst of all pictures. The contest's T runs from loading the model to the picture on
disk, sample.py in a process of its own. --decoder times decoding instead, of latents that are noise, one picture after the other as everywhere.
"""

if not __package__:
    __import__("_as_module")

import gc
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path

import torch

from accel import engine, precision, vae
from accel.decoder import SD_VAE_FT, Decoder
from accel.fast import CompiledDiT, FastDiT, Optimisations
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
from models import DiT_models

PLAIN = Optimisations(hoist=False, rows="torch", products="torch", ends="torch", graph=False)
# Rung → (tier, switches); each adds one to the rung before. Those without switches are models.DiT, upstream's arithmetic.
STEPS = (
    ("half products", {}),
    ("hoisted conditioning", dict(hoist=True)),
    ("row kernels", dict(rows="auto")),
    ("attention", dict(attention="auto")),
    ("GELU epilogue", dict(products="epilogue")),
    ("measured products", dict(products="auto")),
    ("embedding and update", dict(ends="auto")),
    ("CUDA graph", dict(graph=True)),
)


def ladder(device, tiers):
    """(name, tier, switches or None for models.DiT) of every rung that `device` can run."""
    for tier in ("fp32", "tf32"):
        if precision.supports(tier, device):
            yield tier, tier, None
    if precision.supports("exact", device):
        yield "exact", "exact", Optimisations()
    for tier in tiers:
        # What plain half precision gets from torch: flash where there is one.
        switches = replace(
            PLAIN, attention="flash" if device.type == "cpu" or precision.supports("bf16", device) else "efficient"
        )
        for name, change in STEPS:
            switches = replace(switches, **change)
            if device.type == "cuda" or name in ("half products", "hoisted conditioning"):
                yield f"{tier} + {name}", tier, switches


def random_state(model, seed=0):
    """A state dict of random, non-zero weights on `model`'s device: products keep a variance of about one."""
    generator = torch.Generator(model.pos_embed.device).manual_seed(seed)
    state = model.state_dict()
    for name, value in state.items():
        if name != "pos_embed":
            scale = value[0].numel() ** -0.5 if value.ndim > 1 else 0.1
            state[name] = torch.randn(value.shape, generator=generator, device=value.device) * scale
    return state


def build(model, tier, switches, device):
    """The network of a rung: `model` (models.DiT, float32) itself, or an accelerated twin of it."""
    if device.type == "cuda":
        precision.apply_precision(tier, device)
    if switches is None:
        return model
    return FastDiT(model.state_dict(), model.num_heads, precision.FAST[tier], device, switches)


class Enough(Exception):
    """Ends a sampling run from its progress callback."""


class Marks:
    """A sampling run's progress callback that notes when each step ends, on the device's own clock."""

    def __init__(self, device):
        self.cuda, self.marks = device.type == "cuda", []

    def __len__(self):
        return len(self.marks)

    def __call__(self):
        self.marks.append(torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter())
        if self.cuda:
            self.marks[-1].record()

    def milliseconds(self):
        """Of each step but the first; the device must be done with them."""
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def spread(times):
    """Median, 10th and 90th percentile, as the fields of a record."""
    times = sorted(times)
    return dict(ms=statistics.median(times), p10=times[len(times) // 10], p90=times[-1 - len(times) // 10])


def time_steps(network, args, device):
    """Milliseconds of single steps in engine.denoise, after `args.load` seconds of them."""
    diffusion = create_diffusion("250")
    side = args.image_size // 8
    z, labels = (
        torch.randn(args.pictures, 4, side, side, device=device),
        torch.arange(args.pictures, device=device) % args.num_classes,
    )
    marks, started = Marks(device), None

    def mark():
        nonlocal started
        marks()
        if marks.cuda and len(marks) > 4:
            marks.marks[
                -4
            ].synchronize()  # the host is at most a few steps ahead, so that the clock below counts work that was done
        started = started or time.perf_counter()
        if len(marks) > 1 and time.perf_counter() - started > args.load + args.window:
            raise Enough

    engine.denoise(
        network, diffusion, z, labels, args.cfg_scale, args.num_classes, steps=2
    )  # what only the first step does
    try:
        while True:
            engine.denoise(network, diffusion, z, labels, args.cfg_scale, args.num_classes, progress=mark)
    except Enough:
        pass
    engine.synchronize(device)
    total, kept = 0.0, []
    for one in reversed(marks.milliseconds()):  # the last `window` seconds
        total += one
        if total > 1e3 * args.window and kept:
            break
        kept.append(one)
    return dict(spread(kept), mean=statistics.fmean(kept), steps=len(kept))


class DiffusersDiT:
    """The same weights in diffusers' DiTTransformer2DModel, with the guidance of models.DiT. Its timestep frequencies are others (its shift is 1),
    so its output is not quite that of the published model."""

    def __init__(self, state, dtype, device):
        from diffusers import DiTTransformer2DModel

        from pretrained_models.download import to_diffusers
        from scripts.convert_checkpoint import config_of

        with torch.device(device):
            model = DiTTransformer2DModel(
                **{name: value for name, value in config_of(state).items() if not name.startswith("_")}
            )
        model.load_state_dict(to_diffusers(state))
        self.model, self.dtype = model.to(dtype).eval().requires_grad_(False), dtype

    @torch.no_grad()
    def forward(self, x, t, y):
        return self.model(x.to(self.dtype), timestep=t, class_labels=y).sample.to(x.dtype)

    def forward_with_cfg(self, x, t, y, cfg_scale):
        half = x[: len(x) // 2]
        out = self.forward(torch.cat([half, half]), t, y)
        cond, uncond = out[:, :3].chunk(2)
        guided = uncond + cfg_scale * (cond - uncond)
        return torch.cat([torch.cat([guided, guided]), out[:, 3:]], dim=1)


class Reference:
    """One forward in float64, and others' distance to it: two rows, a label and the null label, at three timesteps."""

    def __init__(self, model, args, device):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(2, 4, args.image_size // 8, args.image_size // 8, generator=generator).to(device)
        self.y = torch.tensor([1, args.num_classes], device=device)
        self.t = [torch.full((2,), t, device=device) for t in (980, 500, 20)]
        wide = FastDiT(model.state_dict(), model.num_heads, torch.float64, device, PLAIN)
        self.out = [wide(self.x.double(), t, self.y) for t in self.t]

    @torch.no_grad()
    def error(self, network):
        return max(
            float((network.forward(self.x, t, self.y).double() - want).norm() / want.norm())
            for t, want in zip(self.t, self.out)
        )


class Gate:
    """250 guided steps of the demo, 64 pictures a seed, against fp32 from the same noise."""

    def __init__(self, seeds, device):
        self.device, self.seeds = device, range(seeds)
        self.options = SamplingOptions(
            model="DiT-Demo/2", labels=tuple(range(8)) * 8, device=str(device), precision="fp32"
        ).resolve()
        self.model = engine.load_model(self.options, device)
        self.diffusion = create_diffusion("250")
        self.decoder = vae.load_vae(vae.find_vae(self.options.vae), device)
        self.want = None
        self.want = self.pictures("fp32", None)

    def pictures(self, tier, switches, shared=lambda network: network):
        network = shared(build(self.model, tier, switches, self.device))
        labels = torch.tensor(self.options.labels, device=self.device)
        latents = [
            engine.denoise(
                network,
                self.diffusion,
                engine.draw_latents(64, self.options.latent_size, seed, self.device),
                labels,
                self.options.cfg_scale,
                self.options.num_classes,
            )
            for seed in self.seeds
        ]
        if self.device.type == "cuda":
            precision.apply_precision("fp32", self.device)  # the decoder is not what is compared
        return [vae.to_uint8(vae.decode(self.decoder, one)).numpy() for one in latents]

    def judge(self, tier, switches, shared=lambda network: network):
        """Worst picture's and whole set's figures, and whether every picture passes the contest's and the strict gate, but for LPIPS, which scripts
        leave to evaluate.py. shared: makes the network one that GPUs share."""
        from evaluate import GATES, mae, psnr, ssim

        rows = [
            (mae(a, b) / 255, psnr(a, b), ssim(a, b))
            for want, got in zip(self.want, self.pictures(tier, switches, shared))
            for a, b in zip(want, got)
        ]
        worst = dict(
            mae=max(row[0] for row in rows), psnr=min(row[1] for row in rows), ssim=min(row[2] for row in rows)
        )
        holds = {
            gate: worst["mae"] <= bars["mae"] and worst["psnr"] > bars["psnr"] and worst["ssim"] >= bars["ssim"]
            for gate, bars in GATES.items()
        }
        return dict(
            pictures=len(rows),
            worst=worst,
            mean=dict(mae=statistics.fmean(row[0] for row in rows), ssim=statistics.fmean(row[2] for row in rows)),
            passes=holds["contest"],
            strict=holds["strict"],
        )


def copy_bandwidth(device):
    """Bytes read and written a second by a large copy on the device."""
    source, target = torch.empty(2, 1 << 30, dtype=torch.uint8, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize(device)
    return 10 * 2 * source.numel() / start.elapsed_time(end) * 1e3


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def network_of(args, device):
    """The options that `args` imply, and models.DiT with its weights: those of --ckpt, the demo's own, else random ones."""
    options = SamplingOptions(
        model=args.model,
        image_size=args.image_size,
        num_classes=args.num_classes,
        device=str(device),
        ckpt=args.ckpt,
        labels=(0,),
    ).resolve()
    engine.network_shape(options)  # a size that the network does not divide
    if options.ckpt is not None:
        return options, engine.load_model(options, device)
    with torch.device(device):
        model = DiT_models[args.model](input_size=options.latent_size, num_classes=options.num_classes)
    model.load_state_dict(random_state(model))
    return options, model.eval().requires_grad_(False)


def measure(args, device, record):
    """Climb; `record` is given the rungs so far after each."""
    rungs = [
        rung for rung in ladder(device, args.precision) if not args.only or any(word in rung[0] for word in args.only)
    ]
    if not (rungs or args.vs or args.compile):
        raise UsageError(
            f"--only {' '.join(args.only)}: no rung on {device} has that in its name; there are {', '.join(name for name, *_ in ladder(device, args.precision))}"
        )
    options, model = network_of(args, device)
    reference = Reference(model, args, device)
    gate = Gate(args.gate, device) if args.gate else None
    results = []

    def report(name, network, tier, switches):
        row = dict(rung=name)
        try:
            if not args.untimed:
                before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
                if before:
                    torch.cuda.reset_peak_memory_stats()
                row |= time_steps(network, args, device)
                if before:
                    row["activations_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
                record([*results, row])
            if "max-autotune" not in name:  # which for the reference's two rows would search again for minutes
                row["error"] = reference.error(network)
            if gate and (switches is not None or tier == "tf32"):
                row["gate"] = gate.judge(tier, switches)
        except torch.cuda.OutOfMemoryError:
            row["failed"] = "out of memory"
        results.append(row)
        record(results)
        verdict = ""
        if "gate" in row:
            passed = ", ".join(
                f"{gate} {'pass' if row['gate'][key] else 'FALLS SHORT'}"
                for gate, key in (("contest", "passes"), ("strict", "strict"))
            )
            verdict = f"   worst PSNR {row['gate']['worst']['psnr']:.1f}, MAE {255 * row['gate']['worst']['mae']:.4f} of 0-255: {passed}"
        times = f"{row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}]" if "ms" in row else " " * 8
        print(f"{name:32} {times}   error {row.get('error', float('nan')):.1e}{verdict}", flush=True)

    for name, tier, switches in rungs:
        network = build(model, tier, switches, device)
        report(name, network, tier, switches)
        del network
        gc.collect()
    for mode in args.compile:
        precision.apply_precision("fp16", device)
        torch._dynamo.reset()
        with torch.device(device):
            plain = DiT_models[args.model](input_size=options.latent_size, num_classes=options.num_classes)
        plain.load_state_dict(model.state_dict())
        started = time.perf_counter()
        report(
            f"fp16 + torch.compile {mode}",
            CompiledDiT(plain.eval().requires_grad_(False), torch.float16, mode),
            "fp16",
            None,
        )
        results[-1]["seconds_with_compilation"] = time.perf_counter() - started
        record(results)
    if "diffusers" in args.vs:
        precision.apply_precision("fp16", device)
        report(
            "fp16 + diffusers' DiTTransformer2DModel",
            DiffusersDiT(model.state_dict(), torch.float16, device),
            "fp16",
            None,
        )


def sweep(args, device, record):
    """What a step of the fastest rung costs as pictures grow in number and in size; `record` is given the rows so far after each."""
    cases = dict.fromkeys(
        [(args.image_size, n) for n in args.sweep_pictures] + [(size, args.pictures) for size in args.sweep_sizes]
    )
    results, before = [], 0
    for size, pictures in cases:
        case = Namespace(**{**vars(args), "image_size": size, "pictures": pictures})
        row = dict(image_size=size, pictures=pictures)
        try:
            if before != size:
                model = network = None  # first their memory
                gc.collect()
                _, model = network_of(case, device)
                name, tier, switches = [
                    rung for rung in ladder(device, args.precision) if precision.supports(rung[1], device)
                ][-1]
                network, before = build(model, tier, switches, device), size
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            row |= dict(rung=name, **time_steps(network, case, device))
            row["ms_a_picture"] = row["ms"] / pictures
            if device.type == "cuda":
                row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        except torch.cuda.OutOfMemoryError:
            row["failed"] = "out of memory"
        results.append(row)
        record(results)
        print(
            f"{row['image_size']} px, {pictures} pictures: "
            + (f"{row['ms']:.2f} ms a step, {row['ms_a_picture']:.3f} a picture" if "ms" in row else row["failed"]),
            flush=True,
        )


def random_decoder(device):
    """A decoder of sd-vae-ft-*'s size with random weights, from a seed: the same work."""
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(SD_VAE_FT).eval().requires_grad_(False)


def decoding(args, device, record):
    """What decoding costs in each arithmetic, and what it loses; `record` is given the rows so far after each."""
    name = args.vae or SamplingOptions(model=args.model).resolve().vae
    plain = (
        vae.load_vae(vae.find_vae(name), device) if name not in vae.PUBLISHED or args.vae else random_decoder(device)
    )
    side, generator = args.image_size // 8, torch.Generator(device).manual_seed(0)
    latents = torch.randn(args.pictures, 4, side, side, generator=generator, device=device)
    results, want = [], None
    for arithmetic in ("fp32", "tf32", "fp16"):
        if not precision.supports(arithmetic, device):
            continue
        cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        decoder = vae.CheckedDecoder(plain, arithmetic, "fp32")
        kept = torch.cuda.memory_allocated() - before if cuda else 0
        got = vae.decode(decoder, latents)
        want = got if want is None else want
        error = (got.clamp(-1, 1) - want.clamp(-1, 1)).square().mean((1, 2, 3)).sqrt()
        row = dict(
            arithmetic=arithmetic,
            refused=decoder.refusal,
            worst_psnr=20 * math.log10(2 / float(error.max())) if error.any() else None,
            error=float((got - want).norm() / want.norm()),
        )
        del got
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        times, started = [], time.perf_counter()
        while (now := time.perf_counter() - started) < args.load + args.window or not times:
            engine.synchronize(device)
            start = time.perf_counter()
            vae.decode(decoder, latents)
            engine.synchronize(device)
            if now >= args.load:
                times.append(1e3 * (time.perf_counter() - start))
        times.sort()
        row |= dict(
            ms=statistics.median(times), p10=times[len(times) // 10], p90=times[-1 - len(times) // 10], runs=len(times)
        )
        if cuda:
            row |= dict(mib=(torch.cuda.max_memory_allocated() - before) / 2**20, weights_mib=kept / 2**20)
        results.append(row)
        record(results)
        print(
            f"{arithmetic:8} {row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}] for {args.pictures} pictures   error {row['error']:.1e}"
            + (f", worst {row['worst_psnr']:.1f} dB from fp32" if row["worst_psnr"] else "")
            + (f"   {row['mib']:.0f} MiB beside the weights" if cuda else "")
            + (f"   {decoder.refusal}" if decoder.refusal else ""),
            flush=True,
        )


def score(seconds):
    """The contest's points for T seconds from loading the model to the picture: 50 below 100 s, none from 300 s on."""
    return 0.0 if seconds >= 300 else 50.0 if seconds < 100 else 50 * math.log(300 / seconds) / math.log(3)


def contest(args, device, record):
    """sample.py's picture as the contest times it, each run a process of its own after one that fills the file and kernel caches."""
    root, results = Path(__file__).resolve().parent.parent, []
    with tempfile.TemporaryDirectory() as work:
        command = [
            "--model",
            args.model,
            "--cfg-scale",
            args.cfg_scale,
            "--device",
            device,
            "--output",
            Path(work) / "sample.png",
        ]
        for name in ("image_size", "num_classes", "ckpt", "vae"):
            if getattr(args, name) is not None:
                command += ["--" + name.replace("_", "-"), getattr(args, name)]
        if args.ckpt is None and args.model == "DiT-XL/2":
            from scripts.measure_ddp import make_vae, make_weights

            make_weights(Path(work) / "random.pt", args.model, args.image_size)
            command += ["--ckpt", Path(work) / "random.pt"]
            if args.vae is None:
                make_vae(Path(work) / "vae")
                command += ["--vae", Path(work) / "vae"]
        for tier in args.contest or [precision.default_tier(device)]:
            runs = []
            for index in range(1 + args.repeats):
                line = [
                    sys.executable,
                    root / "sample.py",
                    *command,
                    "--precision",
                    tier,
                    "--num-sampling-steps",
                    args.num_sampling_steps if index else min(3, args.num_sampling_steps),
                ]
                started = time.perf_counter()
                done = subprocess.run([*map(str, line)], capture_output=True, text=True)
                process = time.perf_counter() - started
                if done.returncode:
                    raise UsageError(
                        f"--contest: sample.py failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
                    )
                phases = {
                    name: float(value)
                    for name, value in re.findall(r"([\w-]+) ([\d.]+) s", done.stdout.splitlines()[-1])
                }
                if index:
                    runs.append(dict(phases, process=process))
            seconds = statistics.median(run["total"] for run in runs)
            results.append(dict(tier=tier, seconds=seconds, points=score(seconds), runs=runs))
            record(results)
            print(
                f"{tier:8} T = {seconds:.2f} s, {min(run['total'] for run in runs):.2f} to {max(run['total'] for run in runs):.2f}: "
                f"{score(seconds):.1f} of 50 points",
                flush=True,
            )


def seconds(text):
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text}: must be seconds, 0 or more")
    return value


def listed(text):
    """--vs' value: what to compare with, separated by commas."""
    names = text.split(",")
    if set(names) - {"compile", "diffusers"}:
        raise ArgumentTypeError(f"{text}: choose from compile, diffusers, separated by a comma")
    return names


def main():
    if "--parallel" in sys.argv:
        from scripts import benchmark_parallel

        return benchmark_parallel.main([word for word in sys.argv[1:] if word != "--parallel"])
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parallel",
        action="store_true",
        help="instead of the ladder, under torchrun: few pictures on many GPUs, with the flags of "
        "scripts/benchmark_parallel.py",
    )
    parser.add_argument("--model", default="DiT-XL/2", choices=DiT_models, help="network to time")
    parser.add_argument("--ckpt", help="its weights (default: random; the demo's own)")
    parser.add_argument("--image-size", type=int, help="side of a picture in pixels")
    parser.add_argument("--num-classes", type=int, help="number of classes")
    parser.add_argument(
        "--pictures", type=positive, default=8, help="pictures at a time; with guidance twice as many rows"
    )
    parser.add_argument("--cfg-scale", type=float, default=SamplingOptions.cfg_scale, help="strength of guidance")
    parser.add_argument(
        "--precision", nargs="+", default=["fp16"], choices=tuple(precision.HALF), help="half tiers to climb"
    )
    parser.add_argument(
        "--compile",
        nargs="*",
        default=[],
        choices=("default", "max-autotune"),
        help="modes of torch.compile to compare with",
    )
    parser.add_argument(
        "--vs",
        type=listed,
        default=[],
        metavar="WHAT,WHAT",
        help="alternatives to time on the same weights: compile (the modes of "
        "--compile, or its default mode), diffusers",
    )
    parser.add_argument(
        "--sweep-pictures",
        nargs="+",
        type=positive,
        default=[],
        metavar="N",
        help="instead of the ladder: a step of its last rung at these numbers of pictures",
    )
    parser.add_argument(
        "--sweep-sizes", nargs="+", type=positive, default=[], metavar="PX", help="the same at these sizes of pictures"
    )
    parser.add_argument(
        "--contest",
        nargs="*",
        choices=tuple(precision.TIERS),
        metavar="TIER",
        help="instead of the ladder: seconds from loading the "
        "model to the picture, and the contest's points, in these tiers (default: sample.py's)",
    )
    parser.add_argument(
        "--decoder",
        action="store_true",
        help="instead of the ladder: time, memory and error of decoding, in fp32, tf32 and fp16",
    )
    parser.add_argument(
        "--num-sampling-steps",
        type=positive,
        default=SamplingOptions.num_sampling_steps,
        help="the contest's steps (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, help="the contest's runs a tier, after one for the caches (default: 3)"
    )
    parser.add_argument(
        "--vae",
        help="the contest's and --decoder's decoder, as in sample.py (default: random beside random weights; the demo's own)",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="rungs with one of these words in their name"
    )
    parser.add_argument("--load", type=seconds, default=5.0, help="seconds of steps before those that count")
    parser.add_argument("--window", type=seconds, default=3.0, help="seconds of steps that count")
    parser.add_argument("--untimed", action="store_true", help="errors and gates only")
    parser.add_argument(
        "--gate", type=int, default=0, metavar="SEEDS", help="judge every rung on the demo's pictures, 64 a seed"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument(
        "--commit",
        default=git("describe", "--always", "--dirty"),
        help="what to record as the commit, where git is not at hand",
    )
    args = parser.parse_args()
    with user_errors(parser):
        device = engine.choose_device(args)
        if "compile" in args.vs and not args.compile:
            args.compile = ["default"]
        for flag, given in (("--vs", args.vs), ("--compile", args.compile)):
            if given and device.type != "cuda":
                raise UsageError(f"{flag}: compares float16 on a GPU, not on {device}; leave it out")
        if args.output:
            check_writable(args.output)
        place = (
            dict(gpu=torch.cuda.get_device_name(device), copy_tb_s=copy_bandwidth(device) / 1e12)
            if device.type == "cuda"
            else dict(gpu=None)
        )
        about = dict(place, torch=torch.__version__, commit=args.commit, command=" ".join(["python", *sys.argv]))
        print(json.dumps(about), flush=True)
        if device.type != "cuda":
            print(f"On {device} with {torch.get_num_threads()} threads: its times say nothing about a GPU's")

        implied = SamplingOptions(
            model=args.model, image_size=args.image_size, num_classes=args.num_classes, labels=(0,)
        ).resolve()
        args.image_size, args.num_classes = implied.image_size, implied.num_classes
        for size in args.sweep_sizes:
            engine.network_shape(replace(implied, image_size=size).resolve())
        what, work = (
            ("contest", contest)
            if args.contest is not None
            else ("decoder", decoding)
            if args.decoder
            else ("sweep", sweep)
            if args.sweep_pictures or args.sweep_sizes
            else ("rungs", measure)
        )

        def record(results):
            if args.output:
                with partial_file(args.output) as partial:
                    partial.write_text(
                        json.dumps(
                            dict(
                                about,
                                model=args.model,
                                image_size=args.image_size,
                                pictures=args.pictures,
                                rows=2 * args.pictures,
                                load_seconds=args.load,
                                **{what: results},
                            ),
                            indent=1,
                        )
                        + "\n"
                    )

        work(args, device, record)


if __name__ == "__main__":
    main()
