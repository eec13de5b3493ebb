"""Denoising steps: one optimisation after the other, each with its time, its error and
its pictures.

    python bench/steps.py --gate 3 --output output/ladder.json
    python bench/steps.py --only "CUDA graph" --vs compile max-autotune --output output/versus.json

Times are of whole steps in the sampling loop that sample.py runs (guidance, update and
noise draw included, no decoder): median, 10th and 90th percentile, after --load seconds
of the same steps. Weights are random and not zero, except the demo's: a fresh DiT outputs
zeros. Errors are relative, ‖out − ref‖ / ‖ref‖, of one forward pass against float64.
--gate judges 250-step pictures of the family's demo, or of one with its prediction,
against fp32's from the same noise. To compare two trees, run it in each, with --commit
for a tree that git does not know.
"""

if not __package__:
    __import__("_as_module")

import copy
import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import evaluate
from accel import precision
from accel.cli import OneLineParser, user_errors
from accel.config import Grid
from accel.errors import UsageError
from accel.families import family_of
from accel.grid import ready
from accel.network import Network
from accel.output import to_uint8
from bench import harness
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
HALF = [name for name, tier in precision.TIERS.items() if tier.dtype != torch.float32]


class Rung(NamedTuple):
    """A tier, with switches of harness.build."""

    name: str
    tier: str
    switches: dict


def ladder(device: torch.device, tiers: list[str]) -> Iterator[Rung]:
    """Yield every rung that `device` can run; tiers: the half tiers that are climbed step
    by step.
    """
    for tier in ("fp32", "tf32", "exact"):
        if precision.supports(tier, device):
            yield Rung(tier, tier, {})
    # Plain half precision gets torch's flash attention where there is one.
    attention = "flash" if precision.supports("bf16", device) else "efficient"
    for tier in tiers:
        if not precision.supports(tier, device):
            continue
        switches = {**harness.PLAIN, "attention": attention}
        for name, change in STEPS:
            switches = {**switches, **change}
            yield Rung(f"{tier} + {name}", tier, switches)


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
        grid = Grid.of(model, precision="fp32", num_sampling_steps=steps, device=str(device))
        _, opened, self.reference = ready(grid)
        self.name = model
        self.model = self.reference.network.model
        self.seeds = range(seeds)
        self.labels = [index % opened.config.num_classes for index in range(each)]
        self.want = self.pictures("fp32", {})

    def pictures(
        self, tier: str, switches: dict, share: Callable = lambda network: network
    ) -> list:
        """Return (n, H, W, 3) uint8 for each seed. share: turns the network into one that
        GPUs share.
        """
        network = share(
            harness.build(self.name, self.model, tier, self.reference.device, **switches)
        )
        pipeline = self.reference.with_(network=network, tier=tier)
        latents = [pipeline.latents(self.labels, seed) for seed in self.seeds]
        precision.apply_precision("fp32", pipeline.device)  # the decoder is not under comparison
        levels = pipeline.decoder.levels
        return [to_uint8(pipeline.decode(of_seed), levels).numpy() for of_seed in latents]

    def judge(self, tier: str, switches: dict, share: Callable = lambda network: network) -> dict:
        """Return the worst picture's figures, and whether every picture meets each
        criterion, without LPIPS. MAE is of 0–1. share: as for `pictures`.
        """
        want = np.concatenate(self.want)
        got = np.concatenate(self.pictures(tier, switches, share))
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


def climb(args: Namespace, device: torch.device, rungs: list[Rung]) -> Iterator[dict]:
    """Yield the rungs, timed and judged, then the rivals."""
    model = harness.model_of(args, device)
    reference = Reference(model, args, device)
    judge = None
    # on a CPU there is fp32 alone
    if args.gate and any(rung.name != "fp32" for rung in rungs):
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
        return row

    for rung in rungs:
        make = partial(harness.build, args.model, model, rung.tier, device, **rung.switches)
        row = measure(rung.name, make)
        if judge and rung.name != "fp32":
            row["judged"] = judge.judge(rung.tier, rung.switches)
        yield row
    for rival in args.vs:
        make = partial(Rival, rival, harness.model_of(args, device), torch.float16, device)
        precision.apply_precision("fp16", device)  # after model_of, which sets fp32's switches
        torch._dynamo.reset()
        yield measure(f"fp16 + {RIVALS[rival]}", make)


def rungs_of(args: Namespace, device: torch.device) -> list[Rung]:
    """Return the rungs of the ladder that --only names. Raises UsageError if there is
    nothing to time.
    """
    every = list(ladder(device, args.precision))
    if not args.only:
        return every
    rungs = [rung for rung in every if any(word in rung.name for word in args.only)]
    if not (rungs or args.vs):
        names = ", ".join(rung.name for rung in every)
        raise UsageError(
            f"--only {' '.join(args.only)}: no rung on {device} has that in its name; there are "
            f"{names}"
        )
    return rungs


def line(row: dict) -> str:
    """Return a row as text."""
    text = f"{row['rung']:40} {row['ms']:8.2f} ms [{row['p10']:.2f}, {row['p90']:.2f}]"
    if "error" in row:
        text += f"   error {row['error']:.1e}"
    if "judged" in row:
        judged = row["judged"]
        worst = judged["worst"]
        text += (
            f"   worst PSNR {worst['psnr']:.1f}, MAE {255 * worst['mae']:.4f} of 0-255, without "
            f"LPIPS: {verdicts(judged)}"
        )
    return text


def verdicts(judged: dict) -> str:
    """Return the verdict of each criterion as text. judged: by Judge.judge."""
    return ", ".join(f"{name} {'PASS' if judged[name] else 'FAIL'}" for name in evaluate.GATES)


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    harness.add_arguments(parser)
    harness.add_batch(parser)
    parser.add_argument("--precision", nargs="+", default=["fp16"], choices=HALF, help="half tiers")
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
    args = parser.parse_args()
    with user_errors(parser):
        device = harness.prepare(args)
        if args.vs and device.type != "cuda":
            raise UsageError("--vs: compares float16 on a GPU, and this is none; leave it out")
        rungs = rungs_of(args, device)
        record = dict(
            **harness.about("steps", args, device),
            batch_rows=2 * args.pictures,
            load_seconds=args.load,
            rungs=[],
        )
        print(
            f"gpu {record['gpu']}, torch {record['torch']}, commit {record['commit']}", flush=True
        )
        for row in climb(args, device, rungs):
            record["rungs"].append(row)
            harness.write(args.output, record)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
