"""Open what options name: device, configuration file, weights, guide and decoder → a `Run`."""

from collections.abc import Mapping
from typing import Any

import torch

from accel.checkpoints import Source
from accel.checkpoints.files import Files
from accel.config import rules
from accel.config.options import Options
from accel.decoders import LatentSpace
from accel.decoders.loading import PUBLISHED, find
from accel.distributed import Ranks
from accel.errors import Given, UsageError
from accel.families import require_family_of
from accel.families.identify import Hints
from accel.families.spec import ModelSpec
from accel.io.progress import Stopwatch
from accel.run.resolve import MODEL, Choice, Run, choose, resolve
from accel.runtime import precision


def open_run(
    options: Options,
    device: torch.device | None = None,
    source: Source | None = None,
    guide: Source | None = None,
) -> Run:
    """Open weights, guide and decoder, and resolve the run; print its notices.

    source, guide: in place of those that the options name. Raises UsageError: for a tier that the
    device lacks before anything is fetched, for options that contradict the weights before a
    decoder is.
    """
    device = device or choose_device(options.get("device"))
    configuration = rules.read_configuration(options)
    values = rules.merged(options, configuration)
    for name in ("precision", "vae_precision"):
        if values.get(name, "auto") != "auto":
            precision.require(name, values[name], device)
    # A CPU computes with copies: it would otherwise see what others write to a file meanwhile.
    mapped = device.type != "cpu"
    files = [] if source else [files_of(values, mapped)]
    of_guide = []
    if guide is None and "guide" in values:
        of_guide = [Files(Given(values["guide"], "guide"), mapped)]
    if not all(each.is_here for each in (*files, *of_guide)):
        from accel.run.fetching import fetch  # most runs have all files

        fetch([*files, *of_guide], values)
    source = source or files[0].source(hints_in(values))
    for each in of_guide:
        guide = each.source(Hints(guided=source.spec))
        if guide.tensors.same_as(source.tensors):
            guide.given.warn(
                "is the file of the network that it guides; both estimates are equal, so guidance "
                "changes nothing"
            )
    if configuration is not None:
        configuration.require_network("ckpt", source.given, source.spec)
        if guide is not None:
            configuration.require_network("guide", guide.given, guide.spec)
    choice = choose(options, source, guide, configuration)
    run = resolve(choice, device, open_space(choice))
    run.announce()
    return run


def open_on_ranks(options: Options, ranks: Ranks) -> tuple[Run, Stopwatch]:
    """Choose each rank's device and open the files on every rank. Return the run and its
    stopwatch. Raises UsageError on all ranks if one rank lacks a file.
    """
    name = ranks.claim_device(options.get("device"))
    device = ranks.run_collectively(lambda: choose_device(name))
    watch = Stopwatch(device)
    with watch.phase("load"):
        # One download if the file system is shared, else one per node.
        run = ranks.run_in_turns(lambda: open_run(options, device))
    return run, watch


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name, by default a GPU if there is one. Raises UsageError if
    this machine lacks it.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(
            "no such kind of device", "try cuda, cuda:1 or cpu", parameter="device", value=name
        ) from None
    if device.type == "cuda":
        from accel.kernels import gpu  # a CPU needs none

        gpu.require(device)
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(
            f"torch {torch.__version__} cannot sample there",
            "use cuda or cpu",
            parameter="device",
            value=device,
        )
    return device


def files_of(values: rules.Values, mapped: bool = True) -> Files:
    """Return the weights that options name, not fetched yet. Raises UsageError if there are
    none of that name.
    """
    defaults = rules.named_defaults(values)
    name = values.get("ckpt", defaults.ckpt)
    if name is None:
        # Weights that ship or are given have a path.
        from accel.checkpoints.published import published_name

        model = rules.named_model(values) or rules.DEFAULT_MODEL
        family = require_family_of(model)
        sizes = {**defaults._asdict(), **rules.job_defaults(values, family), **values}
        name = published_name(family, model, sizes["image_size"], sizes["num_classes"])
    return Files(Given(name), mapped, values.get("weights_entry"))


def hints_in(values: rules.Values) -> Hints:
    """Return what options say of the weights."""
    names = "model", "num_classes", "num_heads"
    return Hints(**{name: values[name] for name in names if name in values})


def open_space(choice: Choice) -> LatentSpace:
    """Return the latent space of a run, with its decoder where pictures are decoded. Raises
    UsageError for a decoder of other latents than the network's.
    """
    values = choice.values
    source = choice.source
    spec = source.spec
    if not rules.decodes(values):
        return _as_trained(LatentSpace(spec.in_channels, spec.defaults.factor), values, spec)
    name = values["vae"]
    try:
        if name in PUBLISHED:  # refused before it is fetched
            _require_channels(name, LatentSpace(), spec)
        space = find(name, values.get("latent_stats"))
        _require_channels(name, space, spec)
    except UsageError as error:
        if choice.origins["vae"] not in (MODEL, source.name):
            raise
        fetch = f"; its family's: {spec.family.fetch}" if spec.family.fetch else ""
        text = f"decodes with {name} unless you give `vae`; {error.marked}{fetch}"
        raise UsageError(source.given.notice(text)) from None
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


def _as_trained(space: LatentSpace, values: Mapping[str, Any], spec: ModelSpec) -> LatentSpace:
    """Return the latent space with the scale or the statistics that the weights say."""
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
