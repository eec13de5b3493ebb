"""A run as a user asked for it, by flags or keywords: every field once, with its default,
flag, help and checks.

settings.py makes a run of a request; command_line.py makes flags of its fields. Imports
no torch.
"""

import argparse
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from accel.errors import UsageError, shown
from accel.families import family_of, model_names, sampler_names
from accel.flags import checked, flag
from accel.labels import read_class_names
from accel.output import SUFFIX, is_folder, of_seed
from accel.ranks import layouts
from accel.ranks.layouts import OFF, Layout

MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
SPEED = "speed"  # a group of --help
what, speed, files, advanced = (
    partial(flag, group=group) for group in ("what to sample", SPEED, "files", "advanced")
)


@dataclass(frozen=True)
class Request:
    """The fields that every run has. A field that is None is left open: settings.py
    derives its value.

    Each value is checked and converted to its field's type. Raises UsageError, naming the
    parameter and the remedy, for a value that no run has and for fields that exclude each
    other.
    """

    model: str = what(
        f"network: {', '.join(model_names())}; Demo models ship with their weights and run "
        "anywhere; default: that of --ckpt, else DiT-XL/2",
        action="store",
        metavar="NAME",
    )
    image_size: int = what(
        "side of a picture in pixels, a multiple of 16 (of 32 for patch 4, of 64 for patch 8): "
        "what the weights were trained for, other sizes look worse; default: that of --ckpt, "
        "else 512",
        bounds=(1, MOST_PIXELS),
    )
    cfg_scale: float = what(
        "strength of classifier-free guidance: 1 is none, 0 the null label's estimate on guided "
        "channels; default: what the model implies, 4.0 unless its recipe says otherwise",
    )
    num_sampling_steps: int = what(
        "denoising steps, up to 1000; default: the model's, 250", bounds=(1, 1000)
    )
    timestep_shift: float = what(
        "euler, heun: below 1 the steps are shorter at noise than at the picture; default: what "
        "the model implies, 1 unless its recipe says otherwise",
        bounds=(0.01, 100),
    )
    guidance_interval: tuple = what(
        "noise levels, from 0 at the picture to 1 at noise, at which guidance acts; at others "
        "the network is evaluated on half the batch rows; default: what the model implies, 0 1 "
        "unless its recipe says otherwise",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
    )
    guidance_channels: int = what(
        "number of latent channels that are guided: the first 3, as published, or all 4, as "
        "diffusers does; default: what the model implies",
        bounds=(1, 1024),
    )
    sampler: str = what(
        "networks that predict noise: ddpm (default), ancestral sampling; ddim, deterministic "
        "unless --eta says otherwise, for few steps such as 25; dpm++, unipc, diffusers' "
        "solvers, for 10 to 25 steps. Flows: sde (default where the network has it); euler, "
        "heun, deterministic, for fewer steps. Each makes other pictures",
        choices=sampler_names(),
    )
    eta: float = what(
        "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws", default=0.0
    )
    seed: int = what(
        "seed of the noise: same seed, device and number of GPUs, same pictures; a CPU takes its "
        "lower 32 bits",
        default=0,
        ranks=("--global-seed", "--seed"),
    )
    num_classes: int = what(
        "classes that the weights were trained with; default: what --ckpt says, else 1000",
        bounds=(1, 10**6),
    )

    precision: str = speed(
        "fp16: float16 GEMMs with all else in float32, the fast one; bf16: for weights that "
        "overflow float16; tf32: float32 with TF32 GEMMs, as DiT ships; fp32: true float32; "
        "exact: fp32's pictures from float16 tensor cores; default: fp16 on a GPU with tensor "
        "cores (bf16 if the weights overflow it), else fp32",
        choices=("fp32", "exact", "tf32", "fp16", "bf16"),
    )
    tf32: bool = speed(
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

    ckpt: str = files(
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt), a folder "
        "in diffusers' layout or with consolidated weights, or a hub id; default: the published "
        "weights for the image size",
    )
    weights_entry: str = files(
        "the entry of a training file to sample, such as ema or model; default: ema, else model or "
        "the first other that is known",
        metavar="NAME",
    )
    vae: str = files(
        "decoder: ema, mse (sd-vae-ft-*), a folder, VA-VAE's .pt or a hub id; default: the model's"
    )
    num_heads: int = files(
        "attention heads of weights whose file does not say their number; default: those of the "
        "model of this size",
        bounds=(1, 1024),
    )
    latent_stats: str = files(
        "mean and std of the latents' channels, a .pt file: the decoder takes latents × std + "
        "mean; default: the latents_stats.pt beside --vae, if that is a file",
    )
    device: str = advanced(
        "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one"
    )

    output_type = "image"
    layout = OFF

    def __post_init__(self):
        for item in fields(self):
            if (value := getattr(self, item.name)) is not None:
                object.__setattr__(self, item.name, checked(value, item))
        self._check()

    def _check(self):
        if self.model is not None and family_of(self.model) is None:
            raise UsageError(
                f"`model={shown(self.model)}`: unknown; choose from {', '.join(model_names())}"
            )
        if self.precision not in (None, self.tier):
            raise UsageError(
                f"`tf32={self.tf32}`: conflicts with `precision={self.precision}`; give one"
            )
        _require_seed(self.seed)
        if self.cfg_scale is not None and not 0 <= self.cfg_scale <= 10**6:
            raise UsageError(
                f"`cfg_scale={self.cfg_scale:g}`: must be from 0 to 1,000,000; 1 is no guidance"
            )
        levels = self.guidance_interval
        if levels is not None and not (len(levels) == 2 and 0 <= levels[0] < levels[1] <= 1):
            given = " ".join(f"{level:g}" for level in levels)
            raise UsageError(
                f"`guidance_interval={given}`: must be two numbers from 0 to 1, the lower first"
            )
        if not 0 <= self.eta <= 1 or self.eta and self.sampler != "ddim":
            raise UsageError(f"`eta={self.eta:g}`: must be from 0 to 1, and is for `sampler=ddim`")

    @property
    def tier(self) -> str | None:
        """Return the precision that `precision` or `tf32` asks for."""
        return self.precision if self.tf32 is None else "tf32" if self.tf32 else "fp32"


