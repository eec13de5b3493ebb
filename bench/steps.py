"""Denoising steps: each optimisation, torch's ways to run the network, layouts on many GPUs."""

import copy
import gc
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import profiler
from torch.utils import collect_env

import evaluate
from accel import fast
from accel.config import rules
from accel.config.options import Options
from accel.distributed import OFF, Layout, Placement, Ranks
from accel.errors import UsageError
from accel.families import constructor_of, families, family_of
from accel.io.output import to_uint8
from accel.jobs import parallel
from accel.kernels.linear import Tuner
from accel.pipeline import Pipeline
from accel.run import Run
from accel.run.opening import open_run
from accel.runtime import precision
from accel.runtime.network import Batch, BlockNetwork, EagerNetwork, Network
from accel.runtime.stages import stages_of
from accel.sampling import denoise, steps_of, upstream_noise
from accel.sampling.guidance import Guidance
from bench import traces

if TYPE_CHECKING:
    from torch.utils.benchmark import Timer

# Rungs of the accelerated tiers, each with the switches of `build` that it adds to the rung before.
# The first one has the libraries' backends.
PLAIN = dict(precomputes_conditioning=False, adaln="torch", last_adaln="torch", captures=False)
SHARED_RUNGS = (
    ("hoisted conditioning", dict(precomputes_conditioning=True)),
    ("fused adaLN kernel", dict(adaln="auto", last_adaln="auto")),
    ("attention", dict(attention="auto")),
)
GRAPH = "CUDA graph", dict(captures=True)
HALF_LADDER = (
    ("half GEMMs", PLAIN | dict(gemm="torch")),
    *SHARED_RUNGS,
    ("GELU epilogue", dict(gemm="epilogue")),
    ("autotuned GEMMs", dict(gemm="auto")),
    GRAPH,
)
LADDERS = {
    "fp16": HALF_LADDER,
    "bf16": HALF_LADDER,
    "fp32-fused": (
        ("float32 GEMMs", HALF_LADDER[0][1] | dict(attention="efficient")),
        *HALF_LADDER[1:],
    ),
    "exact": (
        ("split GEMMs", PLAIN | dict(gemm="cublas", attention="cublas")),
        *SHARED_RUNGS,
        ("split GEMM kernel", dict(gemm="auto")),
        GRAPH,
    ),
}
SHARED = Layout(tokens=2), Layout(2, 2), Layout(tokens=4), Layout(rows=2), Layout(rows=4)
RECORDED = traces.STEPS  # steps of a profile, after as many for warm-up
SCALE = 4.0  # of guidance, at every step
SWITCHES = ExitStack()  # torch's, of the tier in use

# Makes the first `count` steps of a sampling run, and calls on_step after each.
Sample = Callable[[int, Callable | None], torch.Tensor]


# ---- networks and batches ----


def random_weights(values: rules.Values, folder: Path) -> str:
    """Write the weights of a network that are random and not zero, and return their file.
    Activations keep a variance of about one.
    """
    model = values.get("model", rules.DEFAULT_MODEL)
    defaults = rules.named_defaults(values)
    side = values.get("image_size", defaults.image_size) // defaults.factor
    weights = family_of(model).weights
    # as the family's trained weights have it
    qk_norm = any(each.config.get("qk_norm") for each in weights.models.values())
    norms = dict(qk_norm=True) if qk_norm else {}
    network = constructor_of(model)(input_size=side, num_classes=defaults.num_classes, **norms)
    torch.manual_seed(0)
    for name, value in network.requires_grad_(False).named_parameters():
        if name != "pos_embed":
            value.normal_(std=value[0].numel() ** -0.5 if value.ndim > 1 else 0.1)
            value += "norm.weight" in name  # norms scale by about one
    state = network.state_dict()
    _, adapter = weights.of_module(network, state)
    torch.save(adapter.renamed(state), folder / "random.pt")  # as in a training file
    return str(folder / "random.pt")


def use(tier: str) -> None:
    """Set torch's arithmetic to a tier's, until the next call."""
    SWITCHES.close()
    SWITCHES.enter_context(precision.arithmetic(tier))


def build(
    run: Run,
    model: torch.nn.Module,
    tier: str,
    tuner: Tuner | None = None,
    gemm: str = "auto",
    **switches: str | bool,
) -> BlockNetwork:
    """Return the network of a tier with the weights of the reference network `model`, and use
    the tier's arithmetic.

    gemm: the backend of an accelerated tier's GEMMs. switches: other attributes of the
    accelerated network; a string is the backend of that op.
    """
    use(tier)
    if not precision.TIERS[tier].accelerated:
        return EagerNetwork(model)
    pack = run.spec.family.pack
    network = fast.build(model.state_dict(), model, pack, tier, run.device, tuner, gemm)
    for name, value in switches.items():
        backend = isinstance(value, str)
        setattr(network, name, partial(getattr(network, name), backend=value) if backend else value)
    return network


