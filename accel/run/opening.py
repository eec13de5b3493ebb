"""Open a request: configuration file, weights, guide and decoder → a `Run`, in one pass.

Every value comes from the first of these origins that has it: the user's options, the picture of
--like, a configuration file, the weights, the family's own program for the job, their model, their
family, the option's default.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel.checkpoints import Checkpoint
from accel.checkpoints.loading import WeightFiles, published_name
from accel.config import rules
from accel.config.options import DEFAULT, DEFAULTS, FAMILY, JOB, MODEL, OPTIONS, USER, Settings
from accel.decoders import LatentSpace
from accel.decoders.loading import PUBLISHED, find, recognise
from accel.distributed import Ranks
from accel.errors import InputRef, UsageError, warn
from accel.families import require_family_of
from accel.families.identify import UserFacts
from accel.families.spec import ModelSpec
from accel.io.progress import Stopwatch
from accel.kernels import gpu
from accel.run import (
    Run,
    guidance_for,
    label_numbers,
    process_of,
    require_null_class,
)
from accel.runtime import precision

LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
PUBLISHED_DECODER = re.compile(r"^(?:stabilityai/)?sd-vae-ft-(ema|mse)$")


def open_run(
    request: rules.Request,
    device: torch.device | None = None,
    checkpoint: Checkpoint | None = None,
    guide: Checkpoint | None = None,
    space: LatentSpace | None = None,
) -> Run:
    """Open weights, guide and decoder, choose every value, and print notices.

    checkpoint, guide, space: already opened, instead of the files in the options. Raises
    UsageError: for a tier that the device lacks before any download, for options that contradict
    the weights before the decoder's download.
    """
    device = device or choose_device(request.values.get("device"))
    arithmetic, notices = choose_arithmetic(request.values, device)
    checkpoint, guide = open_weights(request, checkpoint, guide)
    spec = checkpoint.spec
    configuration = request.configuration
    of_file = (configuration.given.name, configuration.options) if configuration else ("", {})
    channels = min(spec.defaults.guidance_channels, spec.in_channels)
    # `choose_labels` checks names against the number of classes.
    of_model = spec.defaults._replace(guidance_channels=channels, class_names=())._asdict()
    values, origins = merge(
        [
            (USER, request.options),
            *request.repeated.by_origin,
            of_file,
            (spec.specified_in or checkpoint.name, spec.recommended),
            (checkpoint.name, {"num_classes": spec.num_classes, "vae": spec.vae}),
            (JOB, rules.job_defaults(request.values, spec.family)),
            (MODEL, of_model),
            (FAMILY, {"sampler": spec.family.samplers[0]}),
            (DEFAULT, DEFAULTS),
        ]
    )
    if checkpoint.given.option:
        notices += override_notices(values, origins)
    origins.setdefault("precision", origins.get("tf32", DEFAULT))
    values |= arithmetic
    values["model"] = spec.model
    values["guide"] = guide and guide.name  # a configuration can name an unused one
    values["vae"] = PUBLISHED_DECODER.sub(r"\1", values["vae"])
    is_models = Path(values["vae"]).resolve() == Path(spec.defaults.vae).resolve()
    if not is_models and origins.get("latent_stats") == MODEL:
        del values["latent_stats"]  # they belong to the model's decoder
    if checkpoint.family_notice:
        notices.append(checkpoint.given.notice(checkpoint.family_notice))
    if spec.family.prediction == "data" and origins["noise_scale"] == MODEL:
        text = (
            f"specifies no scale of the first noise, taken for {values['noise_scale']:g} as at "
            f"{spec.latent_size} px; if it has another: `noise_scale=N`"
        )
        notices.append(checkpoint.given.notice(text))
    if guide is not None:
        notices += require_alike(values, origins, guide, checkpoint)
    require_spec(values, spec, guide)
    space = space or open_space(values, origins, checkpoint)
    notices += choose_size(values, origins, checkpoint, space)
    if "num_fid_samples" not in values:
        choose_labels(values, spec, guide)
    settings = Settings(**values, origins=origins)
    for notice in notices:
        warn(notice)
    return Run(
        settings,
        request,
        checkpoint,
        guide,
        space,
        device,
        process_of(settings, spec),
        guidance_for(settings, spec, guide),
    )


def open_on_ranks(request: rules.Request, ranks: Ranks) -> tuple[Run, Stopwatch]:
    """Choose each rank's device and open the files on every rank. Return the run and its
    stopwatch. If one rank fails, all ranks raise UsageError.
    """
    name = ranks.claim_device(request.values.get("device"))
    device = ranks.run_collectively(lambda: choose_device(name))
    watch = Stopwatch(device)
    with watch.phase("load"):
        # One download if the file system is shared, else one per node.
        run = ranks.run_in_turns(lambda: open_run(request, device))
    return run, watch


def choose_device(name: str | None) -> torch.device:
    """Return the named device, by default a GPU if there is one. Raises UsageError if it does not
    exist.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(
            "no such kind of device", "try cuda, cuda:1 or cpu", parameter="device", value=name
        ) from None
    if device.type == "cuda":
        gpu.require(device)
    elif name is None:
        if reason := gpu.unused_gpu():
            warn(f"{reason}: sampling on the CPU; docs/install.md has the torch for each GPU")
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(
            f"torch {torch.__version__} cannot sample there",
            "use cuda or cpu",
            parameter="device",
            value=device,
        )
    return device


