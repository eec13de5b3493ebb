"""Denoising steps: one optimisation after the other, each with its time, its error and its pictures.

    python bench/steps.py --gate 3 --output output/ladder.json
    python bench/steps.py --only "CUDA graph" --vs compile,max-autotune,diffusers --output output/versus.json
    python bench/steps.py --only exact --backends exact:gemm=cublas,attention=cublas --output output/backends.json
    python bench/steps.py --decoder --output output/decoder.json

Times are of whole steps in the sampling loop that sample.py runs (guidance, update and noise draw included, no
decoder): median, 10th and 90th percentile, after --load seconds of the same steps. Weights are random and not zero,
except the demo's: a fresh DiT outputs zeros. Errors are relative, ‖out − ref‖ / ‖ref‖, of one forward pass against
float64. --gate judges 250-step pictures of the family's demo, or of one with its prediction, against fp32's from the
same noise. To compare two trees, run it in each, with --commit for a tree that git does not know.
"""

if not __package__:
    __import__("_as_module")

import copy
import gc
import os
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
from tqdm import tqdm

import evaluate
from accel import precision
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.families import family_of
from accel.latents import LatentSpace, files
from accel.latents.decoder import Decoder
from accel.latents.pixels import to_uint8
from accel.network import Network
from bench import harness
from bench.harness import BACKENDS, HALF
from bench.rival import RIVALS, Rival

STEPS = (  # rung → switches of harness.build; each adds one to the rung before
    ("half GEMMs", {}),
    ("hoisted conditioning", dict(hoist=True)),
    ("fused adaLN kernel", dict(adaln="auto")),
    ("attention", dict(attention="auto")),
    ("GELU epilogue", dict(gemm="epilogue")),
    ("autotuned GEMMs", dict(gemm="auto")),
    ("CUDA graph", dict(graph=True)),
)
Rung = tuple[str, str, dict]  # name, tier, switches


def ladder(device: torch.device, tiers: list[str]) -> Iterator[Rung]:
    """Yield every rung that `device` can run; tiers: the half tiers that are climbed step by step."""
    for tier in ("fp32", "tf32", "exact"):
        if precision.supports(tier, device):
            yield tier, tier, {}
    # Plain half precision gets torch's flash attention where there is one.
    flash = precision.supports("bf16", device)
    for tier in (tier for tier in tiers if precision.supports(tier, device)):
        switches = harness.PLAIN | dict(attention="flash" if flash else "efficient")
        for name, change in STEPS:
            switches = switches | change
            yield f"{tier} + {name}", tier, switches


class Reference:
    """A forward pass in float64 and others' distance to it: a label and the null label, at three timesteps."""

    def __init__(self, model: torch.nn.Module, args: Namespace, device: torch.device):
        generator, side = torch.Generator().manual_seed(1), args.image_size // harness.space_of(args.model).factor
        self.x = torch.randn(2, model.in_channels, side, side, generator=generator).to(device)
        self.y = torch.tensor([1, args.num_classes], device=device)
        times = (0.02, 0.5, 0.98) if family_of(args.model).prediction == "velocity" else (980, 500, 20)
        self.t = [torch.full((2,), t, device=device) for t in times]
        wide = harness.build(copy.deepcopy(model).double(), "fp32", device)
        self.out = [wide.forward(self.x.double(), t, self.y) for t in self.t]

    @torch.no_grad()
    def error(self, network: Network) -> float:
        """Return the largest relative error of a network's output."""
        outs = [network.forward(self.x, t, self.y).double() for t in self.t]
        return max(float((out - want).norm() / want.norm()) for out, want in zip(outs, self.out))


