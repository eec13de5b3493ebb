"""What turns options into values, for the commands, accel.api, scripts/ and bench/: nothing below knows options.

`open_weights`, `load` and `decoder_of` give what a run needs, `latents` or `sample` run it, `save` writes. FID jobs:
fid.py.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel import loading, output, precision
from accel.diffusion import create_diffusion
from accel.door.opening import Opened, digest_of, empty_model, open_weights
from accel.errors import UsageError
from accel.families.loaded_module import LoadedModule
from accel.forecast import plan_beside, read_plan
from accel.latents.decoder import Decoder
from accel.loading import Batch
from accel.network import WHOLE, Part
from accel.options import GridOptions, Options
from accel.parallel.layouts import OFF, Layout
from accel.parallel.placement import Placement
from accel.progress import Stopwatch, step_bar
from accel.run import Run
from accel.sampling import OnStep, count_copies
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.flow import FLOWS
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.process import Kind, Process
from accel.sampling.solvers import SOLVERS, Solver, make_scheduler
from accel.sampling.strides import Strides
from accel.weights.checkpoint import Checkpoint

if TYPE_CHECKING:  # a grid of one process does not wait for these
    from accel.kernels.linear import Tuner
    from accel.parallel.groups import Groups
    from accel.parallel.processes import Job

ALONE = Placement()

#################################################################################
#                           Weights, network and decoder                        #
#################################################################################


def guidance_of(options: Options) -> Guidance | Unguided:
    """The options' guidance."""
    if not options.guided:
        return Unguided()
    return Guidance(options.cfg_scale, options.num_classes, options.guidance_channels, options.guidance_interval)


def process_of(options: Options, weights: Checkpoint | LoadedModule) -> Process:
    """The options' process. Raises UsageError about a plan that is not for it."""
    if options.sampler in FLOWS:
        return FLOWS[options.sampler](options.num_sampling_steps, options.timestep_shift)
    diffusion = create_diffusion(str(options.num_sampling_steps), learn_sigma=options.fit.learn_sigma)
    if options.forecast == "plan":
        return Strides(diffusion, plan_of(options, weights))
    if options.sampler in SOLVERS:
        return Solver(make_scheduler(options.sampler), options.num_sampling_steps)
    return Ddim(diffusion, options.eta) if options.sampler == "ddim" else Ancestral(diffusion)


def solver_of(scheduler: Any, options: Options, weights: Checkpoint | LoadedModule | None = None) -> Solver:
    """As `process_of`, by a scheduler that the caller holds."""
    if options.family.prediction != "noise":
        others = ", ".join(options.family.samplers)
        raise UsageError(f"`sampler`: a scheduler takes estimates of noise, and this is a flow; give {others}")
    return Solver(scheduler, options.num_sampling_steps)


def batch_of(
    options: Options,
    process: Process,
    guidance: Guidance | Unguided,
    placement: Placement = ALONE,
    sizes: Iterable[int] | None = None,
) -> Batch:
    """The network evaluations of a run on any rank; sizes: the numbers of pictures that are denoised at once, default:
    those of a grid."""
    sizes = sizes or placement.sizes(len(options.labels), options.batch_size)
    rows = placement.every_rows(sizes, count_copies(process, guidance))
    return Batch(rows, guidance.channels, options.latent_size, options.num_classes)


def load(
    opened: Opened,
    placement: Placement = ALONE,
    sizes: Iterable[int] | None = None,
    tuner: "Tuner | None" = None,
    part: Part = WHOLE,
) -> Run:
    """The run of opened weights. placement, sizes: as `batch_of` has them; tuner, part: as loading.load."""
    options, weights, device, tier, _ = opened
    process, guidance = process_of(options, weights), guidance_of(options)
    trained = options.fit.trained_size(options.space.factor)
    if trained not in (None, options.image_size):
        print(f"{options.model}: weights trained at {trained} px, sampling at {options.image_size} px")
    batch = batch_of(options, process, guidance, placement, sizes)
    how = dict(fixed=options.precision is not None, tuner=tuner, part=part)
    with enough_memory(options):
        network, tier = loading.load(weights, options.fit, empty_model(options), tier, device, batch, **how)
    return Run(network, process, guidance, tier, device, options.latent_size)


def decoder_of(opened: Opened, captured: bool = False) -> Decoder | None:
    """The options' decoder, not loaded yet; None for latents. captured: for many pictures, as Decoder has it."""
    options, _, device, tier, arithmetic = opened
    if not options.into_pictures:
        return None
    return Decoder(options.space, device, arithmetic, precision.float32_decoder(tier, device), captured)


def ready(options: Options, weights: LoadedModule | None = None) -> tuple[Opened, Run, Decoder | None]:
    """All that a run of this process needs. weights: the caller's, in place of those that the options name."""
    opened = open_weights(options, loading.choose_device(options.device), weights)
    return opened, load(opened), decoder_of(opened)


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
        f"{options.model} · {options.image_size} px · {options.pictures} · {steps_and_guidance(options, plan)} · "
        f"{run.tier} · {where} · torch {torch.__version__}" + (f" · {ranks} rank{'s' * (ranks > 1)}" if ranks else "")
    )


