"""The options of a run: one table, and the values that a user gave.

The fields of `Settings` are the table: type, bounds, choices, default, flag and help of each
option. `Options` are the values that a user gave, checked. accel/run chooses the other values.
Imports no torch.
"""

import argparse
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args

from accel.errors import UsageError, shown
from accel.families import model_names, sampler_names
from accel.io.labels import read_class_names

GRID = "grid"  # pictures of chosen classes
FID = "fid"  # a folder of many pictures of random classes

# Type → the function that converts values of other types, and the type in messages.
CONVERSIONS: dict[Callable[[Any], Any], tuple[Callable[[Any], Any], str]] = {
    bool: (bool, "True or False"),
    int: (operator.index, "a whole number"),
    float: (float, "a number"),
    str: (os.fspath, "text or a path"),
}


@dataclass(frozen=True)
class Option:
    """A row of the option table: an option of commands and of Python's calls.

    type: of one value. default: None or () for an option without one. several: argparse's nargs; 2
    is an interval. convert: checks and converts values of other types. flags, rank_flags: where
    they are not the option's name; rank_flags: of commands of many ranks. ranks_only: other
    commands lack it. jobs: kinds of job that have it.
    """

    name: str
    type: Callable[[Any], Any]
    group: str
    help: str
    default: Any = None
    bounds: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    several: str | int | None = None
    convert: Callable[[Any], Any] | None = None
    action: Any = None
    metavar: str | tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    rank_flags: tuple[str, ...] = ()
    ranks_only: bool = False
    jobs: tuple[str, ...] = (GRID, FID)

    def flag_names(self, ranks: bool = False) -> tuple[str, ...]:
        """Return the flags, the main one first; () for none. ranks: in a command of many ranks."""
        if self.ranks_only and not ranks:
            return ()
        names = self.flags or ("--" + self.name.replace("_", "-"),)
        return (ranks and self.rank_flags) or names

    def checked(self, value: Any) -> Any:
        """Return a value in the option's type. Raises UsageError if it is not among the choices or
        within the bounds.
        """
        if self.convert is not None:
            return self.convert(value)
        if self.several is None:
            return self._checked(value)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise UsageError("must be several", "give a list", parameter=self.name, value=value)
        values = tuple(map(self._checked, value))
        if not values:
            raise UsageError("give at least one", parameter=self.name)
        if self.several == 2 and (len(values) != 2 or values[0] >= values[1]):
            text = " ".join(map(str, values))
            raise UsageError("must be two, the lower first", parameter=self.name, value=text)
        return values

    def _checked(self, value):
        if self.choices and value not in self.choices:
            problem = f"choose from {', '.join(self.choices)}"
            raise UsageError(problem, parameter=self.name, value=shown(value))
        convert, wanted = CONVERSIONS.get(self.type, (self.type, "a whole number or a name"))
        try:
            if isinstance(value, bool) and self.type is not bool:
                raise TypeError
            value = convert(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"must be {wanted}", parameter=self.name, value=shown(repr(value))
            ) from None
        if value == "":
            raise UsageError("is empty", "give a value, or leave it out", parameter=self.name)
        if self.bounds and not self.bounds[0] <= value <= self.bounds[1]:
            problem = f"must be from {self.bounds[0]} to {self.bounds[1]}"
            raise UsageError(problem, parameter=self.name, value=value)
        return value


def label(value: int | str) -> int | str:
    """Return a class's number, or its name."""
    return value if isinstance(value, str) else operator.index(value)


def option(group: str, help: str, *, default: Any = MISSING, **row: Any) -> Any:
    """Return a field of Settings with its row of the option table. Without a default the field is
    required: the weights, their model or its family have a value.
    """
    row |= dict(group=group, help=help, default=None if default is MISSING else default)
    return field(default=default, metadata=row)