class Judge:
    """A demo's pictures after 250 guided steps, 64 a seed, against those of fp32 from the same noise."""

    def __init__(self, seeds: int, device: torch.device, each: int = 64, steps: int = 250, model: str = "DiT-Demo/2"):
        self.device, self.seeds, self.process = device, range(seeds), harness.process_of(model, steps)
        self.options = harness.options_of(model)
        sizes = {name: getattr(self.options, name) for name in ("model", "ckpt", "image_size", "num_classes")}
        self.model = harness.model_of(Namespace(**sizes), device)
        self.labels = torch.arange(each, device=device) % self.options.num_classes
        self.decoder = Decoder(files.find(self.options.vae), device)
        self.want = self.pictures("fp32", {})

    def pictures(self, tier: str, switches: dict, share: Callable = lambda network: network) -> list:
        """Return (n, H, W, 3) uint8 for each seed. share: turns the network into one that GPUs share."""
        network = share(harness.build(self.model, tier, self.device, **switches))
        options, latents, shape = self.options, [], (self.model.in_channels, *2 * [self.options.latent_size])
        total, quiet = self.process.steps * len(self.seeds), os.environ.get("RANK", "0") != "0"
        with tqdm(total=total, desc=f"{tier}: pictures", unit="step", leave=False, disable=quiet) as bar:
            for seed in self.seeds:
                generator = torch.Generator(self.device).manual_seed(seed)
                z = torch.randn(len(self.labels), *shape, generator=generator, device=self.device)
                if self.process.noise_from_cpu:
                    generator = torch.Generator().manual_seed(seed)
                guidance = options.cfg_scale, options.num_classes
                loop = harness.sampling(network, self.process, z, self.labels, *guidance, generator=generator)
                latents.append(loop(lambda *_: bar.update()))
        if self.device.type == "cuda":
            precision.apply_precision("fp32", self.device)  # the decoder is not what is compared
        return [to_uint8(self.decoder.decode(one)).numpy() for one in latents]

    def judge(self, tier: str, switches: dict, **how) -> dict:
        """Return the worst picture's figures, and whether every picture meets each criterion, without LPIPS. MAE is of
        0–1."""
        pairs = [pair for sets in zip(self.want, self.pictures(tier, switches, **how)) for pair in zip(*sets)]
        figures = [(evaluate.mae(a, b) / 255, evaluate.psnr(a, b), evaluate.ssim(a, b)) for a, b in pairs]
        mae, psnr, ssim = zip(*figures)
        worst = dict(mae=max(mae), psnr=min(psnr), ssim=min(ssim))
        in_levels = worst | dict(mae=255 * worst["mae"])
        meets = {name: all(evaluate.judge(in_levels, bars).values()) for name, bars in evaluate.GATES.items()}
        return dict(pictures=len(pairs), worst=worst, **meets)


def climb(args: Namespace, device: torch.device) -> Iterator[dict]:
    """Yield the rungs, timed and judged, then the rivals."""
    model = harness.model_of(args, device)
    reference = Reference(model, args, device)
    judge = Judge(args.gate, device, model=harness.demo_of(args.model)) if args.gate else None

    def rung(name, make):
        gc.collect()  # the memory of the rung before
        row, started = dict(rung=name), time.perf_counter()
        try:
            network = make()
            loop = harness.batch(network, args, device)
            row |= harness.time_steps(loop, device, args.load, args.window, name)
            row["seconds"] = time.perf_counter() - started
            if "max-autotune" not in name:  # the compiler would search again for the reference's two batch rows
                row["error"] = reference.error(network)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        return row

    for name, tier, switches in rungs_of(args, device):
        row = rung(name, partial(harness.build, model, tier, device, **switches))
        yield row | (dict(judged=judge.judge(tier, switches)) if judge and name != "fp32" and "ms" in row else {})
    for what in args.vs:
        precision.apply_precision("fp16", device)
        torch._dynamo.reset()
        make = partial(Rival, what, harness.model_of(args, device), torch.float16, device)
        mode = "diffusers' DiTTransformer2DModel" if what == "diffusers" else what.replace("compile", "default")
        yield rung(f"fp16 + {mode}" if what in ("diffusers", "eager") else f"fp16 + torch.compile {mode}", make)


def rungs_of(args: Namespace, device: torch.device) -> list[Rung]:
    """Return the rungs of the ladder that --only names, and of --backends. Raises UsageError if there are none."""
    for _, tier, _ in args.backends:
        if not precision.supports(tier, device):
            raise UsageError(f"--backends {tier}: {device} cannot run that tier; leave it out")
    every = list(ladder(device, args.precision))
    rungs = [rung for rung in every if not args.only or any(word in rung[0] for word in args.only)]
    if not (rungs or args.backends or args.vs):
        names = ", ".join(name for name, *_ in every)
        raise UsageError(f"--only {' '.join(args.only)}: no rung on {device} has that in its name; there are {names}")
    return rungs + args.backends


