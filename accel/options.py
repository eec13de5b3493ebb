"""What a sampling run is told: every option once, with its default, its flag and its check."""

import argparse
import os
import sys
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from accel.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "pretrained_models" / "demo"

# What a model implies for the options that the user leaves open. Published weights exist for XL/2 at 256 and 512 px.
DEFAULTS_OF = {
    "DiT-Demo/2": dict(
        image_size=128, num_classes=8, labels=tuple(range(8)), vae=str(DEMO / "vae"), ckpt=str(DEMO / "dit.safetensors")
    ),
}
EXCHANGES = ("kv", "push", "ulysses", "ring")  # of accel/parallel/exchanges.py
PLANS = {"rows", "tokens", "exchange"}, {"weights"}, {"stages", "patches", "warmup"}  # what can be asked for together
IMAGENET = dict(image_size=512, num_classes=1000, labels=(207, 360, 387, 974, 88, 979, 417, 279), vae="ema", ckpt=None)


def flag(default, help, **argument):
    return field(default=default, metadata=dict(help=help, **argument))


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


@dataclass
class SamplingOptions:
    """Options of one sampling run. Those left None follow from `model` (see `resolve`)."""

    model: str = flag("DiT-XL/2", "network, a key of models.DiT_models; DiT-Demo/2 ships with its weights")
    ckpt: str = flag(
        None,
        "weights: a .pt or .safetensors file, a published name (DiT-XL-2-512x512.pt) or a folder in "
        "diffusers' layout; default: the published weights for the image size",
    )
    vae: str = flag(None, "latent decoder: ema or mse (sd-vae-ft-*), or a folder in diffusers' layout; default: ema")
    image_size: int = flag(None, "side of a picture in pixels, a multiple of 16; default: 512", type=int)
    num_classes: int = flag(None, "number of classes the network knows; default: 1000", type=int)
    labels: tuple = flag(
        None, "class of each picture; default: eight ImageNet classes", nargs="+", type=int, metavar="LABEL"
    )
    cfg_scale: float = flag(4.0, "strength of classifier-free guidance, 1 or more", type=float)
    num_sampling_steps: int = flag(250, "denoising steps, up to 1000", type=int)
    seed: int = flag(0, "seed of the noise: same seed and device, same pictures", type=int)
    precision: str = flag(
        None,
        "fp16: float16 products with all else in float32, the fast one; bf16: for weights that overflow float16; "
        "tf32: float32 with TF32 products, as DiT ships; fp32: true float32; exact: fp32's pictures from float16 "
        "tensor cores; default: fp16 on a GPU with tensor cores (bf16 if the weights overflow it), else fp32",
        choices=("fp32", "exact", "tf32", "fp16", "bf16"),
    )
    vae_precision: str = flag(
        "auto",
        "the decoder's arithmetic. fp16: a fraction of the time and memory, used where a check of its weights shows that it holds; "
        "tf32: float32 with TF32 convolutions; fp32: true float32; auto: fp16 beside fp16 and bf16, else as --precision",
        choices=("auto", "fp32", "tf32", "fp16"),
    )
    forecast: str = flag(
        "off",
        "off: the network is called at every step; plan: as scripts/calibrate.py found to be enough for these weights, whose "
        "pictures it showed to pass the gate; auto: as the error measured while sampling asks for",
        choices=("off", "plan", "auto"),
    )
    forecast_plan: str = flag(None, "the plan's file; default: beside the checkpoint, CKPT.forecast.json")
    forecast_tolerance: float = flag(
        0.0002,
        "auto: error that calls for several steps may make; smaller calls more, and comes nearer to all calls",
        type=float,
    )
    compile: bool = flag(
        False,
        "run the plain network through torch.compile(max-autotune) instead of our kernels; takes minutes to start",
        action="store_true",
    )
    device: str = flag(None, "where to sample, such as cuda, cuda:1 or cpu; default: a GPU if there is one")
    output: str = flag(None, "file to write, its folders are made; default: sample.png, or sample.npy for latents")
    output_type: str = flag(
        "image",
        "image: one PNG, four pictures a row; latent: float32 .npy (n, 4, L, L), no decoder needed",
        choices=("image", "latent"),
    )
    repeats: int = flag(1, "time the sampling this often after a warm-up: median and spread", type=positive)

    @property
    def latent_size(self):
        """Side of the latent: the VAE's factor is 8."""
        return self.image_size // 8

    def resolve(self):
        """Fill what the model implies, then check everything that can be checked without torch. Returns self.

        Raises UsageError, naming the flag and the remedy.
        """
        for name, value in {**IMAGENET, **DEFAULTS_OF.get(self.model, {})}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.image_size < 16 or self.image_size % 16:
            raise UsageError(f"--image-size {self.image_size}: must be a multiple of 16 (VAE factor 8, patch 2)")
        if self.num_classes < 1:
            raise UsageError(f"--num-classes {self.num_classes}: must be at least 1")
        wrong = [label for label in self.labels if not 0 <= label < self.num_classes]
        if wrong:
            raise UsageError(f"--labels {wrong[0]}: the model knows classes 0 to {self.num_classes - 1}")
        if not self.cfg_scale >= 1 or self.cfg_scale == float("inf"):
            raise UsageError(f"--cfg-scale {self.cfg_scale:g}: must be at least 1 (1 is no guidance)")
        if not 1 <= self.num_sampling_steps <= 1000:
            raise UsageError(f"--num-sampling-steps {self.num_sampling_steps}: must be from 1 to 1000")
        if not -(2**63) <= self.seed < 2**64:
            raise UsageError(
                f"--{'global-' * isinstance(self, DistributedOptions)}seed {self.seed}: must fit into 64 bits"
            )
        if self.forecast_plan is not None and self.forecast != "plan":
            raise UsageError(
                f"--forecast-plan {self.forecast_plan}: is read with --forecast plan only; add that or drop this"
            )
        if not 0 < self.forecast_tolerance < float("inf"):
            raise UsageError(f"--forecast-tolerance {self.forecast_tolerance:g}: must be over 0")
        suffix = ".npy" if self.output_type == "latent" else ".png"
        self.output = self.output or f"sample{suffix}"
        if Path(self.output).suffix.lower() != suffix:
            raise UsageError(f"--output {self.output}: must end in {suffix} for --output-type {self.output_type}")
        return self

    def check_output(self):
        """Make the output's folder and prove that a file can be written there, before any work is done."""
        check_writable(self.output)


