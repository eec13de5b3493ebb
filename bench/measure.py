"""Measure steps and whole jobs; --output gets a JSON record.

    python bench/measure.py ladder --gate 3 --profile --output output/ladder.json
    python bench/measure.py rivals --vs eager max-autotune --output output/rivals.json
    torchrun --standalone --nproc_per_node=4 bench/measure.py layouts --output output/layouts.json
    python bench/measure.py jobs --gpus 4 --output output/contest.json
    python bench/measure.py jobs --fork ../DiT-SUSTCSC --ckpt WEIGHTS --output output/fork.json
    python bench/measure.py jobs --num-fid-samples 640 --precision fp16 --num-sampling-steps 50

ladder: the time of a step on one GPU by every optimisation of every tier, and its error; with
--gate also pictures of the family's demo; with --profile the time of GEMMs, attention and
element-wise work, this machine's ceilings, and a trace for Perfetto next to --output.
rivals: the tiers, and the reference network as torch runs it, eager or compiled.
layouts: the time of a step by every layout in which the ranks share a batch; the link, nvidia-smi's
topology, and the exchanges alone of a tensor-parallel step.
jobs: whole processes. A grid: T from loading the model to the picture on disk, in every tier; the
pictures are kept next to --output. --fork: T of the organisers' sample.py, the time that it
prints, the mean of its grids without loading, and a trace of its steps. --num-fid-samples:
pictures/s of an FID job.

Flags of sample.py and sample_ddp.py describe the run. Without --ckpt the weights are random and
not zero, since a new DiT outputs zeros; a demo has its own. Times of steps are of sample.py's loop
(guidance, update and noise, no decoder): median, 10th and 90th percentile, after --load seconds.
Errors are ‖out − ref‖ / ‖ref‖, of one evaluation against float64.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch.utils import collect_env

import accel
from accel import cli
from accel.config.options import FID, FILES_AND_LOGS, GRID, Options
from accel.config.rules import named_defaults
from accel.decoders.autoencoder_kl import SD_VAE_FT, KLDecoder
from accel.decoders.loading import FILES, PUBLISHED
from accel.distributed.launched import launched_ranks
from accel.errors import UsageError
from accel.io.filesystem import ROOT, atomic_write, sha256_of, weights_folder
from accel.io.output import check_writable
from accel.kernels import gpu
from accel.run import Run
from accel.run.opening import choose_device, open_run
from accel.runtime import precision
from bench import steps

RANDOM = "random, seed 0"  # weights or a decoder that no file holds
# seconds of runs after which a tier is not run again: long runs differ by less than 1 %
ENOUGH = 60.0
CONTEST = dict(model="DiT-XL/2", image_size=512, steps=250, pictures=8)


def provenance(device: torch.device) -> dict:
    """Return the origin of figures: GPU and driver (None on a CPU), CPU cores, versions, commit,
    date and command.
    """
    cuda = device.type == "cuda"
    world = os.environ.get("WORLD_SIZE")
    program = f"torchrun --nproc_per_node={world}" if world else "python"
    words = [os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
    return dict(
        gpu=gpu.name(device) if cuda else None,
        driver=collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
        version=accel.__version__,
        commit=commit_of(ROOT),
        date=str(date.today()),
        command=f"{program} {shlex.join(words)}",
    )


def commit_of(folder: Path) -> str | None:
    """Return the commit of a checkout, None without git."""
    command = f"git -C {shlex.quote(str(folder))} describe --always --dirty"
    return collect_env.run_and_read_all(collect_env.run, command)


def write(path: str | Path, record: dict) -> None:
    """Write a record as the whole file `path`."""
    with atomic_write(path) as file:
        file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


# ---- whole processes ----


def decoder_of(options: Options, folder: Path) -> str:
    """Return the decoder of a job: the given one, the model's own, or in place of a published
    one, which would be downloaded, a random one of its size in `folder`.
    """
    vae = options.get("vae") or named_defaults(options).vae
    if "vae" in options or vae not in PUBLISHED:
        return vae
    torch.manual_seed(0)
    (folder / FILES[0]).write_text(json.dumps(SD_VAE_FT))
    save_file(KLDecoder(SD_VAE_FT).state_dict(), folder / FILES[1])
    return str(folder)


def execute(command: list, folder: Path = ROOT) -> tuple[str, dict[str, float]]:
    """Run a Python command in a folder. Return the text that it printed, and the seconds of the
    phases in its last line and of the whole process. Raises UsageError if it fails.
    """
    command = [sys.executable, *map(str, command)]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    process = time.perf_counter() - started
    if done.returncode:
        raise UsageError(f"{shlex.join(command)} failed; its error is above")
    phases = re.findall(r"([\w-]+) ([\d.]+) s", done.stdout.rstrip().rpartition("\n")[2])
    return done.stdout, {name: float(value) for name, value in phases} | dict(process=process)


def jobs(args: Namespace, run: Run, record: dict) -> Iterator[dict]:
    """Fill `record` with the runs of a job in each tier. Yield each row."""
    kind = "fork" if args.fork else "fid" if run.is_fid_job else "contest"
    decoder = RANDOM if run.settings.vae == str(args.folder) else Path(run.settings.vae).name
    record |= dict(kind=kind, steps=run.settings.num_sampling_steps, gpus=args.gpus)
    record |= dict(decoder=decoder, pictures=run.count, grids=run.settings.grids)
    path = run.space.files.path
    files = dict(weights=weights_of(run), decoder=path / FILES[1] if path.is_dir() else path)
    record["sha256"] = {name: digest_of(file) for name, file in files.items() if file.is_file()}
    for name in ("ckpt", "vae"):
        if getattr(args, name) is None:
            args.flags += [f"--{name}", getattr(run.settings, name)]
    if args.fork:
        yield from fork(args, run, record)
        return
    record[kind] = []
    for tier in args.tiers:
        record[kind].append(timed(args, run, tier))
        yield record[kind][-1]


def weights_of(run: Run) -> Path:
    """Return the absolute path of a run's weights."""
    path = Path(run.settings.ckpt)
    return (path if path.exists() else weights_folder() / path).absolute()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return sha256_of(file)


