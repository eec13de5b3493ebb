"""Build the values of accel/fid from an FID job's settings: its order, and the record
that decides pictures' bits.
"""

import platform
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from accel import kernels
from accel.door import guidance_of
from accel.door.opening import digest_of
from accel.errors import UsageError
from accel.families import DEMO
from accel.fid.folder import CODE, Order
from accel.flags import flag_names
from accel.latents.decoder import Decoder
from accel.latents.files import digest
from accel.request import FidRequest
from accel.run import Run
from accel.sampling.flow import FLOWS
from accel.sampling.guidance import Guidance
from accel.settings import FidSettings

# Fields of a request that are recorded by their outcome, or decide no bit.
LEFT_OUT = {
    "ckpt",
    "vae",
    "latent_stats",
    "num_heads",
    "weights_entry",
    "device",
    "precision",
    "vae_precision",
    "tf32",
    "sample_dir",
}
# Fields that older folders, which may be resumed, lack: recorded only where they differ
# from the default.
LATER = {"guidance_interval": (0.0, 1.0), "guidance_channels": 3, "timestep_shift": 1.0}


def require_seeds(request: FidRequest, world: int) -> None:
    """Raise UsageError for a seed that gives a rank of upstream's stream none of 64 bits."""
    if (
        not request.world_independent_noise
        and not -(2**63) <= request.seed * world <= 2**64 - world
    ):
        raise UsageError(
            f"`seed={request.seed}`: times {world} ranks it must fit into 64 bits; use a smaller "
            "one"
        )


def order_of(settings: FidSettings) -> Order:
    return Order(
        folder=folder_of(settings),
        count=settings.num_fid_samples,
        batch_size=settings.per_proc_batch_size,
        seed=settings.seed,
        num_classes=settings.num_classes,
        image_size=settings.image_size,
        latent=(settings.space.channels, settings.latent_size, settings.latent_size),
        copies=guidance_of(settings).copies,
        balanced=settings.balanced_labels,
        independent=settings.world_independent_noise,
        noise_from_cpu=settings.sampler in FLOWS and FLOWS[settings.sampler].noise_from_cpu,
    )


def folder_of(settings: FidSettings) -> Path:
    """Return the pictures' folder by upstream's rule:
    samples/DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0, with settings that
    upstream lacks before the seed.

    Weights and decoders given as files or folders appear by their last name, the model's
    own as "pretrained".
    """

    def name(value):
        own = value is None or Path(value).is_relative_to(DEMO)
        return (
            "pretrained"
            if own
            else Path(value).name.removesuffix(".pt").removesuffix(".safetensors")
        )

    changed = f"-{settings.sampler}" * (settings.sampler not in ("ddpm", "ddim", "sde"))
    changed += f"-shift-{settings.timestep_shift:g}" * (settings.timestep_shift != 1)
    if settings.guidance_interval != (0, 1):
        changed += "-interval-{:g}-{:g}".format(*settings.guidance_interval)
    changed += f"-channels-{settings.guidance_channels}" * (
        settings.guidance_channels != Guidance.channels
    )
    weights = f"{settings.model.replace('/', '-')}-{name(settings.request.ckpt)}"
    return Path(settings.sample_dir) / (
        f"{weights}-size-{settings.image_size}-vae-{name(settings.vae)}-cfg-{settings.cfg_scale}{changed}-seed-{settings.seed}"
    )


def settings_of(settings: FidSettings, run: Run, decoder: Decoder, world: int) -> dict:
    """Return all that decides a picture's bits, by the name of its flag if it has one;
    plain JSON.
    """
    device = run.device
    default = {name for name, usual in LATER.items() if getattr(settings, name) == usual}
    relevant = [item for item in fields(FidRequest) if item.name not in LEFT_OUT | default]
    values = {flag_names(item, ranks=True)[0]: getattr(settings, item.name) for item in relevant}
    # as in JSON
    record = {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
    record |= {
        "--precision": run.tier,
        "--ckpt (contents)": digest_of(settings),
        "scale and shift of latents": [settings.space.scale, settings.space.shift],
        "--vae (contents)": digest(settings.space),
        "--vae-precision": decoder.load().precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        CODE: kernels.version(kernels.FOLDER),
    }
    if device.type == "cpu":
        record |= {"device": _cpu(), "number of threads": torch.get_num_threads()}
    if not settings.world_independent_noise:
        record["number of ranks"] = world
    return record


def _cpu():
    model = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