@dataclass
class DistributedOptions(SamplingOptions):
    """Options of one job over many processes. With `num_fid_samples` it makes a folder for FID, without it one picture grid."""

    seed: int = flag(
        0, "seed of the noise: same seed, device and number of ranks, same pictures", names=("--global-seed", "--seed")
    )
    num_fid_samples: int = flag(
        None,
        "make so many pictures of random classes, one PNG each, and an .npz for FID; default: one grid of --labels",
        type=positive,
    )
    per_proc_batch_size: int = flag(32, "pictures that a rank makes at a time for FID", type=positive)
    sample_dir: str = flag("samples", "where the folder of an FID job is made")
    world_independent_noise: bool = flag(
        False,
        "FID: key noise and labels by picture, so that any number of ranks makes the same pictures; "
        "default: the usual stream, a seed a rank",
        action="store_true",
    )
    tf32: bool = flag(
        None, "--tf32 is --precision tf32, --no-tf32 is --precision fp32", action=argparse.BooleanOptionalAction
    )
    parallel: str = flag(
        "auto",
        "grid: how GPUs share fewer pictures than there are of them. auto: measured, the fastest; off: a GPU a picture; or a mesh, "
        "rows=2,tokens=2,exchange=kv: the rows that guidance doubles, their tokens, and how tokens attend (kv, push, ulysses, ring). "
        "weights=4 divides every layer, for a network that does not fit into one GPU (fp32, tf32); "
        "stages=4,patches=8,warmup=25 is PipeFusion, which is approximate",
        metavar="auto|off|rows=N,tokens=N,exchange=NAME|weights=N|stages=N,patches=N,warmup=N",
    )
    decode: str = flag(
        "local",
        "grid: local: every rank decodes its own latents; gather: rank 0 decodes all",
        choices=("local", "gather"),
    )

    def resolve(self):
        def given(*names):
            """The flag of the first of these fields that is not at its default."""
            return next(
                (
                    flag_names(item)[-1]
                    for item in fields(self)
                    if item.name in names and getattr(self, item.name) != item.default
                ),
                None,
            )

        if self.tf32 is not None:
            tier = "tf32" if self.tf32 else "fp32"
            if self.precision not in (None, tier):
                raise UsageError(
                    f"--{'' if self.tf32 else 'no-'}tf32: conflicts with --precision {self.precision}; give one"
                )
            self.precision = tier
        if self.num_fid_samples is not None:
            if wrong := given("labels", "output", "repeats", "output_type", "parallel", "decode"):
                raise UsageError(
                    f"{wrong}: has no meaning with --num-fid-samples, which draws its labels and fills a folder; drop one of them"
                )
        elif self.world_independent_noise:
            raise UsageError(
                "--world-independent-noise: a grid is the same on any number of ranks; use it with --num-fid-samples"
            )
        elif wrong := given("sample_dir", "per_proc_batch_size"):
            raise UsageError(
                f"{wrong}: is for the folder of an FID job, and this makes one grid at --output; add --num-fid-samples, or drop it"
            )
        if self.mesh is not None and self.compile:
            raise UsageError(
                f"--compile: compiles a whole network, not a part of one; drop it or --parallel {self.parallel}"
            )
        if self.mesh is not None and "stages" in self.mesh and self.forecast != "off":
            raise UsageError(
                f"--forecast {self.forecast}: its calls lie further apart than PipeFusion's reuse of the last step allows for; drop one of them"
            )
        return super().resolve()

    @property
    def mesh(self):
        """What `parallel` asks for as keyword arguments of accel.parallel.planner.Layout; None for auto and off. Raises UsageError."""
        if self.parallel in ("auto", "off"):
            return None
        items = [item.partition("=")[::2] for item in self.parallel.split(",")]
        given = dict(items)
        for name, value in items:
            number = value.isdecimal() and (int(value) > 0 or name == "warmup")
            if (
                not (value in EXCHANGES if name == "exchange" else number)
                or not any(given.keys() <= family for family in PLANS)
                or len(given) < len(items)
            ):
                raise UsageError(
                    f"--parallel {self.parallel}: {name or 'nothing'}={value}: give auto, off, rows=N,tokens=N,exchange="
                    f"{'|'.join(EXCHANGES)}, or weights=N, or stages=N,patches=N,warmup=N"
                )
        for name, of in (("exchange", "tokens"), ("patches", "stages"), ("warmup", "stages")):
            if name in given and of not in given:
                raise UsageError(f"--parallel {self.parallel}: {name} says how {of} are shared; add {of}=N")
        return {name: value if name == "exchange" else int(value) for name, value in given.items()}