USER = "options"  # origins of values, next to the names of files
JOB = "job"
MODEL = "model"
FAMILY = "family"
DEFAULT = "default"
SAMPLED = "what to sample"  # groups of --help
SPEED = "speed"
FILES = "files"
ADVANCED = "advanced"
# Options of sample.py that programs which write files of their own lack.
FILES_AND_LOGS = "output", "output_type", "seed_list", "like", "quiet", "json"
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
SEEDS = -(2**63), 2**64 - 1  # that torch's generators take


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of a run, one field per option, with the option table as their metadata.

    A field without a default is chosen by the weights, their model or its family. origins: where
    each value comes from, by option.
    """

    origins: Mapping[str, str]
    model: str = option(
        SAMPLED,
        f"network: {', '.join(model_names())}; Demo models ship with their weights and run "
        "anywhere; default: that of --ckpt, else DiT-XL/2",
        metavar="NAME",
    )
    image_size: int = option(
        SAMPLED,
        "side of a picture in pixels, a multiple of 16 (patch 4: of 32, patch 8: of 64); pictures "
        "look worse at sizes other than the trained one; default: that of --ckpt, else 512, in an "
        "FID job 256",
        bounds=(1, MOST_PIXELS),
    )
    cfg_scale: float = option(
        SAMPLED,
        "strength of classifier-free guidance: 1 is none, 0 the null label's estimate on guided "
        "channels, between them a mixture; default: that of the model's recipe, else 4.0; in an "
        "FID job that of the family's own program, such as 1.5",
        bounds=(0, 10**6),
    )
    num_sampling_steps: int = option(
        SAMPLED,
        "denoising steps, up to 1000; default: the model's, 250",
        bounds=(1, 1000),
    )
    timestep_shift: float = option(
        SAMPLED,
        "euler, heun: below 1 the steps are shorter at noise than at the picture; default: that "
        "of the model's recipe, else 1",
        bounds=(0.01, 100),
    )
    guidance_interval: tuple[float, float] = option(
        SAMPLED,
        "noise levels, from 0 at the picture to 1 at noise, at which guidance acts; at other "
        "levels the network is evaluated on half the batch rows; default: that of the model's "
        "recipe, else 0 1",
        bounds=(0, 1),
        several=2,
        metavar=("LOW", "HIGH"),
    )
    guidance_channels: int = option(
        SAMPLED,
        "number of latent channels that are guided: the first 3, as published, or all 4, as "
        "diffusers does; default: that of the model",
        bounds=(1, 8192),
    )
    noise_scale: float = option(
        SAMPLED,
        "networks that estimate the clean picture: scale of the first noise; default: that of "
        "--ckpt, else that of the model",
        bounds=(0.001, 1000),
    )
    t_eps: float = option(
        SAMPLED,
        "networks that estimate the clean picture: the least 1 − t that an estimate is divided by; "
        "default: that of --ckpt, else 0.05",
        bounds=(0.000001, 1),
    )
    sampler: str = option(
        SAMPLED,
        "networks that predict noise: ddpm (default), ancestral sampling; ddim, deterministic "
        "unless --eta is given, for few steps such as 25; dpm++, unipc, diffusers' "
        "solvers, for 10 to 25 steps. Flows: sde (default where the network has it); euler, "
        "heun, deterministic, for fewer steps. Each gives different pictures",
        choices=sampler_names(),
    )
    eta: float = option(
        SAMPLED,
        "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws",
        default=0.0,
        bounds=(0, 1),
    )
    seed: int = option(
        SAMPLED,
        "seed of the noise; the same seed, device and number of GPUs give the same pictures; a CPU "
        "uses only the lower 32 bits",
        default=0,
        bounds=SEEDS,
        rank_flags=("--global-seed", "--seed"),
    )
    num_classes: int = option(
        SAMPLED,
        "classes that the weights were trained with; default: those of --ckpt, else 1000",
        bounds=(1, 10**6),
    )
    precision: str = option(
        SPEED,
        "fp16: float16 GEMMs with all else in float32, the fast one; bf16: for weights that "
        "overflow float16; tf32: float32 with TF32 GEMMs, as DiT ships; fp32: true float32; "
        "fp32-fused: the same with fused kernels; exact: fp32's pictures from float16 tensor "
        "cores; default: fp16 on a GPU with tensor cores (bf16 if the weights overflow it), else "
        "fp32",
        choices=("fp32", "fp32-fused", "exact", "tf32", "fp16", "bf16"),
    )
    tf32: bool | None = option(
        SPEED,
        "--tf32 is --precision tf32 where the hardware has it, else fp32; --no-tf32 is "
        "--precision fp32",
        action=argparse.BooleanOptionalAction,
        ranks_only=True,
        default=None,
    )
    vae_precision: str = option(
        SPEED,
        "the decoder's arithmetic. fp16: a fraction of the time and memory, used if a check of "
        "its weights passes; tf32: float32 with TF32 convolutions; fp32: true float32; auto: "
        "fp16 for fp16 and bf16, else as --precision",
        default="auto",
        choices=("auto", "fp32", "tf32", "fp16"),
    )
    ckpt: str | None = option(
        FILES,
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt), a folder "
        "in diffusers' layout or with consolidated weights, or a hub id; default: the published "
        "weights for the image size",
        default=None,
    )
    config: str | None = option(
        FILES,
        "a configuration file of the model's own repository, such as a YAML: its weights, "
        "decoder, guidance and steps; a flag overrides its values",
        metavar="FILE",
        default=None,
    )
    weights_entry: str | None = option(
        FILES,
        "the entry of a training file to sample, such as ema or model; default: ema, else "
        "model_ema1, else model or the first other that is known",
        metavar="NAME",
        default=None,
    )
    guide: str | None = option(
        FILES,
        "autoguidance: weights of a second, smaller or less trained network of the same family, "
        "classes and latents, as --ckpt takes them, in place of the null label; --cfg-scale is its "
        "strength, at 1 or less it is not used",
        metavar="WEIGHTS",
        default=None,
    )
    vae: str = option(
        FILES,
        "decoder: ema, mse (sd-vae-ft-*), a folder, the .pt of VA-VAE or of a ViT decoder, or a "
        "hub id; pixels: none; default: the model's",
    )
    num_heads: int | None = option(
        FILES,
        "attention heads, where the file of the weights lacks their number; default: those of the "
        "model of this size",
        bounds=(1, 1024),
        default=None,
    )
    latent_stats: str | None = option(
        FILES,
        ".pt file with mean and std of each latent channel, or a ViT decoder's mean and var: "
        "latents × std + mean are decoded; default: the latents_stats.pt or stat.pt in the folder "
        "of --vae",
        default=None,
    )
    device: str | None = option(
        ADVANCED,
        "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one",
        default=None,
    )
    quiet: bool = option(
        ADVANCED,
        "print warnings only, without progress",
        default=False,
        action="store_true",
    )
    json: bool = option(
        ADVANCED,
        "the last line of standard output is one JSON object: files, seconds of each phase, and "
        "every setting with its origin",
        default=False,
        action="store_true",
    )
    labels: tuple[int, ...] = option(
        SAMPLED,
        'class of each picture, by number or name ("golden retriever"); default: eight '
        "ImageNet classes, or the first eight of a model with other classes",
        type=label,
        several="+",
        metavar="LABEL",
        jobs=(GRID,),
        default=(),
    )
    class_names: tuple[str, ...] = option(
        FILES,
        "file with the names of all classes, for --labels and file names: one name per line in "
        "class order, or JSON; default: the names in --ckpt, else ImageNet's",
        metavar="FILE",
        convert=read_class_names,
        jobs=(GRID,),
        default=(),
    )
    seed_list: tuple[int, ...] = option(
        SAMPLED,
        "in place of --seed: a grid or folder for each of these seeds, OUTPUT-seed-0.png or "
        "OUTPUT/seed-0/",
        bounds=SEEDS,
        several="+",
        metavar="SEED",
        flags=("--seeds",),
        jobs=(GRID,),
        default=(),
    )
    like: str | None = option(
        SAMPLED,
        "repeat a picture that this program wrote, by the settings in its file; flags override "
        "them. Its weights come by --ckpt unless they are published, and must have the same digest",
        metavar="PICTURE",
        default=None,
        jobs=(GRID,),
    )
    grids: int = option(
        SAMPLED,
        "grids of one random stream, of which each continues where the one before ended: "
        "OUTPUT_0.png, OUTPUT_1.png or OUTPUT/grid-0/",
        default=1,
        bounds=(1, 1000),
        jobs=(GRID,),
    )
    batch_size: int | None = option(
        SPEED,
        "pictures to sample at a time, for a GPU with too little memory for all; the pictures "
        "stay the same except for rounding; default: all of --labels",
        bounds=(1, 10**9),
        jobs=(GRID,),
        default=None,
    )
    parallel: str = option(
        SPEED,
        "how GPUs share a picture if there are fewer pictures than GPUs. auto: first the batch "
        "rows of guidance, then tokens over NVLink; off: one rank per picture; or a layout, "
        "rows=2,tokens=2: numbers of GPUs for batch rows and tokens",
        default="auto",
        metavar="auto|off|rows=N,tokens=N",
        ranks_only=True,
        jobs=(GRID,),
    )
    output: str | None = option(
        FILES,
        "file to write, its folders are made; a folder (FOLDER/) gets one PNG per picture, such as "
        "000-207-golden-retriever.png; default: sample.png, or sample.npy for latents",
        jobs=(GRID,),
        default=None,
    )
    output_type: str = option(
        FILES,
        "image: one PNG, four pictures per row; latent: float32 .npy (n, C, L, L), no decoder "
        "needed",
        default="image",
        choices=("image", "latent"),
        jobs=(GRID,),
    )
    num_fid_samples: int | None = option(
        SAMPLED,
        "number of pictures of random classes, one PNG each, and an .npz for FID; default: one "
        "grid of --labels",
        bounds=(1, 10**9),
        jobs=(FID,),
        default=None,
    )
    world_independent_noise: bool = option(
        SAMPLED,
        "FID: key noise and labels by picture, so that any number of ranks makes the same "
        "pictures; default: upstream's stream, one seed per rank",
        default=False,
        action="store_true",
        jobs=(FID,),
    )
    balanced_labels: bool = option(
        SAMPLED,
        "FID: as many pictures of each class, in the family's order: for most families picture i "
        "has class i mod --num-classes; default: random classes",
        default=False,
        action="store_true",
        jobs=(FID,),
    )
    per_proc_batch_size: int = option(
        SPEED,
        "FID: pictures that a rank makes at a time",
        default=32,
        bounds=(1, 10**5),
        jobs=(FID,),
    )
    sample_dir: str = option(
        FILES,
        "FID: where the folder is made",
        default="samples",
        jobs=(FID,),
    )

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Return value and origin of each option of the job that has a value, as JSON data. Class
        names are left out.
        """
        job = GRID if self.num_fid_samples is None else FID
        names = [name for name, option in OPTIONS.items() if job in option.jobs]
        return {
            name: {"value": getattr(self, name), "origin": self.origins.get(name, DEFAULT)}
            for name in names
            if getattr(self, name) not in (None, ()) and name != "class_names"
        }


def _option_of(each: Field) -> Option:
    """Return the row of the option table in a field of Settings."""
    scalar = next(iter(get_args(each.type)), each.type)  # int | None, tuple[int, ...] → int
    return Option(each.name, **{"type": scalar, **each.metadata})


OPTIONS: Mapping[str, Option] = {
    each.name: _option_of(each) for each in fields(Settings) if each.metadata
}
DEFAULTS: Mapping[str, Any] = {
    name: option.default for name, option in OPTIONS.items() if option.default not in (None, ())
}


class Options(dict[str, Any]):
    """The values that a user gave, by option, checked. None leaves an option out.

    Raises UsageError for a value that an option does not take, and KeyError for an unknown option.
    """

    def __init__(self, **values: Any):
        given = {name: value for name, value in values.items() if value is not None}
        super().__init__({name: OPTIONS[name].checked(value) for name, value in given.items()})

    @property
    def job(self) -> str:
        """Return the kind of job: FID if a number of pictures is given, else GRID."""
        return FID if "num_fid_samples" in self else GRID

    def changed(self, **values: Any) -> "Options":
        """Return the options with other values; None leaves an option as it is."""
        return Options(**{**self, **Options(**values)})
