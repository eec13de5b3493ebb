"""Time denoising steps: each optimisation on one GPU, or each layout on many.

    python bench/steps.py --gate 3 --profile --output output/ladder.json
    python bench/steps.py --only "CUDA graph" --vs compile max-autotune --output output/versus.json
    torchrun --standalone --nproc_per_node=4 bench/steps.py --output output/layouts.json

Times are of whole steps in the sampling loop that sample.py runs (guidance, update and
noise draw included, no decoder): median, 10th and 90th percentile, after --load seconds
of the same steps. Weights are random and not zero, except the demo's: a fresh DiT outputs
zeros. Errors are relative, ‖out − ref‖ / ‖ref‖.

One process climbs the ladder: its errors are of one forward pass against float64. --profile
also records each tier as sample.py runs it: the time of GEMMs, attention and all else, this
machine's ceilings, and beside --output a trace for Perfetto (ui.perfetto.dev).
--gate judges 250-step pictures of the family's demo, or of one with its prediction, against
fp32's from the same noise. Ranks share a batch by every layout: times are of the slowest rank,
errors of a guided evaluation against one GPU's. To compare two trees, run it in each, with
--commit for a tree that git does not know.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import copy
import gc
import os
import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

import evaluate
from accel import precision
from accel.cli import OneLineParser, positive, user_errors
from accel.errors import UsageError
from accel.families import family_of
from accel.files import atomic_write
from accel.jobs.grid import load
from accel.jobs.parallel import undivided
from accel.kernels.linear import Tuner
from accel.network import Batch, BlockNetwork, Network
from accel.opening import open_run
from accel.options import Options
from accel.output import check_writable, to_uint8
from accel.ranks import Ranks, layouts
from accel.ranks.launched import launched_ranks, numbers
from accel.ranks.placement import OFF, Layout, Placement
from accel.sampling.guidance import Guidance
from bench import harness
from bench.harness import RIVALS, Rival

STEPS = (  # rung → switches of harness.build; each adds one to the rung before
    ("half GEMMs", {}),
    ("hoisted conditioning", dict(hoist=True)),
    ("fused adaLN kernel", dict(adaln="auto")),
    ("attention", dict(attention="auto")),
    ("GELU epilogue", dict(gemm="epilogue")),
    ("autotuned GEMMs", dict(gemm="auto")),
    ("CUDA graph", dict(graph=True)),
)
LAYOUTS = [
    Layout(tokens=2),
    Layout(rows=2, tokens=2),
    Layout(tokens=4),
    Layout(rows=2),
    Layout(rows=4),
]
# The first kind of work whose pattern a function's name contains. Attention comes first: its
# kernels are named after GEMMs too.
KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|softmax|mha_fwd"),
    (
        "GEMM",
        r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_linear|xmma|wgmma|conv(?!ert)|winograd"
        r"|::(add)?mm$|::bmm$",
    ),
)
OTHER = "element-wise"  # norms, gates, residuals, copies, the sampler
WARM_UP = 3  # steps before the recorded ones
RECORDED = 3  # steps of a profile
MOST = 10  # functions in a profile's record


# ---- the ladder, on one GPU ----


def ladder(device: torch.device, tiers: list[str]) -> Iterator[tuple[str, str, dict]]:
    """Yield every rung as its name, tier and switches of harness.build; half tiers are climbed
    step by step.
    """
    # Plain half precision gets torch's flash attention where there is one.
    attention = "flash" if precision.supports("bf16", device) else "efficient"
    for tier in tiers:
        if precision.TIERS[tier].dtype == torch.float32:
            yield tier, tier, {}
            continue
        switches = {**harness.PLAIN, "attention": attention}
        for name, change in STEPS:
            switches = {**switches, **change}
            yield f"{tier} + {name}", tier, switches


class Reference:
    """A forward pass in float64 and others' distance to it: a label and the null label,
    at three timesteps.
    """

    def __init__(self, model: torch.nn.Module, args: Namespace, device: torch.device):
        generator = torch.Generator().manual_seed(1)
        side = args.latent_size
        self.x = torch.randn(2, model.in_channels, side, side, generator=generator).to(device)
        self.y = torch.tensor([1, args.num_classes], device=device)
        is_flow = family_of(args.model).prediction != "noise"
        times = (0.02, 0.5, 0.98) if is_flow else (980, 500, 20)
        self.t = [torch.full((2,), t, device=device) for t in times]
        wide = harness.build(args.model, copy.deepcopy(model).double(), "fp32", device)
        self.out = [wide.forward(self.x.double(), t, self.y) for t in self.t]

    @torch.no_grad()
    def error(self, network: Network) -> float:
        """Return the largest relative error of a network's output."""
        errors = []
        for t, want in zip(self.t, self.out):
            out = network.forward(self.x, t, self.y).double()
            errors.append(float((out - want).norm() / want.norm()))
        return max(errors)


