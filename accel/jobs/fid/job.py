"""Run an FID job: make its plan and the record of all settings that affect the pictures, and sample
the missing batches.
"""

import logging
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel import kernels
from accel.config.options import DEFAULTS, FID, JOB, OPTIONS, USER
from accel.config.rules import Request, Values
from accel.decoders.loading import digest
from accel.distributed import Ranks
from accel.errors import Stopped, UsageError
from accel.families import DEMO, Defaults
from accel.io.filesystem import cache_folder, sync_folder
from accel.io.output import print_result, to_uint8
from accel.io.progress import Stopwatch, progress
from accel.jobs.fid import npz
from accel.jobs.fid.folder import (
    KERNELS_SETTING,
    MACHINE_SETTINGS,
    Batches,
    Plan,
    folder_lock,
    npz_path,
    open_folder,
    write_pictures,
)
from accel.jobs.fid.noise import PictureNoise, UpstreamNoise
from accel.kernels.linear import Tuner
from accel.pipeline import Pipeline
from accel.run import Run
from accel.run.opening import open_on_ranks
from accel.sampling.guidance import CHANNELS

log = logging.getLogger(__name__)

# Options that affect no bit, or are recorded by their effect, such as the contents of --ckpt.
NOT_RECORDED = {
    "ckpt",
    "config",
    "device",
    "guide",
    "json",
    "latent_stats",
    "num_heads",
    "precision",
    "quiet",
    "sample_dir",
    "tf32",
    "vae",
    "vae_precision",
    "weights_entry",
}
# Options that are missing in folders of older versions: recorded only if not equal to these values,
# so that such folders can be resumed.
SETTINGS_ADDED_LATER = {
    "guidance_interval": (0.0, 1.0),
    "guidance_channels": CHANNELS,
    "timestep_shift": 1.0,
    "noise_scale": Defaults().noise_scale,
    "t_eps": Defaults().t_eps,
}
# File names that many checkpoints share: the folder's name appears in place of them.
SHARED_NAMES = {"model", "stage2_model", "checkpoint-last"}
UNNAMED_SAMPLERS = ("ddpm", "ddim", "sde")  # not part of the folder's name


def make_folder(request: Request, ranks: Ranks) -> None:
    """Open the request, lock the folder, load and sample. Raises as `fill`."""
    ranks.run_collectively(lambda: require_seeds(request.values, ranks.world), only=0)
    run, watch = open_on_ranks(request, ranks)
    plan = Plan(
        folder=folder_of(run),
        count=run.count,
        batch_size=run.settings.per_proc_batch_size,
        seed=run.settings.seed,
        num_classes=run.settings.num_classes,
        image_size=run.settings.image_size,
        latent=(run.space.channels, run.latent_size, run.latent_size),
        drawn=run.guidance.noise_rows,
        labels=run.spec.family.label_orders[run.settings.balanced_labels],
        independent=run.settings.world_independent_noise,
    )
    warn_of_legacy_folder(run)
    with ExitStack() as stack:
        # Before the network is loaded, because its autotuner writes to the folder.
        ranks.run_collectively(lambda: stack.enter_context(folder_lock(plan.folder)), only=0)
        with watch.phase("load"):
            # A resumed job must use the same algorithms: its own come before the user's.
            folders = [plan.folder / ".job", cache_folder()]
            tuner = Tuner(folders, ranks.from_rank_0)
            pipeline = ranks.run_collectively(
                lambda: Pipeline.load(run, sizes=plan.batch_sizes, tuner=tuner)
            )
        log.info(run.describe(pipeline.machine, ranks.world))
        record = ranks.run_collectively(lambda: record_of(run, pipeline, ranks.world))
        fill(plan, ranks, record, pipeline, watch, not run.settings.quiet)
    run.repeat_assumed_family()
    if run.settings.json and ranks.rank == 0:
        settings = replace(run.settings, precision=pipeline.tier)
        files = [str(plan.folder), str(npz_path(plan.folder))]
        print_result(files, watch.phases, settings.as_json())


