"""Every kernel of one GPU under NVIDIA's compute-sanitizer, which CUDA's toolkit brings.

    python bench/sanitize.py --output output/sanitize.json
    python bench/sanitize.py --tool racecheck --mode captured --batch-rows 2 --side 32

One block of XL/2's width: fp16 by each of our tiles and by cuBLASLt, exact, a sampling step, a decoded picture; and a
block of Large-DiT. First without a tool, which compiles everything; then each tool in a process of its own, eager and
captured. Eager, every tensor is an allocation of its own, so that memcheck sees where it ends. Exit status 1: a tool
found something."""

if not __package__:
    __import__("_as_module")

import os
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from unittest.mock import patch

import torch
import torch.nn.functional as F

from accel import accelerate
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.fast.dit import FastDiT, Optimisations, build
from accel.flags import positive
from accel.graphs import Replayed
from accel.kernels.attention import attention_to
from accel.kernels.linear import Linear, cublaslt, hopper
from accel.sampler import denoise
from accel.vae.half import HalfDecoder
from bench import measure
from diffusion import create_diffusion
from large_dit import DiT_Llama
from models import DiT

TOOLS = "memcheck", "racecheck", "synccheck", "initcheck"
MODES = "eager", "captured"
ERRORS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
OVERFLOW = "Warning: Error buffer overflow has been detected"  # of one launch's records; counts as an error
REPORTED = re.compile(r"^========= (?:Error: Race .* access|Uninitialized .*\n=========    ) at (.+)", re.M)
LIBRARIES = re.compile(r"nvjet|xmma|cudnn|fmha|cublas|at::native")  # kernels of cuBLAS, cuDNN and torch
BLOCKS = re.compile(r"^=========\s*\n", re.M)  # between reports
STORES_BY_TMA = (
    (Linear, "__call__"),
    *((F, name) for name in ("linear", "conv2d", "conv_transpose2d", "scaled_dot_product_attention")),
)
FOUND = 9  # the tools' exit status where they report errors

#################################################################################
#                            What runs under the tools                          #
#################################################################################


def algorithms(network: FastDiT, m: int) -> Iterator[list]:
    """For the layers of a block on m tokens: each of our tiles in turn, then cuBLASLt's own choice, as `adopt` takes
    them."""
    gemms = [(*layer.shape(m), network.dtype, network.device) for layer in network.blocks[0]]
    ours = [(hopper.Gemm(*gemm), hopper.Gemm(*gemm).candidates()) for gemm in gemms]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one[0].load(one[1]), ((gemm, tile) for gemm, tiles in ours for tile in tiles)))
    for tiles in zip(*(tiles for _, tiles in ours)):
        yield [(gemm, list(tile)) for gemm, tile in zip(gemms, tiles)]
    theirs = [cublaslt.Gemm(*gemm).suggestions()[0] for gemm in gemms]
    yield [(gemm, [list(one.words), one.workspace]) for gemm, one in zip(gemms, theirs)]


def rewritten(function: Callable) -> Callable:
    """The same function, its result written by torch's multiplication."""
    return lambda *given, **options: function(*given, **options) * 1


@contextmanager
def all_rewritten() -> Iterator[None]:
    """Inside, torch writes the results of `STORES_BY_TMA` again. Initcheck does not see TMA's stores: where our kernels
    read what they wrote it would report all."""
    with ExitStack() as stack:
        for owner, name in STORES_BY_TMA:
            stack.enter_context(patch.object(owner, name, rewritten(getattr(owner, name))))
        yield


