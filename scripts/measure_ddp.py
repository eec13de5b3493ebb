"""Measure sample_ddp.py on the GPUs of one node against one of them, side by side: log/ddp_<gpu>.json.

    python scripts/measure_ddp.py --gpus 4 --vae pretrained_models/sd-vae-ft-ema

Without --ckpt the network has random, non-zero weights made here from a seed: arithmetic costs the same. What is measured, each as users
run it, in processes of their own:

    start     process start → first denoising step queued and done, ranks 1 and N (warm file cache)
    grid      8 labels: sampling time of the slowest rank, 1 and N GPUs, same precision
    decode    the same grid with --decode local and gather, process start → picture
    fid       pictures/s over two batches of every rank, after one batch that warms up: N GPUs against one
"""

if not __package__:
    __import__("_as_module")

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
from accel.options import (
    DEFAULTS_OF,
    DistributedOptions,
    OneLineParser,
    SamplingOptions,
    check_writable,
    partial_file,
    positive,
    user_errors,
)


def make_weights(path, model, image_size):
    """Random non-zero weights, in a .pt file that ranks can map."""
    import torch

    from models import DiT_models

    with torch.device("meta"):
        network = DiT_models[model](input_size=image_size // 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, state = torch.Generator(device).manual_seed(0), {}
    for name, value in network.state_dict().items():
        scale = 0.02 if "adaLN" in name or value.ndim == 1 else 0.5 / value[0].numel() ** 0.5
        state[name] = (torch.randn(value.shape, generator=generator, device=device) * scale).cpu()
    state["pos_embed"] = network.position_table()
    torch.save(state, path)


def make_vae(folder):
    """A random decoder of sd-vae-ft-*'s size."""
    import torch
    from safetensors.torch import save_file

    from accel import vae
    from accel.decoder import SD_VAE_FT, Decoder

    folder.mkdir()
    (folder / vae.FILES[0]).write_text(json.dumps(SD_VAE_FT))
    torch.manual_seed(0)
    save_file(Decoder(SD_VAE_FT).state_dict(), folder / vae.FILES[1])


# Runs sample_ddp.py in this process and notes when things happened; the rank's notes go to a file of its own.
PROBE = """
import json, os, sys, time
start = float(os.environ["START"])
notes = dict(python=time.time() - start)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
import accel.engine as engine
import torch
notes["imports"] = time.time() - start
inner, runs = engine.denoise, []
synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
def denoise(network, diffusion, z, *args, progress=None, **how):
    def first():
        if "first step" not in notes:
            synchronize()
            notes["first step"] = time.time() - start
        if progress is not None:
            progress()
    synchronize()
    begin = time.time()
    out = inner(network, diffusion, z, *args, progress=first, **how)
    synchronize()
    runs.append((begin - start, time.time() - start, len(out)))
    return out
engine.denoise = denoise
import sample_ddp
try:
    sample_ddp.main()
finally:
    notes["end"] = time.time() - start
    notes["runs"] = runs
    json.dump(notes, open(os.path.join(os.environ["NOTES"], os.environ.get("RANK", "0")), "w"))
"""


def launch(processes, *args):
    """sample_ddp.py on so many GPUs → every rank's notes, and seconds of the whole command."""
    with tempfile.TemporaryDirectory() as notes:
        probe = Path(notes) / "probe.py"
        probe.write_text(PROBE)
        start = time.time()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
            str(probe),
            str(ROOT / "sample_ddp.py"),
            *map(str, args),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "START": str(start),
                "NOTES": notes,
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "OMP_NUM_THREADS": "4",
            },
        )
        seconds = time.time() - start
        if done.returncode:
            if said := re.search(r"^sample_ddp\.py: .*", done.stderr, re.M):
                print(f"measure_ddp.py: {said[0]}", file=sys.stderr)
                sys.exit(2)
            sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr[-4000:]}")
        print(f"{processes} ranks, {seconds:.1f} s: {' '.join(map(str, args))}\n{done.stdout.strip()}", flush=True)
        phases = re.findall(r"(\w[\w-]*) ([\d.]+) s", done.stdout.strip().splitlines()[-1])
        return dict(
            ranks=[json.loads((Path(notes) / str(rank)).read_text()) for rank in range(processes)],
            seconds=seconds,
            phases={name: float(value) for name, value in phases},
        )


