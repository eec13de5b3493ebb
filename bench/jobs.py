"""Time whole processes as users run them: the contest's job, the organisers' program, an FID job.

    python bench/jobs.py --contest all --output output/contest.json
    python bench/jobs.py --contest exact --gpus 4 --output output/four.json
    python bench/jobs.py --fork ../DiT-SUSTCSC --ckpt WEIGHTS --output output/fork.json
    python bench/jobs.py --fid 640 --image-size 256 --output output/fid.json

--contest: T from loading the model to the picture on disk, after a run that fills the
caches; its points, if the job is the contest's; the time of the whole process. --gpus N
makes the picture with N ranks. Each tier's picture is kept beside the record, as
contest-exact.png; scripts/report.py finds the record by the picture's SHA-256. --pictures N:
the first N of the contest's labels.
--fork: the same time of the organisers' unmodified sample.py, and the time that it prints: the
mean of its grids without loading. Its first grid is kept as fork.png.
--fid: an FID job by few evaluations, so that decoding and writing count: pictures/s from the
start of the process, and from the first written batch on.
Without --ckpt network and decoder have random weights from a seed, and the picture is a
rehearsal's.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import hashlib
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from accel import precision
from accel.cli import OneLineParser, positive, user_errors
from accel.errors import UsageError
from accel.files import ROOT, weights_folder
from accel.latents import files
from accel.latents.autoencoder_kl import SD_VAE_FT
from accel.options import OPTIONS
from accel.resolve import LABELS
from bench import harness

# seconds of runs after which a tier is not run again: long runs differ by less than 1 %
ENOUGH = 60.0
CONTEST = dict(model="DiT-XL/2", image_size=512, steps=250, pictures=8)


class Done(NamedTuple):
    """A command that has succeeded: the text that it printed, and seconds by phase, from the
    last line, with those of the whole process.
    """

    text: str
    phases: dict[str, float]


def run(command: list, folder: Path = ROOT) -> Done:
    """Run a Python command in a folder. Raises UsageError with its complaint if it fails."""
    started = time.perf_counter()
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode == 0:
        phases = re.findall(r"([\w-]+) ([\d.]+) s", done.stdout.rstrip().rpartition("\n")[2])
        by_name = {name: float(value) for name, value in phases}
        return Done(done.stdout, by_name | {"process": seconds})
    for line in done.stderr.splitlines():
        if line.startswith(("sample.py: ", "sample_ddp.py: ")):
            raise UsageError(line)
    raise UsageError(f"{shlex.join(command)} failed:", *done.stderr[-4000:].splitlines())


def pictures_per_second(folder: Path, batch: int) -> float:
    """Return the rate of an FID job after its first `batch` pictures, from the files' times."""
    written = [path.stat().st_mtime for path in sorted(folder.rglob("*.png"))]
    return (len(written) - batch) / (max(written) - max(written[:batch]))


def other_job(record: dict) -> bool:
    """Return whether a record is of another job than the contest's. Random weights make none:
    they cost the same time.
    """
    return any(record[key] != value for key, value in CONTEST.items())


def rehearsal(record: dict) -> bool:
    """Return whether the picture of a record cannot be handed in: it is of another job, or of
    random weights.
    """
    return other_job(record) or harness.RANDOM in (record["weights"], record.get("decoder"))


def score(seconds: float) -> float:
    """Return the contest's points for T seconds: 50 up to 100 s, none from 300 s on."""
    return 50 * min(1.0, max(0.0, math.log(300 / seconds) / math.log(3)))


def beside(args: Namespace, ending: str, folder: Path) -> Path:
    """Return the name of a picture beside --output, without one in `folder`."""
    output = Path(args.output or folder / "sample.json")
    return output.with_name(output.stem + ending)


