"""What every benchmark shares: flags, provenance, timing, random weights, networks. All that knows the core is here."""

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

import torch
from tqdm import tqdm

import accel
from accel import fast, gpu, loading, precision
from accel.diffusion import create_diffusion
from accel.door import opening
from accel.errors import UsageError
from accel.families import ROOT, Defaults, constructor_of, model_names
from accel.families import family_of as family_of_name
from accel.files import atomic_write
from accel.flags import check_writable, positive
from accel.kernels import adaln, attention, linear, patch_embed, split_attention, split_linear
from accel.kernels.linear import Tuner
from accel.latents import LatentSpace, files
from accel.latents.autoencoder_kl import SD_VAE_FT, KLDecoder
from accel.network import Network, Plain, unpatchify
from accel.options import GridOptions
from accel.sampling import denoise, upstream_noise
from accel.sampling.ancestral import Ancestral
from accel.sampling.flow import Sde
from accel.sampling.guidance import Guidance
from accel.sampling.process import Process
from bench import seen_as


def implied(model: str) -> Defaults:
    """Return what a model's name implies."""
    return family_of_name(model).models[model]


def is_flow(model: str) -> bool:
    """Whether a model's name is of a network that predicts a velocity."""
    return family_of_name(model).prediction == "velocity"


def add_arguments(parser: ArgumentParser, network: bool = True, batch: bool = True) -> None:
    """The flags that benchmarks share; network, batch: those of one network, of a batch whose steps are timed."""
    if network:
        parser.add_argument("--model", choices=model_names(), help="default: DiT-XL/2 on a GPU, DiT-Demo/2 on a CPU")
        parser.add_argument("--ckpt", help="weights (default: random ones; the demo's own)")
        parser.add_argument("--image-size", type=int, help="side of a picture in pixels")
        parser.add_argument("--num-classes", type=int, help="number of classes")
        parser.add_argument("--cfg-scale", type=float, default=Defaults().cfg_scale, help="strength of guidance")
    if network and batch:
        parser.add_argument("--pictures", type=positive, default=8, help="pictures in a batch, two rows each")
        add_seconds(parser)
        what = "take the GPU for one of this compute capability: docs/gpus.md#rehearsals"
        parser.add_argument("--seen-as", type=seen_as.version, metavar="X.Y", help=what)
    parser.add_argument("--device", help="where to measure (default: a GPU if there is one)")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--commit", help="commit to record (default: git's)")


def add_seconds(parser: ArgumentParser, load: float = 5.0, window: float = 3.0) -> None:
    """--load and --window; without a GPU their defaults are short."""
    load, window = (load, window) if torch.cuda.is_available() else (0.1 * load, 0.3 * window)
    what = "seconds of steps before those that count (default: %(default)g)"
    parser.add_argument("--load", type=float, default=load, help=what)
    what = "seconds of steps that count (default: %(default)g)"
    parser.add_argument("--window", type=float, default=window, help=what)


def require_gpu(args: Namespace, what: str) -> torch.device:
    """The GPU whose `what` is measured. Raises UsageError without one, or if --output cannot be written."""
    device = loading.choose_device(args.device)
    if device.type != "cuda":
        raise UsageError(f"--device {device}: a GPU's {what}")
    if args.output:
        check_writable(args.output)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def prepare(args: Namespace) -> torch.device:
    """The device, and in `args` whatever it and the model imply: on a CPU the demo.

    Raises UsageError for a size that does not fit the network or an output that cannot be written.
    """
    device = loading.choose_device(args.device)
    if getattr(args, "seen_as", None):
        seen_as.see_as(args.seen_as)
    args.model = args.model or ("DiT-XL/2" if device.type == "cuda" else "DiT-Demo/2")
    implied = options_of(args)
    if args.ckpt:
        implied = implied.complete(opening.fit_of(opening.checkpoint_of(implied, device), implied))
    opening.empty_model(implied)
    args.image_size, args.num_classes, args.ckpt = implied.image_size, implied.num_classes, implied.ckpt
    if args.output:
        check_writable(args.output)
    if device.type != "cuda":
        print(f"On {device} with {torch.get_num_threads()} threads: its times say nothing about a GPU's", flush=True)
    return device


def options_of(args: Namespace) -> GridOptions:
    """The options that the flags of a network name, and what they imply."""
    sizes = dict(image_size=args.image_size, num_classes=args.num_classes)
    return GridOptions(args.model, ckpt=args.ckpt, labels=(0,), **sizes).resolve()


def check_sizes(model: str | None, sizes: list[int]) -> None:
    """Raises UsageError for a side in pixels that a model does not take."""
    for size in sizes:
        opening.empty_model(GridOptions(model or "DiT-XL/2", image_size=size, labels=(0,)).resolve())


def provenance(device: torch.device, commit: str | None) -> dict:
    """Where figures come from: GPU (None on a CPU), CPU cores, torch, version, commit, date, command."""
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
    """Write `record` as the whole file `path`, or nothing without one. Called after every result, it loses none."""
    if path:
        with atomic_write(path) as file:
            file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def safe(name: str) -> str:
    """`name` for a file."""
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
        """Of each step but the first; the device must be done with them."""
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def spread(times: list[float]) -> dict:
    """Median, 10th and 90th percentile, as the fields of a record."""
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
    """Milliseconds of single steps of the sampling run `loop(on_step)`: those of the last `window` seconds, after
    `load` seconds, since a GPU under load runs slower than in a burst. On a GPU with the most memory in use."""
    marks, started, total = Marks(device), None, round(load + window, 1)
    bar = tqdm(total=total, desc=name, leave=False, bar_format="{l_bar}{bar}| {n:.0f}/{total} s")

    def mark(*_):
        nonlocal started
        marks()
        marks.wait(4)  # so that the clock below counts work that was done
        if len(marks.marks) < 3:  # what only first steps do
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
    """`work()` as a step of a sampling run, for `time_steps`."""

    def loop(on_step):
        work()
        on_step()

    return loop


def elapsed_ms(work: Callable, device: torch.device) -> float:
    """Milliseconds of `work()`; on a GPU of what it queues on the current stream."""
    marks = Marks(device)
    marks()
    work()
    marks()
    synchronize(device)
    return marks.milliseconds()[0]


def random_state(model: torch.nn.Module, seed: int = 0) -> dict:
    """A state dict of random, non-zero weights on `model`'s device: GEMMs keep a variance of about one."""
    state = model.state_dict()
    generator = torch.Generator(next(iter(state.values())).device).manual_seed(seed)
    for name, value in state.items():
        if name != "pos_embed":
            scale = value[0].numel() ** -0.5 if value.ndim > 1 else 0.1
            value = torch.randn(value.shape, generator=generator, device=value.device) * scale
            state[name] = value + ("norm.weight" in name)  # norms scale by about one
    return state


def random_network(build: str | Callable, device: torch.device, **arguments) -> torch.nn.Module:
    """A model with random, non-zero weights, in eval mode. build: its class or name; arguments: its constructor's."""
    with torch.device(device):
        model = (constructor_of(build) if isinstance(build, str) else build)(**arguments)
    model.load_state_dict(random_state(model))
    return model.eval().requires_grad_(False)


def model_of(args: Namespace, device: torch.device) -> torch.nn.Module:
    """The model of `args`, float32: with the weights of --ckpt or the demo's own, else random ones."""
    if args.ckpt is None:
        size, norms = args.image_size // 8, dict(qk_norm=True) if args.model.startswith("Large") else {}
        return random_network(args.model, device, input_size=size, num_classes=args.num_classes, **norms)
    options = options_of(args)
    weights = opening.checkpoint_of(options, device)
    options = options.complete(opening.fit_of(weights, options))
    batch = loading.Batch([(1, 1)], 0, options.latent_size, options.num_classes)
    return loading.load_network(weights, options.fit, opening.empty_model(options), "fp32", device, batch).model


def random_decoder(device: torch.device) -> KLDecoder:
    """A decoder of sd-vae-ft-*'s size with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return KLDecoder(SD_VAE_FT).eval().requires_grad_(False)


def decoder_of(args: Namespace, device: torch.device) -> tuple[LatentSpace, KLDecoder]:
    """The space and decoder of --vae or the demo's own, else a random decoder."""
    name = args.vae or GridOptions(model=args.model).resolve().vae
    if name in files.PUBLISHED and not args.vae:
        return LatentSpace(), random_decoder(device)
    space = files.find(name)
    return space, files.load(space, device)


def write_weights(folder: Path, model: torch.nn.Module) -> tuple[Path, Path]:
    """`model` and a random decoder as files that sample.py reads: a checkpoint and a folder."""
    from safetensors.torch import save_file

    ckpt, decoder = folder / "random.pt", folder / "vae"
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, ckpt)
    decoder.mkdir()
    (decoder / files.FILES[0]).write_text(json.dumps(SD_VAE_FT))
    save_file(random_decoder(torch.device("cpu")).state_dict(), decoder / files.FILES[1])
    return ckpt, decoder


