"""Every option once: its default, its flag, its check. accel/command_line.py makes the flags."""

import argparse
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from accel.errors import UsageError, shown
from accel.flags import check_writable, checked, flag, flag_names
from accel.labels import class_names, file_name, find_label

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "pretrained_models" / "demo"

MODELS = (
    *(f"DiT-{size}/{patch}" for size in ("XL", "L", "B", "S") for patch in (2, 4, 8)),
    "DiT-Demo/2",
    *(f"Large-DiT-{size}/2" for size in ("600M", "3B", "7B", "Demo")),
)
# What a model implies for the options that the user leaves open. Published weights exist for XL/2 at 256 and 512 px.
IMAGENET = dict(image_size=512, num_classes=1000, labels=(207, 360, 387, 974, 88, 979, 417, 279), vae="ema", ckpt=None)
DRAWN = dict(image_size=128, num_classes=8, labels=tuple(range(8)), vae=str(DEMO / "vae"))
DEFAULTS_OF = {
    "DiT-Demo/2": dict(**DRAWN, ckpt=str(DEMO / "dit.safetensors")),
    "Large-DiT-Demo/2": dict(**DRAWN, ckpt=str(DEMO / "large-dit.safetensors")),
    **dict.fromkeys(("Large-DiT-600M/2", "Large-DiT-3B/2", "Large-DiT-7B/2"), dict(image_size=256)),
}
EXCHANGES = ("kv", "push", "ulysses")  # of accel/parallel/exchanges.py
LAYOUTS = {"rows", "tokens", "exchange"}, {"weights"}  # keys of --parallel that go together
# Options of a grid that have no meaning in an FID job.
OF_A_GRID = {"labels", "output", "output_type", "repeats", "parallel", "decode", "seed_list", "batch_size"}
MOST_PIXELS = 8192  # of a side: a mistyped size should not ask for terabytes
WHAT, SPEED, FILES, ADVANCED = "what to sample", "speed", "files", "advanced"  # groups of --help


