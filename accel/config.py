"""The options of a run: every option once, with its type, default, flag, help and check.

    Config     the network, its process and guidance, the arithmetic, the files
    Grid       pictures of chosen classes in one file or a folder; has a Config
    FidJob     a folder of many pictures for FID; has a Config

A field that is None is open. `check` refuses what can be refused without weights, before
torch is imported. `filled` returns the same options with every open field filled from the
weights, once they are open. Imports no torch.
"""

import argparse
import difflib
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import UsageError, shown
from accel.families import Defaults, Family, family_of, model_names, sampler_names
from accel.flags import check_writable, checked, flag
from accel.labels import NULL, find_label, imagenet, read_class_names
from accel.latents import LatentSpace
from accel.output import SUFFIX, is_folder, of_seed
from accel.ranks.placement import OFF, Layout

if TYPE_CHECKING:  # the second brings torch
    from typing_extensions import Self

    from accel.families.recognise import Fit

DEFAULT_MODEL = "DiT-XL/2"
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
SEEDS = -(2**63), 2**64 - 1  # that torch's generators take
LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
# least and most steps, where a sampler has limits of its own: of 1000 diffusers rounds two
# to one time
STEPS = {"sde": (2, 1000), "dpm++": (1, 999), "unipc": (1, 999)}

PUBLISHED_DECODER = re.compile(r"^(?:stabilityai/)?sd-vae-ft-(ema|mse)$")
# Options that the weights' model does not fill: the weights are open, the size depends on their
# decoder.
AFTERWARDS = {"ckpt", "image_size"}
CHANNELS = 3  # guided of four, as for the published pictures

SPEED = "speed"  # a group of --help
sampled = partial(flag, group="what to sample")
speed = partial(flag, group=SPEED)
files = partial(flag, group="files")
advanced = partial(flag, group="advanced")


class Options:
    """A dataclass of options: each value is checked and converted to its field's type.

    Raises UsageError, naming the parameter and the remedy.
    """

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and "help" in item.metadata:
                object.__setattr__(self, item.name, checked(value, item))


