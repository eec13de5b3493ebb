"""One picture, or a few, on many GPUs: every way to share them, timed side by side: log/parallel-<gpu>.json.

    torchrun --standalone --nproc_per_node=4 scripts/benchmark_parallel.py --output log/parallel-h200.json

Times are of single denoising steps in the sampling loop that sample_ddp.py runs (guidance, update and noise draw included; no decoder), of the slowest
rank: median, 10th and 90th percentile, after --load seconds of the same steps. The speed-up is over the same network, precision and kernels on one of
these GPUs. Weights are random and not zero. Error: relative, of one forward with guidance, against one GPU; bytes: what a rank receives a layer. The
gate compares 250-step pictures of the demo, shared, with those of fp32 on one GPU.
"""

if not __package__:
    __import__("_as_module")

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from accel import engine, precision
from accel.fast import Optimisations
from accel.network import PlainDiT
from accel.options import (
    DEFAULTS_OF,
    DistributedOptions,
    OneLineParser,
    SamplingOptions,
    UsageError,
    check_writable,
    partial_file,
    positive,
    user_errors,
)
from accel.parallel.exchanges import traffic
from accel.parallel.planner import OFF, Layout, Planner
from accel.parallel.processes import launched, launched_job
from accel.parallel.rows import share
from accel.sampler import denoise
from diffusion import create_diffusion
from models import DiT_models
from scripts.benchmark import Gate, Marks, build, git, random_state, seconds, spread

FORCED = (
    "rows=2",
    "tokens=2,exchange=push",
    "tokens=2,exchange=kv",
    "tokens=2,exchange=ulysses",
    "tokens=2,exchange=ring",
    "rows=4",
    "rows=2,tokens=2,exchange=push",
    "rows=2,tokens=2,exchange=kv",
    "rows=2,tokens=2,exchange=ulysses",
    "rows=2,tokens=2,exchange=ring",
    "tokens=4,exchange=push",
    "tokens=4,exchange=kv",
    "tokens=4,exchange=ulysses",
)


