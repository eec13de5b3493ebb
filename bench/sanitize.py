"""Launch every kernel of one GPU once, to be run under a tool of NVIDIA's compute-sanitizer: see docs/trust.md.

    python bench/sanitize.py --captured --batch-rows 2 --side 32

cuBLASLt's choice of each GEMM, then one block of XL/2's width and one of Large-DiT, fp16 and exact, in a sampling run;
a decoded picture. Exit status 1: a result is not finite. Run it without a tool first: it compiles
the kernels and times the GEMMs."""

if not __package__:
    __import__("_as_module")

from argparse import Namespace
from itertools import product

import torch

from accel.command_line import OneLineParser, user_errors
from accel.diffusion import create_diffusion
from accel.families.dit.network import DiT
from accel.families.large_dit.network import DiT_Llama
from accel.flags import positive
from accel.graphs import Replayed
from accel.kernels.attention import attention_to
from accel.kernels.linear import cublaslt
from accel.latents.half import HalfDecoder
from accel.sampling.ancestral import Ancestral
from bench import harness
from bench.winners import LAYERS


@torch.inference_mode()
def work(args: Namespace, device: torch.device) -> None:
    """Launch every kernel once, or capture and replay it. Raises RuntimeError for a result that is not finite."""
    captured, generator = args.captured, torch.Generator(device).manual_seed(0)
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
            gemm = cublaslt.Gemm(*shape)
            x, weight, bias = noise(rows * tokens, k).half(), (noise(n, k) / k**0.5).half(), noise(n).half()

            def launch(x, gemm=gemm, weight=weight, bias=bias):
                gemm.run(gemm.suggestions()[0], x, weight, bias, out := x.new_empty(len(x), len(weight)))
                return out

            run(f"{shape[:4]}", launch, x)
        x, t, y = noise(rows, 4, args.side, args.side), torch.full((rows,), 500, device=device), torch.arange(rows)
        for (name, one), tier in product((("DiT", model), ("Large-DiT", large)), ("fp16", "exact")):
            network = harness.build(one, tier, device, graph=captured)
            run(f"{name}, {tier}, {rows} rows", network.forward, x, t, y.to(device))
            if rows % 2 == 0:
                half = x[: rows // 2], y[: rows // 2].to(device)
                harness.sampling(network, Ancestral(create_diffusion("2")), *half, 4.0, 1000)()
        qkv, kv = noise(rows, tokens // 2, 3 * 1152).half(), noise(rows, tokens, 2 * 1152).half()
        run("attention_to", lambda qkv, kv: attention_to(qkv, kv, 16), qkv, kv)
    HalfDecoder(harness.random_decoder(device))(noise(1, 4, 8, 8))
    torch.cuda.synchronize()


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captured", action="store_true", help="capture everything in CUDA graphs and replay them")
    parser.add_argument("--batch-rows", nargs="+", type=positive, default=[1, 2, 4, 16], metavar="N")
    parser.add_argument("--side", type=positive, default=32, help="of a latent, even; 64 is a picture of 512 px")
    harness.add_arguments(parser, network=False)
    args = parser.parse_args()
    with user_errors(parser):
        device = harness.require_gpu(args, "kernels are checked")
    work(args, device)


if __name__ == "__main__":
    main()
