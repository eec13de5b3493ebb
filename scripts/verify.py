"""Does it hold on your weights and your GPU? Every precision tier's pictures against fp32's, and which tier to take.

    python scripts/verify.py --ckpt results/000-DiT-XL-2/checkpoints/0050000.pt --image-size 256
    python scripts/verify.py --precision fp16 bf16 --seeds 5 --gate strict
    python scripts/verify.py --forecast plan                        # fewer calls of the network, in every tier, against fp32 with all calls
    python scripts/verify.py --model DiT-Demo/2                     # on a CPU as well

Same labels and noise for all, one grid a seed. Each grid and each picture in it is held to the gate by evaluate.py's metrics; the fastest tier
all of whose pictures pass is recommended. Pictures, a heatmap of each tier's worst grid and verify.json land in --output.

Exit status: 0 a tier passes · 1 none does · 2 bad input · 3 a metric could not be computed (LPIPS without its weights), so nothing passes.
"""

if not __package__:
    __import__("_as_module")

import gc
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
import numpy as np
import torch
from PIL import Image

import evaluate
from accel import engine, precision, vae
from accel.forecast import read_plan
from accel.options import (
    OneLineParser,
    UsageError,
    add_arguments,
    check_writable,
    options_from,
    partial_file,
    positive,
    user_errors,
)

AGAIN = "fp32 again"  # what a device without other tiers is held to: itself


def sample(options, seeds, device):
    """Grids (H, W, 3) uint8 by seed, and the seconds of each sampling, after a warm-up."""
    run = engine.Engine(options)
    run.run(steps=3)
    grids, times = {}, []
    for seed in seeds:
        run.options.seed = seed
        engine.synchronize(device)
        start = time.perf_counter()
        latents = run.run()
        engine.synchronize(device)
        times.append(time.perf_counter() - start)
        grids[seed] = vae.to_grid(run.decode(latents)).numpy()
    return grids, times


def parts(a, b):
    """The pictures to hold to the gate: the grid, then each tile, as (name, a, b)."""
    tiles = evaluate.find_tiles(a, b, None)
    return [("grid", a, b)] + [
        (name, np.ascontiguousarray(a[rows, columns]), np.ascontiguousarray(b[rows, columns]))
        for name, rows, columns in tiles
    ]


def judge(want, got, lpips):
    """{seed: grid} twice → a record: every part's metrics and verdict by gate, the worst, and what could not be computed."""
    rows, reasons = [], []
    for seed in want:
        for name, a, b in parts(want[seed], got[seed]):
            values, failed = evaluate.measure(a, b, lpips)
            reasons += [reason for reason in failed if reason not in reasons]
            verdict = {}
            for gate, bars in evaluate.GATES.items():
                holds = evaluate.judge(values, bars).values()
                verdict[gate] = "FAIL" if False in holds else "NONE" if None in holds else "PASS"
            rows.append(dict(seed=seed, part=name, **values, verdict=verdict))
    verdicts = {
        gate: "FAIL"
        if any(row["verdict"][gate] == "FAIL" for row in rows)
        else "NONE"
        if any(row["verdict"][gate] == "NONE" for row in rows)
        else "PASS"
        for gate in evaluate.GATES
    }
    worst = {"mae": max, "lpips": max, "psnr": min, "ssim": min}
    return dict(
        verdicts=verdicts,
        parts=rows,
        reasons=reasons,
        worst={
            where: {
                m: pick([row[m] for row in rows if (row["part"] == "grid") == (where == "grid")] or [math.nan])
                for m, pick in worst.items()
            }
            for where in ("grid", "tile")
        },
        worst_seed=min((row for row in rows if row["part"] == "grid"), key=lambda row: row["psnr"])["seed"],
    )


def choose_tiers(asked, device, forecast="off"):
    """The tiers to hold against fp32 with all calls, fp32 itself where calls are forecast. Raises UsageError for one that the device lacks."""
    for tier in asked or ():
        if not precision.supports(tier, device):
            raise UsageError(f"--precision {tier}: {device} cannot run it; leave it out")
    chosen = list(asked or [tier for tier in precision.TIERS if precision.supports(tier, device)])
    return [tier for tier in chosen if tier != "fp32" or forecast != "off"] or [AGAIN]


def recommend(records, gate):
    """The fastest tier whose every grid and tile passes `gate`, or None."""
    passing = [record for record in records if record.get("verdicts", {}).get(gate) == "PASS"]
    return min(passing, key=lambda record: record["seconds"]["median"])["tier"] if passing else None