class Judge:
    """A demo's pictures after 250 guided steps, 64 a seed, against those of fp32 from the
    same noise.
    """

    def __init__(
        self,
        seeds: int,
        device: torch.device,
        each: int = 64,
        steps: int = 250,
        model: str = "DiT-Demo/2",
    ):
        options = Options(model=model, precision="fp32", num_sampling_steps=steps)
        run = open_run(options, device)
        self.reference = load(run)
        self.name = model
        self.model = self.reference.network.model
        self.seeds = range(seeds)
        self.labels = [index % run["num_classes"] for index in range(each)]
        self.want = self.pictures("fp32", {})

    def pictures(self, tier: str, switches: dict, model: torch.nn.Module | None = None) -> list:
        """Return (n, H, W, 3) uint8 for each seed. model: in place of the demo's."""
        device = self.reference.device
        network = harness.build(self.name, model or self.model, tier, device, **switches)
        pipeline = self.reference.with_(network=network, tier=tier)
        latents = [pipeline.latents(self.labels, seed) for seed in self.seeds]
        decoder = self.reference.decoder  # in fp32: it is not under comparison
        pixels = map(self.reference.decode, latents)
        return [to_uint8(of_seed, decoder.levels).numpy() for of_seed in pixels]

    def judge(self, tier: str, switches: dict, model: torch.nn.Module | None = None) -> dict:
        """Return the worst picture's figures, and whether every picture meets each
        criterion, without LPIPS. MAE is of 0–1. model: as for `pictures`.
        """
        want = np.concatenate(self.want)
        got = np.concatenate(self.pictures(tier, switches, model))
        worst = dict(
            mae=max(map(evaluate.mae, want, got)),
            psnr=min(map(evaluate.psnr, want, got)),
            ssim=min(map(evaluate.ssim, want, got)),
        )
        meets = {}
        for name, thresholds in evaluate.GATES.items():
            meets[name] = evaluate.verdict_of(worst, thresholds) == "PASS"
        worst["mae"] /= 255
        return dict(pictures=len(want), worst=worst, **meets)


def climb(args: Namespace, device: torch.device, record: dict) -> Iterator[dict]:
    """Fill `record` with the rungs, timed and judged, the rivals and the profiles. Yield each
    rung once it is in.
    """
    model = harness.model_of(args, device)
    record["shape"] = harness.shape_of(model, args)
    reference = Reference(model, args, device)
    judge = None
    # on a CPU there is fp32 alone
    if args.gate and any(name != "fp32" for name, _, _ in args.rungs):
        judge = Judge(args.gate, device, model=harness.demo_of(args.model))

    def measure(name, make):
        gc.collect()  # the memory of the rung before
        started = time.perf_counter()
        network = make()
        loop = harness.sampling(network, args, device)
        row = dict(rung=name, **harness.time_steps(loop, device, args.load, args.window))
        row["seconds"] = time.perf_counter() - started
        # the compiler would search again for the reference's two batch rows
        if "max-autotune" not in name:
            row["error"] = reference.error(network)
        record["rungs"].append(row)
        return row

    for name, tier, switches in args.rungs:
        row = measure(name, partial(harness.build, args.model, model, tier, device, **switches))
        if judge and name != "fp32":
            row["judged"] = judge.judge(tier, switches)
        yield row
    for rival in args.vs:
        make = partial(Rival, rival, harness.model_of(args, device), torch.float16, device)
        harness.use("fp16")
        torch._dynamo.reset()
        yield measure(f"fp16 + {RIVALS[rival]}", make)
    if args.profile:  # last: a profiler may slow the steps after it
        tiers = list(dict.fromkeys(tier for _, tier, _ in args.rungs))
        record["ceilings"] = ceilings(tiers, device)
        for tier in tiers:
            network = harness.build(args.model, model, tier, device)
            record["profiles"].append(profile_of(network, tier, args, device))
            yield record["profiles"][-1]


# ---- profiles ----


