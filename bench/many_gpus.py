"""One picture, or a few, on many GPUs: every way to share them, timed in one run; and the link between the GPUs.

    torchrun --standalone --nproc_per_node=4 bench/many_gpus.py --gate --output output/parallel.json
    torchrun --standalone --nproc_per_node=4 bench/many_gpus.py --link --output output/link.json

Times are of whole denoising steps on the slowest rank, as in bench/steps.py. The speed-up is over the same network,
tier and kernels on one of these GPUs. Error: relative, of one guided forward pass, against one GPU. Bytes: what a
rank receives a layer. --gate judges 250-step pictures of the demo, shared, against fp32's on one GPU. --link times
collectives among two ranks and among all, of several sizes: over NCCL, ten calls in a CUDA graph as in a captured
step, else over gloo.
"""

if not __package__:
    __import__("_as_module")

import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from tqdm import tqdm

from accel import engine, precision
from accel.graphs import capture
from accel.options import (
    DEFAULTS_OF,
    DistributedOptions,
    OneLineParser,
    SamplingOptions,
    UsageError,
    check_writable,
    positive,
    user_errors,
)
from accel.parallel.group import job, launched
from accel.parallel.plan import OFF, Plan, Planner, check
from accel.parallel.rows import share
from accel.parallel.tokens import traffic
from bench import measure
from bench.steps import Judge
from diffusion import create_diffusion
from models import DiT_models

EXCHANGES = ("push", "kv", "ulysses", "ring")
PLANS = (
    "rows=2",
    *(f"tokens=2,exchange={name}" for name in EXCHANGES),
    "rows=4",
    *(f"rows=2,tokens=2,exchange={name}" for name in EXCHANGES),
    *(f"tokens=4,exchange={name}" for name in EXCHANGES[:3]),
)
CALLS = 10  # of a collective, timed as one
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)

#################################################################################
#                            Few pictures on many GPUs                          #
#################################################################################


