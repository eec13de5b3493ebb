"""From a command's options to the values of an FID job (accel/fid)."""

import platform
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from accel import kernels, vae
from accel.engine import Engine
from accel.errors import UsageError
from accel.fid import Maker
from accel.fid.folder import CODE, Order
from accel.flags import flag_names
from accel.options import DEFAULTS_OF, OF_A_GRID, FidOptions
from accel.weights.identity import CHANNELS

# Recorded as what they came to.
RESOLVED = {"ckpt", "vae", "device", "tf32", "forecast", "forecast_plan"}


def check(options: FidOptions, world: int) -> None:
    """Refuse what can be refused before weights are fetched and read: a UsageError."""
    if not options.world_independent_noise and not -(2**63) <= options.seed * world <= 2**64 - world:
        raise UsageError(
            f"--global-seed {options.seed}: times {world} ranks it must fit into 64 bits; use a smaller one"
        )


def order_of(options: FidOptions) -> Order:
    """What the options ask for."""
    return Order(
        folder=folder_of(options),
        count=options.num_fid_samples,
        batch_size=options.per_proc_batch_size,
        seed=options.seed,
        num_classes=options.num_classes,
        image_size=options.image_size,
        latent=(CHANNELS, options.latent_size, options.latent_size),
        copies=2 if options.guided else 1,
        balanced=options.balanced_labels,
        independent=options.world_independent_noise,
    )


def folder_of(options: FidOptions) -> Path:
    """The pictures' folder by upstream's rule: samples/DiT-XL-2-pretrained-size-512-vae-ema-cfg-4.0-seed-0.

    Weights and decoders given as files or folders appear by their last name, the model's own as "pretrained".
    """

    def name(flag):
        value = getattr(options, flag)
        own = value == DEFAULTS_OF.get(options.model, {}).get(flag)
        return "pretrained" if own else Path(value).name.removesuffix(".pt").removesuffix(".safetensors")

    return Path(options.sample_dir) / (
        f"{options.model.replace('/', '-')}-{name('ckpt')}-size-{options.image_size}-vae-{name('vae')}"
        f"-cfg-{options.cfg_scale}-seed-{options.seed}"
    )


def settings_of(engine: Engine, world: int) -> dict:
    """All that decides a picture's bits, by the name of its flag where it has one; plain JSON."""
    options, device = engine.options, engine.device
    left_out = {*OF_A_GRID, *RESOLVED, "sample_dir"}
    relevant = [item for item in fields(options) if item.metadata and item.name not in left_out]
    settings = {flag_names(type(options), item.name)[0]: getattr(options, item.name) for item in relevant} | {
        "--precision": engine.precision,
        "--ckpt (contents)": engine.checkpoint.digest(),
        "--vae (contents)": vae.digest(engine.vae_folder),
        "--vae-precision": engine.load_decoder().precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        CODE: kernels.version(kernels.FOLDER),
    }
    if device.type == "cpu":
        settings |= {"device": _cpu(), "number of threads": torch.get_num_threads()}
    if options.forecast == "plan":
        settings["--forecast"] = engine.process.setting
    if not options.world_independent_noise:
        settings["number of ranks"] = world
    return settings


def _cpu():
    model = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


def maker_of(engine: Engine) -> Maker:
    """What makes the pictures."""

    return Maker(engine.denoise, engine.decode, engine.device, engine.watch)
