"""Is it the same picture on your weights and your GPU? Every precision tier against fp32,
and which tier to take.

    python scripts/verify.py --ckpt results/000-DiT-XL-2/checkpoints/0050000.pt --image-size 256
    python scripts/verify.py --precision fp16 bf16 --seeds 5 --gate strict
    python scripts/verify.py --model DiT-Demo/2         # on a CPU as well

Labels and noise are the same for all tiers, one grid a seed. evaluate.py's metrics judge
each grid and each picture in it. The fastest tier whose grids and pictures all meet the
criterion is recommended. Pictures, a heatmap of each tier's worst grid, one of the
picture that fails most, and verify.json go to --output.

Exit status: 0 a tier passes · 1 none does · 2 bad input · 3 a metric could not be
computed (LPIPS without its weights)
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import evaluate
from accel import precision
from accel.cli import OneLineParser, add_arguments, options_from, positive, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.jobs.grid import batches_of, load
from accel.opening import choose_device, open_run
from accel.options import Options
from accel.output import check_writable, to_grid
from accel.pipeline import free_memory, hardware
from accel.progress import Stopwatch, step_bar
from accel.resolve import Run
from bench import harness

AGAIN = "fp32 again"  # a device without other tiers is compared with itself


def sample(
    run: Run, seeds: range, tier: str, out: Path
) -> tuple[dict[int, np.ndarray], dict[str, float]]:
    """Write a grid for each seed. Return them by seed, each (H, W, 3) uint8, and the median, least
    and most seconds of one, timed after a warm-up.
    """
    device = run.device
    free_memory(device)  # captured graphs keep an earlier network's memory until then
    pipeline = load(run)
    batches = batches_of(run)
    pipeline.warm_up(run["labels"], batches)
    steps = pipeline.process.steps * len(batches)
    watch = Stopwatch(device)
    grids = {}
    for seed in seeds:
        bar = step_bar(steps, device, desc=f"{tier}, seed {seed}", leave=False)
        with watch.phase(str(seed)), bar as on_step:
            latents = pipeline.latents(run["labels"], seed, batches, on_step)
        grids[seed] = to_grid(pipeline.decode(latents)).numpy()
        with atomic_write(out / f"seed{seed}-{harness.safe(tier)}.png") as file:
            Image.fromarray(grids[seed]).save(file, "PNG")
    times = watch.seconds.values()
    return grids, dict(median=statistics.median(times), least=min(times), most=max(times))


def parts(a: np.ndarray, b: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the parts of grids a and b that must meet the criterion: "grid", and each
    picture as "row,column".
    """
    pixels = {"grid": (a, b)}
    for name, place in evaluate.find_tiles(a, b):
        pixels[name] = a[place], b[place]
    return pixels


def judge(want: dict, got: dict, lpips: Callable, name: str = "") -> dict:
    """Return the metrics and verdicts of every part of `got` against `want`, both {seed:
    grid}, the worst value of each metric, and the reasons for metrics without a value.
    """
    rows = []
    reasons = {}  # a dict keeps the order
    for seed in tqdm(want, desc=f"{name}: metrics", unit="grid", leave=False):
        for part, (a, b) in parts(want[seed], got[seed]).items():
            values, failed = evaluate.measure(a, b, lpips)
            reasons |= dict.fromkeys(failed)
            verdict = {
                gate: evaluate.verdict_of(values, thresholds)
                for gate, thresholds in evaluate.GATES.items()
            }
            rows.append(dict(seed=seed, part=part, **values, verdict=verdict))
    grids = [row for row in rows if row["part"] == "grid"]
    tiles = [row for row in rows if row["part"] != "grid"]
    verdicts = {}
    for gate in evaluate.GATES:
        verdicts[gate] = evaluate.overall(row["verdict"][gate] for row in rows)
    return dict(
        verdicts=verdicts,
        parts=rows,
        reasons=[*reasons],
        worst=dict(grid=worst_values(grids), tile=worst_values(tiles)),
        worst_seed=min(grids, key=lambda row: row["psnr"])["seed"],
    )