HALF = tuple(name for name, tier in precision.TIERS.items() if tier.dtype != torch.float32)
SHARED = dict(adaln=adaln.BACKENDS, embed_update=patch_embed.BACKENDS)
BACKENDS = {  # of a tier's switches
    **dict.fromkeys(HALF, SHARED | dict(gemm=linear.BACKENDS, attention=attention.BACKENDS)),
    "exact": SHARED | dict(gemm=split_linear.BACKENDS, attention=split_attention.BACKENDS),
}
PLAIN = dict(hoist=False, adaln="torch", gemm="torch", embed_update="torch", graph=False)  # no optimisation


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
    embed_update: str = "auto",
    graph: bool = True,
) -> Network:
    """The network of a tier with the weights of `model`, a reference network, and the tier's process-wide switches set.

    Of an accelerated tier: backends by their names in BACKENDS; hoist: whether a sampling run computes the conditioning
    of its steps ahead; graph: whether a step is a CUDA graph.
    """
    if device.type == "cuda":
        precision.apply_precision(tier, device)
    if not precision.TIERS[tier].accelerated:
        return Plain(model)
    network = fast.build(model.state_dict(), model, tier, device, tuner, gemm)
    network.hoists, network.captures = hoist, graph
    network.fuses_update &= embed_update != "torch"
    ops = dict(adaln=adaln, last_adaln=adaln, attention=attention, patch_embed=embed_update)
    for op, backend in ops.items():
        setattr(network, op, partial(getattr(network, op), backend=backend))
    return network