def main():
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=positive, default=4, help="of this node, against one of them (default: 4)")
    parser.add_argument("--model", default="DiT-XL/2", help="network")
    parser.add_argument("--image-size", type=positive, help="side of a picture in pixels (default: sample_ddp.py's)")
    parser.add_argument("--precision", help="tier (default: sample_ddp.py's)")
    parser.add_argument(
        "--steps",
        type=positive,
        default=SamplingOptions.num_sampling_steps,
        help="steps of the grid (default: %(default)s)",
    )
    parser.add_argument(
        "--fid-steps",
        type=positive,
        default=25,
        help="steps of a picture of the FID job: its rate at 250 follows (default: 25)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("grid", "fid"),
        default=("grid", "fid"),
        help="what to measure (start and decode are the grid's)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=DistributedOptions.per_proc_batch_size,
        help="pictures a rank and batch of the FID job (default: %(default)s)",
    )
    parser.add_argument("--ckpt", help="weights, as in sample_ddp.py (default: random ones; the demo's own)")
    parser.add_argument(
        "--vae", help="decoder, as in sample_ddp.py (default: a random one of the same size; the demo's own)"
    )
    parser.add_argument("--commit", help="recorded with the figures; default: git's", default=None)
    parser.add_argument("--output", type=Path, help="JSON file to write (default: log/ddp_NxGPU.json)")
    args = parser.parse_args()
    import torch

    from accel.precision import default_tier
    from models import DiT_models

    if args.model not in DiT_models:
        parser.error(f"--model {args.model}: unknown; choose from {', '.join(DiT_models)}")
    with user_errors(parser):
        implied = SamplingOptions(model=args.model, image_size=args.image_size).resolve()
    args.image_size = implied.image_size
    args.ckpt = args.ckpt or implied.ckpt
    args.vae = args.vae or (implied.vae if args.model in DEFAULTS_OF else None)
    args.precision = args.precision or default_tier(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    commit = (
        args.commit
        or subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    )
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    about = dict(
        kind="ddp",
        gpu=name,
        gpus=args.gpus,
        torch=torch.__version__,
        commit=commit,
        command=" ".join(["python", *sys.argv]),
        date=str(date.today()),
        model=args.model,
        image_size=args.image_size,
        precision=args.precision,
        weights=args.ckpt or "random, seed 0",
        steps=args.steps,
    )
    output = args.output or ROOT / "log" / f"ddp_{args.gpus}x_{name.replace(' ', '-')}.json"
    with user_errors(parser):
        check_writable(output)
    if not torch.cuda.is_available():
        print(
            f"No GPU: {args.gpus} processes over gloo share this machine's processor; times say nothing about GPUs",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        ckpt, vae = args.ckpt or work / "random.pt", args.vae or work / "vae"
        if not args.ckpt:
            make_weights(ckpt, args.model, args.image_size)
        if not args.vae:
            make_vae(vae)
        common = [
            "--model",
            args.model,
            "--image-size",
            args.image_size,
            "--precision",
            args.precision,
            "--ckpt",
            ckpt,
            "--vae",
            vae,
        ]
        counts = (1, args.gpus)
        results = {}

        def record():
            with partial_file(output) as partial:
                partial.write_text(json.dumps(dict(about, **results), indent=1) + "\n")

        launch(args.gpus, *common, "--num-sampling-steps", 3, "--output", work / "warm.png")  # file cache, kernel cache
        if "grid" in args.parts:
            grids = {}
            for n, decode in [
                (1, "local"),
                (args.gpus, "local"),
                (args.gpus, "gather"),
                (1, "local"),
                (args.gpus, "local"),
                (args.gpus, "gather"),
            ]:
                grids.setdefault((n, decode), []).append(
                    launch(
                        n,
                        *common,
                        "--num-sampling-steps",
                        args.steps,
                        "--decode",
                        decode,
                        "--output",
                        work / f"{n}{decode}.png",
                    )
                )
            sampling = {
                n: [
                    max(end - begin for rank in grid["ranks"] for begin, end, _ in rank["runs"])
                    for grid in grids[n, "local"]
                ]
                for n in counts
            }
            first = {
                n: [max(rank["first step"] for rank in grid["ranks"]) for grid in grids[n, "local"]] for n in counts
            }
            results["start_to_first_step_s"] = {**first, "ratio": min(first[args.gpus]) / min(first[1])}
            results["grid_sampling_s"] = {**sampling, "ratio": min(sampling[args.gpus]) / min(sampling[1])}
            results["grid_start_to_picture_s"] = {
                f"{n} {how}": [grid["seconds"] for grid in some] for (n, how), some in grids.items()
            }
            results["grid_phases_s"] = {
                f"{n} {how}": [grid["phases"] for grid in some] for (n, how), some in grids.items()
            }
            record()

        if "fid" in args.parts:
            rates = {}
            for n in counts:
                notes = launch(
                    n,
                    *common,
                    "--num-sampling-steps",
                    args.fid_steps,
                    "--num-fid-samples",
                    3 * args.batch * n,
                    "--per-proc-batch-size",
                    args.batch,
                    "--sample-dir",
                    work / f"fid{n}",
                )["ranks"]
                # From the end of each rank's first whole batch to the end of its last: sampling, decoding and handing over of two batches.
                begin, end = max(rank["runs"][-3][1] for rank in notes), max(rank["runs"][-1][1] for rank in notes)
                rates[n] = 2 * args.batch * n / (end - begin)
            results["fid_pictures_per_s"] = {
                **rates,
                "steps": args.fid_steps,
                "batch": args.batch,
                "efficiency": rates[args.gpus] / (args.gpus * rates[1]),
            }
            record()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
