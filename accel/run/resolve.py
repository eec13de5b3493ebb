"""Resolve a run: the only place where values of options are chosen. It opens no file.

    choose(options, source, guide, configuration) → Choice    values, with their origins
    resolve(choice, device, space) → Run    and what follows from decoder and device

Every value comes from the first of these origins that has it, and its origin stays beside it: the
user's options, a configuration file, the weights' own facts, the family's own program for the job,
their model or its family, the options' defaults.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel.checkpoints import Source
from accel.config import rules
from accel.config.options import DEFAULTS, OPTIONS, USER, Options
from accel.decoders import LatentSpace
from accel.distributed.placement import OFF, Layout
from accel.errors import Given, UsageError, warn
from accel.families.spec import ModelSpec
from accel.io.labels import NULL, find_label
from accel.runtime import precision
from accel.sampling import make_process
from accel.sampling.guidance import CHANNELS, Guidance, Unguided, guidance_of
from accel.sampling.intervals import closed_interval
from accel.sampling.process import Process

if TYPE_CHECKING:  # few runs have a configuration file
    from accel.families.configuration import Configuration

LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
PUBLISHED_DECODER = re.compile(r"^(?:stabilityai/)?sd-vae-ft-(ema|mse)$")
JOB = "job"  # origins of values
MODEL = "model"
FAMILY = "family"
DEFAULT = "default"


class OriginValues(NamedTuple):
    """Values of options from one origin."""

    origin: str
    values: Mapping[str, Any]


class Choice(NamedTuple):
    """The values of a run before its decoder is open, with their origins, and its weights."""

    values: dict[str, Any]
    origins: dict[str, str]
    notices: list[str]
    source: Source
    guide: Source | None
    configuration: "Configuration | None"


@dataclass(frozen=True)
class Run:
    """All that a run computes, chosen.

    values: of every option, by its name. origins: where each came from: USER, the name of a file,
    JOB, MODEL, FAMILY or DEFAULT; labels of a grid that the user leaves open have none. notices:
    lines that the user should read once.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    source: Source
    guide: Source | None
    configuration: "Configuration | None"  # what the file of --config says
    space: LatentSpace  # its decoder is None where no picture is decoded
    device: torch.device
    process: Process
    guidance: Guidance | Unguided
    notices: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option, None if it has none."""
        return self.values.get(name)

    @property
    def spec(self) -> ModelSpec:
        """Return the spec of the network."""
        return self.source.spec

    @property
    def tier(self) -> str:
        """Return the tier. A network that overflows float16 may replace it by bf16."""
        return self.values["precision"]

    @property
    def tier_is_given(self) -> bool:
        """Return whether the user chose the tier: then nothing replaces it."""
        return self.origins["precision"] == USER

    @property
    def latent_size(self) -> int:
        """Return the side of a latent."""
        return self.values["image_size"] // self.space.factor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a batch row."""
        return (self.latent_size // self.spec.patch_size) ** 2

    @property
    def is_fid_job(self) -> bool:
        """Return whether the run fills a folder for FID; else it is a grid."""
        return "num_fid_samples" in self.values

    @property
    def layout(self) -> Layout | None:
        """Return the layout that `parallel` names; None for auto."""
        return layout_of(self.values["parallel"])

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each grid."""
        return self.values.get("seed_list", (self.values["seed"],))

    @property
    def count(self) -> int:
        """Return the number of pictures; of a grid, for each seed."""
        return self.values["num_fid_samples"] if self.is_fid_job else len(self.values["labels"])

    def resolved(self, options: Options) -> "Run":
        """Return the run of other options with the same weights, decoder and device; read no file.
        Raises UsageError as `rules.check`, `choose` and `resolve`, and for a scale of guidance that
        uses a guide of the configuration file which was not loaded.
        """
        values = rules.merged(options, self.configuration)
        rules.check_merged(values)
        if self.guide is None and "guide" in values:
            raise UsageError(
                "uses the guide of the configuration file, which was not loaded at a scale of 1",
                "load it with this scale",
                parameter="cfg_scale",
                value=options.get("cfg_scale"),
            )
        choice = choose(options, self.source, self.guide, self.configuration)
        return resolve(choice, self.device, self.space)

    def announce(self) -> None:
        """Print the notices."""
        for notice in self.notices:
            warn(notice)

    def repeat_assumed_family(self) -> None:
        """Print again, after the pictures are saved, that the family is an assumption."""
        if "" in self.spec.assumed:
            self.source.given.warn(self.spec.assumed[""])

    def describe(self, machine: list[str], ranks: int = 1) -> str:
        """Return the line that announces the run. machine: the arithmetic and where it runs, in
        words. ranks: their number.
        """
        unit = "picture" if self.is_fid_job else "label"
        seeds = f" × {len(self.seeds)} seeds" if "seed_list" in self.values else ""
        words = [
            self.values["model"],
            f"{self.values['image_size']} px",
            f"{self.count} {unit}{'s' * (self.count > 1)}{seeds}",
            self.steps_and_guidance(),
            *machine,
        ]
        if ranks > 1:
            words.append(f"{ranks} ranks")
        return " · ".join(words)

    def steps_and_guidance(self) -> str:
        """Describe steps and guidance in words."""
        sampler = self.values["sampler"]
        name = "" if sampler == "ddpm" else f"{sampler.upper()} "
        shift = self.values["timestep_shift"]
        shifted = "" if shift == 1 else f", shift {shift:g}"
        low, high = self.values["guidance_interval"]
        interval = "" if (low, high) == (0, 1) else f" at levels {low:g} to {high:g}"
        scale = self.values["cfg_scale"]
        channels = self.values["guidance_channels"]
        on_channels = "" if channels == CHANNELS or scale == 1 else f" on {channels} channels"
        guidance = f"cfg {scale:g}"
        if "guide" in self.values:
            guidance = f"autoguidance {scale:g} by {Path(self.values['guide']).name}" + (
                "" if scale > 1 else " (not used: give a --cfg-scale above 1)"
            )
        steps = self.values["num_sampling_steps"]
        return f"{steps} {name}steps{shifted} · {guidance}{interval}{on_channels}"


def choose(
    options: Options,
    source: Source,
    guide: Source | None = None,
    configuration: "Configuration | None" = None,
) -> Choice:
    """Return the values of a user's options with these weights, as far as they do not depend on
    the decoder and the device. guide: the second network of autoguidance. configuration: what the
    file of --config says. Raises UsageError for options that contradict the weights.
    """
    spec = source.spec
    channels = min(spec.defaults.guidance_channels, spec.in_channels)  # all that there are
    facts = {"num_classes": spec.num_classes, "vae": spec.vae}
    of_model = {**spec.defaults._asdict(), "guidance_channels": channels}
    del of_model["class_names"]  # settled in `resolve`
    of_files = []
    if configuration is not None:
        of_files.append(OriginValues(configuration.given.name, configuration.options))
    if spec.specified_in:  # a file beside the weights
        of_files += [
            OriginValues(spec.specified_in, spec.recommended),
            OriginValues(source.name, facts),
        ]
    else:
        of_files.append(OriginValues(source.name, {**spec.recommended, **facts}))
    values, origins = merge(
        [
            OriginValues(USER, options),
            *of_files,
            OriginValues(JOB, rules.job_defaults(options, spec.family)),
            OriginValues(MODEL, of_model),
            OriginValues(FAMILY, {"sampler": spec.family.samplers[0]}),
            OriginValues(DEFAULT, DEFAULTS),
        ]
    )
    values["model"] = spec.model
    values["vae"] = PUBLISHED_DECODER.sub(r"\1", values["vae"])
    is_models = Path(values["vae"]).resolve() == Path(of_model["vae"]).resolve()
    if not is_models and origins.get("latent_stats") == MODEL:
        del values["latent_stats"]  # they belong to the model's decoder
    values.pop("guide", None)  # a configuration names one that it may not use
    notices = _said(of_files, origins) if source.given.option else []
    notices += [
        source.given.notice(text)
        for name, text in spec.assumed.items()
        if origins.get(name, MODEL) == MODEL
    ]
    if guide is not None:
        values["guide"] = guide.name
        from accel.run import guide as rules_of_guide  # a network by itself needs none

        notices += rules_of_guide.require_alike(values, origins, guide, source)
    _require_spec(values, spec)
    return Choice(values, origins, notices, source, guide, configuration)


def resolve(choice: Choice, device: torch.device, space: LatentSpace) -> Run:
    """Return the run of chosen values on a device. space: of the latents, with the decoder if
    pictures are decoded. Raises UsageError for a size or labels that there are not, and for a tier
    that the device lacks.
    """
    values = {**choice.values}
    origins = {**choice.origins}
    spec = choice.source.spec
    is_fid_job = "num_fid_samples" in values
    notices = [
        *choice.notices,
        *_settle_arithmetic(values, origins, device),
        *_settle_size(values, origins, spec, space, choice.source),
    ]
    if not is_fid_job:
        _settle_labels(values, spec, choice.guide)
    return Run(
        values,
        origins,
        choice.source,
        choice.guide,
        choice.configuration,
        space,
        device,
        process=process_of(values, origins, spec),
        guidance=guidance_in(values, spec, choice.guide, is_fid_job=is_fid_job),
        notices=tuple(notices),
    )


def merge(in_order: list[OriginValues]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the value of every option that an origin has, and that origin: the first of them."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, given in in_order:
        for name, value in given.items():
            if name in OPTIONS and name not in values and value is not None:
                values[name] = value
                origins[name] = origin
    return values, origins


def process_of(values: Mapping[str, Any], origins: Mapping[str, str], spec: ModelSpec) -> Process:
    """Return the process of chosen values."""
    family = spec.family
    # The original's own shift of float32 levels may round the first one above 1: it is unguided.
    as_original = family.interval_rule == "float32 levels" and origins["timestep_shift"] != USER
    return make_process(
        values["sampler"],
        values["num_sampling_steps"],
        shift=values["timestep_shift"],
        eta=values["eta"],
        learn_sigma=spec.learn_sigma,
        t_eps=values["t_eps"] if family.prediction == "data" else None,
        noise_scale=values["noise_scale"],
        heun_by_start=family.heun_by_start,
        last_time=family.last_time,
        interval_rule=family.interval_rule,
        starts_at_one=not as_original,
    )


def guidance_in(
    values: Mapping[str, Any], spec: ModelSpec, guide: Source | None, is_fid_job: bool
) -> Guidance | Unguided:
    """Return the guidance of chosen values. is_fid_job: as for `guidance_of`."""
    family = spec.family
    return guidance_of(
        values["cfg_scale"],
        spec.num_classes if spec.null_class else None,
        guide=guide is not None,
        channels=values["guidance_channels"],
        interval=closed_interval(family.interval_rule, values["guidance_interval"]),
        is_fid_job=is_fid_job,
    )


def layout_of(parallel: str) -> Layout | None:
    """Return the layout that the option `parallel` names; None for auto."""
    if parallel == "auto":
        return None
    if parallel == "off":
        return OFF
    from accel.distributed import layouts  # few runs name one

    return layouts.parse(parallel)


def _said(of_files: list[OriginValues], origins: Mapping[str, str]) -> list[str]:
    """Return a line for each file that gave values."""
    lines = []
    for origin, said in of_files:
        taken = {
            name: value
            for name, value in said.items()
            if origins.get(name) == origin and name != "num_classes"
        }
        if taken:
            given = Given(Path(origin).name)
            lines.append(given.notice(f"says {in_words(taken)}; flags override it"))
    return lines


def in_words(values: Mapping[str, Any]) -> str:
    """Return options with their values, such as "cfg scale 1.5, guidance interval 0 0.7"."""
    words = []
    for name, value in values.items():
        parts = value if isinstance(value, tuple) else (value,)
        text = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
        words.append(f"{name.replace('_', ' ')} {text}")
    return ", ".join(words)


# ---- Network, guidance and their limits ----


def _require_spec(values: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise UsageError for values that contradict the weights."""
    classes = values["num_classes"]
    if classes != spec.num_classes:
        raise UsageError(
            f"these weights have {spec.num_classes}",
            "drop it",
            parameter="num_classes",
            value=classes,
        )
    rules.require_sampler(values["sampler"], spec.model, spec.family)
    rules.require_family(values, spec.model, spec.family)
    scale = values["cfg_scale"]
    if not spec.null_class and "guide" not in values and scale != 1:
        remedy = "use `cfg_scale=1`"
        if classes > 1:
            remedy += f", or `num_classes={classes - 1}` if the last row is the null class"
        raise UsageError(
            "guidance needs a null class, and these weights were trained without (label table of "
            f"{classes} rows)",
            f"{remedy}, or give a `guide`",
            parameter="cfg_scale",
            value=f"{scale:g}",
        )
    # A module's own guidance may reach the learned sigma.
    most = max(spec.in_channels, spec.recommended.get("guidance_channels", 0))
    if values["guidance_channels"] > most:
        raise UsageError(
            f"these latents have {most}",
            parameter="guidance_channels",
            value=values["guidance_channels"],
        )


# ---- Arithmetic, latents, size, labels ----


def _settle_arithmetic(
    values: dict[str, Any], origins: dict[str, str], device: torch.device
) -> list[str]:
    """Choose the tier and the decoder's arithmetic. Return lines about it."""
    tf32 = values.pop("tf32", None)
    origins.setdefault("precision", origins.get("tf32", DEFAULT))
    tier = values.get("precision")
    if tf32 is not None:
        tier = "tf32" if tf32 else "fp32"
    notices = []
    if tf32 and not precision.supports("tf32", device):
        hardware = precision.TIERS["tf32"].hardware
        notices.append(f"`tf32`: {device} has no {hardware}; sampling in fp32")
        tier = "fp32"
    tier = tier or precision.default_tier(device)
    precision.require("precision", tier, device)
    values["precision"] = tier
    decoder = precision.decoder_precision(values["vae_precision"], tier, device)
    values["vae_precision"] = decoder
    return notices


def _settle_size(
    values: dict[str, Any],
    origins: dict[str, str],
    spec: ModelSpec,
    space: LatentSpace,
    source: Source,
) -> list[str]:
    """Choose the size of pictures, by default that of the training pictures. Return lines about it.
    Raises UsageError for a size that patches, the decoder or the family do not take.
    """
    notices = []
    trained = spec.image_size
    if spec.latent_size:
        trained = space.factor * spec.latent_size
        # Some programs call the side of latents so.
        if spec.image_size not in (None, trained, spec.latent_size):
            notices.append(
                source.given.notice(
                    f"says image_size {spec.image_size}, and this decoder makes {trained} px of "
                    f"its latents of side {spec.latent_size}; if it has another: `vae=NAME`"
                )
            )
    if trained and origins["image_size"] in (JOB, MODEL):
        values["image_size"] = trained
        origins["image_size"] = source.name
    size = OPTIONS["image_size"].checked(values["image_size"])
    rules.require_unit(size, space.factor, spec.patch_size)
    if trained not in (None, size):
        if not spec.family.any_size:
            raise UsageError(
                f"a {spec.family.name} samples the size that it was trained for alone",
                f"use {trained}",
                parameter="image_size",
                value=size,
            )
        notices.append(f"{spec.model}: weights trained at {trained} px, sampling at {size} px")
    space.require_side(size // space.factor)
    return notices


def _settle_labels(values: dict[str, Any], spec: ModelSpec, guide: Source | None) -> None:
    """Choose the labels of a grid, as numbers, the names of all classes, () where they are unknown,
    and whether ranks share evaluations. Raises UsageError for labels that there are not.
    """
    classes = spec.num_classes
    names = rules.names_of(
        classes, values.get("class_names"), spec.class_names, spec.defaults.class_names
    )
    usual = LABELS if classes == 1000 else range(min(classes, 8))
    labels = values.get("labels", usual)
    numbers = tuple(find_label(label, names, classes) for label in labels)
    has_null_label = spec.null_class and (guide is None or guide.spec.null_class)
    if classes in numbers and not has_null_label:
        raise UsageError(
            "these weights or their guide were trained without a null label",
            "give classes",
            parameter="labels",
            value=NULL,
        )
    values["labels"] = numbers
    values["class_names"] = names
    if guide is None and spec.null_class:
        return
    if layout_of(values["parallel"]) not in (None, OFF):
        raise UsageError(
            "ranks share evaluations with guidance by the null class alone, without a `guide`",
            "use off",
            parameter="parallel",
            value=values["parallel"],
        )
    values["parallel"] = "off"
