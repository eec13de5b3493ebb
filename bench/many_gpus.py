"""Time every layout of one picture, or a few, on many GPUs in one run.

    torchrun --standalone --nproc_per_node=4 bench/many_gpus.py --gate --output output/parallel.json

Times are of whole denoising steps on the slowest rank, as in bench/steps.py. The speed-up
is over the same network, tier and kernels on one of these GPUs. Error: relative, of one
guided evaluation, against one GPU. --gate judges 250-step pictures of the demo, shared,
against fp32's on one GPU.
"""

if not __package__:
    __import__("_as_module")

import copy
import gc
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from tqdm import tqdm

from accel import precision
from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.families import model_names
from accel.flags import check_writable, positive
from accel.kernels.linear import Tuner
from accel.network import Batch, BlockNetwork, Network
from accel.parallel import undivided
from accel.ranks import Ranks, layouts
from accel.ranks.launched import launched_ranks, numbers
from accel.ranks.placement import OFF, Layout, Placement
from accel.sampling.guidance import Guidance
from bench import harness
from bench.steps import Judge, verdicts

LAYOUTS = [
    Layout(tokens=2),
    Layout(rows=2, tokens=2),
    Layout(tokens=4),
    Layout(rows=2),
    Layout(rows=4),
]


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


def laid_out(
    network: BlockNetwork, pictures: int, side: int, ranks: Ranks, layout: Layout
) -> Network:
    """Return the network as this rank evaluates it under `layout`, its GEMMs chosen.
    Every rank calls this function, since all make the groups.
    """
    placement = Placement(layout, ranks.world)
    rows = [placement.rows(n, Guidance.copies) for n in placement.sizes(pictures)]
    network.tune(Batch(rows, side, 0, layout.tokens).row_tokens(network.patch_size))
    return ranks.share(network, layout)


class Case(NamedTuple):
    """A layout to time, and the number of ranks that work."""

    layout: Layout
    ranks: int

    @property
    def name(self) -> str:
        """Return the name in records."""
        if self.layout != OFF:
            return str(self.layout)
        return "one GPU" if self.ranks == 1 else "pictures"


def cases(possible: Iterable[Layout], pictures: int, world: int) -> Iterator[Case]:
    """Yield what to time: one GPU, pictures for each number of ranks, then useful layouts."""
    for used in (1, 2, 4, 8):
        if used <= world and (pictures >= used or used == world and pictures > 1):
            yield Case(OFF, used)
    for layout in possible:
        only_padding = layout.rows > Guidance.copies * pictures
        # each GPU could have a picture
        divides_in_vain = layout.tokens > 1 and pictures >= layout.ranks
        if not (only_padding or divides_in_vain):
            yield Case(layout, layout.ranks)


def time_layouts(args: Namespace, ranks: Ranks, network: BlockNetwork, tier: str) -> list[dict]:
    """Return a row for each layout of the batch that `args` names, the first of one GPU."""
    device = ranks.device

    def slowest(times):
        return [max(of_ranks) for of_ranks in zip(*ranks.all_gather_object(times))]

    rows = []
    alone = None  # the output of one GPU, the first case
    side = args.latent_size
    possible = runnable(network, side, tier, ranks)
    to_time = list(cases(possible, args.pictures, ranks.world))
    for case in tqdm(to_time, desc="layouts", leave=False, disable=ranks.rank > 0):
        # A copy, which shares the weights: the graphs of this layout go when it goes.
        alike = copy.copy(network)
        alike._replayed = {}
        shared = laid_out(alike, args.pictures, side, ranks, case.layout)
        works = ranks.rank < case.ranks
        loop = None
        pictures = slice(None)
        if case.layout == OFF:
            pictures = Placement(OFF, case.ranks, ranks.rank).pictures(args.pictures)
        if works and len(range(args.pictures)[pictures]) > 0:
            loop = harness.sampling(shared, args, device, rows=pictures)
        row = dict(
            tier=tier,
            size=args.image_size,
            labels=args.pictures,
            gpus=case.ranks,
            plan=case.name,
            **harness.time_steps(loop, device, args.load, args.window, slowest),
        )
        rows.append(row)
        row["speedup"] = rows[0]["ms"] / row["ms"]
        if case.ranks == 1 or works and case.layout != OFF:
            out = harness.guided(shared, args, device)
            if case.ranks == 1:
                alone = out
            row["error"] = float((out - alone).norm() / alone.norm())
        tqdm.write(line(row))
        del alike, loop, shared
        gc.collect()
    return rows