def worst_values(rows: list[dict]) -> dict[str, float]:
    """Return the worst value of each metric; NaN without rows."""
    worst = {}
    for metric, pick in (("mae", max), ("lpips", max), ("psnr", min), ("ssim", min)):
        worst[metric] = pick([row[metric] for row in rows], default=math.nan)
    return worst


def choose_tiers(asked: list[str] | None, device: torch.device) -> list[str]:
    """Return the tiers to compare with fp32. Raises UsageError for a tier that the device
    lacks.
    """
    for tier in asked or ():
        precision.require("precision", tier, device)
    chosen = asked or [tier for tier in precision.TIERS if precision.supports(tier, device)]
    return [tier for tier in chosen if tier != "fp32"] or [AGAIN]


def recommend(records: list[dict], gate: str) -> dict | None:
    """Return the fastest tier whose every grid and picture meets the criterion, or None."""
    passing = [record for record in records if record.get("verdicts", {}).get(gate) == "PASS"]
    return min(passing, key=lambda record: record["seconds"]["median"], default=None)


def line(record: dict) -> str:
    if "refused" in record:
        return f"  {record['tier']:22}{record['refused']}"
    grid = record["worst"]["grid"]
    tile = record["worst"]["tile"]
    verdicts = "   ".join(f"{gate} {verdict}" for gate, verdict in record["verdicts"].items())
    return (
        f"  {record['tier']:22}{record['seconds']['median']:9.2f} s{record['speedup']:8.2f}×   "
        f"MAE {grid['mae']:.4f} {evaluate.LEVELS}  LPIPS {grid['lpips']:.4f}  "
        f"PSNR {grid['psnr']:6.2f} dB  SSIM {grid['ssim']:.4f}   "
        f"worst picture {tile['psnr']:6.2f} dB   {verdicts}"
    )


def shown(record: dict, gate: str) -> dict[str, dict]:
    """Return the rows that heatmaps of a judged tier show, by the suffix of their names:
    the worst grid, and the picture that fails most if there is one. Figures may be read
    from JSON.
    """
    rows = {}
    failed = []
    for row in record["parts"]:
        if row["part"] == "grid" and row["seed"] == record["worst_seed"]:
            rows[""] = row
        if row["part"] != "grid" and row["verdict"][gate] == "FAIL":
            failed.append(row)
    if failed:
        rows["-picture"] = min(failed, key=lambda row: float(row["psnr"]))
    return rows


def draw_heatmaps(out: Path, record: dict, want: dict, got: dict, gate: str) -> None:
    """Write a tier's heatmaps, each under its own verdict."""
    for suffix, row in shown(record, gate).items():
        a, b = parts(want[row["seed"]], got[row["seed"]])[row["part"]]
        what = "whole grid" if row["part"] == "grid" else f"picture {row['part']}"
        names = f"fp32, seed {row['seed']}, {what}", record["tier"]
        path = out / f"heatmap-{harness.safe(record['tier'])}{suffix}.png"
        evaluate.heatmap(path, a, b, row, names, row["verdict"][gate])


