"""Other generations of GPUs rehearsed on this one: what each chooses, whether it is right, what a step takes.

    python bench/rehearse.py --output output/rehearse.json
    python bench/rehearse.py --capability 7.0 8.0 --batch-rows 16 --output output/older.json

The code sees another compute capability, and Triton compiles for it: the driver makes this GPU's machine code of its
PTX. For every capability: each tier's pictures of the demo against fp32's, the kernels of a step and a decoded picture
by name, tiers that must be refused, an FID job of the demo on two GPUs if there are as many. Then, at the capabilities
of --timed, the time of XL/2's steps with random weights.
cuBLAS and cuDNN see the GPU that is here; a step by them may be faster than the older GPU's kernels would make it.
Exit status 1: pictures miss their criteria, a kernel of a newer generation was launched, or a process failed."""

if not __package__:
    __import__("_as_module")

import gc
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import evaluate
from accel import engine, gpu, precision
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.fast.dit import Optimisations
from accel.flags import positive
from accel.options import ROOT, SamplingOptions
from accel.vae.half import HalfDecoder
from bench import measure, steps
from models import DiT

CAPABILITIES = (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
# 8.6 and 8.9 take the backends of 8.0; 12.0 takes those of 10.0 in fp16 and of 8.0 in exact.
TIMED = (7, 0), (8, 0), (9, 0), (10, 0)
TIMED_TIERS = "fp16", "exact"
OURS = r"^(linear|attention|split_linear|split_attention|adaln)$"  # our kernels for Hopper
GATES = {"fp16": "contest", "tf32": "contest", "exact": "strict"}  # bf16 is the way out where float16 overflows
PSNR = evaluate.GATES["contest"]["psnr"]
FID_JOB = "--model", "DiT-Demo/2", "--num-fid-samples", 16, "--per-proc-batch-size", 4, "--num-sampling-steps", 50
NEWER = {  # what must not be launched before a capability
    (8, 0): r"bf16|bfloat16|tf32|flash|^_(attention|split_attention|split_linear)$",
    (9, 0): r"cudnn.*(sdpa|flash|fmha|attention)",
}


def version(text: str) -> tuple[int, int]:
    """A flag's value."""
    if not re.fullmatch(r"\d+\.\d", text):
        raise ArgumentTypeError(f"{text}: must be a compute capability, as 8.0")
    major, minor = text.split(".")
    return int(major), int(minor)


def compile_for(capability: tuple[int, int]) -> None:
    """From here on Triton compiles for a GPU of `capability`, older than this one, and the driver its PTX for this one.
    Once in a process, before a kernel is launched."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def keep_ptx(backend, stages, *_):
        stages["cubin"] = lambda ptx, metadata: ptx.encode() + b"\0"

    CudaDriver.get_current_target = lambda driver: target
    knobs.runtime.add_stages_inspection_hook = keep_ptx


@contextmanager
def rehearsal(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, this GPU counts as one of `capability`."""
    own = torch.cuda.get_device_capability()
    if capability == own:
        yield
        return
    if capability < min((9, 0), own):
        compile_for(capability)
    with gpu.seen_as(capability):
        yield


#################################################################################
#                         What a process of its own does                        #
#################################################################################


def launched(tier: str, device: torch.device) -> list[str]:
    """Names of the kernels of an XL/2 block on three pictures and, in the half tiers, of a small decoded picture."""
    with torch.device(device):
        model = DiT(input_size=64, depth=1, hidden_size=1152, num_heads=16)
        model.load_state_dict(measure.random_state(model))
    network = measure.build(model.eval(), tier, device, Optimisations(graph=False))
    args = Namespace(image_size=512, pictures=3, num_classes=1000, cfg_scale=4.0)
    loop, done = measure.sampling(network, args, device), []
    decoder = HalfDecoder(measure.random_decoder(device)) if precision.TIERS[tier].dtype != torch.float32 else None

    def two_steps(*_):
        done.append(None)
        if len(done) == 2:
            raise measure.Enough

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler, torch.inference_mode():
        measure.run_until(loop, two_steps)
        if decoder:
            decoder(torch.randn(1, 4, 8, 8, device=device))
        torch.cuda.synchronize()
    return sorted({event.name for event in profiler.events() if event.device_type == DeviceType.CUDA})


def of_newer(names: list[str], capability: tuple[int, int]) -> list[str]:
    """The kernels that a GPU of `capability` cannot have launched by our choice."""
    patterns = [pattern for since, pattern in NEWER.items() if capability < since]
    patterns += [OURS] if capability != (9, 0) else []
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def check(args: Namespace, device: torch.device) -> dict:
    """Every tier at a capability: refused, or judged and its kernels listed."""
    capability, judge, tiers = gpu.capability(device), steps.Judge(1, device), {}
    for tier in precision.TIERS:
        try:
            engine.choose_precision(SamplingOptions(precision=tier), device)
        except UsageError as error:
            tiers[tier] = dict(refused=str(error))
            continue
        names = launched(tier, device)
        tiers[tier] = dict(newer=of_newer(names, capability), kernels=names)
        if tier != "fp32":
            tiers[tier]["judged"] = judge.judge(tier, None)
    return tiers


def timing(args: Namespace, device: torch.device) -> dict:
    """Milliseconds of XL/2's steps and the most GPU memory in use, by tier and batch rows."""
    model, times = measure.random_network("DiT-XL/2", args.image_size, 1000, device), {}
    for tier, rows in product(TIMED_TIERS, args.batch_rows):
        gc.collect()
        held = torch.cuda.memory_allocated(device)  # the model in float32, which no sampling run keeps
        network = measure.build(model, tier, device)
        case = Namespace(image_size=args.image_size, pictures=rows // 2, num_classes=1000, cfg_scale=4.0)
        torch.cuda.reset_peak_memory_stats(device)
        loop = measure.sampling(network, case, device)
        row = measure.time_steps(loop, device, args.load, args.window, f"{tier}, {rows} rows")
        row["peak_gb"] = (torch.cuda.max_memory_allocated(device) - held) / 1e9
        times.setdefault(tier, {})[rows] = row
        del network, loop
    return times


def rank(args: Namespace, device: torch.device) -> None:
    """A rank of `fid_job`: sample_ddp.py with the arguments that follow."""
    sys.argv = ["sample_ddp.py", *args.arguments]
    runpy.run_path(str(ROOT / "sample_ddp.py"), run_name="__main__")


WORK = {"check": check, "timing": timing, "rank": rank}

#################################################################################
#                                  All of them                                  #
#################################################################################


def name_of(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def run_as(capability: tuple[int, int], folder: Path, *command: object) -> str | None:
    """Run a command of this program that sees `capability`, in a process of its own: Triton keeps a target's state.
    Returns None, or what it printed if it fails."""
    seen = name_of(capability)
    environment = dict(os.environ, XDG_CACHE_HOME=str(folder), TRITON_CACHE_DIR=str(folder / f"triton-{seen}"))
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout if done.returncode else None


def in_a_process(work: str, capability: tuple[int, int], folder: Path) -> dict:
    """`work` of these flags at a capability; {"failed": its last lines} if it fails."""
    seen = name_of(capability)
    output = folder / f"{work}-{seen}.json"
    flags = *sys.argv[1:], "--work", work, "--seen-as", seen, "--output", output
    failure = run_as(capability, folder, os.path.abspath(__file__), *flags)
    return json.loads(output.read_text()) if failure is None else dict(failed=failure.splitlines()[-15:])


def fid_job(capability: tuple[int, int], folder: Path) -> dict:
    """An FID job of the demo, on two GPUs if there are as many: by tier, the lowest PSNR of its pictures against
    fp32's."""
    launcher = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={min(2, torch.cuda.device_count())}"
    program = os.path.abspath(__file__), "--seen-as", name_of(capability), "--work", "rank", "--", *FID_JOB
    pictures = {}
    for tier in ("fp32", *TIMED_TIERS):
        into = folder / f"fid-{name_of(capability)}-{tier}"
        failure = run_as(capability, folder, *launcher, *program, "--precision", tier, "--sample-dir", into)
        if failure is not None:
            return dict(failed=failure.splitlines()[-15:])
        pictures[tier] = np.load(next(into.glob("*.npz")))["arr_0"]
    return {tier: min(map(evaluate.psnr, pictures["fp32"], pictures[tier])) for tier in TIMED_TIERS}


def problems(checked: dict, fid: dict) -> list[str]:
    """What is wrong with a capability's `check` and `fid_job`, a line each."""
    failed = [f"failed: {' | '.join(one['failed'][-3:])}" for one in (checked, fid) if "failed" in one]
    if failed:
        return failed
    lines = [f"{tier}: an FID job's picture has {psnr:.1f} dB" for tier, psnr in fid.items() if psnr <= PSNR]
    for tier, row in checked.items():
        lines += [f"{tier}: launches {name}" for name in row.get("newer", [])]
        if tier in GATES and "judged" in row and not row["judged"][GATES[tier]]:
            lines.append(f"{tier}: pictures miss the criteria: {row['judged']['worst']}")
    return lines


def line(seen: str, times: dict) -> str:
    """Times as they are printed."""
    if "failed" in times:
        return f"{seen:16} failed: {times['failed'][-1:]}"
    rows = (f"{tier} {rows} rows {row['ms']:.2f} ms" for tier, by in times.items() for rows, row in by.items())
    return f"{seen:16} " + ", ".join(rows)


def rehearse(args: Namespace, device: torch.device) -> bool:
    """Check all capabilities at once, then time some, one after the other. Whether all is right."""
    start = time.monotonic()
    record = dict(kind="rehearse", **measure.provenance(device, args.commit), image_size=args.image_size)
    record |= dict(gpus=torch.cuda.device_count(), checked={}, fid_jobs={}, times={}, problems={})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        checks = {one: pool.submit(in_a_process, "check", one, Path(folder)) for one in args.capability}
        jobs = {one: pool.submit(fid_job, one, Path(folder)) for one in args.capability}
        for one, checked in checks.items():
            seen, checked, fid = name_of(one), checked.result(), jobs[one].result()
            record["checked"][seen], record["fid_jobs"][seen] = checked, fid
            record["problems"][seen] = problems(checked, fid)
            refused = [tier for tier, row in checked.items() if "refused" in row]
            print("\n".join([f"{seen}: refused {refused}", *record["problems"][seen]]), flush=True)
            measure.write(args.output, record)
        for capability in (one for one in args.timed if one in args.capability):
            seen = name_of(capability)
            record["times"][seen] = in_a_process("timing", capability, Path(folder))
            record["seconds"] = time.monotonic() - start
            measure.write(args.output, record)
            print(line(seen, record["times"][seen]), flush=True)
    return not any(record["problems"].values()) and not any("failed" in times for times in record["times"].values())


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    several = dict(nargs="+", type=version, metavar="X.Y")
    parser.add_argument("--capability", default=CAPABILITIES, help="compute capabilities to rehearse", **several)
    parser.add_argument("--timed", default=TIMED, help="those of them whose steps are timed", **several)
    parser.add_argument("--batch-rows", nargs="+", type=positive, default=[16, 4, 2], metavar="N", help="timed, even")
    parser.add_argument("--image-size", type=positive, default=512, help="of what is timed, in pixels")
    measure.add_seconds(parser, load=1.0, window=1.0)
    parser.add_argument("--work", choices=WORK, help="what this process alone does")
    parser.add_argument("arguments", nargs="*", help="of sample_ddp.py, for --work rank")
    parser.add_argument("--seen-as", type=version, metavar="X.Y", help="the capability that this process sees")
    measure.add_arguments(parser, network=False)
    args = parser.parse_args()
    with user_errors(parser):
        device = measure.require_gpu(args, "kernels are rehearsed")
    if args.work:
        with rehearsal(args.seen_as):
            measure.write(args.output, WORK[args.work](args, device))
    else:
        sys.exit(not rehearse(args, device))


if __name__ == "__main__":
    main()
