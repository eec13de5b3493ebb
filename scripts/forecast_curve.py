"""Calls of the network against likeness of the pictures: forecast plans beside simpler forecasts, fewer steps and DDIM.

    python scripts/forecast_curve.py --model DiT-Demo/2 --json log/forecast-curve.json --figure docs/forecast-curve.png

Every method starts from the same z and, where it takes all steps, draws the same noise; the reference is float32 with all calls. LPIPS is not computed:
its published VGG16 is evaluate.py's to fetch.
"""

if not __package__:
    __import__("_as_module")

import json
import sys
from pathlib import Path

import torch

from accel.forecast import Auto, Plan
from accel.options import OneLineParser, SamplingOptions, add_arguments, options_from, positive, user_errors
from diffusion import create_diffusion
from evaluate import json_ready
from scripts.benchmark import git
from scripts.calibrate import Bench, compare, search

NAMES = {
    "plan": "a call or two for several steps, calibrated plan",
    "two": "two calls for several steps, even gaps",
    "even": "one call for several steps, even gaps",
    "auto": "a call or two for several steps, auto",
    "line": "x0 by a line through two calls, even gaps",
    "hold": "x0 of the last call, even gaps",
    "steps": "fewer ancestral steps",
    "ddim": "DDIM",
}


def even_strides(steps, calls, each):
    """As even as they come, of `each` calls; the first is one step."""
    count = (calls - 1) // each
    ends = [1 + round((steps - 1) * i / count) for i in range(count + 1)]
    return [(1, 1)] + [
        kind for a, b in zip(ends, ends[1:]) for kind in ([(1, 1)] * (b - a) if b - a <= each else [(b - a, each)])
    ]


@torch.inference_mode()
def extrapolated(bench, seeds, each, gaps, line):
    """The plain way: at a step without a call x_0 and the variance's values are those of the last call, or on the line through the last two."""
    diffusion, (z, labels, draw) = bench.diffusion, bench.draws(seeds, each)
    model, x, step, past = bench.model(labels), z, 0, []
    for gap in gaps:
        for ahead in range(gap):
            t = torch.full_like(labels, diffusion.num_timesteps - 1 - step)
            if ahead == 0:
                eps, values = diffusion._split_output(model(x, diffusion.original_timesteps(t)), x)
                past = [*past[-1:], (step, diffusion._predict_xstart_from_eps(x, t, eps), values)]
            (before, *old), (last, *new) = past[0], past[-1]
            slope = ahead / (last - before) if line and last > before else 0.0
            x0, values = (b + slope * (b - a) for a, b in zip(old, new))
            x = (
                diffusion._posterior_mean(x0, x, t)
                + (t != 0).float().view(-1, 1, 1, 1)
                * torch.exp(0.5 * diffusion._range_log_variance(values, x, t))
                * draw()
            )
            step += 1
    return x


@torch.inference_mode()
def fewer_steps(bench, seeds, each, steps, ddim):
    """A process of `steps` steps, ancestral or DDIM with eta 0, from the same z."""
    diffusion, (z, labels, draw) = create_diffusion(str(steps)), bench.draws(seeds, each)
    diffusion.prepare(bench.device)
    model, x = bench.model(labels), z
    for t in range(steps - 1, -1, -1):
        sample = diffusion.ddim_sample if ddim else diffusion.p_sample
        x = sample(model, x, torch.full_like(labels, t), clip_denoised=False, noise=draw())["sample"]
    return x


