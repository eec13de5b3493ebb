"""What turns options into values, for the commands, accel.api, scripts/ and bench/: nothing below knows options.

`open_weights`, `load` and `decoder_of` give what a run needs, `latents` or `sample` run it, `save` writes. FID jobs:
fid.py.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel import loading, output, precision, vae
from accel.diffusion import create_diffusion
from accel.errors import UsageError
from accel.forecast import plan_beside, read_plan
from accel.loading import Batch
from accel.network import MODELS, WHOLE, Part
from accel.options import GridOptions, Options
from accel.parallel.layouts import OFF, Layout
from accel.progress import Stopwatch, step_bar
from accel.run import Run, slices
from accel.sampling import OnStep
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.flow import FLOWS
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Kind, Process
from accel.sampling.solvers import SOLVERS, Solver, make_scheduler
from accel.sampling.strides import Strides
from accel.vae.lazy import LazyDecoder
from accel.weights.checkpoint import Checkpoint, published_name
from accel.weights.held import Held
from accel.weights.identity import shapes_only

if TYPE_CHECKING:  # what a grid of one process does not wait for
    from accel.parallel.groups import Groups
    from accel.parallel.planner import Evaluation
    from accel.parallel.processes import Job

#################################################################################
#                           Weights, network and decoder                        #
#################################################################################


class Opened(NamedTuple):
    """Weights, the options with all that follows from them, and where and how they are computed with."""

    options: Options
    weights: Checkpoint | Held
    device: torch.device
    tier: str
    vae_precision: str


def checkpoint_of(options: Options, device: torch.device) -> Checkpoint:
    """The options' weights, not fetched or read yet. Raises UsageError if there are none of that name."""
    name = options.ckpt or published_name(options.model, options.image_size, options.num_classes)
    # A CPU computes with copies: whoever writes to the file meanwhile must not change what is computed with. A network
    # that ranks divide stays in the file, of which each reads its part.
    return Checkpoint(name, mapped=device.type != "cpu" or options.divided, repa=options.repa)


def open_weights(options: Options, device: torch.device, weights: Checkpoint | Held | None = None) -> Opened:
    """Fetch weights and decoder and complete the options. What the flags alone decide is refused before."""
    weights = weights or checkpoint_of(options, device)
    tier, vae_precision = choose_precision(options, device)
    return Opened(fetch(options, weights), weights, device, tier, vae_precision)


def choose_precision(options: Options, device: torch.device) -> tuple[str, str]:
    """Set the tier asked for, or the device's default. Returns its name and the decoder's arithmetic."""
    tier = options.precision or precision.default_tier(device)
    if tier == "tf32" and options.tf32 and not precision.supports(tier, device):
        print(f"--tf32: {device} has no {precision.TIERS[tier].hardware}; sampling in fp32")
        tier = "fp32"
    precision.apply_precision(tier, device)
    return tier, precision.decoder_precision(options.vae_precision, tier, device)


