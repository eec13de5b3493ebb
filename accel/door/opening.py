"""Opening what options name: weights, what they are, their decoder's space; where and how they are computed with."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from accel import precision
from accel.errors import UsageError
from accel.families import constructor_of, families
from accel.families.loaded_module import LoadedModule
from accel.families.recognise import Fit, published_name, recognise
from accel.latents.files import PUBLISHED, find
from accel.options import Options
from accel.sampling.solvers import require_schedule
from accel.weights.checkpoint import Checkpoint
from accel.weights.shapes import shapes_only


class Opened(NamedTuple):
    """Weights, the options with all that follows from them, and where and how they are computed with."""

    options: Options
    weights: Checkpoint | LoadedModule
    device: torch.device
    tier: str
    vae_precision: str


def checkpoint_of(options: Options, device: torch.device) -> Checkpoint:
    """The options' weights, not fetched or read yet. Raises UsageError if there are none of that name."""
    name = options.ckpt or published_name(options.model, options.image_size, options.num_classes)
    # A CPU computes with copies: whoever writes to the file meanwhile must not change what is computed with. A network
    # that ranks divide stays in the file, of which each reads its part.
    return Checkpoint(name, mapped=device.type != "cpu" or options.divided)


def open_weights(options: Options, device: torch.device, weights: Checkpoint | LoadedModule | None = None) -> Opened:
    """Fetch weights and decoder and complete the options. What the flags alone decide is refused before."""
    weights = weights or checkpoint_of(options, device)
    tier, vae_precision = choose_precision(options, device)
    return Opened(fetch(options, weights), weights, device, tier, vae_precision)


def choose_precision(options: Options, device: torch.device) -> tuple[str, str]:
    """Set the tier asked for, or the device's default. Returns its name and the decoder's arithmetic."""
    tier = options.precision or precision.default_tier(device)
    if tier == "tf32" and options.tf32 and not precision.supports(tier, device):
        print(f"--tf32: {device} has no {precision.TIERS[tier].hardware}; sampling in fp32")
        tier = "fp32"
    precision.apply_precision(tier, device)
    return tier, precision.decoder_precision(options.vae_precision, tier, device)


def fetch(options: Options, weights: Checkpoint | LoadedModule) -> Options:
    """Download what is not here yet of network and decoder. Returns the options with all that follows from the weights.
    Raises UsageError that names all that is missing."""
    missing = []

    def attempt(work, *arguments):
        try:
            return work(*arguments)
        except UsageError as error:
            missing.append(error.marked)

    if options.vae and options.into_pictures:
        options = replace(options, space=attempt(find, options.vae, options.latent_stats) or options.space)
    attempt(weights.fetch)
    if not missing:
        fit = fit_of(weights, options)
        completed = options.complete(fit)
        require_schedule(weights.name, fit.schedule)
        if options.into_pictures and not options.vae:
            if completed.vae in PUBLISHED:  # before it is fetched
                _require_channels(completed)
            if space := attempt(find, completed.vae, options.latent_stats):
                completed = replace(options, space=space).complete(fit)
        options = completed
    if len(missing) > 1:
        missing.append("or take `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
    if options.into_pictures:
        _require_channels(options)
    return options


def _require_channels(options):
    have, wanted = options.space.channels, options.fit.in_channels
    if have != wanted:
        raise UsageError(
            f"`vae={options.vae}`: decodes latents of {have} channels, and {options.model} makes {wanted}; give the "
            "decoder that it was trained with"
        )


def fit_of(weights: Checkpoint | LoadedModule, options: Options) -> Fit:
    """Return what the weights are. Raises UsageError where the options contradict them."""
    if isinstance(weights, LoadedModule):
        if options.num_classes not in (None, weights.fit.num_classes):
            given = f"`num_classes={options.num_classes}`: {weights.name} has {weights.fit.num_classes} classes"
            raise UsageError(f"{given}; drop it")
        return weights.fit
    shipped = shipped_as(weights.name)
    fit = recognise(weights.name, weights.state, weights.metadata, options.model, options.num_classes, shipped)
    implied = getattr(fit.family.part("weights"), "implied", None)
    return fit._replace(implied=implied(fit.model, weights.metadata, weights.path)) if implied else fit


def shipped_as(name: str) -> str | None:
    """Return the model whose weights, shipped or published, have this name or path; None if there is none."""
    for family in families():
        for model, implied in family.models.items():
            if implied.ckpt == name or Path(name).name in implied.published.values():
                return model
    return None


def empty_model(options: Options) -> torch.nn.Module:
    """Return the options' reference network on the meta device: shapes without values."""
    build = options.fit.build if options.fit else constructor_of(options.model)
    with shapes_only():
        return build(input_size=options.latent_size, num_classes=options.num_classes)


def digest_of(weights: Checkpoint | LoadedModule, fit: Fit) -> str:
    """Return 16 hex digits of all that decides the network's function: its tensors, and the number of heads where it is
    not that of the model of this size."""
    digest = weights.digest()
    return digest if fit.usual else hashlib.sha256(f"{digest} {fit.num_heads} heads".encode()).hexdigest()[:16]
