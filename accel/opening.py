"""Open what a Config names: the weights, their decoder and the arithmetic; then fill the
Config, once.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel import precision
from accel.config import Config
from accel.errors import UsageError, shown
from accel.families import family_of
from accel.families.recognise import Fit, recognise, shipped_as
from accel.latents import LatentSpace
from accel.latents.files import PUBLISHED, find
from accel.progress import Stopwatch
from accel.ranks import Ranks
from accel.weights import Weights
from accel.weights.checkpoint import Checkpoint

if TYPE_CHECKING:  # few runs have one
    from accel.guide import Guide

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """The files of a run and its device, and its options with every open one filled."""

    config: Config
    weights: Weights
    fit: Fit  # family and sizes of the weights
    space: LatentSpace  # its decoder is None where no picture is decoded
    device: torch.device
    tier_is_asked_for: bool  # else bf16 may replace a float16 that overflows
    guide: "Guide | None" = None

    @property
    def latent_size(self) -> int:
        """Return the side of a latent."""
        return self.config.image_size // self.space.factor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a batch row."""
        return (self.latent_size // self.fit.patch_size) ** 2

    def changed(self, **options: Any) -> "Opened":
        """Return the same files with other options. The decoder's arithmetic follows
        another precision unless vae_precision is given too. Raises UsageError as Config
        does, and for a tier that the device lacks.
        """
        if "precision" in options:
            options = {"vae_precision": "auto", **options}
        config = with_arithmetic(replace(self.config, **options), self.device)
        config = config.filled(self.fit).sized(self.fit, self.space)
        asked = self.tier_is_asked_for or "precision" in options
        return self._replace(config=config, tier_is_asked_for=asked)

    @property
    def has_null_label(self) -> bool:
        """Return whether the null label can be sampled: by the guide too."""
        return self.fit.null_class and (self.guide is None or self.guide.fit.null_class)


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
        from accel import gpu  # a CPU needs none

        gpu.require(device)
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} cannot sample there; use cuda or cpu"
        )
    return device


def weights_of(config: Config, device: torch.device) -> Checkpoint:
    """Return the weights that a config names, not fetched yet. Raises UsageError if there are
    none of that name. A CPU computes with copies: writing to the file changes no picture.
    """
    name = config.ckpt or config.defaults.ckpt
    if name is None:
        # Weights that ship or are given have a path.
        from accel.families.published import published_name

        defaults = config.defaults
        name = published_name(
            family_of(config.named_model),
            config.named_model,
            config.image_size or defaults.image_size,
            config.num_classes or defaults.num_classes,
        )
    return Checkpoint(name, device.type != "cpu", config.weights_entry)


def open_model(
    config: Config,
    device: torch.device | None = None,
    weights: Weights | None = None,
    decodes: bool = True,
    guide: Weights | None = None,
) -> Opened:
    """Open weights, guide and decoder, and fill the config.

    weights, guide: in place of those that the config names. decodes: whether pictures are
    decoded; latents need no decoder. Raises UsageError: for a tier that the device lacks before
    anything is fetched, for options that contradict the weights before a decoder is.
    """
    device = device or choose_device(config.device)
    config = config.with_file(decodes)
    asked = config.tier is not None
    config = with_arithmetic(config, device)
    weights = weights or weights_of(config, device)
    if guide is None and config.guide is not None:
        from accel.guide import about_guide  # a network by itself needs none

        with about_guide():
            guide = Checkpoint(config.guide, device.type != "cpu")
    checkpoints = [each for each in (weights, guide) if isinstance(each, Checkpoint)]
    if not all(each.is_here for each in checkpoints):
        from accel.fetching import fetch  # most runs have all files

        fetch(config, weights, guide, decodes)

    if isinstance(weights, Checkpoint):
        fit = fit_of_file(weights, config.model, config.num_classes, config.num_heads)
    else:
        fit = weights.fit
        require_schedule(weights.name, fit)
    if config.config is not None:
        from accel.families import config_file

        config_file.require_network(config.config, "ckpt", weights.name, fit)
        log.warning(config_file.notice(config.config, vars(config)))
    opened_guide = None
    if guide is not None:
        from accel.guide import open_guide

        opened_guide = open_guide(guide, weights, fit, config)

    is_given = config.vae is not None or config.latent_stats is not None
    config = config.filled(fit)  # before a decoder is fetched
    space = LatentSpace(fit.in_channels, fit.defaults.factor)
    if decodes:
        space = _decoder(config, is_given, weights, fit)
    space = _as_trained(space, config, fit, decodes)
    size_in_file = fit.image_size
    fit = fit.decoded(space.factor)
    # Some programs call the side of latents so.
    if size_in_file not in (None, fit.image_size, fit.latent_size):
        log.warning(
            f"{shown(weights.name, 300)}: says image_size {size_in_file}, and this decoder makes "
            f"{fit.image_size} px of its latents of side {fit.latent_size}; if it has another: "
            "--vae NAME"
        )
    config = config.sized(fit, space)
    return Opened(config, weights, fit, space, device, asked, opened_guide)


