"""A made-up log of measurements, as the programs write them, and what traces a report's figures to a log."""

import json
import re

from pages import agrees, figures, half_digit, numbers, recorded
from PIL import Image

import evaluate
from bench.jobs import CONTEST
from scripts import report_data

GPU = "Test GPU 9000"


def rung(name, ms, error=1e-3, psnr=None):
    row = dict(rung=name, ms=ms, p10=ms * 0.99, p90=ms * 1.02, steps=9, error=error)
    if psnr is not None:
        worst = dict(mae=1e-3, psnr=psnr, ssim=0.99)
        row["judged"] = dict(pictures=64, worst=worst, contest=psnr > 40, strict=psnr > 70)
    return row


def profile(baseline, ms):
    kinds = {
        "GEMM": dict(ms=ms * 0.7, share=0.7, tflop=14.6, tflops=600.0, of_ceiling=0.8),
        "attention": dict(ms=ms * 0.2, share=0.2, tflop=2.2, tflops=400.0, of_ceiling=0.5),
        "norm/elementwise": dict(ms=ms * 0.08, share=0.08, gb=11.0, gb_s=3500.0, of_ceiling=0.9),
        "copies": dict(ms=0.011, share=1e-4),
        "idle": dict(ms=ms * 0.02, share=0.02),
    }
    wait = dict(where="aten::to → aten::copy_ → cudaStreamSynchronize", per_step=11.0, ms_per_step=ms * 0.9)
    function = dict(name="void at::native::kernel<a|b>(int)", calls=84, total_ms=ms, average_ms=ms / 84)
    return dict(
        kind="profile",
        driver="570.1",
        threads=1,
        weights="random, seed 0",
        pictures=8,
        batch_rows=16,
        image_size=512,
        tier="tf32" if baseline else "fp16",
        baseline=baseline,
        num_sampling_steps=250,
        shape=dict(width=1152, depth=28, heads=16, patch=2, channels=4, tokens=1024, batch_rows=16),
        steps=3,
        window_ms=ms,
        launches_per_step=290.0,
        host_copies_ms=0.012,
        timed=dict(ms=ms, least=ms, most=ms),
        ceilings=dict(gemm_tflops=777.0, gemm="8192", copy_tb_s=4.2),
        kinds=kinds,
        host=[function],
        kernels=[function],
        waits=[wait] if baseline else [],
        floor_ms=24.5,
    )