def steps_and_guidance(options: Options, evaluations: str = "") -> str:
    """Return the run in words; evaluations: what follows the number of steps."""
    by = "" if options.sampler == "ddpm" else f"{options.sampler.upper()} "
    by += f"shift {options.timestep_shift:g} " * (options.timestep_shift != 1)
    low, high = options.guidance_interval
    interval = "" if (low, high) == (0, 1) else f" at levels {low:g} to {high:g}"
    usual = options.guidance_channels == Guidance.channels
    channels = "" if usual or options.cfg_scale == 1 else f" on {options.guidance_channels} channels"
    return f"{options.num_sampling_steps} {by}steps{evaluations} · cfg {options.cfg_scale:g}{interval}{channels}"


#################################################################################
#                                    A grid                                     #
#################################################################################


def latents(options: GridOptions, run: Run, placement: Placement = ALONE, on_step: OnStep | None = None) -> Tensor:
    """Latents (n', C, L, L) of the pictures that a rank denoises, from the options' seed."""
    with enough_memory(options):
        return run.latents(options.labels, options.seed, batches_of(options, placement), on_step)


def batches_of(options: GridOptions, placement: Placement = ALONE) -> list[slice]:
    """The slices of the options' labels that a rank denoises one after the other."""
    return placement.batches(len(options.labels), options.batch_size)


def warm_up(options: GridOptions, run: Run, watch: Stopwatch, placement: Placement = ALONE) -> None:
    """Make each move once, where a first one takes longer than others: the bar should not learn its pace from it."""
    if options.repeats > 1 or run.device.type == "cuda" and run.network.captures:
        with watch.phase("warm-up"), enough_memory(options):
            run.warm_up(options.labels, batches_of(options, placement))


def sample(options: GridOptions, run: Run, watch: Stopwatch, placement: Placement = ALONE, show: bool = True) -> Tensor:
    """`latents` with a bar, repeated and timed as the options say. show: whether this process prints."""
    total, times = run.process.steps * len(batches_of(options, placement)), []
    for _ in range(options.repeats):
        start = time.perf_counter()
        with watch.phase("sample"), step_bar(total, run.device, disable=not show) as queued:
            found = latents(options, run, placement, lambda index, _, queued=queued: queued(index))
        times.append(time.perf_counter() - start)
    if len(times) > 1 and show:
        spread = f"median {statistics.median(times):.3f} s, {min(times):.3f} to {max(times):.3f} s"
        print(f"sampling, {len(times)} runs after warm-up: {spread}")
    return found


def save(options: GridOptions, content: Tensor, watch: Stopwatch, decoder: Decoder | None = None) -> None:
    """Write the options' output: latents, or pictures: pixels, or what a decoder makes of latents.

    Every file is whole or absent. Raises UsageError if the disk does not take it.
    """
    if not options.into_pictures:
        with watch.phase("save"):
            return output.save_latents(options.output, content)
    files = [(options.output, content)]
    if output.is_folder(options.output, options.output_type):
        names = output.picture_names(options.labels, options.names)
        files = zip((Path(options.output, name) for name in names), content.split(1), strict=True)
    for path, part in files:
        pixels = decode(decoder, part, watch) if decoder else part
        with watch.phase("save"):
            output.save_pictures(path, pixels)


def decode(decoder: Decoder, latents: Tensor, watch: Stopwatch) -> Tensor:
    """As Decoder.decode, timed."""
    with watch.phase("decode"):
        return decoder.decode(latents)


#################################################################################
#                              A grid of many ranks                             #
#################################################################################


def layout_of(opened: Opened, job: "Job") -> tuple["Groups", Layout | None]:
    """The groups of ranks, and how they share a network evaluation; None if that is to be measured. Raises UsageError
    for a layout that cannot run."""
    from accel.parallel import planner  # brings torch.distributed
    from accel.parallel.groups import Groups

    options, groups = opened.options, Groups(job, opened.device)
    layout = wanted_layout(options, job.world)
    if layout not in (None, OFF):
        tokens = (options.latent_size // options.patch_size) ** 2
        planner.check(layout, tokens, empty_model(options).num_heads, groups)
    return groups, layout


def wanted_layout(options: GridOptions, world: int) -> Layout | None:
    """The layout that --parallel names or arithmetic leaves; None if it is to be measured."""
    if not options.guided or options.parallel == "off":
        return OFF
    layout = options.layout
    if layout is None:  # with a picture for every GPU there is nothing to share
        return OFF if len(options.labels) >= world else None
    return layout if layout.ranks > 1 else OFF


def place(opened: Opened, run: Run, groups: "Groups", layout: Layout | None) -> tuple[Run, Placement]:
    """(the run with the network as this rank evaluates it, this rank's placement); layout: None to measure."""
    from accel.parallel.planner import Work, share_evaluations

    options, tokens = opened.options, (run.side // run.network.patch_size) ** 2
    copies = count_copies(run.process, run.guidance)
    work = Work(len(options.labels), options.batch_size, copies, tokens, run.tier)
    network, placement = share_evaluations(run.network, work, groups, layout)
    if placement.layout.weights > 1:  # each rank has read its part
        opened.weights.close()
    return run._replace(network=network), placement


def decoders_of(opened: Opened, rank: int) -> tuple[Decoder | None, Decoder | None]:
    """(decoder of this rank's own pictures, decoder of all pictures on rank 0); one of them or, for latents, none."""
    if opened.options.decode == "each":
        return decoder_of(opened), None
    return None, decoder_of(opened) if rank == 0 else None


def decode_part(decoder: Decoder, latents: Tensor, side: int, watch: Stopwatch) -> Tensor:
    """Pixels (n', 3, side, side) of a rank's own pictures, which may be none."""
    return decode(decoder, latents, watch) if len(latents) else latents.new_zeros(0, 3, side, side)


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
        "weights": digest_of(weights, options.fit),
    }