def open_on_ranks(config: Config, ranks: Ranks, decodes: bool = True) -> tuple[Opened, Stopwatch]:
    """Choose each rank's device and open the files on every rank. Return them and the stopwatch
    of the run. Raises UsageError on all ranks if one rank lacks a file.
    """
    name = ranks.take_device(config.device)
    device = ranks.run_collectively(lambda: choose_device(name))
    watch = Stopwatch(device)
    with watch.phase("load"):
        # One download if the file system is shared, else one per node.
        opened = ranks.run_in_turns(lambda: open_model(config, device, decodes=decodes))
    return opened, watch


def with_arithmetic(config: Config, device: torch.device) -> Config:
    """Return the config with the tier and the decoder's arithmetic on `device`, and set the
    tier's backend switches.
    """
    tier = config.tier or precision.default_tier(device)
    if tier == "tf32" and config.tf32 and not precision.supports(tier, device):
        log.warning(f"--tf32: {device} has no {precision.TIERS[tier].hardware}; sampling in fp32")
        tier = "fp32"
    precision.apply_precision(tier, device)
    decoder = precision.decoder_precision(config.vae_precision, tier, device)
    return replace(config, precision=tier, tf32=None, vae_precision=decoder)


def fit_of_file(
    weights: Checkpoint,
    model: str | None = None,
    num_classes: int | None = None,
    num_heads: int | None = None,
) -> Fit:
    """Return the family and sizes of a file's weights. Raises UsageError if the user's model,
    classes or heads contradict them, and for a pipeline of another process.
    """
    metadata = weights.metadata
    if num_heads is not None:
        metadata = {"num_heads": num_heads, **metadata}
    shipped = shipped_as(weights.name)
    fit = recognise(
        weights.name, weights.state, metadata, model, num_classes, shipped, weights.path
    )
    if num_heads not in (None, fit.num_heads):
        raise UsageError(f"`num_heads={num_heads}`: these weights have {fit.num_heads}; drop it")
    require_schedule(f"`ckpt={weights.name}`", fit)
    for notice in fit.notices:
        log.warning(notice)
    return fit


def require_schedule(name: str, fit: Fit) -> None:
    """Raise UsageError for a pipeline of another process."""
    if fit.schedule is not None:
        from accel.sampling import solvers

        solvers.require_schedule(name, fit.schedule)


def _decoder(config, is_given, weights, fit):
    """Return the latent space of the decoder that a filled config names. is_given: whether the
    user named it. Raises UsageError for a decoder of other latents than the network's.
    """
    name = config.vae
    try:
        if name in PUBLISHED:  # refused before it is fetched
            _require_channels(name, LatentSpace(), fit)
        space = find(name, config.latent_stats)
        _require_channels(name, space, fit)
    except UsageError as error:
        if is_given:
            raise
        fetch = f"; its family's: {fit.family.fetch}" if fit.defaults.decoders else ""
        raise UsageError(
            f"{shown(weights.name, 300)}: decodes with {shown(name, 300)} unless you give `vae`; "
            f"{error.marked}{fetch}"
        ) from None
    return space


def _require_channels(name, space, fit):
    if space.channels != fit.in_channels:
        raise UsageError(
            f"`vae={name}`: decodes latents of {space.channels} channels, and {fit.model} makes "
            f"{fit.in_channels}; give the decoder that it was trained with"
        )


def _as_trained(space, config, fit, decodes):
    """Return the latent space with the scale that the weights' recipe says, if it does."""
    scale = fit.recipe.get("latent_scale")
    if scale is None:
        return space
    if not fit.recipe["latent_norm"]:
        return space._replace(scale=scale, shift=0.0, mean=(), std=())
    if not space.std and decodes:
        raise UsageError(
            f"`vae={config.vae}`: these weights' latents are normalised by statistics, which this "
            "decoder lacks; give `latent_stats`"
        )
    return space._replace(scale=scale)
