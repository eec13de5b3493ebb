"""Find how few network evaluations give the same pictures on your weights, and write a
plan for --forecast plan.

    python scripts/calibrate.py --model DiT-Demo/2
    python scripts/calibrate.py --ckpt pretrained_models/DiT-XL-2-512x512.pt --image-size 512
    --margin 1

1. The cost of every stride. --pictures runs with all evaluations are recorded. From each of their
  steps a stride of
   2, 3, … steps is made by one or two evaluations. Its cost is the mean square distance of its end
   from the recording.
2. Sensitivity: the effect of an error at a step on the finished picture. Two evaluations serve
  three steps, in one
   window of steps only.
3. For every number of evaluations, the plan with the least cost times sensitivity, by dynamic
  programming.
4. The fewest evaluations whose pictures exceed the contest criterion's PSNR against float32 with
  all evaluations, plus
   --margin, on 99 % of the grids of eight and on 93 % of the pictures of fresh seeds.
5. The evidence, from seeds that were not used before. If it misses the criterion, a few evaluations
  more.

LPIPS is left to evaluate.py.
"""

if not __package__:
    __import__("_as_module")

import math
import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
from accel import door, loading, precision
from accel.command_line import OneLineParser, add_arguments, request_from, user_errors
from accel.door import opening
from accel.errors import UsageError
from accel.families import DEMO
from accel.flags import check_writable, positive
from accel.forecast import write_plan
from accel.latents.pixels import to_uint8
from accel.sampling import initial_noise, upstream_noise
from accel.sampling.ancestral import Ancestral
from accel.sampling.process import Kind
from accel.sampling.strides import Strides
from accel.settings import GridSettings

FIRST_SEED = 10_000  # of the recorded pictures; the held-out seeds follow it
LONGEST = 8  # steps of a stride
GRID = 8
WINDOW = 10  # steps over which a sensitivity is measured
PROBE = 3, 2  # the stride that measures it: steps, evaluations
THRESHOLD = evaluate.GATES["contest"]["psnr"]
SHARE_OF_GRIDS = 0.99
SHARE_OF_TILES = 0.93


class Bench:
    """Float32 with all evaluations, the calibrated tier, and the pictures of both;
    `batch` pictures at a time.
    """

    def __init__(self, options: GridSettings, batch: int):
        self.options = options
        self.batch = batch
        self.device = options.device
        self.fast = self.reference = door.load(options, sizes={batch})
        self.tier = self.fast.tier
        self.diffusion = self.fast.process.diffusion
        reference = options
        # loaded last: its tier's switches, with which strides are measured, stay set
        if self.tier != "fp32":
            reference = opening.reopen(options, precision="fp32")
            self.reference = door.load(reference, sizes={batch})
        self.decoder = door.decoder_of(reference)

    def labels(self, count: int) -> list[int]:
        """Return the labels of `count` pictures."""
        return [self.options.labels[index % len(self.options.labels)] for index in range(count)]

    def pictures(self, seeds: range, each: int, plan: list[Kind] | None = None) -> np.ndarray:
        """Return float32's pictures (n, H, W, 3) uint8 with all evaluations, or the
        tier's by `plan`.
        """
        run = self.fast if plan else self.reference
        parts = []
        run = run._replace(
            process=Strides(self.diffusion, plan) if plan else Ancestral(self.diffusion)
        )
        precision.apply_precision(run.tier, self.device)
        for seed in tqdm(
            seeds, desc=f"{run.process.evaluations} evaluations", unit="seed", leave=False
        ):
            parts.append(run.latents(self.labels(each), seed, door.ALONE.batches(each, self.batch)))
        precision.apply_precision("fp32", self.device)  # the decoder is not under comparison
        return self.decoded(torch.cat(parts))

    def decoded(self, latents: torch.Tensor) -> np.ndarray:
        return to_uint8(self.decoder.decode(latents)).numpy()

    def strides(self, labels: torch.Tensor, kinds: list[Kind]) -> Callable:
        """Return the function (i, state, noise (k, n, …), evaluations) → the state after
        k steps from step i of a float32 run. A state is that of Strides.
        """
        guidance = self.reference.guidance
        network = self.reference.network
        strides = Strides(self.diffusion, kinds)

        def stride(i, state, noise, evaluations=1):
            kind = len(noise), evaluations
            # numpy's
            times = strides.tables[kind]["timestep"][self.diffusion.num_timesteps - 1 - i].tolist()

            def evaluate(x, number):
                part = guidance.at(times[number] / self.diffusion.original_num_steps)
                y = part.labels(labels)
                return part.combine(network.forward(x, torch.full_like(y, times[number]), y))

            return strides.move(kind, state, None, noise, evaluate)

        return stride


