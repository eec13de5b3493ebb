"""Flags, provenance, timing, random weights and networks of both benchmarks."""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import date
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import torch

import accel
from accel import fast, gpu, precision, rules
from accel.errors import UsageError
from accel.families import Defaults, constructor_of, families, family_of, model_names
from accel.files import ROOT, atomic_write, read_json
from accel.jobs.grid import load
from accel.kernels.linear import Tuner
from accel.latents import files
from accel.latents.autoencoder_kl import SD_VAE_FT, KLDecoder
from accel.network import Network, Plain
from accel.opening import choose_device, open_run
from accel.options import Options
from accel.output import check_writable
from accel.pipeline import hardware
from accel.sampling import denoise, make_process, upstream_noise
from accel.sampling.guidance import Guidance
from accel.stages import stages_of, unpatchify

STEPS = 250  # of a sampling run
RANDOM = "random, seed 0"  # weights without a file
DRIVER = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
SCALE = Defaults().cfg_scale


def demo_of(model: str) -> str:
    """Return a model that ships with its weights: of the same family if there is one,
    else of the same prediction.
    """
    family = family_of(model)
    alike = [other for other in families() if other.prediction == family.prediction]
    return next(other.shipped[0] for other in (family, *alike) if other.shipped)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of a network, and those of every benchmark."""
    parser.add_argument(
        "--model",
        choices=model_names(),
        metavar="NAME",
        help="default: DiT-XL/2; on a CPU DiT-Demo/2",
    )
    parser.add_argument("--ckpt", help="weights (default: random ones; the demo's own)")
    parser.add_argument("--image-size", type=int, help="side of a picture in pixels")
    parser.add_argument("--device", help="where to measure (default: a GPU if there is one)")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--commit", help="commit to record (default: git's)")


def add_timing(parser: ArgumentParser) -> None:
    """Add the flags of steps that are timed."""
    parser.add_argument(
        "--load",
        type=float,
        default=5.0,
        help="seconds of steps before timing (default: %(default)g)",
    )
    parser.add_argument(
        "--window",
        type=float,
        default=3.0,
        help="seconds of timed steps (default: %(default)g)",
    )
    parser.add_argument(
        "--seen-as",
        type=compute_capability,
        metavar="X.Y",
        help="take the GPU for one of this compute capability: docs/gpus.md#rehearsals",
    )


def prepare(args: Namespace) -> torch.device:
    """Return the device, and complete `args` for it; the default model on a CPU is the
    demo. Raises UsageError as `complete` does, and for an output that cannot be written.
    """
    device = choose_device(args.device)
    if getattr(args, "seen_as", None):
        see_as(args.seen_as)
    args.model = args.model or ("DiT-XL/2" if device.type == "cuda" else "DiT-Demo/2")
    complete(args)
    if args.output:
        check_writable(args.output)
    if device.type != "cuda" and os.environ.get("RANK", "0") == "0":
        print(f"On {hardware(device)}: its times say nothing about a GPU's", flush=True)
    return device


def complete(args: Namespace) -> Namespace:
    """Set in `args` the weights, sizes and number of classes that its model, ckpt and
    image_size imply; return it. Raises UsageError for a size that the network does not
    take, and for files that are missing: those of a decoder, if `args` names one, together
    with the weights.
    """
    vae = getattr(args, "vae", None)
    options = Options(
        model=args.model,
        ckpt=args.ckpt,
        image_size=args.image_size,
        vae=vae,
        output_type="image" if vae else "latent",
    )
    rules.check(options)
    defaults = rules.named_defaults(options)
    args.ckpt = args.ckpt or defaults.ckpt
    if args.ckpt:
        run = open_run(options.changed(ckpt=args.ckpt), torch.device("cpu"))
        args.image_size = run["image_size"]
        args.num_classes = run["num_classes"]
        args.latent_size = run.latent_size
        return args
    args.image_size = args.image_size or defaults.image_size
    args.num_classes = defaults.num_classes
    args.latent_size = args.image_size // defaults.factor
    return args


def first_line(*command: str) -> str:
    """Return the first line that a program prints; "" if it prints none or is not installed."""
    with suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.partition("\n")[0]
    return ""


def provenance(device: torch.device, commit: str | None) -> dict:
    """Return the origin of figures: GPU and driver (None on a CPU), CPU cores, Python,
    torch, version, commit, date, command.
    """
    cuda = device.type == "cuda"
    launcher = "python"
    if "WORLD_SIZE" in os.environ:
        world = os.environ["WORLD_SIZE"]
        launcher = f"torchrun --nproc_per_node={world}"
        if os.environ.get("LOCAL_WORLD_SIZE") == world:  # a free port: one node needs none
            launcher = f"torchrun --standalone --nproc_per_node={world}"
    words = [os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
    return dict(
        gpu=gpu.name(device) if cuda else None,
        driver=first_line(*DRIVER) if cuda else None,
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
        version=accel.__version__,
        commit=commit or first_line("git", "describe", "--always", "--dirty"),
        date=str(date.today()),
        command=f"{launcher} {shlex.join(words)}",
    )


def about(kind: str, args: Namespace, device: torch.device) -> dict:
    """Return the beginning of a record: its kind, the origin of its figures, the network
    and the pictures.
    """
    return dict(
        kind=kind,
        **provenance(device, args.commit),
        model=args.model,
        image_size=args.image_size,
        pictures=args.pictures,
        weights=name_of(args.ckpt),
    )


def name_of(path: str | None) -> str:
    """Return the name of weights or a decoder in records."""
    return Path(path).name if path else RANDOM


def decoder_of(args: Namespace) -> str | None:
    """Return the decoder of `args`: --vae's, or the model's own; None for one of random weights."""
    if args.vae is not None:
        return args.vae
    vae = family_of(args.model).models[args.model].vae
    return None if vae in files.PUBLISHED else vae


def contest_tiers(device: torch.device) -> list[str]:
    """Return the tiers that `device` has, without bf16, which replaces fp16 where weights
    overflow it.
    """
    return [tier for tier in precision.TIERS if tier != "bf16" and precision.supports(tier, device)]


def require_alike(records: list[dict], names: Iterable[str]) -> None:
    """Raise UsageError unless these entries are the same in all records, each read from
    its `path`: figures of other jobs are not compared.
    """
    for record, name in product(records, names):
        if record[name] != records[0][name]:
            raise UsageError(
                f"{records[0]['path']} is of {name} {records[0][name]}, {record['path']} of "
                f"{record[name]}: move one of them elsewhere"
            )


def read(path: Path, owner: str, remedy: str) -> dict:
    """Return a record. Raises UsageError, about `owner` and with a remedy, for any other file."""
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{owner}: not JSON ({error}); {remedy}") from None


def write(path: str | Path | None, record: dict) -> None:
    """Write `record` as the whole file `path`; no-op without a path."""
    if path:
        with atomic_write(path) as file:
            file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def safe(name: str) -> str:
    """Return `name` for a file: letters, digits and _ stay, other characters become -."""
    return re.sub(r"\W", "-", name)


class _Enough(Exception):
    """Ends a sampling run from its on_step."""


def run_steps(loop: Callable, steps: int, on_step: Callable[[], None]) -> None:
    """Run `steps` steps of the sampling run `loop(on_step)`, repeated as often as that takes."""
    left = steps

    def count(*_):
        nonlocal left
        on_step()
        left -= 1
        if not left:
            raise _Enough

    with suppress(_Enough):
        while True:
            loop(count)


def step_times(loop: Callable | None, steps: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each of `steps` steps of the sampling run
    `loop(on_step)`, by the device's clock. Return zeros on an idle rank, which has no
    loop.
    """
    if loop is None:
        return [0.0] * steps
    if device.type != "cuda":
        seconds = []
        run_steps(loop, steps + 1, lambda: seconds.append(time.perf_counter()))
        return [1e3 * (after - before) for before, after in pairwise(seconds)]
    events = []

    def record():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    run_steps(loop, steps + 1, record)
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def time_steps(
    loop: Callable | None,
    device: torch.device,
    load: float,
    window: float,
    slowest: Callable = list,
) -> dict:
    """Time the sampling run `loop(on_step)`: median, 10th and 90th percentile, in
    milliseconds a step, of the steps in `window` seconds after `load` seconds of them,
    since a GPU under load runs slower than in a burst.

    slowest: replaces a rank's times by those of the slowest rank, where ranks share the
    steps.
    """
    first_steps = step_times(loop, 5, device)[2:]  # the two before compile and tune
    [expected] = slowest([statistics.median(first_steps)])
    timed = max(3, round(1e3 * window / expected))
    warm = round(1e3 * load / expected)
    times = step_times(loop, warm + timed, device)[-timed:]
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    p10, median, p90 = slowest([deciles[0], deciles[4], deciles[8]])
    return dict(ms=median, p10=p10, p90=p90, steps=timed)