def rival(mode: str, run: Run, tier: str) -> EagerNetwork:
    """Return the reference network in a tier's dtype, eager under autocast, or in a mode of
    torch.compile, and use the tier's arithmetic.
    """
    use(tier)
    dtype = precision.TIERS[tier].dtype
    network = EagerNetwork(Pipeline.load(run).network.model.to(dtype))
    if mode == "eager":
        mixed = torch.autocast(run.device.type, dtype, enabled=dtype != torch.float32)
        evaluate = mixed(network.forward_tokens)
    else:
        torch.compiler.reset()
        evaluate = torch.compile(network.forward_tokens, mode=mode, dynamic=False)

    def forward_tokens(x, t, y, run=None):
        times = t if run is None else run.table[t]
        # a copy: the compiler's graph overwrites its output
        return evaluate(x.to(dtype), times, y).to(x.dtype, copy=True)

    network.forward_tokens = forward_tokens
    return network


def sampling(network: Network, run: Run, pictures: int, part: slice = slice(None)) -> Sample:
    """Return sample.py's sampling of a batch. part: of this process."""
    guidance = Guidance(SCALE, run.spec.num_classes)
    steps = steps_of(run.process, guidance)
    shape = pictures, run.spec.in_channels, run.latent_size, run.latent_size
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(run.device)
    labels = torch.arange(pictures, device=run.device) % run.spec.num_classes
    generator = torch.default_generator if run.process.noise_from_cpu else None
    draw = upstream_noise(z, guidance.noise_rows, part, generator)

    def sample(count, on_step=None):
        while count > 0:
            first = steps[:count]
            denoise(
                network,
                run.process,
                guidance,
                z[part],
                labels[part],
                draw,
                steps=first,
                on_step=on_step,
            )
            count -= len(first)

    return sample


# ---- time ----


