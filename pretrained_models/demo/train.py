"""Train a demo network and its VAE on drawn pictures, from a seed, in minutes on one GPU.

    python -m pretrained_models.demo.train                                     # DiT-Demo/2 and its VAE → output/demo
    python -m pretrained_models.demo.train --vae pretrained_models/demo/vae    # the network, on that VAE's latents

First an AutoencoderKL (diffusers' class and file layout, factor 8), whose latents are made to have zero mean and unit
variance at the published VAEs' scale; then the network on those latents, with this repository's own training losses.
Each step is one CUDA graph: launching the kernels of so small a network one by one takes longer than running them.
"""

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import nn

from accel.command_line import OneLineParser
from accel.families.large_dit.network import Large_DiT_models
from accel.families.sit.network import SiT, SiT_models
from accel.graphs import capture
from accel.latents import LatentSpace
from diffusion import create_diffusion
from models import DiT_models
from pretrained_models.demo.pictures import CLASSES, from_bytes, render_all

FOLDER = Path(__file__).resolve().parent
# Name → stem of the weights' file, and a constructor: nn.Module with forward(x, t, y) for the demo's classes and
# latents, and x_embedder.
NETWORKS = {
    "DiT-Demo/2": ("dit", DiT_models["DiT-Demo/2"]),
    "Large-DiT-Demo/2": ("large-dit", Large_DiT_models["Large-DiT-Demo/2"]),
    "SiT-Demo/2": ("sit", SiT_models["SiT-Demo/2"]),
}
SCALE = LatentSpace().scale
PEAK_RATE = 1e-3
KL_WEIGHT = 1.5e-4  # against L1 per pixel: the decoder learns to forgive the network's small errors


