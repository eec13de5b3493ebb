"""A `Run`: an opened request with a value for every option. opening.py makes it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accel.checkpoints import Checkpoint
from accel.config import rules
from accel.config.options import USER, Options, Settings
from accel.decoders import LatentSpace
from accel.distributed import OFF, Layout
from accel.errors import UsageError
from accel.families.spec import ModelSpec
from accel.io.labels import NULL, find_label
from accel.sampling import make_process
from accel.sampling.guidance import CHANNELS, Guidance, Unguided, closed_interval, guidance_of
from accel.sampling.process import Process


@dataclass(frozen=True)
class Run:
    """A request with open files and a value for every option."""

    settings: Settings
    request: rules.Request
    checkpoint: Checkpoint
    guide: Checkpoint | None
    space: LatentSpace  # without a decoder if no picture is decoded
    device: torch.device
    process: Process
    guidance: Guidance | Unguided

    @property
    def spec(self) -> ModelSpec:
        """Return the spec of the network."""
        return self.checkpoint.spec

    @property
    def latent_size(self) -> int:
        """Return the side of a latent."""
        return self.settings.image_size // self.space.factor

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a batch row."""
        return (self.latent_size // self.spec.patch_size) ** 2

    @property
    def is_fid_job(self) -> bool:
        """Return whether the run is an FID job; else it is a grid."""
        return self.settings.num_fid_samples is not None

    @property
    def layout(self) -> Layout | None:
        """Return the layout that `parallel` names; None for auto. Raises UsageError."""
        if self.settings.parallel == "auto":
            return None
        if self.settings.parallel == "off":
            return OFF
        from accel.distributed import layouts  # lazy import: few runs name a layout

        return layouts.parse(self.settings.parallel)

    @property
    def count(self) -> int:
        """Return the number of pictures, of a grid per seed."""
        return self.settings.num_fid_samples or len(self.settings.labels)

    def changed(
        self,
        *,
        labels: Iterable[int | str] | None = None,
        seed: int | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
    ) -> "Run":
        """Return a copy with different labels, steps, scale or seed; None keeps a value. Read no
        file. Raises UsageError for an invalid value, for unknown labels, and for a scale that needs
        a missing null class or a guide that was not loaded.
        """
        given = Options(
            labels=labels, seed=seed, num_sampling_steps=num_sampling_steps, cfg_scale=cfg_scale
        )
        settings = replace(self.settings, **given)
        process = self.process
        guidance = self.guidance
        if "labels" in given:
            numbers = label_numbers(given["labels"], settings.class_names, self.spec, self.guide)
            settings = replace(settings, labels=numbers)
        if settings.num_sampling_steps != self.settings.num_sampling_steps:
            rules.require_steps(settings.sampler, settings.num_sampling_steps)
            process = process_of(settings, self.spec)
        if settings.cfg_scale != self.settings.cfg_scale:
            configuration = self.request.configuration
            has_guide = configuration is not None and "guide" in configuration.options
            if has_guide and self.guide is None and settings.cfg_scale > 1:
                raise UsageError(
                    "uses the guide of the configuration file, which was not loaded at a scale "
                    "of 1",
                    "load it with this scale",
                    parameter="cfg_scale",
                    value=settings.cfg_scale,
                )
            require_null_class(settings.cfg_scale, self.spec, self.guide)
            guidance = guidance_for(settings, self.spec, self.guide)
        return replace(self, settings=settings, process=process, guidance=guidance)

    def repeat_assumed_family(self) -> None:
        """Repeat the notice about an assumed family, after the pictures are saved."""
        if self.checkpoint.family_notice:
            self.checkpoint.given.warn(self.checkpoint.family_notice)

    def describe(self, machine: list[str], ranks: int = 1) -> str:
        """Return the line that announces the run. machine: precision and device as text. ranks: the
        world size.
        """
        settings = self.settings
        unit = "picture" if self.is_fid_job else "label"
        count = f"{self.count} {unit}{'s' * (self.count > 1)}"
        if settings.seed_list:
            count += f" × {len(settings.seed_list)} seeds"
        if settings.grids > 1:
            count += f" × {settings.grids} grids"
        sampler = "" if settings.sampler == "ddpm" else f"{settings.sampler.upper()} "
        steps = f"{settings.num_sampling_steps} {sampler}steps"
        if settings.timestep_shift != 1:
            steps += f", shift {settings.timestep_shift:g}"
        scale = settings.cfg_scale
        guidance = f"cfg {scale:g}"
        if settings.guide:
            guidance = f"autoguidance {scale:g} by {Path(settings.guide).name}"
            if scale <= 1:
                guidance += " (not used: give a --cfg-scale above 1)"
        low, high = settings.guidance_interval
        if (low, high) != (0, 1):
            guidance += f" at levels {low:g} to {high:g}"
        if settings.guidance_channels != CHANNELS and scale != 1:
            guidance += f" on {settings.guidance_channels} channels"
        words = [settings.model, f"{settings.image_size} px", count, steps, guidance, *machine]
        if ranks > 1:
            words.append(f"{ranks} ranks")
        return " · ".join(words)


def process_of(settings: Settings, spec: ModelSpec) -> Process:
    """Make the process of a network."""
    family = spec.family
    # In float32, the original's shift can round the first level above 1, outside the interval.
    as_original = (
        family.interval_rule == "float32 levels" and settings.origins["timestep_shift"] != USER
    )
    return make_process(
        settings.sampler,
        settings.num_sampling_steps,
        shift=settings.timestep_shift,
        eta=settings.eta,
        learn_sigma=spec.learn_sigma,
        t_eps=settings.t_eps if family.prediction == "data" else None,
        noise_scale=settings.noise_scale,
        heun_by_start=family.heun_by_start,
        last_time=family.last_time,
        interval_rule=family.interval_rule,
        starts_at_one=not as_original,
    )


def guidance_for(
    settings: Settings, spec: ModelSpec, guide: Checkpoint | None
) -> Guidance | Unguided:
    """Make the guidance of a network."""
    family = spec.family
    return guidance_of(
        settings.cfg_scale,
        spec.num_classes if spec.null_class else None,
        guide=guide is not None,
        channels=settings.guidance_channels,
        interval=closed_interval(family.interval_rule, settings.guidance_interval),
        is_fid_job=settings.num_fid_samples is not None,
    )


def require_null_class(scale: float, spec: ModelSpec, guide: Checkpoint | None) -> None:
    """Raise UsageError for guidance without a null class and without a guide."""
    if spec.null_class or guide is not None or scale == 1:
        return
    classes = spec.num_classes
    remedy = "use `cfg_scale=1`"
    if classes > 1:
        remedy += f", or `num_classes={classes - 1}` if the last row is the null class"
    raise UsageError(
        f"guidance needs a null class, which these weights lack (label table of {classes} rows)",
        f"{remedy}, or give a `guide`",
        parameter="cfg_scale",
        value=f"{scale:g}",
    )


def label_numbers(
    labels: Iterable[int | str], names: tuple[str, ...], spec: ModelSpec, guide: Checkpoint | None
) -> tuple[int, ...]:
    """Convert labels to numbers. names: of all classes, or () if unknown. Raises UsageError for
    labels that the weights or the guide lack.
    """
    classes = spec.num_classes
    numbers = tuple(find_label(label, names, classes) for label in labels)
    has_null_label = spec.null_class and (guide is None or guide.spec.null_class)
    if classes in numbers and not has_null_label:
        raise UsageError(
            "these weights or their guide have no null label",
            "give classes",
            parameter="labels",
            value=NULL,
        )
    return numbers
