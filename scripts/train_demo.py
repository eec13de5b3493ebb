"""Train DiT-Demo/2 and its VAE on drawn pictures, from a seed, in minutes on one GPU.

    python scripts/train_demo.py --output pretrained_models/demo
    python scripts/score_demo.py                                     # are the pictures recognisable?

First an AutoencoderKL (diffusers' class and file layout, factor 8), whose latents are then made to have zero mean and unit variance
at the published VAEs' scale of 0.18215; then the DiT on those latents, with this repository's own training losses. Each step is
one CUDA graph: the network is so small that launching its kernels one by one would take longer than running them.
"""

if not __package__:
    __import__("_as_module")

import copy
import json
import math
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import save_file

from accel.options import OneLineParser, partial_file
from accel.vae import SCALE
from diffusion import create_diffusion
from models import DiT_models
from scripts.demo_pictures import CLASSES, SIZE, from_bytes, render_all

VAE_CONFIG = dict(
    down_block_types=["DownEncoderBlock2D"] * 4,
    up_block_types=["UpDecoderBlock2D"] * 4,
    layers_per_block=1,
    block_out_channels=[32, 64, 80, 80],
    norm_num_groups=16,
    latent_channels=4,
    sample_size=SIZE,
    scaling_factor=SCALE,
)
VAE_RATE, DIT_RATE = 1e-3, 1e-3  # peak learning rates
KL_WEIGHT = (
    1.5e-4  # against L1 per pixel: latents get a little noise, so that the decoder forgives the DiT's small errors
)
EMA_DECAY = 0.9995


#################################################################################
#                                   Training                                    #
#################################################################################