def process_of(model: str, steps: int = 250) -> Process:
    """The process that sample.py takes for a model of that name."""
    return Sde(steps) if is_flow(model) else Ancestral(create_diffusion(str(steps)))


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
    """Sampling with guidance as `loop(on_step)` → latents. rows: those of the batch that this process computes;
    generator: of the steps' noise, by default torch's own of the process's device."""
    guidance = Guidance(cfg_scale, null_label)
    generator = generator or (torch.default_generator if process.noise_from_cpu else None)

    def loop(on_step=None):
        draw = upstream_noise(z, guidance.copies, rows, generator)
        return denoise(network, process, guidance, z[rows], labels[rows], draw, on_step=on_step)

    return loop


def batch(network: Network, args: Namespace, device: torch.device) -> Callable:
    """`sampling` of the batch that `args` names."""
    side = args.image_size // 8
    z = torch.randn(args.pictures, network.in_channels, side, side, device=device)
    labels = torch.arange(args.pictures, device=device) % args.num_classes
    return sampling(network, process_of(args.model), z, labels, args.cfg_scale, args.num_classes)


def guided(network: Network, z: torch.Tensor, labels: torch.Tensor, cfg_scale: float, null_label: int) -> torch.Tensor:
    """A guided evaluation at timestep 500, as float64."""
    guidance = Guidance(cfg_scale, null_label)
    y = guidance.labels(labels)
    out = network.tokens(z, torch.full_like(y, 500), y)
    return guidance.combine(unpatchify(out, network.patch_size)).double()