def optimise(name: str, loss: Callable, module: nn.Module, steps: int, minutes: float, average=None) -> dict:
    """Minimise `loss()` by AdamW, gradients clipped at norm 1, the rate warmed up, then a cosine to zero. Returns the
    figures of the run.

    The schedule runs over `steps`, or faster if `minutes` would end first: the rate always ends near zero. The module
    `average` follows the weights of `module`, over a tenth of the steps.
    """
    start, parameters = time.perf_counter(), [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    cuda, rate = device.type == "cuda", torch.tensor(0.0, device=device)
    in_graph = dict(lr=rate, fused=True, capturable=True) if cuda else {}
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0, **in_graph)
    mean_loss = torch.tensor(math.nan, device=device)  # running

    def step():
        optimiser.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        with torch.no_grad():
            if average is not None:
                torch._foreach_lerp_(list(average.parameters()), list(module.parameters()), min(1.0, 10 / steps))
            mean_loss.copy_(torch.where(mean_loss.isnan(), value, mean_loss.lerp(value, 0.01)))

    run = capture(step, runs=3) if cuda else step  # a backward pass settles after a few
    done, warm_up = 0, max(1, min(500, steps // 20))
    while done < steps and (progress := max(done / steps, (time.perf_counter() - start) / (60 * minutes))) < 1:
        now = PEAK_RATE * min(1.0, (done + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))
        rate.fill_(now)
        if not cuda:
            optimiser.param_groups[0]["lr"] = now
        for _ in range(min(20, steps - done)):
            run()
            done += 1
        if not math.isfinite(mean_loss.item()):  # which waits for the device: the clock above is honest
            sys.exit(f"train.py: {name} diverged at step {done}")
        if done % 1000 < 20:
            print(f"{name} {done:6d}: loss {mean_loss.item():.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    seconds = round(time.perf_counter() - start, 1)
    return {"steps": done, "loss": round(mean_loss.item(), 5), "seconds": seconds, "learning_rate": PEAK_RATE}


def half_precision(device: torch.device) -> torch.autocast:
    # A graph keeps no cast of a weight from one step to the next: no cache.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def train_vae(pictures: torch.Tensor, args: argparse.Namespace) -> tuple[AutoencoderKL, dict]:
    """AutoencoderKL (Kingma & Welling 2014, arXiv:1312.6114) on uint8 pictures (M, 3, S, S), and what happened.

    Loss: L1 of pixels and of their differences to neighbours (edges stay sharp), and the KL divergence to a standard
    normal. It is saved in float16, to keep the files small, and returned in float32 as it was saved.
    """
    device, config = pictures.device, AutoencoderKL.load_config(FOLDER / "vae")
    vae = AutoencoderKL.from_config(config).to(device, memory_format=torch.channels_last)
    if args.compile:
        vae.encoder.compile()
        vae.decoder.compile()

    def loss():
        x = from_bytes(pictures[torch.randint(len(pictures), (args.vae_batch,), device=device)])
        x = x.contiguous(memory_format=torch.channels_last)
        with half_precision(device):
            posterior = vae.encode(x).latent_dist
            y = vae.decode(posterior.sample()).sample
        error = y.float() - x
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        kl = posterior.kl().float().mean() / posterior.mean[0].numel()
        return error.abs().mean() + edges + KL_WEIGHT * kl

    report = optimise("vae", loss, vae, args.vae_steps, args.minutes[0])
    trained = AutoencoderKL.from_config(config).to(device).eval()  # a compiled one would compile for other batches
    trained.load_state_dict(vae.state_dict())
    standardise(trained, pictures[torch.randperm(len(pictures), device=device)[:8192]])
    trained.half().save_pretrained(args.output / "vae")
    return trained.float(), report | {"batch": args.vae_batch}


@torch.no_grad()
def posteriors(vae: AutoencoderKL, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the latents of uint8 pictures, unscaled: each (M, 4, S/8, S/8)."""
    found = [vae.encode(from_bytes(part)).latent_dist for part in pictures.split(512)]
    return torch.cat([f.mean for f in found]), torch.cat([f.std for f in found])


@torch.no_grad()
def standardise(vae: AutoencoderKL, pictures: torch.Tensor) -> None:
    """Fold an affine map of each latent channel into the 1×1 convolutions around the latents, so that latents times
    SCALE have zero mean and unit variance over `pictures`: whoever samples needs no other constant."""
    mean, std = posteriors(vae, pictures)
    shift = mean.mean(dim=(0, 2, 3))  # (4,)
    variance = (mean - shift.view(1, -1, 1, 1)).square().mean(dim=(0, 2, 3)) + std.square().mean(dim=(0, 2, 3))
    gain = 1 / (SCALE * variance.sqrt())  # new latent = (latent − shift)·gain
    encode, decode, channels = vae.quant_conv, vae.post_quant_conv, len(gain)
    decode.bias += decode.weight[:, :, 0, 0] @ shift
    decode.weight /= gain.view(1, -1, 1, 1)
    encode.bias[:channels] = (encode.bias[:channels] - shift) * gain
    encode.weight[:channels] *= gain.view(-1, 1, 1, 1)
    encode.bias[channels:] += 2 * gain.log()  # the other half holds log variances


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKL, pictures: torch.Tensor) -> float:
    """Mean over uint8 pictures of the PSNR, in dB over the range of 255, after encoding (to the mean) and decoding."""
    values = []
    for part in pictures.split(64):
        decoded = vae.decode(vae.encode(from_bytes(part)).latent_dist.mean).sample
        error = (decoded.clamp(-1, 1) + 1) * 127.5 - part
        values.append(10 * torch.log10(255**2 / error.square().mean(dim=(1, 2, 3))))
    return torch.cat(values).mean().item()


def train_network(mean: torch.Tensor, std: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> dict:
    """Train the network of --model on latents drawn from N(mean, std²), scaled, (M, 4, L, L). Saves the moving average
    of its weights. Returns the figures of the run."""
    device = mean.device
    stem, build = NETWORKS[args.model]
    model = build()
    if args.init:
        state = load_file(args.init)
        for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
            if isinstance(model, SiT):  # a DiT's has channels for variances: (p·p·2C, …) → (p·p·C, …)
                state[name] = state[name].unflatten(0, (-1, 2, model.out_channels))[:, 0].flatten(0, 1)
        model.load_state_dict(state)
    model = model.to(device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    # Autocast would keep a Large-DiT's residual stream in bfloat16.
    model.x_embedder.register_forward_hook(lambda *arguments: arguments[-1].float())
    diffusion = create_diffusion("")
    diffusion.prepare(device)
    if args.compile:
        for block in model.blocks:
            block.compile()

    def network(x, t, y):
        with half_precision(device):
            return model(x, t, y).float()

    def loss():
        index = torch.randint(len(labels), (args.dit_batch,), device=device)
        x = torch.addcmul(mean[index], std[index], torch.randn_like(mean[: args.dit_batch])) * SCALE
        if isinstance(model, SiT):  # velocities on the linear path (Ma et al. 2024, arXiv:2401.08740)
            noise, t = torch.randn_like(x), torch.rand(len(x), device=device)
            share = t.view(-1, 1, 1, 1)  # of data
            return (network(share * x + (1 - share) * noise, t, labels[index]) - (x - noise)).square().mean()
        t = torch.randint(diffusion.num_timesteps, (args.dit_batch,), device=device)
        return diffusion.training_losses(network, x, t, dict(y=labels[index]))["loss"].mean()

    report = optimise(args.model, loss, model, args.dit_steps, args.minutes[1], average)
    dtype = getattr(torch, args.save_dtype)
    state = {name: value.to("cpu", dtype).contiguous() for name, value in average.state_dict().items()}
    save_file(state, args.output / f"{stem}.safetensors")
    return {stem: report | {"batch": args.dit_batch, "init": args.init and args.init.name}}


def arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Train a demo network and its VAE on drawn pictures.")
    add = parser.add_argument
    add("--model", choices=NETWORKS, default="DiT-Demo/2", help="network to train (default: %(default)s)")
    add("--output", type=Path, default=Path("output/demo"), help="folder for all that is made (default: %(default)s)")
    add("--vae", type=Path, metavar="DIR", help="a trained VAE in diffusers' layout, instead of training one")
    add("--init", type=Path, metavar="FILE", help="weights to begin with (.safetensors), of DiT-Demo/2 for a SiT")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU if there is one")
    add("--seed", type=int, default=0, help="seed of pictures, weights and training (default: 0)")
    add("--pictures", type=int, default=16384, help="pictures a class (default: %(default)s)")
    add("--vae-steps", type=int, default=9620, help="steps of the VAE (default: %(default)s)")
    add("--dit-steps", type=int, default=21620, help="steps of the network (default: %(default)s)")
    add("--vae-batch", type=int, default=48, help="pictures a step of the VAE (default: %(default)s)")
    add("--dit-batch", type=int, default=1024, help="latents a step of the network (default: %(default)s)")
    limit = "most minutes for each: the schedule of the learning rate runs faster to end in time (default: 60 120)"
    add("--minutes", type=float, nargs=2, default=(60, 120), metavar=("VAE", "DIT"), help=limit)
    add("--save-dtype", choices=("float32", "float16"), default="float32", help="of the network (default: %(default)s)")
    add("--compile", action="store_true", help="compile the networks: a minute, then steps of half the time")
    args = parser.parse_args()
    if args.vae and not (args.vae / "config.json").is_file():
        parser.error(f"--vae {args.vae}: holds no config.json; name the folder of a VAE in diffusers' layout")
    return args


def main() -> None:
    args, start = arguments(), time.perf_counter()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    args.output.mkdir(parents=True, exist_ok=True)

    generator = torch.Generator(device).manual_seed(args.seed)
    pictures, labels = render_all(args.pictures, generator)
    fresh, _ = render_all(max(1, args.pictures // 256), generator)  # for the PSNR: never trained on
    if args.vae:
        vae, vae_report = AutoencoderKL.from_pretrained(args.vae, torch_dtype=torch.float32), {"folder": str(args.vae)}
    else:
        vae, vae_report = train_vae(pictures, args)
    vae = vae.to(device).eval().requires_grad_(False)
    vae_report["psnr_db"] = round(reconstruction_psnr(vae, fresh), 2)
    mean, std = posteriors(vae, pictures)
    del pictures
    network_report = train_network(mean, std, labels, args)
    report = {
        "classes": CLASSES,
        "pictures": len(labels),
        "seed": args.seed,
        "vae": vae_report,
        **network_report,
        "seconds": round(time.perf_counter() - start, 1),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "command": "python -m pretrained_models.demo.train " + " ".join(sys.argv[1:]),
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
