"""Time the collectives that dividing a step would need, on this machine's link: what report.py's fourth section reckons with.

    torchrun --standalone --nproc_per_node=4 scripts/measure_link.py --output log/link.json

All-gather, all-to-all and all-reduce among two ranks and among all, of several sizes a rank: on GPUs over NCCL, ten calls in one CUDA graph as in a
captured step; else over gloo. Median microseconds a call of the slowest rank, after a warm-up.
"""

if not __package__:
    __import__("_as_module")

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from accel.options import OneLineParser, UsageError, check_writable, positive, user_errors
from scripts.benchmark import git

CALLS = 10


def collectives(size, ranks, group, device):
    """name → a call on `size` bytes a rank."""
    mine = torch.randn(size // 2, device=device).to(torch.float16 if device.type == "cuda" else torch.bfloat16)
    every, back = mine.new_empty(ranks * len(mine)), mine.clone()
    return {
        "all-gather": lambda: dist.all_gather_into_tensor(every, mine, group=group),
        "all-to-all": lambda: dist.all_to_all_single(back, mine, group=group),
        "all-reduce": lambda: dist.all_reduce(back, group=group),
    }


def time_call(call, repeats, device, group):
    """Median microseconds of one call."""

    def many():
        for _ in range(CALLS):
            call()

    many()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            dist.barrier(group)
            start = time.perf_counter()
            many()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        many()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(times[3:])


def main():
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=positive,
        default=[1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26],
        metavar="BYTES",
        help="bytes a rank",
    )
    parser.add_argument("--repeats", type=positive, default=30)
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument(
        "--commit",
        default=git("describe", "--always", "--dirty"),
        help="what to record as the commit, where git is not at hand",
    )
    args = parser.parse_args()
    with user_errors(parser):
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            raise UsageError(
                "a link has two ends: torchrun --standalone --nproc_per_node=4 scripts/measure_link.py --output FILE"
            )
        check_writable(args.output)
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    elif rank == 0:
        print(
            f"No GPU: {world} processes on this machine's processor, over gloo; times say nothing about a link between GPUs",
            flush=True,
        )
    dist.init_process_group(backend)
    rows = []
    for ranks in dict.fromkeys((2, world)):
        group = dist.new_group(list(range(ranks)))
        for size in args.sizes:
            for name in ("all-gather", "all-to-all", "all-reduce"):
                mine = torch.zeros(1, device=device)
                if rank < ranks:
                    mine += time_call(collectives(size, ranks, group, device)[name], args.repeats, device, group)
                dist.all_reduce(mine, op=dist.ReduceOp.MAX)
                rows.append(dict(collective=name, ranks=ranks, bytes=size, us=mine.item()))
    if rank == 0:
        record = dict(
            kind="link",
            gpu=torch.cuda.get_device_name(device) if backend == "nccl" else None,
            backend=backend,
            torch=torch.__version__,
            commit=args.commit,
            command=" ".join(["torchrun", f"--nproc_per_node={world}", *sys.argv]),
            link=rows,
        )
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
        for row in rows:
            print(f"{row['collective']:11} {row['ranks']} ranks {row['bytes'] / 2**20:8.2f} MiB {row['us']:10.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
