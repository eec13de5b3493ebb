"""Compare every precision tier with fp32 on your weights and your GPU, and recommend one.

    python scripts/verify.py --ckpt results/000-DiT-XL-2/checkpoints/0050000.pt --image-size 256
    python scripts/verify.py --precision fp16 bf16 --seeds 5 --gate contest-2025-06
    python scripts/verify.py --model DiT-Demo/2         # on a CPU as well

All tiers start from the same noise. The fastest tier whose pictures all meet evaluate.py's
criterion is recommended. Pictures, a heatmap of each tier's worst one and verify.json go to
--output.

Exit status: 0 a tier passes · 1 none does · 2 bad input · 3 a metric could not be computed
(LPIPS without its weights)
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import sys
import time
from argparse import Namespace
from pathlib import Path

import evaluate
from accel import Sampler
from accel.cli import OneLineParser, add_arguments, positive, user_errors
from accel.config.options import FILES_AND_LOGS, OPTIONS
from accel.errors import UsageError
from accel.io.output import check_writable
from accel.run.opening import choose_device
from accel.runtime.precision import TIERS, require, supports
from bench import measure


def sample(given: dict, tier: str, seeds: int, folder: Path) -> tuple[list[Path], float]:
    """Write a PNG per seed and label. Return the files, and the shortest time of a seed in seconds:
    the first seed's includes the capture of CUDA graphs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    seconds = []
    with Sampler(**given, precision=tier) as sampler:
        print(sampler.run.describe([tier]))
        for seed in range(seeds):
            start = time.perf_counter()
            pictures = sampler.sample(sampler.run.settings.labels, seed, progress=True)
            seconds.append(time.perf_counter() - start)
            for index, picture in enumerate(pictures):
                files.append(folder / f"seed{seed}-{index}.png")
                picture.save(files[-1])
    return files, min(seconds)


def verify(args: Namespace) -> int:
    """Sample all tiers, judge them, write the record and print the recommendation. Return the exit
    status.
    """
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    device = choose_device(args.device)
    for tier in args.tiers or ():
        require("precision", tier, device)
    check_writable(args.folder / "verify.json")
    lpips = evaluate.Lpips(args.vgg_weights)
    seeds = args.seeds or (3 if device.type == "cuda" else 1)
    reference, seconds = sample(given, "fp32", seeds, args.folder / "reference")
    sampled = {}  # all tiers before any is judged: their times are the device's own
    accelerated = [tier for tier in TIERS if tier != "fp32" and supports(tier, device)]
    for tier in args.tiers or accelerated or ["fp32"]:
        try:
            sampled[tier] = sample(given, tier, seeds, args.folder / tier)
        except UsageError as error:  # such as weights that overflow float16
            print(f"{tier}: {error.by_flags()}")
    reports = {}
    for tier, (files, own_seconds) in sampled.items():
        report = evaluate.judge_pairs(zip(reference, files), evaluate.GATES[args.gate], lpips)
        reports[tier] = dict(seconds=own_seconds, **report)
        evaluate.draw_worst(args.folder / f"heatmap-{tier}.png", report["files"])
        print(
            f"{tier}: {own_seconds:.2f} s, fp32: {seconds:.2f} s   worst",
            f"{evaluate.summary(report['worst'])}   {report['verdict']}",
            *report["reasons"],
        )
    passing = [tier for tier, report in reports.items() if report["verdict"] == "PASS"]
    best = min(passing, key=lambda tier: reports[tier]["seconds"], default="fp32")
    record = dict(
        kind="verify",
        **measure.provenance(device),
        gate=args.gate,
        seeds=seeds,
        seconds=seconds,
        tiers=reports,
        recommended=best,
        vgg_weights=lpips.source,
    )
    measure.write(args.folder / "verify.json", evaluate.json_ready(record))
    print(f"RECOMMENDED: --precision {best}")
    statuses = (evaluate.EXIT_STATUS[report["verdict"]] for report in reports.values())
    return 0 if passing else max(statuses, default=1)


def main() -> None:
    parser = OneLineParser(description=__doc__.partition("\n\n")[0])
    add_arguments(
        parser,
        exclude=(*FILES_AND_LOGS, "precision", "seed", "grids"),
    )
    parser.add_argument(
        "--precision", dest="tiers", nargs="+", choices=TIERS, help="tiers (default: all here)"
    )
    parser.add_argument("--seeds", type=positive, help="seeds 0, 1, … (default: 3; on a CPU 1)")
    evaluate.add_gate(parser)
    parser.add_argument("--vgg-weights", type=Path, help="LPIPS' VGG16, as in evaluate.py")
    parser.add_argument(
        "--output", dest="folder", type=Path, default=Path("output/verify"), metavar="DIR"
    )
    args = parser.parse_args()
    with user_errors(parser):
        sys.exit(verify(args))


if __name__ == "__main__":
    main()