def step_time(work: Callable, args: Namespace, device: torch.device, active: bool) -> dict:
    """Milliseconds of a step of `work(steps, progress)`, of the slowest of the active ranks; the others only listen."""

    def times(steps):
        marks = measure.Marks(device)
        if active:
            work(steps, marks)
            engine.synchronize(device)
        row = measure.spread(marks.milliseconds() or [0.0])
        values = torch.tensor([*row.values()], dtype=torch.float64, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return dict(zip(row, values.tolist()))

    times(3)  # what only first steps do
    one = times(6)["ms"]
    load, window = (max(3, min(250, int(1e3 * wanted / one))) for wanted in (args.load, args.window))
    times(load)
    return times(window)


def fits(plan: Plan, planner: Planner, world: int, tier: str) -> bool:
    """Whether `plan` can run here in `tier`."""
    if tier == "exact" and (plan.stages > 1 or plan.tokens > 1 and plan.exchange != "ulysses"):
        return False
    try:
        check(plan, world, planner.peers(), planner.tokens, planner.heads, planner.depth)
    except UsageError:
        return False
    return True


class Table:
    """All plans for one network, size and number of labels."""

    def __init__(self, args: Namespace, group, device: torch.device, case: dict, network, model):
        self.args, self.group, self.device, self.case = args, group, device, case
        self.pictures, latent, tokens = case["labels"], case["size"] // 8, model.pos_embed.shape[1]
        self.planner = Planner(group, device, self.pictures, latent, tokens, model.num_heads, len(model.blocks))
        self.planner.begin(network)
        generator = torch.Generator(device).manual_seed(1)
        self.z = torch.randn(self.pictures, 4, latent, latent, generator=generator, device=device)
        self.labels = torch.arange(self.pictures, device=device)
        self.guidance = DistributedOptions.cfg_scale, 1000  # the null label
        self.diffusion = create_diffusion(str(DistributedOptions.num_sampling_steps))
        self.alone = None  # one GPU's output

    def settings(self, plans: list[Plan]) -> Iterator[tuple[Plan, int]]:
        """What is timed: (plan, ranks). One GPU, pictures for each number of ranks, then the plans that make sense."""
        world = self.group.world
        for ranks in (1, 2, 4, 8):
            if ranks <= world and (self.pictures >= ranks or ranks == world and self.pictures > 1):
                yield OFF, ranks
        for plan in dict.fromkeys(plan._replace(warmup=1) if plan.stages > 1 else plan for plan in plans):
            # One that leaves ranks with padding alone, or that a GPU a picture makes pointless, tells nothing.
            shares = self.pictures < plan.ranks or plan.tokens * plan.stages == 1
            if plan.rows <= 2 * self.pictures and shares and fits(plan, self.planner, world, self.case["tier"]):
                yield plan, plan.ranks

    def measure(self, plan: Plan, ranks: int) -> dict:
        """A row: `plan`, or pictures for `ranks` where it is OFF."""
        active, planner = self.group.rank < ranks, self.planner
        if plan != OFF:
            planner.agree([plan])
        network = planner.apply(plan)
        rows = share(self.pictures, ranks, self.group.rank) if plan == OFF and active else slice(None)
        if plan == OFF:
            planner.pieces.attend = planner.pieces.alone

        def work(steps, progress):
            if len(self.labels[rows]):
                batch = self.z, self.labels, *self.guidance
                engine.denoise(network, self.diffusion, *batch, rows=rows, steps=steps, progress=progress)

        name = str(plan) if plan != OFF else "one GPU" if ranks == 1 else "pictures"
        row = self.case | dict(gpus=ranks, plan=name, **step_time(work, self.args, self.device, active))
        if network is not None and (ranks == 1 or plan != OFF and plan.stages == 1):  # PipeFusion depends on past steps
            row["error"] = self.error(network, first=ranks == 1)
        if plan.tokens > 1:
            element = 2 if self.case["tier"] in precision.HALF else 4
            batch_rows, tokens = -(-2 * self.pictures // plan.rows), planner.tokens // plan.tokens
            sent = traffic(plan.exchange, batch_rows, tokens, plan.tokens, planner.pieces.width, element)
            row["collectives"], row["bytes"] = sent
        return row

    def error(self, network, first: bool) -> float:
        """Relative, of a guided forward pass, against one GPU, which comes first."""
        x, t = self.z.repeat(2, 1, 1, 1), torch.full((2 * self.pictures,), 500, device=self.device)
        y = torch.cat([self.labels, torch.full_like(self.labels, self.guidance[1])])
        out = network.forward_with_cfg(x, t, y, self.guidance[0]).double()
        self.alone = out if first else self.alone
        return float((out - self.alone).norm() / self.alone.norm())

    def auto(self, rows: list[dict]) -> dict:
        """What --parallel auto chooses, and its speed among the timed `rows`."""
        chosen, reason = self.planner.choose()
        self.planner.pieces.attend = self.planner.pieces.alone
        text = str(chosen) if chosen != OFF else "pictures" if self.pictures > 1 else "one GPU"
        ms = next((row["ms"] for row in rows if row["plan"] == text), None)
        best = min(row["ms"] for row in rows if not row["plan"].startswith("stages"))  # which are approximate
        figures = dict(ms=ms, speedup=ms and rows[0]["ms"] / ms, of_best=ms and best / ms)
        return self.case | dict(plan="auto", chosen=text, reason=reason, **figures)


def share_pictures(args: Namespace, group, device: torch.device, plans: list[Plan], record: dict) -> None:
    """Fill `record` with the plans of every tier, size and number of labels."""
    if args.gate:
        judge_plans(args, group, device, plans, record)
    for tier, size in ((tier, size) for tier in args.precision for size in args.image_size):
        model = measure.random_network(args.model, size, 1000, device)
        network = measure.build(model, tier, measure.switches_of(tier), device)
        for labels in args.labels:
            table, rows = Table(args, group, device, dict(tier=tier, size=size, labels=labels), network, model), []
            for plan, ranks in tqdm([*table.settings(plans)], desc="plans", leave=False, disable=group.rank > 0):
                rows.append(table.measure(plan, ranks))
                rows[-1]["speedup"] = rows[0]["ms"] / rows[-1]["ms"]
                row = rows[-1]
                text = f"{tier} {size} px {labels} labels  {ranks} GPUs {row['plan']:34} {row['ms']:8.3f} ms"
                error = f"  error {row['error']:.1e}" if "error" in row else ""
                tqdm.write(f"{text} [{row['p10']:.3f}, {row['p90']:.3f}]  {row['speedup']:.2f}×{error}")
            if labels < group.world:
                rows.append(table.auto(rows))
                print(f"auto: {rows[-1]['chosen']}; {rows[-1]['reason']}", flush=True)
            record["plans"] += rows
            measure.write(args.output if group.rank == 0 else None, record)
            del table
            gc.collect()
        del model, network
        gc.collect()


def judge_plans(args: Namespace, group, device: torch.device, plans: list[Plan], record: dict) -> None:
    """Every plan on the demo's 64 pictures in each tier, against fp32 on one GPU."""
    judge = Judge(1, device)
    tokens, heads, depth = engine.network_shape(judge.options)
    planner = Planner(group, device, len(judge.options.labels), judge.options.latent_size, tokens, heads, depth)
    for tier, plan in ((tier, plan) for tier in args.precision for plan in [OFF, *plans]):
        if not fits(plan, planner, group.world, tier):
            continue
        if plan.ranks > 1:
            planner.mesh(plan)

        def shared(network, plan=plan):
            planner.begin(network)
            return planner.apply(plan)

        if group.rank < plan.ranks:
            result = judge.judge(tier, measure.switches_of(tier), share=shared)
            record["judged"].append(dict(tier=tier, plan=str(plan) if plan != OFF else "one GPU", **result))
            verdict = (
                f"contest {'PASS' if result['contest'] else 'FAIL'}, strict {'PASS' if result['strict'] else 'FAIL'}"
            )
            print(f"{tier} {plan}: worst picture {result['worst']['psnr']:.1f} dB, {verdict}", flush=True)
        gc.collect()
    measure.write(args.output if group.rank == 0 else None, record)


#################################################################################
#                                    The link                                   #
#################################################################################


def time_link(args: Namespace, group, device: torch.device, record: dict) -> None:
    """Fill `record` with microseconds of collectives among two ranks and among all."""
    cases = [(ranks, size) for ranks in dict.fromkeys((2, group.world)) for size in args.sizes]
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in dict.fromkeys((2, group.world))}
    for ranks, size in tqdm(cases, desc="sizes", leave=False, disable=group.rank > 0):
        mine = torch.randn(size // 2, device=device).to(torch.float16 if device.type == "cuda" else torch.bfloat16)
        every, back, among = mine.new_empty(ranks * len(mine)), mine.clone(), groups[ranks]
        collectives = {
            "all-gather": lambda: dist.all_gather_into_tensor(every, mine, group=among),
            "all-to-all": lambda: dist.all_to_all_single(back, mine, group=among),
            "all-reduce": lambda: dist.all_reduce(back, group=among),
        }
        for name, call in collectives.items():
            us = torch.zeros(1, device=device)
            if group.rank < ranks:
                us += time_collective(call, args.repeats, device, among)
            dist.all_reduce(us, op=dist.ReduceOp.MAX)
            record["link"].append(dict(collective=name, ranks=ranks, bytes=size, us=us.item()))
            tqdm.write(f"{name:11} {ranks} ranks {size / 2**20:8.2f} MiB {us.item():10.1f} µs")
    measure.write(args.output if group.rank == 0 else None, record)


def time_collective(call: Callable, repeats: int, device: torch.device, among) -> float:
    """Median microseconds of one call, after a warm-up."""

    def many():
        for _ in range(CALLS):
            call()

    many()
    if device.type == "cuda":
        replay = capture(many)
        times = [measure.gpu_ms(replay) for _ in range(repeats + 3)][3:]
        return 1e3 * statistics.median(times) / CALLS
    times = []
    for _ in range(repeats):
        dist.barrier(among)
        start = time.perf_counter()
        many()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) / CALLS


def parse() -> tuple[OneLineParser, Namespace]:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=DiT_models, help="default: DiT-XL/2 on GPUs, DiT-Demo/2 on CPUs")
    parser.add_argument("--labels", type=positive, nargs="+", default=[1, 2, 8], help="numbers of pictures")
    parser.add_argument("--image-size", type=positive, nargs="+", help="sides in pixels (default: 512; the demo's own)")
    parser.add_argument("--precision", nargs="+", choices=precision.TIERS, help="tiers (default: fp16; CPU: fp32)")
    plans = dict(nargs="*", default=PLANS, metavar="rows=N,tokens=N,exchange=NAME")
    parser.add_argument("--plans", **plans, help="plans to time besides auto's choice")
    parser.add_argument("--load", type=measure.seconds, default=1.0, help="seconds of steps before those that count")
    parser.add_argument("--window", type=measure.seconds, default=0.5, help="seconds of steps that count")
    parser.add_argument("--gate", action="store_true", help="judge every plan on the demo's pictures too")
    parser.add_argument("--link", action="store_true", help="instead: time the link's collectives")
    parser.add_argument(
        "--sizes", nargs="+", type=positive, default=SIZES, metavar="BYTES", help="bytes a rank of --link"
    )
    parser.add_argument(
        "--repeats", type=positive, default=30, help="timings of a collective, of which the median counts"
    )
    measure.add_arguments(parser, network=False)
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    with user_errors(parser):
        plans = [Plan(**DistributedOptions(parallel=text).mesh) for text in args.plans]
        for size in args.image_size or ():
            engine.network_shape(SamplingOptions(args.model or "DiT-XL/2", image_size=size).resolve())
        if (launched() or (0, 1, 0))[1] < 2:
            launcher = "torchrun --standalone --nproc_per_node=4 bench/many_gpus.py"
            raise UsageError(f"there is nothing to share with one process: {launcher}")
    with job("many_gpus.py") as group:
        group.together("output", lambda: args.output and check_writable(args.output), only=0)
        name = group.device(args.device)
        device = torch.device(name)
        args.model = args.model or ("DiT-XL/2" if device.type == "cuda" else "DiT-Demo/2")
        args.image_size = args.image_size or [DEFAULTS_OF.get(args.model, {}).get("image_size", 512)]
        args.precision = args.precision or [precision.default_tier(device)]
        args.repeats = args.repeats or (30 if device.type == "cuda" else 3)
        if device.type != "cuda":
            print(f"{group.world} processes over gloo share this machine's processor; times say nothing about GPUs")
        group.open_collectives(name)
        group.opened()
        kind = "link" if args.link else "parallel"
        record = dict(kind=kind, **measure.provenance(device, args.commit), gpus=group.world)
        if args.link:
            record |= dict(backend=dist.get_backend(), link=[])
            time_link(args, group, device, record)
        else:
            record |= dict(model=args.model, load_seconds=args.load, plans=[], judged=[])
            share_pictures(args, group, device, plans, record)


if __name__ == "__main__":
    main()
