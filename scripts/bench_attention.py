"""Time attention's routes at DiT-XL/2's shapes on this GPU, with their errors against float64: a table, and JSON with --output."""

if not __package__:
    __import__("_as_module")

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from accel.kernels.attention import attention

HEADS, DIM = 16, 72
SHAPES = ((16, 1024), (4, 1024), (2, 1024), (16, 256), (16, 64), (2, 4096))  # rows, tokens


def load(seconds):
    """Keep the GPU at its power limit for a while: bursts from cold are faster than any run."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def milliseconds(calls, repeats=20, rounds=11):
    """Median and range of each call's time, in replayed graphs that take turns: the clock wanders with the power drawn, so all meet the same."""
    graphs = []
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graphs.append(graph)
    times = [[] for _ in calls]
    for _ in range(rounds + 2):
        for graph, mine in zip(graphs, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end) / repeats)
    ordered = [sorted(mine[2:]) for mine in times]
    return [dict(median=mine[rounds // 2], least=mine[0], most=mine[-1]) for mine in ordered]


def error(got, qkv):
    """Relative to float64, of one row."""
    q, k, v = qkv[:1].double().unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind(0)  # each (1, h, T, d)
    want = ((q @ k.mT / DIM**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return float((got[:1].double() - want).norm() / want.norm())


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routes", nargs="+", default=["hopper", "cudnn", "flash", "efficient"])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: kernels of a GPU are timed, and there is none here\n")
    commit = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    )
    report = dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        commit=commit,
        command=" ".join(["python", *sys.argv]),
        dtype=args.dtype,
        heads=HEADS,
        head_dim=DIM,
        rows=[],
    )
    print(f"{report['gpu']}, torch {report['torch']}, {args.dtype}, {HEADS} heads of {DIM}")
    load(3)
    for n, tokens in SHAPES:
        qkv = torch.randn(n, tokens, 3 * HEADS * DIM, device="cuda").to(getattr(torch, args.dtype))
        for route, ms in zip(
            args.routes, milliseconds([partial(attention, qkv, HEADS, route) for route in args.routes])
        ):
            row = dict(
                rows=n,
                tokens=tokens,
                route=route,
                ms=ms,
                tflops=4 * n * HEADS * tokens**2 * DIM / ms["median"] / 1e9,
                error=error(attention(qkv, HEADS, route), qkv),
            )
            report["rows"].append(row)
            print(
                f"{n:3d} rows of {tokens:4d} tokens  {route:9s} {ms['median'] * 1e3:7.1f} us ({ms['least'] * 1e3:.1f} to {ms['most'] * 1e3:.1f})"
                f"  {row['tflops']:4.0f} TFLOP/s  error {row['error']:.1e}",
                flush=True,
            )
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
