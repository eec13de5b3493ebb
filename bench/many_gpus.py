"""Time every layout of one picture, or a few, on many GPUs in one run.

    torchrun --standalone --nproc_per_node=4 bench/many_gpus.py --gate --output output/parallel.json

Times are of whole denoising steps on the slowest rank, as in bench/steps.py. The speed-up is over the same network,
tier and kernels on one of these GPUs. Error: relative, of one guided forward pass, against one GPU. --gate judges
250-step pictures of the demo, shared, against fp32's on one GPU.
"""

if not __package__:
    __import__("_as_module")

import gc
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from tqdm import tqdm

from accel import precision
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.families import Defaults, model_names
from accel.flags import check_writable, positive
from accel.kernels.linear import Tuner
from accel.network import BlockNetwork, Network
from accel.parallel import layouts, planner
from accel.parallel.groups import Groups
from accel.parallel.layouts import EXCHANGES, OFF, Layout
from accel.parallel.placement import Placement
from accel.parallel.planner import Work
from accel.parallel.processes import Job, launched, launched_job, own_device
from accel.sampling.guidance import Guidance
from bench import harness
from bench.steps import Judge

PLANS = (
    "rows=2",
    *(f"tokens=2,exchange={name}" for name in EXCHANGES),
    "rows=4",
    *(f"rows=2,tokens=2,exchange={name}" for name in EXCHANGES),
    *(f"tokens=4,exchange={name}" for name in EXCHANGES),
)
NULL_LABEL, SCALE = 1000, Defaults().cfg_scale


def step_time(loop: Callable, args: Namespace, job: Job, device: torch.device, active: bool) -> dict:
    """Time a step of `loop(on_step)` on the slowest of the active ranks, in milliseconds; the others only listen."""

    def times(steps):
        marks = harness.Marks(device, steps)
        if active:
            harness.run_until(loop, marks)
            harness.synchronize(device)
        row = harness.spread(marks.milliseconds() or [0.0])
        return dict(zip(row, job.max_over_ranks(row.values())))

    times(3)  # first steps compile and tune
    one = times(6)["ms"]
    load, window = (max(3, min(250, int(1e3 * wanted / one))) for wanted in (args.load, args.window))
    times(load)
    return times(window)


def runnable(work: Work, heads: int, groups: Groups, wanted: list[Layout]) -> Iterator[Layout]:
    """Yield the layouts that can run here."""
    for layout in dict.fromkeys(wanted):
        with suppress(UsageError):
            planner.check(layout, work.tokens, heads, groups)
            yield layout


def laid_out(network: BlockNetwork, work: Work, groups: Groups, layout: Layout) -> Network:
    """Return the network as this rank has it, its GEMMs chosen. Every rank calls it: all make the groups."""
    planner.tune(network, work, [Placement(layout, groups.job.world)])
    return groups.apply(network, layout)


def name_of(layout: Layout, ranks: int, pictures: int) -> str:
    return str(layout) if layout != OFF else "one GPU" if ranks == 1 or pictures == 1 else "pictures"