def choose_arithmetic(
    values: rules.Values, device: torch.device
) -> tuple[dict[str, Any], list[str]]:
    """Return the precision of network and decoder, and notices. Raises UsageError if the device
    lacks it.
    """
    tf32 = values.get("tf32")
    tier = values.get("precision") or precision.default_tier(device)
    notices = []
    if tf32 is not None:
        tier = "tf32" if tf32 else "fp32"
    if tf32 and not precision.supports("tf32", device):
        hardware = precision.TIERS["tf32"].hardware
        notices.append(f"`tf32`: {device} has no {hardware}; sampling in fp32")
        tier = "fp32"
    precision.require("precision", tier, device)
    wanted = values.get("vae_precision", DEFAULTS["vae_precision"])
    decoder = precision.decoder_precision(wanted, tier, device)
    return dict(precision=tier, vae_precision=decoder, tf32=None), notices


def open_weights(
    request: rules.Request,
    checkpoint: Checkpoint | None,
    guide: Checkpoint | None,
) -> tuple[Checkpoint, Checkpoint | None]:
    """Fetch weights and guide, then open them, unless they are already open. Raises UsageError for
    missing files, and for networks that contradict the configuration file.
    """
    values = request.values
    files = [] if checkpoint else [files_of(values)]
    of_guide = []
    if guide is None and "guide" in values:
        of_guide = [WeightFiles(InputRef(values["guide"], "guide"))]
    if not all(each.is_here for each in (*files, *of_guide)):
        fetch([*files, *of_guide], values)
    facts = "model", "num_classes", "num_heads"
    user_facts = UserFacts(**{name: values[name] for name in facts if name in values})
    checkpoint = checkpoint or files[0].checkpoint(user_facts)
    for each in of_guide:
        guide = each.checkpoint(UserFacts(guided=checkpoint.spec))
        if guide.name == checkpoint.name and "weights_entry" not in values:
            guide.given.warn(
                "is the file of the network that it guides; both estimates are equal, so guidance "
                "changes nothing"
            )
    if request.configuration is not None:
        request.configuration.require_network(checkpoint.given, checkpoint.spec)
        if guide is not None:
            request.configuration.require_network(guide.given, guide.spec)
    return checkpoint, guide


def files_of(values: rules.Values) -> WeightFiles:
    """Return the weights that the options name, without fetching them. Raises UsageError for an
    unknown name.
    """
    defaults = rules.named_defaults(values)
    name = values.get("ckpt", defaults.ckpt)
    if name is None:
        model = rules.named_model(values) or rules.DEFAULT_MODEL
        family = require_family_of(model)
        sizes = {**defaults._asdict(), **rules.job_defaults(values, family), **values}
        name = published_name(family, model, sizes["image_size"], sizes["num_classes"])
    return WeightFiles(InputRef(name), values.get("weights_entry"))