def random_network(build: Callable, device: torch.device, **arguments) -> torch.nn.Module:
    """Return a network in eval mode whose weights are random and not zero: its GEMMs keep
    a variance of about one. build: its constructor, called with `arguments`.
    """
    with torch.device(device):
        model = build(**arguments)
    state = model.state_dict()
    generator = torch.Generator(device).manual_seed(0)
    for name, value in state.items():
        if name == "pos_embed":
            continue
        scale = value[0].numel() ** -0.5 if value.ndim > 1 else 0.1
        noise = torch.randn(value.shape, generator=generator, device=value.device)
        state[name] = scale * noise + ("norm.weight" in name)  # norms scale by about one
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def model_of(args: Namespace, device: torch.device) -> torch.nn.Module:
    """Return the float32 network of `args` with the weights of --ckpt or the demo's own,
    else random ones.
    """
    if args.ckpt:
        options = Options(
            model=args.model,
            ckpt=args.ckpt,
            image_size=args.image_size,
            precision="fp32",
            output_type="latent",
        )
        return load(open_run(options, device)).network.model
    arguments = dict(input_size=args.latent_size, num_classes=args.num_classes)
    constructors = family_of(args.model).part("weights").WEIGHTS.models.values()
    # as the family's trained weights have it
    if any(constructor.config.get("qk_norm") for constructor in constructors):
        arguments["qk_norm"] = True
    return random_network(constructor_of(args.model), device, **arguments)


