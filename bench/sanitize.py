"""Launch every kernel of one GPU once, to be run under a tool of NVIDIA's
compute-sanitizer: see CONTRIBUTING.md.

    python bench/sanitize.py --captured --batch-rows 2 --side 32

One block of each family's demo, or of its first model if there is none, in fp16 and
exact, in a sampling run; then a decoded picture. Exit status 1: a result is not finite.
Run it without a tool first: it compiles the kernels and times the GEMMs.
"""

if not __package__:
    __import__("_as_module")

from argparse import Namespace
from itertools import product

import torch

from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.families import Family, constructor_of, families
from accel.flags import positive
from accel.graphs import Replayed
from accel.kernels.attention import attention_to
from accel.latents.autoencoder_kl.half import HalfDecoder
from accel.opening import choose_device
from bench import harness

DEPTH = "depth", "n_layers"  # names of a constructor's number of blocks


def one_block(family: Family, side: int, device: torch.device) -> tuple[str, torch.nn.Module]:
    """Return the name and one block of a family's demo or, without one, of its first
    model, with random weights.
    """
    name, *_ = family.shipped or family.models
    build = constructor_of(name)
    depth = {argument: 1 for argument in DEPTH if argument in build.config}
    model = harness.random_network(build, device, input_size=side, num_classes=1000, **depth)
    return name, model


@torch.inference_mode()
def work(args: Namespace, device: torch.device) -> None:
    """Launch every kernel once, or capture and replay it. Raises RuntimeError for a
    result that is not finite.
    """
    captured = args.captured
    generator = torch.Generator(device).manual_seed(0)
    models = [one_block(family, args.side, device) for family in families()]

    def noise(*shape):
        return torch.randn(shape, generator=generator, device=device)

    def run(what, function, *inputs):
        if captured:
            function = Replayed(function)
        if not function(*inputs).isfinite().all():
            raise RuntimeError(f"{what}: not finite")

    for rows in args.batch_rows:
        tokens = (args.side // 2) ** 2
        t = torch.full((rows,), 500, device=device)
        y = torch.arange(rows, device=device)
        for (name, model), tier in product(models, ("fp16", "exact")):
            x = noise(rows, model.in_channels, args.side, args.side)
            network = harness.build(name, model, tier, device, graph=captured)
            run(f"{name}, {tier}, {rows} rows", network.forward, x, t, y)
            if rows % 2 == 0:
                job = Namespace(
                    model=name, pictures=rows // 2, latent_size=args.side, num_classes=1000
                )
                harness.sampling(network, job, device, steps=2)()
        qkv = noise(rows, tokens // 2, 3 * 1152).half()
        kv = noise(rows, tokens, 2 * 1152).half()
        run("attention_to", lambda qkv, kv: attention_to(qkv, kv, 16), qkv, kv)
    HalfDecoder(harness.random_decoder(device))(noise(1, 4, 8, 8))
    torch.cuda.synchronize()


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--captured", action="store_true", help="capture everything in CUDA graphs and replay them"
    )
    parser.add_argument(
        "--batch-rows", nargs="+", type=positive, default=[1, 2, 4, 16], metavar="N"
    )
    parser.add_argument(
        "--side", type=positive, default=32, help="of a latent, even; 64 is a picture of 512 px"
    )
    parser.add_argument("--device", help="GPU to check (default: the first)")
    args = parser.parse_args()
    with user_errors(parser):
        device = choose_device(args.device)
        if device.type != "cuda":
            raise UsageError(f"--device {device}: a GPU's kernels are checked")
    torch.cuda.set_device(device.index or 0)
    work(args, device)


if __name__ == "__main__":
    main()