def contest(args: Namespace, flags: list, folder: Path, record: Callable) -> None:
    """Time a grid in each tier, score it, and record and keep its picture."""
    results = []
    program = ["sample.py", "--gpus", args.gpus] if args.gpus > 1 else ["sample.py"]
    if args.pictures != CONTEST["pictures"]:
        every = LABELS if args.num_classes == 1000 else range(args.num_classes)
        flags = [*flags, "--labels", *every[: args.pictures]]
    for tier in args.contest:
        command = [*program, *flags, "--precision", tier, "--num-sampling-steps"]
        run([*command, min(3, args.steps), "--output", folder / "first.png"])
        picture = beside(args, f"-{tier}.png", folder)
        runs = []
        while len(runs) < args.repeats and sum(phases["total"] for phases in runs) < ENOUGH:
            done = run([*command, args.steps, "--output", picture.absolute()])
            runs.append(done.phases)
        seconds = [phases["total"] for phases in runs]
        typed = shlex.join(map(str, ["python", *command, args.steps]))
        row = dict(
            tier=tier,
            seconds=statistics.median(seconds),
            runs=runs,
            picture=hashlib.sha256(picture.read_bytes()).hexdigest(),
            settings=next(line for line in done.text.splitlines() if " · " in line),
            # to be typed in the repository's folder; random weights are gone by then
            command=typed.replace(f"{ROOT}/", "").replace(str(folder), "FOLDER"),
            file=picture.name,
        )
        results.append(row)
        record(dict(contest=results))
        points = "a rehearsal, no points"
        if not rehearsal(vars(args)):
            points = f"{score(row['seconds']):.1f} of 50 points"
        print(
            f"{tier:6} T = {row['seconds']:.2f} s, {min(seconds):.2f} to {max(seconds):.2f}; "
            f"process {done.phases['process']:.2f}: {points}",
            flush=True,
        )


# Run the imports of sample.py first, so that the clock starts at loading, as ours does.
FORK = """
import ast, runpy, time
tree = ast.parse(open("sample.py").read())
imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module(imports, []), "sample.py", "exec"), {})
print(f"loading at {time.time()}", flush=True)
runpy.run_path("sample.py", run_name="__main__")
"""


def fork(args: Namespace, flags: list, folder: Path, record: Callable) -> None:
    """Time the organisers' sample.py in its checkout --fork, and keep its first grid."""
    ckpt = Path(flags[flags.index("--ckpt") + 1])
    path = ckpt if ckpt.exists() else weights_folder() / ckpt
    (args.fork / "output").mkdir(exist_ok=True)  # the program does not make it
    command = ["-c", FORK, "--model", args.model, "--image-size", args.image_size]
    command += ["--num-sampling-steps", args.steps, "--ckpt", path.absolute()]
    done = run(command, args.fork)
    printed = re.search(r"Average sampling time: ([\d.]+)", done.text)
    started = float(re.search(r"loading at ([\d.]+)", done.text)[1])
    made = [(path.stat().st_mtime, path) for path in args.fork.rglob("sample*.png")]
    grids = sorted(entry for entry in made if entry[0] >= started)
    picture = beside(args, ".png", folder)
    picture.write_bytes(grids[0][1].read_bytes())
    row = dict(
        tier="tf32" if precision.supports("tf32", args.device) else "fp32",  # as it sets
        seconds=grids[0][0] - started,
        printed=float(printed[1]) if printed else None,
        grids=len(grids),
        of_commit=harness.first_line("git", "-C", args.fork, "describe", "--always", "--dirty"),
        picture=hashlib.sha256(picture.read_bytes()).hexdigest(),
        file=picture.name,
    )
    record(dict(fork=row))
    print(f"T = {row['seconds']:.2f} s with loading; printed: {row['printed']} s")


def fid(args: Namespace, flags: list, folder: Path, record: Callable) -> None:
    """Time an FID job of --fid pictures."""
    command = ["sample_ddp.py", *flags]
    if args.gpus > 1:
        ranks = f"--nproc_per_node={args.gpus}"
        command = ["-m", "torch.distributed.run", "--standalone", ranks, *command]
    command += ["--precision", args.precision, "--sampler", "dpm++"]
    command += ["--num-sampling-steps", args.steps, "--per-proc-batch-size", args.batch]
    runs = []
    run([*command, "--num-fid-samples", 1, "--sample-dir", folder / "first"])  # fills the caches
    for index in range(args.repeats):
        place = folder / f"fid{index}"
        phases = run([*command, "--num-fid-samples", args.fid, "--sample-dir", place]).phases
        steady = pictures_per_second(place, args.batch * args.gpus)
        rates = dict(whole=args.fid / phases["process"], steady=steady)
        runs.append(dict(**phases, pictures_per_s=rates))
        record(dict(batch=args.batch, sampler="dpm++", fid=runs))
    for name in ("whole", "steady"):
        rates = sorted(phases["pictures_per_s"][name] for phases in runs)
        print(
            f"{name:6} {statistics.median(rates):.2f} pictures/s, {rates[0]:.2f} to {rates[-1]:.2f}"
        )