def compare(want: np.ndarray, got: np.ndarray, thorough: bool = False) -> dict:
    """Return the PSNR in dB of pictures (n, H, W, 3) uint8, n a multiple of eight,
    against `want`: of the whole set, of grids of eight and of single pictures (tiles).
    thorough: SSIM and MAE (of 0–1) too.
    """
    rows = [
        pictures.reshape(-1, GRID * pictures.shape[1], *pictures.shape[2:])
        for pictures in (want, got)
    ]
    figures = dict(
        pictures=len(want), psnr=evaluate.psnr(np.concatenate(want), np.concatenate(got))
    )
    for name, pairs in (("grid", zip(*rows)), ("tile", zip(want, got))):
        values = np.array([evaluate.psnr(a, b) for a, b in pairs])
        figures[f"{name}s_over_40"] = float((values > THRESHOLD).mean())
        figures[f"{name}_median"], figures[f"{name}_worst"] = (
            float(np.median(values)),
            float(values.min()),
        )
        figures[f"{name}_psnr"] = [round(float(value), 2) for value in values]
    if thorough:
        ssim, mae = (
            np.array([metric(a, b) for a, b in zip(want, got)])
            for metric in (evaluate.ssim, evaluate.mae)
        )
        figures |= dict(ssim_mean=float(ssim.mean()), ssim_worst=float(ssim.min()))
        figures |= dict(mae_mean=float(mae.mean()) / 255, mae_worst=float(mae.max()) / 255)
    return figures


def passes(figures: dict, margin: float = 0.0) -> bool:
    """Return whether enough grids and pictures exceed the criterion's PSNR, the hardest
    threshold, by `margin` dB.
    """
    shares = (("grid_psnr", SHARE_OF_GRIDS), ("tile_psnr", SHARE_OF_TILES))
    return all(
        np.mean(np.array(figures[name]) > THRESHOLD + margin) >= share for name, share in shares
    )


@torch.inference_mode()
def record(bench: Bench, count: int) -> dict:
    """Return a float32 run of `count` pictures with all evaluations: its states (T+1),
    labels and noise (T, n, …).
    """
    generator = torch.Generator(bench.device).manual_seed(FIRST_SEED)
    z = initial_noise(count, bench.reference.network.in_channels, bench.reference.side, generator)
    draw = upstream_noise(z, bench.reference.guidance.copies, generator=generator)
    labels = torch.tensor(bench.labels(count), device=bench.device)
    stride = bench.strides(labels, [])
    noises = []
    states = [Strides(bench.diffusion, []).begin(z)]
    for i in tqdm(range(bench.diffusion.num_timesteps), desc="recording", unit="step", leave=False):
        noises.append(draw())
        states.append(stride(i, states[-1], noises[-1][None]))
    return dict(states=states, noise=torch.stack(noises), labels=labels)


def kinds_up_to(longest: int) -> list[Kind]:
    """Return the kinds of strides, (steps, evaluations), that a plan may have."""
    return [
        (k, calls)
        for k in range(1, longest + 1)
        for calls in (1, 2)
        if (k, calls) == (1, 1) or calls < k
    ]


@torch.inference_mode()
def costs(bench: Bench, run: dict) -> dict[Kind, np.ndarray]:
    """Return for each kind of stride (T,): mean square error of x after a stride from
    step i, inf where none begins. Uses at most --batch pictures.
    """
    steps = bench.diffusion.num_timesteps
    kinds = kinds_up_to(LONGEST)
    states = [[part[: bench.batch] for part in state] for state in run["states"]]
    noise = run["noise"][:, : bench.batch]
    stride = bench.strides(run["labels"][: bench.batch], kinds)
    table = {kind: np.full(steps, np.inf) for kind in kinds}
    table[1, 1][:] = 0
    starts = [(k, calls, i) for k, calls in kinds[1:] for i in range(1, steps - k + 1)]
    for k, calls, i in tqdm(starts, desc="costs", unit="stride", leave=False):
        end, *_ = stride(i, states[i], noise[i : i + k], calls)
        table[k, calls][i] = float((end - states[i + k][0]).square().mean())
    return table