class Table:
    """All layouts for one network, size and number of labels."""

    def __init__(self, args: Namespace, groups: Groups, case: dict, network: BlockNetwork):
        self.args, self.groups, self.case, self.network, self.job = args, groups, case, network, groups.job
        self.pictures, latent = case["labels"], case["size"] // harness.space_of(args.model).factor
        tokens = (latent // network.patch_size) ** 2
        self.work = Work(self.pictures, None, Counter([Guidance.copies]), tokens, case["tier"])
        generator = torch.Generator(groups.device).manual_seed(1)
        self.z = torch.randn(
            self.pictures, network.in_channels, latent, latent, generator=generator, device=groups.device
        )
        self.labels = torch.arange(self.pictures, device=groups.device)
        self.process = harness.process_of(args.model)
        self.alone = None  # one GPU's output

    def settings(self, wanted: list[Layout]) -> Iterator[tuple[Layout, int]]:
        """Yield (layout, ranks) to time: one GPU, pictures for each number of ranks, then useful layouts."""
        world = self.job.world
        for ranks in (1, 2, 4, 8):
            if ranks <= world and (self.pictures >= ranks or ranks == world and self.pictures > 1):
                yield OFF, ranks
        for layout in runnable(self.work, self.network.num_heads, self.groups, wanted):
            # Not a layout that leaves ranks with padding alone, or that a GPU a picture makes pointless.
            shares = self.pictures < layout.ranks or layout.tokens == 1
            if layout.rows <= Guidance.copies * self.pictures and shares:
                yield layout, layout.ranks

    def measure(self, layout: Layout, ranks: int) -> dict:
        """Return the row of `layout`, or of pictures for `ranks` if it is OFF."""
        active, pictures = self.job.rank < ranks, self.pictures
        # A copy, which shares the weights: the graphs of this layout go when it goes.
        network = laid_out(self.network.shallow(self.network.depth), self.work, self.groups, layout)
        rows = Placement(OFF, ranks, self.job.rank).pictures(pictures) if layout == OFF and active else slice(None)
        loop = harness.sampling(network, self.process, self.z, self.labels, SCALE, NULL_LABEL, rows=rows)
        row = self.case | dict(gpus=ranks, plan=name_of(layout, ranks, pictures))
        row |= step_time(loop, self.args, self.job, self.groups.device, active and len(self.labels[rows]) > 0)
        if ranks == 1 or active and layout != OFF:
            out = harness.guided(network, self.z, self.labels, SCALE, NULL_LABEL)
            self.alone = out if ranks == 1 else self.alone
            row["error"] = float((out - self.alone).norm() / self.alone.norm())
        return row

    def auto(self, rows: list[dict]) -> dict:
        """Return the choice of --parallel auto, and its time among the timed `rows`."""
        chosen, reason = planner.choose(self.network, self.work, self.groups)
        name = name_of(chosen, self.job.world, self.pictures)
        ms = next((row["ms"] for row in rows if row["plan"] == name), None)
        return self.case | dict(plan="auto", chosen=name, reason=reason, ms=ms)


def share_pictures(args: Namespace, groups: Groups, wanted: list[Layout], record: dict) -> None:
    """Fill `record` with the layouts of every tier, size and number of labels."""
    job, device = groups.job, groups.device
    for tier, size in ((tier, size) for tier in args.precision for size in args.image_size):
        case = Namespace(model=args.model, ckpt=None, image_size=size, num_classes=NULL_LABEL)
        model = harness.model_of(case, device)
        network = harness.build(model, tier, device, Tuner(share=job.from_rank_0))
        for labels in args.labels:
            table, rows = Table(args, groups, dict(tier=tier, size=size, labels=labels), network), []
            for layout, ranks in tqdm([*table.settings(wanted)], desc="layouts", leave=False, disable=job.rank > 0):
                row = table.measure(layout, ranks)
                rows.append(row)
                row["speedup"] = rows[0]["ms"] / row["ms"]
                text = f"{tier} {size} px {labels} labels  {ranks} GPUs {row['plan']:34} {row['ms']:8.3f} ms"
                error = f"  error {row['error']:.1e}" if "error" in row else ""
                tqdm.write(f"{text} [{row['p10']:.3f}, {row['p90']:.3f}]  {row['speedup']:.2f}×{error}")
            if labels < job.world:
                rows.append(table.auto(rows))
                print(f"auto: {rows[-1]['chosen']}; {rows[-1]['reason']}", flush=True)
            record["plans"] += rows
            harness.write(args.output, record)
            del table
            gc.collect()
        del model, network


def judge_layouts(args: Namespace, groups: Groups, wanted: list[Layout], record: dict) -> None:
    """Judge every layout on the demo's 64 pictures in each tier, against fp32 on one GPU."""
    judge, alike = Judge(1, groups.device), dict(tuner=Tuner(share=groups.job.from_rank_0))
    for tier in args.precision:
        work = Work(len(judge.labels), None, Counter([Guidance.copies]), judge.model.x_embedder.num_patches, tier)
        for layout in runnable(work, judge.model.num_heads, groups, [OFF, *wanted]):
            shared = partial(laid_out, work=work, groups=groups, layout=layout)
            if groups.job.rank >= layout.ranks:  # idle
                shared(harness.build(judge.model, tier, groups.device, **alike))
                continue
            result = judge.judge(tier, alike, share=shared)
            record["judged"].append(dict(tier=tier, plan=name_of(layout, 1, 0), **result))
            verdict = ", ".join(f"{name} {'PASS' if result[name] else 'FAIL'}" for name in ("contest", "strict"))
            print(f"{tier} {layout}: worst picture {result['worst']['psnr']:.1f} dB, {verdict}", flush=True)
            gc.collect()
    harness.write(args.output, record)


def parse() -> tuple[OneLineParser, Namespace]:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=model_names(), help="default: DiT-XL/2 on GPUs, DiT-Demo/2 on CPUs")
    parser.add_argument("--labels", type=positive, nargs="+", default=[1, 2, 8], help="numbers of pictures")
    parser.add_argument("--image-size", type=positive, nargs="+", help="sides in pixels (default: 512; the demo's own)")
    parser.add_argument("--precision", nargs="+", choices=precision.TIERS, help="tiers (default: fp16; CPU: fp32)")
    plans = dict(nargs="*", default=PLANS, metavar="rows=N,tokens=N,exchange=NAME")
    parser.add_argument("--plans", **plans, help="plans to time besides auto's choice")
    harness.add_seconds(parser, load=1.0, window=0.5)
    parser.add_argument("--gate", action="store_true", help="judge every plan on the demo's pictures too")
    harness.add_arguments(parser, network=False)
    return parser, parser.parse_args()


def main() -> None:
    parser, args = parse()
    with user_errors(parser):
        wanted = [layouts.parse(text) for text in args.plans]
        if any(layout.weights > 1 for layout in wanted):
            raise UsageError("--plans weights=N: divides a network while it is read; time sample_ddp.py --repeats 3")
        for size in args.image_size or []:
            harness.options_of(args.model or "DiT-XL/2", image_size=size)
        if launched()[1] < 2:
            launcher = "torchrun --standalone --nproc_per_node=4 bench/many_gpus.py"
            raise UsageError(f"there is nothing to share with one process: {launcher}")
    with launched_job("many_gpus.py") as job:
        job.run_collectively(lambda: args.output and check_writable(args.output), only=0)
        args.output = args.output if job.rank == 0 else None
        name = own_device(job, args.device)
        device = torch.device(name)
        on_gpu = device.type == "cuda"
        args.model = args.model or ("DiT-XL/2" if on_gpu else "DiT-Demo/2")
        args.image_size = args.image_size or [harness.options_of(args.model).image_size]
        args.precision = args.precision or [precision.default_tier(device)]
        if not on_gpu:
            print(f"{job.world} processes over gloo share this machine's processor; times say nothing about GPUs")
        job.open_collectives(device)
        job.wait_for_collectives()
        record = dict(kind="parallel", **harness.provenance(device, args.commit), gpus=job.world, model=args.model)
        record |= dict(load_seconds=args.load, plans=[], judged=[])
        if args.gate:
            judge_layouts(args, Groups(job, device), wanted, record)
        share_pictures(args, Groups(job, device), wanted, record)
        harness.write(args.output, record)


if __name__ == "__main__":
    main()