def safe(name):
    """A tier's name in a file's."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def spread(times):
    return dict(median=statistics.median(times), least=min(times), most=max(times))


def line(record):
    if "refused" in record:
        return f"  {record['tier']:22}{record['refused']}"
    worst = record["worst"]
    return (
        f"  {record['tier']:22}{record['seconds']['median']:9.2f} s{record['speedup']:8.2f}×   MAE {worst['grid']['mae']:.4f}  LPIPS {worst['grid']['lpips']:.4f}  "
        f"PSNR {worst['grid']['psnr']:6.2f} dB  SSIM {worst['grid']['ssim']:.4f}   tile {worst['tile']['psnr']:6.2f} dB   "
        + "   ".join(f"{gate} {verdict}" for gate, verdict in record["verdicts"].items())
    )


def main():
    parser = OneLineParser(description=__doc__.splitlines()[0])
    add_arguments(parser, leave_out=("precision", "output", "output_type", "repeats", "compile", "seed"))
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=tuple(precision.TIERS),
        help="tiers to hold against fp32 (default: all that the device has)",
    )
    parser.add_argument("--seeds", type=positive, default=3, help="grids to make, from seeds 0, 1, …")
    parser.add_argument(
        "--gate",
        choices=tuple(evaluate.GATES),
        default="contest",
        help="which gate a recommended tier must pass (default: contest)",
    )
    parser.add_argument("--vgg-weights", type=Path, help="LPIPS' VGG16, as in evaluate.py")
    parser.add_argument(
        "--output",
        default="output/verify",
        metavar="DIR",
        help="where pictures and verify.json land (default: output/verify)",
    )
    parser.add_argument("--commit", help="what to record as the commit, where git is not at hand")
    args = parser.parse_args()
    with user_errors(parser):
        device, out = engine.choose_device(args), Path(args.output)
        tiers = choose_tiers(args.precision, device, args.forecast)
        args.precision = args.output = None
        options = replace(options_from(args), precision="fp32")
        check_writable(out / "verify.json")
        if args.vgg_weights is not None and not args.vgg_weights.is_file():
            raise UsageError(f"--vgg-weights {args.vgg_weights}: no such file; it should be {evaluate.VGG16_URL}")
        engine.fetch_weights(options)
        if options.forecast == "plan":
            read_plan(options, options.ckpt or engine.published(options))
        status = verify(args, options, tiers, device, out)
    sys.exit(status)


def verify(args, options, tiers, device, out):
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.model} · {options.image_size} px · {len(options.labels)} labels · {options.num_sampling_steps} steps · cfg {options.cfg_scale:g} · "
        f"{args.seeds} seeds{f' · forecast {options.forecast}' * (options.forecast != 'off')} · {where} · torch {torch.__version__}"
    )
    if tiers == [AGAIN]:
        print(f"There is nothing but fp32 to run on {device}: it is held against a second run of itself.")
    lpips, seeds = evaluate.Lpips(args.vgg_weights), range(args.seeds)
    want, times = sample(replace(options, forecast="off", forecast_plan=None), seeds, device)
    reference = spread(times)
    print(f"  {'fp32':22}{reference['median']:9.2f} s   the reference")
    commit = (
        args.commit
        or subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    )
    record = dict(
        kind="verify",
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        torch=torch.__version__,
        commit=commit,
        command=" ".join(["python", *sys.argv]),
        model=options.model,
        weights=Path(options.ckpt).name if options.ckpt else "published",
        image_size=options.image_size,
        pictures=len(options.labels),
        num_sampling_steps=options.num_sampling_steps,
        seeds=args.seeds,
        forecast=options.forecast,
        gate=args.gate,
        reference=dict(tier="fp32", seconds=reference),
        tiers=[],
    )

    def save():
        with partial_file(out / "verify.json") as partial:
            partial.write_text(
                json.dumps(
                    evaluate.json_ready(
                        {
                            **record,
                            "vgg_weights": lpips.source
                            and {"sha256": lpips.source["sha256"][:8], "published": lpips.source["published"]},
                        }
                    ),
                    indent=1,
                )
                + "\n"
            )

    # First all the sampling, so that its times are the GPU's alone and pictures are on disk before they are judged.
    grids = {}
    for seed, grid in want.items():
        Image.fromarray(grid).save(out / f"seed{seed}-fp32.png")
    for precision_tier in tiers:
        tier = precision_tier + f", forecast {options.forecast}" * (options.forecast != "off")
        gc.collect()
        try:
            grids[tier] = sample(replace(options, precision="fp32" if tier == AGAIN else precision_tier), seeds, device)
        except UsageError as error:  # such as weights that overflow float16
            record["tiers"].append(dict(tier=tier, refused=str(error)))
            print(line(record["tiers"][-1]), flush=True)
        else:
            times = grids[tier][1]
            record["tiers"].append(
                dict(tier=tier, seconds=spread(times), speedup=reference["median"] / statistics.median(times))
            )
            for seed, grid in grids[tier][0].items():
                Image.fromarray(grid).save(out / f"seed{seed}-{safe(tier)}.png")
        save()
    for one in record["tiers"]:
        if "refused" in one:
            continue
        tier, got = one["tier"], grids[one["tier"]][0]
        one |= judge(want, got, lpips)
        seed = one["worst_seed"]
        values = next(row for row in one["parts"] if row["seed"] == seed and row["part"] == "grid")
        evaluate.heatmap(
            out / f"heatmap-{safe(tier)}.png",
            want[seed],
            got[seed],
            values,
            (f"fp32, seed {seed}", tier),
            one["verdicts"][args.gate],
        )
        print(line(one), flush=True)
        save()
    record["recommended"] = best = recommend(record["tiers"], args.gate)
    save()
    for reason in dict.fromkeys(reason for one in record["tiers"] for reason in one.get("reasons", ())):
        print(f"verify.py: {reason}", file=sys.stderr)
    if lpips.source and not lpips.source["published"]:
        print("Note: LPIPS by a VGG16 that is not the published one; these are not the contest's figures")
    verdicts = [one["verdicts"][args.gate] for one in record["tiers"] if "verdicts" in one]
    if best:
        speedup = next(one["speedup"] for one in record["tiers"] if one["tier"] == best)
        flags = "fp32" if best == AGAIN else best.replace(", ", " --")
        print(
            f"RECOMMENDED: --precision {flags} ({speedup:.2f} times fp32's speed; every grid and tile of {args.seeds} seeds "
            f"passes gate {args.gate})"
        )
        return 0
    if "NONE" in verdicts:
        print(f"RECOMMENDED: nothing yet: a metric of gate {args.gate} could not be computed")
        return 3
    print(f"RECOMMENDED: --precision fp32 (no other tier passes gate {args.gate} on every grid and tile)")
    return 1


if __name__ == "__main__":
    main()
