"""Every kernel of one GPU under NVIDIA's compute-sanitizer, which CUDA's toolkit brings.

    python bench/sanitize.py --output output/sanitize.json
    python bench/sanitize.py --tool racecheck --mode captured --batch-rows 2 --side 32

Each of our GEMMs' tiles and cuBLASLt's choice, then one block of XL/2's width, fp16 and exact, in a sampling run; a
block of Large-DiT; a decoded picture. First without a tool, which compiles everything; then each tool in a process of
its own, eager and captured. Eager, every tensor is an allocation of its own, so that memcheck sees where it ends. The
kernels of libraries are left out: racecheck does not follow their barriers. Exit status 1: a tool found something."""

if not __package__:
    __import__("_as_module")

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress

import torch

from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.flags import positive
from accel.graphs import Replayed
from accel.kernels.attention import attention_to
from accel.kernels.linear import cublaslt, hopper
from accel.vae.half import HalfDecoder
from bench import harness
from bench.winners import LAYERS
from large_dit import DiT_Llama
from models import DiT

TOOLS = "memcheck", "racecheck", "synccheck"
MODES = "eager", "captured"
LIBRARIES = "nvjet", "xmma", "cudnn", "fmha", "cublas", "pytorch_flash", "at6native", "at::native"  # in kernels' names
FOUND = 9  # the tools' exit status where they report errors


@torch.inference_mode()
def work(args: Namespace, mode: str, device: torch.device) -> None:
    """Launch every kernel once, or capture and replay it. Raises RuntimeError for a result that is not finite."""
    captured, generator = mode == "captured", torch.Generator(device).manual_seed(0)
    model = harness.random_network(DiT, device, input_size=args.side, depth=1, hidden_size=1152, num_heads=16)
    norms = dict(n_layers=1, dim=768, n_heads=8, qk_norm=True)  # head dim 96, as 3B
    large = harness.random_network(DiT_Llama, device, input_size=args.side, **norms)

    def noise(*shape):
        return torch.randn(shape, generator=generator, device=device)

    def run(what, function, *inputs):
        outputs = (Replayed(function) if captured else function)(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if not output.isfinite().all():
                raise RuntimeError(f"{what}: not finite")

    for rows in args.batch_rows:
        tokens = (args.side // 2) ** 2
        for n, k, gelu in LAYERS:
            shape = rows * tokens, n, k, gelu, torch.float16, device
            ours, theirs = hopper.Gemm(*shape), cublaslt.Gemm(*shape)
            x, weight, bias = noise(rows * tokens, k).half(), (noise(n, k) / k**0.5).half(), noise(n).half()
            for gemm, choice in [*((ours, tile) for tile in ours.candidates()), (theirs, theirs.suggestions()[0])]:

                def launch(x, gemm=gemm, choice=choice, weight=weight, bias=bias):
                    gemm.run(choice, x, weight, bias, out := x.new_empty(len(x), len(weight)))
                    return out

                run(f"{shape[:4]} by {choice}", launch, x)
        x, t, y = noise(rows, 4, args.side, args.side), torch.full((rows,), 500, device=device), torch.arange(rows)
        for name, one, tier in (("DiT", model, "fp16"), ("DiT", model, "exact"), ("Large-DiT", large, "fp16")):
            network = harness.build(one, tier, device, graph=captured)
            run(f"{name}, {tier}, {rows} rows", network.forward, x, t, y.to(device))
            if rows % 2 == 0:
                half = x[: rows // 2], y[: rows // 2].to(device)
                harness.sampling(network, *half, 4.0, 1000, "2")()
        qkv, kv = noise(rows, tokens // 2, 3 * 1152).half(), noise(rows, tokens, 2 * 1152).half()
        run("attention_to", lambda qkv, kv: attention_to(qkv, kv, 16), qkv, kv)
    HalfDecoder(harness.random_decoder(device))(noise(1, 4, 8, 8))
    torch.cuda.synchronize()


def under(tool: str | None, mode: str, args: Namespace) -> dict:
    """Run `work` in a process of its own, under a tool: its record. status is None where it ran out of time."""
    command = [sys.executable, os.path.abspath(__file__), "--mode", mode, "--side", str(args.side), "--work"]
    command += ["--batch-rows", *map(str, args.batch_rows)]
    environment = dict(os.environ)
    if tool:
        excluded = ",".join(f"kns={name}" for name in LIBRARIES)
        options = f"--tool {tool} --error-exitcode {FOUND} --report-api-errors no --kernel-name-exclude {excluded}"
        command = ["compute-sanitizer", *options.split(), *command]
        if mode == "eager":
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start, status, text = time.monotonic(), None, ""
    with suppress(subprocess.TimeoutExpired):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        done = subprocess.run(command, env=environment, timeout=args.limit, **pipes)
        status, text = done.returncode, done.stdout
    lines = [line for line in text.splitlines() if not tool or line.startswith("=====")]
    row = dict(tool=tool, mode=mode, status=status, seconds=time.monotonic() - start, clean=status == 0)
    return row | dict(report=[] if row["clean"] else lines[:200] + lines[-5:])


def line(row: dict) -> str:
    """A record as it is printed."""
    verdict = "ran out of time" if row["status"] is None else "clean" if row["clean"] else f"status {row['status']}"
    return f"{row['tool'] or 'no tool':10} {row['mode']:9} {row['seconds']:6.1f} s  {verdict}"


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", nargs="+", default=TOOLS, choices=TOOLS, help="tools to run")
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES, help="launched, or captured and replayed")
    parser.add_argument("--batch-rows", nargs="+", type=positive, default=[1, 2, 4, 16], metavar="N")
    parser.add_argument("--side", type=positive, default=32, help="of a latent, even; 64 is a picture of 512 px")
    parser.add_argument("--limit", type=positive, default=120, help="seconds of a run")
    parser.add_argument("--work", action="store_true", help="no tool: launch the kernels in this process")
    harness.add_arguments(parser, network=False)
    args = parser.parse_args()
    with user_errors(parser):
        device = harness.require_gpu(args, "kernels are checked")
        if args.work:
            for mode in args.mode:
                work(args, mode, device)
            return
        if not shutil.which("compute-sanitizer"):
            raise UsageError("no compute-sanitizer on the PATH: CUDA's toolkit brings it")
    record, rows = dict(kind="sanitize", **harness.provenance(device, args.commit)), []
    for tool, mode in [(None, mode) for mode in args.mode] + [(tool, mode) for tool in args.tool for mode in args.mode]:
        rows.append(under(tool, mode, args))
        harness.write(args.output, record | dict(side=args.side, batch_rows=args.batch_rows, runs=rows))
        print("\n".join([line(rows[-1]), *rows[-1]["report"][:20]]), flush=True)
    sys.exit(not all(row["clean"] for row in rows))


if __name__ == "__main__":
    main()