def record_steps(loop: Callable, device: torch.device) -> profile:
    """Return the profile of RECORDED warm steps of `loop`."""
    # CUPTI must outlive the first profile, or a captured step that is replayed in the
    # second one crashes.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")

    cuda = device.type == "cuda"

    def on_step():
        # earlier steps' kernels must not be recorded
        if cuda and profiler.step_num == WARM_UP - 1:
            torch.cuda.synchronize(device)
        profiler.step()

    with profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda,
        acc_events=True,
        schedule=schedule(wait=0, warmup=WARM_UP, active=RECORDED, repeat=1),
    ) as profiler:
        harness.run_steps(loop, WARM_UP + RECORDED, on_step)
    return profiler


def kind_of(function: str) -> str:
    """Return the kind of work of a kernel or operator by its name."""
    kinds = (kind for kind, pattern in KINDS if re.search(pattern, function, re.I))
    return next(kinds, OTHER)


def by_function(profiler: profile, device: torch.device) -> list[dict]:
    """Return the functions by the time they take, most first: kernels, copies and fills on a
    GPU, else torch's operators. Each has its name, kind of work, ms and calls per step.
    """
    on_cpu = device.type == "cpu"
    time = attrgetter("self_cpu_time_total" if on_cpu else "self_device_time_total")
    functions = [
        dict(
            name=row.key,
            kind=kind_of(row.key),
            ms=time(row) / RECORDED / 1e3,
            calls=row.count / RECORDED,
        )
        for row in profiler.key_averages()
        if (row.device_type == DeviceType.CPU) == on_cpu
        and not (row.is_user_annotation or row.key.startswith("ProfilerStep"))
    ]
    return sorted(functions, key=lambda function: -function["ms"])


def profile_of(network: Network, tier: str, args: Namespace, device: torch.device) -> dict:
    """Return a tier's time by kind of work and by function; the trace goes beside --output."""
    loop = harness.sampling(network, args, device)
    harness.run_steps(loop, WARM_UP, lambda: None)  # a step is captured without the profiler
    profiler = record_steps(loop, device)
    functions = by_function(profiler, device)
    kinds = {}
    for function in functions:
        kind = kinds.setdefault(function["kind"], dict(ms=0.0, calls=0.0))
        kind["ms"] += function["ms"]
        kind["calls"] += function["calls"]
    row = dict(tier=tier, steps=RECORDED, kinds=kinds, functions=functions[:MOST])
    if args.output:
        path = Path(args.output).with_suffix(f".{tier}.trace.json.gz")
        with tempfile.NamedTemporaryFile(suffix=".json.gz") as trace, atomic_write(path) as file:
            profiler.export_chrome_trace(trace.name)
            file.write(Path(trace.name).read_bytes())
        row["trace"] = path.name
    return row


def ceilings(tiers: list[str], device: torch.device) -> dict:
    """Measure this machine's ceilings: for each tier a large GEMM in its arithmetic, in
    TFLOP/s, and a large copy, in GB/s read and written: the fastest tenth of their times.
    """
    side = 1024
    size = 1 << 26  # bytes
    load = 0.2
    window = 0.5
    if device.type == "cuda":
        side = 8192
        size = 1 << 30
        load = 1.5

    def milliseconds(work):
        def loop(on_step):
            work()
            on_step()

        return harness.time_steps(loop, device, load, window)["p10"]

    tflops = {}
    for tier in tiers:
        # exact computes a float32 GEMM by three in float16
        parts = 3 if tier == "exact" else 1
        dtype = torch.float16 if tier == "exact" else precision.TIERS[tier].dtype
        if device.type == "cuda":
            harness.use(tier)
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        out = torch.empty_like(a)
        ms = milliseconds(lambda: torch.mm(a, b, out=out))
        tflops[tier] = 2 * side**3 / parts / ms / 1e9
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    ms = milliseconds(lambda: target.copy_(source))
    return dict(tflops=tflops, gemm=f"{side} × {side} × {side}", gb_s=2 * size / ms / 1e6)


# ---- layouts, on many GPUs ----