def shape_of(model: torch.nn.Module, args: Namespace) -> dict | None:
    """Return the sizes of a reference network of one stage of DiT's blocks; None for others."""
    stages = stages_of(model)
    mlp = getattr(stages[0].blocks[0], "mlp", None)
    if len(stages) > 1 or not hasattr(mlp, "fc1"):
        return None
    return dict(
        depth=len(stages[0].blocks),
        width=stages[0].width,
        heads=stages[0].num_heads,
        hidden=mlp.fc1.out_features,
        tokens=(args.latent_size // model.patch_size) ** 2,
        patch=model.patch_size,
        channels=model.in_channels,
        outputs=model.out_channels,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def random_decoder(device: torch.device) -> KLDecoder:
    """Return a decoder of sd-vae-ft-*'s size with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return KLDecoder(SD_VAE_FT).eval().requires_grad_(False)


_SWITCHES = ExitStack()  # of the tier that is measured


def use(tier: str) -> None:
    """Set this process's backend switches to those of a tier."""
    _SWITCHES.close()
    _SWITCHES.enter_context(precision.arithmetic(tier))


PLAIN = dict(hoist=False, adaln="torch", gemm="torch", graph=False)  # no optimisation


def build(
    name: str,
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
    """Build the network of a tier with the weights of `model`, the reference network of the
    model `name`, and set the tier's process-wide switches.

    For an accelerated tier: the backends of its ops; hoist: whether a sampling run
    computes the conditioning of its steps ahead; graph: whether a step is a CUDA graph.
    """
    if device.type == "cuda":
        use(tier)
    if not precision.TIERS[tier].accelerated:
        return Plain(model)
    pack = family_of(name).pack
    network = fast.build(model.state_dict(), model, pack, tier, device, tuner, gemm)
    network.hoists = hoist
    network.captures = graph
    network.adaln = partial(network.adaln, backend=adaln)
    network.last_adaln = partial(network.last_adaln, backend=adaln)
    network.attention = partial(network.attention, backend=attention)
    return network


def batch(network: Network, args: Namespace, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return noise (n, C, L, L) and labels (n,) of the batch that `args` names, the same on
    every call.
    """
    shape = args.pictures, network.in_channels, args.latent_size, args.latent_size
    generator = torch.Generator(device).manual_seed(1)
    noise = torch.randn(shape, generator=generator, device=device)
    return noise, torch.arange(args.pictures, device=device) % args.num_classes


def sampling(
    network: Network,
    args: Namespace,
    device: torch.device,
    steps: int = STEPS,
    rows: slice = slice(None),
) -> Callable:
    """Return sampling of the batch that `args` names as `loop(on_step)` → latents. rows:
    this process's part of it.
    """
    process = make_process(family_of(args.model).samplers[0], steps)  # sample.py's
    guidance = Guidance(SCALE, args.num_classes)
    z, labels = batch(network, args, device)
    generator = torch.default_generator if process.noise_from_cpu else None
    draw = upstream_noise(z, guidance.drawn, rows, generator)

    def loop(on_step=None):
        return denoise(network, process, guidance, z[rows], labels[rows], draw, on_step=on_step)

    return loop


def guided(network: Network, args: Namespace, device: torch.device) -> torch.Tensor:
    """Return a guided evaluation of the batch that `args` names at timestep 500, as float64."""
    guidance = Guidance(SCALE, args.num_classes)
    z, labels = batch(network, args, device)
    y = guidance.labels(labels)
    # `forward` would round a float64 network's output
    out = network.forward_tokens(z, torch.full_like(y, 500), y)
    return guidance.combine(unpatchify(out, network.patch_size), SCALE).double()


# ---- other implementations of a network, and other GPUs ----

RIVALS = {  # name of --vs → name of the rung
    "eager": "eager",
    "compile": "torch.compile default",
    "max-autotune": "torch.compile max-autotune",
}


class Rival(Plain):
    """A plain network in `dtype` under one of RIVALS. `model` is converted to that dtype;
    eager runs under autocast.
    """

    def __init__(self, what: str, model: torch.nn.Module, dtype: torch.dtype, device: torch.device):
        super().__init__(model.to(dtype))
        self.dtype = dtype
        evaluate = super().forward_tokens
        if what == "eager":
            autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
            self.evaluate = autocast(evaluate)
        else:
            mode = "default" if what == "compile" else what
            self.evaluate = torch.compile(evaluate, mode=mode, dynamic=False)

    def forward_tokens(self, x, t, y, run=None) -> torch.Tensor:
        times = t if run is None else run.table[t]
        # the compiler's graph will overwrite it
        return self.evaluate(x.to(self.dtype), times, y).to(x.dtype, copy=True)


PROCESS = ExitStack()  # contexts that last until the process ends


def compute_capability(text: str) -> tuple[int, int]:
    """Convert a compute capability such as 8.0, for argparse."""
    major, minor = text.split(".")
    return int(major), int(minor)


def compile_for(capability: tuple[int, int]) -> None:
    """Make Triton compile for an older GPU of `capability`, and the driver compile its
    PTX for this GPU. Call this once in a process, before a kernel is launched.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def keep_ptx(backend, stages, *_):
        stages["cubin"] = lambda ptx, metadata: ptx.encode() + b"\0"

    CudaDriver.get_current_target = lambda driver: target
    knobs.runtime.add_stages_inspection_hook = keep_ptx


def see_as(capability: tuple[int, int]) -> None:
    """Make this process take its GPU for one of `capability`."""
    real = torch.cuda.get_device_capability()
    if capability < min((9, 0), real):
        compile_for(capability)
    if capability != real:
        PROCESS.enter_context(gpu.seen_as(capability))