class Phase:
    """Steps of one optimiser over one loss: AdamW, gradients clipped at norm 1, the rate warmed up, then a cosine to zero.

    The schedule runs over `steps`; if `minutes` (from construction, so with compilation) would end first, it runs faster, so that the
    rate always ends near zero.
    """

    def __init__(
        self, name, loss, parameters, rate, steps, minutes, device, after_step=lambda: None, save=lambda: None
    ):
        self.name, self.steps, self.minutes, self.device, self.save = name, steps, minutes, device, save
        self.start = time.perf_counter()
        parameters = [p for p in parameters if p.requires_grad]
        self.peak, self.rate = rate, torch.tensor(0.0, device=device)
        cuda = device.type == "cuda"
        optimiser = torch.optim.AdamW(
            parameters, lr=self.rate if cuda else rate, betas=(0.9, 0.99), weight_decay=0.0, fused=cuda, capturable=cuda
        )
        self.groups = optimiser.param_groups
        self.mean_loss = torch.tensor(float("nan"), device=device)  # running

        def step():
            optimiser.zero_grad(set_to_none=True)
            value = loss()
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            after_step()
            value = value.detach()
            self.mean_loss.copy_(torch.where(self.mean_loss.isnan(), value, self.mean_loss.lerp(value, 0.01)))

        self.step = capture(step) if cuda else step

    def run(self):
        """Train; returns a dict of what happened."""
        begun = saved = time.perf_counter()
        done = 0
        warm_up = max(1, min(500, self.steps // 20))
        while done < self.steps:
            progress = max(done / self.steps, (time.perf_counter() - self.start) / (60 * self.minutes))
            if progress >= 1:
                break
            rate = self.peak * min(1.0, (done + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))
            if self.device.type == "cuda":
                self.rate.fill_(rate)
            else:
                self.groups[0]["lr"] = rate
            for _ in range(min(20, self.steps - done)):
                self.step()
                done += 1
            loss = self.mean_loss.item()  # waits for the device: the clock above is honest
            if not math.isfinite(loss):
                sys.exit(f"train_demo.py: {self.name} diverged at step {done}")
            if done % 1000 < 20:
                print(
                    f"{self.name} {done:6d}: loss {loss:.4f}, {1e3 * (time.perf_counter() - begun) / done:.1f} ms/step",
                    flush=True,
                )
            if time.perf_counter() - saved > 60:
                self.save()
                saved = time.perf_counter()
        self.save()
        return {
            "steps": done,
            "loss": round(self.mean_loss.item(), 5),
            "seconds": round(time.perf_counter() - self.start, 1),
        }


def capture(step):
    """`step` as one CUDA graph; three ordinary steps come first, on a stream of their own, as capture needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def half_precision(device):
    # A graph keeps no cast of a weight from one step to the next: no cache.
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


#################################################################################
#                                    The VAE                                    #
#################################################################################


def train_vae(pictures, args, device):
    """AutoencoderKL (Kingma & Welling 2014, arXiv:1312.6114) on uint8 pictures (M, 3, SIZE, SIZE); returns it and a dict of what happened.

    Loss: L1 of pixels and of their differences to neighbours (edges stay sharp), and the KL divergence to a standard normal.
    """
    vae = AutoencoderKL(**VAE_CONFIG).to(device, memory_format=torch.channels_last)
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

    report = Phase("vae", loss, vae.parameters(), VAE_RATE, args.vae_steps, args.minutes[0], device).run()
    trained = (
        AutoencoderKL(**VAE_CONFIG).to(device).eval()
    )  # another object: the compiled one would compile again for other batches
    trained.load_state_dict(vae.state_dict())
    return trained, report | {"batch": args.vae_batch, "learning_rate": VAE_RATE}


@torch.no_grad()
def posteriors(vae, pictures, chunk=512):
    """Mean and standard deviation, each (M, 4, SIZE/8, SIZE/8) float32, of the latents of uint8 pictures, unscaled."""
    found = [vae.encode(from_bytes(part)).latent_dist for part in pictures.split(chunk)]
    return torch.cat([f.mean for f in found]), torch.cat([f.std for f in found])


@torch.no_grad()
def standardise(vae, pictures):
    """Fold an affine map of each latent channel into the 1×1 convolutions around the latents, so that latents times SCALE have zero
    mean and unit variance over `pictures`: whoever samples needs no other constant."""
    mean, std = posteriors(vae, pictures)
    shift = mean.mean(dim=(0, 2, 3))  # (4,)
    variance = (mean - shift.view(1, -1, 1, 1)).square().mean(dim=(0, 2, 3)) + std.square().mean(dim=(0, 2, 3))
    gain = 1 / (SCALE * variance.sqrt())  # new latent = (latent − shift)·gain
    encode, decode = vae.quant_conv, vae.post_quant_conv
    decode.bias += decode.weight[:, :, 0, 0] @ shift
    decode.weight /= gain.view(1, -1, 1, 1)
    channels = len(gain)
    encode.bias[:channels] = (encode.bias[:channels] - shift) * gain
    encode.weight[:channels] *= gain.view(-1, 1, 1, 1)
    encode.bias[channels:] += 2 * gain.log()  # the other half holds log variances


@torch.no_grad()
def reconstruction_psnr(vae, pictures):
    """Mean over uint8 pictures of the PSNR, in dB over the range of 255, after encoding (to the mean) and decoding."""
    values = []
    for part in pictures.split(64):
        decoded = vae.decode(vae.encode(from_bytes(part)).latent_dist.mean).sample
        error = (decoded.clamp(-1, 1) + 1) * 127.5 - part
        values.append(10 * torch.log10(255**2 / error.square().mean(dim=(1, 2, 3))))
    return torch.cat(values).mean().item()


#################################################################################
#                                    The DiT                                    #
#################################################################################


def train_dit(mean, std, labels, args, device):
    """DiT-Demo/2 on latents drawn from N(mean, std²), scaled, (M, 4, L, L); returns a dict of what happened. Its moving average goes to
    dit.safetensors every minute."""
    model = DiT_models["DiT-Demo/2"]().to(device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    diffusion = create_diffusion("")
    diffusion.prepare(device)
    pairs = [list(average.parameters()), list(model.parameters())]
    if args.compile:
        for block in model.blocks:
            block.compile()

    def network(x, t, y):
        with half_precision(device):
            return model(x, t, y).float()

    def loss():
        index = torch.randint(len(labels), (args.dit_batch,), device=device)
        x = torch.addcmul(mean[index], std[index], torch.randn_like(mean[: args.dit_batch])) * SCALE
        t = torch.randint(diffusion.num_timesteps, (args.dit_batch,), device=device)
        return diffusion.training_losses(network, x, t, dict(y=labels[index]))["loss"].mean()

    @torch.no_grad()
    def after_step():
        torch._foreach_lerp_(*pairs, 1 - EMA_DECAY)

    def save():
        with partial_file(args.output / "dit.safetensors") as partial:
            save_file({name: value.cpu().contiguous() for name, value in average.state_dict().items()}, partial)

    report = Phase(
        "dit", loss, model.parameters(), DIT_RATE, args.dit_steps, args.minutes[1], device, after_step, save
    ).run()
    return report | {"batch": args.dit_batch, "learning_rate": DIT_RATE, "ema_decay": EMA_DECAY}


def main():
    parser = OneLineParser(description="Train DiT-Demo/2 and its VAE on drawn pictures.")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/demo"),
        help="folder for dit.safetensors, vae/ and training.json (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to train (default: a GPU if there is one)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of pictures, weights and training (default: 0)")
    parser.add_argument("--pictures", type=int, default=16384, help="pictures a class (default: %(default)s)")
    parser.add_argument("--vae-steps", type=int, default=9620, help="steps of the VAE (default: %(default)s)")
    parser.add_argument("--dit-steps", type=int, default=21620, help="steps of the DiT (default: %(default)s)")
    parser.add_argument("--vae-batch", type=int, default=48, help="pictures a step of the VAE (default: %(default)s)")
    parser.add_argument("--dit-batch", type=int, default=1024, help="latents a step of the DiT (default: %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        nargs=2,
        default=(60, 120),
        metavar=("VAE", "DIT"),
        help="most minutes for each; the learning rate's schedule is hurried to end in time (default: 60 120)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the networks: a minute, then steps of half the time"
    )
    args = parser.parse_args()
    device, start = torch.device(args.device), time.perf_counter()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    (args.output / "vae").mkdir(parents=True, exist_ok=True)

    generator = torch.Generator(device).manual_seed(args.seed)
    pictures, labels = render_all(args.pictures, generator)
    fresh, _ = render_all(max(1, args.pictures // 256), generator)  # for the PSNR: never trained on
    print(f"{len(pictures)} pictures drawn, {time.perf_counter() - start:.1f} s", flush=True)

    vae, vae_report = train_vae(pictures, args, device)
    standardise(vae, pictures[torch.randperm(len(pictures), device=device)[:8192]])
    # Stored as halves, to keep the files small; everything from here on uses what is stored.
    vae = vae.half().float().eval().requires_grad_(False)
    copy.deepcopy(vae).half().save_pretrained(args.output / "vae")
    vae_report["psnr_db"] = round(reconstruction_psnr(vae, fresh), 2)
    print(f"vae: PSNR of {len(fresh)} fresh pictures {vae_report['psnr_db']} dB", flush=True)

    mean, std = posteriors(vae, pictures)
    print(
        f"latents: standard deviation {(mean * SCALE).std():.3f}, of which noise {(std * SCALE).square().mean().sqrt():.3f}",
        flush=True,
    )
    del pictures
    dit_report = train_dit(mean, std, labels, args, device)

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = git.stdout.strip() if git.returncode == 0 else None
    report = {
        "classes": CLASSES,
        "pictures": len(labels),
        "seed": args.seed,
        "vae": vae_report,
        "dit": dit_report,
        "seconds": round(time.perf_counter() - start, 1),
        "date": date.today().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "command": "python scripts/train_demo.py " + " ".join(sys.argv[1:]),
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
