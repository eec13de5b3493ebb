"""Every option once: its default, its flag, its check. accel/command_line.py makes the flags. Imports no torch."""

import argparse
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from accel import checks
from accel.errors import UsageError
from accel.families import Defaults, Family, family_of, model_names, sampler_names
from accel.flags import checked, flag
from accel.labels import imagenet, read_class_names
from accel.latents import LatentSpace
from accel.output import of_seed
from accel.parallel import layouts

# Fields that a model implies where they are open.
IMPLIED = {"model", "sampler", "image_size", "num_classes", "vae", "ckpt"}
IMPLIED |= {"cfg_scale", "guidance_channels", "guidance_interval", "num_sampling_steps", "timestep_shift"}
GROUPS = WHAT, SPEED, FILES, ADVANCED = "what to sample", "speed", "files", "advanced"  # of --help
what, speed, files, advanced = (partial(flag, group=group) for group in GROUPS)


SHIFT = (
    "of a flow by euler or heun: below 1 its steps are shorter at noise than at the picture; default: what the model "
    "implies, 1 unless its recipe says otherwise"
)
STATS = (
    "mean and std of the latents' channels, a .pt file: the decoder takes latents × std + mean; default: the "
    "latents_stats.pt beside --vae, if that is a file"
)


def _decoder(name):
    """The decoder that a file names, where it is one that can be found here."""
    return name if name in ("ema", "mse") or name and Path(name).is_dir() else None


