"""Find how few calls of the network give the same pictures on your weights, and write the plan that sample.py --forecast plan follows.

    python scripts/calibrate.py --model DiT-Demo/2
    python scripts/calibrate.py --ckpt pretrained_models/DiT-XL-2-512x512.pt --image-size 512 --margin 1

1. Cost of every stride: --pictures runs with all calls are recorded; from every step of theirs one call or two take 2, 3, … steps, and the mean square
   distance to where the run went is what that stride costs.
2. Sensitivity: what an error made at a step does to the finished picture, from runs with two calls for three steps in one window of steps only.
3. For every number of calls, the plan whose strides cost least, cost times sensitivity, by dynamic programming.
4. The fewest calls whose pictures pass the contest gate's PSNR against float32 with all calls, plus --margin, on 99 % of the grids of eight and on 93 % of the
   pictures of fresh seeds.
5. The evidence, from seeds that none of this has seen; if it falls short of the gate, a few calls more. LPIPS is left to evaluate.py.
"""

if not __package__:
    __import__("_as_module")

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from diffusion.forecast import Strides

from accel import engine, precision, vae
from accel.forecast import Plan, plan_path, settings_of, write_plan
from accel.options import (
    OneLineParser,
    SamplingOptions,
    UsageError,
    add_arguments,
    check_writable,
    options_from,
    positive,
    user_errors,
)
from diffusion import create_diffusion
from evaluate import GATES, json_ready, mae, psnr, ssim

GRID = 8
WINDOW = 10  # steps over which a sensitivity is measured
PROBE = 3, 2  # by strides of this kind
SHARE_OF_GRIDS, SHARE_OF_TILES = 0.99, 0.93