def fill(
    plan: Plan,
    ranks: Ranks,
    settings: dict,
    pipeline: Pipeline,
    watch: Stopwatch,
    show: bool,
) -> None:
    """Sample the missing pictures of `plan` and write the .npz. settings: as for `open_folder`.
    show: whether to show progress.

    Raises Stopped when asked to stop; UsageError if settings differ between ranks or from the
    folder's, or if the disk is full.
    """
    ranks.require_equal(settings, MACHINE_SETTINGS)
    if plan.labels == "class_by_class" and plan.count % plan.num_classes:
        log.warning(
            f"{plan.count} pictures are not a multiple of {plan.num_classes} classes: some "
            "classes have one more"
        )
    batches = Batches(plan, ranks.rank, ranks.world)
    # Only rank 0 lists the folder: the views of a network file system may differ between nodes,
    # and a batch could be left out.
    finished = ranks.from_rank_0(lambda: _open_folder(batches, settings))
    with disk_errors(plan.folder):
        if len(finished) < batches.count:
            _make_pictures(pipeline, watch, ranks, batches, finished, show)
        if ranks.rank == 0:
            with watch.phase("npz"):
                npz.write(plan.folder, plan.count, plan.image_size, lambda: ranks.stopping)
    archive = npz_path(plan.folder)
    in_archive = "all" if plan.count == batches.total else f"the first {plan.count}"
    log.info(f"{plan.folder}: {batches.total} pictures · {archive}: {in_archive} · {watch}")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Convert OSError to UsageError with the remedy: free space and resume."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise UsageError(
            f"{error.strerror} at {error.filename or folder}",
            "fix that or free some space, and start again with the same command to resume",
            parameter="sample_dir",
        ) from None


def _open_folder(batches, settings):
    """Open the folder, on rank 0. Return the finished batches."""
    plan = batches.plan
    with disk_errors(plan.folder):
        # With these orders a larger number of pictures begins with the same ones.
        can_grow = plan.labels in ("random", "by_number")
        grown = open_folder(plan.folder, settings, can_grow)
        finished = batches.finished()
        if grown or len(finished) < batches.count:
            # The archive is written again: new pictures can have other bits, by other kernels.
            (plan.folder / npz.RECORD).unlink(missing_ok=True)
            sync_folder(plan.folder / ".job")
        return finished


def _make_pictures(pipeline, watch, ranks, batches, finished, show):
    """Sample this rank's share of the unfinished batches. Raises Stopped if any rank was asked
    to stop.
    """
    plan = batches.plan
    todo = batches.to_draw(finished)
    already = sum(len(batches.pictures(batch)) for batch in finished)
    noise_type = PictureNoise if plan.independent else UpstreamNoise
    noise = noise_type(batches, pipeline.device, pipeline.process)
    with (
        progress(
            show and ranks.rank == 0, total=batches.total, initial=already, unit="picture"
        ) as bar,
        ThreadPoolExecutor(1) as background,  # writes one batch while the next is sampled
    ):
        written = background.submit(lambda: None)
        while todo and not ranks.stopping:
            batch = todo.pop(0)
            z, labels, draw = noise.batch(batch)
            if batch in finished:
                # Draw, since a CPU generator has no offset to advance.
                with watch.phase("noise"):
                    for _ in range(pipeline.process.noise_draws):
                        draw()
                continue
            with watch.phase("sample"):
                latents = pipeline.denoise(z, labels, draw)
            with watch.phase("decode"):
                pixels = to_uint8(pipeline.decode(latents), pipeline.decoder.to_uint8_range).numpy()
            written.result()  # keep at most one batch in memory
            numbers = batches.pictures(batch)
            written = background.submit(write_pictures, plan.folder, numbers, pixels)
            bar.update(already + ranks.add(len(pixels)) - bar.n)
        written.result()
        left = ranks.all_gather_object(len(todo))  # waits for all ranks
        bar.update(already + ranks.add(0) - bar.n)
    if any(left):
        raise Stopped(f"stopped; start again with the same command to resume {plan.folder}")


def require_seeds(values: Values, world: int) -> None:
    """Raise UsageError if upstream's rank seeds, seed · world + rank, exceed 64 bits."""
    seed = values.get("seed", DEFAULTS["seed"])
    if values.get("world_independent_noise") or -(2**63) <= seed * world <= 2**64 - world:
        return
    raise UsageError(
        f"times {world} ranks it must fit into 64 bits",
        "use a smaller one",
        parameter="seed",
        value=seed,
    )


