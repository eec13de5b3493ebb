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
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import UsageError, shown
from accel.families import Defaults, Family, family_of, model_names, sampler_names
from accel.flags import checked, flag
from accel.labels import NULL, find_label, imagenet, read_class_names
from accel.latents import LatentSpace
from accel.output import SUFFIX, is_folder, of_seed, require_writable
from accel.ranks.placement import EXCHANGES, OFF, Layout

if TYPE_CHECKING:  # the second brings torch
    from typing_extensions import Self

    from accel.families.recognise import Fit

DEFAULT_MODEL = "DiT-XL/2"
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
# least and most steps, where a sampler has limits of its own: of 1000 diffusers rounds two
# to one time
STEPS = {"sde": (2, 1000), "dpm++": (1, 999), "unipc": (1, 999)}

CHANNELS = 3  # guided of four, as for the published pictures
# options that name files: a value that is open stays open, since the weights are open
FILES = {"ckpt", "config", "weights_entry", "guide", "latent_stats", "num_heads"}
FILES |= {"device", "precision", "tf32"}

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
        action="store",
        metavar="NAME",
    )
    image_size: int | None = sampled(
        "side of a picture in pixels, a multiple of 16 (patch 4: of 32, patch 8: of 64); pictures "
        "look worse at sizes other than the trained one; default: that of --ckpt, else 512",
        bounds=(1, MOST_PIXELS),
    )
    cfg_scale: float | None = sampled(
        "strength of classifier-free guidance: 1 is none, 0 the null label's estimate on guided "
        "channels; default: what the model implies, 4.0 unless its recipe says otherwise",
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
    )
    guidance_channels: int | None = sampled(
        "number of latent channels that are guided: the first 3, as published, or all 4, as "
        "diffusers does; default: what the model implies",
        bounds=(1, 1024),
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
        "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws", default=0.0
    )
    seed: int = sampled(
        "seed of the noise; the same seed, device and number of GPUs give the same pictures; a CPU "
        "uses only the lower 32 bits",
        default=0,
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

    def check(self) -> None:
        """Raise UsageError for options that contradict each other, as far as that is known
        without weights.
        """
        if self.model is not None and family_of(self.model) is None:
            near = difflib.get_close_matches(self.model, model_names(), 1)
            meant = f"did you mean {near[0]}? All are" if near else "choose from"
            raise UsageError(
                f"`model={shown(self.model)}`: unknown; {meant} {', '.join(model_names())}"
            )
        if self.precision not in (None, self.tier):
            raise UsageError(
                f"`tf32={self.tf32}`: conflicts with `precision={self.precision}`; give one"
            )
        self.check_values()
        model = self.named_model
        if model is None:
            return
        family = family_of(model)
        sampler = self.sampler
        if sampler is None and self.ckpt is None:
            sampler = family.samplers[0]
        _require_family(self, model, family, sampler)
        if self.image_size is not None and self.vae in (None, self.defaults.vae):
            require_unit(self.image_size, self.defaults.factor, patch_of(model))

    def check_values(self) -> None:
        """Raise UsageError for a seed, guidance interval or eta that no model accepts."""
        require_seed(self.seed)
        _require_interval(self.guidance_interval)
        if not 0 <= self.eta <= 1 or self.eta and self.sampler != "ddim":
            raise UsageError(f"`eta={self.eta:g}`: must be from 0 to 1, and is for `sampler=ddim`")

    def require_family(self, fit: "Fit") -> None:
        """Raise UsageError for a sampler, options of one, or a decoder that the weights'
        family does not have.
        """
        sampler = self.sampler or fit.recipe.get("sampler")
        _require_family(self, fit.model, fit.family, sampler)

    def filled(self, fit: "Fit", space: LatentSpace) -> "Config":
        """Return the options with every open one filled: by the weights, else by their model
        or family. fit: family and sizes of the weights; space: of their latents. Raises
        UsageError for options that contradict the weights.
        """
        family = fit.family
        defaults = family.models.get(fit.model, family.recipe)
        implied = {**defaults._asdict(), "sampler": family.samplers[0]}
        # All that there are, of latents with fewer channels than the model guides.
        implied["guidance_channels"] = min(defaults.guidance_channels, fit.in_channels)
        if fit.image_size is not None:
            implied["image_size"] = fit.image_size
        if self.image_size is None and implied["image_size"] > MOST_PIXELS:
            raise UsageError(
                f"`image_size={fit.image_size}`: by these weights, and at most {MOST_PIXELS}; give "
                "another `image_size`"
            )
        implied |= {name: value for name, value in fit.recipe.items() if value is not None}
        values = {
            item.name: implied.get(item.name)
            for item in fields(self)
            if getattr(self, item.name) is None and item.name not in FILES
        }
        values["model"] = fit.model
        values["num_classes"] = fit.num_classes
        return replace(self, **values).consistent(fit, space)

    def consistent(self, fit: "Fit", space: LatentSpace) -> "Config":
        """Return these options, all filled. Raises UsageError if they contradict the
        weights.
        """
        require_unit(self.image_size, space.factor, fit.patch_size)
        trained = fit.image_size
        if trained not in (None, self.image_size) and not fit.family.any_size:
            raise UsageError(
                f"`image_size={self.image_size}`: a {fit.family.name} samples the size that it was "
                f"trained for alone; use {trained}"
            )
        _require_family(self, self.model, fit.family, self.sampler)
        if not fit.null_class and self.guide is None and self.cfg_scale != 1:
            rows = self.num_classes
            remedy = "use `cfg_scale=1`"
            if rows > 1:
                remedy += f", or `num_classes={rows - 1}` if the last row is the null class"
            raise UsageError(
                f"`cfg_scale={self.cfg_scale:g}`: guidance needs a null class, and these weights "
                f"were trained without (label table of {rows} rows); {remedy}, or give a `guide`"
            )
        # A module's own guidance may reach the learned sigma.
        most = max(fit.in_channels, fit.recipe.get("guidance_channels") or 0)
        if self.guidance_channels > most:
            raise UsageError(
                f"`guidance_channels={self.guidance_channels}`: these latents have {most}"
            )
        return self

    @property
    def named_decoder(self) -> str | None:
        """Return the decoder that is named, or the named model's where no weights are given."""
        if self.vae is None and self.ckpt is None:
            return self.defaults.vae
        return self.vae

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
        metavar="SEED",
    )
    batch_size: int | None = speed(
        "pictures to sample at a time, for a GPU with too little memory for all; the pictures "
        "stay the same except for rounding; default: all of --labels",
        bounds=(1, 10**9),
    )
    repeats: int = speed(
        "time the sampling this often after a warm-up: median and spread",
        default=1,
        bounds=(1, 10**9),
    )
    parallel: str = speed(
        "how GPUs share a picture if there are fewer pictures than GPUs. auto: first the batch "
        "rows of guidance, then tokens over NVLink; off: one GPU per picture; or a layout, "
        "rows=2,tokens=2,exchange=push: numbers of GPUs for batch rows and tokens, and how tokens "
        f"attend ({', '.join(EXCHANGES)})",
        default="auto",
        metavar="auto|off|rows=N,tokens=N,exchange=NAME",
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
        for seed in seeds:
            require_seed(seed)
        self._require_suffix()
        if self.config.ckpt is None:
            self._require_labels()
        self._require_layout(self.config)

    def _require_layout(self, config, null_class=True):
        """Raise UsageError for a layout by which ranks cannot share these evaluations."""
        if self.layout in (None, OFF):
            return
        if config.guide is not None:
            raise UsageError(
                f"`parallel={self.parallel}`: two networks are not divided, and there is a "
                "`guide`; use off"
            )
        if not null_class:
            raise UsageError(
                f"`parallel={self.parallel}`: shares evaluations with guidance only; use off"
            )

    def _require_suffix(self):
        suffix = SUFFIX[self.output_type]
        if self.output is None or Path(self.output).suffix.lower() == suffix:
            return
        if is_folder(self.output, self.output_type):
            return
        folder = ", or name a folder (FOLDER/)" if self.output_type == "image" else ""
        raise UsageError(
            f"`output={shown(self.output)}`: must end in {suffix} for "
            f"`output_type={self.output_type}`{folder}"
        )

    def _require_labels(self):
        """Raise UsageError for a label that the named model does not know."""
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

    def filled(self, config: Config, fit: "Fit", has_null_label: bool | None = None) -> "Grid":
        """Return the grid with `config`, which is filled: its labels are numbers, and
        class_names are of every class, or () where they are unknown. has_null_label: whether
        the null label can be sampled; default: where the weights have a null class.
        """
        classes = fit.num_classes
        defaults = fit.family.models.get(fit.model, fit.family.recipe)
        names = self._names_of(classes, fit.class_names, defaults.class_names)
        labels = self.labels
        if labels is None:
            labels = LABELS if classes == 1000 else range(min(classes, 8))
        numbers = tuple(find_label(label, names, classes) for label in labels)
        if has_null_label is None:
            has_null_label = fit.null_class
        if not has_null_label and classes in numbers:
            whose = "these weights were" if not fit.null_class else "the guide was"
            raise UsageError(f"`labels={NULL}`: {whose} trained without a null label; give classes")
        self._require_layout(config, fit.null_class)
        shares = config.guide is None and fit.null_class
        parallel = self.parallel if shares else "off"
        return replace(self, config=config, labels=numbers, class_names=names, parallel=parallel)

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
        """Raise UsageError unless every output can be written."""
        for path in self.outputs:
            require_writable(path, self.output_type)

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
        n = self.count
        size = self.config.image_size
        if 1 in (n, self.batch_size):
            return (
                f"`image_size={size}`: a picture does not fit in free GPU memory; use a smaller one"
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


def require_seed(seed: int) -> None:
    """Raise UsageError for a seed that torch's generators do not take."""
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"`seed={shown(str(seed))}`: must fit in 64 bits")


def patch_of(model: str) -> int:
    """Return the patch size that a model's name ends with."""
    return int(model.rpartition("/")[2])


def require_unit(size: int, factor: int, patch_size: int) -> None:
    """Raise UsageError for a picture's side that latents or patches do not divide."""
    unit = factor * patch_size
    if size % unit:
        raise UsageError(
            f"`image_size={size}`: must be a multiple of {unit} (VAE factor {factor}, patch "
            f"{patch_size})"
        )


def _require_interval(levels):
    if levels is None or (len(levels) == 2 and 0 <= levels[0] < levels[1] <= 1):
        return
    given = " ".join(f"{level:g}" for level in levels)
    raise UsageError(
        f"`guidance_interval={given}`: must be two numbers from 0 to 1, the lower first"
    )


def _require_family(config, model: str, family: Family, sampler: str | None):
    """Raise UsageError for a sampler, a shift, a number of steps or a decoder that the model's
    family does not have.
    """
    defaults = family.models.get(model, family.recipe)
    for name, usual in (("vae", defaults.vae), ("latent_stats", None)):
        if defaults.factor == 1 and getattr(config, name) not in (None, usual):
            raise UsageError(
                f"`{name}={getattr(config, name)}`: {model} samples pixels, without a decoder; "
                "drop it"
            )
    if sampler not in (None, *family.samplers):
        raise UsageError(
            f"`sampler={sampler}`: is not for a {family.name}, which {model} is; use "
            f"{', '.join(family.samplers)}"
        )
    shifted = config.timestep_shift not in (None, 1)
    if shifted and (family.prediction == "noise" or sampler == "sde"):
        raise UsageError(
            f"`timestep_shift={config.timestep_shift:g}`: is for euler and heun of a flow; drop it"
        )
    for name in ("noise_scale", "t_eps"):
        value = getattr(config, name)
        if family.prediction != "data" and value not in (None, getattr(Defaults(), name)):
            raise UsageError(
                f"`{name}={value:g}`: is for networks that estimate the clean picture; drop it"
            )
    least, most = STEPS.get(sampler, (1, 1000))
    steps = config.num_sampling_steps
    if steps is not None and not least <= steps <= most:
        raise UsageError(
            f"`num_sampling_steps={steps}`: must be from {least} to {most} for `sampler={sampler}`"
        )
