"""Kernels alone, on this GPU: attention and DiT-XL/2's GEMMs by backend.

    python bench/kernels.py --attention --output output/attention.json
    python bench/kernels.py --gemm 1024 16384 --output output/gemms.json

Times are of replayed CUDA graphs that take turns, after seconds of load. A GEMM is 28 launches with as many weights,
more than the cache holds, as in a step."""

if not __package__:
    __import__("_as_module")

from argparse import Namespace
from collections.abc import Iterator
from functools import partial

import torch

from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.graphs import capture
from accel.kernels.attention import attention
from accel.kernels.linear import TUNED, Linear, Tuner
from accel.options import check_writable, positive
from bench import measure

HEADS, HEAD_DIM, DEPTH = 16, 72, 28
SHAPES = ((16, 1024), (4, 1024), (2, 1024), (16, 256), (16, 64), (2, 4096))  # batch rows, tokens
GEMMS = {"qkv": (3456, 1152), "proj": (1152, 1152), "fc1": (4608, 1152), "fc2": (1152, 4608)}  # N, K; GELU after fc1


def attentions(args: Namespace, dtype: torch.dtype) -> Iterator[dict]:
    """A row for each shape and backend: ms of a launch, its error against float64."""
    for n, tokens in SHAPES:
        qkv = torch.randn(n, tokens, 3 * HEADS * HEAD_DIM, device="cuda").to(dtype)
        q, k, v = qkv[:1].double().unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)  # each (1, H, T, D)
        want = ((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        calls = [partial(attention, qkv, HEADS, backend) for backend in args.backends]
        replays = [capture(lambda call=call: [call() for _ in range(20)]) for call in calls]
        for backend, call, ms in zip(args.backends, calls, measure.in_turns(replays)):
            ms = {name: value / 20 for name, value in ms.items()}
            flops = 4 * n * HEADS * tokens**2 * HEAD_DIM
            error = float((call()[:1].double() - want).norm() / want.norm())
            yield dict(
                batch_rows=n, tokens=tokens, backend=backend, ms=ms, tflops=flops / ms["median"] / 1e9, error=error
            )


def gemms(args: Namespace, dtype: torch.dtype) -> Iterator[dict]:
    """A row for each number of tokens, layer and backend: µs of a launch, its error against float64."""
    tuner = Tuner()
    for m, (name, (n, k)) in ((m, item) for m in args.gemm for item in GEMMS.items()):
        generator, gelu = torch.Generator("cuda").manual_seed(m), name == "fc1"
        x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
        weights = (torch.randn(DEPTH, n, k, generator=generator, device="cuda") / k**0.5).to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype)
        want = x.double() @ weights[0].double().t() + bias.double()
        if gelu:
            want = torch.nn.functional.gelu(want, approximate="tanh")
        layers = [[Linear(weight, bias, gelu, tuner, backend) for weight in weights] for backend in TUNED]
        replays = [capture(lambda some=some: [layer(x) for layer in some]) for some in layers]
        for backend, some, ms in zip(TUNED, layers, measure.in_turns(replays)):
            us = {name: value / DEPTH * 1e3 for name, value in ms.items()}
            tflops, error = 2e-9 * m * n * k * DEPTH / ms["median"], (some[0](x).double() - want).norm() / want.norm()
            yield dict(layer=name, m=m, n=n, k=k, backend=backend, us=us, tflops=tflops, error=float(error))


def line(row: dict) -> str:
    """A row as it is printed."""
    what = " ".join(str(row[name]) for name in ("m", "layer", "batch_rows", "tokens", "backend") if name in row)
    time, unit = (row["us"], "µs") if "us" in row else (row["ms"], "ms")
    text = f"{what:32} {time['median']:9.3f} {unit} ({time['least']:.3f} to {time['most']:.3f})"
    return f"{text}  {row['tflops']:4.0f} TFLOP/s  error {row['error']:.1e}"


@torch.no_grad()
def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", action="store_true", help="time attention's backends")
    backends = ["hopper", "cudnn", "flash", "efficient"]
    parser.add_argument("--backends", nargs="+", default=backends, choices=backends, help="of attention")
    parser.add_argument("--gemm", nargs="+", type=positive, default=[], metavar="M", help="time GEMMs of M tokens")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    measure.add_arguments(parser, network=False)
    args = parser.parse_args()
    with user_errors(parser):
        if not torch.cuda.is_available():
            raise UsageError("a GPU's kernels are timed, and there is none here")
        if not (args.attention or args.gemm):
            raise UsageError("nothing to time; add --attention or --gemm M")
        if args.output:
            check_writable(args.output)
        record = dict(kind="kernels", **measure.provenance(torch.device("cuda", 0), args.commit), dtype=args.dtype)
        print(f"{record['gpu']}, torch {record['torch']}, {args.dtype}", flush=True)
        measure.load_gpu(3)
        asked = {attentions: args.attention, gemms: args.gemm}
        for work in (work for work, wanted in asked.items() if wanted):
            for row in work(args, getattr(torch, args.dtype)):
                record.setdefault(work.__name__, []).append(row)
                measure.write(args.output, record)
                print(line(row), flush=True)


if __name__ == "__main__":
    main()
