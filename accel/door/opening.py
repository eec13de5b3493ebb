"""Open the weights and the decoder of a request, and settle it."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel import precision
from accel.errors import UsageError, shown
from accel.families import families
from accel.families.loaded_module import LoadedModule
from accel.families.recognise import Fit, published_name, recognise, recogniser_of
from accel.latents import LatentSpace
from accel.latents.files import PUBLISHED, find
from accel.loading import choose_device
from accel.progress import Stopwatch
from accel.ranks import Ranks
from accel.request import Request
from accel.sampling.solvers import require_schedule
from accel.settings import Settings, implied, settle
from accel.weights import Weights
from accel.weights.checkpoint import Checkpoint


def open_weights(
    request: Request, device: torch.device, weights: Weights | None = None
) -> Settings:
    """Return the settings of a request; fetch its weights and decoder. weights: in place
    of the request's.

    Raises UsageError; for a request that contradicts itself, and for a tier that the
    device lacks, before anything is fetched.
    """
    checkpoint = None if weights else checkpoint_of(request, device)
    weights = weights or checkpoint
    precisions = choose_precision(request, device)
    fit, space = fetch(request, weights, checkpoint)
    return settle(request, fit, space, weights=weights, device=device, **precisions)


class Opened(NamedTuple):
    """The settings of a run whose weights are open on every rank, and the run's stopwatch."""

    settings: Settings
    watch: Stopwatch


def open_on_ranks(request: Request, ranks: Ranks) -> Opened:
    """Open the weights on every rank, on the device that each takes. Raises UsageError on
    all ranks if one lacks a file.
    """
    name = ranks.take_device(request.device)
    device = ranks.run_collectively(lambda: choose_device(name))
    watch = Stopwatch(device)
    with watch.phase("load"):
        weights = ranks.run_collectively(lambda: checkpoint_of(request, device))
        # One download where the file system is shared, one a node where it is not.
        settings = ranks.run_in_turns(lambda: open_weights(request, device, weights))
    return Opened(settings, watch)


def reopen(settings: Settings, **changes: Any) -> Settings:
    """Return settings for the same weights, device and decoder, with `changes` to the
    request's fields.
    """
    request = replace(settings.request, **changes)
    precisions = choose_precision(request, settings.device)
    return settle(
        request,
        settings.fit,
        settings.space,
        weights=settings.weights,
        device=settings.device,
        **precisions,
    )


def checkpoint_of(request: Request, device: torch.device) -> Checkpoint:
    """Return the request's weights, not fetched yet. Raises UsageError if there are none
    of that name.
    """
    known = implied(request)
    name = known.ckpt or published_name(known.model, known.image_size, known.num_classes)
    # A CPU computes with copies, so that writing to the file meanwhile changes no
    # picture. A network that ranks divide stays in the file, and each rank reads its
    # part.
    divided = request.layout is not None and request.layout.weights > 1
    mapped = device.type != "cpu" or divided
    return Checkpoint(name, mapped, request.weights_entry)


def choose_precision(request: Request, device: torch.device) -> dict[str, str]:
    """Set the backend switches of the request's tier, or of the device's default. Return
    the tier and the decoder's arithmetic, by their fields.
    """
    tier = request.tier or precision.default_tier(device)
    if tier == "tf32" and request.tf32 and not precision.supports(tier, device):
        print(f"--tf32: {device} has no {precision.TIERS[tier].hardware}; sampling in fp32")
        tier = "fp32"
    precision.apply_precision(tier, device)
    return dict(
        precision=tier,
        vae_precision=precision.decoder_precision(request.vae_precision, tier, device),
    )