def step_time(work, args, device, busy, rank):
    """Milliseconds of a step of `work` (a number of steps, a callback after each → None), of the slowest of the `busy` ranks: median, 10th and 90th
    percentile of single steps. The other ranks only listen."""

    def times(steps):
        marks = Marks(device)
        if active:
            work(steps, marks)
            engine.synchronize(device)
        return spread(marks.milliseconds() or [0.0])

    def slowest(times):
        values = torch.tensor([*times.values()], dtype=torch.float64, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return dict(zip(times, values.tolist()))

    active = rank < busy
    times(3)  # what only first steps do
    one = slowest(times(6))["ms"]
    load, window = (max(3, min(250, int(1e3 * wanted / one))) for wanted in (args.load, args.window))
    times(load)
    return slowest(times(window))


class Table:
    """All plans for one network, size and number of labels."""

    def __init__(self, args, group, device, network, tier, pictures, model):
        self.args, self.group, self.device, self.network, self.tier = args, group, device, network, tier
        self.pictures, self.latent, self.tokens = pictures, args.size // 8, model.pos_embed.shape[1]
        options = DistributedOptions(labels=(0,) * pictures, image_size=args.size, device=str(device), precision=tier)
        self.planner = Planner(group, options, model)
        generator = torch.Generator(device).manual_seed(1)
        self.z = torch.randn(pictures, 4, self.latent, self.latent, generator=generator, device=device)
        self.labels = torch.arange(pictures, device=device)
        self.null = args.num_classes
        self.diffusion = create_diffusion(str(DistributedOptions.num_sampling_steps))
        self.alone = None

    def measure(self, plan, world):
        """A row of the table: `plan`, or pictures for `world` ranks where it is OFF."""
        busy = plan.busy(world)
        self.planner.tune(self.network, [plan])
        network = self.planner.apply(self.network, plan)
        rows = share(self.pictures, world, self.group.rank) if plan == OFF and self.group.rank < world else slice(None)
        row = dict(gpus=busy, plan=str(plan) if plan != OFF else "one GPU" if world == 1 else "pictures")

        def work(steps, mark):
            if len(self.labels[rows]):
                denoise(
                    network,
                    self.diffusion,
                    self.z,
                    self.labels,
                    DistributedOptions.cfg_scale,
                    self.null,
                    rows=rows,
                    steps=steps,
                    on_step=lambda *_: mark(),
                )

        row |= step_time(work, self.args, self.device, busy, self.group.rank)
        if world == 1 or plan != OFF and plan.stages == 1:  # PipeFusion's depends on the steps before: the gate tells
            x, t = self.z.repeat(2, 1, 1, 1), torch.full((2 * self.pictures,), 500, device=self.device)
            y = torch.cat([self.labels, torch.full_like(self.labels, self.null)])
            if plan == OFF or self.group.rank < busy:
                out = network.forward_with_cfg(x, t, y, DistributedOptions.cfg_scale).double()
                self.alone = out if world == 1 else self.alone
                row["error"] = float((out - self.alone).norm() / self.alone.norm())
        if plan.tokens > 1:
            row["collectives"], row["bytes"] = traffic(
                plan.exchange,
                plan.batch_rows(self.pictures, world),
                self.tokens // plan.tokens,
                plan.tokens,
                self.network.width,
                2 * (1 + (self.tier in ("fp32", "tf32", "exact"))),
            )
        return row


def main(arguments=None):
    """arguments: in place of the command line's."""
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="DiT-XL/2", choices=DiT_models, help="network to time")
    parser.add_argument("--labels", type=positive, nargs="+", default=[1, 2, 8], help="numbers of pictures")
    parser.add_argument(
        "--image-size",
        type=positive,
        nargs="+",
        help="sides of a picture in pixels (default: 512 1024 256; the demo's own)",
    )
    parser.add_argument(
        "--precision", nargs="+", choices=precision.TIERS, help="tiers (default: fp16 on GPUs, else fp32)"
    )
    parser.add_argument(
        "--plans",
        nargs="*",
        default=FORCED,
        metavar="rows=N,tokens=N,exchange=NAME",
        help="plans to time beside auto's choice",
    )
    parser.add_argument("--load", type=seconds, default=1.0, help="seconds of steps before those that count")
    parser.add_argument("--window", type=seconds, default=0.5, help="seconds of steps that count")
    parser.add_argument("--gate", action="store_true", help="judge every plan on the demo's pictures too")
    parser.add_argument("--device", help="default: GPUs if there are any")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument(
        "--commit",
        default=git("describe", "--always", "--dirty"),
        help="what to record as the commit, where git is not at hand",
    )
    args = parser.parse_args(arguments)
    with user_errors(parser):
        plans = [Layout(**DistributedOptions(parallel=text).mesh) for text in args.plans]
        for size in args.image_size or ():
            engine.network_shape(SamplingOptions(model=args.model, image_size=size).resolve())
        if launched()[1] < 2:
            raise UsageError(
                "there is nothing to share with one process: torchrun --standalone --nproc_per_node=4 scripts/benchmark_parallel.py"
            )
    with launched_job("benchmark_parallel.py") as group:
        group.run_collectively(lambda: args.output and check_writable(args.output), only=0)
        name = group.device(args.device)
        device = torch.device(name)
        args.image_size = args.image_size or (
            [DEFAULTS_OF[args.model]["image_size"]] if args.model in DEFAULTS_OF else [512, 1024, 256]
        )
        args.precision = args.precision or [precision.default_tier(device)]
        if device.type != "cuda":
            print(
                f"On {device}: {group.world} processes over gloo share one machine's processor; times say nothing about GPUs",
                flush=True,
            )
        group.open_collectives(name)
        group.wait_for_collectives()
        record = dict(
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            gpus=group.world,
            torch=torch.__version__,
            commit=args.commit,
            command=" ".join(["python", *sys.argv]),
            model=args.model,
            load_seconds=args.load,
            rows=[],
            gates=[],
        )

        def keep():
            if group.rank == 0 and args.output:
                with partial_file(args.output) as partial:
                    partial.write_text(json.dumps(record, indent=1) + "\n")

        if args.gate:
            gates(args, group, device, plans, record, keep)
        for tier in args.precision:
            for size in args.image_size:
                args.size = size
                options = DistributedOptions(
                    model=args.model, image_size=args.size, num_classes=1000, ckpt="random"
                ).resolve()
                args.num_classes = 1000
                with torch.device(device):
                    model = DiT_models[args.model](input_size=options.latent_size, num_classes=1000)
                model.load_state_dict(random_state(model))
                model = model.eval().requires_grad_(False)
                network = PlainDiT(model) if tier in ("fp32", "tf32") else build(model, tier, Optimisations(), device)
                for pictures in args.labels:
                    table = Table(args, group, device, network, tier, pictures, model)
                    measure(args, group, table, plans, dict(tier=tier, size=args.size, labels=pictures), record, keep)
                    del table
                    gc.collect()
                del model, network
                gc.collect()


