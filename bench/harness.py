"""Flags, provenance, timing, random weights and networks of all benchmarks. Only this file knows the core."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import accel
from accel import fast, gpu, loading, precision
from accel.diffusion import create_diffusion
from accel.door import opening
from accel.families import ROOT, Defaults, Family, constructor_of, families, family_of, model_names
from accel.files import atomic_write
from accel.flags import check_writable, positive
from accel.kernels import adaln, attention, linear, split_attention, split_linear
from accel.kernels.linear import Tuner
from accel.latents import LatentSpace
from accel.latents.autoencoder_kl import SD_VAE_FT, KLDecoder
from accel.network import Network, Plain, unpatchify
from accel.request import GridRequest
from accel.sampling import denoise, upstream_noise
from accel.sampling.ancestral import Ancestral
from accel.sampling.flow import FLOWS
from accel.sampling.guidance import Guidance
from accel.sampling.process import Process
from accel.settings import implied
from accel.weights.checkpoint import Checkpoint
from accel.weights.shapes import shapes_only
from bench import seen_as

STEPS = 250  # of a sampling run


def demo_of(model: str) -> str:
    """Return a model that ships with its weights: of the same family if there is one, else of the same prediction."""
    own = family_of(model)

    def distance(family: Family):
        return family is not own, family.prediction != own.prediction

    named = (item for family in sorted(families(), key=distance) for item in family.models.items())
    return next(name for name, implied in named if implied.ckpt)


def space_of(model: str) -> LatentSpace:
    """Return channels and factor of the latents that a model's network takes."""
    with shapes_only():
        channels = constructor_of(model)().in_channels
    return LatentSpace(channels, family_of(model).models[model].factor)