def fetch(
    request: Request, weights: Weights, checkpoint: Checkpoint | None
) -> tuple[Fit, LatentSpace]:
    """Download the files of network and decoder that are not here yet. Return the fit of
    the weights and their latent space. checkpoint: the weights, if they are on disk. Raises
    UsageError that names all that is missing.
    """
    known = implied(request)
    missing = []

    def attempt(work, *arguments):
        try:
            return work(*arguments)
        except UsageError as error:
            missing.append(error.marked)

    def find_decoder(name):
        return find(name, request.latent_stats) if name and request.output_type == "image" else None

    space = attempt(find_decoder, known.vae)
    if checkpoint is not None:
        attempt(checkpoint.fetch)
    if len(missing) > 1:
        missing.append("or take `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
    fit = fit_of(weights, known.model, known.num_classes, request.num_heads)
    with_weights = implied(request, fit, space)
    if with_weights.vae != known.vae:
        if with_weights.vae in PUBLISHED:  # before it is fetched
            _require_channels(request, with_weights, fit, LatentSpace())
        space = _decoder_of(weights, with_weights.vae, find_decoder)
    space = space or LatentSpace(fit.in_channels, with_weights.factor)  # latents need no decoder
    space = _as_trained(request, fit, space)
    _require_channels(request, with_weights, fit, space)
    return fit, space


def _as_trained(request, fit, space):
    """Return the latent space with the scale that the weights' recipe says, if it does."""
    scale = fit.recipe.get("latent_scale")
    if scale is None:
        return space
    if not fit.recipe["latent_norm"]:
        return space._replace(scale=scale, shift=0.0, mean=(), std=())
    if not space.std and request.output_type == "image":
        raise UsageError(
            f"`vae={request.vae}`: these weights' latents are normalised by statistics, which this "
            "decoder lacks; give `latent_stats`"
        )
    return space._replace(scale=scale)


def _decoder_of(weights, name, find_decoder):
    """Return the latent space of the decoder that a file names."""
    try:
        return find_decoder(name)
    except UsageError as error:
        raise UsageError(
            f"`ckpt={weights.name}`: says that its decoder is {shown(name)}; {error.marked}"
        ) from None


def _require_channels(request, known, fit, space):
    if request.output_type == "image" and space.channels != fit.in_channels:
        raise UsageError(
            f"`vae={known.vae}`: decodes latents of {space.channels} channels, and {known.model} "
            f"makes {fit.in_channels}; give the decoder that it was trained with"
        )


def fit_of(
    weights: Weights,
    model: str | None = None,
    num_classes: int | None = None,
    num_heads: int | None = None,
) -> Fit:
    """Return the family and sizes of weights. Raises UsageError if the user's model, classes
    or heads contradict them, and for a pipeline of another process.
    """
    if isinstance(weights, LoadedModule):
        if num_classes not in (None, weights.fit.num_classes):
            given = (
                f"`num_classes={num_classes}`: {weights.name} has {weights.fit.num_classes} classes"
            )
            raise UsageError(f"{given}; drop it")
        require_schedule(weights.name, weights.fit.schedule)
        return weights.fit
    metadata = weights.metadata
    if num_heads is not None:
        of_file = metadata.get("num_heads", num_heads)
        if of_file != num_heads:
            raise UsageError(f"`num_heads={num_heads}`: {weights.name} says {of_file}; drop it")
        metadata = {**metadata, "num_heads": num_heads}
    fit = recognise(
        weights.name, weights.state, metadata, model, num_classes, shipped_as(weights.name)
    )
    if num_heads not in (None, fit.num_heads):
        raise UsageError(f"`num_heads={num_heads}`: these weights have {fit.num_heads}; drop it")
    require_schedule(f"`ckpt={weights.name}`", fit.schedule)
    recipe = recogniser_of(fit.family).recipe(fit.model, weights.metadata, weights.path)
    return fit._replace(recipe={**fit.recipe, **recipe})


def shipped_as(name: str) -> str | None:
    """Return the model whose weights, shipped or published, have this name or path; None
    if there is none.
    """
    for family in families():
        for model, defaults in family.models.items():
            if defaults.ckpt == name or Path(name).name in defaults.published.values():
                return model
    return None


def digest_of(settings: Settings) -> str:
    """Return 16 hex digits of all that decides the network's function: its tensors, and
    the number of heads where it is not that of the model of this size.
    """
    digest = settings.weights.digest()
    fit = settings.fit
    return (
        digest
        if fit.usual
        else hashlib.sha256(f"{digest} {fit.num_heads} heads".encode()).hexdigest()[:16]
    )