@dataclass
class SamplingOptions:
    """Options of one sampling run. Those left None follow from `model` (`resolve`) or from the weights (`complete`)."""

    tf32 = None  # only sample_ddp.py has that flag
    model: str = flag(
        None,
        "network: DiT-XL/2, L, B or S with /2, /4 or /8 for its patches, Large-DiT-600M/2, 3B or 7B; DiT-Demo/2 and "
        "Large-DiT-Demo/2 ship with their weights and run on any machine; default: that of --ckpt, else DiT-XL/2",
        WHAT,
        type=str,
    )
    labels: tuple = flag(
        None,
        'class of each picture, by number or name ("golden retriever"); default: eight ImageNet classes, or the first '
        "eight of a model with other classes",
        WHAT,
        nargs="+",
        metavar="LABEL",
    )
    image_size: int = flag(
        None,
        "side of a picture in pixels, a multiple of 16: what the weights were trained for, other sizes look worse; "
        "default: that of --ckpt, else 512",
        WHAT,
        type=int,
        bounds=(1, MOST_PIXELS),
    )
    cfg_scale: float = flag(4.0, "strength of classifier-free guidance, 1 or more", WHAT, type=float)
    num_sampling_steps: int = flag(250, "denoising steps, up to 1000", WHAT, type=int, bounds=(1, 1000))
    sampler: str = flag(
        "ddpm",
        "ddpm: ancestral sampling; ddim: deterministic unless --eta says otherwise, for few steps such as 25",
        WHAT,
        choices=("ddpm", "ddim"),
    )
    eta: float = flag(0.0, "ddim: noise of a step, from 0, none, to 1, as much as ddpm draws", WHAT, type=float)
    seed: int = flag(0, "seed of the noise: same seed and device, same pictures", WHAT, type=int)
    seed_list: tuple = flag(
        None,
        "in place of --seed: a grid or folder for each of these seeds, OUTPUT-seed-0.png or OUTPUT/seed-0/",
        WHAT,
        names=("--seeds",),
        nargs="+",
        type=int,
        metavar="SEED",
    )
    num_classes: int = flag(
        None,
        "number of classes that the weights were trained with; default: what --ckpt says, else 1000",
        WHAT,
        type=int,
        bounds=(1, 10**6),
    )

    precision: str = flag(
        None,
        "fp16: float16 GEMMs with all else in float32, the fast one; bf16: for weights that overflow float16; "
        "tf32: float32 with TF32 GEMMs, as DiT ships; fp32: true float32; exact: fp32's pictures from float16 tensor "
        "cores; default: fp16 on a GPU with tensor cores (bf16 if the weights overflow it), else fp32",
        SPEED,
        choices=("fp32", "exact", "tf32", "fp16", "bf16"),
    )
    vae_precision: str = flag(
        "auto",
        "the decoder's arithmetic. fp16: a fraction of the time and memory, used if a check of its weights passes; "
        "tf32: float32 with TF32 convolutions; fp32: true float32; auto: fp16 for fp16 and bf16, else as "
        "--precision",
        SPEED,
        choices=("auto", "fp32", "tf32", "fp16"),
    )
    forecast: str = flag(
        "off",
        "off: every step evaluates the network; plan: the steps that scripts/calibrate.py found to be enough for these "
        "weights, whose pictures it checked",
        SPEED,
        choices=("off", "plan"),
    )
    batch_size: int = flag(
        None,
        "pictures to sample at a time, for a GPU whose memory does not hold all; the pictures stay the same; default: "
        "all of --labels",
        SPEED,
        type=int,
        bounds=(1, 10**9),
    )
    repeats: int = flag(
        1, "time the sampling this often after a warm-up: median and spread", SPEED, type=int, bounds=(1, 10**9)
    )

    ckpt: str = flag(
        None,
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt), a folder in diffusers' layout or "
        "a hub id; default: the published weights for the image size",
        FILES,
    )
    vae: str = flag(
        None,
        "latent decoder: ema or mse (sd-vae-ft-*), or a folder in diffusers' layout; default: that of --ckpt, else ema",
        FILES,
    )
    output: str = flag(
        None,
        "file to write, its folders are made; a folder (FOLDER/) gets one PNG a picture, such as "
        "000-207-golden-retriever.png; default: sample.png, or sample.npy for latents",
        FILES,
    )
    output_type: str = flag(
        "image",
        "image: one PNG, four pictures a row; latent: float32 .npy (n, 4, L, L), no decoder needed",
        FILES,
        choices=("image", "latent"),
    )
    forecast_plan: str = flag(None, "the plan's file; default: beside the checkpoint, CKPT.forecast.json", FILES)
    device: str = flag(None, "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one", ADVANCED)
    weights: Any = field(default=None, repr=False)  # no flag: what the weights say of themselves, see `complete`

    @property
    def guided(self) -> bool:
        """Whether the network is evaluated with guidance, on two rows a picture: a grid always is, where it can be."""
        return self.weights is None or self.weights.null_class

    @property
    def latent_size(self) -> int:
        """Side of the latent: the VAE's factor is 8."""
        return self.image_size // 8

    @property
    def ddim_eta(self) -> float | None:
        """DDIM's η; None for ancestral sampling."""
        return self.eta if self.sampler == "ddim" else None

    @property
    def pictures(self) -> str:
        """What is made, in words."""
        seeds = f" × {len(self.seed_list)} seeds" if self.seed_list else ""
        return f"{len(self.labels)} label{'s' * (len(self.labels) > 1)}{seeds}"

    @property
    def smaller_batch(self) -> str:
        """The flag that asks for so large a batch, and what to do where it does not fit in memory."""
        if self.batch_size:
            return f"--batch-size {self.batch_size}: does not fit in free GPU memory; use a smaller one"
        n = len(self.labels)
        return f"--labels: {n} pictures at a time do not fit in free GPU memory; use --batch-size {max(1, n // 2)}"

    @property
    def into_folder(self) -> bool:
        """Whether every picture becomes a file of its own in the folder `output`."""
        return self.output_type == "image" and (self.output.endswith("/") or Path(self.output).is_dir())

    @property
    def picture_names(self) -> list[str]:
        """The file names of pictures in a folder."""
        names = self.class_names
        return [
            f"{index:03d}-{label}{'-' + file_name(names[label].split(',')[0]) if names else ''}.png"
            for index, label in enumerate(self.labels)
        ]

    def for_each_seed(self) -> "list[SamplingOptions]":
        """These options, or for each of `seed_list` a copy with an output of its own."""
        if self.seed_list is None:
            return [self]
        path = Path(self.output)
        start, end = (f"{path}/", "/") if self.into_folder else (f"{path.with_suffix('')}-", path.suffix)
        return [replace(self, seed=n, seed_list=None, output=f"{start}seed-{n}{end}") for n in self.seed_list]

    def resolve(self) -> "SamplingOptions":
        """Check types and choices, fill in what the model implies, and check all that can be checked without torch.
        With a `ckpt` what follows from its weights stays None until `complete`. Returns self.

        Raises UsageError, naming the flag and the remedy.
        """
        self._check_types()
        if self.ckpt is None:
            self._fill(self.model or "DiT-XL/2")
        self._check()
        return self

    def _check_types(self):
        for item in fields(self):
            if item.metadata and getattr(self, item.name) is not None:
                setattr(self, item.name, checked(self, item))

    def complete(self, weights: Any) -> "SamplingOptions":
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
        implied = {"model": model, **IMAGENET, **DEFAULTS_OF.get(model, {})}
        if self.num_classes not in (None, implied["num_classes"]):
            implied["labels"] = tuple(range(min(self.num_classes, 8)))
        for name, value in implied.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _check(self):
        """Refuse what the values that are known so far forbid."""
        if self.weights is None and self.model not in (None, *MODELS):
            raise UsageError(f"--model {shown(self.model)}: unknown; choose from {', '.join(MODELS)}")
        patch = self.weights.patch_size if self.weights is not None else int((self.model or "/2").rpartition("/")[2])
        if self.image_size is not None and self.image_size % (8 * patch):
            raise UsageError(
                f"--image-size {self.image_size}: must be a multiple of {8 * patch} (VAE factor 8, patch {patch})"
            )
        if self.labels is not None and self.num_classes is not None:
            self._find_labels()
        if not 1 <= self.cfg_scale < float("inf"):
            raise UsageError(f"--cfg-scale {self.cfg_scale:g}: must be at least 1 (1 is no guidance)")
        if self.weights is not None and not self.weights.null_class and self.cfg_scale != 1:
            raise UsageError(
                f"--cfg-scale {self.cfg_scale:g}: guidance needs a null class, and these weights were trained without "
                f"(label table of {self.num_classes} rows); use --cfg-scale 1"
            )
        if self.seed_list is not None and self.seed != 0:
            raise UsageError(f"--seeds: conflicts with {flag_names(type(self), 'seed')[0]} {self.seed}; give one")
        if self.seed_list is not None and len(set(self.seed_list)) < len(self.seed_list):
            raise UsageError("--seeds: names a seed twice, and each has a file of its own; name it once")
        for seed in self.seed_list or (self.seed,):
            if not -(2**63) <= seed < 2**64:
                raise UsageError(f"{flag_names(type(self), 'seed')[0]} {shown(str(seed))}: must fit in 64 bits")
        if not 0 <= self.eta <= 1 or self.eta and self.sampler == "ddpm":
            raise UsageError(f"--eta {self.eta:g}: must be from 0 to 1, and is for --sampler ddim")
        if self.precision == "exact" and (self.model or "").startswith("Large-DiT"):
            raise UsageError("--precision exact: is for DiT only; use --precision fp32, or fp16")
        if self.sampler == "ddim" and self.forecast == "plan":
            raise UsageError("--forecast plan: plans are made for --sampler ddpm; drop one of them")
        if self.weights is not None and not self.weights.learn_sigma and self.forecast == "plan":
            raise UsageError("--forecast plan: needs weights with learned sigma, which these have not; drop it")
        if self.forecast_plan is not None and self.forecast != "plan":
            raise UsageError(f"--forecast-plan {self.forecast_plan}: is for --forecast plan; add that or drop this")
        suffix = ".npy" if self.output_type == "latent" else ".png"
        self.output = self.output or f"sample{suffix}"
        if not self.into_folder and Path(self.output).suffix.lower() != suffix:
            folder = ", or name a folder (FOLDER/)" if self.output_type == "image" else ""
            raise UsageError(
                f"--output {shown(self.output)}: must end in {suffix} for --output-type {self.output_type}{folder}"
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of every class; () where they are unknown."""
        own = self.weights.class_names if self.weights is not None else ()
        return own if len(own) == self.num_classes else class_names(self.model, self.num_classes)

    def _find_labels(self):
        if not self.labels:
            raise UsageError("--labels: give at least one")
        self.labels = tuple(find_label(label, self.class_names, self.num_classes) for label in self.labels)

    def check_output(self) -> None:
        """Make the output's folder and prove that a file can be written there, before any work is done."""
        check_writable(Path(self.output, "000.png") if self.into_folder else self.output)


@dataclass
class DistributedOptions(SamplingOptions):
    """Options of one job over many processes: a folder for FID with `num_fid_samples`, else one grid."""

    seed: int = flag(
        0,
        "seed of the noise: same seed, device and number of ranks, same pictures",
        WHAT,
        names=("--global-seed", "--seed"),
    )
    num_fid_samples: int = flag(
        None,
        "make so many pictures of random classes, one PNG each, and an .npz for FID; default: one grid of --labels",
        WHAT,
        type=int,
        bounds=(1, 10**9),
    )
    world_independent_noise: bool = flag(
        False,
        "FID: key noise and labels by picture, so that any number of ranks makes the same pictures; default: the usual "
        "stream, a seed a rank",
        WHAT,
        action="store_true",
    )
    balanced_labels: bool = flag(
        False,
        "FID: as many pictures of each class, picture i of class i mod --num-classes; default: random classes",
        WHAT,
        action="store_true",
    )
    per_proc_batch_size: int = flag(32, "FID: pictures that a rank makes at a time", SPEED, type=int, bounds=(1, 10**5))
    tf32: bool = flag(
        None,
        "--tf32 is --precision tf32 where the hardware has it, else fp32; --no-tf32 is --precision fp32",
        SPEED,
        action=argparse.BooleanOptionalAction,
    )
    parallel: str = flag(
        "auto",
        "grid: how GPUs share fewer pictures than there are of them. auto: the fastest layout, measured once a "
        "machine; off: a GPU a picture; or a layout, rows=2,tokens=2,exchange=kv: the rows that guidance doubles, "
        "their tokens, and how tokens attend (kv, push, ulysses). weights=4 divides every layer, for a network that "
        "does not fit in one GPU",
        SPEED,
        metavar="auto|off|rows=N,tokens=N,exchange=NAME|weights=N",
    )
    decode: str = flag(
        "each", "grid: who decodes: each rank its own pictures, or rank0 all", SPEED, choices=("each", "rank0")
    )
    sample_dir: str = flag("samples", "FID: where the folder is made", FILES)

    @property
    def guided(self) -> bool:
        return super().guided if self.num_fid_samples is None else self.cfg_scale > 1

    @property
    def pictures(self) -> str:
        return f"{self.num_fid_samples} pictures" if self.num_fid_samples else super().pictures

    @property
    def smaller_batch(self) -> str:
        if self.num_fid_samples is None:
            return super().smaller_batch
        return f"--per-proc-batch-size {self.per_proc_batch_size}: does not fit in free GPU memory; use a smaller one"

    def resolve(self) -> "DistributedOptions":
        self._check_types()
        if self.tf32 is not None:
            tier = "tf32" if self.tf32 else "fp32"
            if self.precision not in (None, tier):
                name = "--tf32" if self.tf32 else "--no-tf32"
                raise UsageError(f"{name}: conflicts with --precision {self.precision}; give one")
            self.precision = tier
        if self.num_fid_samples is not None:
            if wrong := self._given(OF_A_GRID):
                raise UsageError(
                    f"{wrong}: has no meaning with --num-fid-samples, which draws its labels and fills a folder; "
                    "drop one of them"
                )
        elif self.world_independent_noise:
            raise UsageError(
                "--world-independent-noise: a grid is the same on any number of ranks; use it with --num-fid-samples"
            )
        elif wrong := self._given({"sample_dir", "per_proc_batch_size", "balanced_labels"}):
            raise UsageError(
                f"{wrong}: is for the folder of an FID job, and this makes one grid at --output; "
                "add --num-fid-samples, or drop it"
            )
        _ = self.mesh  # which checks --parallel
        return super().resolve()

    def _fill(self, model):
        super()._fill(model)
        if self.num_fid_samples is not None:
            self.labels = None  # an FID job draws its own

    def _given(self, names):
        """The flag of the first of these fields that is not at its default, or None."""
        given = (item for item in fields(self) if item.name in names and getattr(self, item.name) != item.default)
        return next((flag_names(type(self), item.name)[-1] for item in given), None)

    @property
    def mesh(self) -> dict | None:
        """What `parallel` asks for, as keyword arguments of accel.parallel.planner.Layout; None for auto and off."""
        if self.parallel in ("auto", "off"):
            return None
        items = [item.partition("=")[::2] for item in self.parallel.split(",")]
        given = dict(items)
        for name, value in items:
            number = value.isdecimal() and len(value) < 5 and int(value) > 0
            valid = value in EXCHANGES if name == "exchange" else number
            if not valid or len(given) < len(items) or not any(given.keys() <= family for family in LAYOUTS):
                wrong = shown("=".join((name or "nothing", value)))
                raise UsageError(
                    f"--parallel {shown(self.parallel)}: {wrong}: give auto, off, "
                    f"rows=N,tokens=N,exchange={'|'.join(EXCHANGES)}, or weights=N"
                )
        if "exchange" in given and "tokens" not in given:
            raise UsageError(f"--parallel {self.parallel}: exchange says how tokens are shared; add tokens=N")
        return {name: value if name == "exchange" else int(value) for name, value in given.items()}