def kept(args: Namespace, ending: str, picture: Path) -> dict:
    """Copy a picture next to the record. Return its entries: SHA-256 and file."""
    target = args.file.with_name(args.file.stem + ending)
    target.write_bytes(picture.read_bytes())
    return dict(picture=digest_of(target), file=target.name)


def timed(args: Namespace, run: Run, tier: str) -> dict:
    """Time a job after a short one that fills the caches. Keep a grid's picture; of an FID job
    return the pictures/s after the first batches, by the files' times.
    """
    command = ["sample.py", "--gpus", args.gpus] if args.gpus > 1 else ["sample.py"]
    short = ["--num-sampling-steps", 3]
    output = "--output"
    if run.is_fid_job:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}"]
        command = [*launcher, "sample_ddp.py"] if args.gpus > 1 else ["sample_ddp.py"]
        short = ["--num-fid-samples", 1]
        output = "--sample-dir"
    command += [*args.flags, "--precision", tier]
    execute([*command, *short, output, args.folder / f"{tier}-first.png"])
    runs = []
    while len(runs) < args.repeats and sum(phases["total"] for phases in runs) < ENOUGH:
        place = args.folder / f"{tier}-{len(runs)}.png"
        text, phases = execute([*command, output, place])
        runs.append(phases)
    # to be typed in the repository's folder; random weights are gone by then
    typed = shlex.join(map(str, ["python", *command]))
    row = dict(
        tier=tier,
        seconds=statistics.median(phases["total"] for phases in runs),
        runs=runs,
        settings=next(line for line in text.splitlines() if " · " in line),
        command=typed.replace(f"{ROOT}/", "").replace(str(args.folder), "FOLDER"),
    )
    if not run.is_fid_job:
        several = run.settings.grids > 1
        endings = [f"_{index}" for index in range(run.settings.grids)] if several else [""]
        grids = [
            kept(args, f"-{tier}{ending}.png", place.with_name(f"{place.stem}{ending}.png"))
            for ending in endings
        ]
        return row | dict(grids=grids)
    first = run.settings.per_proc_batch_size * args.gpus
    written = [path.stat().st_mtime for path in sorted(place.rglob("*.png"))]
    steady = (run.count - first) / (max(written) - max(written[:first]))
    return row | dict(pictures_per_s=steady)


# Run the imports of sample.py first, so that the clock starts at loading, as ours does.
FORK = """
import ast, runpy, time
tree = ast.parse(open("sample.py").read())
imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module(imports, []), "sample.py", "exec"), {})
print(f"loading at {time.time()}", flush=True)
"""
RUN_FORK = 'runpy.run_path("sample.py", run_name="__main__")'
# A step begins with a call of the network. The program ends after the recorded ones.
PROFILE_FORK = f"""
import models, torch
warmup = active = {steps.RECORDED}
def export(profile):
    profile.export_chrome_trace(TRACE)
    raise SystemExit
profile = torch.profiler.profile(
    schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=active), on_trace_ready=export)
forward = models.DiT.forward_with_cfg
def forward_with_cfg(*args, **kwargs):
    if profile.step_num == 0 and not profile.profiler:
        profile.start()
    else:
        if profile.step_num == warmup - 1 and torch.cuda.is_available():
            torch.cuda.synchronize()  # earlier steps' kernels must not be recorded
        profile.step()
    return forward(*args, **kwargs)
models.DiT.forward_with_cfg = forward_with_cfg
"""