@dataclass(frozen=True)
class GridRequest(Request):
    """Pictures of chosen classes, in one file or a folder, by one process or many."""

    labels: tuple = what(
        'class of each picture, by number or name ("golden retriever"), or null; default: eight '
        "ImageNet classes, or the first eight of a model with other classes",
        nargs="+",
        metavar="LABEL",
    )
    class_names: tuple = files(
        "names of the classes, for --labels and file names: a file with one name a line in their "
        "order, or JSON; default: those that --ckpt brings, or ImageNet's",
        metavar="FILE",
        action="store",
        convert=read_class_names,
    )
    seed_list: tuple = what(
        "in place of --seed: a grid or folder for each of these seeds, OUTPUT-seed-0.png or "
        "OUTPUT/seed-0/",
        names=("--seeds",),
        nargs="+",
        type=int,
        metavar="SEED",
    )
    batch_size: int = speed(
        "pictures to sample at a time, for a GPU whose memory does not hold all; the pictures "
        "stay the same but for rounding; default: all of --labels",
        bounds=(1, 10**9),
    )
    repeats: int = speed(
        "time the sampling this often after a warm-up: median and spread",
        default=1,
        bounds=(1, 10**9),
    )
    parallel: str = speed(
        "how GPUs share a picture if there are fewer pictures than GPUs. auto: the fastest "
        "layout, measured once a machine; off: a GPU a picture; or a layout, "
        "rows=2,tokens=2,exchange=kv: the batch rows of guidance, their tokens, and how tokens "
        f"attend ({', '.join(layouts.EXCHANGES)}). weights=4 divides every layer, for a network "
        "that does not fit in one GPU",
        default="auto",
        metavar="auto|off|rows=N,tokens=N,exchange=NAME|weights=N",
        ranks_only=True,
    )
    output: str = files(
        "file to write, its folders are made; a folder (FOLDER/) gets one PNG a picture, such as "
        "000-207-golden-retriever.png; default: sample.png, or sample.npy for latents",
    )
    output_type: str = files(
        "image: one PNG, four pictures a row; latent: float32 .npy (n, C, L, L), no decoder needed",
        default="image",
        choices=("image", "latent"),
    )

    def _check(self):
        super()._check()
        seeds = self.seed_list or ()
        if seeds and self.seed != 0:
            raise UsageError(f"`seed_list`: conflicts with `seed={self.seed}`; give one")
        if len(set(seeds)) < len(seeds):
            raise UsageError(
                "`seed_list`: names a seed twice, and each has a file of its own; name it once"
            )
        for seed in seeds:
            _require_seed(seed)
        suffix = SUFFIX[self.output_type]
        if (
            self.output
            and Path(self.output).suffix.lower() != suffix
            and not is_folder(self.output, self.output_type)
        ):
            folder = ", or name a folder (FOLDER/)" if self.output_type == "image" else ""
            raise UsageError(
                f"`output={shown(self.output)}`: must end in {suffix} for "
                f"`output_type={self.output_type}`{folder}"
            )
        if self.layout is not None:
            layouts.check(self.layout, self.tier)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seed of each grid."""
        return (self.seed,) if self.seed_list is None else self.seed_list

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the file or folder of each grid."""
        output = self.output or f"sample{SUFFIX[self.output_type]}"
        if self.seed_list is None:
            return (output,)
        return tuple(of_seed(output, self.output_type, seed) for seed in self.seed_list)

    @property
    def layout(self) -> Layout | None:
        """Return the layout that `parallel` names; None to measure."""
        if self.parallel in ("auto", "off"):
            return OFF if self.parallel == "off" else None
        return layouts.parse(self.parallel, exchange="ulysses" if self.tier == "exact" else "kv")


@dataclass(frozen=True)
class FidRequest(Request):
    """A folder of many pictures of random classes, by many processes."""

    num_fid_samples: int = what(
        "number of pictures of random classes, one PNG each, and an .npz for FID; default: one "
        "grid of --labels",
        bounds=(1, 10**9),
    )
    world_independent_noise: bool = what(
        "FID: key noise and labels by picture, so that any number of ranks makes the same "
        "pictures; default: the usual stream, a seed a rank",
        default=False,
        action="store_true",
    )
    balanced_labels: bool = what(
        "FID: as many pictures of each class, picture i of class i mod --num-classes; default: "
        "random classes",
        default=False,
        action="store_true",
    )
    per_proc_batch_size: int = speed(
        "FID: pictures that a rank makes at a time", default=32, bounds=(1, 10**5)
    )
    sample_dir: str = files("FID: where the folder is made", default="samples")


def _require_seed(seed):
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"`seed={shown(str(seed))}`: must fit in 64 bits")