def verify(args: Namespace, options: Options, run: Run, tiers: list[str], out: Path) -> dict:
    """Sample, judge and recommend. Return the record, which is in verify.json too. run: of the
    options, in fp32.
    """
    lpips = evaluate.Lpips(args.vgg_weights)
    machine = [count(args.seeds, "seed"), hardware(run.device), f"torch {torch.__version__}"]
    print(run.describe(machine))
    if tiers == [AGAIN]:
        print(f"{run.device} runs fp32 only: it is compared with a second run of itself.")
    # First all the sampling: its times are the GPU's alone, and the pictures are on disk
    # before they are judged.
    want, reference = sample(run, range(args.seeds), "fp32", out)
    print(f"  {'fp32':22}{reference['median']:9.2f} s   the reference", flush=True)
    records = []
    grids = {}
    for tier in tiers:
        try:
            # The decoder's arithmetic follows the tier, unless the user has chosen it.
            in_tier = run.resolved(options.changed(precision=tier.partition(" ")[0]))
            grids[tier], seconds = sample(in_tier, range(args.seeds), tier, out)
        except UsageError as error:  # such as weights that overflow float16
            records.append(dict(tier=tier, refused=error.by_flags()))
            continue
        speedup = reference["median"] / seconds["median"]
        records.append(dict(tier=tier, seconds=seconds, speedup=speedup))
    for record in records:
        if "refused" not in record:
            got = grids[record["tier"]]
            record |= judge(want, got, lpips, record["tier"])
            draw_heatmaps(out, record, want, got, args.gate)
        print(line(record), flush=True)
    best = recommend(records, args.gate)
    vgg = lpips.source
    record = dict(
        kind="verify",
        **harness.provenance(run.device, args.commit),
        seeds=args.seeds,
        gate=args.gate,
        model=run["model"],
        image_size=run["image_size"],
        num_sampling_steps=run["num_sampling_steps"],
        sampler=run["sampler"],
        cfg_scale=run["cfg_scale"],
        guide=run["guide"] and Path(run["guide"]).name,
        pictures=run.count,
        tiers=records,
        weights=Path(run.source.name).name,
        reference=dict(tier="fp32", seconds=reference),
        vgg_weights=vgg and dict(sha256=vgg["sha256"][:8], published=vgg["published"]),
        recommended=best and best["tier"],
    )
    harness.write(out / "verify.json", evaluate.json_ready(record))
    if vgg and not vgg["published"]:
        print(
            "Note: LPIPS is by a VGG16 that is not the published one; it is not the contest's "
            "figure"
        )
    return record


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def conclude(record: dict) -> int:
    """Print the recommendation. Return the exit status."""
    reasons = chain.from_iterable(tier.get("reasons", ()) for tier in record["tiers"])
    for reason in dict.fromkeys(reasons):  # a dict keeps the order
        print(f"verify.py: {reason}", file=sys.stderr)
    gate = record["gate"]
    seeds = count(record["seeds"], "seed")
    best = recommend(record["tiers"], gate)
    if best and best["tier"] == AGAIN:
        status = 0
        text = f"--precision fp32 (the only tier here; its second run meets the {gate} criterion)"
    elif best:
        speedup = f"{best['speedup']:.2f} times fp32's speed"
        status = 0
        text = (
            f"--precision {best['tier']} ({speedup}; all grids and pictures of {seeds} meet the "
            f"{gate} criterion)"
        )
    elif any(tier.get("verdicts", {}).get(gate) == "NONE" for tier in record["tiers"]):
        status = 3
        text = f"nothing yet: a metric of the {gate} criterion could not be computed"
    else:
        status = 1
        text = (
            f"--precision fp32 (no other tier meets the {gate} criterion on every grid and picture)"
        )
    print(f"RECOMMENDED: {text}")
    return status


def main() -> None:
    parser = OneLineParser(description=" ".join(__doc__.partition("\n\n")[0].split()))
    add_arguments(parser, leave_out=("precision", "output", "output_type", "seed", "seed_list"))
    add = parser.add_argument
    add(
        "--precision",
        dest="tiers",
        nargs="+",
        choices=tuple(precision.TIERS),
        help="tiers to verify (default: all that the device has)",
    )
    add("--seeds", type=positive, help="grids to make, from seeds 0, 1, … (default: 3; CPU: 1)")
    add(
        "--gate",
        choices=tuple(evaluate.GATES),
        default="contest",
        help="criterion of a recommended tier (default: contest)",
    )
    add("--vgg-weights", type=Path, help="LPIPS' VGG16, as in evaluate.py")
    add(
        "--output",
        dest="folder",
        default="output/verify",
        metavar="DIR",
        help="default: output/verify",
    )
    add("--commit", help="commit to record (default: git's)")
    args = parser.parse_args()
    with user_errors(parser):
        device = choose_device(args.device)
        out = Path(args.folder)
        tiers = choose_tiers(args.tiers, device)
        args.seeds = args.seeds or (3 if device.type == "cuda" else 1)
        options = options_from(args)
        check_writable(out / "verify.json")
        run = open_run(options.changed(precision="fp32"), device)
        sys.exit(conclude(verify(args, options, run, tiers, out)))


if __name__ == "__main__":
    main()
