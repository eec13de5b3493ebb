"""Open what a Config names: the weights, their decoder and the arithmetic; then fill the
Config, once.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel import precision
from accel.config import Config
from accel.errors import UsageError, shown
from accel.families import family_of
from accel.families.recognise import Fit, recognise, recogniser_of, shipped_as
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
        other_arithmetic = not options.keys().isdisjoint(("precision", "vae_precision"))
        if other_arithmetic:
            options = {"vae_precision": "auto", **options}
        config = replace(self.config, **options)
        config.check_values()
        if other_arithmetic:
            config = with_arithmetic(config, self.device)
        changed = self._replace(
            config=config.consistent(self.fit, self.space),
            tier_is_asked_for=self.tier_is_asked_for or "precision" in options,
        )
        self.space.require_side(changed.latent_size)
        return changed

    def digest(self) -> str:
        """Return 16 hex digits of all that decides the network's function: its tensors, the
        number of heads where it is not that of the model of this size, and its family's facts.
        """
        return self.fit.digest(self.weights)

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
    decoded; latents need no decoder. Raises UsageError; for options that contradict each other,
    and for a tier that the device lacks, before anything is fetched. Weights that are here are
    recognised before a decoder is fetched.
    """
    device = device or choose_device(config.device)
    config = config.with_file(decodes)
    if config.config is not None:
        from accel.families import config_file

        log.warning(config_file.notice(config.config, vars(config)))
    asked = config.tier is not None
    config = with_arithmetic(config, device)
    if weights is None:
        weights = weights_of(config, device)
    if guide is None and config.guide is not None:
        from accel.guide import about_guide  # a network by itself needs none

        with about_guide():
            guide = Checkpoint(config.guide, device.type != "cpu")
    space = None
    checkpoints = [each for each in (weights, guide) if isinstance(each, Checkpoint)]
    if not all(each.is_here for each in checkpoints):
        from accel.fetching import fetch  # most runs have all files

        space = fetch(config, weights, guide, decodes)
    fit = _fit_of(weights, config)
    if config.config is not None:
        config_file.require_network(config.config, "ckpt", weights.name, fit)
    config.require_family(fit)  # before a decoder is fetched
    opened_guide = None
    if guide is not None:
        from accel.guide import open_guide

        opened_guide = open_guide(guide, weights, fit, config)
    config, space = _with_decoder(config, weights, fit, space, decodes)
    size_in_file = fit.image_size
    fit = fit.decoded(space.factor)
    # Some programs call the side of latents so.
    if size_in_file not in (None, fit.image_size, fit.latent_size):
        log.warning(
            f"{shown(weights.name, 300)}: says image_size {size_in_file}, and this decoder makes "
            f"{fit.image_size} px of its latents of side {fit.latent_size}; if it has another: "
            "--vae NAME"
        )
    config = config.filled(fit, space)
    opened = Opened(config, weights, fit, space, device, asked, opened_guide)
    space.require_side(opened.latent_size)
    return opened


class OpenedOnRanks(NamedTuple):
    """The files of a run, open on every rank, and the stopwatch of the run."""

    opened: Opened
    watch: Stopwatch


def open_on_ranks(config: Config, ranks: Ranks, decodes: bool = True) -> OpenedOnRanks:
    """Choose each rank's device and open the files on every rank. Raises UsageError on all
    ranks if one rank lacks a file.
    """
    name = ranks.take_device(config.device)
    device = ranks.run_collectively(lambda: choose_device(name))
    watch = Stopwatch(device)
    with watch.phase("load"):
        weights = ranks.run_collectively(lambda: weights_of(config, device))
        # One download if the file system is shared, else one per node.
        opened = ranks.run_in_turns(lambda: open_model(config, device, weights, decodes))
    return OpenedOnRanks(opened, watch)


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


