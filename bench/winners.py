"""Which of cuBLASLt's algorithms win XL/2's GEMMs on this GPU under load, for accel/kernels/linear/known.json.

    python bench/winners.py --output output/winners.json
    python bench/winners.py --batch-rows 2 --tokens 256 --record

All candidates take turns in replayed graphs of 28 launches with as many weights, more than the cache holds, as in a
step. The fastest of them then run alone for seconds each: at its power limit a GPU lowers its clock, and the algorithm
that takes the least energy wins. --record puts the winners into known.json, where the GPU's runs find them."""

if not __package__:
    __import__("_as_module")

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from accel.command_line import OneLineParser, user_errors
from accel.files import atomic_write
from accel.flags import positive
from accel.graphs import capture
from accel.kernels.linear import cublaslt, tuner
from bench import harness

KNOWN = Path(tuner.__file__).with_name("known.json")
DEPTH, FINALISTS = 28, 6
LAYERS = (3456, 1152, False), (1152, 1152, False), (4608, 1152, True), (1152, 4608, False)  # N, K, GELU


def milliseconds(replays: list[Callable], duration: float) -> list[float]:
    """Median milliseconds of each replay in the last third of `duration` seconds. They take turns, so that all see the
    same clock."""
    times, end, device = [[] for _ in replays], time.perf_counter() + duration, torch.device("cuda")
    while time.perf_counter() < end or len(times[0]) < 3:
        for replay, mine in zip(replays, times):
            replay()
            mine.append(harness.elapsed_ms(replay, device))
    return [statistics.median(mine[2 * len(mine) // 3 :]) for mine in times]


@torch.no_grad()
def winner(m: int, n: int, k: int, gelu: bool, load: float) -> dict:
    """A GEMM's record: its candidates with microseconds of a launch, in turns and, of the fastest, alone."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.float16
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, k, generator=generator, device=device).to(dtype)
    weights = (torch.randn(DEPTH, n, k, generator=generator, device=device) / k**0.5).to(dtype)
    bias, out = torch.randn(n, device=device).to(dtype), torch.empty(m, n, dtype=dtype, device=device)
    gemm = cublaslt.Gemm(m, n, k, gelu, dtype, device)
    found = [one for one in gemm.candidates() if gemm.find(cublaslt.configuration(one)) == one]
    replays = [capture(lambda one=one: [gemm.run(one, x, weight, bias, out) for weight in weights]) for one in found]
    names = map(cublaslt.configuration, found)
    rows = [dict(algorithm=name, us=1e3 * ms / DEPTH) for name, ms in zip(names, milliseconds(replays, 0.4))]
    for index in sorted(range(len(rows)), key=lambda i: rows[i]["us"])[:FINALISTS]:
        rows[index]["us_alone"] = 1e3 * milliseconds([replays[index]], load)[0] / DEPTH
    best = min((row for row in rows if "us_alone" in row), key=lambda row: row["us_alone"])
    return dict(m=m, n=n, k=k, gelu=gelu, winner=best["algorithm"], candidates=rows)


def record_winners(gpu: str, gemms: list[dict], path: Path) -> None:
    """Merge the winners of a GPU into known.json at `path`: a GPU's shapes a line each."""
    known = json.loads(path.read_text())
    mine = {f"{one['m']}x{one['n']}x{one['k']}{' gelu' * one['gelu']}": one["winner"] for one in gemms}
    known[gpu] = {**known.get(gpu, {}), **mine}
    blocks = (
        f'  "{name}": {{\n' + ",\n".join(f"    {json.dumps(shape)}: {json.dumps(won)}" for shape, won in shapes.items())
        for name, shapes in known.items()
    )
    with atomic_write(path, "w") as file:
        file.write("{\n" + "\n  },\n".join(blocks) + "\n  }\n}\n")


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-rows", nargs="+", type=positive, default=[16, 8, 4, 2, 1], metavar="N")
    parser.add_argument("--tokens", type=positive, default=1024, help="of a row; 1024 is a picture of 512 px")
    parser.add_argument("--load", type=float, default=1.5, help="seconds of each of the fastest, alone")
    parser.add_argument("--record", action="store_true", help="put the winners into known.json")
    harness.add_arguments(parser, network=False)
    args = parser.parse_args()
    with user_errors(parser):
        device = harness.require_gpu(args, "GEMMs are timed")
    record = dict(kind="winners", **harness.provenance(device, args.commit), load_seconds=args.load)
    shapes, gemms = [(rows * args.tokens, *layer) for rows in args.batch_rows for layer in LAYERS], []
    for shape in tqdm(shapes, unit="GEMM"):
        gemms.append(winner(*shape, args.load))
        harness.write(args.output, record | dict(gemms=gemms))
        tqdm.write(f"{shape}: {gemms[-1]['winner']}")
    if args.record:
        record_winners(record["gpu"], gemms, KNOWN)


if __name__ == "__main__":
    main()