@dataclass
class Options:
    """Those left None follow from `model` (`resolve`) or from the weights (`complete`)."""

    model: str = what(
        None,
        f"network: {', '.join(model_names())}; Demo models ship with their weights and run anywhere; default: that of "
        "--ckpt, else DiT-XL/2",
        action="store",
        metavar="NAME",
    )
    image_size: int = what(
        None,
        "side of a picture in pixels, a multiple of 16: what the weights were trained for, other sizes look worse; "
        "default: that of --ckpt, else 512",
        bounds=(1, checks.MOST_PIXELS),
    )
    cfg_scale: float = what(
        None,
        "strength of classifier-free guidance, 1 or more; default: what the model implies, 4.0 unless its recipe says "
        "otherwise",
    )
    num_sampling_steps: int = what(None, "denoising steps, up to 1000; default: the model's, 250", bounds=(1, 1000))
    timestep_shift: float = what(None, SHIFT, bounds=(0.01, 100))
    guidance_interval: tuple = what(
        None,
        "noise levels, from 0 at the picture to 1 at noise, at which guidance acts; at others the network is evaluated "
        "on half the rows; default: what the model implies, 0 1 unless its recipe says otherwise",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
    )
    guidance_channels: int = what(
        None,
        "latent channels that are guided, from the first on: 3, as published, or all 4, as diffusers does; default: "
        "what the model implies",
        bounds=(1, 1024),
    )
    sampler: str = what(
        None,
        "of a network that predicts noise ddpm, the default: ancestral sampling; ddim: deterministic unless --eta says "
        "otherwise, for few steps such as 25; dpm++, unipc: diffusers' solvers, for 10 to 25 steps: other pictures. Of "
        "a flow sde, the default; euler, heun: deterministic, for fewer steps",
        choices=sampler_names(),
    )
    eta: float = what(0.0, "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws")
    seed: int = what(
        0,
        "seed of the noise: same seed, device and number of GPUs, same pictures; a CPU takes its lower 32 bits",
        ranks=("--global-seed", "--seed"),
    )
    num_classes: int = what(
        None, "classes that the weights were trained with; default: what --ckpt says, else 1000", bounds=(1, 10**6)
    )

    precision: str = speed(
        None,
        "fp16: float16 GEMMs with all else in float32, the fast one; bf16: for weights that overflow float16; "
        "tf32: float32 with TF32 GEMMs, as DiT ships; fp32: true float32; exact: fp32's pictures from float16 tensor "
        "cores; default: fp16 on a GPU with tensor cores (bf16 if the weights overflow it), else fp32",
        choices=("fp32", "exact", "tf32", "fp16", "bf16"),
    )
    tf32: bool = speed(
        None,
        "--tf32 is --precision tf32 where the hardware has it, else fp32; --no-tf32 is --precision fp32",
        action=argparse.BooleanOptionalAction,
        ranks_only=True,
    )
    vae_precision: str = speed(
        "auto",
        "the decoder's arithmetic. fp16: a fraction of the time and memory, used if a check of its weights passes; "
        "tf32: float32 with TF32 convolutions; fp32: true float32; auto: fp16 for fp16 and bf16, else as --precision",
        choices=("auto", "fp32", "tf32", "fp16"),
    )
    forecast: str = speed(
        "off",
        "off: every step evaluates the network; plan: the steps that scripts/calibrate.py found to be enough for these "
        "weights, whose pictures it checked",
        choices=("off", "plan"),
    )

    ckpt: str = files(
        None,
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt), a folder in diffusers' layout or "
        "a hub id; default: the published weights for the image size",
    )
    vae: str = files(None, "decoder: ema, mse (sd-vae-ft-*), a folder, VA-VAE's .pt or a hub id; default: the model's")
    latent_stats: str = files(None, STATS)
    forecast_plan: str = files(None, "the plan's file; default: beside the checkpoint, CKPT.forecast.json")
    device: str = advanced(None, "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one")
    space: LatentSpace = field(default=LatentSpace(), repr=False)  # no flag: what the decoder says, see `door.fetch`
    fit: Any = field(default=None, repr=False)  # no flag: what the weights are, see `complete`
    CHECKS: ClassVar = (checks.sizes, checks.process)

    def resolve(self) -> "Options":
        """Check types and choices, fill in what the model implies, and check all that can be checked without torch.
        With a `ckpt` what follows from its weights stays None until `complete`. Returns self. Raises UsageError, naming
        the parameter and the remedy.
        """
        for item in fields(self):
            if item.metadata and getattr(self, item.name) is not None:
                setattr(self, item.name, checked(self, item))
        if self.tf32 is not None:
            tier = "tf32" if self.tf32 else "fp32"
            if self.precision not in (None, tier):
                raise UsageError(f"`tf32={self.tf32}`: conflicts with `precision={self.precision}`; give one")
            self.precision = tier
        if self.ckpt is None:
            self._fill(self.model or "DiT-XL/2")
        self._check()
        return self

    def complete(self, fit: Any) -> "Options":
        """Return these options with all that follows from a Fit. Raises UsageError for a contradiction."""
        options = replace(self, fit=fit, model=fit.model, num_classes=fit.num_classes)
        trained = fit.trained_size(self.space.factor)
        options.image_size, options.vae = self.image_size or trained, self.vae or _decoder(fit.vae)
        options.guidance_channels = self.guidance_channels or fit.guidance_channels
        options._fill(fit.model)
        options._check()
        return options

    def _fill(self, model):
        found = family_of(model) or (self.fit.family if self.fit else None)
        implied = Defaults()
        if found:  # sizes without a name have the recipe of the family's first model
            implied = found.models.get(model, found.recipe)._replace(**(self.fit.implied if self.fit else {}))
        sampler = found.samplers[0] if found else None
        for name, value in {"model": model, "sampler": sampler, **implied._asdict()}.items():
            if name in IMPLIED and getattr(self, name) is None:
                setattr(self, name, value)

    def _check(self):
        for check in self.CHECKS:
            check(self)

    @property
    def latent_size(self) -> int:
        """Side of the latent."""
        return self.image_size // self.space.factor

    @property
    def family(self) -> Family | None:
        """The network's family; None if neither weights nor model are known yet."""
        return self.fit.family if self.fit is not None else family_of(self.model)

    @property
    def patch_size(self) -> int:
        """Side of a token in the latent, by the weights or by the model's name."""
        return self.fit.patch_size if self.fit is not None else int((self.model or "/2").rpartition("/")[2])