def _fit_of(weights, config):
    """Return the family and sizes of weights. The user's options add what a file does not
    say. Raises UsageError for options that contradict the weights.
    """
    if isinstance(weights, Checkpoint):
        return fit_of_file(weights, config.model, config.num_classes, config.num_heads)
    classes = weights.fit.num_classes
    if config.num_classes not in (None, classes):
        raise UsageError(
            f"`num_classes={config.num_classes}`: {weights.name} has {classes} classes; drop it"
        )
    require_schedule(weights.name, weights.fit)
    return weights.fit


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
        in_file = metadata.get("num_heads", num_heads)
        if in_file != num_heads:
            raise UsageError(f"`num_heads={num_heads}`: {weights.name} says {in_file}; drop it")
        metadata = {**metadata, "num_heads": num_heads}
    shipped = shipped_as(weights.name)
    fit = recognise(weights.name, weights.state, metadata, model, num_classes, shipped)
    if num_heads not in (None, fit.num_heads):
        raise UsageError(f"`num_heads={num_heads}`: these weights have {fit.num_heads}; drop it")
    require_schedule(f"`ckpt={weights.name}`", fit)
    recipe = recogniser_of(fit.family).recipe(fit.model, weights.metadata, weights.path)
    for notice in recipe.notices:
        log.warning(notice)
    return fit._replace(recipe={**fit.recipe, **recipe.options})


def require_schedule(name: str, fit: Fit) -> None:
    """Raise UsageError for a pipeline of another process."""
    if fit.schedule is not None:
        from accel.sampling import solvers

        solvers.require_schedule(name, fit.schedule)


def _with_decoder(config, weights, fit, space, decodes):
    """Return the config with the decoder's name, and the latent space. Raises UsageError for
    a decoder of other latents than the network's.
    """
    defaults = fit.family.models.get(fit.model, fit.family.recipe)
    name = config.vae or _short_name(fit.vae)
    of_size = defaults.decoders.get(fit.decoded(defaults.factor).image_size)
    if name is None and of_size is not None:
        name, statistics = of_size
        config = replace(config, latent_stats=config.latent_stats or statistics)
        if decodes:
            _require_here((name, config.latent_stats), fit)
    name = name or defaults.vae
    if decodes and (space is None or name != config.named_decoder):
        if name in PUBLISHED:  # refused before it is fetched
            _require_channels(name, LatentSpace(), fit)
        try:
            space = find(name, config.latent_stats)
        except UsageError as error:
            if name == config.named_decoder:
                raise
            implied = f"says that its decoder is {shown(name)}"
            if fit.vae is None:
                implied = f"is a {fit.model}, whose decoder is {shown(name)} unless you give `vae`"
            is_file = isinstance(weights, Checkpoint)
            given = f"`ckpt={weights.name}`" if is_file else weights.name
            raise UsageError(f"{given}: {implied}; {error.marked}") from None
    if space is None:
        space = LatentSpace(fit.in_channels, defaults.factor)  # latents need no decoder
    space = _as_trained(name, fit, space, decodes)
    if decodes:
        _require_channels(name, space, fit)
    return replace(config, vae=name), space


def _require_here(files, fit):
    """Raise UsageError if a file of the model's own decoder is missing."""
    for file in files:
        if not Path(file).exists():
            raise UsageError(
                f"`vae`: {fit.model} decodes with {file} by default, which is missing; give others "
                f"by `vae` and `latent_stats`, or fetch the family's: {fit.family.fetch}"
            )


def _short_name(name):
    """Return the decoder that a file names, published ones by their short names."""
    published = re.fullmatch(r"(?:stabilityai/)?sd-vae-ft-(ema|mse)", name or "")
    return published[1] if published else name


def _as_trained(name, fit, space, decodes):
    """Return the latent space with the scale that the weights' recipe says, if it does."""
    scale = fit.recipe.get("latent_scale")
    if scale is None:
        return space
    if not fit.recipe["latent_norm"]:
        return space._replace(scale=scale, shift=0.0, mean=(), std=())
    if not space.std and decodes:
        raise UsageError(
            f"`vae={name}`: these weights' latents are normalised by statistics, which this "
            "decoder lacks; give `latent_stats`"
        )
    return space._replace(scale=scale)


def _require_channels(name, space, fit):
    if space.channels != fit.in_channels:
        raise UsageError(
            f"`vae={name}`: decodes latents of {space.channels} channels, and {fit.model} makes "
            f"{fit.in_channels}; give the decoder that it was trained with"
        )