@torch.inference_mode()
def work(args: Namespace, device: torch.device) -> None:
    """Launch every kernel once, or capture and replay it. Raises RuntimeError for a result that is not finite."""
    captured, generator = args.mode == "captured", torch.Generator(device).manual_seed(0)
    tokens, switches = (args.side // 2) ** 2, Optimisations(graph=captured)
    with torch.device(device):
        model = DiT(input_size=args.side, depth=1, hidden_size=1152, num_heads=16)
        large = DiT_Llama(input_size=args.side, n_layers=1, dim=768, n_heads=8, qk_norm=True)  # head dim 96, as 3B
    state, diffusion = measure.random_state(model), create_diffusion("2")
    large.load_state_dict(measure.random_state(large))

    def run(what, function, *inputs):
        outputs = (Replayed(function) if captured else function)(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if not output.isfinite().all():
                raise RuntimeError(f"{what}: not finite")

    for rows in args.batch_rows:
        x = torch.randn(rows, 4, args.side, args.side, generator=generator, device=device)
        t, y = torch.full((rows,), 500, device=device), torch.arange(rows, device=device)
        for tier in ("fp16", "exact"):
            network = build(state, model.num_heads, tier, device, switches)
            for number, choices in enumerate(algorithms(network, rows * tokens) if tier == "fp16" else [[]]):
                for gemm, choice in choices:
                    network.tuner.adopt(*gemm, choice)
                run(f"{tier}, {rows} rows, algorithm {number}", network.forward, x, t, y)
            if rows % 2 == 0:
                denoise(network, diffusion, x[: rows // 2], y[: rows // 2], 4.0, 1000)
        network = accelerate(large.eval(), "fp16", optimisations=Optimisations(graph=False)).network
        run(f"Large-DiT, {rows} rows", network.forward, x, t, y)
        qkv = torch.randn(rows, tokens // 2, 3 * 1152, generator=generator, device=device).half()
        kv = torch.randn(rows, tokens, 2 * 1152, generator=generator, device=device).half()
        run("attention_to", lambda qkv, kv: attention_to(qkv, kv, 16), qkv, kv)
    HalfDecoder(measure.random_decoder(device))(torch.randn(1, 4, 8, 8, generator=generator, device=device))
    torch.cuda.synchronize()


#################################################################################
#                                   The tools                                   #
#################################################################################


def reports(text: str) -> tuple[int, dict[str, int], list[str]]:
    """What a tool printed: how many reports name a kernel of `LIBRARIES`, how many each other kernel, and all lines but
    the libraries' reports."""
    foreign, ours, lines = 0, Counter(), []
    for block in BLOCKS.split(text):
        names = [name.partition("+0x")[0] for name in REPORTED.findall(block)]
        others = [name for name in names if not LIBRARIES.search(name)]
        foreign += len(names) - len(others)
        ours.update(others)
        lines += block.splitlines() if others or not names else []
    return foreign, dict(ours), lines


def under(tool: str | None, mode: str, args: Namespace) -> dict:
    """Run `work` in a process of its own, under a tool: its record, with the number of errors that it reports (None
    where it ran out of time or did not end well) and how many of them are in kernels of `libraries`."""
    command = [sys.executable, os.path.abspath(__file__), "--mode", mode, "--side", str(args.side), "--work"]
    command += ["--batch-rows", *map(str, args.batch_rows)]
    environment = dict(os.environ)
    if tool:
        options = f"--tool {tool} --error-exitcode {FOUND} --report-api-errors no --print-limit 1000000"
        if tool == "initcheck":
            options += " --show-backtrace no"
            command.append("--rewrite")
        command = ["compute-sanitizer", *options.split(), *command]
        if mode == "eager":
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start, status, text = time.monotonic(), None, ""
    with suppress(subprocess.TimeoutExpired):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        done = subprocess.run(command, env=environment, timeout=args.limit, **pipes)
        status, text = done.returncode, done.stdout
    found, seconds = [int(number) for number in ERRORS.findall(text)], time.monotonic() - start
    errors = sum(found) - text.count(OVERFLOW) if found else 0 if status == 0 and not tool else None
    foreign, ours, lines = reports(text)
    report = [line for line in lines if not tool or line.startswith("=====") and OVERFLOW not in line]
    clean = errors == foreign and status == (FOUND if foreign else 0)
    row = dict(tool=tool, mode=mode, status=status, errors=errors, libraries=foreign, seconds=seconds, clean=clean)
    return row | dict(reported_in=ours, report=[] if clean else report[:200] + report[-5:])


def line(row: dict) -> str:
    """A record as it is printed."""
    verdict = f"status {row['status']}, {row['errors']} errors, of ours {row['reported_in']}"
    if row["clean"]:
        verdict = f"clean, but {row['libraries']} reports in libraries" if row["libraries"] else "clean"
    if row["status"] is None:
        verdict = "ran out of time"
    return f"{row['tool'] or 'no tool':10} {row['mode']:9} {row['seconds']:6.1f} s  {verdict}"


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", nargs="+", default=TOOLS, choices=TOOLS, help="tools to run")
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES, help="launched, or captured and replayed")
    parser.add_argument("--batch-rows", nargs="+", type=positive, default=[1, 2, 4, 16], metavar="N")
    parser.add_argument("--side", type=positive, default=32, help="of a latent, even; 64 is a picture of 512 px")
    parser.add_argument("--limit", type=positive, default=120, help="seconds of a run")
    parser.add_argument("--work", action="store_true", help="no tool: launch the kernels in this process")
    parser.add_argument("--rewrite", action="store_true", help="for --work: torch writes again what TMA has stored")
    measure.add_arguments(parser, network=False)
    args = parser.parse_args()
    with user_errors(parser):
        device = measure.require_gpu(args, "kernels are checked")
        if args.work:
            with all_rewritten() if args.rewrite else nullcontext():
                for mode in args.mode:
                    work(Namespace(**vars(args) | {"mode": mode}), device)
            return
        if not shutil.which("compute-sanitizer"):
            raise UsageError("no compute-sanitizer on the PATH: CUDA's toolkit brings it")
    record, rows = dict(kind="sanitize", **measure.provenance(device, args.commit)), []
    for tool, mode in [(None, mode) for mode in args.mode] + [(tool, mode) for tool in args.tool for mode in args.mode]:
        rows.append(under(tool, mode, args))
        measure.write(args.output, record | dict(side=args.side, batch_rows=args.batch_rows, runs=rows))
        print("\n".join([line(rows[-1]), *rows[-1]["report"][:20]]), flush=True)
    sys.exit(not all(row["clean"] for row in rows))


if __name__ == "__main__":
    main()