@dataclass
class GridOptions(Options):
    """Pictures of chosen classes, in one file or a folder, by one process or many."""

    labels: tuple = what(
        None,
        'class of each picture, by number or name ("golden retriever"); default: eight ImageNet classes, or the first '
        "eight of a model with other classes",
        nargs="+",
        metavar="LABEL",
    )
    class_names: tuple = files(
        None,
        "names of the classes, for --labels and file names: a file with one name a line in their order, or JSON; "
        "default: those that --ckpt brings, or ImageNet's",
        metavar="FILE",
        action="store",
        convert=read_class_names,
    )
    seed_list: tuple = what(
        None,
        "in place of --seed: a grid or folder for each of these seeds, OUTPUT-seed-0.png or OUTPUT/seed-0/",
        names=("--seeds",),
        nargs="+",
        type=int,
        metavar="SEED",
    )
    batch_size: int = speed(
        None,
        "pictures to sample at a time, for a GPU whose memory does not hold all; the pictures stay the same; default: "
        "all of --labels",
        bounds=(1, 10**9),
    )
    repeats: int = speed(1, "time the sampling this often after a warm-up: median and spread", bounds=(1, 10**9))
    parallel: str = speed(
        "auto",
        "how GPUs share fewer pictures than there are of them. auto: the fastest layout, measured once a machine; "
        "off: a GPU a picture; or a layout, rows=2,tokens=2,exchange=kv: the rows that guidance doubles, their tokens, "
        "and how tokens attend (kv, push, ulysses). weights=4 divides every layer, for a network that does not fit in "
        "one GPU",
        metavar="auto|off|rows=N,tokens=N,exchange=NAME|weights=N",
        ranks_only=True,
    )
    decode: str = speed(
        "each", "who decodes: each rank its own pictures, or rank0 all", choices=("each", "rank0"), ranks_only=True
    )
    output: str = files(
        None,
        "file to write, its folders are made; a folder (FOLDER/) gets one PNG a picture, such as "
        "000-207-golden-retriever.png; default: sample.png, or sample.npy for latents",
    )
    output_type: str = files(
        "image",
        "image: one PNG, four pictures a row; latent: float32 .npy (n, 4, L, L), no decoder needed",
        choices=("image", "latent"),
    )

    CHECKS: ClassVar = (*Options.CHECKS, checks.labels, checks.seeds, checks.output, checks.layout)

    @property
    def guided(self) -> bool:
        """Whether the network is evaluated with guidance, on two rows a picture: always, where it can be."""
        return self.fit is None or self.fit.null_class

    @property
    def into_pictures(self) -> bool:
        """Whether latents are decoded."""
        return self.output_type == "image"

    @property
    def divided(self) -> bool:
        """Whether each rank reads its part of the weights only."""
        return self.layout is not None and self.layout.weights > 1

    @property
    def layout(self) -> layouts.Layout | None:
        """What `parallel` asks for; None for auto and off."""
        if self.parallel in ("auto", "off"):
            return None
        return layouts.parse(self.parallel, exchange="ulysses" if self.precision == "exact" else "kv")

    @property
    def pictures(self) -> str:
        """What is made, in words."""
        seeds = f" × {len(self.seed_list)} seeds" if self.seed_list else ""
        return f"{len(self.labels)} label{'s' * (len(self.labels) > 1)}{seeds}"

    @property
    def smaller_batch(self) -> str:
        """The parameter that asks for so large a batch, and what to do where it does not fit in memory."""
        n = len(self.labels)
        if 1 in (n, self.batch_size):
            return f"`image_size={self.image_size}`: a picture does not fit in free GPU memory; use a smaller one"
        if self.batch_size:
            return f"`batch_size={self.batch_size}`: does not fit in free GPU memory; use a smaller one"
        return f"`labels`: {n} pictures at a time do not fit in free GPU memory; use `batch_size={n // 2}`"

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every class; () where they are unknown."""
        if self.class_names is not None:
            return self.class_names
        family = family_of(self.model)
        implied = family.models[self.model].class_names if family else ()
        usual = imagenet() if self.num_classes == 1000 else ()
        known = (self.fit.class_names if self.fit else (), implied, usual)
        return next((names for names in known if len(names) == self.num_classes), ())

    def for_each_seed(self) -> "list[GridOptions]":
        """These options, or for each of `seed_list` a copy with an output of its own."""
        if self.seed_list is None:
            return [self]
        return [
            replace(self, seed=n, seed_list=None, output=of_seed(self.output, self.output_type, n))
            for n in self.seed_list
        ]


@dataclass
class FidOptions(Options):
    """A folder of many pictures of random classes, by many processes."""

    num_fid_samples: int = what(
        None,
        "make so many pictures of random classes, one PNG each, and an .npz for FID; default: one grid of --labels",
        bounds=(1, 10**9),
    )
    world_independent_noise: bool = what(
        False,
        "FID: key noise and labels by picture, so that any number of ranks makes the same pictures; default: the usual "
        "stream, a seed a rank",
        action="store_true",
    )
    balanced_labels: bool = what(
        False,
        "FID: as many pictures of each class, picture i of class i mod --num-classes; default: random classes",
        action="store_true",
    )
    per_proc_batch_size: int = speed(32, "FID: pictures that a rank makes at a time", bounds=(1, 10**5))
    sample_dir: str = files("samples", "FID: where the folder is made")

    into_pictures: ClassVar = True
    divided: ClassVar = False

    @property
    def guided(self) -> bool:
        """Whether the network is evaluated with guidance, on two rows a picture: as upstream above a scale of one."""
        return self.cfg_scale > 1

    @property
    def pictures(self) -> str:
        """What is made, in words."""
        return f"{self.num_fid_samples} pictures"

    @property
    def smaller_batch(self) -> str:
        """The parameter that asks for so large a batch, and what to do where it does not fit in memory."""
        return f"`per_proc_batch_size={self.per_proc_batch_size}`: does not fit in free GPU memory; use a smaller one"
