"""An FID job's order, and the record of all that decides its pictures' bits."""

import platform
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from accel import kernels
from accel.config import CHANNELS, FidJob
from accel.errors import UsageError
from accel.families import DEMO, Defaults
from accel.fid.folder import CODE, Order
from accel.flags import flag_names
from accel.latents.files import digest
from accel.opening import Opened
from accel.pipeline import Pipeline, opened_guidance

# Options that are recorded by their outcome, or decide no bit.
LEFT_OUT = {
    "ckpt",
    "config",
    "device",
    "guide",
    "latent_stats",
    "num_heads",
    "precision",
    "sample_dir",
    "tf32",
    "vae",
    "vae_precision",
    "weights_entry",
}
# Options that older folders, which may be resumed, lack: recorded only where they differ
# from these values.
LATER = {
    "guidance_interval": (0.0, 1.0),
    "guidance_channels": CHANNELS,
    "timestep_shift": 1.0,
    "noise_scale": Defaults().noise_scale,
    "t_eps": Defaults().t_eps,
}
# Published files, and the last ones of training runs, have these names in a folder each, whose
# name tells them apart.
SHARED_NAMES = {"model", "stage2_model", "checkpoint-last"}
USUAL_SAMPLERS = ("ddpm", "ddim", "sde")  # not in a folder's name


def require_seeds(job: FidJob, world: int) -> None:
    """Raise UsageError for a seed that gives a rank of upstream's stream none of 64 bits."""
    if job.world_independent_noise:
        return
    seed = job.config.seed
    if not -(2**63) <= seed * world <= 2**64 - world:
        raise UsageError(
            f"`seed={seed}`: times {world} ranks it must fit into 64 bits; use a smaller one"
        )


def order_of(job: FidJob, opened: Opened) -> Order:
    """Return the pictures that a job has to make. job: filled."""
    config = job.config
    side = opened.latent_size
    return Order(
        folder=folder_of(job),
        count=job.num_fid_samples,
        batch_size=job.per_proc_batch_size,
        seed=config.seed,
        num_classes=config.num_classes,
        image_size=config.image_size,
        latent=(opened.space.channels, side, side),
        drawn=opened_guidance(opened, upstreams_job=True).drawn,
        labels=opened.fit.family.label_orders[job.balanced_labels],
        independent=job.world_independent_noise,
    )


def folder_of(job: FidJob) -> Path:
    """Return the pictures' folder by upstream's rule, with options that upstream lacks before
    the seed: samples/DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0.

    Weights and decoders given as files or folders appear by their last name, or that of their
    folder, the model's own as "pretrained".
    """
    config = job.config
    changed = ""
    if config.sampler not in USUAL_SAMPLERS:
        changed += f"-{config.sampler}"
    if config.timestep_shift != 1:
        changed += f"-shift-{config.timestep_shift:g}"
    if config.guidance_interval != (0, 1):
        low, high = config.guidance_interval
        changed += f"-interval-{low:g}-{high:g}"
    if config.guidance_channels != CHANNELS:
        changed += f"-channels-{config.guidance_channels}"
    if config.guide is not None:
        changed += f"-guide-{_last_name(config.guide)}"
    return Path(job.sample_dir) / (
        f"{config.model.replace('/', '-')}-{_last_name(config.ckpt)}-size-{config.image_size}"
        f"-vae-{_last_name(config.vae)}-cfg-{config.cfg_scale}{changed}-seed-{config.seed}"
    )


def _last_name(given):
    if given is None or Path(given).is_relative_to(DEMO):
        return "pretrained"
    path = Path(given)
    if path.stem in SHARED_NAMES and path.parent.name:
        return path.parent.name
    return path.name.removesuffix(".pt").removesuffix(".safetensors")


def record_of(job: FidJob, opened: Opened, pipeline: Pipeline, world: int) -> dict:
    """Return all that decides a picture's bits, by the name of its flag if it has one; plain
    JSON. job: filled.
    """
    record = {}
    config = job.config
    for options in (config, job):
        for item in fields(options):
            value = getattr(options, item.name)
            if item.name in LEFT_OUT or LATER.get(item.name) == value:
                continue
            if item.name == "balanced_labels" and len({*opened.fit.family.label_orders}) == 1:
                continue  # the family has one order
            value = list(value) if isinstance(value, tuple) else value  # as in JSON
            record[flag_names(item, ranks=True)[0]] = value
    device = pipeline.device
    record |= {
        "--precision": pipeline.tier,
        "--ckpt (contents)": opened.fit.digest(opened.weights),
        "scale and shift of latents": [opened.space.scale, opened.space.shift],
        "--vae (contents)": digest(opened.space),
        "--vae-precision": pipeline.decoder.load().precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "torch": torch.__version__,
        CODE: kernels.version(),
    }
    if opened.guide is not None:
        record["--guide (contents)"] = opened.guide.digest()
    elif config.cfg_scale < 1:
        record["guidance below a scale of 1"] = True  # older folders have none
    if device.type == "cpu":
        record["number of threads"] = torch.get_num_threads()
    if not job.world_independent_noise:
        record["number of ranks"] = world
    return record


def _cpu():
    model = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