def measure(bench, plans, seeds, each, calls_of, tolerances, record):
    """The rows of the curve; `record` is given those so far after each."""
    want, rows = bench.pictures(bench.latents(seeds, each)), []
    steps = bench.diffusion.num_timesteps

    def add(method, calls, latents, **more):
        figures = compare(want, bench.pictures(latents), thorough=True)
        rows.append(
            dict(
                method=method,
                calls=calls,
                **more,
                **{name: value for name, value in figures.items() if "_psnr" not in name},
            )
        )
        record(rows)
        print(
            f"{method:6} {calls:5} calls: whole {figures['psnr']:.1f} dB, tiles median {figures['tile_median']:.1f}, worst {figures['tile_worst']:.1f}, over 40 dB "
            f"{figures['tiles_over_40']:.1%}, grids {figures['grids_over_40']:.1%}, SSIM {figures['ssim_mean']:.4f}",
            flush=True,
        )

    for calls in calls_of:
        if calls in plans:
            add("plan", calls, bench.latents(seeds, each, Plan(bench.diffusion, plans[calls])))
        for method, together in (("two", 2), ("even", 1)):
            plan = Plan(bench.diffusion, even_strides(steps, calls, together))
            add(method, plan.calls, bench.latents(seeds, each, plan))
        for method in ("line", "hold"):
            add(
                method,
                calls,
                extrapolated(bench, seeds, each, [k for k, _ in even_strides(steps, calls, 1)], method == "line"),
            )
        for method in ("steps", "ddim"):
            add(method, calls, fewer_steps(bench, seeds, each, calls, method == "ddim"))
    for tolerance in tolerances:
        auto, parts, calls = Auto(bench.diffusion, tolerance), [], []
        for seed in seeds:  # each a run of its own, as sample.py makes it
            parts.append(bench.latents([seed], each, auto))
            calls.append(auto.calls)
        add(
            "auto",
            round(sum(calls) / len(calls), 1),
            torch.cat(parts),
            tolerance=tolerance,
            calls_from=min(calls),
            calls_to=max(calls),
        )
    return rows


def draw_figure(path, rows, steps):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(17, 4.6), layout="constrained")
    for axis, (name, title) in zip(
        axes,
        (
            ("psnr", "PSNR of the whole set, dB"),
            ("tile_median", "PSNR of the median picture, dB"),
            ("tile_worst", "PSNR of the worst picture, dB"),
            ("ssim_mean", "SSIM, mean"),
        ),
    ):
        for index, (method, label) in enumerate(NAMES.items()):
            points = sorted((row["calls"], float(row[name])) for row in rows if row["method"] == method and name in row)
            if points:
                axis.plot(
                    *zip(*points),
                    marker="o",
                    markersize=4,
                    color=f"C{index}",
                    label=label,
                    linestyle="--" if method in ("steps", "ddim") else "-",
                )
        axis.axhline(40 if name != "ssim_mean" else 0.99, color="grey", linewidth=1, linestyle=":")
        axis.set(title=title, xlabel=f"calls of the network for {steps} steps")
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    parser = OneLineParser(description=__doc__.splitlines()[0])
    add_arguments(
        parser,
        SamplingOptions,
        leave_out=(
            "forecast",
            "forecast_plan",
            "forecast_tolerance",
            "output",
            "output_type",
            "repeats",
            "seed",
            "compile",
        ),
    )
    parser.add_argument(
        "--calls",
        nargs="+",
        type=positive,
        default=[50, 65, 80, 100, 125, 160, 200],
        help="numbers of calls to compare at",
    )
    parser.add_argument(
        "--tolerances", nargs="*", type=float, default=[0.0001, 0.0002, 0.0003, 0.0005, 0.001], help="of auto"
    )
    parser.add_argument("--pictures", type=positive, default=64, help="recorded to make plans from")
    parser.add_argument("--seeds", type=positive, default=16, help="held-out seeds")
    parser.add_argument(
        "--each", type=positive, default=8, help="pictures a held-out seed, a multiple of 8; auto takes them as one run"
    )
    parser.add_argument(
        "--batch", type=positive, default=64, help="pictures at a time; extrapolation and fewer steps take all at once"
    )
    parser.add_argument("--longest", type=positive, default=8, help="most steps of a stride")
    parser.add_argument("--json", required=True, help="file to write the figures to")
    parser.add_argument("--figure", help="PNG to draw")
    args = parser.parse_args()
    with user_errors(parser):
        bench = Bench(options_from(args), args.batch)
        run(args, bench, search(bench, 10_000, args.pictures, args.longest))


def run(args, bench, plans):
    about = dict(
        precision="fp32",
        pictures=f"{args.seeds * args.each}, of {args.seeds} seeds from 20000 on",
        gpu=torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else None,
        torch=torch.__version__,
        commit=git("describe", "--always", "--dirty"),
        command=" ".join(["python", *sys.argv]),
        model=bench.options.model,
        steps=bench.diffusion.num_timesteps,
        cfg_scale=bench.options.cfg_scale,
        lpips="not computed: no published VGG16 at hand",
    )

    def record(rows):
        Path(args.json).write_text(json.dumps(json_ready(dict(about, rows=rows)), indent=1) + "\n")

    seeds = range(20_000, 20_000 + args.seeds)
    rows = measure(bench, plans, seeds, args.each, args.calls, args.tolerances, record)
    if args.figure:
        draw_figure(args.figure, rows, about["steps"])


if __name__ == "__main__":
    main()
