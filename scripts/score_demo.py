"""Are the demo's pictures recognisable? A classifier fitted on drawn pictures alone judges generated ones.

    python scripts/score_demo.py --output pretrained_models/demo/score.json --grid grid.png

The classifier knows a ninth answer, "none": halves of different pictures, shuffled tiles, two pictures blended, blur and noise. So a
picture that only leans towards its class is not counted.
"""

if not __package__:
    __import__("_as_module")

import json
from datetime import date
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from accel import vae
from accel.engine import Engine
from accel.options import OneLineParser, SamplingOptions, check_writable, positive, user_errors
from scripts.demo_pictures import CLASSES, from_bytes, render_all

NONE = len(CLASSES)


def spoil(pictures):
    """Pictures (N, 3, S, S) of no class, made from pictures of all classes in random order: a fifth of each kind."""
    n, side = len(pictures), pictures.shape[-1]
    other = pictures.roll(1, 0)
    tiles = (
        pictures.unflatten(3, (4, side // 4)).unflatten(2, (4, side // 4)).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    )  # (16, N, 3, s, s)
    tiles = tiles[torch.randperm(16, device=pictures.device)].unflatten(0, (4, 4))
    tiles = tiles.permute(2, 3, 0, 4, 1, 5).reshape(pictures.shape)
    halves = torch.cat([pictures[..., : side // 2], other[..., side // 2 :]], dim=3)
    blur = F.interpolate(F.avg_pool2d(pictures, side // 8), side, mode="bilinear")
    noise = pictures + torch.randn_like(pictures)
    kinds = torch.stack([tiles, halves, (pictures + other) / 2, blur, noise])
    return kinds[torch.arange(n, device=pictures.device) % len(kinds), torch.arange(n, device=pictures.device)]


def classifier():
    """Five convolutions and a linear layer on pictures at half size. (N, 3, S, S) in (-1, 1) → (N, 9)."""
    layers, channels = [nn.AvgPool2d(2)], 3
    for width in (32, 64, 96, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.GELU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, len(CLASSES) + 1))


def fit(device, seed, per_class, steps, batch=256):
    """Fit the classifier on drawn pictures; returns it and its share of right answers on as many fresh ones as an eighth of those."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    pictures, labels = render_all(per_class, generator)
    net = classifier().to(device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(steps):
        index = torch.randint(len(labels), (batch,), device=device)
        x, y = from_bytes(pictures[index]), labels[index].clone()
        quarter = batch // 4
        # A quarter is no class, a quarter is a little soft, as a VAE's pictures are.
        x = torch.cat([spoil(x[:quarter]), F.avg_pool2d(x[quarter : 2 * quarter], 3, 1, 1), x[2 * quarter :]])
        y[:quarter] = NONE
        loss = F.cross_entropy(net(x + 0.03 * torch.randn_like(x)), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    net.eval()
    fresh, truth = render_all(max(1, per_class // 8), generator)
    with torch.no_grad():
        right = (net(from_bytes(fresh)).argmax(1) == truth).float().mean().item()
        shuffled = from_bytes(fresh[torch.randperm(len(fresh), device=device)])
        refused = (net(spoil(shuffled)).argmax(1) == NONE).float().mean().item()
    return net, right, refused


def main():
    parser = OneLineParser(
        description="Share of generated demo pictures that a classifier fitted on drawn ones recognises."
    )
    parser.add_argument(
        "--folder", type=Path, help="folder with dit.safetensors and vae/ (default: the demo's own weights)"
    )
    parser.add_argument(
        "--count", type=positive, default=512, help="pictures to generate, all classes in turn (default: %(default)s)"
    )
    parser.add_argument("--cfg-scale", type=float, default=4.0, help="strength of guidance (default: %(default)s)")
    parser.add_argument("--num-sampling-steps", type=int, default=250, help="denoising steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and classifier (default: %(default)s)")
    parser.add_argument("--device", help="where to run; default: a GPU if there is one")
    parser.add_argument(
        "--fit-pictures", type=positive, default=2048, help="drawn pictures a class (default: %(default)s)"
    )
    parser.add_argument(
        "--fit-steps", type=positive, default=1500, help="steps of the classifier (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--grid", type=Path, help="PNG file for the first 64 generated pictures, eight a row")
    args = parser.parse_args()
    with user_errors(parser):
        for flag, path in (("--output", args.output), ("--grid", args.grid)):
            if path is not None:
                check_writable(path, flag)
        labels = tuple(index % len(CLASSES) for index in range(args.count))
        engine = Engine(
            SamplingOptions(
                model="DiT-Demo/2",
                labels=labels,
                cfg_scale=args.cfg_scale,
                num_sampling_steps=args.num_sampling_steps,
                seed=args.seed,
                device=args.device,
                ckpt=args.folder and str(args.folder / "dit.safetensors"),
                vae=args.folder and str(args.folder / "vae"),
            ).resolve()
        )
        print(engine.describe().replace(str(labels), ""))
        pixels = engine.decode(engine.sample())
        net, right, refused = fit(engine.device, args.seed + 1, args.fit_pictures, args.fit_steps)
        with torch.no_grad():
            answers = torch.cat([net(part.clamp(-1, 1)).argmax(1) for part in pixels.split(64)])
        truth = torch.tensor(labels, device=answers.device)
        share = {
            name: round((answers[truth == k] == k).float().mean().item(), 4)
            for k, name in enumerate(CLASSES)
            if (truth == k).any()
        }
        report = {
            "recognised": round((answers == truth).float().mean().item(), 4),
            "of": args.count,
            "by_class": share,
            "answered_none": round((answers == NONE).float().mean().item(), 4),
            "classifier_right_on_drawn": round(right, 4),
            "classifier_refuses_spoiled": round(refused, 4),
            "cfg_scale": args.cfg_scale,
            "steps": args.num_sampling_steps,
            "seed": args.seed,
            "precision": engine.precision,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU",
        }
        if args.grid:
            from PIL import Image

            Image.fromarray(vae.to_grid(pixels[:64], columns=8).numpy()).save(args.grid)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report))


if __name__ == "__main__":
    main()
