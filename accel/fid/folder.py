"""What an FID job makes: the folder's name, the pictures, their batches, and the settings that decide their bits."""

import hashlib
import io
import platform
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from accel import kernels, vae
from accel.errors import UsageError
from accel.files import atomic_write, read_small
from accel.flags import flag_names
from accel.options import DEFAULTS_OF, OF_A_GRID, DistributedOptions

if TYPE_CHECKING:
    from accel.engine import Engine

# Recorded as what they came to.
RESOLVED = {"ckpt", "vae", "device", "tf32", "forecast", "forecast_plan"}
CODE = "this code's kernels"


def folder_of(options: DistributedOptions) -> Path:
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


def npz_of(folder: Path) -> Path:
    """The archive of a folder's pictures."""
    return folder.with_name(f"{folder.name}.npz")


def picture_name(number: int) -> str:
    """The name of a picture's file."""
    return f"{number:06d}.png"


def write_picture(path: Path, pixels: np.ndarray) -> str:
    """Write pixels (H, W, 3) uint8 as a PNG, durably. Returns the file's digest, 16 hex digits."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, format="PNG")
    with atomic_write(path, durable=True, through_link=False) as file:
        file.write(content.getvalue())
    return _digest(content.getvalue())


def read_picture(path: Path, digests: Collection[str]) -> np.ndarray:
    """Pixels (H, W, 3) uint8 of a file that `write_picture` made. UsageError if its digest is not among `digests`."""
    content = b""
    with suppress(OSError):
        content = read_small(path, 2**28)
    if _digest(content) not in digests:
        raise UsageError(f"{path}: is unreadable or was changed; delete it and start again: it is made anew")
    return np.asarray(Image.open(io.BytesIO(content)))


def _digest(content):
    return hashlib.sha256(content).hexdigest()[:16]


class Batches:
    """Which batch holds which pictures, and which rank makes it.

    Upstream's way: in a round each rank makes n pictures, interleaved by rank; the total is rounded up to whole rounds.
    The world-independent way: batch b is pictures b·n … b·n + n - 1, whoever makes it; the last may be smaller.
    """

    def __init__(self, options: DistributedOptions, rank: int, world: int):
        self.n, self.wanted, self.rank, self.world = options.per_proc_batch_size, options.num_fid_samples, rank, world
        self.independent = options.world_independent_noise
        each = self.n if self.independent else self.n * world
        self.count = -(-self.wanted // each) * each // self.n  # batches of all ranks
        self.total = self.wanted if self.independent else self.count * self.n

    def left(self, finished: Collection[int]) -> list[int]:
        """This rank's share of the batches that are not in `finished`, in order."""
        if self.independent:
            return [batch for batch in range(self.count) if batch not in finished][self.rank :: self.world]
        return [batch for batch in range(self.rank, self.count, self.world) if batch not in finished]

    def pictures(self, batch: int) -> range:
        """Picture numbers of a batch. In upstream's way, batch i·world + rank is the i-th of that rank."""
        if self.independent:
            return range(batch * self.n, min((batch + 1) * self.n, self.wanted))
        first = batch // self.world * self.world * self.n + batch % self.world
        return range(first, first + self.n * self.world, self.world)


def settings_of(engine: "Engine", batches: Batches) -> dict:
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
    if not batches.independent:
        settings["number of ranks"] = batches.world
    return settings


def _cpu():
    model = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        model = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].splitlines()[0]
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