def folder_of(run: Run) -> Path:
    """Return the folder by upstream's naming rule, with this fork's options before the seed:
    samples/DiT-XL-2-pretrained-size-256-vae-ema-cfg-1.5-seed-0.

    Checkpoints and decoders appear as their file or folder name, published weights as
    "pretrained".
    """
    changed = ""
    if run.settings.sampler not in UNNAMED_SAMPLERS:
        changed += f"-{run.settings.sampler}"
    if run.settings.timestep_shift != 1:
        changed += f"-shift-{run.settings.timestep_shift:g}"
    if run.settings.guidance_interval != (0, 1):
        low, high = run.settings.guidance_interval
        changed += f"-interval-{low:g}-{high:g}"
    if run.settings.guidance_channels != CHANNELS:
        changed += f"-channels-{run.settings.guidance_channels}"
    if run.settings.guide is not None:
        changed += f"-guide-{_last_name(run.settings.guide)}"
    model = run.settings.model.replace("/", "-")
    return Path(run.settings.sample_dir) / (
        f"{model}-{_last_name(run.settings.ckpt)}-size-{run.settings.image_size}"
        f"-vae-{_last_name(run.settings.vae)}-cfg-{run.settings.cfg_scale}"
        f"{changed}-seed-{run.settings.seed}"
    )


def warn_of_legacy_folder(run: Run) -> None:
    """Warn if a new folder would be created although one exists with the former defaults, which
    were a grid's.
    """
    legacy: dict[str, Any] = {}
    if run.settings.ckpt is None and run.settings.origins["image_size"] != USER:
        legacy["image_size"] = run.spec.defaults.image_size
    if run.settings.origins["cfg_scale"] == JOB:
        legacy["cfg_scale"] = run.spec.defaults.cfg_scale
    folder = folder_of(replace(run, settings=replace(run.settings, **legacy)))
    if folder.is_dir() and not folder_of(run).exists():
        flags = " ".join(f"{OPTIONS[name].flag_names()[0]} {legacy[name]}" for name in legacy)
        log.warning(f"{folder}: was made with other defaults; to continue it: {flags}")


def _last_name(given):
    if given is None or Path(given).is_relative_to(DEMO):
        return "pretrained"
    path = Path(given)
    if path.stem in SHARED_NAMES and path.parent.name:
        return path.parent.name
    return path.name.removesuffix(".pt").removesuffix(".safetensors")


def record_of(run: Run, pipeline: Pipeline, world: int) -> dict:
    """Return all settings that affect a picture's bits, by flag where there is one, as JSON."""
    record = {}
    for option in OPTIONS.values():
        value = getattr(run.settings, option.name)
        if (
            FID not in option.jobs
            or option.name in NOT_RECORDED
            or SETTINGS_ADDED_LATER.get(option.name) == value
            # The option has no effect in some families.
            or (option.name == "balanced_labels" and len({*run.spec.family.label_orders}) == 1)
        ):
            continue
        value = list(value) if isinstance(value, tuple) else value  # as in JSON
        record[option.flag_names(ranks=True)[0]] = value
    device = pipeline.device
    decoder = pipeline.decoder
    assert decoder is not None
    record |= {
        "--precision": pipeline.tier,
        "--ckpt (contents)": run.checkpoint.digest(),
        "scale and shift of latents": [run.space.scale, run.space.shift],
        "--vae (contents)": digest(run.space),
        "--vae-precision": decoder.load().precision,  # depends on a check of its weights
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "torch": torch.__version__,
        KERNELS_SETTING: kernels.version(),
    }
    if run.guide is not None:
        record["--guide (contents)"] = run.guide.digest()
    elif run.settings.cfg_scale < 1:
        record["guidance below a scale of 1"] = True  # missing in older folders
    if device.type == "cpu":
        record["number of threads"] = torch.get_num_threads()
    if not run.settings.world_independent_noise:
        record["number of ranks"] = world
    return record


def _cpu():
    model = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
