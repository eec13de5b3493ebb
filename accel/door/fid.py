"""From an FID job's options to the values of accel/fid: an order, what makes its pictures, what decides their bits."""

import platform
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from accel import kernels
from accel.door import enough_memory, guidance_of
from accel.door.opening import Opened, digest_of
from accel.errors import UsageError
from accel.families import DEMO
from accel.fid import Maker
from accel.fid.folder import CODE, Order
from accel.flags import flag_names
from accel.latents.decoder import Decoder
from accel.latents.files import digest
from accel.options import FidOptions
from accel.progress import Stopwatch
from accel.run import Run
from accel.sampling.flow import FLOWS
from accel.sampling.guidance import CHANNELS as CHANNELS_GUIDED

# Recorded as what they came to.
RESOLVED = {"ckpt", "vae", "latent_stats", "device", "tf32", "forecast", "forecast_plan"}
# Younger than folders that may be resumed: recorded where they are not the default.
LATER = {"guidance_interval": (0.0, 1.0), "guidance_channels": 3, "timestep_shift": 1.0}


def require_seeds(options: FidOptions, world: int) -> None:
    """Raise UsageError for a seed that gives a rank none."""
    if not options.world_independent_noise and not -(2**63) <= options.seed * world <= 2**64 - world:
        raise UsageError(f"`seed={options.seed}`: times {world} ranks it must fit into 64 bits; use a smaller one")


def order_of(options: FidOptions) -> Order:
    """What the options ask for."""
    return Order(
        folder=folder_of(options),
        count=options.num_fid_samples,
        batch_size=options.per_proc_batch_size,
        seed=options.seed,
        num_classes=options.num_classes,
        image_size=options.image_size,
        latent=(options.space.channels, options.latent_size, options.latent_size),
        copies=guidance_of(options).copies,
        balanced=options.balanced_labels,
        independent=options.world_independent_noise,
        noise_from_cpu=options.sampler in FLOWS and FLOWS[options.sampler].noise_from_cpu,
    )


def folder_of(options: FidOptions) -> Path:
    """The pictures' folder by upstream's rule: samples/DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0, with what
    upstream has not before the seed.

    Weights and decoders given as files or folders appear by their last name, the model's own as "pretrained".
    """

    def name(flag):
        value = getattr(options, flag)
        own = value is None or Path(value).is_relative_to(DEMO)
        return "pretrained" if own else Path(value).name.removesuffix(".pt").removesuffix(".safetensors")

    changed = f"-{options.sampler}" * (options.sampler not in ("ddpm", "ddim", "sde"))
    changed += f"-shift-{options.timestep_shift:g}" * (options.timestep_shift != 1)
    if options.guidance_interval != (0, 1):
        changed += "-interval-{:g}-{:g}".format(*options.guidance_interval)
    changed += f"-channels-{options.guidance_channels}" * (options.guidance_channels != CHANNELS_GUIDED)
    return Path(options.sample_dir) / (
        f"{options.model.replace('/', '-')}-{name('ckpt')}-size-{options.image_size}-vae-{name('vae')}"
        f"-cfg-{options.cfg_scale}{changed}-seed-{options.seed}"
    )


def maker_of(options: FidOptions, run: Run, decoder: Decoder, watch: Stopwatch) -> Maker:
    """What makes the pictures."""

    def denoise(z, labels, draw):
        with enough_memory(options):
            return run.denoise(z, labels, draw)

    return Maker(denoise, decoder.decode, run.device, watch, run.process.draws)


def settings_of(opened: Opened, run: Run, decoder: Decoder, world: int) -> dict:
    """All that decides a picture's bits, by the name of its flag where it has one; plain JSON."""
    options, device = opened.options, run.device
    default = {name for name, usual in LATER.items() if getattr(options, name) == usual}
    left_out = {*RESOLVED, *default, "sample_dir"}
    relevant = [item for item in fields(options) if item.metadata and item.name not in left_out]
    settings = {flag_names(item, ranks=True)[0]: _plain(getattr(options, item.name)) for item in relevant} | {
        "--precision": run.tier,
        "--ckpt (contents)": digest_of(opened.weights, options.fit),
        "scale and shift of latents": [options.space.scale, options.space.shift],
        "--vae (contents)": digest(options.space),
        "--vae-precision": decoder.load().precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        CODE: kernels.version(kernels.FOLDER),
    }
    if device.type == "cpu":
        settings |= {"device": _cpu(), "number of threads": torch.get_num_threads()}
    if options.forecast == "plan":
        settings["--forecast"] = run.process.setting
    if not options.world_independent_noise:
        settings["number of ranks"] = world
    return settings


def _plain(value):
    return list(value) if isinstance(value, tuple) else value  # as JSON has it


def _cpu():
    model = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
