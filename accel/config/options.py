"""The options of a run: one table, and the values that a user gave.

OPTIONS has each option once: type, bounds, choices, default, flag and help. Options are the values
that a user gave, checked; what is not given is not there. accel/run/resolve.py chooses the others.
Imports no torch.
"""

import argparse
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    """An option of commands and of Python's calls.

    default: None where it follows from a configuration file, the weights, their model or its
    family. several: argparse's nargs. convert: checks and converts values of other types. flags,
    rank_flags: where they are not the option's name; rank_flags: of commands of many ranks.
    ranks_only: other commands lack it. jobs: kinds of job that have it.
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
        usual = self.flags or ("--" + self.name.replace("_", "-"),)
        return (ranks and self.rank_flags) or usual

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


def noise_levels(values: Any) -> tuple[float, float]:
    """Return an interval of noise levels. Raises UsageError."""
    try:
        levels = tuple(map(float, values))
    except (TypeError, ValueError):
        levels = ()
    if len(levels) != 2 or not 0 <= levels[0] < levels[1] <= 1:
        raise UsageError(
            "must be two numbers from 0 to 1, the lower first",
            parameter="guidance_interval",
            value=" ".join(f"{level:g}" for level in levels) or shown(values),
        )
    return levels


USER = "options"  # the origin of a value that the user gave
SAMPLED = "what to sample"  # groups of --help
SPEED = "speed"
FILES = "files"
ADVANCED = "advanced"
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
SEEDS = -(2**63), 2**64 - 1  # that torch's generators take

_TABLE = (
    Option(
        "model",
        str,
        SAMPLED,
        f"network: {', '.join(model_names())}; Demo models ship with their weights and run "
        "anywhere; default: that of --ckpt, else DiT-XL/2",
        metavar="NAME",
    ),
    Option(
        "image_size",
        int,
        SAMPLED,
        "side of a picture in pixels, a multiple of 16 (patch 4: of 32, patch 8: of 64); pictures "
        "look worse at sizes other than the trained one; default: that of --ckpt, else 512, in an "
        "FID job 256",
        bounds=(1, MOST_PIXELS),
    ),
    Option(
        "cfg_scale",
        float,
        SAMPLED,
        "strength of classifier-free guidance: 1 is none, 0 the null label's estimate on guided "
        "channels, between them a mixture; default: what the model implies, 4.0 unless its recipe "
        "says otherwise; of an FID job that of the family's own program, such as 1.5",
        bounds=(0, 10**6),
    ),
    Option(
        "num_sampling_steps",
        int,
        SAMPLED,
        "denoising steps, up to 1000; default: the model's, 250",
        bounds=(1, 1000),
    ),
    Option(
        "timestep_shift",
        float,
        SAMPLED,
        "euler, heun: below 1 the steps are shorter at noise than at the picture; default: what "
        "the model implies, 1 unless its recipe says otherwise",
        bounds=(0.01, 100),
    ),
    Option(
        "guidance_interval",
        float,
        SAMPLED,
        "noise levels, from 0 at the picture to 1 at noise, at which guidance acts; at others "
        "the network is evaluated on half the batch rows; default: what the model implies, 0 1 "
        "unless its recipe says otherwise",
        several=2,
        convert=noise_levels,
        metavar=("LOW", "HIGH"),
    ),
    Option(
        "guidance_channels",
        int,
        SAMPLED,
        "number of latent channels that are guided: the first 3, as published, or all 4, as "
        "diffusers does; default: what the model implies",
        bounds=(1, 8192),
    ),
    Option(
        "noise_scale",
        float,
        SAMPLED,
        "networks that estimate the clean picture: scale of the first noise; default: what --ckpt "
        "says, else what the model implies",
        bounds=(0.001, 1000),
    ),
    Option(
        "t_eps",
        float,
        SAMPLED,
        "networks that estimate the clean picture: the least 1 − t that an estimate is divided by; "
        "default: what --ckpt says, else 0.05",
        bounds=(0.000001, 1),
    ),
    Option(
        "sampler",
        str,
        SAMPLED,
        "networks that predict noise: ddpm (default), ancestral sampling; ddim, deterministic "
        "unless --eta says otherwise, for few steps such as 25; dpm++, unipc, diffusers' "
        "solvers, for 10 to 25 steps. Flows: sde (default where the network has it); euler, "
        "heun, deterministic, for fewer steps. Each makes other pictures",
        choices=sampler_names(),
    ),
    Option(
        "eta",
        float,
        SAMPLED,
        "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws",
        default=0.0,
        bounds=(0, 1),
    ),
    Option(
        "seed",
        int,
        SAMPLED,
        "seed of the noise; the same seed, device and number of GPUs give the same pictures; a CPU "
        "uses only the lower 32 bits",
        default=0,
        bounds=SEEDS,
        rank_flags=("--global-seed", "--seed"),
    ),
    Option(
        "num_classes",
        int,
        SAMPLED,
        "classes that the weights were trained with; default: what --ckpt says, else 1000",
        bounds=(1, 10**6),
    ),
    Option(
        "precision",
        str,
        SPEED,
        "fp16: float16 GEMMs with all else in float32, the fast one; bf16: for weights that "
        "overflow float16; tf32: float32 with TF32 GEMMs, as DiT ships; fp32: true float32; "
        "exact: fp32's pictures from float16 tensor cores; default: fp16 on a GPU with tensor "
        "cores (bf16 if the weights overflow it), else fp32",
        choices=("fp32", "exact", "tf32", "fp16", "bf16"),
    ),
    Option(
        "tf32",
        bool,
        SPEED,
        "--tf32 is --precision tf32 where the hardware has it, else fp32; --no-tf32 is "
        "--precision fp32",
        action=argparse.BooleanOptionalAction,
        ranks_only=True,
    ),
    Option(
        "vae_precision",
        str,
        SPEED,
        "the decoder's arithmetic. fp16: a fraction of the time and memory, used if a check of "
        "its weights passes; tf32: float32 with TF32 convolutions; fp32: true float32; auto: "
        "fp16 for fp16 and bf16, else as --precision",
        default="auto",
        choices=("auto", "fp32", "tf32", "fp16"),
    ),
    Option(
        "ckpt",
        str,
        FILES,
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt), a folder "
        "in diffusers' layout or with consolidated weights, or a hub id; default: the published "
        "weights for the image size",
    ),
    Option(
        "config",
        str,
        FILES,
        "a configuration file of the model's own repository, such as a YAML: its weights, "
        "decoder, guidance and steps, where no flag says otherwise",
        metavar="FILE",
    ),
    Option(
        "weights_entry",
        str,
        FILES,
        "the entry of a training file to sample, such as ema or model; default: ema, else "
        "model_ema1, else model or the first other that is known",
        metavar="NAME",
    ),
    Option(
        "guide",
        str,
        FILES,
        "autoguidance: weights of a second, smaller or less trained network of the same family, "
        "classes and latents, as --ckpt takes them, in place of the null label; --cfg-scale is its "
        "strength, at 1 or less it is not used",
        metavar="WEIGHTS",
    ),
    Option(
        "vae",
        str,
        FILES,
        "decoder: ema, mse (sd-vae-ft-*), a folder, the .pt of VA-VAE or of a ViT decoder, or a "
        "hub id; pixels: none; default: the model's",
    ),
    Option(
        "num_heads",
        int,
        FILES,
        "attention heads of weights whose file does not say their number; default: those of the "
        "model of this size",
        bounds=(1, 1024),
    ),
    Option(
        "latent_stats",
        str,
        FILES,
        ".pt file with mean and std of each latent channel, or a ViT decoder's mean and var: "
        "latents × std + mean are decoded; default: the latents_stats.pt or stat.pt in the folder "
        "of --vae",
    ),
    Option(
        "device",
        str,
        ADVANCED,
        "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one",
    ),
    Option(
        "labels",
        label,
        SAMPLED,
        'class of each picture, by number or name ("golden retriever"); default: eight '
        "ImageNet classes, or the first eight of a model with other classes",
        several="+",
        metavar="LABEL",
        jobs=(GRID,),
    ),
    Option(
        "class_names",
        str,
        FILES,
        "file with the names of all classes, for --labels and file names: one name per line in "
        "class order, or JSON; default: the names in --ckpt, else ImageNet's",
        metavar="FILE",
        convert=read_class_names,
        jobs=(GRID,),
    ),
    Option(
        "seed_list",
        int,
        SAMPLED,
        "in place of --seed: a grid or folder for each of these seeds, OUTPUT-seed-0.png or "
        "OUTPUT/seed-0/",
        bounds=SEEDS,
        several="+",
        metavar="SEED",
        flags=("--seeds",),
        jobs=(GRID,),
    ),
    Option(
        "batch_size",
        int,
        SPEED,
        "pictures to sample at a time, for a GPU with too little memory for all; the pictures "
        "stay the same except for rounding; default: all of --labels",
        bounds=(1, 10**9),
        jobs=(GRID,),
    ),
    Option(
        "parallel",
        str,
        SPEED,
        "how GPUs share a picture if there are fewer pictures than GPUs. auto: first the batch "
        "rows of guidance, then tokens over NVLink; off: one rank per picture; or a layout, "
        "rows=2,tokens=2: numbers of GPUs for batch rows and tokens",
        default="auto",
        metavar="auto|off|rows=N,tokens=N",
        ranks_only=True,
        jobs=(GRID,),
    ),
    Option(
        "output",
        str,
        FILES,
        "file to write, its folders are made; a folder (FOLDER/) gets one PNG per picture, such as "
        "000-207-golden-retriever.png; default: sample.png, or sample.npy for latents",
        jobs=(GRID,),
    ),
    Option(
        "output_type",
        str,
        FILES,
        "image: one PNG, four pictures per row; latent: float32 .npy (n, C, L, L), no decoder "
        "needed",
        default="image",
        choices=("image", "latent"),
        jobs=(GRID,),
    ),
    Option(
        "num_fid_samples",
        int,
        SAMPLED,
        "number of pictures of random classes, one PNG each, and an .npz for FID; default: one "
        "grid of --labels",
        bounds=(1, 10**9),
        jobs=(FID,),
    ),
    Option(
        "world_independent_noise",
        bool,
        SAMPLED,
        "FID: key noise and labels by picture, so that any number of ranks makes the same "
        "pictures; default: the usual stream, one seed per rank",
        default=False,
        action="store_true",
        jobs=(FID,),
    ),
    Option(
        "balanced_labels",
        bool,
        SAMPLED,
        "FID: as many pictures of each class, in the family's order: usually picture i of class "
        "i mod --num-classes; default: random classes",
        default=False,
        action="store_true",
        jobs=(FID,),
    ),
    Option(
        "per_proc_batch_size",
        int,
        SPEED,
        "FID: pictures that a rank makes at a time",
        default=32,
        bounds=(1, 10**5),
        jobs=(FID,),
    ),
    Option(
        "sample_dir",
        str,
        FILES,
        "FID: where the folder is made",
        default="samples",
        jobs=(FID,),
    ),
)
OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}
DEFAULTS = {name: option.default for name, option in OPTIONS.items() if option.default is not None}


class Options(Mapping[str, Any]):
    """The values that a user gave, by option, checked. None leaves an option out.

    Raises UsageError for a value that an option does not take, and TypeError for other options.
    """

    def __init__(self, **values: Any):
        unknown = next((name for name in values if name not in OPTIONS), None)
        if unknown:
            raise TypeError(f"there is no option {unknown!r}")
        given = {name: value for name, value in values.items() if value is not None}
        self._values = {name: OPTIONS[name].checked(value) for name, value in given.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def job(self) -> str:
        """Return the kind of job: FID if a number of pictures is given, else GRID."""
        return FID if "num_fid_samples" in self else GRID

    def changed(self, **values: Any) -> "Options":
        """Return the options with other values; None leaves an option as it is."""
        given = {name: value for name, value in values.items() if value is not None}
        return Options(**{**self, **given})