def fork(args: Namespace, run: Run, record: dict) -> Iterator[dict]:
    """Profile a few steps of the organisers' sample.py in its checkout, then time it, and keep its
    grids. Fill `record` and yield the row after each grid. Until the program prints its mean, the
    mean is of the times between the files, and there is none of one grid.
    """
    (args.fork / "output").mkdir(exist_ok=True)  # the program does not make it
    values = run.settings
    flags = ["--model", values.model, "--ckpt", weights_of(run), "--image-size", values.image_size]
    flags += ["--num-sampling-steps", values.num_sampling_steps]
    trace = args.file.with_suffix(".trace.json.gz")
    profiled = f"{FORK}{PROFILE_FORK.replace('TRACE', repr(str(trace)))}{RUN_FORK}"
    execute(["-c", profiled, *flags], args.fork)
    command = [sys.executable, "-u", "-c", FORK + RUN_FORK, *map(str, flags)]
    program = subprocess.Popen(command, cwd=args.fork, stdout=subprocess.PIPE, text=True)
    started = math.inf
    for line in program.stdout:  # one before each grid, and the mean
        if line.startswith("loading at "):
            started = float(line.split()[-1])
        made = [(picture.stat().st_mtime, picture) for picture in args.fork.rglob("sample*.png")]
        grids = sorted(entry for entry in made if entry[0] >= started)
        if not grids:
            continue
        (first, _), *_, (last, _) = *grids, grids[-1]
        printed = re.search(r"Average sampling time: ([\d.]+)", line)
        mean = (last - first) / (len(grids) - 1) if len(grids) > 1 else None
        record["fork"] = dict(
            tier="tf32" if precision.supports("tf32", run.device) else "fp32",  # as it sets
            seconds=first - started,
            printed=float(printed[1]) if printed else mean,
            grids=[kept(args, f"_{index}.png", path) for index, (_, path) in enumerate(grids)],
            of_commit=commit_of(args.fork),
            trace=trace.name if trace.exists() else None,
        )
        yield record["fork"]
    if program.wait():
        raise UsageError(f"{args.fork}/sample.py failed; its error is above")


# ---- the command ----

COMMANDS = dict(ladder=steps.ladder, rivals=steps.rivals, layouts=steps.layouts, jobs=jobs)


def own_arguments() -> ArgumentParser:
    """Return a parser of the flags that sample.py lacks."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("measurement", choices=COMMANDS)
    tiers = dict(nargs="+", choices=precision.TIERS, help="tiers (default: all but bf16)")
    add("--precision", dest="tiers", **tiers)
    add("--pictures", type=cli.positive, nargs="+", help="in a batch (default: 8; layouts: 1 8)")
    add("--output", dest="file", type=Path, help="JSON file to write")
    add("--load", type=float, default=5.0, help="seconds of steps before timing (default: 5)")
    add("--window", type=float, default=3.0, help="seconds of timed steps (default: 3)")
    add("--seen-as", type=float, metavar="X.Y", help="choose the backends of such a GPU")
    add("--only", nargs="+", default=[""], help="ladder: rungs with such a word in their name")
    add("--gate", type=cli.positive, metavar="SEEDS", help="ladder: judge 64 pictures per seed")
    add("--profile", action="store_true", help="ladder: profile each tier")
    modes = dict(nargs="+", choices=("eager", "default", "max-autotune"), default=["eager"])
    add("--vs", **modes, help="rivals: eager, and modes of torch.compile (default: eager)")
    add("--gpus", type=cli.positive, default=1, help="jobs: GPUs of this node (default: 1)")
    add("--repeats", type=cli.positive, default=3, help="jobs: runs of each (default: 3)")
    add("--fork", type=Path, help="jobs: a checkout of the organisers' program")
    return parser


def main() -> None:
    own = own_arguments()
    parser = cli.OneLineParser(description=__doc__.splitlines()[0], parents=[own])
    cli.add_arguments(parser, GRID, FID, exclude=(*FILES_AND_LOGS, "precision"))
    args = parser.parse_args()
    args.flags = own.parse_known_args()[1]  # of sample.py
    with (
        launched_ranks("measure.py", parser.worded) as ranks,
        TemporaryDirectory() as folder,
    ):
        if (args.measurement == "layouts") != (ranks.world > 1):
            raise UsageError("use torchrun for layouts, and one process for all else")
        args.ranks = ranks
        args.folder = Path(folder)
        request = cli.request_from(args)
        device = choose_device(ranks.claim_device(args.device))
        if args.seen_as:
            gpu.emulated = divmod(round(10 * args.seen_as), 10)
        every = [tier for tier in precision.TIERS if precision.supports(tier, device)]
        args.tiers = args.tiers or [tier for tier in every if tier != "bf16"]
        for tier in args.tiers:
            precision.require("precision", tier, device)
        args.file = (args.file or args.folder / "record.json").absolute()
        if ranks.rank == 0:
            check_writable(args.file)
        ckpt = args.ckpt or named_defaults(request.values).ckpt
        weights = ckpt or ranks.from_rank_0(
            lambda: steps.random_weights(request.values, args.folder)
        )
        changes = dict(precision="fp32", output_type="latent")
        if args.measurement == "jobs":
            changes = dict(vae=decoder_of(request.options, args.folder))
        run = open_run(request.changed(ckpt=weights, **changes), device)
        record = provenance(device)
        record |= dict(model=run.settings.model, image_size=run.settings.image_size)
        record["weights"] = Path(ckpt).name if ckpt else RANDOM
        for row in COMMANDS[args.measurement](args, run, record):
            if ranks.rank == 0:
                write(args.file, record)
                print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