def decoding(args: Namespace, device: torch.device) -> Iterator[dict]:
    """Yield the time of decoding noise in each arithmetic and its error against fp32: --vae, the demo's own decoder, or
    one with random weights."""
    name = args.vae or harness.options_of(args.model).vae
    if name in files.PUBLISHED and not args.vae:
        space, plain = LatentSpace(), harness.random_decoder(device)
    else:
        space = files.find(name)
        plain = files.load(space, device)
    shape = args.pictures, space.channels, args.image_size // space.factor, args.image_size // space.factor
    latents = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    want = None
    for arithmetic in (name for name in ("fp32", "tf32", "fp16") if precision.supports(name, device)):
        decoder = Decoder(space, device, arithmetic, network=plain)
        got = decoder.decode(latents)
        want = got if want is None else want
        row = dict(arithmetic=arithmetic, refused=decoder.refusal, error=float((got - want).norm() / want.norm()))
        del got
        loop = harness.repeated(partial(decoder.decode, latents))
        yield row | harness.time_steps(loop, device, args.load, args.window, arithmetic)


def line(row: dict) -> str:
    """Return a row as text."""
    name = row.get("rung") or row.get("arithmetic")
    text = f"{name:40} " + row.get("failed", "")
    if "ms" in row:
        text += f"{row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}]"
    if "error" in row:
        text += f"   error {row['error']:.1e}"
    if "judged" in row:
        judged, worst = row["judged"], row["judged"]["worst"]
        text += f"   worst PSNR {worst['psnr']:.1f}, MAE {255 * worst['mae']:.4f} of 0-255, without LPIPS: "
        text += ", ".join(f"{name} {'PASS' if judged[name] else 'FAIL'}" for name in evaluate.GATES)
    return f"{text}   {row.get('refused') or ''}".rstrip()


def listed(text: str) -> list[str]:
    """Return the rivals that a value of --vs names, separated by commas."""
    names = text.split(",")
    if set(names) - set(RIVALS):
        raise ArgumentTypeError(f"{text}: choose from {', '.join(RIVALS)}, separated by commas")
    return names


def backends(text: str) -> Rung:
    """Return the rung that a value of --backends names: a tier and its switches."""
    tier, _, rest = text.partition(":")
    given, known = dict(item.partition("=")[::2] for item in rest.split(",")), BACKENDS.get(tier)
    if known is None:
        raise ArgumentTypeError(f"{text}: begin with one of {', '.join(BACKENDS)} and a colon")
    for name, backend in given.items():
        if backend not in known.get(name, ()):
            names = f"{name}={'|'.join(known[name])}" if name in known else ", ".join(f"{name}=…" for name in known)
            raise ArgumentTypeError(f"{text}: {tier} takes {names}")
    return f"{tier} + {rest}", tier, given


def parse() -> tuple[OneLineParser, Namespace]:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument("--precision", nargs="+", default=["fp16"], choices=HALF, help="half tiers")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rungs with such a word in their name")
    what = "also these backends of a tier's gemm, attention or adaln, the others as they are by default"
    form = "TIER:NAME=BACKEND,NAME=BACKEND"
    parser.add_argument("--backends", nargs="+", type=backends, default=[], metavar=form, help=what)
    what = f"the same weights in float16 as others run them: {', '.join(RIVALS)} (compile: torch.compile)"
    parser.add_argument("--vs", type=listed, default=[], metavar="WHAT,WHAT", help=what)
    parser.add_argument("--gate", type=int, default=0, metavar="SEEDS", help="judge a demo's pictures, 64 a seed")
    parser.add_argument("--decoder", action="store_true", help="instead: decoding in fp32, tf32 and fp16")
    parser.add_argument("--vae", help="--decoder's decoder, as in sample.py (default: a random one; the demo's own)")
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    with user_errors(parser):
        device = harness.prepare(args)
        if args.vs and device.type != "cuda":
            raise UsageError("--vs: compares float16 on a GPU, and this is none; leave it out")
        if "diffusers" in args.vs and family_of(args.model) is not family_of("DiT-XL/2"):
            raise UsageError(f"--vs diffusers: has no {args.model}; leave it out")
        rungs_of(args, device)
        kind, work = ("decoder", decoding) if args.decoder else ("steps", climb)
        record = dict(kind=kind, **harness.provenance(device, args.commit))
        print(", ".join(f"{name} {record[name]}" for name in ("gpu", "torch", "commit")), flush=True)
        record |= dict(model=args.model, image_size=args.image_size, pictures=args.pictures)
        record |= dict(batch_rows=2 * args.pictures, load_seconds=args.load)
        rows = record["rungs" if kind == "steps" else kind] = []
        for row in work(args, device):
            rows.append(row)
            harness.write(args.output, record)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