class _Once(argparse.Action):
    """Stores a value and refuses a second, different one: of two checkpoints only one can be meant."""

    def __call__(self, parser, namespace, value, option_string=None):
        earlier = getattr(namespace, self.dest)
        if earlier is not None and earlier != value:
            parser.error(f"{option_string} {value}: conflicts with {option_string} {earlier}; give one")
        setattr(namespace, self.dest, value)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line; exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def flag_names(item):
    """The flags of a field, its own first."""
    return item.metadata.get("names", ("--" + item.name.replace("_", "-"),))


def add_arguments(parser, options=SamplingOptions, leave_out=()):
    """Add a flag for every field of `options` but those in `leave_out`."""
    for item in fields(options):
        if item.name in leave_out:
            continue
        argument = dict(item.metadata)
        if item.default is None and not argument.keys() & {"nargs", "type", "choices", "action"}:
            argument["action"] = _Once
        if item.default not in (None, MISSING) and "action" not in argument:
            argument["help"] += f" (default: {item.default})"
            argument.setdefault("type", type(item.default))
        argument.pop("names", None)
        parser.add_argument(*flag_names(item), dest=item.name, default=item.default, **argument)


def options_from(args, options=SamplingOptions):
    """The parsed flags as resolved options."""
    known = {item.name for item in fields(options)}
    return options(**{name: value for name, value in vars(args).items() if name in known}).resolve()


def check_writable(path, flag="--output"):
    """Make the folder of the file `path`, which `flag` names, and prove that it can be written. Raises UsageError."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"{flag} {path}: is a folder, a device or a pipe; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as partial:
            partial.touch()
            partial.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot write there ({error.strerror}); choose another path") from None


@contextmanager
def partial_file(path):
    """A path beside `path` to write to; renamed to `path` when the block ends well, removed when it does not (an error, Ctrl-C),
    so that a file of the final name is always whole. A block that writes nothing leaves nothing."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        if partial.exists():
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def user_errors(parser):
    """Turn a UsageError into its line and exit status 2, Ctrl-C into a line and 130."""
    try:
        yield
    except UsageError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