def add_arguments(parser: ArgumentParser, network: bool = True, batch: bool = True) -> None:
    """Add the flags that benchmarks share; network, batch: also the flags of a network, of a batch that is timed."""
    if network:
        parser.add_argument("--model", choices=model_names(), help="default: DiT-XL/2 on a GPU, DiT-Demo/2 on a CPU")
        parser.add_argument("--ckpt", help="weights (default: random ones; the demo's own)")
        parser.add_argument("--image-size", type=int, help="side of a picture in pixels")
        parser.add_argument("--num-classes", type=int, help="number of classes")
        parser.add_argument("--cfg-scale", type=float, default=Defaults().cfg_scale, help="strength of guidance")
    if network and batch:
        parser.add_argument("--pictures", type=positive, default=8, help="pictures in a batch, two rows each")
        add_seconds(parser)
        text = "take the GPU for one of this compute capability: docs/gpus.md#rehearsals"
        parser.add_argument("--seen-as", type=seen_as.version, metavar="X.Y", help=text)
    parser.add_argument("--device", help="where to measure (default: a GPU if there is one)")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--commit", help="commit to record (default: git's)")


def add_seconds(parser: ArgumentParser, load: float = 5.0, window: float = 3.0) -> None:
    """Add --load and --window; without a GPU their defaults are short."""
    load, window = (load, window) if torch.cuda.is_available() else (0.1 * load, 0.3 * window)
    parser.add_argument(
        "--load", type=float, default=load, help="seconds of steps before timing (default: %(default)g)"
    )
    parser.add_argument("--window", type=float, default=window, help="seconds of timed steps (default: %(default)g)")


def prepare(args: Namespace) -> torch.device:
    """Return the device, and fill `args` with all that it and the model imply: on a CPU the demo.

    Raises UsageError for a size that does not fit the network or an output that cannot be written.
    """
    device = loading.choose_device(args.device)
    if getattr(args, "seen_as", None):
        seen_as.see_as(args.seen_as)
    args.model = args.model or ("DiT-XL/2" if device.type == "cuda" else "DiT-Demo/2")
    options = options_of(args.model, args.ckpt, args.image_size, args.num_classes)
    args.image_size, args.num_classes, args.ckpt = options.image_size, options.num_classes, options.ckpt
    if args.output:
        check_writable(args.output)
    if device.type != "cuda":
        print(f"On {device} with {torch.get_num_threads()} threads: its times say nothing about a GPU's", flush=True)
    return device


def options_of(
    model: str, ckpt: str | None = None, image_size: int | None = None, num_classes: int | None = None
) -> SimpleNamespace:
    """Return the values of a run that follow from these, with `fit`, None without weights, and the latents' side.

    Raises UsageError for a size that the network does not take.
    """
    request = GridRequest(model, ckpt=ckpt, labels=(0,), image_size=image_size, num_classes=num_classes)
    values, fit = implied(request), None
    if values.ckpt:
        fit = opening.fit_of(Checkpoint(values.ckpt), values.model, values.num_classes)
        values = implied(request, fit)
    values.fit, values.latent_size = fit, values.image_size // values.factor
    return values


def provenance(device: torch.device, commit: str | None) -> dict:
    """Return the origin of figures: GPU (None on a CPU), CPU cores, torch, version, commit, date, command."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    launcher = f"torchrun --nproc_per_node={os.environ['WORLD_SIZE']}" if "WORLD_SIZE" in os.environ else "python"
    return dict(
        gpu=gpu.name(device) if device.type == "cuda" else None,
        cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
        version=accel.__version__,
        commit=commit or git.stdout.strip(),
        date=str(date.today()),
        command=f"{launcher} {shlex.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])}",
    )


def write(path: str | Path | None, record: dict) -> None:
    """Write `record` as the whole file `path`; no-op without a path. Called after every result."""
    if path:
        with atomic_write(path) as file:
            file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def safe(name: str) -> str:
    """Return a name with other characters than letters, digits and _ replaced, for a file."""
    return re.sub(r"\W", "-", name)


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Enough(Exception):
    """Ends a sampling run from its on_step."""


class Marks:
    """A sampling run's on_step that marks when each step ends, on the device's own clock, and ends it after `steps`."""

    def __init__(self, device: torch.device, steps: int | None = None):
        self.cuda, self.steps, self.marks = device.type == "cuda", steps, []

    def __call__(self, *_) -> None:
        self.marks.append(torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter())
        if self.cuda:
            self.marks[-1].record()
        if len(self.marks) == self.steps:
            raise Enough

    def wait(self, behind: int) -> None:
        """Keep the host at most `behind` steps ahead of the GPU."""
        if self.cuda and len(self.marks) > behind:
            self.marks[-behind].synchronize()

    def milliseconds(self) -> list[float]:
        """Return the time of each step but the first; the device must be done with them."""
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def spread(times: list[float]) -> dict:
    """Return median, 10th and 90th percentile as the fields of a record."""
    times = sorted(times)
    return dict(ms=statistics.median(times), p10=times[len(times) // 10], p90=times[-1 - len(times) // 10])


def run_until(loop: Callable, on_step: Callable) -> None:
    """Repeat the sampling run `loop(on_step)` until `on_step` raises Enough."""
    try:
        while True:
            loop(on_step)
    except Enough:
        pass


def time_steps(loop: Callable, device: torch.device, load: float, window: float, name: str = "") -> dict:
    """Time single steps of the sampling run `loop(on_step)`, in milliseconds: the steps of the last `window` seconds,
    after `load` seconds, since a GPU under load runs slower than in a burst. On a GPU also the peak memory."""
    marks, started, total = Marks(device), None, round(load + window, 1)
    bar = tqdm(total=total, desc=name, leave=False, bar_format="{l_bar}{bar}| {n:.0f}/{total} s")

    def mark(*_):
        nonlocal started
        marks()
        marks.wait(4)  # so that the clock below counts work that was done
        if len(marks.marks) < 3:  # first steps compile and tune
            started = time.perf_counter()
        taken = time.perf_counter() - started
        bar.update(min(taken, total) - bar.n)
        if taken > total and len(marks.marks) > 3:
            raise Enough

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with bar:
        run_until(loop, mark)
    synchronize(device)
    kept, left = [], 1e3 * window
    for one in reversed(marks.milliseconds()):
        left -= one
        if kept and left < 0:
            break
        kept.append(one)
    peak = dict(peak_gb=torch.cuda.max_memory_allocated(device) / 1e9) if device.type == "cuda" else {}
    return dict(spread(kept), mean=statistics.fmean(kept), steps=len(kept), **peak)


def repeated(work: Callable) -> Callable:
    """Return `work()` as the step of a sampling run, for `time_steps`."""

    def loop(on_step):
        work()
        on_step()

    return loop


def random_state(model: torch.nn.Module, seed: int = 0) -> dict:
    """Return a state dict of random, non-zero weights on `model`'s device: GEMMs keep a variance of about one."""
    state = model.state_dict()
    generator = torch.Generator(next(iter(state.values())).device).manual_seed(seed)
    for name, value in state.items():
        if name != "pos_embed":
            scale = value[0].numel() ** -0.5 if value.ndim > 1 else 0.1
            value = torch.randn(value.shape, generator=generator, device=value.device) * scale
            state[name] = value + ("norm.weight" in name)  # norms scale by about one
    return state


def random_network(build: Callable, device: torch.device, **arguments) -> torch.nn.Module:
    """Build a network of random, non-zero weights in eval mode. build: its constructor, called with `arguments`."""
    with torch.device(device):
        model = build(**arguments)
    model.load_state_dict(random_state(model))
    return model.eval().requires_grad_(False)


def model_of(args: Namespace, device: torch.device) -> torch.nn.Module:
    """Return the float32 network of `args` with the weights of --ckpt or the demo's own, else random ones."""
    if args.ckpt is None:
        arguments = dict(input_size=args.image_size // space_of(args.model).factor, num_classes=args.num_classes)
        siblings = family_of(args.model).part("weights").MODELS.values()
        if any(build.config.get("qk_norm") for build in siblings):  # as the family's trained weights have it
            arguments["qk_norm"] = True
        return random_network(constructor_of(args.model), device, **arguments)
    options = options_of(args.model, args.ckpt, args.image_size, args.num_classes)
    with shapes_only():
        empty = options.fit.build(input_size=options.latent_size, num_classes=options.num_classes)
    # fp32 chooses nothing by the batch.
    return loading.load_network(Checkpoint(args.ckpt), options.fit, empty, "fp32", device, batch=None).model


def random_decoder(device: torch.device) -> KLDecoder:
    """Return a decoder of sd-vae-ft-*'s size with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return KLDecoder(SD_VAE_FT).eval().requires_grad_(False)


HALF = tuple(name for name, tier in precision.TIERS.items() if tier.dtype != torch.float32)
SHARED = dict(adaln=adaln.BACKENDS)
BACKENDS = {  # of a tier's switches
    **dict.fromkeys(HALF, SHARED | dict(gemm=linear.BACKENDS, attention=attention.BACKENDS)),
    "exact": SHARED | dict(gemm=split_linear.BACKENDS, attention=split_attention.BACKENDS),
}
PLAIN = dict(hoist=False, adaln="torch", gemm="torch", graph=False)  # no optimisation


def build(
    model: torch.nn.Module,
    tier: str,
    device: torch.device,
    tuner: Tuner | None = None,
    *,
    hoist: bool = True,
    adaln: str = "auto",
    attention: str = "auto",
    gemm: str = "auto",
    graph: bool = True,
) -> Network:
    """Build the network of a tier with the weights of `model`, a reference network, and set the tier's process-wide
    switches.

    For an accelerated tier: backends by their names in BACKENDS; hoist: whether a sampling run computes the
    conditioning of its steps ahead; graph: whether a step is a CUDA graph.
    """
    if device.type == "cuda":
        precision.apply_precision(tier, device)
    if not precision.TIERS[tier].accelerated:
        return Plain(model)
    network = fast.build(model.state_dict(), model, tier, device, tuner, gemm)
    network.hoists, network.captures = hoist, graph
    ops = dict(adaln=adaln, last_adaln=adaln, attention=attention)
    for op, backend in ops.items():
        setattr(network, op, partial(getattr(network, op), backend=backend))
    return network


def process_of(model: str, steps: int = STEPS) -> Process:
    """Return the process by which sample.py samples a model of that name."""
    name = family_of(model).samplers[0]
    return FLOWS[name](steps) if name in FLOWS else Ancestral(create_diffusion(str(steps)))


def sampling(
    network: Network,
    process: Process,
    z: torch.Tensor,
    labels: torch.Tensor,
    cfg_scale: float,
    null_label: int,
    rows: slice = slice(None),
    generator: torch.Generator | None = None,
) -> Callable:
    """Return sampling with guidance as `loop(on_step)` → latents. rows: this process's part of the batch;
    generator: for the steps' noise, by default torch's own of the process's device."""
    guidance = Guidance(cfg_scale, null_label)
    generator = generator or (torch.default_generator if process.noise_from_cpu else None)

    def loop(on_step=None):
        draw = upstream_noise(z, guidance.copies, rows, generator)
        return denoise(network, process, guidance, z[rows], labels[rows], draw, on_step=on_step)

    return loop


def batch(network: Network, args: Namespace, device: torch.device) -> Callable:
    """Return `sampling` of the batch that `args` names."""
    side = args.image_size // space_of(args.model).factor
    z = torch.randn(args.pictures, network.in_channels, side, side, device=device)
    labels = torch.arange(args.pictures, device=device) % args.num_classes
    return sampling(network, process_of(args.model), z, labels, args.cfg_scale, args.num_classes)


def guided(network: Network, z: torch.Tensor, labels: torch.Tensor, cfg_scale: float, null_label: int) -> torch.Tensor:
    """Return a guided evaluation at timestep 500, as float64."""
    guidance = Guidance(cfg_scale, null_label)
    y = guidance.labels(labels)
    out = network.tokens(z, torch.full_like(y, 500), y)
    return guidance.combine(unpatchify(out, network.patch_size)).double()