class Bench:
    """Float32 with all calls, the pictures it makes, and others' distance to them."""

    def __init__(self, options, batch):
        self.options, self.batch = options, batch
        self.device = engine.choose_device(options)
        self.tier = engine.choose_precision(options, self.device)
        self.diffusion = create_diffusion(str(options.num_sampling_steps))
        self.diffusion.prepare(self.device)
        precision.apply_precision("fp32", self.device)
        self.reference = engine.load_model(options, self.device, "fp32")
        self.network = self.reference if self.tier == "fp32" else engine.load_model(options, self.device, self.tier)
        self.decoder = vae.load_vae(vae.find_vae(options.vae), self.device)

    def draws(self, seeds, each):
        """z (n, 4, L, L), labels (n,) and the draw of a step's noise of `each` pictures a seed, each seed with a generator of its own."""
        generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        shape = each, 4, self.options.latent_size, self.options.latent_size

        def draw():
            return torch.cat([torch.randn(shape, generator=generator, device=self.device) for generator in generators])

        labels = torch.tensor(self.options.labels, device=self.device)
        return draw(), labels[torch.arange(len(seeds) * each, device=self.device) % len(labels)], draw

    def latents(self, seeds, each, forecast=None, network=None, tier="fp32"):
        """Latents of `each` pictures a seed, as many seeds at a time as make a batch."""
        precision.apply_precision(tier, self.device)
        at_once, parts = max(1, self.batch // each), []
        for first in range(0, len(seeds), at_once):
            z, labels, draw = self.draws(seeds[first : first + at_once], each)
            parts.append(
                engine.denoise(
                    network or self.reference,
                    self.diffusion,
                    z,
                    labels,
                    self.options.cfg_scale,
                    self.options.num_classes,
                    guided=self.options.cfg_scale > 1,
                    draw=draw,
                    forecast=forecast,
                )
            )
        precision.apply_precision("fp32", self.device)  # the decoder is not what is compared
        return torch.cat(parts)

    def pictures(self, latents):
        """(n, H, W, 3) uint8 array."""
        return vae.to_uint8(vae.decode(self.decoder, latents)).numpy()

    def model(self, labels):
        """(x, original t) → the network's output with guidance, in float32."""
        options, n = self.options, len(labels)
        both = torch.cat([labels, torch.full_like(labels, options.num_classes)])

        def model(x, t):
            if options.cfg_scale > 1:
                return self.reference.forward_with_cfg(torch.cat([x, x]), torch.cat([t, t]), both, options.cfg_scale)[
                    :n
                ]
            return self.reference.forward(x, t, labels)

        return model


def compare(want, got, thorough=False):
    """Figures of pictures (n, H, W, 3) uint8, n a multiple of eight, against `want`: of the whole set, of grids of eight, of tiles; PSNR in dB."""

    def each(measure, *sets):
        with ThreadPoolExecutor() as pool:
            return np.array(list(pool.map(measure, *sets)))

    tiles, bars = each(psnr, want, got), GATES["contest"]
    grids = each(
        psnr, *(pictures.reshape(-1, GRID * pictures.shape[1], *pictures.shape[2:]) for pictures in (want, got))
    )
    figures = dict(
        pictures=len(want),
        psnr=psnr(np.concatenate(want), np.concatenate(got)),
        grids_over_40=float((grids > bars["psnr"]).mean()),
        tiles_over_40=float((tiles > bars["psnr"]).mean()),
        grid_median=float(np.median(grids)),
        grid_worst=float(grids.min()),
        tile_median=float(np.median(tiles)),
        tile_worst=float(tiles.min()),
        tile_psnr=[round(float(v), 2) for v in tiles],
        grid_psnr=[round(float(v), 2) for v in grids],
    )
    if thorough:
        similar, apart = each(ssim, want, got), each(mae, want, got) / 255
        of_grid = [rows.reshape(-1, GRID).mean(1) for rows in (similar, apart)]
        good = (grids > bars["psnr"]) & (of_grid[0] >= bars["ssim"]) & (of_grid[1] <= bars["mae"])
        figures |= dict(
            ssim_mean=float(similar.mean()),
            ssim_worst=float(similar.min()),
            mae_mean=float(apart.mean()),
            mae_worst=float(apart.max()),
            grids_that_pass=float(good.mean()),
        )
    return figures


def passes(figures, margin=0.0):
    """Whether enough grids and tiles are over the gate's bar on PSNR, the hardest of its bars here, plus `margin` dB."""
    bar = GATES["contest"]["psnr"] + margin
    return bool(
        np.mean(np.array(figures["grid_psnr"]) > bar) >= SHARE_OF_GRIDS
        and np.mean(np.array(figures["tile_psnr"]) > bar) >= SHARE_OF_TILES
    )


@torch.inference_mode()
def record(bench, seeds, each):
    """A float32 run with all calls, step by step: x (T+1, n, …) and, of every step, its noise, m and values as Strides.stride gives them."""
    z, labels, draw = bench.draws(seeds, each)
    strides, model = Strides(bench.diffusion, []), bench.model(labels)
    x, (m, values) = z, strides.start(z)
    xs, noises, ms, all_values = [x], [], [m], [values]
    for t in range(bench.diffusion.num_timesteps - 1, -1, -1):
        noises.append(draw())
        x, m, values, _ = strides.stride(model, x, torch.full_like(labels, t), m, values, noises[-1][None])
        xs.append(x), ms.append(m), all_values.append(values)
    return dict(
        x=torch.stack(xs), noise=torch.stack(noises), m=torch.stack(ms), values=torch.stack(all_values), labels=labels
    )


def kinds_up_to(longest):
    """The kinds of stride to choose from: (steps, calls)."""
    return [(k, calls) for k in range(1, longest + 1) for calls in (1, 2) if (k, calls) == (1, 1) or calls < k]


@torch.inference_mode()
def costs(bench, run, longest):
    """Kind of stride → (T,): mean square error of x after one that begins at step index i, inf where there is none; of at most --batch pictures."""
    steps, kinds, few = bench.diffusion.num_timesteps, kinds_up_to(longest), slice(bench.batch)
    run = {name: tensor[few] if name == "labels" else tensor[:, few] for name, tensor in run.items()}
    strides, model = Strides(bench.diffusion, kinds), bench.model(run["labels"])
    table = {kind: np.full(steps, np.inf) for kind in kinds}
    table[1, 1][:] = 0
    for k, calls in kinds[1:]:
        for i in range(1, steps - k + 1):
            end, *_ = strides.stride(
                model,
                run["x"][i],
                torch.full_like(run["labels"], steps - 1 - i),
                run["m"][i],
                run["values"][i],
                run["noise"][i : i + k],
                calls,
            )
            table[k, calls][i] = float((end - run["x"][i + k]).square().mean())
    return table


@torch.inference_mode()
def sensitivities(bench, run, table, window=WINDOW):
    """(T,): mean square error of the finished pictures for one of x after a stride that ends at step i."""
    steps, strides, model, labels = (
        bench.diffusion.num_timesteps,
        Strides(bench.diffusion, [PROBE]),
        bench.model(run["labels"]),
        run["labels"],
    )
    want = bench.pictures(run["x"][-1])
    found = np.zeros(steps + 1)
    for low in range(0, steps, window):
        i, made = max(low, 1), 0.0
        x, m, values = run["x"][i], run["m"][i], run["values"][i]
        while i < steps:
            k, calls = PROBE if i + PROBE[0] <= min(low + window, steps) else (1, 1)
            made += table[k, calls][i]
            x, m, values, _ = strides.stride(
                model, x, torch.full_like(labels, steps - 1 - i), m, values, run["noise"][i : i + k], calls
            )
            i += k
        apart = (bench.pictures(x).astype(np.float32) / 255 - want.astype(np.float32) / 255) ** 2
        found[low : low + window] = apart.mean() / made if made else np.nan
    seen = np.flatnonzero(np.isfinite(found) & (found > 0))
    logs = np.interp(np.arange(steps + 1), seen, np.log(found[seen]))
    width = (
        3 * window
    )  # a few pictures make most of it, each at its own steps: what they say of a window holds around it too
    return np.exp(np.convolve(np.pad(logs, width // 2, mode="edge"), np.ones(width + 1) / (width + 1), "valid"))[
        : steps + 1
    ]


def best_plans(table, sensitivity):
    """Calls → strides (steps, calls) of the plan whose summed cost times sensitivity is least; its first is one step."""
    steps = len(table[1, 1])
    least = np.full((steps + 1, steps + 1), np.inf)  # [step reached, calls]
    kind_of = np.zeros((*least.shape, 2), dtype=int)
    least[1, 1], kind_of[1, 1] = 0, (1, 1)
    for end in range(2, steps + 1):
        for (k, calls), cost in table.items():
            if k < end:
                found = np.append(np.full(calls, np.inf), least[end - k, :-calls] + cost[end - k] * sensitivity[end])
                better = found < least[end]
                least[end][better], kind_of[end][better] = found[better], (k, calls)
    plans = {}
    for calls in range(1, steps + 1):
        if np.isfinite(least[steps, calls]):
            strides, end, left = [], steps, calls
            while end:
                strides.append(tuple(map(int, kind_of[end, left])))
                end, left = end - strides[-1][0], left - strides[-1][1]
            plans[calls] = strides[::-1]
    return plans


def search(bench, seed, pictures, longest):
    """Calls → strides of the best plan, by steps 1 to 3 of this file's text."""
    run = record(bench, [seed], pictures)
    table = costs(bench, run, longest)
    return best_plans(table, sensitivities(bench, run, table))


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
        "--pictures",
        type=positive,
        default=64,
        help="recorded to measure costs and sensitivities (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=positive, default=16, help="held-out seeds that decide (default: %(default)s)")
    parser.add_argument(
        "--each", type=positive, default=32, help="pictures a held-out seed, a multiple of 8 (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=64, help="pictures at a time (default: %(default)s)")
    parser.add_argument("--longest", type=positive, default=8, help="most steps of a stride (default: %(default)s)")
    parser.add_argument(
        "--margin",
        type=float,
        default=0.5,
        help="dB by which 99 %% of grids and 93 %% of pictures must be over the gate's 40 (default: %(default)s)",
    )
    parser.add_argument(
        "--first-seed",
        type=int,
        default=10_000,
        help="first of the seeds used; the recorded pictures have this one, the held-out ones follow (default: %(default)s)",
    )
    parser.add_argument("--plan", help="file to write (default: beside the checkpoint)")
    args = parser.parse_args()
    with user_errors(parser):
        if args.longest < PROBE[0]:
            raise UsageError(f"--longest {args.longest}: must be {PROBE[0]} at least")
        if args.each % GRID:
            raise UsageError(f"--each {args.each}: must be a multiple of {GRID}, the pictures of a grid")
        if not math.isfinite(args.margin):
            raise UsageError(f"--margin {args.margin:g}: must be finite")
        if not -(2**63) <= args.first_seed < 2**63:
            raise UsageError(f"--first-seed {args.first_seed}: must fit into 64 bits")
        options = options_from(args)
        if options.num_sampling_steps <= PROBE[0]:
            raise UsageError(
                f"--num-sampling-steps {options.num_sampling_steps}: too few for strides of several; a plan is for {PROBE[0] + 1} at least"
            )
        options.forecast_plan = args.plan
        path = plan_path(options)
        check_writable(path, "--plan")
        calibrate(args, options, path)


def calibrate(args, options, path):
    started = time.perf_counter()

    def say(text):
        print(f"{time.perf_counter() - started:6.1f} s  {text}", flush=True)

    bench = Bench(options, args.batch)
    plans = search(bench, args.first_seed, args.pictures, args.longest)
    say(f"plans of {min(plans)} to {max(plans)} calls, from {args.pictures} pictures")
    seeds = range(args.first_seed + 1, args.first_seed + 1 + args.seeds)
    lines = []

    def judge(calls, seeds, want, thorough=False):
        got = bench.pictures(
            bench.latents(seeds, args.each, Plan(bench.diffusion, plans[calls]), bench.network, bench.tier)
        )
        figures = compare(want, got, thorough)
        lines.append(
            dict(
                calls=calls,
                seeds=[seeds[0], seeds[-1]],
                **{name: value for name, value in figures.items() if "_psnr" not in name},
            )
        )
        say(
            f"{calls:4d} calls: grids over 40 dB {figures['grids_over_40']:.1%}, tiles {figures['tiles_over_40']:.1%}; grid median {figures['grid_median']:.1f}, "
            f"worst {figures['grid_worst']:.1f}; tile worst {figures['tile_worst']:.1f}"
        )
        return figures

    want = bench.pictures(bench.latents(seeds, args.each))
    say(f"{len(want)} pictures to choose by, {bench.tier} held to fp32")
    low, calls = min(plans) - 1, max(plans)  # the fewest that pass lie in (low, calls]
    if not passes(judge(calls, seeds, want), args.margin):
        raise UsageError(
            f"--margin {args.margin:g}: {bench.tier} with all calls does not pass by it; choose a smaller one or a finer --precision"
        )
    while calls - low > max(1, calls // 100):
        middle = (low + calls) // 2
        low, calls = (low, middle) if passes(judge(middle, seeds, want), args.margin) else (middle, calls)
    while True:  # what was chosen by some seeds has to hold on others
        seeds = range(seeds[-1] + 1, seeds[-1] + 1 + args.seeds)
        figures = judge(calls, seeds, bench.pictures(bench.latents(seeds, args.each)), thorough=True)
        if passes(figures) or calls == max(plans):
            break
        calls = min(max(plans), calls + max(1, calls // 50))
    write_plan(
        path,
        settings_of(options, engine.find_checkpoint(options).name),
        plans[calls],
        json_ready(
            dict(
                gate="contest, LPIPS not computed",
                passes=passes(figures),
                margin_db=args.margin,
                precision=bench.tier,
                reference="fp32, all calls",
                seeds=list(seeds),
                pictures_a_seed=args.each,
                **figures,
                tried=lines,
                gpu=torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else None,
                torch=torch.__version__,
                calibration=dict(seed=args.first_seed, pictures=args.pictures, longest=args.longest),
            )
        ),
    )
    say(f"{path}: {calls} of {options.num_sampling_steps} calls, {options.num_sampling_steps / calls:.2f}× fewer")
    return bench, plans


if __name__ == "__main__":
    main()