def runnable(network: BlockNetwork, side: int, tier: str, ranks: Ranks) -> Iterator[Layout]:
    """Yield the layouts that can run here. side: of a latent."""
    tokens = (side // network.patch_size) ** 2
    divisible = not undivided(tier, network.stages)
    for layout in LAYOUTS:
        # Ranks find each other's memory by counting, so all of them must map memory equally often.
        if layout.tokens > 1 and not (divisible and layout.ranks == ranks.world):
            continue
        with suppress(UsageError):
            layouts.check(layout, tokens, ranks.world)
            yield layout


def cases(
    possible: Iterable[Layout], pictures: int, world: int
) -> Iterator[tuple[str, Layout, int]]:
    """Yield name, layout and number of working ranks of each case to time: one GPU, pictures for
    each number of ranks, then useful layouts.
    """
    for used in (1, 2, 4, 8):
        if used <= world and (pictures >= used or used == world and pictures > 1):
            yield "one GPU" if used == 1 else "pictures", OFF, used
    for layout in possible:
        only_padding = layout.rows > Guidance.copies * pictures
        # each GPU could have a picture
        divides_in_vain = layout.tokens > 1 and pictures >= layout.ranks
        if not (only_padding or divides_in_vain):
            yield str(layout), layout, layout.ranks


def time_layouts(args: Namespace, ranks: Ranks, network: BlockNetwork, tier: str) -> Iterator[dict]:
    """Yield a row for each layout of the batch that `args` names, the first of one GPU."""
    device = ranks.device
    side = args.latent_size

    def slowest(times):
        return [max(of_ranks) for of_ranks in zip(*ranks.all_gather_object(times))]

    alone = {}  # the row and the output of one GPU, the first case
    for name, layout, used in cases(
        runnable(network, side, tier, ranks), args.pictures, ranks.world
    ):
        placement = Placement(layout, ranks.world)
        batches = [placement.rows(n, Guidance.copies) for n in placement.sizes(args.pictures)]
        network.tune(Batch(batches, side, 0, layout.tokens).row_tokens(network.patch_size))
        shared = ranks.share(network, layout)  # on every rank: all make the groups
        works = ranks.rank < used
        pictures = slice(None)
        if layout == OFF and works:
            pictures = Placement(OFF, used, ranks.rank).pictures(args.pictures)
        loop = None
        if works and range(args.pictures)[pictures]:
            loop = harness.sampling(shared, args, device, rows=pictures)
        row = dict(tier=tier, size=args.image_size, labels=args.pictures, gpus=used, plan=name)
        row |= harness.time_steps(loop, device, args.load, args.window, slowest)
        alone = alone or dict(row)
        row["speedup"] = alone["ms"] / row["ms"]
        if used == 1 or works and layout != OFF:
            out = harness.guided(shared, args, device)
            want = alone.setdefault("out", out)
            row["error"] = float((out - want).norm() / want.norm())
        yield row
        network.graphs.clear()  # of this layout
        del loop, shared
        gc.collect()


def link(ranks: Ranks) -> dict:
    """Measure the link between all ranks' devices: bytes that a rank sends per second in a
    large all-gather, in GB/s, and the time of one of four bytes, in µs.
    """
    device = ranks.device
    everyone = Placement(OFF, ranks.world)
    ranks.gather_pictures(torch.zeros(1, 1, device=device), ranks.world, everyone)  # connects

    def milliseconds(count):
        part = torch.zeros(count, device=device)
        whole = part.new_empty(ranks.world * count)

        def loop(on_step):
            torch.distributed.all_gather_into_tensor(whole, part)
            on_step()

        times = harness.step_times(loop, 40, device)
        return float(np.median(ranks.all_gather_object(np.median(times[10:]))))

    count = 1 << (24 if device.type == "cuda" else 20)  # float32 numbers
    sent = (ranks.world - 1) * 4 * count
    return dict(gb_s=sent / milliseconds(count) / 1e6, us=1e3 * milliseconds(1))


def share_batch(args: Namespace, ranks: Ranks, record: dict) -> Iterator[dict]:
    """Fill `record` with the link and the times of every tier and number of pictures. Yield each
    row once it is in.
    """
    record["link"] = link(ranks)
    model = harness.model_of(args, ranks.device)
    record["shape"] = harness.shape_of(model, args)
    tuner = Tuner(share=ranks.from_rank_0)
    for tier in args.precision:
        network = harness.build(args.model, model, tier, ranks.device, tuner)
        for pictures in args.batches:
            args.pictures = pictures
            for row in time_layouts(args, ranks, network, tier):
                record["plans"].append(row)
                yield row


# ---- the command ----


def line(row: dict) -> str:
    """Return a rung, a layout or a profile as text."""
    if "kinds" in row:
        kinds = [f"{kind} {of_kind['ms']:.2f} ms" for kind, of_kind in row["kinds"].items()]
        lines = [f"{each['ms']:12.3f} ms  {each['name']:.72}" for each in row["functions"]]
        return "\n".join([f"{row['tier']}, profiled: {', '.join(kinds)}", *lines])
    name = row.get("rung") or "{tier}, {labels} labels, {gpus} ranks: {plan}".format(**row)
    text = f"{name:40} {row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}]"
    if "error" in row:
        text += f"   error {row['error']:.1e}"
    if "judged" in row:
        judged = row["judged"]
        worst = judged["worst"]
        meets = ", ".join(f"{name} {'PASS' if judged[name] else 'FAIL'}" for name in evaluate.GATES)
        text += (
            f"   worst PSNR {worst['psnr']:.1f}, MAE {255 * worst['mae']:.4f} of 0-255, without "
            f"LPIPS: {meets}"
        )
    return text


def rungs_of(args: Namespace, device: torch.device) -> list[tuple[str, str, dict]]:
    """Return the rungs of the ladder that --only names. Raises UsageError if there is
    nothing to time.
    """
    every = list(ladder(device, args.precision))
    if not args.only:
        return every
    rungs = [rung for rung in every if any(word in rung[0] for word in args.only)]
    if not (rungs or args.vs):
        names = ", ".join(name for name, _, _ in every)
        raise UsageError(
            f"--only {' '.join(args.only)}: no rung on {device} has that in its name; there are "
            f"{names}"
        )
    return rungs


def prepare(args: Namespace, ranks: Ranks) -> torch.device:
    """Return the device, and complete `args` for it. Raises UsageError before anything is
    measured.
    """
    if ranks.world > 1:
        args.device = ranks.take_device(args.device)
        ranks.run_collectively(lambda: args.output and check_writable(args.output), only=0)
        args.output = args.output if ranks.rank == 0 else None
    device = harness.prepare(args)
    args.batches = args.pictures or ([8] if ranks.world == 1 else [1, 8])
    args.pictures = args.batches[0]
    args.precision = args.precision or harness.contest_tiers(device)
    for tier in args.precision:
        precision.require("precision", tier, device)
    if args.vs and device.type != "cuda":
        raise UsageError("--vs: compares float16 on a GPU, and this is none; leave it out")
    if ranks.world > 1:
        for name in ("gate", "only", "profile", "vs"):
            if getattr(args, name):
                raise UsageError(f"--{name}: is for one process; leave it out under torchrun")
        return device
    if len(args.batches) > 1:
        raise UsageError("--pictures: one process times one batch; give one, or use torchrun")
    args.rungs = rungs_of(args, device)
    return device


def measure(args: Namespace, ranks: Ranks) -> None:
    """Time, judge and profile; rank 0 writes and prints."""
    device = prepare(args, ranks)
    about = harness.about("steps", args, device)
    alone = ranks.world == 1
    if alone:
        record = about | dict(batch_rows=2 * args.pictures, rungs=[], profiles=[])
        work = climb(args, device, record)
    else:
        ranks.open_collectives()
        del about["pictures"]
        record = about | dict(kind="parallel", gpus=ranks.world, plans=[])
        work = share_batch(args, ranks, record)
    record["load_seconds"] = args.load
    for row in work:
        if ranks.rank == 0:
            harness.write(args.output, record)
            tqdm.write(line(row))


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    parser.add_argument(
        "--pictures",
        type=positive,
        nargs="+",
        metavar="N",
        help="pictures in a batch, two batch rows each (default: 8; ranks: 1 and 8)",
    )
    harness.add_timing(parser)
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=precision.TIERS,
        help="tiers; the ladder climbs half ones step by step (default: all but bf16)",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="rungs with such a word in their name"
    )
    parser.add_argument(
        "--vs",
        nargs="+",
        choices=RIVALS,
        default=[],
        help="the same weights in float16 as others run them; compile, max-autotune: modes of "
        "torch.compile",
    )
    parser.add_argument(
        "--gate", type=int, default=0, metavar="SEEDS", help="judge a demo's pictures, 64 a seed"
    )
    parser.add_argument("--profile", action="store_true", help="profile each tier of the ladder")
    args = parser.parse_args()
    with user_errors(parser):
        many = numbers().world > 1
        if not many:
            measure(args, Ranks())
    if many:
        with launched_ranks("steps.py") as ranks:
            measure(args, ranks)


if __name__ == "__main__":
    main()