def step_times(sample: Sample | None, count: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each of `count` steps; zeros on a rank without a part."""
    if sample is None:
        return [0.0] * count
    stamps = []

    def on_gpu(*_):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        stamps.append(event)

    if device.type == "cuda":
        sample(count + 1, on_gpu)
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) for before, after in pairwise(stamps)]
    sample(count + 1, lambda *_: stamps.append(time.perf_counter()))
    return [1e3 * (after - before) for before, after in pairwise(stamps)]


def time_steps(
    sample: Sample | None, device: torch.device, args: Namespace, slowest: Callable = list
) -> dict:
    """Return the median, 10th and 90th percentile of a step's milliseconds during args.window
    seconds, after args.load seconds of steps: a GPU under load runs slower than in a burst.

    slowest: replaces a rank's times by the slowest rank's.
    """
    first = step_times(sample, 5, device)[2:]  # the two before compile and tune
    [expected] = slowest([float(np.median(first))])
    timed = max(3, round(1e3 * args.window / expected))
    warm = round(1e3 * args.load / expected)
    times = step_times(sample, warm + timed, device)[-timed:]
    p10, median, p90 = slowest(np.quantile(times, (0.1, 0.5, 0.9)).tolist())
    return dict(ms=median, p10=p10, p90=p90, steps=timed)


# ---- one GPU ----


def rungs_of(tiers: list[str], device: torch.device) -> Iterator[tuple[str, str, dict]]:
    """Yield every rung as its name, tier and switches of `build`."""
    # Plain half precision gets torch's flash attention where there is one.
    attention = "flash" if precision.supports("bf16", device) else "efficient"
    for tier in tiers:
        if tier not in LADDERS:
            yield tier, tier, {}
        switches = dict(attention=attention)
        for name, change in LADDERS.get(tier, ()):
            switches = switches | change
            yield f"{tier} + {name}", tier, switches


def ladder(args: Namespace, run: Run, record: dict) -> Iterator[dict]:
    """Fill `record` with the time and error of every rung, and with profiles. Yield each row.
    Raises UsageError if there is no rung to time.
    """
    every = list(rungs_of(args.tiers, run.device))
    rungs = [rung for rung in every if any(word in rung[0] for word in args.only)]
    if not rungs:
        remedy = f"there are {', '.join(name for name, _, _ in every)}"
        raise UsageError("no rung has that in its name", remedy, parameter="only")
    model = Pipeline.load(run).network.model
    makers = {name: partial(build, run, model, tier, **switches) for name, tier, switches in rungs}
    judge = judge_of(args.gate, run) if args.gate else None
    rows = time_networks(makers, model, args, run, record)
    for row, (_, tier, switches) in zip(rows, rungs):
        if judge and tier != "fp32":
            row["judged"] = judge(tier, **switches)
        yield row
    if args.profile:  # last: a profiler may slow the steps after it
        tiers = {tier: None for _, tier, _ in rungs}
        record["ceilings"] = ceilings(tiers, run.device)
        for tier in tiers:
            sample = sampling(build(run, model, tier), run, record["pictures"])
            record["profiles"].append(profile_of(sample, tier, args, run.device))
            yield record["profiles"][-1]


def rivals(args: Namespace, run: Run, record: dict) -> Iterator[dict]:
    """Fill `record` with the time and error of the tiers, and of the reference network as torch
    runs it in the device's default tier. Yield each row.
    """
    model = Pipeline.load(run).network.model
    rungs = {tier: name for name, tier, _ in rungs_of(args.tiers, run.device)}  # the last
    makers = {name: partial(build, run, model, tier) for tier, name in rungs.items()}
    default = precision.default_tier(run.device)
    for mode in args.vs:
        name = mode if mode == "eager" else f"torch.compile {mode}"
        makers[f"{default} + {name}"] = partial(rival, mode, run, default)
    return time_networks(makers, model, args, run, record)


def time_networks(
    makers: dict[str, Callable], model: torch.nn.Module, args: Namespace, run: Run, record: dict
) -> Iterator[dict]:
    """Fill `record` with the time of a step and the error of every network. Yield each row."""
    [pictures] = args.pictures or [8]
    record |= dict(kind="steps", pictures=pictures, batch_rows=Guidance.copies * pictures)
    record |= dict(load_seconds=args.load, shape=shape_of(model, run), rungs=[], profiles=[])
    error = errors_of(model, run)
    for name, make in makers.items():
        started = time.perf_counter()
        network = make()
        times = time_steps(sampling(network, run, pictures), run.device, args)
        row = dict(rung=name, **times, seconds=time.perf_counter() - started)
        # the compiler would search again for the reference's two batch rows
        if "max-autotune" not in name:
            row["error"] = error(network)
        del network
        gc.collect()
        record["rungs"].append(row)
        yield row


def shape_of(model: torch.nn.Module, run: Run) -> dict | None:
    """Return the sizes of a network of one stage of DiT's blocks; None for other networks."""
    stages = stages_of(model)
    mlp = getattr(stages[0].blocks[0], "mlp", None)
    if len(stages) > 1 or not hasattr(mlp, "fc1"):
        return None
    return dict(
        depth=len(stages[0].blocks),
        width=stages[0].width,
        heads=stages[0].num_heads,
        hidden=mlp.fc1.out_features,
        tokens=run.tokens,
        patch=model.patch_size,
        channels=model.in_channels,
        outputs=model.out_channels,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def errors_of(model: torch.nn.Module, run: Run) -> Callable[[Network], float]:
    """Return a function that gives a network's largest relative error, ‖out − ref‖ / ‖ref‖,
    against `model` in float64: a label and the null label, at three timesteps.
    """
    shape = 2, run.spec.in_channels, run.latent_size, run.latent_size
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(run.device)
    y = torch.tensor([1, run.spec.num_classes], device=run.device)
    times = (980, 500, 20) if run.spec.family.prediction == "noise" else (0.02, 0.5, 0.98)
    batches = [torch.full((2,), each, device=run.device) for each in times]
    double = EagerNetwork(copy.deepcopy(model).double())
    wanted = torch.stack([double.forward(x.double(), t, y) for t in batches])

    def error(network):
        found = torch.stack([network.forward(x, t, y).double() for t in batches])
        norms = [
            torch.linalg.vector_norm(each.flatten(1), dim=1) for each in (found - wanted, wanted)
        ]
        return float((norms[0] / norms[1]).max())

    return error


def judge_of(seeds: int, run: Run, count: int = 64) -> Callable[..., dict]:
    """Return a function that judges a tier with switches of `build` by the guided pictures of a
    demo, `count` per seed, against fp32's from the same noise: the worst picture's metrics
    (MAE of 0–1), and whether every picture meets each criterion, without LPIPS.

    The demo is of the run's family, or of one with the same prediction.
    """
    alike = [each for each in families() if each.prediction == run.spec.family.prediction]
    name = next(each.shipped[0] for each in (run.spec.family, *alike) if each.shipped)
    steps = run.settings.num_sampling_steps
    options = Options(model=name, precision="fp32", num_sampling_steps=steps)
    demo = open_run(rules.Request.open(options), run.device)
    reference = Pipeline.load(demo)
    labels = [index % demo.spec.num_classes for index in range(count)]

    def pictures(network, tier):
        pipeline = replace(reference, network=network, tier=tier)
        latents = [pipeline.latents(labels, seed) for seed in range(seeds)]
        pixels = reference.decode(torch.cat(latents))  # in fp32 in every tier
        return to_uint8(pixels, reference.decoder.to_uint8_range).numpy()

    wanted = pictures(reference.network, "fp32")

    def judge(tier, **switches):
        network = build(demo, reference.network.model, tier, **switches)
        rows = [evaluate.measure(*pair)[0] for pair in zip(wanted, pictures(network, tier))]
        worst = {name: min(row[name] for row in rows) for name in ("psnr", "ssim")}
        worst["mae"] = max(row["mae"] for row in rows)
        meets = {
            gate: evaluate.verdict_of(worst, limits) == "PASS"
            for gate, limits in evaluate.GATES.items()
        }
        worst["mae"] /= 255
        return dict(pictures=len(rows), worst=worst, **meets)

    return judge


def profile_of(sample: Sample, tier: str, args: Namespace, device: torch.device) -> dict:
    """Return the time of a step by kind of work and by function, and the name of their trace, which
    goes next to the record.
    """
    # CUPTI must outlive the first profile, or a captured step that is replayed in the
    # second one crashes.
    os.environ |= dict(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    sample(RECORDED)  # a step is captured without the profiler

    def on_step(*_):
        # earlier steps' kernels must not be recorded
        if device.type == "cuda" and profile.step_num == RECORDED - 1:
            torch.cuda.synchronize(device)
        profile.step()

    schedule = profiler.schedule(wait=0, warmup=RECORDED, active=RECORDED, repeat=1)
    with profiler.profile(acc_events=True, schedule=schedule) as profile:
        sample(2 * RECORDED, on_step)
    path = args.file.with_suffix(f".{tier}.trace.json.gz")
    profile.export_chrome_trace(str(path))
    return dict(tier=tier, steps=RECORDED, trace=path.name, **traces.summary(traces.read(path)))


def ceilings(tiers: dict[str, None], device: torch.device) -> dict:
    """Return this machine's ceilings: the TFLOP/s of a large GEMM in each tier's arithmetic, and
    the GB/s, read and written, of a large copy.
    """
    side = 8192 if device.type == "cuda" else 1024
    tflops = {}
    for tier in tiers:
        use(tier)
        # exact computes a float32 GEMM by three in float16
        parts = 3 if tier == "exact" else 1
        dtype = torch.float16 if tier == "exact" else precision.TIERS[tier].dtype
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        seconds = fastest("torch.mm(a, b, out=out)", a=a, b=b, out=torch.empty_like(a))
        tflops[tier] = 2 * side**3 / parts / seconds / 1e12
    source, target = torch.ones(2, 16 * side**2, dtype=torch.uint8, device=device)
    seconds = fastest("target.copy_(source)", source=source, target=target)
    gb_s = 2 * len(source) / seconds / 1e9
    return dict(tflops=tflops, gemm=f"{side} × {side} × {side}", gb_s=gb_s)


def fastest(statement: str, **names: torch.Tensor) -> float:
    """Return the fastest tenth of a statement's times in seconds, under load."""
    timer = timer_of(statement, **names)
    timer.blocked_autorange(min_run_time=1.0)
    return float(np.quantile(timer.blocked_autorange(min_run_time=0.5).times, 0.1))


def timer_of(statement: str, **names: object) -> "Timer":
    """Return torch's timer of a statement with these names. It synchronises the device."""
    from torch.utils.benchmark import Timer  # warns where there is no GPU

    return Timer(statement, globals=names, num_threads=torch.get_num_threads())


# ---- many GPUs ----


def layouts(args: Namespace, run: Run, record: dict) -> Iterator[dict]:
    """Fill `record` with the link between the GPUs and the times of every tier, number of
    pictures and layout. Yield each row.
    """
    ranks = args.ranks
    ranks.connect_collectives()
    model = Pipeline.load(run).network.model
    record |= dict(kind="parallel", gpus=ranks.world, load_seconds=args.load, plans=[])
    shape = shape_of(model, run)
    record |= dict(link=link(ranks, run.device), shape=shape, tensor=[])
    record["topology"] = collect_env.run_and_read_all(collect_env.run, "nvidia-smi topo -m")
    tuner = Tuner(share=ranks.from_rank_0)
    for tier in args.tiers:
        network = build(run, model, tier, tuner)
        for pictures in args.pictures or (1, 8):
            for row in time_layouts(network, tier, pictures, args, run):
                record["plans"].append(row)
                yield row
            if shape:
                ms = tensor_exchanges(ranks, run.device, shape, tier, pictures)
                record["tensor"].append(dict(tier=tier, labels=pictures, ms=ms))
                yield record["tensor"][-1]


def link(ranks: Ranks, device: torch.device) -> dict:
    """Return the link between all ranks' devices: the GB/s that a rank sends in a large
    all-gather, and the µs of one of four bytes.
    """

    def seconds(count):
        part = torch.zeros(count, device=device)
        whole = part.new_empty(ranks.world * count)
        return exchange("dist.all_gather_into_tensor(whole, part)", ranks, whole=whole, part=part)

    count = 1 << (24 if device.type == "cuda" else 20)  # float32 numbers
    sent = (ranks.world - 1) * 4 * count
    return dict(gb_s=sent / seconds(count) / 1e9, us=1e6 * seconds(1))


def exchange(statement: str, ranks: Ranks, **names: torch.Tensor) -> float:
    """Return the seconds of an exchange of all ranks."""
    timer = timer_of(statement, dist=dist, **names)
    timer.timeit(10)
    return float(np.median(ranks.all_gather_object(timer.timeit(30).mean)))


def tensor_exchanges(
    ranks: Ranks, device: torch.device, shape: dict, tier: str, pictures: int
) -> float:
    """Return the ms of the exchanges alone of a tensor-parallel step (Shoeybi et al. 2019,
    arXiv:1909.08053): two all-reduces per block of the tokens of all batch rows.
    """
    size = Guidance.copies * pictures, shape["tokens"], shape["width"]
    tokens = torch.zeros(size, dtype=precision.TIERS[tier].dtype, device=device)
    seconds = exchange("dist.all_reduce(tokens)", ranks, tokens=tokens)
    return 2e3 * shape["depth"] * seconds


def layouts_of(
    network: BlockNetwork, tier: str, pictures: int, tokens: int, world: int
) -> Iterator[tuple[str, Layout, int]]:
    """Yield name, layout and number of working ranks: one GPU, pictures for each number of
    ranks, then layouts that share an evaluation.
    """
    for used in (1, 2, 4, 8):
        if used <= world and (pictures >= used or used == world and pictures > 1):
            yield "one GPU" if used == 1 else "pictures", OFF, used
    for layout in SHARED:
        fits = layout.ranks <= world and layout.rows <= Guidance.copies * pictures
        if layout.tokens > 1:
            # Ranks find each other's memory by counting, so all must map memory equally often.
            fits &= layout.ranks == world > pictures and tokens % layout.tokens == 0
            fits &= not parallel.token_split_obstacle(tier, network.stages)
        if fits:
            yield str(layout), layout, layout.ranks


def time_layouts(
    network: BlockNetwork, tier: str, pictures: int, args: Namespace, run: Run
) -> Iterator[dict]:
    """Yield a row for each layout of a batch, first of one GPU: the time of the slowest rank."""
    ranks = args.ranks

    def slowest(times):
        return [max(of_ranks) for of_ranks in zip(*ranks.all_gather_object(times))]

    one_gpu = None  # ms
    for name, layout, used in layouts_of(network, tier, pictures, run.tokens, ranks.world):
        placement = Placement(layout, ranks.world)
        batches = [placement.rows(n, Guidance.copies) for n in placement.sizes(pictures)]
        batch = Batch(batches, run.latent_size, run.spec.num_classes, layout.tokens)
        network.tune(batch.row_tokens(network.patch_size))
        shared = ranks.share(network, layout)  # on every rank: all make the groups
        part = slice(pictures if ranks.rank < used else 0)
        if layout == OFF and ranks.rank < used:
            part = Placement(OFF, used, ranks.rank).pictures(pictures)
        sample = None
        if range(pictures)[part]:
            sample = sampling(shared, run, pictures, part)
        times = time_steps(sample, run.device, args, slowest)
        one_gpu = one_gpu or times["ms"]
        row = dict(tier=tier, size=run.settings.image_size, labels=pictures, gpus=used, plan=name)
        row |= times | dict(speedup=one_gpu / times["ms"])
        yield row
        network.graphs.clear()  # of this layout
        del sample, shared
        gc.collect()
