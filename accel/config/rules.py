"""A user's request, read and checked once, and the rules that its values obey, before the weights
are open and after. Imports no torch.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from accel.config.options import DEFAULTS, Options
from accel.config.repeated import Repeated, read_picture
from accel.errors import UsageError, shown
from accel.families import Defaults, Family, family_of, model_names, require_family_of
from accel.families.configuration import Configuration
from accel.families.configuration import read as read_configuration
from accel.io.labels import find_label, imagenet
from accel.io.output import SUFFIX, is_folder

DEFAULT_MODEL = "DiT-XL/2"
# Least and most steps of samplers with stricter limits: for 1000 steps, diffusers rounds two
# times to one.
STEPS = {"sde": (2, 1000), "dpm++": (1, 999), "unipc": (1, 999)}

Values = Mapping[str, Any]


class Request(NamedTuple):
    """A user's options and configuration file, read once and checked as far as that is possible
    without weights.

    values: the options, completed by those of the file, or by the settings in the picture that
    `like` names. A guide of the file is left out where the scale of guidance does not use it.
    repeated: the settings in that picture.
    """

    options: Options
    configuration: Configuration | None
    values: Values
    repeated: Repeated = Repeated()

    @classmethod
    def open(cls, options: Options, configuration: Configuration | None = None) -> "Request":
        """Read the configuration file that options name, if it is not given. Raises UsageError for
        a file that cannot be read, and for options that contradict it or each other.
        """
        repeated = Repeated()
        values: Values = options
        if "like" in options:
            options, repeated = read_picture(options)
            of_picture = {
                name: value for _, each in repeated.by_origin for name, value in each.items()
            }
            values = {**of_picture, **options}
        if configuration is None and "config" in options:
            configuration = read_configuration(options["config"])
        if configuration is not None:
            values = _completed(options, configuration)
        _check(values)
        return cls(options, configuration, values, repeated)

    def changed(self, **values: Any) -> "Request":
        """Return the request of other options, with the same configuration file; None leaves an
        option as it is. Raises UsageError.
        """
        return Request.open(self.options.changed(**values), self.configuration)


def _completed(options: Options, configuration: Configuration) -> Values:
    """Complete options by a configuration file's. Raises UsageError for a model of another family,
    for values of the file that are not supported, and for missing files.
    """
    family = family_of(options["model"]) if "model" in options else None
    if family is not None and family.name != configuration.family:
        raise UsageError(
            f"is a {family.name}, and `config={options['config']}` is of a {configuration.family}",
            "drop one",
            parameter="model",
            value=options["model"],
        )
    values = {**configuration.options, **options}
    unused = {"guide"} if values.get("cfg_scale", 2.0) <= 1 else set()
    configuration.require_computed({*options, *unused}, decodes(values))
    return {name: value for name, value in values.items() if name in options or name not in unused}


def decodes(values: Values) -> bool:
    """Return whether pictures are decoded."""
    return values.get("output_type") != "latent"


def named_model(values: Values) -> str | None:
    """Return the model that options name; without one the default model, or None where weights are
    given, from which it follows.
    """
    return values.get("model", None if "ckpt" in values else DEFAULT_MODEL)


def named_defaults(values: Values) -> Defaults:
    """Return the values that the named model implies, before any weights are open."""
    name = named_model(values)
    return require_family_of(name).models[name] if name else Defaults()


def job_defaults(values: Values, family: Family) -> Values:
    """Return the defaults of the family's own FID program for an FID job, none for a grid."""
    return family.fid_defaults if "num_fid_samples" in values else {}


def _check(values: Values) -> None:
    """Raise UsageError for values that contradict each other, an unknown model, and values that
    the model lacks, as far as that is known without weights.
    """
    if "precision" in values and values.get("tf32") not in (None, values["precision"] == "tf32"):
        raise UsageError(
            f"conflicts with `precision={values['precision']}`",
            "give one",
            parameter="tf32",
            value=values["tf32"],
        )
    name = str(values.get("model", DEFAULT_MODEL))
    if name not in model_names():
        near = difflib.get_close_matches(name, model_names(), 1)
        meant = f"did you mean {near[0]}? All are" if near else "choose from"
        raise UsageError(
            f"unknown; {meant} {', '.join(model_names())}", parameter="model", value=shown(name)
        )
    model = named_model(values)
    if model is not None:
        defaults = named_defaults(values)
        require_family(values, model, require_family_of(model))
        if "image_size" in values and values.get("vae", defaults.vae) == defaults.vae:
            require_unit(values["image_size"], defaults.factor, int(model.rpartition("/")[2]))
    if "num_fid_samples" not in values:
        _check_grid(values)


