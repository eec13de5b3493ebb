"""From nothing to the picture: seconds from process start to PNG on disk, and the GPU memory that the job takes.

    python scripts/cold_start.py --output log/cold-start.json
    python scripts/cold_start.py --ckpt pretrained_models/DiT-XL-2-512x512.pt --vae ema

sample.py in processes of its own, alone on the GPU, its files in the page cache: with kernel caches that are empty each time, then with those of the run
before. Without --ckpt the network has random, non-zero weights made here from a seed, and the decoder too: arithmetic costs the same. Memory is what the
driver reports, over what was in use before: the process's context, kernels and libraries included.
"""

if not __package__:
    __import__("_as_module")

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
import torch

from accel.options import (
    OneLineParser,
    SamplingOptions,
    UsageError,
    check_writable,
    partial_file,
    positive,
    user_errors,
)
from scripts.benchmark import git
from scripts.measure_ddp import make_vae, make_weights


class Memory:
    """MiB in use on the GPU, read 25 times a second by nvidia-smi until the block ends: `peak`, and `median` of the readings, over the first."""

    def __enter__(self):
        where = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        command = ["nvidia-smi", "-i", where, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self.before = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        self.readings = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*command, "--loop-ms=40"], stdout=self.readings, text=True)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.readings.seek(0)
        values = [int(line) - self.before for line in self.readings.read().split("\n")[:-1]]
        self.readings.close()
        self.peak, self.median = max(values, default=None), statistics.median(values) if values else None


def picture(command, caches):
    """One run of sample.py with its kernel caches in the folder `caches` → a record of its seconds, by phase, and its memory."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(caches / "ours"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
    }
    with Memory() as memory:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(ROOT / "sample.py"), *map(str, command)],
            capture_output=True,
            text=True,
            env=environment,
        )
        seconds = time.perf_counter() - started
    if done.returncode:
        raise UsageError(f"sample.py failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    said = done.stdout.splitlines()
    return dict(
        process=seconds,
        **{name: float(value) for name, value in re.findall(r"([\w-]+) ([\d.]+) s", said[-1])},
        peak_mib=memory.peak,
        median_mib=memory.median,
        said=said[:-1],
    )


def main():
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", help="weights, as in sample.py (default: random ones)")
    parser.add_argument("--vae", help="decoder, as in sample.py (default: a random one)")
    parser.add_argument("--image-size", type=positive, default=512, help="side of a picture in pixels (default: 512)")
    parser.add_argument(
        "--num-sampling-steps",
        type=positive,
        default=SamplingOptions.num_sampling_steps,
        help="steps (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=positive, default=2, help="runs with empty and with warm caches, of each (default: 2)"
    )
    parser.add_argument(
        "--output", default="log/cold-start.json", help="JSON file to write (default: log/cold-start.json)"
    )
    parser.add_argument(
        "--commit",
        default=git("describe", "--always", "--dirty"),
        help="what to record as the commit, where git is not at hand",
    )
    args = parser.parse_args()
    with user_errors(parser):
        if not torch.cuda.is_available():
            raise UsageError("a GPU's start is measured, and there is none here")
        check_writable(args.output)
        measure(args)


def measure(args):
    record = dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        commit=args.commit,
        command=" ".join(["python", *sys.argv]),
        what=f"seconds, process start to PNG on disk: XL/2 at {args.image_size} px, 8 labels, {args.num_sampling_steps} steps, files in the page cache; "
        "MiB of GPU memory over the idle GPU's, as the driver reports them",
        empty_kernel_caches=[],
        warm_kernel_caches=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        ckpt, vae = args.ckpt or work / "random.pt", args.vae or work / "vae"
        if not args.ckpt:
            make_weights(ckpt, "DiT-XL/2", args.image_size)
        if not args.vae:
            make_vae(vae)
        command = [
            "--image-size",
            args.image_size,
            "--ckpt",
            ckpt,
            "--vae",
            vae,
            "--output",
            work / "x.png",
            "--num-sampling-steps",
        ]
        picture([*command, 3], work / "first")  # files into the page cache
        for index in range(2 * args.repeats):
            kind = "empty_kernel_caches" if index < args.repeats else "warm_kernel_caches"
            record[kind].append(
                picture([*command, args.num_sampling_steps], work / (str(index) if index < args.repeats else "0"))
            )
            with partial_file(args.output) as partial:
                partial.write_text(json.dumps(record, indent=1) + "\n")
            print(kind, json.dumps(record[kind][-1]), flush=True)


if __name__ == "__main__":
    main()