@dataclass(frozen=True)
class Config(Options):
    """Options of every run. None leaves a field open."""

    model: str | None = sampled(
        f"network: {', '.join(model_names())}; Demo models ship with their weights and run "
        "anywhere; default: that of --ckpt, else DiT-XL/2",
        metavar="NAME",
    )
    image_size: int | None = sampled(
        "side of a picture in pixels, a multiple of 16 (patch 4: of 32, patch 8: of 64); pictures "
        "look worse at sizes other than the trained one; default: that of --ckpt, else 512",
        bounds=(1, MOST_PIXELS),
    )
    cfg_scale: float | None = sampled(
        "strength of classifier-free guidance: 1 is none, 0 the null label's estimate on guided "
        "channels, between them a mixture; default: what the model implies, 4.0 unless its recipe "
        "says otherwise",
        bounds=(0, 10**6),
    )
    num_sampling_steps: int | None = sampled(
        "denoising steps, up to 1000; default: the model's, 250", bounds=(1, 1000)
    )
    timestep_shift: float | None = sampled(
        "euler, heun: below 1 the steps are shorter at noise than at the picture; default: what "
        "the model implies, 1 unless its recipe says otherwise",
        bounds=(0.01, 100),
    )
    guidance_interval: tuple | None = sampled(
        "noise levels, from 0 at the picture to 1 at noise, at which guidance acts; at others "
        "the network is evaluated on half the batch rows; default: what the model implies, 0 1 "
        "unless its recipe says otherwise",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        bounds=(0, 1),
    )
    guidance_channels: int | None = sampled(
        "number of latent channels that are guided: the first 3, as published, or all 4, as "
        "diffusers does; default: what the model implies",
        bounds=(1, 8192),
    )
    noise_scale: float | None = sampled(
        "networks that estimate the clean picture: scale of the first noise; default: what --ckpt "
        "says, else what the model implies",
        bounds=(0.001, 1000),
    )
    t_eps: float | None = sampled(
        "networks that estimate the clean picture: the least 1 − t that an estimate is divided by; "
        "default: what --ckpt says, else 0.05",
        bounds=(0.000001, 1),
    )
    sampler: str | None = sampled(
        "networks that predict noise: ddpm (default), ancestral sampling; ddim, deterministic "
        "unless --eta says otherwise, for few steps such as 25; dpm++, unipc, diffusers' "
        "solvers, for 10 to 25 steps. Flows: sde (default where the network has it); euler, "
        "heun, deterministic, for fewer steps. Each makes other pictures",
        choices=sampler_names(),
    )
    eta: float = sampled(
        "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws",
        default=0.0,
        bounds=(0, 1),
    )
    seed: int = sampled(
        "seed of the noise; the same seed, device and number of GPUs give the same pictures; a CPU "
        "uses only the lower 32 bits",
        default=0,
        bounds=SEEDS,
        ranks=("--global-seed", "--seed"),
    )
    num_classes: int | None = sampled(
        "classes that the weights were trained with; default: what --ckpt says, else 1000",
        bounds=(1, 10**6),
    )

    precision: str | None = speed(
        "fp16: float16 GEMMs with all else in float32, the fast one; bf16: for weights that "
        "overflow float16; tf32: float32 with TF32 GEMMs, as DiT ships; fp32: true float32; "
        "exact: fp32's pictures from float16 tensor cores; default: fp16 on a GPU with tensor "
        "cores (bf16 if the weights overflow it), else fp32",
        choices=("fp32", "exact", "tf32", "fp16", "bf16"),
    )
    tf32: bool | None = speed(
        "--tf32 is --precision tf32 where the hardware has it, else fp32; --no-tf32 is "
        "--precision fp32",
        action=argparse.BooleanOptionalAction,
        ranks_only=True,
    )
    vae_precision: str = speed(
        "the decoder's arithmetic. fp16: a fraction of the time and memory, used if a check of "
        "its weights passes; tf32: float32 with TF32 convolutions; fp32: true float32; auto: "
        "fp16 for fp16 and bf16, else as --precision",
        default="auto",
        choices=("auto", "fp32", "tf32", "fp16"),
    )

    ckpt: str | None = files(
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt), a folder "
        "in diffusers' layout or with consolidated weights, or a hub id; default: the published "
        "weights for the image size",
    )
    config: str | None = files(
        "a configuration file of the model's own repository, such as a YAML: its weights, "
        "decoder, guidance and steps, where no flag says otherwise",
        metavar="FILE",
    )
    weights_entry: str | None = files(
        "the entry of a training file to sample, such as ema or model; default: ema, else "
        "model_ema1, else model or the first other that is known",
        metavar="NAME",
    )
    guide: str | None = files(
        "autoguidance: weights of a second, smaller or less trained network of the same family, "
        "classes and latents, as --ckpt takes them, in place of the null label; --cfg-scale is its "
        "strength, at 1 or less it is not used",
        metavar="WEIGHTS",
    )
    vae: str | None = files(
        "decoder: ema, mse (sd-vae-ft-*), a folder, the .pt of VA-VAE or of a ViT decoder, or a "
        "hub id; pixels: none; default: the model's"
    )
    num_heads: int | None = files(
        "attention heads of weights whose file does not say their number; default: those of the "
        "model of this size",
        bounds=(1, 1024),
    )
    latent_stats: str | None = files(
        ".pt file with mean and std of each latent channel, or a ViT decoder's mean and var: "
        "latents × std + mean are decoded; default: the latents_stats.pt or stat.pt in the folder "
        "of --vae",
    )
    device: str | None = advanced(
        "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one"
    )

    @property
    def tier(self) -> str | None:
        """Return the precision that `precision` or `tf32` asks for; None leaves it open."""
        if self.tf32 is None:
            return self.precision
        return "tf32" if self.tf32 else "fp32"

    @property
    def named_model(self) -> str | None:
        """Return the model that is named, the default one where no weights are given, and
        None where the model follows from the weights.
        """
        if self.model is None and self.ckpt is None:
            return DEFAULT_MODEL
        return self.model

    @property
    def defaults(self) -> Defaults:
        """Return the values that the named model implies, before any weights are open."""
        name = self.named_model
        return family_of(name).models[name] if name else Defaults()

    def with_file(self, decodes: bool = True) -> "Config":
        """Return these options, open ones filled by the configuration file. decodes: whether a
        decoder is needed. Raises UsageError for a file with values that are not computed here,
        and for missing files.
        """
        if self.config is None:
            return self
        from accel.families import config_file  # few runs have one

        return replace(self, **config_file.taken(self.config, vars(self), decodes))

    def __post_init__(self):
        super().__post_init__()
        if self.precision not in (None, self.tier):
            raise UsageError(
                f"`tf32={self.tf32}`: conflicts with `precision={self.precision}`; give one"
            )
        levels = self.guidance_interval
        if levels is not None and not (len(levels) == 2 and levels[0] < levels[1]):
            given = " ".join(f"{level:g}" for level in levels)
            raise UsageError(
                f"`guidance_interval={given}`: must be two numbers from 0 to 1, the lower first"
            )

    def check(self) -> None:
        """Raise UsageError for a model that there is not, and for options that it does not have."""
        model = self.named_model
        if self.model not in (None, *model_names()):
            near = difflib.get_close_matches(self.model, model_names(), 1)
            meant = f"did you mean {near[0]}? All are" if near else "choose from"
            raise UsageError(
                f"`model={shown(self.model)}`: unknown; {meant} {', '.join(model_names())}"
            )
        if model is None:
            return
        self.require_family(model, family_of(model))
        if self.image_size is not None and self.vae in (None, self.defaults.vae):
            _require_unit(self.image_size, self.defaults.factor, int(model.rpartition("/")[2]))

    def require_family(self, model: str, family: Family) -> None:
        """Raise UsageError for a sampler, options of one, or a decoder that a model's family does
        not have.
        """
        defaults = family.models.get(model, family.recipe)
        sampler = self.sampler
        for name, usual in (("vae", defaults.vae), ("latent_stats", None)):
            if defaults.factor == 1 and getattr(self, name) not in (None, usual):
                raise UsageError(
                    f"`{name}={getattr(self, name)}`: {model} samples pixels, without a decoder; "
                    "drop it"
                )
        if sampler not in (None, *family.samplers):
            raise UsageError(
                f"`sampler={sampler}`: is not for a {family.name}, which {model} is; use "
                f"{', '.join(family.samplers)}"
            )
        if self.eta and sampler != "ddim":
            raise UsageError(f"`eta={self.eta:g}`: is for `sampler=ddim`; drop it")
        shifted = self.timestep_shift not in (None, 1)
        if shifted and (family.prediction == "noise" or sampler == "sde"):
            raise UsageError(
                f"`timestep_shift={self.timestep_shift:g}`: is for euler and heun of a flow; drop "
                "it"
            )
        for name in ("noise_scale", "t_eps"):
            value = getattr(self, name)
            if family.prediction != "data" and value not in (None, getattr(Defaults(), name)):
                raise UsageError(
                    f"`{name}={value:g}`: is for networks that estimate the clean picture; drop it"
                )
        least, most = STEPS.get(sampler, (1, 1000))
        steps = self.num_sampling_steps
        if steps is not None and not least <= steps <= most:
            raise UsageError(
                f"`num_sampling_steps={steps}`: must be from {least} to {most} for "
                f"`sampler={sampler}`"
            )

    def filled(self, fit: "Fit") -> "Config":
        """Return the options with every open one filled, but the size: by the weights, else by
        their model or family. fit: family and sizes of the weights. Raises UsageError for options
        that contradict the weights.
        """
        family = fit.family
        implied: dict[str, Any] = {**fit.defaults._asdict(), "sampler": family.samplers[0]}
        # All that there are, of latents with fewer channels than the model guides.
        implied["guidance_channels"] = min(fit.defaults.guidance_channels, fit.in_channels)
        of_size = fit.defaults.decoders.get(fit.latent_size)
        if fit.vae is not None:
            implied["vae"] = PUBLISHED_DECODER.sub(r"\1", fit.vae)
        elif of_size is not None and self.vae is None:
            implied["vae"], implied["latent_stats"] = of_size
        implied |= {name: value for name, value in fit.recipe.items() if value is not None}
        implied["num_classes"] = fit.num_classes
        if self.num_classes not in (None, fit.num_classes):
            raise UsageError(
                f"`num_classes={self.num_classes}`: these weights have {fit.num_classes}; drop it"
            )
        if self.sampler is None and implied["sampler"] not in family.samplers:
            raise UsageError(
                f"`sampler={implied['sampler']}`: is not for a {family.name}, which {fit.model} "
                f"is; use {', '.join(family.samplers)}"
            )
        open_options = {name for name, value in vars(self).items() if value is None}
        values = {name: implied[name] for name in open_options & implied.keys() - AFTERWARDS}
        config = replace(self, **{**values, "model": fit.model})
        config.require_family(fit.model, family)
        if not fit.null_class and config.guide is None and config.cfg_scale != 1:
            rows = fit.num_classes
            remedy = "use `cfg_scale=1`"
            if rows > 1:
                remedy += f", or `num_classes={rows - 1}` if the last row is the null class"
            raise UsageError(
                f"`cfg_scale={config.cfg_scale:g}`: guidance needs a null class, and these weights "
                f"were trained without (label table of {rows} rows); {remedy}, or give a `guide`"
            )
        # A module's own guidance may reach the learned sigma.
        most = max(fit.in_channels, fit.recipe.get("guidance_channels") or 0)
        if config.guidance_channels > most:
            raise UsageError(
                f"`guidance_channels={config.guidance_channels}`: these latents have {most}"
            )
        return config

    def sized(self, fit: "Fit", space: LatentSpace) -> "Config":
        """Return the options with the size of pictures, by default that of the training
        pictures. fit: decoded by the space's factor. Raises UsageError for a size that patches,
        the decoder or the family do not take.
        """
        size = self.image_size or fit.recipe.get("image_size") or fit.image_size
        size = size or fit.defaults.image_size
        _require_unit(size, space.factor, fit.patch_size)
        if fit.image_size not in (None, size) and not fit.family.any_size:
            raise UsageError(
                f"`image_size={size}`: a {fit.family.name} samples the size that it was trained "
                f"for alone; use {fit.image_size}"
            )
        space.require_side(size // space.factor)
        return replace(self, image_size=size)

    def steps_and_guidance(self) -> str:
        """Describe steps and guidance in words. The options are filled."""
        sampler = "" if self.sampler == "ddpm" else f"{self.sampler.upper()} "
        shift = "" if self.timestep_shift == 1 else f", shift {self.timestep_shift:g}"
        low, high = self.guidance_interval
        interval = "" if (low, high) == (0, 1) else f" at levels {low:g} to {high:g}"
        channels = ""
        if self.guidance_channels != CHANNELS and self.cfg_scale != 1:
            channels = f" on {self.guidance_channels} channels"
        guidance = f"cfg {self.cfg_scale:g}"
        if self.guide is not None:
            guidance = f"autoguidance {self.cfg_scale:g} by {Path(self.guide).name}" + (
                "" if self.cfg_scale > 1 else " (not used: give a --cfg-scale above 1)"
            )
        return f"{self.num_sampling_steps} {sampler}steps{shift} · {guidance}{interval}{channels}"


class Job(Options):
    """Base class of Grid and FidJob: a Config and the options of a job."""

    config: Config

    @classmethod
    def of(cls, model: str | None = None, /, **options: Any) -> "Self":
        """Return the job with these options, of its own and of its Config."""
        if model is not None:
            options["model"] = model
        shared = {item.name for item in fields(Config)}
        config = Config(**{name: value for name, value in options.items() if name in shared})
        config = config.with_file(options.get("output_type") != "latent")
        of_job = {name: value for name, value in options.items() if name not in shared}
        return cls(config=config, **of_job)

    def check(self) -> None:
        """Raise UsageError for options that contradict each other, as far as that is known
        without weights.
        """
        self.config.check()

    @property
    def pictures(self) -> str:
        """Return the number of pictures in words. The job is filled."""
        raise NotImplementedError

    def describe(self, machine: list[str], ranks: int = 1) -> str:
        """Return the line that announces the job, which is filled. machine: the arithmetic and
        where it runs, in words. ranks: their number.
        """
        config = self.config
        size = f"{config.image_size} px"
        words = [config.model, size, self.pictures, config.steps_and_guidance(), *machine]
        if ranks > 1:
            words.append(f"{ranks} ranks")
        return " · ".join(words)


@dataclass(frozen=True)
class Grid(Job):
    """Pictures of chosen classes, in one file or a folder, by one process or many."""

    config: Config = Config()
    labels: tuple | None = sampled(
        'class of each picture, by number or name ("golden retriever"); default: eight '
        "ImageNet classes, or the first eight of a model with other classes",
        nargs="+",
        metavar="LABEL",
    )
    class_names: tuple | None = files(
        "file with the names of all classes, for --labels and file names: one name per line in "
        "class order, or JSON; default: the names in --ckpt, else ImageNet's",
        metavar="FILE",
        action="store",
        convert=read_class_names,
    )
    seed_list: tuple | None = sampled(
        "in place of --seed: a grid or folder for each of these seeds, OUTPUT-seed-0.png or "
        "OUTPUT/seed-0/",
        names=("--seeds",),
        nargs="+",
        type=int,
        bounds=SEEDS,
        metavar="SEED",
    )
    batch_size: int | None = speed(
        "pictures to sample at a time, for a GPU with too little memory for all; the pictures "
        "stay the same except for rounding; default: all of --labels",
        bounds=(1, 10**9),
    )
    parallel: str = speed(
        "how GPUs share a picture if there are fewer pictures than GPUs. auto: first the batch "
        "rows of guidance, then tokens over NVLink; off: one GPU per picture; or a layout, "
        "rows=2,tokens=2: numbers of GPUs for batch rows and tokens",
        default="auto",
        metavar="auto|off|rows=N,tokens=N",
        ranks_only=True,
    )
    output: str | None = files(
        "file to write, its folders are made; a folder (FOLDER/) gets one PNG per picture, such as "
        "000-207-golden-retriever.png; default: sample.png, or sample.npy for latents",
    )
    output_type: str = files(
        "image: one PNG, four pictures per row; latent: float32 .npy (n, C, L, L), no decoder "
        "needed",
        default="image",
        choices=("image", "latent"),
    )

    def check(self) -> None:
        super().check()
        seeds = self.seed_list or ()
        if seeds and self.config.seed != 0:
            raise UsageError(f"`seed_list`: conflicts with `seed={self.config.seed}`; give one")
        if len(set(seeds)) < len(seeds):
            raise UsageError(
                "`seed_list`: names a seed twice, and each has a file of its own; name it once"
            )
        suffix = SUFFIX[self.output_type]
        output = self.output or f"sample{suffix}"
        if not (is_folder(output, self.output_type) or output.lower().endswith(suffix)):
            folder = ", or name a folder (FOLDER/)" if self.output_type == "image" else ""
            raise UsageError(
                f"`output={shown(output)}`: must end in {suffix} for "
                f"`output_type={self.output_type}`{folder}"
            )
        if self.config.ckpt is None:
            defaults = self.config.defaults
            classes = self.config.num_classes or defaults.num_classes
            names = self._names_of(classes, defaults.class_names)
            for label in self.labels or ():
                find_label(label, names, classes)

    def _names_of(self, num_classes, *others):
        """Return the names of all classes: those given, else the first of `others` for so
        many classes, else ImageNet's; () if there are none.
        """
        if self.class_names and len(self.class_names) != num_classes:
            raise UsageError(
                f"`class_names`: are {len(self.class_names)} names for {num_classes} classes; give "
                "one for each"
            )
        usual = imagenet() if num_classes == 1000 else ()
        for names in (self.class_names or (), *others, usual):
            if len(names) == num_classes:
                return names
        return ()

    def filled(self, config: Config, fit: "Fit", has_null_label: bool = True) -> "Grid":
        """Return the grid with `config`, which is filled: its labels are numbers, and
        class_names are of every class, or () where they are unknown. has_null_label: whether
        the null label can be sampled, if the weights have a null class.
        """
        classes = fit.num_classes
        names = self._names_of(classes, fit.class_names, fit.defaults.class_names)
        labels = self.labels
        if labels is None:
            labels = LABELS if classes == 1000 else range(min(classes, 8))
        numbers = tuple(find_label(label, names, classes) for label in labels)
        if classes in numbers and not (fit.null_class and has_null_label):
            raise UsageError(
                f"`labels={NULL}`: these weights or their guide were trained without a null "
                "label; give classes"
            )
        grid = replace(self, config=config, labels=numbers, class_names=names)
        if config.guide is None and fit.null_class:
            return grid
        if grid.layout not in (None, OFF):
            raise UsageError(
                f"`parallel={self.parallel}`: ranks share evaluations with guidance by the null "
                "class alone, without a `guide`; use off"
            )
        return replace(grid, parallel="off")

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each grid."""
        return (self.config.seed,) if self.seed_list is None else self.seed_list

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the file or folder of each grid."""
        output = self.output or f"sample{SUFFIX[self.output_type]}"
        if self.seed_list is None:
            return (output,)
        return tuple(of_seed(output, self.output_type, seed) for seed in self.seed_list)

    def require_outputs(self) -> None:
        """Make the folders of all outputs and prove that files can be written there. Raises
        UsageError.
        """
        for path in self.outputs:
            check_writable(Path(path, "000.png") if is_folder(path, self.output_type) else path)

    @property
    def layout(self) -> Layout | None:
        """Return the layout that `parallel` names; None for auto."""
        if self.parallel == "auto":
            return None
        if self.parallel == "off":
            return OFF
        from accel.ranks import layouts

        return layouts.parse(self.parallel)

    @property
    def count(self) -> int:
        """Return the number of pictures of a seed. The grid is filled."""
        return len(self.labels)

    @property
    def pictures(self) -> str:
        """Return the number of pictures in words. The grid is filled."""
        seeds = f" × {len(self.seeds)} seeds" if self.seed_list else ""
        return f"{self.count} label{'s' * (self.count > 1)}{seeds}"

    @property
    def too_large(self) -> str:
        """Return the error for a batch that does not fit in memory: the parameter that asks
        for it, and the remedy.
        """
        at_once = self.batch_size or self.count
        return (
            f"`batch_size={at_once}`: does not fit in free GPU memory; use a smaller one, or a "
            f"smaller `image_size` than {self.config.image_size}"
        )


@dataclass(frozen=True)
class FidJob(Job):
    """A folder of many pictures of random classes, by many processes."""

    config: Config = Config()
    num_fid_samples: int | None = sampled(
        "number of pictures of random classes, one PNG each, and an .npz for FID; default: one "
        "grid of --labels",
        bounds=(1, 10**9),
    )
    world_independent_noise: bool = sampled(
        "FID: key noise and labels by picture, so that any number of ranks makes the same "
        "pictures; default: the usual stream, one seed per rank",
        default=False,
        action="store_true",
    )
    balanced_labels: bool = sampled(
        "FID: as many pictures of each class, in the family's order: usually picture i of class "
        "i mod --num-classes; default: random classes",
        default=False,
        action="store_true",
    )
    per_proc_batch_size: int = speed(
        "FID: pictures that a rank makes at a time", default=32, bounds=(1, 10**5)
    )
    sample_dir: str = files("FID: where the folder is made", default="samples")

    def filled(self, config: Config, fit: "Fit") -> "FidJob":
        """Return the job with `config`, which is filled."""
        return replace(self, config=config)

    @property
    def pictures(self) -> str:
        """Return the number of pictures in words."""
        return f"{self.num_fid_samples} picture{'s' * (self.num_fid_samples > 1)}"

    @property
    def too_large(self) -> str:
        """Return the error for a batch that does not fit in memory: the parameter that asks
        for it, and the remedy.
        """
        return (
            f"`per_proc_batch_size={self.per_proc_batch_size}`: does not fit in free GPU memory; "
            "use a smaller one"
        )


def _require_unit(size, factor, patch_size):
    """Raise UsageError for a picture's side that latents or patches do not divide."""
    unit = factor * patch_size
    if size % unit:
        raise UsageError(
            f"`image_size={size}`: must be a multiple of {unit} (VAE factor {factor}, "
            f"patch {patch_size})"
        )
