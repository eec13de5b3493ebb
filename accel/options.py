"""Every option once: its default, its flag, its check. accel/command_line.py makes the flags. Imports no torch."""

import argparse
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from accel.errors import UsageError, shown
from accel.flags import checked, flag
from accel.labels import class_names, find_label
from accel.output import is_folder, of_seed
from accel.parallel import layouts

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "pretrained_models" / "demo"

MODELS = (
    *(f"DiT-{size}/{patch}" for size in ("XL", "L", "B", "S") for patch in (2, 4, 8)),
    "DiT-Demo/2",
    *(f"Large-DiT-{size}/2" for size in ("600M", "3B", "7B", "Demo")),
    *(f"SiT-{size}/{patch}" for size in ("XL", "L", "B", "S") for patch in (2, 4, 8)),
    "SiT-Demo/2",
)
FLOWS = "sde", "euler", "heun"  # the samplers of a SiT, its default first
SAMPLERS = "ddpm", "ddim", "dpm++", "unipc", *FLOWS
# What a model implies for the options that the user leaves open. Published weights exist for XL/2 at 256 and 512 px.
IMAGENET = dict(image_size=512, num_classes=1000, vae="ema", ckpt=None)
DRAWN = dict(image_size=128, num_classes=8, vae=str(DEMO / "vae"))
DEFAULTS_OF = {
    **dict.fromkeys(("Large-DiT-600M/2", "Large-DiT-3B/2", "Large-DiT-7B/2"), dict(image_size=256)),
    **dict.fromkeys((name for name in MODELS if name.startswith("SiT")), dict(image_size=256)),
    "DiT-Demo/2": dict(**DRAWN, ckpt=str(DEMO / "dit.safetensors")),
    "Large-DiT-Demo/2": dict(**DRAWN, ckpt=str(DEMO / "large-dit.safetensors")),
    "SiT-Demo/2": dict(**DRAWN, ckpt=str(DEMO / "sit.safetensors")),
}
LABELS = (207, 360, 387, 974, 88, 979, 417, 279)  # of ImageNet; of other classes the first eight
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
GROUPS = WHAT, SPEED, FILES, ADVANCED = "what to sample", "speed", "files", "advanced"  # of --help
what, speed, files, advanced = (partial(flag, group=group) for group in GROUPS)


def _check_sizes(options):
    if options.weights is None and options.model not in (None, *MODELS):
        raise UsageError(f"`model={shown(options.model)}`: unknown; choose from {', '.join(MODELS)}")
    size, unit = options.image_size, 8 * options.patch_size
    if size is not None and size % unit:
        raise UsageError(
            f"`image_size={size}`: must be a multiple of {unit} (VAE factor 8, patch {options.patch_size})"
        )
    _require_seed(options.seed)


def _require_seed(seed):
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"`seed={shown(str(seed))}`: must fit in 64 bits")


def _check_process(options):
    weights, scale = options.weights, options.cfg_scale
    if not 1 <= scale < float("inf"):
        raise UsageError(f"`cfg_scale={scale:g}`: must be at least 1 (1 is no guidance)")
    if weights is not None and not weights.null_class and scale != 1:
        raise UsageError(
            f"`cfg_scale={scale:g}`: guidance needs a null class, and these weights were trained without "
            f"(label table of {options.num_classes} rows); use `cfg_scale=1`"
        )
    low, high = options.guidance_interval if len(options.guidance_interval) == 2 else (1, 0)
    if not 0 <= low < high <= 1:
        given = " ".join(f"{one:g}" for one in options.guidance_interval)
        raise UsageError(f"`guidance_interval={given}`: must be two numbers from 0 to 1, the lower first")
    if not 0 <= options.eta <= 1 or options.eta and options.sampler != "ddim":
        raise UsageError(f"`eta={options.eta:g}`: must be from 0 to 1, and is for `sampler=ddim`")
    _check_sampler(options)
    if options.sampler not in (None, "ddpm") and options.forecast == "plan":
        raise UsageError(f"`forecast=plan`: plans are made for `sampler=ddpm`, not for {options.sampler}; drop it")
    if weights is not None and not weights.learn_sigma and options.forecast == "plan":
        raise UsageError("`forecast=plan`: needs weights with learned sigma, which these have not; drop it")
    if options.forecast_plan is not None and options.forecast != "plan":
        raise UsageError(f"`forecast_plan={options.forecast_plan}`: is for `forecast=plan`; add that or drop this")


