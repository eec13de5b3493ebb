"""Checks of options: each function looks at the values that are known so far and raises UsageError. Imports no
torch."""

from pathlib import Path
from typing import Any

from accel.errors import UsageError, shown
from accel.families import family_of, model_names
from accel.labels import find_label
from accel.output import is_folder
from accel.parallel import layouts

LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes


def sizes(options: Any) -> None:
    """Check model, image size and seed."""
    if options.fit is None and options.model is not None and family_of(options.model) is None:
        raise UsageError(f"`model={shown(options.model)}`: unknown; choose from {', '.join(model_names())}")
    size, unit = options.image_size, options.space.factor * options.patch_size
    if size is not None and size > MOST_PIXELS:
        raise UsageError(f"`image_size={size}`: by these weights, and at most {MOST_PIXELS}; give another `image_size`")
    if size is not None and size % unit:
        raise UsageError(
            f"`image_size={size}`: must be a multiple of {unit} (VAE factor {options.space.factor}, "
            f"patch {options.patch_size})"
        )
    _require_seed(options.seed)


def _require_seed(seed):
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"`seed={shown(str(seed))}`: must fit in 64 bits")


def _check_guidance(options):
    """Check what is known: with a checkpoint the rest follows from its weights."""
    fit, scale, interval = options.fit, options.cfg_scale, options.guidance_interval
    if scale is not None and not 1 <= scale <= 10**6:
        raise UsageError(f"`cfg_scale={scale:g}`: must be from 1, no guidance, to 1,000,000")
    if interval is not None and not (len(interval) == 2 and 0 <= interval[0] < interval[1] <= 1):
        given = " ".join(f"{one:g}" for one in interval)
        raise UsageError(f"`guidance_interval={given}`: must be two numbers from 0 to 1, the lower first")
    if fit is None:
        return
    if not fit.null_class and scale != 1:
        raise UsageError(
            f"`cfg_scale={scale:g}`: guidance needs a null class, and these weights were trained without "
            f"(label table of {options.num_classes} rows); use `cfg_scale=1`"
        )
    if options.guidance_channels > fit.in_channels:
        raise UsageError(f"`guidance_channels={options.guidance_channels}`: these latents have {fit.in_channels}")


def process(options: Any) -> None:
    """Check guidance, sampler, steps and plan."""
    _check_guidance(options)
    if not 0 <= options.eta <= 1 or options.eta and options.sampler != "ddim":
        raise UsageError(f"`eta={options.eta:g}`: must be from 0 to 1, and is for `sampler=ddim`")
    _check_sampler(options)
    if options.sampler not in (None, "ddpm") and options.forecast == "plan":
        raise UsageError(f"`forecast=plan`: plans are made for `sampler=ddpm`, not for {options.sampler}; drop it")
    if options.fit is not None and not options.fit.learn_sigma and options.forecast == "plan":
        raise UsageError("`forecast=plan`: needs weights with learned sigma, which these have not; drop it")
    if options.forecast_plan is not None and options.forecast != "plan":
        raise UsageError(f"`forecast_plan={options.forecast_plan}`: is for `forecast=plan`; add that or drop this")


def _check_sampler(options):
    sampler, family = options.sampler, options.family
    if sampler is None or family is None:
        return
    if sampler not in family.samplers:
        raise UsageError(
            f"`sampler={sampler}`: is not for a {family.name}, which {options.model} is; use "
            f"{', '.join(family.samplers)}"
        )
    if options.timestep_shift not in (None, 1) and (family.prediction == "noise" or sampler == "sde"):
        raise UsageError(f"`timestep_shift={options.timestep_shift:g}`: is for euler and heun of a flow; drop it")
    # Of 1000 steps diffusers rounds two to one time, which divides by zero.
    least, most = {"sde": (2, 1000), "dpm++": (1, 999), "unipc": (1, 999)}.get(sampler, (1, 1000))
    if not least <= (steps := options.num_sampling_steps or least) <= most:
        raise UsageError(f"`num_sampling_steps={steps}`: must be from {least} to {most} for `sampler={sampler}`")


def labels(options: Any) -> None:
    """Check labels, and give each its number."""
    classes = options.num_classes
    if classes is None or options.model is None:
        return
    if options.labels is None:
        options.labels = LABELS if classes == 1000 else tuple(range(min(classes, 8)))
    if options.class_names is not None and (given := len(options.class_names)) != classes:
        raise UsageError(f"`class_names`: are {given} names for {classes} classes; give one for each")
    if not options.labels:
        raise UsageError("`labels`: give at least one")
    options.labels = tuple(find_label(label, options.names, classes) for label in options.labels)


def seeds(options: Any) -> None:
    """Check a list of seeds."""
    seeds = options.seed_list or ()
    if seeds and options.seed != 0:
        raise UsageError(f"`seed_list`: conflicts with `seed={options.seed}`; give one")
    if len(set(seeds)) < len(seeds):
        raise UsageError("`seed_list`: names a seed twice, and each has a file of its own; name it once")
    for seed in seeds:
        _require_seed(seed)


def output(options: Any) -> None:
    """Check where the pictures go."""
    suffix = ".npy" if options.output_type == "latent" else ".png"
    options.output = options.output or f"sample{suffix}"
    if Path(options.output).suffix.lower() != suffix and not is_folder(options.output, options.output_type):
        folder = ", or name a folder (FOLDER/)" if options.output_type == "image" else ""
        raise UsageError(
            f"`output={shown(options.output)}`: must end in {suffix} for `output_type={options.output_type}`{folder}"
        )


def layout(options: Any) -> None:
    """Check how ranks share evaluations."""
    if (layout := options.layout) is None:
        return
    known = options.image_size is not None and (options.fit is not None or options.model is not None)
    layouts.check(layout, options.precision, (options.latent_size // options.patch_size) ** 2 if known else None)
    if not options.guided:
        raise UsageError(f"`parallel={options.parallel}`: shares evaluations with guidance only; use off")