def flags_of(args: Namespace, device: torch.device, folder: Path) -> list:
    """Return the flags of network, decoder and device for the commands. Write random
    weights to `folder` for a network or decoder without a file.
    """
    ckpt = args.ckpt
    vae = args.vae
    if not ckpt:
        ckpt = folder / "random.pt"
        torch.save(harness.model_of(args, device).state_dict(), ckpt)
    if not vae:
        vae = folder / "vae"
        vae.mkdir()
        (vae / files.FILES[0]).write_text(json.dumps(SD_VAE_FT))
        save_file(harness.random_decoder(torch.device("cpu")).state_dict(), vae / files.FILES[1])
    return [
        "--model",
        args.model,
        "--image-size",
        args.image_size,
        "--ckpt",
        ckpt,
        "--vae",
        vae,
        "--device",
        device,
    ]


def prepare(args: Namespace) -> torch.device:
    """Return the device, and complete `args` for it. Raises UsageError before anything is
    measured.
    """
    device = harness.prepare(args)
    args.precision = args.precision or precision.default_tier(device)
    if args.contest is not None:
        args.contest = args.contest or [args.precision]
    if args.contest == ["all"]:
        args.contest = harness.contest_tiers(device)
    for tier in args.contest or [args.precision]:
        precision.require("contest" if args.contest else "precision", tier, device)
    for needed in ("sample.py", "pretrained_models/sd-vae-ft-ema") if args.fork else ():
        if not (args.fork / needed).exists():
            raise UsageError(f"--fork {args.fork}: has no {needed}; name a checkout that has one")
    batch = args.batch * args.gpus
    if args.fid and args.fid <= batch:
        raise UsageError(f"--fid {args.fid}: needs a second batch; give more than {batch}")
    args.steps = args.steps or (10 if args.fid else harness.STEPS)
    args.pictures = args.fid or (args.pictures if args.contest else 8)
    args.vae = harness.decoder_of(args)
    args.weights = harness.name_of(args.ckpt)
    args.decoder = harness.name_of(args.vae)
    if args.contest and harness.RANDOM in (args.weights, args.decoder):
        print(
            f"weights: {args.weights}; decoder: {args.decoder}. A picture of random ones is a "
            "rehearsal's: give --ckpt and --vae"
        )
    return device


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    tiers = tuple(precision.TIERS)
    on_gpu = torch.cuda.is_available()
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--contest",
        nargs="*",
        choices=(*tiers, "all"),
        metavar="TIER",
        help="the contest's T and points in these tiers (default: sample.py's; all: but bf16)",
    )
    kinds.add_argument(
        "--fork", type=Path, metavar="FOLDER", help="the organisers' sample.py in this checkout"
    )
    kinds.add_argument(
        "--fid", type=positive, metavar="N", help="an FID job of N pictures by dpm++"
    )
    parser.add_argument(
        "--gpus", type=positive, default=1, metavar="N", help="GPUs of this node (default: 1)"
    )
    parser.add_argument(
        "--pictures",
        type=positive,
        default=CONTEST["pictures"],
        metavar="N",
        help="labels of --contest (default: %(default)s)",
    )
    harness.add_arguments(parser)
    parser.add_argument(
        "--vae", help="decoder, as in sample.py (default: a random one; the demo's own)"
    )
    parser.add_argument("--precision", choices=tiers, help="tier of --fid (default: sample.py's)")
    parser.add_argument(
        "--steps",
        "--num-sampling-steps",
        type=positive,
        help="steps (default: 250; --fid: 10)",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=3 if on_gpu else 1,
        help="runs of each; a contest tier gets no more after a minute (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=OPTIONS["per_proc_batch_size"].default if on_gpu else 2,
        help="pictures per rank and FID batch (default: %(default)s)",
    )
    args = parser.parse_args()
    with user_errors(parser), tempfile.TemporaryDirectory() as folder:
        device = prepare(args)
        folder = Path(folder)
        args.device = device
        work = fid if args.fid else fork if args.fork else contest
        about = harness.about(work.__name__, args, device)
        about |= dict(steps=args.steps, gpus=args.gpus, decoder=args.decoder)
        if args.fid:
            about["precision"] = args.precision
        flags = flags_of(args, device, folder)
        work(args, flags, folder, lambda results: harness.write(args.output, about | results))


if __name__ == "__main__":
    main()