def _check_sampler(options):
    sampler, model = options.sampler, options.model
    if sampler is None or options.weights is None and model is None:
        return
    if (sampler in FLOWS) != options.flow:
        kind, others = ("SiT", FLOWS) if options.flow else ("DiT", [name for name in SAMPLERS if name not in FLOWS])
        raise UsageError(f"`sampler={sampler}`: is not for a {kind}, which {model} is; use {', '.join(others)}")
    if sampler == "sde" and options.num_sampling_steps < 2:
        raise UsageError(f"`num_sampling_steps={options.num_sampling_steps}`: must be at least 2 for `sampler=sde`")


@dataclass
class Options:
    """Those left None follow from `model` (`resolve`) or from the weights (`complete`)."""

    model: str = what(
        None,
        "network: DiT- or SiT-XL/2, L, B or S with /2, /4 or /8 for its patches, Large-DiT-600M/2, 3B or 7B; "
        "DiT-, Large-DiT- and SiT-Demo/2 ship with their weights, run anywhere; default: that of --ckpt, else DiT-XL/2",
        action="store",
    )
    image_size: int = what(
        None,
        "side of a picture in pixels, a multiple of 16: what the weights were trained for, other sizes look worse; "
        "default: that of --ckpt, else 512",
        bounds=(1, MOST_PIXELS),
    )
    cfg_scale: float = what(4.0, "strength of classifier-free guidance, 1 or more")
    num_sampling_steps: int = what(250, "denoising steps, up to 1000", bounds=(1, 1000))
    guidance_interval: tuple = what(
        (0.0, 1.0),
        "noise levels, from 0 at the picture to 1 at noise, at which guidance acts; at others the network is evaluated "
        "on half the rows",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
    )
    guidance_channels: int = what(
        3, "latent channels that are guided: 3, as published, or all 4, as diffusers does", choices=(3, 4)
    )
    sampler: str = what(
        None,
        "for a DiT ddpm, the default: ancestral sampling; ddim: deterministic unless --eta says otherwise, for few "
        "steps such as 25; dpm++, unipc: diffusers' solvers, for 10 to 25 steps: other pictures. For a SiT sde, the "
        "default; euler, heun: deterministic, for fewer steps",
        choices=SAMPLERS,
    )
    eta: float = what(0.0, "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws")
    seed: int = what(
        0, "seed of the noise: same seed, device and number of GPUs, same pictures", ranks=("--global-seed", "--seed")
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
    vae: str = files(
        None,
        "latent decoder: ema or mse (sd-vae-ft-*), or a folder in diffusers' layout; default: that of --ckpt, else ema",
    )
    repa: bool = files(
        False, "--ckpt holds REPA's weights, stripped of the projectors by which they are known", action="store_true"
    )
    forecast_plan: str = files(None, "the plan's file; default: beside the checkpoint, CKPT.forecast.json")
    device: str = advanced(None, "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one")
    weights: Any = field(default=None, repr=False)  # no flag: what the weights say of themselves, see `complete`
    CHECKS: ClassVar = (_check_sizes, _check_process)

    def resolve(self) -> "Options":
        """Check types and choices, fill in what the model implies, and check all that can be checked without torch.
        With a `ckpt` what follows from its weights stays None until `complete`. Returns self.

        Raises UsageError, naming the parameter and the remedy.
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

    def complete(self, weights: Any) -> "Options":
        """These options with all that follows from `weights`, a Checkpoint or what stands in its place. Raises
        UsageError for a contradiction."""
        identity = weights.identify(self.model, self.num_classes)
        options = replace(self, weights=identity, model=identity.model, num_classes=identity.num_classes)
        options.image_size, options.vae = self.image_size or identity.image_size, self.vae or identity.vae
        options._fill(identity.model)
        options._check()
        return options

    def _fill(self, model):
        """What is open becomes what `model` implies."""
        sampler = (FLOWS if self.flow else SAMPLERS)[0]
        for name, value in {"model": model, "sampler": sampler, **IMAGENET, **DEFAULTS_OF.get(model, {})}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _check(self):
        """Refuse what the values that are known so far forbid."""
        for check in self.CHECKS:
            check(self)

    @property
    def latent_size(self) -> int:
        """Side of the latent: the VAE's factor is 8."""
        return self.image_size // 8

    @property
    def flow(self) -> bool:
        """Whether the network estimates a velocity, by the weights or by the model's name."""
        return self.weights.flow if self.weights is not None else (self.model or "").startswith("SiT")

    def steps_and_guidance(self, evaluations: str = "") -> str:
        """In words; evaluations: what follows the steps."""
        by = "" if self.sampler == "ddpm" else f"{self.sampler.upper()} "
        steps = f"{self.num_sampling_steps} {by}steps{evaluations}"
        at = "" if self.guidance_interval == (0, 1) else " at levels {:g} to {:g}".format(*self.guidance_interval)
        return f"{steps} · cfg {self.cfg_scale:g}{at}"

    @property
    def patch_size(self) -> int:
        """Side of a token in the latent, by the weights or by the model's name."""
        return self.weights.patch_size if self.weights is not None else int((self.model or "/2").rpartition("/")[2])


def _find_labels(options):
    classes = options.num_classes
    if classes is None or options.model is None:
        return
    if options.labels is None:
        options.labels = LABELS if classes == IMAGENET["num_classes"] else tuple(range(min(classes, 8)))
    if not options.labels:
        raise UsageError("`labels`: give at least one")
    options.labels = tuple(find_label(label, options.class_names, classes) for label in options.labels)


def _check_seeds(options):
    seeds = options.seed_list or ()
    if seeds and options.seed != 0:
        raise UsageError(f"`seed_list`: conflicts with `seed={options.seed}`; give one")
    if len(set(seeds)) < len(seeds):
        raise UsageError("`seed_list`: names a seed twice, and each has a file of its own; name it once")
    for seed in seeds:
        _require_seed(seed)


def _check_output(options):
    suffix = ".npy" if options.output_type == "latent" else ".png"
    options.output = options.output or f"sample{suffix}"
    if Path(options.output).suffix.lower() != suffix and not is_folder(options.output, options.output_type):
        folder = ", or name a folder (FOLDER/)" if options.output_type == "image" else ""
        raise UsageError(
            f"`output={shown(options.output)}`: must end in {suffix} for `output_type={options.output_type}`{folder}"
        )


def _check_layout(options):
    if (layout := options.layout) is None:
        return
    known = options.image_size is not None and (options.weights is not None or options.model is not None)
    layouts.check(layout, options.precision, (options.latent_size // options.patch_size) ** 2 if known else None)
    if not options.guided:
        raise UsageError(f"`parallel={options.parallel}`: shares evaluations with guidance only; use off")


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

    CHECKS: ClassVar = (*Options.CHECKS, _find_labels, _check_seeds, _check_output, _check_layout)

    @property
    def guided(self) -> bool:
        """Whether the network is evaluated with guidance, on two rows a picture: always, where it can be."""
        return self.weights is None or self.weights.null_class

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
    def class_names(self) -> tuple[str, ...]:
        """The name of every class; () where they are unknown."""
        own = self.weights.class_names if self.weights is not None else ()
        return own if len(own) == self.num_classes else class_names(self.model, self.num_classes)

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