def measure(args, group, table, plans, case, record, keep):
    worlds = [world for world in (1, 2, 4, 8) if world <= group.world]
    work = [
        (OFF, world)
        for world in worlds
        if world == 1 or table.pictures >= world or table.pictures > 1 and world == group.world
    ]
    # A pipeline is timed where it runs, after its warm-up.
    for plan in dict.fromkeys(plan._replace(warmup=1) if plan.stages > 1 else plan for plan in plans):
        try:
            table.planner.check(plan)
        except UsageError:
            continue
        # A forced layout that leaves ranks with nothing but padding, or that one GPU a picture makes pointless, shows nothing.
        if plan.rows <= 2 * table.pictures and (table.pictures < plan.ranks or plan.tokens * plan.stages == 1):
            work.append((plan, group.world))
    rows, alone = [], None
    for plan, world in work:
        row = dict(case, **table.measure(plan, world))
        alone = alone or row["ms"]
        row["speedup"] = alone / row["ms"]
        rows.append(row)
        print(
            f"{case['tier']} {case['size']} px {case['labels']} labels  {row['gpus']} GPUs {row['plan']:34} {row['ms']:8.3f} ms [{row['p10']:.3f}, {row['p90']:.3f}]  {row['speedup']:.2f}x"
            + (f"  error {row['error']:.1e}" if "error" in row else ""),
            flush=True,
        )
    if table.pictures < group.world:
        chosen, reason = table.planner.choose(table.network)
        text = str(chosen) if chosen != OFF else "pictures" if table.pictures > 1 else "one GPU"
        took = next((row["ms"] for row in rows if row["plan"] == text), None)
        best = min(row["ms"] for row in rows if not row["plan"].startswith("stages"))  # which is approximate
        auto = dict(
            case,
            plan="auto",
            chosen=text,
            reason=reason,
            ms=took,
            speedup=took and alone / took,
            of_best=took and best / took,
        )
        rows.append(auto)
        print(f"auto: {text}, {best / took:.3f} of the best's speed; {reason}" if took else f"auto: {text}", flush=True)
    record["rows"] += rows
    keep()


def gates(args, group, device, plans, record, keep):
    """Every plan on the demo's 64 pictures in each tier, against fp32 on one GPU."""
    gate = Gate(1, device)
    for tier in args.precision:
        options = DistributedOptions(
            labels=gate.options.labels, image_size=gate.options.image_size, device=str(device), precision=tier
        )
        planner = Planner(group, options, gate.model)
        for plan in [OFF, *plans]:
            try:
                planner.check(plan)
            except UsageError:
                continue

            def shared(network):
                network = PlainDiT(network) if isinstance(network, torch.nn.Module) else network
                return planner.apply(network, plan)

            if group.rank >= plan.ranks:
                shared(gate.model)  # every rank makes the groups
                continue
            result = gate.judge(tier, None if tier in ("fp32", "tf32") else Optimisations(), shared)
            if group.rank == 0:
                record["gates"].append(dict(tier=tier, plan=str(plan) if plan != OFF else "one GPU", **result))
                print(
                    f"gate {tier} {plan}: worst PSNR {result['worst']['psnr']:.1f}, contest {'pass' if result['passes'] else 'FALLS SHORT'}, "
                    f"strict {'pass' if result['strict'] else 'falls short'}",
                    flush=True,
                )
                keep()
            gc.collect()
    gate.model = None


if __name__ == "__main__":
    main()
