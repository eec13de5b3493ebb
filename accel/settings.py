"""A run: its request, and the values that the weights, their model and their family imply
for all that it leaves open.

`implied` serves twice: before torch is imported, to refuse a request that contradicts
itself, and in `settle`, once the weights are open. Imports no torch.
"""

import re
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from accel.errors import UsageError
from accel.families import Defaults, family_of
from accel.labels import NULL, find_label, imagenet
from accel.latents import LatentSpace
from accel.ranks import layouts
from accel.ranks.layouts import OFF
from accel.request import MOST_PIXELS, FidRequest, GridRequest, Request
from accel.weights import Weights

if TYPE_CHECKING:  # these bring torch
    from accel.families.recognise import Fit

LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
# of 1000 diffusers rounds two to one time
STEPS = {"sde": (2, 1000), "dpm++": (1, 999), "unipc": (1, 999)}


@dataclass(frozen=True, kw_only=True)
class Settings(Request):
    """A run: a request with every open field filled, and the opened weights. `settle`
    makes it.

    device: a torch.device; precision: the tier; labels: numbers; class_names: of every
    class, or () if unknown.
    """

    request: Request  # as it was asked for
    weights: Weights
    fit: "Fit"  # of the weights
    space: LatentSpace

    def __post_init__(self):
        """No-op: `implied` has checked the values."""

    @property
    def latent_size(self) -> int:
        """Return the side of a latent."""
        return self.image_size // self.space.factor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a batch row."""
        return (self.latent_size // self.fit.patch_size) ** 2


@dataclass(frozen=True)
class GridSettings(Settings, GridRequest):
    """A grid, or a grid for each of several seeds."""

    @property
    def guided(self) -> bool:
        """Return whether the network is evaluated with guidance: whenever there is a null
        class, as upstream does.
        """
        return self.fit.null_class

    @property
    def pictures(self) -> str:
        """Return the number of pictures in words."""
        seeds = f" × {len(self.seeds)} seeds" if self.seed_list else ""
        return f"{len(self.labels)} label{'s' * (len(self.labels) > 1)}{seeds}"

    @property
    def too_large(self) -> str:
        """Return the error for a batch that does not fit in memory: the parameter that
        asks for it, and the remedy.
        """
        n = len(self.labels)
        if 1 in (n, self.batch_size):
            return (
                f"`image_size={self.image_size}`: a picture does not fit in free GPU memory; use "
                "a smaller one"
            )
        if self.batch_size:
            return (
                f"`batch_size={self.batch_size}`: does not fit in free GPU memory; use a smaller "
                "one"
            )
        return (
            f"`labels`: {n} pictures at a time do not fit in free GPU memory; use "
            f"`batch_size={n // 2}`"
        )


@dataclass(frozen=True)
class FidSettings(Settings, FidRequest):
    """An FID job."""

    @property
    def guided(self) -> bool:
        """Return whether the network is evaluated with guidance: not at a scale of one, as
        upstream does.
        """
        return self.cfg_scale != 1

    @property
    def pictures(self) -> str:
        """Return the number of pictures in words."""
        return f"{self.num_fid_samples} picture{'s' * (self.num_fid_samples > 1)}"

    @property
    def too_large(self) -> str:
        """Return the error for a batch that does not fit in memory: the parameter that
        asks for it, and the remedy.
        """
        return (
            f"`per_proc_batch_size={self.per_proc_batch_size}`: does not fit in free GPU memory; "
            "use a smaller one"
        )


def settle(request: Request, fit: "Fit", space: LatentSpace, **opened: Any) -> Settings:
    """Return the settings of a request. fit, space: of its weights and decoder; opened:
    the weights, the device and both precisions, by their fields. Raises UsageError as
    `implied` does.
    """
    values = (
        vars(implied(request, fit, space)) | dict(request=request, fit=fit, space=space) | opened
    )
    values["tf32"] = None  # `precision` says it now
    kind = GridSettings if isinstance(request, GridRequest) else FidSettings
    return kind(**{item.name: values[item.name] for item in fields(kind)})


def implied(
    request: Request, fit: "Fit | None" = None, space: LatentSpace | None = None
) -> SimpleNamespace:
    """Return the values of a run by name: the request's, else the weights', else their
    model's or their family's.

    fit, space: of the weights and the decoder, if they are open. Without `fit` a value
    that follows from a checkpoint is None. Raises UsageError, naming the parameter and
    the remedy, for values that contradict each other.
    """
    model = fit.model if fit else request.model or (None if request.ckpt else "DiT-XL/2")
    family = fit.family if fit else family_of(model)
    defaults = family.models.get(model, family.recipe) if family else Defaults()
    factor = space.factor if space else defaults.factor
    found = {}
    if fit or request.ckpt is None:
        found |= {"sampler": family.samplers[0], **defaults._asdict()}
    if fit:
        of_file = {"image_size": fit.trained_size(factor), "vae": _decoder(fit.vae), **fit.recipe}
        found |= {name: value for name, value in of_file.items() if value is not None}
    given = {name: value for name, value in vars(request).items() if value is not None}
    known = SimpleNamespace(**{**vars(request), **found, **given, "model": model, "factor": factor})
    patch_size = fit.patch_size if fit else int((model or "/2").rpartition("/")[2])
    sized = (
        family and known.image_size is not None and (space or request.vae in (None, defaults.vae))
    )
    if sized:  # else the size or its unit is unknown
        _check_size(known.image_size, factor, patch_size)
    _check_process(known, family)
    if fit:
        known.num_classes = fit.num_classes
        channels = request.guidance_channels or fit.recipe.get("guidance_channels")
        if channels is None:
            # all that there are, of latents with fewer than the model guides
            known.guidance_channels = min(known.guidance_channels, fit.in_channels)
        _check_weights(known, request, fit)
    if found and isinstance(request, GridRequest):
        _complete_grid(known, request, fit, found["class_names"])
        if sized and request.layout not in (None, OFF):
            layouts.check(
                request.layout, request.tier, (known.image_size // factor // patch_size) ** 2
            )
    return known


def _decoder(name):
    """Return the decoder that a file names, published ones by their short names."""
    published = re.fullmatch(r"(?:stabilityai/)?sd-vae-ft-(ema|mse)", name or "")
    return published[1] if published else name


def _check_size(size, factor, patch_size):
    if size > MOST_PIXELS:
        raise UsageError(
            f"`image_size={size}`: by these weights, and at most {MOST_PIXELS}; give another "
            "`image_size`"
        )
    unit = factor * patch_size
    if size % unit:
        raise UsageError(
            f"`image_size={size}`: must be a multiple of {unit} (VAE factor {factor}, patch "
            f"{patch_size})"
        )


def _check_process(known, family):
    sampler = known.sampler
    steps = known.num_sampling_steps
    if family and sampler not in (None, *family.samplers):
        raise UsageError(
            f"`sampler={sampler}`: is not for a {family.name}, which {known.model} is; use "
            f"{', '.join(family.samplers)}"
        )
    if (
        known.timestep_shift not in (None, 1)
        and family
        and (family.prediction == "noise" or sampler == "sde")
    ):
        raise UsageError(
            f"`timestep_shift={known.timestep_shift:g}`: is for euler and heun of a flow; drop it"
        )
    least, most = STEPS.get(sampler, (1, 1000))
    if steps is not None and not least <= steps <= most:
        raise UsageError(
            f"`num_sampling_steps={steps}`: must be from {least} to {most} for `sampler={sampler}`"
        )


def _check_weights(known, request, fit):
    if not fit.null_class and known.cfg_scale != 1:
        rows = known.num_classes
        remedy = "use `cfg_scale=1`"
        if request.num_classes == rows > 1:
            remedy += f", or `num_classes={rows - 1}` if the last row is the null class"
        raise UsageError(
            f"`cfg_scale={known.cfg_scale:g}`: guidance needs a null class, and these weights "
            f"were trained without (label table of {rows} rows); {remedy}"
        )
    # A module's own guidance may reach the learned sigma.
    most = fit.in_channels if request.guidance_channels else fit.out_channels
    if known.guidance_channels > most:
        raise UsageError(
            f"`guidance_channels={known.guidance_channels}`: these latents have {most}"
        )


def _complete_grid(known, request, fit, names_of_model):
    """Give `known` the values of a grid: classes by number and name, and layout."""
    classes = known.num_classes
    if request.class_names is not None and (given := len(request.class_names)) != classes:
        raise UsageError(
            f"`class_names`: are {given} names for {classes} classes; give one for each"
        )
    usual = imagenet() if classes == 1000 else ()
    candidates = request.class_names or (), fit.class_names if fit else (), names_of_model, usual
    known.class_names = next((names for names in candidates if len(names) == classes), ())
    labels = request.labels or (LABELS if classes == 1000 else range(min(classes, 8)))
    known.labels = tuple(find_label(label, known.class_names, classes) for label in labels)
    if fit and not fit.null_class:
        if classes in known.labels:
            raise UsageError(
                f"`labels={NULL}`: these weights were trained without a null label; give classes"
            )
        if request.layout not in (None, OFF):
            raise UsageError(
                f"`parallel={request.parallel}`: shares evaluations with guidance only; use off"
            )
        known.parallel = "off"