def _check_grid(values: Values) -> None:
    """Raise UsageError for seeds, an output or labels that no grid can have."""
    seeds = values.get("seed_list", ())
    if seeds and "seed" in values:
        raise UsageError(
            f"conflicts with `seed={values['seed']}`", "give one", parameter="seed_list"
        )
    if seeds and values.get("grids", 1) > 1:
        raise UsageError("conflicts with `seed_list`", "give one", parameter="grids")
    if len(set(seeds)) < len(seeds):
        raise UsageError(
            "contains a seed twice; each seed has one file",
            "give it once",
            parameter="seed_list",
        )
    output_type = values.get("output_type", DEFAULTS["output_type"])
    output = values.get("output")
    suffix = SUFFIX[output_type]
    if output and not is_folder(output, output_type) and not output.lower().endswith(suffix):
        folder = ", or name a folder (FOLDER/)" if output_type == "image" else ""
        raise UsageError(
            f"must end in {suffix} for `output_type={output_type}`{folder}",
            parameter="output",
            value=shown(output),
        )
    if "ckpt" not in values:
        defaults = named_defaults(values)
        classes = values.get("num_classes", defaults.num_classes)
        names = names_of(classes, values.get("class_names"), defaults.class_names)
        for label in values.get("labels", ()):
            find_label(label, names, classes)


def names_of(num_classes: int, given: tuple[str, ...] | None, *implied: tuple) -> tuple[str, ...]:
    """Return the names of all classes: the given ones, else the first of `implied` with so many
    names, else ImageNet's; () if there are none. Raises UsageError for another number of names.
    """
    if given and len(given) != num_classes:
        raise UsageError(
            f"are {len(given)} names for {num_classes} classes",
            "give one for each",
            parameter="class_names",
        )
    all_names = given or (), *implied, imagenet() if num_classes == 1000 else ()
    return next((names for names in all_names if len(names) == num_classes), ())


def require_family(values: Values, model: str, family: Family) -> None:
    """Raise UsageError for a sampler, options of one, or a decoder that a model's family does
    not have.
    """
    defaults = family.defaults_of(model)
    sampler = values.get("sampler", "")
    for name, default in (("vae", defaults.vae), ("latent_stats", None)):
        if defaults.factor == 1 and values.get(name, default) != default:
            raise _wrong(values, name, f"{model} samples pixels, without a decoder")
    if sampler not in ("", *family.samplers):
        raise UsageError(
            f"is not for a {family.name}, which {model} is",
            f"use {', '.join(family.samplers)}",
            parameter="sampler",
            value=sampler,
        )
    if values.get("eta", 0) and sampler != "ddim":
        raise _wrong(values, "eta", "is for `sampler=ddim`")
    is_ode = family.prediction != "noise" and sampler != "sde"
    if values.get("timestep_shift", 1) != 1 and not is_ode:
        raise _wrong(values, "timestep_shift", "is for euler and heun of a flow")
    for name in ("noise_scale", "t_eps"):
        default = getattr(Defaults(), name)
        if family.prediction != "data" and values.get(name, default) != default:
            raise _wrong(values, name, "is for networks that estimate the clean picture")
    if "num_sampling_steps" in values:
        require_steps(sampler, values["num_sampling_steps"])


def require_steps(sampler: str, steps: int) -> None:
    """Raise UsageError for a number of steps that the sampler does not take."""
    least, most = STEPS.get(sampler, (1, 1000))
    if not least <= steps <= most:
        raise UsageError(
            f"must be from {least} to {most} for `sampler={sampler}`",
            parameter="num_sampling_steps",
            value=steps,
        )


def _wrong(values: Values, name: str, problem: str) -> UsageError:
    """Return the error for an option that has no meaning here."""
    value = values[name]
    text = f"{value:g}" if isinstance(value, float) else value
    return UsageError(problem, "drop it", parameter=name, value=text)


def require_unit(size: int, factor: int, patch_size: int) -> None:
    """Raise UsageError for a picture's side that latents or patches do not divide."""
    unit = factor * patch_size
    if size % unit:
        raise UsageError(
            f"must be a multiple of {unit} (VAE factor {factor}, patch {patch_size})",
            parameter="image_size",
            value=size,
        )