def line(row: dict) -> str:
    """Return a row as text."""
    error = f"  error {row['error']:.1e}" if "error" in row else ""
    return (
        f"{row['tier']} {row['size']} px {row['labels']} labels  {row['gpus']} GPUs "
        f"{row['plan']:15} {row['ms']:8.3f} ms [{row['p10']:.3f}, {row['p90']:.3f}]  "
        f"{row['speedup']:.2f}×{error}"
    )


def share_pictures(args: Namespace, ranks: Ranks, record: dict) -> None:
    """Fill `record` with the layouts of every tier, size and number of labels."""
    for tier, size in product(args.precision, args.image_size):
        sized = harness.complete(Namespace(**vars(args) | dict(ckpt=None, image_size=size)))
        model = harness.model_of(sized, ranks.device)
        tuner = Tuner(share=ranks.from_rank_0)
        network = harness.build(sized.model, model, tier, ranks.device, tuner)
        for pictures in args.labels:
            sized.pictures = pictures
            record["plans"] += time_layouts(sized, ranks, network, tier)
            harness.write(args.output, record)
        del model, network


def judge_layouts(args: Namespace, ranks: Ranks, record: dict) -> None:
    """Judge every layout on the demo's 64 pictures in each tier, against fp32 on one GPU."""
    judge = Judge(1, ranks.device)
    alike = dict(tuner=Tuner(share=ranks.from_rank_0))
    side = judge.reference.side
    for tier in args.precision:
        for layout in (OFF, *runnable(judge.reference.network, side, tier, ranks)):
            shared = partial(
                laid_out, pictures=len(judge.labels), side=side, ranks=ranks, layout=layout
            )
            if ranks.rank >= layout.ranks:  # idle
                shared(harness.build(judge.name, judge.model, tier, ranks.device, **alike))
                continue
            judged = judge.judge(tier, alike, share=shared)
            plan = Case(layout, layout.ranks).name
            record["judged"].append(dict(tier=tier, plan=plan, **judged))
            print(
                f"{tier} {layout}: worst picture {judged['worst']['psnr']:.1f} dB, "
                f"{verdicts(judged)}",
                flush=True,
            )
            gc.collect()
    harness.write(args.output, record)


def measure(args: Namespace, ranks: Ranks) -> None:
    """Time, and with --gate judge, on every rank of a job; rank 0 writes."""
    ranks.run_collectively(lambda: args.output and check_writable(args.output), only=0)
    args.output = args.output if ranks.rank == 0 else None
    device = torch.device(ranks.take_device(args.device))
    args.model = args.model or ("DiT-XL/2" if device.type == "cuda" else "DiT-Demo/2")
    args.image_size = args.image_size or [None]
    args.precision = args.precision or [precision.default_tier(device)]
    if device.type != "cuda":
        print(
            f"{ranks.world} processes over gloo share this machine's processor; times say nothing "
            "about GPUs"
        )
    ranks.open_collectives()
    record = dict(
        kind="parallel",
        **harness.provenance(device, args.commit),
        gpus=ranks.world,
        model=args.model,
        load_seconds=args.load,
        plans=[],
        judged=[],
    )
    if args.gate:
        judge_layouts(args, ranks, record)
    share_pictures(args, ranks, record)


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        choices=model_names(),
        metavar="NAME",
        help="default: DiT-XL/2; on CPUs DiT-Demo/2",
    )
    parser.add_argument(
        "--labels", type=positive, nargs="+", default=[1, 2, 8], help="numbers of pictures"
    )
    parser.add_argument(
        "--image-size", type=positive, nargs="+", help="sides in pixels (default: the model's)"
    )
    parser.add_argument(
        "--precision", nargs="+", choices=precision.TIERS, help="tiers (default: fp16; CPU: fp32)"
    )
    harness.add_seconds(parser, load=1.0, window=0.5)
    parser.add_argument(
        "--gate", action="store_true", help="judge every layout on the demo's pictures too"
    )
    harness.add_output(parser)
    args = parser.parse_args()
    with user_errors(parser):
        for size in args.image_size or []:
            harness.complete(Namespace(model=args.model or "DiT-XL/2", ckpt=None, image_size=size))
        if numbers().world < 2:
            launcher = "torchrun --standalone --nproc_per_node=4 bench/many_gpus.py"
            raise UsageError(f"there is nothing to share with one process: {launcher}")
    with launched_ranks("many_gpus.py") as ranks:
        measure(args, ranks)


if __name__ == "__main__":
    main()