def log(folder, gpu=GPU):
    """A whole log of measurements, as the scripts write them."""

    def part(name, psnr, contest):
        return dict(seed=1, part=name, mae=0.0371, lpips=0.0002, psnr=psnr, ssim=0.9998) | dict(
            verdict=dict(contest=contest, strict="FAIL")
        )

    def tier(name, picture, verdict, **more):
        parts = [part("grid", 61.27, "PASS"), part("1,4", picture, verdict)]
        worst = {
            where: {metric: one[metric] for metric in evaluate.METRICS} for where, one in zip(("grid", "tile"), parts)
        }
        return dict(
            tier=name, verdicts=dict(contest=verdict, strict="FAIL"), parts=parts, reasons=[], worst=worst
        ) | dict(worst_seed=1, **more)

    fp16 = tier("fp16", 58.1, "PASS", seconds=dict(median=1.5, least=1.4, most=1.6), speedup=6.54)
    bf16 = tier("bf16", 37.12, "FAIL", seconds=dict(median=1.6, least=1.5, most=1.7), speedup=6.1)
    run = dict(load=1.0, sample=8.3, decode=0.4, save=0.3, total=10.0, process=15.0)
    files = {
        "ladder": dict(
            kind="steps",
            rungs=[
                rung("fp32", 407.9, 1e-6),
                rung("tf32", 144.6, psnr=50.0),
                rung("fp16 + half GEMMs", 58.2, psnr=39.0),
                rung("fp16 + CUDA graph", 33.1, psnr=54.0),
                rung("fp16 + one reset", 33.05, psnr=54.0),  # an optimisation that was removed
            ],
            image_size=512,
            pictures=8,
            batch_rows=16,
            load_seconds=5.0,
        ),
        "versus": dict(
            kind="steps",
            rungs=[
                rung("fp16 + CUDA graph", 33.3),
                rung("fp16 + torch.compile default", 38.8),
                rung("fp16 + diffusers' DiTTransformer2DModel", 48.4),
            ],
            image_size=512,
            pictures=8,
            batch_rows=16,
            load_seconds=5.0,
        ),
        "sweep": dict(
            kind="sweep",
            sweep=[
                dict(
                    image_size=size,
                    pictures=n,
                    rung="fp16 + CUDA graph",
                    ms=ms,
                    p10=ms,
                    p90=ms,
                    ms_a_picture=ms / n,
                    peak_gb=4.0,
                )
                for size, n, ms in ((512, 1, 4.7), (512, 2, 8.7), (512, 8, 33.2), (256, 8, 7.8), (1024, 8, 190.0))
            ]
            + [dict(image_size=2048, pictures=8, failed="out of memory")],
            image_size=512,
            pictures=8,
            batch_rows=16,
        ),
        "contest": dict(
            **CONTEST,
            kind="contest",
            weights="XL.pt",
            contest=[
                dict(tier="fp32", seconds=104.2, points=48.12, runs=[{**run, "total": 104.2}]),
                dict(tier="fp16", seconds=10.0, points=50.0, runs=[run]),
            ],
        ),
        "profile-baseline": profile(True, 150.3),
        "profile-fast": profile(False, 34.1),
        "verify/verify": dict(
            kind="verify",
            weights="dit.safetensors",
            image_size=128,
            pictures=8,
            num_sampling_steps=250,
            seeds=3,
            gate="contest",
            recommended="fp16",
            reference=dict(tier="fp32", seconds=dict(median=9.0, least=9.0, most=9.0)),
            tiers=[fp16, bf16, dict(tier="exact", refused="overflows")],
            vgg_weights=dict(sha256="0", published=False),
        ),
        "ddp": dict(
            kind="ddp",
            gpus=4,
            image_size=512,
            precision="fp16",
            steps=250,
            grid_sampling_s={"1": [8.5, 8.4], "4": [2.21, 2.2], "ratio": 0.262},
            start_to_first_step_s={"1": [9.0], "4": [11.0], "ratio": 1.22},
            grid_start_to_picture_s={"1": [19.2], "4": [20.1]},
            grid_phases_s={
                "1": [dict(load=1.1, sample=8.4, total=9.97)],
                "4": [dict(load=3.1, sample=2.2, total=8.97), dict(load=1.3, sample=2.2, total=4.85)],
                "4, rank 0 decodes": [dict(total=4.1)],  # a setting that was removed
            },
            fid_pictures_per_s={"1": 9.0, "4": 35.1, "steps": 25, "batch": 32, "efficiency": 0.975},
        ),
        "parallel": dict(
            kind="parallel",
            gpus=4,
            plans=[
                dict(case, **row)
                for case in (dict(tier="fp16", size=512, labels=1),)
                for row in (
                    dict(gpus=1, plan="one GPU", ms=4.7, speedup=1.0, error=0.0),
                    dict(gpus=2, plan="rows=2", ms=2.7, speedup=1.74, error=1e-4),
                    dict(
                        gpus=4,
                        plan="rows=2,tokens=2,exchange=push",
                        ms=2.0,
                        speedup=2.35,
                        error=2e-4,
                        collectives=1,
                        bytes=2359296,
                    ),
                    dict(gpus=4, plan="rows=1,tokens=4,exchange=ring", ms=1.1, speedup=4.2, error=2e-4),  # removed
                    dict(
                        plan="auto",
                        chosen="rows=2,tokens=2,exchange=push",
                        reason="x",
                        ms=2.0,
                        speedup=2.35,
                        of_best=1.0,
                    ),
                )
            ],
            judged=[
                dict(
                    tier="fp16",
                    plan="rows=2",
                    pictures=64,
                    worst=dict(mae=1e-3, psnr=51.2, ssim=0.99),
                    contest=True,
                    strict=False,
                )
            ],
        ),
        "forecast": dict(
            kind="forecast",
            model="DiT-Demo/2",
            steps=250,
            pictures="128, of 4 seeds",
            precision="fp32",
            note="held-out seeds",
            methods=[
                dict(method=method, evaluations=147, psnr=46.2, tile_median=51.3, tile_worst=35.4)
                | dict(grids_over_40=0.9921, tiles_over_40=0.955)
                for method in ("auto", "hold", "plan")
            ],
        ),
        "link": dict(
            kind="link",
            backend="nccl",
            link=[
                dict(collective=name, ranks=ranks, bytes=size, us=10 + size / 2e5)
                for name in ("all-gather", "all-to-all", "all-reduce")
                for ranks in (2, 4)
                for size in (1 << 16, 1 << 20, 1 << 24)
            ],
        ),
    }
    (folder / "verify").mkdir(parents=True)
    for name, record in files.items():
        (folder / f"{name}.json").write_text(
            json.dumps(
                {
                    **dict(gpu=gpu, torch="2.11.0", version="3.1.4", commit="abc1234", model="DiT-XL/2", cores=2),
                    **dict(command="python scripts/gone.py", today="python bench/steps.py --gate 3"),
                    **record,
                }
            )
        )
    for index, tier in enumerate(("fp32", "fp16")):
        Image.new("RGB", (520, 260), (9, 9, 9 + 5 * index)).save(folder / "verify" / f"seed1-{tier}.png")
    for name in ("fp16", "bf16", "bf16-picture"):
        Image.radial_gradient("L").resize((900, 500)).convert("RGB").save(folder / "verify" / f"heatmap-{name}.png")
    return folder


