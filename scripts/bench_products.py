"""Time DiT-XL/2's products by route, and steps of few rows with and without our own kernels, on this GPU: a table, and JSON with --output.

Times are of replayed graphs that take turns, after seconds of load. A product is 28 launches with as many weights, more than the cache holds, as in
a step; a step is the network without sampler and guidance.
"""

if not __package__:
    __import__("_as_module")

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

from accel.fast import FastDiT, Optimisations, hoist_conditioning
from accel.graphs import capture
from accel.kernels.linear import Linear
from accel.kernels.linear.cublaslt import configuration
from accel.kernels.linear.hopper import Tile
from accel.kernels.linear.tuner import Tuner
from models import DiT_models
from scripts.bench_attention import load
from scripts.benchmark import git, random_state

DEPTH = 28
PRODUCTS = {"qkv": (3456, 1152), "proj": (1152, 1152), "fc1": (4608, 1152), "fc2": (1152, 4608)}  # N, K; GELU after fc1
BEFORE = Optimisations(products="cublaslt", rows="triton")  # without our kernels for few rows


def milliseconds(replays, seconds=0.5, least=15):
    """Median and range of each replay's time; they take turns, so that all meet the same clock."""
    times, total = [[] for _ in replays], 0
    while total < 1e3 * seconds or len(times[0]) < least:
        for replay, mine in zip(replays, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replay()
            start.record()
            replay()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end))
            total += 2 * mine[-1]
    return [dict(median=statistics.median(mine), least=min(mine), most=max(mine)) for mine in times]


def product(name, m, routes, dtype):
    """A row for each route: microseconds of one launch, its algorithm, its error against float64."""
    n, k = PRODUCTS[name]
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
    weights, bias = (
        (torch.randn(DEPTH, n, k, generator=generator, device="cuda") / k**0.5).to(dtype),
        torch.randn(n, device="cuda").to(dtype),
    )
    gelu = name == "fc1"
    want = x.double() @ weights[0].double().t() + bias.double()
    if gelu:
        want = torch.nn.functional.gelu(want, approximate="tanh")
    tuner = Tuner()
    layers = {route: [Linear(weight, bias, gelu, tuner, route) for weight in weights] for route in routes}
    replays = [capture(lambda route=route: [layer(x) for layer in layers[route]]) for route in routes]
    for route, ms in zip(routes, milliseconds(replays)):
        chosen = tuner.choose(m, n, k, gelu, dtype, x.device, route).algorithm
        algorithm = chosen._asdict() if isinstance(chosen, Tile) else dict(cublaslt=configuration(chosen))
        error = (layers[route][0](x).double() - want).norm() / want.norm()
        yield dict(
            product=name,
            m=m,
            n=n,
            k=k,
            route=route,
            us={key: value / DEPTH * 1e3 for key, value in ms.items()},
            tflops=2e-9 * m * n * k * DEPTH / ms["median"],
            error=float(error),
            algorithm=algorithm,
        )


def steps(rows, state, heads, dtype):
    """Milliseconds of a step before and after, in turns."""
    x, labels = torch.randn(rows, 4, 64, 64, device="cuda"), torch.arange(rows, device="cuda")
    t = torch.full_like(labels, 400)
    kinds, replays, held = {"before": BEFORE, "after": Optimisations()}, [], []
    for switches in kinds.values():
        network = FastDiT(state, heads, dtype, torch.device("cuda", 0), switches)
        context = hoist_conditioning(network, [400], labels.tolist())
        context.__enter__().reach(0)
        held.append(context)
        replays.append(capture(partial(network._forward, x, t, labels)))
    for kind, ms in zip(kinds, milliseconds(replays, 2)):
        yield dict(rows=rows, tokens=1024, switches=kind, ms=ms)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--m",
        nargs="+",
        type=int,
        default=[512, 1024, 2048, 4096, 16384],
        help="rows of the products' operand, tokens of all samples",
    )
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 16], help="samples of the steps at 512 px")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument(
        "--commit",
        default=git("describe", "--always", "--dirty"),
        help="what to record as the commit, where git is not at hand",
    )
    parser.add_argument("--output", metavar="FILE.json", help="write the figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: kernels of a GPU are timed, and there is none here\n")
    dtype = getattr(torch, args.dtype)
    report = dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        commit=args.commit,
        command=" ".join(["python", *sys.argv]),
        dtype=args.dtype,
        steps=[],
        products=[],
    )
    print(f"{report['gpu']}, torch {report['torch']}, {args.dtype}")

    def record(kind, row, line):
        report[kind].append(row)
        print(line, flush=True)
        if args.output:
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output).write_text(json.dumps(report, indent=1) + "\n")

    load(3)
    model = DiT_models["DiT-XL/2"](input_size=64).to("cuda").eval()
    state = random_state(model)
    for rows in args.rows:
        for row in steps(rows, state, model.num_heads, dtype):
            record(
                "steps",
                row,
                f"{rows:3d} rows  {row['switches']:7s} {row['ms']['median']:7.3f} ms ({row['ms']['least']:.3f} to {row['ms']['most']:.3f})",
            )
    del model, state
    for m in args.m:
        for name in PRODUCTS:
            for row in product(name, m, ("cublaslt", "hopper", "tuned"), dtype):
                record(
                    "products",
                    row,
                    f"{m:6d}  {name:5s} {row['route']:9s} {row['us']['median']:7.2f} us  {row['tflops']:4.0f} TFLOP/s  error "
                    f"{row['error']:.1e}  {row['algorithm']}",
                )


if __name__ == "__main__":
    main()