@torch.inference_mode()
def sensitivities(bench: Bench, run: dict, table: dict) -> np.ndarray:
    """Return (T+1,): mean square error of the finished pictures divided by that of x at step i."""
    steps = bench.diffusion.num_timesteps
    stride = bench.strides(run["labels"], [PROBE])
    want = bench.decoded(run["states"][-1][0])
    found = np.zeros(steps + 1)
    for low in tqdm(range(0, steps, WINDOW), desc="sensitivities", unit="window", leave=False):
        i = max(low, 1)
        made = 0.0
        state = run["states"][i]
        while i < steps:
            k, calls = PROBE if i + PROBE[0] <= min(low + WINDOW, steps) else (1, 1)
            made += table[k, calls][i]
            state = stride(i, state, run["noise"][i : i + k], calls)
            i += k
        apart = (
            bench.decoded(state[0]).astype(np.float32) / 255 - want.astype(np.float32) / 255
        ) ** 2
        found[low : low + WINDOW] = apart.mean() / made if made else np.nan
    seen = np.flatnonzero(np.isfinite(found) & (found > 0))
    logs = np.interp(np.arange(steps + 1), seen, np.log(found[seen]))
    # A few pictures make most of the error, each at its own steps, so windows are
    # averaged with their neighbours.
    width = 3 * WINDOW
    smooth = np.convolve(
        np.pad(logs, width // 2, mode="edge"), np.ones(width + 1) / (width + 1), "valid"
    )
    return np.exp(smooth)


def best_plans(table: dict, sensitivity: np.ndarray) -> dict[int, list[Kind]]:
    """Return for each number of evaluations the plan of least summed cost times
    sensitivity; its first stride is one step.
    """
    steps = len(table[1, 1])
    least = {1: {1: (0.0, [(1, 1)])}}  # step reached → evaluations → loss, strides
    for end in range(2, steps + 1):
        least[end] = {}
        for (k, calls), cost in table.items():
            for used, (loss, strides) in least.get(end - k, {}).items():
                found = loss + cost[end - k] * sensitivity[end]
                best = least[end].get(used + calls, (np.inf,))
                if found < best[0]:
                    least[end][used + calls] = found, [*strides, (k, calls)]
    return {calls: strides for calls, (_, strides) in sorted(least[steps].items())}


def calibrate(args: Namespace, options: GridSettings, path: Path) -> None:
    """Write a plan for `options` to `path`; args: the values of `own_flags`. Raises
    UsageError if the tier misses the margin even with all evaluations.
    """
    started = time.perf_counter()

    def say(text):
        print(f"{time.perf_counter() - started:6.1f} s  {text}", flush=True)

    bench = Bench(options, args.batch)
    run = record(bench, args.pictures)
    table = costs(bench, run)
    plans = best_plans(table, sensitivities(bench, run, table))
    say(f"plans of {min(plans)} to {max(plans)} evaluations, from {args.pictures} pictures")
    seeds = range(FIRST_SEED + 1, FIRST_SEED + 1 + args.seeds)
    tried = []

    def judge(evaluations, want, thorough=False):
        figures = compare(want, bench.pictures(seeds, args.each, plans[evaluations]), thorough)
        kept = {name: value for name, value in figures.items() if "_psnr" not in name}
        tried.append(dict(evaluations=evaluations, seeds=[seeds[0], seeds[-1]], **kept))
        say(
            f"{evaluations:4d} evaluations: over 40 dB {figures['grids_over_40']:.1%} of grids, "
            f"{figures['tiles_over_40']:.1%} of pictures; grid median "
            f"{figures['grid_median']:.1f}, worst {figures['grid_worst']:.1f}; worst picture "
            f"{figures['tile_worst']:.1f}"
        )
        return figures

    want = bench.pictures(seeds, args.each)
    say(f"{len(want)} pictures to choose by, {bench.tier} against fp32")
    low = min(plans) - 1
    chosen = max(plans)  # the fewest that pass lie in (low, chosen]
    if not passes(judge(chosen, want), args.margin):
        missed = f"`margin={args.margin:g}`: {bench.tier} with all evaluations misses it"
        raise UsageError(f"{missed}; choose a smaller one or a finer `precision`")
    while chosen - low > max(1, chosen // 100):
        middle = (low + chosen) // 2
        low, chosen = (
            (low, middle) if passes(judge(middle, want), args.margin) else (middle, chosen)
        )
    while True:  # a plan that some seeds chose has to pass on others
        seeds = range(seeds[-1] + 1, seeds[-1] + 1 + args.seeds)
        figures = judge(chosen, bench.pictures(seeds, args.each), thorough=True)
        if passes(figures) or chosen == max(plans):
            break
        chosen = min(max(plans), chosen + max(1, chosen // 50))
    about = dict(gate="contest, LPIPS not computed", passes=passes(figures), margin_db=args.margin)
    about |= dict(
        precision=bench.tier,
        reference="fp32, all evaluations",
        seeds=list(seeds),
        pictures_a_seed=args.each,
    )
    made = dict(
        calibration=dict(seed=FIRST_SEED, pictures=args.pictures, longest=LONGEST),
        torch=torch.__version__,
    )
    made["gpu"] = (
        torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else None
    )
    evidence = about | figures | dict(tried=tried) | made
    write_plan(path, door.plan_settings(options), plans[chosen], evaluate.json_ready(evidence))
    steps = options.num_sampling_steps
    say(f"{path}: {chosen} evaluations for {steps} steps, {steps / chosen:.2f}× fewer")


def own_flags() -> ArgumentParser:
    """Return a parser of the flags that sampling lacks."""
    parser = ArgumentParser(add_help=False)
    for name, default, what in (
        ("--pictures", 64, "recorded to measure costs and sensitivities"),
        ("--seeds", 16, "held-out seeds that decide"),
        ("--each", 32, f"pictures a held-out seed, a multiple of {GRID}"),
        ("--batch", 64, "pictures at a time"),
    ):
        parser.add_argument(
            name, type=positive, default=default, help=f"{what} (default: %(default)s)"
        )
    margin = (
        "dB by which 99 %% of grids and 93 %% of pictures must exceed the criterion's 40 "
        "(default: %(default)s)"
    )
    parser.add_argument("--margin", type=float, default=0.5, help=margin)
    parser.add_argument(
        "--plan", help="file to write (default: beside the checkpoint; the demo's: output/)"
    )
    return parser


def check(args: Namespace, options: GridSettings) -> Path:
    """Return the file to write. Raises UsageError for a calibration that cannot be made,
    before anything is loaded.
    """
    if options.sampler != "ddpm":
        raise UsageError(
            f"`model={options.model}`: is sampled by {options.sampler}, and plans are for ddpm"
        )
    if not options.fit.learn_sigma:
        raise UsageError(f"`ckpt={options.weights.name}`: has no learned sigma, which a plan needs")
    if args.each % GRID:
        raise UsageError(
            f"--each {args.each}: must be a multiple of {GRID}, the pictures of a grid"
        )
    if not math.isfinite(args.margin):
        raise UsageError(f"--margin {args.margin:g}: must be finite")
    if options.num_sampling_steps <= PROBE[0]:
        steps = f"--num-sampling-steps {options.num_sampling_steps}"
        raise UsageError(
            f"{steps}: too few for strides of several; a plan is for {PROBE[0] + 1} at least"
        )
    path = Path(args.plan) if args.plan else door.plan_path(options)
    if args.plan is None and path.parent == DEMO:  # which ships with its own
        path = Path("output") / path.name
    check_writable(path, "plan")
    return path


def main() -> None:
    own = own_flags()
    parser = OneLineParser(description=__doc__.splitlines()[0], parents=[own])
    implied = (
        "forecast",
        "forecast_plan",
        "output",
        "output_type",
        "repeats",
        "seed",
        "seed_list",
        "sampler",
        "eta",
    )
    add_arguments(parser, leave_out=implied)
    args = parser.parse_args()
    _, sampling = own.parse_known_args()
    with user_errors(parser):
        options = opening.open_weights(request_from(args), loading.choose_device(args.device))
        path = check(args, options)
        calibrate(args, options, path)
        beside = path == door.plan_path(options)  # where sample.py looks
        plan = ["--forecast", "plan", *([] if beside else ["--forecast-plan", str(path)])]
        print("python sample.py", shlex.join([*sampling, *plan]))


if __name__ == "__main__":
    main()