def fetch(options: Options, weights: Checkpoint | Held) -> Options:
    """Download what is not here yet of network and decoder. Returns the options with all that follows from the weights.
    Raises UsageError that names all that is missing."""
    missing = []

    def attempt(work, *arguments):
        try:
            work(*arguments)
        except UsageError as error:
            missing.append(error.marked)

    if options.vae and options.into_pictures:
        attempt(vae.find_vae, options.vae)
    attempt(weights.fetch)
    if not missing:
        options = options.complete(weights)
        if options.into_pictures:
            attempt(vae.find_vae, options.vae)
    if len(missing) > 1:
        missing.append("or take `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
    return options


def empty_model(options: Options) -> torch.nn.Module:
    """The options' model on the meta device: shapes without values."""
    build = options.weights.build if options.weights else MODELS[options.model]
    with shapes_only():
        return build(input_size=options.latent_size, num_classes=options.num_classes)


def guidance_of(options: Options) -> Guidance | Unguided:
    """The options' guidance."""
    if not options.guided:
        return Unguided()
    return Guidance(options.cfg_scale, options.num_classes, options.guidance_channels, options.guidance_interval)


def process_of(options: Options, weights: Checkpoint | Held) -> Process:
    """The options' process. Raises UsageError about a plan that is not for it."""
    if options.sampler in FLOWS:
        return FLOWS[options.sampler](options.num_sampling_steps)
    diffusion = create_diffusion(str(options.num_sampling_steps), learn_sigma=options.weights.learn_sigma)
    if options.forecast == "plan":
        return Strides(diffusion, plan_of(options, weights))
    if options.sampler in SOLVERS:
        return Solver(make_scheduler(options.sampler), options.num_sampling_steps)
    return Ddim(diffusion, options.eta) if options.sampler == "ddim" else Ancestral(diffusion)


def solver_of(scheduler: Any, options: Options, weights: Checkpoint | Held | None = None) -> Solver:
    """As `process_of`, by a scheduler that the caller holds."""
    if options.weights.flow:
        raise UsageError("`sampler`: a scheduler takes estimates of noise, a SiT's are velocities; give sde or euler")
    return Solver(scheduler, options.num_sampling_steps)


def batch_of(options: Options, batch: tuple[int, int] | None = None) -> Batch:
    """The network evaluations of a rank; batch: (latents, batch rows of each), default: all of a grid at once."""
    guidance = guidance_of(options)
    latents, copies = batch or (min(options.batch_size or 10**9, len(options.labels)), guidance.copies)
    return Batch(latents, copies, guidance.channels, options.latent_size, options.num_classes)


def load(opened: Opened, batch: tuple[int, int] | None = None, tuning: tuple = (), part: Part = WHOLE) -> Run:
    """The run of opened weights.

    batch: as `batch_of` has it; tuning, part: as loading.load.
    """
    options, weights, device, tier, _ = opened
    process, guidance = process_of(options, weights), guidance_of(options)
    trained = options.weights.image_size
    if trained not in (None, options.image_size):
        print(f"{options.model}: weights trained at {trained} px, sampling at {options.image_size} px")
    how = dict(fixed=options.precision is not None, tuning=tuning, part=part)
    with enough_memory(options):
        network, tier = loading.load(weights, empty_model(options), tier, device, batch_of(options, batch), **how)
    return Run(network, process, guidance, tier, device, options.latent_size)


def decoder_of(opened: Opened, captured: bool = False) -> LazyDecoder | None:
    """The options' decoder, not loaded yet; None for latents. captured: for many pictures, as CheckedDecoder has it."""
    options, _, device, tier, arithmetic = opened
    if not options.into_pictures:
        return None
    otherwise = precision.float32_decoder(tier, device)
    return LazyDecoder(options.vae, vae.find_vae(options.vae), arithmetic, otherwise, device, captured)


def ready(
    options: Options, batch: tuple[int, int] | None = None, weights: Held | None = None
) -> tuple[Opened, Run, LazyDecoder | None]:
    """All that a run of this process needs. weights: the caller's, in place of those that the options name."""
    opened = open_weights(options, loading.choose_device(options.device), weights)
    return opened, load(opened, batch), decoder_of(opened)


@contextmanager
def enough_memory(options: Options) -> Iterator[None]:
    """UsageError where the GPU's memory does not hold what is done inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UsageError(options.smaller_batch) from None


def describe(options: Options, run: Run, ranks: int | None = None) -> str:
    """What is about to be sampled, in a line; ranks: how many there are, in a command of many."""
    gpu, process = run.device.type == "cuda", run.process
    where = torch.cuda.get_device_name(run.device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    plan = f" ({process.evaluations} network evaluations)" if process.evaluations < process.steps else ""
    return (
        f"{options.model} · {options.image_size} px · {options.pictures} · {options.steps_and_guidance(plan)} · "
        f"{run.tier} · {where} · torch {torch.__version__}" + (f" · {ranks} rank{'s' * (ranks > 1)}" if ranks else "")
    )


#################################################################################
#                                    A grid                                     #
#################################################################################


def latents(
    options: GridOptions,
    run: Run,
    rows: slice = slice(None),
    on_step: OnStep | None = None,
    moves: Iterable[Kind] | None = None,
) -> Tensor:
    """Latents (n', C, L, L) of `rows` of the options' labels, from the options' seed."""
    with enough_memory(options):
        return run.latents(options.labels, options.seed, rows, options.batch_size, on_step, moves)


def warm_up(options: GridOptions, run: Run, watch: Stopwatch, rows: slice = slice(None)) -> None:
    """Make each kind of move once, where a first one takes longer than others: it compiles and is recorded, and the
    bar should not learn its pace from it."""
    if options.repeats > 1 or run.device.type == "cuda" and run.network.captures:
        with watch.phase("warm-up"):
            for part in slices(rows, len(options.labels), options.batch_size)[:1]:
                latents(options, run, part, moves=run.process.every_kind)


def sample(options: GridOptions, run: Run, watch: Stopwatch, rows: slice = slice(None), show: bool = True) -> Tensor:
    """`latents` with a bar, repeated and timed as the options say. show: whether this process prints."""
    total, times = run.process.steps * len(slices(rows, len(options.labels), options.batch_size)), []
    for _ in range(options.repeats):
        start = time.perf_counter()
        with watch.phase("sample"), step_bar(total, run.device, disable=not show) as queued:
            found = latents(options, run, rows, lambda index, _, queued=queued: queued(index))
        times.append(time.perf_counter() - start)
    if len(times) > 1 and show:
        spread = f"median {statistics.median(times):.3f} s, {min(times):.3f} to {max(times):.3f} s"
        print(f"sampling, {len(times)} runs after warm-up: {spread}")
    return found


def save(options: GridOptions, content: Tensor, watch: Stopwatch, decoder: LazyDecoder | None = None) -> None:
    """Write the options' output: latents, or pictures: pixels, or what a decoder makes of latents.

    Every file is whole or absent. Raises UsageError if the disk does not take it.
    """
    if not options.into_pictures:
        with watch.phase("save"):
            return output.save_latents(options.output, content)
    files = [(options.output, content)]
    if output.is_folder(options.output, options.output_type):
        names = output.picture_names(options.labels, options.class_names)
        files = zip((Path(options.output, name) for name in names), content.split(1), strict=True)
    for path, part in files:
        pixels = decode(decoder, part, watch) if decoder else part
        with watch.phase("save"):
            output.save_pictures(path, pixels)


def decode(decoder: LazyDecoder, latents: Tensor, watch: Stopwatch) -> Tensor:
    """As LazyDecoder.decode, timed."""
    with watch.phase("decode"):
        return decoder.decode(latents)


#################################################################################
#                              A grid of many ranks                             #
#################################################################################


def layout_of(opened: Opened, job: "Job") -> tuple["Evaluation", "Groups", Layout | None]:
    """What ranks evaluate together, their groups, and how they share it; None if that is to be measured. Raises
    UsageError for a layout that cannot run."""
    from accel.parallel import planner  # brings torch.distributed
    from accel.parallel.groups import Groups

    options, groups = opened.options, Groups(job, opened.device)
    tokens = (options.latent_size // options.patch_size) ** 2
    evaluation = planner.Evaluation(len(options.labels), tokens, empty_model(options).num_heads, opened.tier)
    if layout := wanted_layout(options, job.world):
        planner.check(layout, evaluation, groups)
    return evaluation, groups, layout


def wanted_layout(options: GridOptions, world: int) -> Layout | None:
    """The layout that --parallel names or arithmetic leaves; None if it is to be measured."""
    if not options.guided or options.parallel == "off":
        return OFF
    if options.layout is None:  # with a picture for every GPU there is nothing to share
        return OFF if len(options.labels) >= world else None
    return options.layout if options.layout.ranks > 1 else OFF


def share_of(options: GridOptions, world: int, layout: Layout | None) -> tuple[int, int]:
    """(latents, batch rows of each) of a network evaluation on a rank."""
    layout, n = layout or OFF, len(options.labels)
    at_once = min(n, (options.batch_size or n) * layout.busy(world) // layout.ranks)  # pictures, of all ranks
    return layout.batch(at_once, world, guidance_of(options).copies)


#################################################################################
#                                     Plans                                     #
#################################################################################


def plan_path(options: Options, weights: Checkpoint) -> Path:
    """Where the plan of the weights lies: --forecast-plan, or beside the checkpoint."""
    return Path(options.forecast_plan) if options.forecast_plan is not None else plan_beside(weights.path)


def plan_of(options: Options, weights: Checkpoint) -> list[Kind]:
    """The strides of the options' plan. Raises UsageError as read_plan does."""
    return read_plan(plan_path(options, weights), plan_settings(options, weights))


def plan_settings(options: Options, weights: Checkpoint) -> dict:
    """What a plan is made for."""
    return {
        "model": options.model,
        "image_size": options.image_size,
        "num_sampling_steps": options.num_sampling_steps,
        "cfg_scale": float(options.cfg_scale),
        "guidance_interval": list(options.guidance_interval),
        "guidance_channels": options.guidance_channels,
        "weights": weights.digest(),
    }