def fetch(opened: list[WeightFiles], values: rules.Values) -> None:
    """Fetch files of weights, and the decoder that is known without them. Raises one UsageError
    for all that is missing.
    """
    work: list[Callable[[], Any]] = [each.fetch for each in opened]
    default = None if "ckpt" in values else rules.named_defaults(values).vae
    decoder = values.get("vae", default)
    if rules.decodes(values) and decoder is not None:
        # Statistics of its latents may follow from the weights.
        work.insert(0, partial(recognise, str(decoder)))
    missing = []
    for fetch_one in work:
        try:
            fetch_one()
        except UsageError as error:
            missing.append(error.marked)
    if len(missing) > 1:
        missing.append("or use `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))


# ---- Origins ----


def merge(in_order: list[tuple[str, rules.Values]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return each option's value from the first origin that has one, and the origin."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, of_origin in in_order:
        for name, value in of_origin.items():
            if name in OPTIONS and name not in values and value is not None:
                values[name] = value
                origins[name] = origin
    return values, origins


def override_notices(values: rules.Values, origins: Mapping[str, str]) -> list[str]:
    """Return a notice for each file that set values."""
    taken: dict[str, dict[str, Any]] = {}
    for name, origin in origins.items():
        if origin not in (USER, JOB, MODEL, FAMILY, DEFAULT) and name != "num_classes":
            taken.setdefault(origin, {})[name] = values[name]
    return [
        InputRef(Path(file).name).notice(f"specifies {as_text(of_file)}; flags override it")
        for file, of_file in taken.items()
    ]


def as_text(values: rules.Values) -> str:
    """Return options with their values, such as "cfg scale 1.5, guidance interval 0 0.7"."""
    words = []
    for name, value in values.items():
        parts = value if isinstance(value, tuple) else (value,)
        text = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
        words.append(f"{name.replace('_', ' ')} {text}")
    return ", ".join(words)


# ---- Network, decoder, size, labels ----


def require_alike(
    values: rules.Values, origins: Mapping[str, str], guide: Checkpoint, checkpoint: Checkpoint
) -> list[str]:
    """Check that a guide matches the guided network `checkpoint` in family, classes, latents and
    noise. Return notices. values, origins: of options. Raises UsageError if they differ.
    """
    spec = checkpoint.spec
    other = guide.spec
    size = spec.recommended.get("image_size", spec.image_size)
    if origins.get("image_size") == USER and not spec.family.any_size:
        size = values["image_size"]
    compared = {
        "the family": (other.family.name, spec.family.name),
        "num_classes": (other.num_classes, spec.num_classes),
        "channels of latents": (other.in_channels, spec.in_channels),
        "channels of its output": (other.out_channels, spec.out_channels),
        "a side of trained latents": (other.latent_size, spec.latent_size),
        "image_size": (other.recommended.get("image_size", other.image_size), size),
        # Without a configuration, the latents belong to the family's decoder.
        "latent_scale": tuple(
            each.latent_settings.get("latent_scale", 1) for each in (other, spec)
        ),
        "latent_norm": tuple(
            each.latent_settings.get("latent_norm", True) for each in (other, spec)
        ),
    }
    if spec.family.prediction == "data" and origins["noise_scale"] != USER:
        compared["noise_scale"] = other.recommended.get("noise_scale"), values["noise_scale"]
    for fact, (value, guided) in compared.items():
        if None not in (value, guided) and value != guided:
            raise guide.given.error(
                f"has {fact} {value}, and {checkpoint.name} {guided}",
                "a guide has the family, classes, latents and noise of the network that it guides",
            )
    return [guide.given.notice(guide.family_notice)] if guide.family_notice else []


def require_spec(values: rules.Values, spec: ModelSpec, guide: Checkpoint | None) -> None:
    """Raise UsageError for values that contradict the weights."""
    classes = values["num_classes"]
    if classes != spec.num_classes:
        raise UsageError(
            f"these weights have {spec.num_classes}",
            "drop it",
            parameter="num_classes",
            value=classes,
        )
    rules.require_family(values, spec.model, spec.family)
    require_null_class(values["cfg_scale"], spec, guide)
    # A module's forward_with_cfg can guide the learned sigma too.
    most = max(spec.in_channels, spec.recommended.get("guidance_channels", 0))
    if values["guidance_channels"] > most:
        raise UsageError(
            f"these latents have {most}",
            parameter="guidance_channels",
            value=values["guidance_channels"],
        )


def open_space(
    values: rules.Values, origins: Mapping[str, str], checkpoint: Checkpoint
) -> LatentSpace:
    """Return the latent space of a run, with a decoder if pictures are decoded. Raises UsageError
    for a decoder whose latents do not match the network's.
    """
    spec = checkpoint.spec
    if not rules.decodes(values):
        return _as_trained(LatentSpace(spec.in_channels, spec.defaults.factor), values, spec)
    name = values["vae"]
    try:
        if name in PUBLISHED:  # checked before the download
            _require_channels(name, LatentSpace(), spec)
        space = find(name, values.get("latent_stats"))
        _require_channels(name, space, spec)
    except UsageError as error:
        if origins["vae"] not in (MODEL, checkpoint.name):
            raise
        fetch = f"; its family's: {spec.family.fetch}" if spec.family.fetch else ""
        text = f"decodes with {name} unless you give `vae`; {error.marked}{fetch}"
        raise UsageError(checkpoint.given.notice(text)) from None
    return _as_trained(space, values, spec)


def _require_channels(name, space, spec):
    if space.channels != spec.in_channels:
        raise UsageError(
            f"decodes latents of {space.channels} channels, and {spec.model} makes "
            f"{spec.in_channels}",
            "give the decoder that it was trained with",
            parameter="vae",
            value=name,
        )


def _as_trained(space: LatentSpace, values: rules.Values, spec: ModelSpec) -> LatentSpace:
    """Return the latent space with the scale or statistics of the training latents."""
    settings = spec.latent_settings
    if "mean" in settings and "latent_stats" not in values:
        return space._replace(scale=1.0, shift=0.0, mean=settings["mean"], std=settings["std"])
    if "latent_scale" not in settings:
        return space
    scale = settings["latent_scale"]
    if not settings["latent_norm"]:
        return space._replace(scale=scale, shift=0.0, mean=(), std=())
    if not space.std and space.decoder is not None:
        raise UsageError(
            "these weights' latents are normalised by statistics, which this decoder lacks",
            "give `latent_stats`",
            parameter="vae",
            value=values["vae"],
        )
    return space._replace(scale=scale)


def choose_size(
    values: dict[str, Any], origins: dict[str, str], checkpoint: Checkpoint, space: LatentSpace
) -> list[str]:
    """Set the picture size, by default the training size. Return notices. Raises UsageError for a
    size that patches, decoder or family do not support.
    """
    spec = checkpoint.spec
    notices = []
    trained = spec.image_size
    if spec.latent_size:
        trained = space.factor * spec.latent_size
        # Some programs write the side of the latents as image_size.
        if spec.image_size not in (None, trained, spec.latent_size):
            notices.append(
                checkpoint.given.notice(
                    f"specifies image_size {spec.image_size}, and this decoder makes {trained} px "
                    f"of its latents of side {spec.latent_size}; if it has another: `vae=NAME`"
                )
            )
    if trained and origins["image_size"] in (JOB, MODEL):
        values["image_size"] = trained
        origins["image_size"] = checkpoint.name
    size = OPTIONS["image_size"].checked(values["image_size"])
    rules.require_unit(size, space.factor, spec.patch_size)
    if trained not in (None, size):
        if not spec.family.any_size:
            raise UsageError(
                f"a {spec.family.name} only samples the size that it was trained for",
                f"use {trained}",
                parameter="image_size",
                value=size,
            )
        notices.append(f"{spec.model}: weights trained at {trained} px, sampling at {size} px")
    space.require_side(size // space.factor)
    return notices


def choose_labels(values: dict[str, Any], spec: ModelSpec, guide: Checkpoint | None) -> None:
    """Set the label numbers of a grid and the class names, () if unknown. Raises UsageError for
    unknown labels.
    """
    classes = spec.num_classes
    names = rules.names_of(
        classes, values.get("class_names"), spec.class_names, spec.defaults.class_names
    )
    default = LABELS if classes == 1000 else range(min(classes, 8))
    values["labels"] = label_numbers(values.get("labels", default), names, spec, guide)
    values["class_names"] = names
