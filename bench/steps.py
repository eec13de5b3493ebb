"""Denoising steps: one optimisation after the other, each with its time, its error and its pictures.

    python bench/steps.py --gate 3 --output output/ladder.json
    python bench/steps.py --only "CUDA graph" --vs compile,max-autotune,diffusers --output output/versus.json
    python bench/steps.py --only exact --backends exact:gemm=triton,attention=cublas --output output/backends.json
    python bench/steps.py --sweep-pictures 1 2 4 8 16 32 64 --sweep-sizes 256 512 1024 --output output/sweep.json
    python bench/steps.py --decoder --output output/decoder.json

Times are of whole steps in the sampling loop that sample.py runs (guidance, update and noise draw included, no
decoder): median, 10th and 90th percentile, after --load seconds of the same steps. Weights are random and not zero,
except the demo's: a fresh DiT outputs zeros. Errors are relative, ‖out − ref‖ / ‖ref‖, of one forward pass against
float64. --gate judges 250-step pictures of the demo against fp32's from the same noise. --decoder times decoding
instead.
"""

if not __package__:
    __import__("_as_module")

import gc
import math
import os
import statistics
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

import evaluate
from accel import engine, precision, vae
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.fast.dit import FastDiT, Optimisations
from accel.flags import positive
from accel.kernels import adaln, attention, linear, patch_embed, split_attention, split_linear
from accel.network import Network
from accel.options import SamplingOptions
from accel.sampler import denoise, initial_noise
from bench import measure
from diffusion import create_diffusion

HALF = tuple(name for name, tier in precision.TIERS.items() if tier.dtype != torch.float32)
PLAIN = Optimisations(hoist=False, adaln="torch", gemm="torch", embed_update="torch", graph=False)
STEPS = (  # rung → switches; each adds one to the rung before
    ("half GEMMs", {}),
    ("hoisted conditioning", dict(hoist=True)),
    ("fused adaLN kernel", dict(adaln="auto")),
    ("attention", dict(attention="auto")),
    ("GELU epilogue", dict(gemm="epilogue")),
    ("autotuned GEMMs", dict(gemm="auto")),
    ("patch embedding and sampler update", dict(embed_update="auto")),
    ("CUDA graph", dict(graph=True)),
)
SHARED = dict(adaln=adaln.BACKENDS, embed_update=patch_embed.BACKENDS)
BACKENDS = {  # of a tier's switches
    **dict.fromkeys(HALF, SHARED | dict(gemm=linear.BACKENDS, attention=attention.BACKENDS)),
    "exact": SHARED | dict(gemm=split_linear.BACKENDS, attention=split_attention.BACKENDS),
}
Rung = tuple[str, str, Optimisations | None]  # name, tier, switches: None where models.DiT itself runs

#################################################################################
#                          What is timed, and how it is judged                  #
#################################################################################


def ladder(device: torch.device, tiers: list[str]) -> Iterator[Rung]:
    """Every rung that `device` can run; tiers: the half tiers that are climbed step by step."""
    for tier in ("fp32", "tf32", "exact"):
        if precision.supports(tier, device):
            yield tier, tier, Optimisations() if tier == "exact" else None
    # What plain half precision gets from torch: flash where there is one.
    flash = precision.supports("bf16", device)
    for tier in (tier for tier in tiers if precision.supports(tier, device)):
        switches = replace(PLAIN, attention="flash" if flash else "efficient")
        for name, change in STEPS:
            switches = replace(switches, **change)
            yield f"{tier} + {name}", tier, switches


