"""Denoising steps: one optimisation after the other, each with its time, its error and its pictures.

    python bench/steps.py --gate 3 --output output/ladder.json
    python bench/steps.py --only "CUDA graph" --vs compile,diffusers --compile max-autotune --output output/versus.json
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

import torch
from tqdm import tqdm

import evaluate
from accel import engine, precision, vae
from accel.fast import FastDiT, Optimisations
from accel.options import OneLineParser, SamplingOptions, UsageError, positive, user_errors
from bench import measure
from diffusion import create_diffusion

PLAIN = Optimisations(hoist=False, rows="torch", products="plain", ends="torch", graph=False)
STEPS = (  # rung → switches; each adds one to the rung before
    ("half GEMMs", {}),
    ("hoisted conditioning", dict(hoist=True)),
    ("fused adaLN kernel", dict(rows="auto")),
    ("attention", dict(attention="auto")),
    ("GELU epilogue", dict(products="epilogue")),
    ("autotuned GEMMs", dict(products="auto")),
    ("patch embedding and sampler update", dict(ends="auto")),
    ("CUDA graph", dict(graph=True)),
)


def ladder(device: torch.device, tiers: list[str]) -> Iterator[tuple[str, str, Optimisations | None]]:
    """(name, tier, switches or None for models.DiT) of every rung that `device` can run."""
    for tier in ("fp32", "tf32"):
        if precision.supports(tier, device):
            yield tier, tier, None
    if precision.supports("exact", device):
        yield "exact", "exact", Optimisations()
    # What plain half precision gets from torch: flash where there is one.
    flash = device.type == "cpu" or precision.supports("bf16", device)
    for tier in tiers:
        switches = replace(PLAIN, attention="flash" if flash else "efficient")
        for name, change in STEPS:
            switches = replace(switches, **change)
            if device.type == "cuda" or name in ("half GEMMs", "hoisted conditioning"):
                yield f"{tier} + {name}", tier, switches


def sampling(network, args: Namespace, device: torch.device) -> Callable:
    """A sampling run of `network` as `loop(progress)`, for time_steps."""
    side, diffusion = args.image_size // 8, create_diffusion("250")
    z = torch.randn(args.pictures, 4, side, side, device=device)
    labels = torch.arange(args.pictures, device=device) % args.num_classes

    def loop(progress):
        engine.denoise(network, diffusion, z, labels, args.cfg_scale, args.num_classes, progress=progress)

    return loop


class Reference:
    """A forward pass in float64 and others' distance to it: a label and the null label, at three timesteps."""

    def __init__(self, model, args: Namespace, device: torch.device):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(2, 4, args.image_size // 8, args.image_size // 8, generator=generator).to(device)
        self.y = torch.tensor([1, args.num_classes], device=device)
        self.t = [torch.full((2,), t, device=device) for t in (980, 500, 20)]
        wide = FastDiT(model.state_dict(), model.num_heads, torch.float64, device, PLAIN)
        self.out = [wide(self.x.double(), t, self.y) for t in self.t]

    @torch.no_grad()
    def error(self, network) -> float:
        outs = [network.forward(self.x, t, self.y).double() for t in self.t]
        return max(float((out - want).norm() / want.norm()) for out, want in zip(outs, self.out))


class Judge:
    """The demo's pictures after 250 guided steps, 64 a seed, against those of fp32 from the same noise."""

    def __init__(self, seeds: int, device: torch.device):
        self.device, self.seeds = device, range(seeds)
        labels = tuple(range(8)) * 8
        self.options = SamplingOptions("DiT-Demo/2", labels=labels, device=str(device), precision="fp32").resolve()
        self.model = engine.load_model(self.options, device)
        self.diffusion = create_diffusion("250")
        self.decoder = vae.load_vae(vae.find_vae(self.options.vae), device)
        self.want = self.pictures("fp32", None)

    def pictures(self, tier: str, switches: Optimisations | None, share: Callable = lambda network: network) -> list:
        """64 pictures a seed, (64, H, W, 3) uint8. share: makes the network one that GPUs share."""
        network = share(measure.build(self.model, tier, switches, self.device))
        options, latents = self.options, []
        labels = torch.tensor(options.labels, device=self.device)
        total, quiet = 250 * len(self.seeds), os.environ.get("RANK", "0") != "0"
        with tqdm(total=total, desc=f"{tier}: pictures", unit="step", leave=False, disable=quiet) as bar:
            for seed in self.seeds:
                z = engine.draw_latents(len(labels), options.latent_size, seed, self.device)
                guidance = options.cfg_scale, options.num_classes
                latents.append(engine.denoise(network, self.diffusion, z, labels, *guidance, progress=bar.update))
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
        meets = {
            name: worst["mae"] <= bar["mae"] and worst["psnr"] > bar["psnr"] and worst["ssim"] >= bar["ssim"]
            for name, bar in evaluate.GATES.items()
        }
        mean = dict(mae=statistics.fmean(mae), ssim=statistics.fmean(ssim))
        return dict(pictures=len(pairs), worst=worst, mean=mean, **meets)


def climb(args: Namespace, device: torch.device, record: Callable) -> None:
    """Time and judge the rungs, then the alternatives; `record` is given the results so far after each."""
    every = list(ladder(device, args.precision))
    rungs = [rung for rung in every if not args.only or any(word in rung[0] for word in args.only)]
    if not (rungs or args.compile or args.vs):
        names = ", ".join(name for name, *_ in every)
        raise UsageError(f"--only {' '.join(args.only)}: no rung on {device} has that in its name; there are {names}")
    model = measure.network_of(args, device)
    reference, results = Reference(model, args, device), []
    judge = Judge(args.gate, device) if args.gate else None

    def add(name, tier, network, judged=None):
        row = dict(rung=name)
        results.append(row)
        try:
            if not args.untimed:
                row |= timed(name, network, args, device)
                record(results)
            if "max-autotune" not in name:  # the compiler would search again for the reference's two batch rows
                row["error"] = reference.error(network)
            if judge and judged:
                row["judged"] = judge.judge(*judged)
        except torch.cuda.OutOfMemoryError:
            row["failed"] = "out of memory"
        record(results)
        print(line(row), flush=True)
        gc.collect()

    for name, tier, switches in rungs:
        judged = (tier, switches) if name != "fp32" else None
        add(name, tier, measure.build(model, tier, switches, device), judged)
    if args.compile or args.vs:
        precision.apply_precision("fp16", device)
    for mode in args.compile:
        torch._dynamo.reset()
        started = time.perf_counter()
        add(
            f"fp16 + torch.compile {mode}",
            "fp16",
            measure.CompiledDiT(measure.network_of(args, device), torch.float16, mode),
        )
        results[-1]["seconds_with_compilation"] = time.perf_counter() - started
        record(results)
    if "diffusers" in args.vs:
        network = measure.DiffusersDiT(model, torch.float16, device)
        add("fp16 + diffusers' DiTTransformer2DModel", "fp16", network)


def timed(name: str, network, args: Namespace, device: torch.device) -> dict:
    """time_steps' record and the memory that activations took."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if before:
        torch.cuda.reset_peak_memory_stats()
    row = measure.time_steps(sampling(network, args, device), device, args.load, args.window, name)
    return row | ({"activations_gb": (torch.cuda.max_memory_allocated() - before) / 1e9} if before else {})


def line(row: dict) -> str:
    """A rung as it is printed."""
    text = f"{row['rung']:40} " + row.get("failed", "")
    if "ms" in row:
        text += f"{row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}]"
    if "error" in row:
        text += f"   error {row['error']:.1e}"
    if "judged" in row:
        judged, worst = row["judged"], row["judged"]["worst"]
        text += f"   worst PSNR {worst['psnr']:.1f}, MAE {255 * worst['mae']:.4f} of 0-255: "
        text += ", ".join(f"{name} {'PASS' if judged[name] else 'FAIL'}" for name in evaluate.GATES)
    return text


def sweep(args: Namespace, device: torch.device, record: Callable) -> None:
    """What a step of the last rung costs as pictures grow in number and in size."""
    cases = dict.fromkeys(
        [(args.image_size, pictures) for pictures in args.sweep_pictures]
        + [(size, args.pictures) for size in args.sweep_sizes]
    )
    name, tier, switches = [rung for rung in ladder(device, args.precision) if precision.supports(rung[1], device)][-1]
    results, before, network = [], None, None
    for size, pictures in cases:
        case = Namespace(**{**vars(args), "image_size": size, "pictures": pictures})
        row = dict(image_size=size, pictures=pictures)
        results.append(row)
        try:
            if before != size:
                network = None  # its memory first
                gc.collect()
                network, before = measure.build(measure.network_of(case, device), tier, switches, device), size
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            loop = sampling(network, case, device)
            row |= dict(
                rung=name, **measure.time_steps(loop, device, args.load, args.window, f"{size} px, {pictures} pictures")
            )
            row["ms_a_picture"] = row["ms"] / pictures
            if device.type == "cuda":
                row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        except torch.cuda.OutOfMemoryError:
            row["failed"] = "out of memory"
        record(results)
        figures = f"{row['ms']:.2f} ms a step, {row['ms_a_picture']:.3f} a picture" if "ms" in row else row["failed"]
        print(f"{size} px, {pictures} pictures: {figures}", flush=True)


def decoding(args: Namespace, device: torch.device, record: Callable) -> None:
    """What decoding costs in each arithmetic, and what it loses against fp32; latents are noise."""
    plain, side, cuda = measure.decoder_of(args, device), args.image_size // 8, device.type == "cuda"
    latents = torch.randn(args.pictures, 4, side, side, generator=torch.Generator(device).manual_seed(0), device=device)
    results, want = [], None
    for arithmetic in (name for name in ("fp32", "tf32", "fp16") if precision.supports(name, device)):
        decoder = vae.CheckedDecoder(plain, arithmetic, "fp32")
        got = vae.decode(decoder, latents)
        want = got if want is None else want
        error = (got.clamp(-1, 1) - want.clamp(-1, 1)).square().mean((1, 2, 3)).sqrt().max()
        row = dict(arithmetic=arithmetic, refused=decoder.refusal, error=float((got - want).norm() / want.norm()))
        row["worst_psnr"] = 20 * math.log10(2 / float(error)) if error else None
        del got
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        times, started = [], time.perf_counter()
        while (now := time.perf_counter() - started) < args.load + args.window or not times:
            engine.synchronize(device)
            start = time.perf_counter()
            vae.decode(decoder, latents)
            engine.synchronize(device)
            if now >= args.load:
                times.append(1e3 * (time.perf_counter() - start))
        row |= dict(measure.spread(times), runs=len(times))
        if cuda:
            row["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        results.append(row)
        record(results)
        memory = f"   {row['mib']:.0f} MiB beside the weights" if cuda else ""
        print(
            f"{arithmetic:5}{row['ms']:9.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}] for {args.pictures} pictures",
            end="",
        )
        print(f"   error {row['error']:.1e}{memory}   {decoder.refusal or ''}", flush=True)


def listed(text: str) -> list[str]:
    """--vs' value: what to compare with, separated by commas."""
    names = text.split(",")
    if set(names) - {"compile", "diffusers"}:
        raise ArgumentTypeError(f"{text}: choose from compile, diffusers, separated by a comma")
    return names


def parse() -> tuple[OneLineParser, Namespace]:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    measure.add_arguments(parser)
    parser.add_argument("--precision", nargs="+", default=["fp16"], choices=tuple(precision.HALF), help="half tiers")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rungs with such a word in their name")
    modes = dict(nargs="*", default=[], choices=("default", "max-autotune"))
    parser.add_argument("--compile", **modes, help="modes of torch.compile to compare with")
    what = "alternatives to time on the same weights: compile (in the modes of --compile, or its default), diffusers"
    parser.add_argument("--vs", type=listed, default=[], metavar="WHAT,WHAT", help=what)
    parser.add_argument("--gate", type=int, default=0, metavar="SEEDS", help="judge the demo's pictures, 64 a seed")
    parser.add_argument("--untimed", action="store_true", help="errors and pictures only")
    numbers = dict(nargs="+", type=positive, default=[])
    parser.add_argument("--sweep-pictures", **numbers, metavar="N", help="instead: the last rung's step at these")
    parser.add_argument("--sweep-sizes", **numbers, metavar="PX", help="the same at these sizes of a picture")
    parser.add_argument("--decoder", action="store_true", help="instead: decoding in fp32, tf32 and fp16")
    parser.add_argument("--vae", help="--decoder's decoder, as in sample.py (default: a random one; the demo's own)")
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    with user_errors(parser):
        for flag, given in (("--vs", args.vs), ("--compile", args.compile)):
            if given and engine.choose_device(args).type != "cuda":
                raise UsageError(f"{flag}: compares float16 on a GPU, and this is none; leave it out")
        device = measure.prepare(args)
        if "compile" in args.vs and not args.compile:
            args.compile = ["default"]
        for size in args.sweep_sizes:
            engine.network_shape(SamplingOptions(args.model, image_size=size, labels=(0,)).resolve())
        kind, results, work = "steps", "rungs", climb
        if args.decoder or args.sweep_pictures or args.sweep_sizes:
            kind = results = "decoder" if args.decoder else "sweep"
            work = decoding if args.decoder else sweep
        about = dict(kind=kind, **measure.provenance(device, args.commit), copy_tb_s=measure.copy_tb_s(device))
        print(", ".join(f"{name} {about[name]}" for name in ("gpu", "torch", "commit", "copy_tb_s")), flush=True)
        about |= dict(model=args.model, image_size=args.image_size, pictures=args.pictures)
        about |= dict(batch_rows=2 * args.pictures, load_seconds=args.load)
        work(args, device, lambda rows: measure.write(args.output, about | {results: rows}))


if __name__ == "__main__":
    main()
