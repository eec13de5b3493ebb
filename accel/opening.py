"""Open what a Config names: weights, decoder and arithmetic; then fill the Config, once."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from accel import precision
from accel.config import Config
from accel.errors import UsageError
from accel.families.recognise import Fit, published_name
from accel.gpu import missing_code
from accel.latents import LatentSpace
from accel.latents.files import PUBLISHED, find
from accel.weights import Weights
from accel.weights.checkpoint import open_checkpoint

T = TypeVar("T")


class Opened(NamedTuple):
    """The files of a run, its device, and its options with every open one filled."""

    config: Config
    weights: Weights
    fit: Fit  # family and sizes of the weights
    space: LatentSpace  # its decoder is None where no picture is decoded
    device: torch.device
    tier_is_asked_for: bool  # else bf16 may replace a float16 that overflows

    @property
    def latent_size(self) -> int:
        """Return the side of a latent."""
        return self.config.image_size // self.space.factor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a batch row."""
        return (self.latent_size // self.fit.patch_size) ** 2

    def changed(self, **options) -> "Opened":
        """Return the same files with other options. Raises UsageError as Config does, and
        for a tier that the device lacks.
        """
        config = replace(self.config, **options)
        asked = self.tier_is_asked_for
        if "precision" in options:
            config = with_arithmetic(replace(config, vae_precision="auto"), self.device)
            asked = True
        config = config.consistent(self.fit, self.space)
        return self._replace(config=config, tier_is_asked_for=asked)


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name, by default a GPU if there is one. Raises UsageError if
    this machine lacks it.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(
            f"`device={name}`: no such kind of device; try cuda, cuda:1 or cpu"
        ) from None
    if device.type == "cuda":
        _require_gpu(device)
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} cannot sample there; use cuda or cpu"
        )
    return device


def _require_gpu(device):
    if not torch.cuda.is_available():
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} finds no CUDA GPU; use `device=cpu`"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise UsageError(f"`device={device}`: this machine has {count} GPU(s), counted from 0")
    remedy = missing_code(device)
    if remedy:
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} has no code for "
            f"{torch.cuda.get_device_name(device)}; install {remedy}"
        )


def weights_of(config: Config, device: torch.device, divided: bool = False) -> Weights:
    """Return the weights that a config names, not fetched yet. Raises UsageError if there are
    none of that name.

    divided: ranks divide the network, so it stays in the file and each rank reads its part.
    A CPU computes with copies: writing to the file meanwhile changes no picture.
    """
    name = config.ckpt or config.defaults.ckpt
    if name is None:
        defaults = config.defaults
        name = published_name(
            config.named_model,
            config.image_size or defaults.image_size,
            config.num_classes or defaults.num_classes,
        )
    return open_checkpoint(name, mapped=divided or device.type != "cpu")


def open_model(
    config: Config,
    device: torch.device | None = None,
    weights: Weights | None = None,
    decodes: bool = True,
) -> Opened:
    """Open weights and decoder, and fill the config.

    weights: in place of those that the config names. decodes: whether pictures are decoded;
    latents need no decoder. Raises UsageError; for options that contradict each other, and
    for a tier that the device lacks, before anything is fetched.
    """
    device = device or choose_device(config.device)
    asked = config.tier is not None
    config = with_arithmetic(config, device)
    weights = weights or weights_of(config, device)
    space = _fetch(config, weights, decodes)
    fit = weights.fit(config.model, config.num_classes)
    config, space = _with_decoder(config, fit, space, decodes)
    return Opened(config.filled(fit, space), weights, fit, space, device, asked)


def with_arithmetic(config: Config, device: torch.device) -> Config:
    """Return the config with the tier and the decoder's arithmetic on `device`, and set the
    tier's backend switches.
    """
    tier = config.tier or precision.default_tier(device)
    if tier == "tf32" and config.tf32 and not precision.supports(tier, device):
        print(f"--tf32: {device} has no {precision.TIERS[tier].hardware}; sampling in fp32")
        tier = "fp32"
    precision.apply_precision(tier, device)
    decoder = precision.decoder_precision(config.vae_precision, tier, device)
    return replace(config, precision=tier, tf32=None, vae_precision=decoder)


def _fetch(config, weights, decodes):
    """Fetch the weights, and the decoder that is known without them. Return its space or
    None. Raises one UsageError for all that is missing.
    """
    missing = []

    def attempt(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except UsageError as error:
            missing.append(error.marked)
            return None

    name = config.named_vae
    space = None
    if decodes and name is not None:
        space = attempt(lambda: find(name, config.latent_stats))
    attempt(weights.fetch)
    if len(missing) > 1:
        missing.append("or use `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
    return space


def _with_decoder(config, fit, space, decodes):
    """Return the config with the decoder's name, and the latent space. Raises UsageError for
    a decoder of other latents than the network's.
    """
    defaults = fit.family.models.get(fit.model, fit.family.recipe)
    name = config.vae or fit.vae or defaults.vae
    if decodes and name != config.named_vae:
        if name in PUBLISHED:  # refused before it is fetched
            _require_channels(name, LatentSpace(), fit)
        space = find(name, config.latent_stats)
    if space is None:
        space = LatentSpace(fit.in_channels, defaults.factor)  # latents need no decoder
    if decodes:
        _require_channels(name, space, fit)
    return replace(config, vae=name), space


def _require_channels(name, space, fit):
    if space.channels != fit.in_channels:
        raise UsageError(
            f"`vae={name}`: decodes latents of {space.channels} channels, and {fit.model} makes "
            f"{fit.in_channels}; give the decoder that it was trained with"
        )