class Reference:
    """A forward pass in float64 and others' distance to it: a label and the null label, at three timesteps."""

    def __init__(self, model: torch.nn.Module, args: Namespace, device: torch.device):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(2, 4, args.image_size // 8, args.image_size // 8, generator=generator).to(device)
        self.y = torch.tensor([1, args.num_classes], device=device)
        self.t = [torch.full((2,), t, device=device) for t in (980, 500, 20)]
        wide = FastDiT(model.state_dict(), model.num_heads, torch.float64, device, replace(PLAIN, attention="torch"))
        self.out = [wide.forward(self.x.double(), t, self.y) for t in self.t]

    @torch.no_grad()
    def error(self, network: Network) -> float:
        outs = [network.forward(self.x, t, self.y).double() for t in self.t]
        return max(float((out - want).norm() / want.norm()) for out, want in zip(outs, self.out))


class Judge:
    """The demo's pictures after 250 guided steps, 64 a seed, against those of fp32 from the same noise."""

    def __init__(self, seeds: int, device: torch.device):
        self.device, self.seeds = device, range(seeds)
        labels = tuple(range(8)) * 8
        self.options = SamplingOptions("DiT-Demo/2", labels=labels, device=str(device), precision="fp32").resolve()
        self.model = measure.load_model(self.options, device)
        self.diffusion = create_diffusion("250")
        self.decoder = vae.load_vae(vae.find_vae(self.options.vae), device)
        self.want = self.pictures("fp32", None)

    def pictures(self, tier: str, switches: Optimisations | None, share: Callable = lambda network: network) -> list:
        """64 pictures a seed, (64, H, W, 3) uint8. share: makes the network one that GPUs share."""
        network = share(measure.build(self.model, tier, self.device, switches))
        options, latents = self.options, []
        guidance = options.cfg_scale, options.num_classes
        labels = torch.tensor(options.labels, device=self.device)
        total, quiet = self.diffusion.num_timesteps * len(self.seeds), os.environ.get("RANK", "0") != "0"
        with tqdm(total=total, desc=f"{tier}: pictures", unit="step", leave=False, disable=quiet) as bar:
            for seed in self.seeds:
                generator = torch.Generator(self.device).manual_seed(seed)
                z = initial_noise(len(labels), 4, options.latent_size, generator)
                how = dict(generator=generator, on_step=lambda *_: bar.update())
                made = denoise(network, self.diffusion, z, labels, *guidance, **how)
                latents.append(made)
        if self.device.type == "cuda":
            precision.apply_precision("fp32", self.device)  # the decoder is not what is compared
        return [vae.to_uint8(vae.decode(self.decoder, one)).numpy() for one in latents]

    def judge(self, tier: str, switches: Optimisations | None, **how) -> dict:
        """The worst picture's and the mean figures, and whether every picture meets each criterion. LPIPS is left to
        evaluate.py. MAE is of 0–1."""
        pairs = [pair for sets in zip(self.want, self.pictures(tier, switches, **how)) for pair in zip(*sets)]
        figures = [(evaluate.mae(a, b) / 255, evaluate.psnr(a, b), evaluate.ssim(a, b)) for a, b in pairs]
        mae, psnr, ssim = zip(*figures)
        worst = dict(mae=max(mae), psnr=min(psnr), ssim=min(ssim))
        in_levels = worst | dict(mae=255 * worst["mae"])
        meets = {name: all(evaluate.judge(in_levels, bars).values()) for name, bars in evaluate.GATES.items()}
        mean = dict(mae=statistics.fmean(mae), ssim=statistics.fmean(ssim))
        return dict(pictures=len(pairs), worst=worst, mean=mean, **meets)


def timed(name: str, loop: Callable, args: Namespace, device: torch.device) -> dict:
    """time_steps' record and the most GPU memory that was in use."""
    if device.type != "cuda":
        return measure.time_steps(loop, device, args.load, args.window, name)
    torch.cuda.reset_peak_memory_stats()
    row = measure.time_steps(loop, device, args.load, args.window, name)
    return row | dict(peak_gb=torch.cuda.max_memory_allocated() / 1e9)


#################################################################################
#                       Ladder, growth, decoder: rows of the record             #
#################################################################################


def climb(args: Namespace, device: torch.device) -> Iterator[dict]:
    """The rungs, timed and judged, then the alternatives."""
    model = measure.model_of(args, device)
    reference, judge = Reference(model, args, device), Judge(args.gate, device) if args.gate else None

    def rung(name, network, judged=None):
        row = dict(rung=name)
        try:
            row |= timed(name, measure.sampling(network, args, device), args, device)
            if "max-autotune" not in name:  # the compiler would search again for the reference's two batch rows
                row["error"] = reference.error(network)
            if judge and judged:
                row["judged"] = judge.judge(*judged)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        return row

    for name, tier, switches in rungs_of(args, device):
        judged = (tier, switches) if name != "fp32" else None
        yield rung(name, measure.build(model, tier, device, switches), judged)
        gc.collect()
    if args.vs:
        precision.apply_precision("fp16", device)
    for mode in (what for what in args.vs if what != "diffusers"):
        torch._dynamo.reset()
        mode, started = mode.replace("compile", "default"), time.perf_counter()
        compiled = measure.CompiledDiT(measure.model_of(args, device), torch.float16, mode)
        row = rung(f"fp16 + torch.compile {mode}", compiled)
        yield row | dict(seconds_with_compilation=time.perf_counter() - started)
        del compiled  # its memory, before the next is made
        gc.collect()
    if "diffusers" in args.vs:
        yield rung("fp16 + diffusers' DiTTransformer2DModel", measure.DiffusersDiT(model, torch.float16, device))


def rungs_of(args: Namespace, device: torch.device) -> list[Rung]:
    """The ladder's rungs that --only asks for, and those of --backends. Raises UsageError if there are none."""
    for _, tier, _ in args.backends:
        if not precision.supports(tier, device):
            raise UsageError(f"--backends {tier}: {device} cannot run that tier; leave it out")
    every = list(ladder(device, args.precision))
    rungs = [rung for rung in every if not args.only or any(word in rung[0] for word in args.only)]
    if not (rungs or args.backends or args.vs):
        names = ", ".join(name for name, *_ in every)
        raise UsageError(f"--only {' '.join(args.only)}: no rung on {device} has that in its name; there are {names}")
    return rungs + args.backends


def sweep(args: Namespace, device: torch.device) -> Iterator[dict]:
    """What a step of the last rung costs as pictures grow in number and in size."""
    cases = [(args.image_size, pictures) for pictures in args.sweep_pictures]
    cases += [(size, args.pictures) for size in args.sweep_sizes]
    name, tier, switches = list(ladder(device, args.precision))[-1]
    before, network = None, None
    for size, pictures in dict.fromkeys(cases):
        case = Namespace(**{**vars(args), "image_size": size, "pictures": pictures})
        row = dict(image_size=size, pictures=pictures)
        try:
            if before != size:
                network = None  # its memory first
                gc.collect()
                network, before = measure.build(measure.model_of(case, device), tier, device, switches), size
            loop = measure.sampling(network, case, device)
            row |= dict(rung=name, **timed(f"{size} px, {pictures} pictures", loop, args, device))
            row["ms_a_picture"] = row["ms"] / pictures
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        yield row


def decoding(args: Namespace, device: torch.device) -> Iterator[dict]:
    """What decoding costs in each arithmetic, and what it loses against fp32; latents are noise."""
    plain, side = measure.decoder_of(args, device), args.image_size // 8
    latents = torch.randn(args.pictures, 4, side, side, generator=torch.Generator(device).manual_seed(0), device=device)
    want = None
    for arithmetic in (name for name in ("fp32", "tf32", "fp16") if precision.supports(name, device)):
        decoder = vae.CheckedDecoder(plain, arithmetic, "fp32")
        got = vae.decode(decoder, latents)
        want = got if want is None else want
        error = (got.clamp(-1, 1) - want.clamp(-1, 1)).square().mean((1, 2, 3)).sqrt().max()
        row = dict(arithmetic=arithmetic, refused=decoder.refusal, error=float((got - want).norm() / want.norm()))
        row["worst_psnr"] = 20 * math.log10(2 / float(error)) if error else None
        del got
        loop = measure.repeated(partial(vae.decode, decoder, latents))
        yield row | timed(arithmetic, loop, args, device)


def line(row: dict) -> str:
    """A row as it is printed."""
    what = row.get("rung") or row.get("arithmetic")
    if "image_size" in row:
        what = f"{row['image_size']} px, {row['pictures']} pictures"
    text = f"{what:40} " + row.get("failed", "")
    if "ms" in row:
        text += f"{row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}]"
    if "ms_a_picture" in row:
        text += f"   {row['ms_a_picture']:.3f} a picture"
    if "error" in row:
        text += f"   error {row['error']:.1e}"
    if "judged" in row:
        judged, worst = row["judged"], row["judged"]["worst"]
        text += f"   worst PSNR {worst['psnr']:.1f}, MAE {255 * worst['mae']:.4f} of 0-255: "
        text += ", ".join(f"{name} {'PASS' if judged[name] else 'FAIL'}" for name in evaluate.GATES)
    return f"{text}   {row.get('refused') or ''}".rstrip()


#################################################################################
#                                 The command line                              #
#################################################################################


def listed(text: str) -> list[str]:
    """--vs' value: what to compare with, separated by commas."""
    names = text.split(",")
    if set(names) - {"compile", "max-autotune", "diffusers"}:
        raise ArgumentTypeError(f"{text}: choose from compile, max-autotune, diffusers, separated by commas")
    return names


def backends(text: str) -> Rung:
    """A value of --backends: a rung of a tier whose switches are named."""
    tier, _, rest = text.partition(":")
    given, known = dict(item.partition("=")[::2] for item in rest.split(",")), BACKENDS.get(tier)
    if known is None:
        raise ArgumentTypeError(f"{text}: begin with one of {', '.join(BACKENDS)} and a colon")
    for name, backend in given.items():
        if backend not in known.get(name, ()):
            names = f"{name}={'|'.join(known[name])}" if name in known else ", ".join(f"{name}=…" for name in known)
            raise ArgumentTypeError(f"{text}: {tier} takes {names}")
    return f"{tier} + {rest}", tier, Optimisations(**given)


def parse() -> tuple[OneLineParser, Namespace]:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    measure.add_arguments(parser)
    parser.add_argument("--precision", nargs="+", default=["fp16"], choices=HALF, help="half tiers")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rungs with such a word in their name")
    what = "also these backends of a tier's gemm, attention, adaln or embed_update, the others as they are by default"
    form = "TIER:NAME=BACKEND,NAME=BACKEND"
    parser.add_argument("--backends", nargs="+", type=backends, default=[], metavar=form, help=what)
    what = "alternatives to time on the same weights in float16: compile and max-autotune (torch.compile), diffusers"
    parser.add_argument("--vs", type=listed, default=[], metavar="WHAT,WHAT", help=what)
    parser.add_argument("--gate", type=int, default=0, metavar="SEEDS", help="judge the demo's pictures, 64 a seed")
    numbers = dict(nargs="+", type=positive, default=[])
    parser.add_argument("--sweep-pictures", **numbers, metavar="N", help="instead: the last rung's step at these")
    parser.add_argument("--sweep-sizes", **numbers, metavar="PX", help="the same at these sizes of a picture")
    parser.add_argument("--decoder", action="store_true", help="instead: decoding in fp32, tf32 and fp16")
    parser.add_argument("--vae", help="--decoder's decoder, as in sample.py (default: a random one; the demo's own)")
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    with user_errors(parser):
        if args.vs and engine.choose_device(args).type != "cuda":
            raise UsageError("--vs: compares float16 on a GPU, and this is none; leave it out")
        device = measure.prepare(args)
        rungs_of(args, device)
        for size in args.sweep_sizes:
            engine.empty_model(SamplingOptions(args.model, image_size=size, labels=(0,)).resolve())
        kind, work = ("decoder", decoding) if args.decoder else ("steps", climb)
        if args.sweep_pictures or args.sweep_sizes:
            kind, work = "sweep", sweep
        record = dict(kind=kind, **measure.provenance(device, args.commit))
        print(", ".join(f"{name} {record[name]}" for name in ("gpu", "torch", "commit")), flush=True)
        record |= dict(model=args.model, image_size=args.image_size, pictures=args.pictures)
        record |= dict(batch_rows=2 * args.pictures, load_seconds=args.load)
        rows = record["rungs" if kind == "steps" else kind] = []
        for row in work(args, device):
            rows.append(row)
            measure.write(args.output, record)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
