"""Time Large-DiT's sampling, 25 DDIM steps with guidance at 256 px, beside the plain network in float16.

    python -m bench.large_dit --model Large-DiT-3B/2 --labels 1 8 --output log/large-dit-3b.json

Weights are random and not zero. `fp16` and `bf16` are ours; `eager` is large_dit.DiT_Llama in float16; `compile` is
that with its blocks under torch.compile in max-autotune and each step in a CUDA graph: the blocks share one
compilation, where the whole network would keep the compiler busy for many minutes. Every network decodes by the same
float16 decoder. A run is what a user waits for after loading: conditioning, all steps, and then the decoder, which is
timed by itself.
"""

if not __package__:
    __import__("_as_module")

from argparse import Namespace

import torch

import large_dit
from accel import vae
from accel.command_line import OneLineParser, user_errors
from accel.fast import load
from accel.flags import positive
from accel.graphs import Replayed
from accel.network import MODELS, Network, PlainLargeDiT
from accel.precision import apply_precision
from accel.sampler import denoise
from bench import measure
from diffusion import create_diffusion

GFLOP_A_ROW = {"Large-DiT-600M/2": 238, "Large-DiT-3B/2": 1881, "Large-DiT-7B/2": 3350}
TFLOP_S = 700  # of the floor: what an H200 holds on large half-precision GEMMs at its power limit
NETWORKS = ("fp16", "bf16", "eager", "compile")
SCALE, ETA = 4.0, 0.0


class Half(PlainLargeDiT):
    """The plain network in float16, as a user would run it: eager, or with compiled blocks and a CUDA graph a step."""

    def __init__(self, model: large_dit.DiT_Llama, compiled: bool):
        super().__init__(model)
        self._guided = model.forward_with_cfg
        if compiled:
            for layer in model.layers:  # alike: compiled once
                layer.compile(mode="max-autotune-no-cudagraphs", dynamic=False)
            self._guided = Replayed(model.forward_with_cfg)

    def forward_with_cfg(self, x, t, y, cfg_scale) -> torch.Tensor:
        return self._guided(x.half(), t, y, cfg_scale).to(x.dtype)


def make(kind: str, module: large_dit.DiT_Llama, rows: int, device: torch.device) -> Network:
    """One of NETWORKS with the weights of `module`."""
    if kind in ("eager", "compile"):
        return Half(module, kind == "compile")
    apply_precision(kind, device)
    return load(module.state_dict(), module, kind, device, rows)


def time_network(kind: str, n: int, module: large_dit.DiT_Llama, decoder: vae.CheckedDecoder, args) -> dict:
    """A network on n labels: a row of the record, and `out`, its output at one timestep."""
    device, classes = module.x_embedder.weight.device, args.num_classes
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    network, diffusion = make(kind, module, 2 * n, device), create_diffusion(str(args.num_sampling_steps))
    generator = torch.Generator(device).manual_seed(0)
    z = torch.randn(n, 4, module.input_size, module.input_size, generator=generator, device=device)
    labels, latents = torch.arange(n, device=device) % classes, None

    def sample():
        nonlocal latents
        latents = denoise(network, diffusion, z, labels, SCALE, classes, eta=ETA)

    def decode():
        # Random weights may give latents of any size; the decoder takes as long for all.
        vae.decode(decoder, latents / latents.std())

    first, _, *times = [measure.elapsed_ms(sample, device) for _ in range(args.repeats + 2)]
    _, *decoding = [measure.elapsed_ms(decode, device) for _ in range(args.repeats + 1)]
    y, t = torch.cat([labels, torch.full_like(labels, classes)]), torch.full((2 * n,), 500, device=device)
    return dict(
        network=kind,
        labels=n,
        first_run_s=first / 1e3,
        sampling_ms=measure.median_and_range(times),
        decoding_ms=measure.median_and_range(decoding),
        floor_ms=args.num_sampling_steps * 2 * n * GFLOP_A_ROW.get(args.model, 0) / TFLOP_S,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        out=network.forward_with_cfg(torch.cat([z, z]), t, y, SCALE),
    )


def run(args: Namespace, device: torch.device) -> None:
    """All networks on all numbers of labels, largest difference of their outputs at one timestep included."""
    module = measure.random_network(args.model, args.image_size, args.num_classes, device, qk_norm=True).half()
    decoder = vae.CheckedDecoder(measure.random_decoder(device), "fp16" if device.type == "cuda" else "fp32", "fp32")
    record = measure.provenance(device, args.commit) | dict(model=args.model, steps=args.num_sampling_steps, runs=[])
    first = {}
    for kind, n in ((kind, n) for kind in args.networks for n in args.labels):
        row = time_network(kind, n, module, decoder, args)
        out = row.pop("out")
        want = first.setdefault(n, out)
        row["difference"] = float((out - want).norm() / want.norm())  # from the first network
        record["runs"].append(row)
        sampling, decoding = row["sampling_ms"]["median"], row["decoding_ms"]["median"]
        print(
            f"{args.model}, {kind}, labels {n}: {sampling:.1f} ms, with the decoder {sampling + decoding:.1f}; "
            f"floor {row['floor_ms']:.0f}; first {row['first_run_s']:.1f} s; differs by {row['difference']:.1e}",
            flush=True,
        )
        measure.write(args.output, record)


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in MODELS if name.startswith("Large")], required=True)
    parser.add_argument("--labels", type=positive, nargs="+", default=(1, 8), help="pictures at a time (default: 1 8)")
    parser.add_argument("--networks", choices=NETWORKS, nargs="+", default=NETWORKS, help="default: all")
    parser.add_argument("--num-sampling-steps", type=positive, default=25, help="default: 25")
    parser.add_argument("--repeats", type=positive, default=5, help="runs that count (default: 5)")
    measure.add_arguments(parser, network=False)
    args = parser.parse_args()
    args.image_size = args.num_classes = args.ckpt = None
    with user_errors(parser):
        device = measure.prepare(args)
    run(args, device)


if __name__ == "__main__":
    main()