def untraced(data, text):
    """Figures that no file of their section holds, in one of the report's units or as the ratio of two beside it."""
    everything, found = recorded([one["path"] for one in data["sources"]]), []
    computed = [run["timed"]["ms"] / run["floor_ms"] for run in data["profile"]["runs"]]
    computed += [row["ms"] / 4 for row in data["single"]["rungs"]]  # of 250 steps, s
    computed += [row["bytes"] / row["us"] / 1000 for row in data["design"]["link"]["link"]]  # GB/s
    computed += [job["ideal"] for job in data["many"]["ddp"]] + [
        r["points"] for job in data["many"]["ddp"] for r in job["runs"]
    ]
    computed += numbers([[vars(case["shape"]), case["strategies"]] for case in data["design"]["cases"]])
    computed += [row["bytes"] / case["shape"].depth for case in data["design"]["cases"] for row in case["strategies"]]
    for part in re.split(r"\n## ", text.rpartition("\n## ")[0]):
        roles = report_data.NEEDS.get(int(part[0]) if part[0].isdigit() else 0)
        if roles is None:
            values = everything
        else:
            wanted = set(re.findall(r"\w+", roles)) | {"forecast"}
            of_section = [one["path"] for one in data["sources"] if wanted & {*report_data.roles(one)}]
            values = recorded(of_section)
        blocks = re.split(r"\n\s*\n", part)
        for block, before in zip(blocks, ["", *blocks]):
            cells = [(cell, "") for cell in re.findall(r"(?<=\| )\d+(?= \|)", block)]  # integers
            for number, unit in [*figures(block.replace("×", " × ").replace("%", " % ")), *cells]:
                value, tolerance = half_digit(number)
                scales = (1, 100, 255, 2**-20)
                held = any(abs(value - one * scale) <= tolerance for one in values + computed for scale in scales)
                if not held and not agrees(number, unit, values, before + block):
                    found.append((number, unit, block[:90]))
    return found


# The contest's rule, and the versions of programs: no measurements.
RULE = r"T below 100 s .*? none\.|T 低于 100 秒.*?不得分。|^\| (?:driver|驱动).*?$"
