"""Are the demo's pictures recognisable? A classifier fitted on drawn pictures alone judges generated ones.

    python -m pretrained_models.demo.score --output output/score.json --grid output/grid.png

The classifier knows a ninth answer, "none": shuffled tiles, halves of different pictures, two pictures blended, blur
and noise. So a picture that only leans towards its class is not counted.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image

from accel import door
from accel.command_line import OneLineParser, add_arguments, request_from, user_errors
from accel.flags import check_writable, positive
from accel.latents.decoder import Decoder
from accel.latents.pixels import to_grid
from accel.progress import Stopwatch
from accel.run import Run
from accel.settings import GridSettings
from pretrained_models.demo.pictures import CLASSES, from_bytes, render_all

NONE = len(CLASSES)


def spoil(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures (N, 3, S, S) of no class, made from pictures of all classes in random order: a fifth of each kind."""
    index, side = torch.arange(len(pictures), device=pictures.device), pictures.shape[-1]
    other = pictures.roll(1, 0)
    tiles = torch.stack([part for row in pictures.chunk(4, 2) for part in row.chunk(4, 3)])  # (16, N, 3, S/4, S/4)
    tiles = tiles[torch.randperm(16, device=pictures.device)].unflatten(0, (4, 4))
    tiles = tiles.permute(2, 3, 0, 4, 1, 5).reshape(pictures.shape)
    halves = torch.cat([pictures[..., : side // 2], other[..., side // 2 :]], dim=3)
    blur = F.interpolate(F.avg_pool2d(pictures, side // 8), side, mode="bilinear")
    noise = pictures + torch.randn_like(pictures)
    kinds = torch.stack([tiles, halves, (pictures + other) / 2, blur, noise])
    return kinds[index % len(kinds), index]


def classifier() -> nn.Module:
    """Five convolutions and a linear layer on pictures at half size. (N, 3, S, S) in (-1, 1) → (N, 9)."""
    layers, channels = [nn.AvgPool2d(2)], 3
    for width in (32, 64, 96, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.GELU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, len(CLASSES) + 1))


def fit(device: torch.device, seed: int, per_class: int, steps: int) -> tuple[nn.Module, float, float]:
    """The classifier, fitted on drawn pictures; its share of right answers on fresh ones, an eighth as many; and its
    share of answers "none" on those, spoiled."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    pictures, labels = render_all(per_class, generator)
    net = classifier().to(device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(steps):
        index = torch.randint(len(labels), (256,), device=device)
        x, y = from_bytes(pictures[index]), labels[index].clone()
        none, soft, rest = x.split([64, 64, 128])
        y[:64] = NONE
        x = torch.cat([spoil(none), F.avg_pool2d(soft, 3, 1, 1), rest])  # soft as a VAE's pictures are
        loss = F.cross_entropy(net(x + 0.03 * torch.randn_like(x)), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    net.eval().requires_grad_(False)
    fresh, truth = render_all(max(1, per_class // 8), generator)
    right = (net(from_bytes(fresh)).argmax(1) == truth).float().mean().item()
    shuffled = from_bytes(fresh[torch.randperm(len(fresh), device=device)])
    refused = (net(spoil(shuffled)).argmax(1) == NONE).float().mean().item()
    return net, right, refused


def recognised(
    options: GridSettings, run: Run, decoder: Decoder, args: argparse.Namespace
) -> tuple[dict, torch.Tensor]:
    """The figures for the pictures of a run, and those pictures."""
    pixels = decoder.decode(*door.sample(options, run, Stopwatch(run.device)))
    net, right, refused = fit(run.device, options.seed + 1, args.fit_pictures, args.fit_steps)
    answers = torch.cat([net(part.clamp(-1, 1)).argmax(1) for part in pixels.split(64)])
    truth = torch.tensor(options.labels, device=answers.device)

    def share(hits):
        return round(hits.float().mean().item(), 4)

    figures = {
        "recognised": share(answers == truth),
        "of": args.count,
        "by_class": {CLASSES[k]: share(answers[truth == k] == k) for k in sorted(set(options.labels))},
        "answered_none": share(answers == NONE),
        "classifier_right_on_drawn": round(right, 4),
        "classifier_refuses_spoiled": round(refused, 4),
        "cfg_scale": options.cfg_scale,
        "steps": options.num_sampling_steps,
        "seed": options.seed,
        "precision": run.tier,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU",
    }
    return figures, pixels


def main() -> None:
    parser = OneLineParser(description="Share of generated demo pictures that a classifier of drawn ones recognises.")
    add_arguments(parser, leave_out=("labels", "seed_list", "output", "output_type", "repeats"))
    parser.set_defaults(model="DiT-Demo/2", labels=None)
    add = parser.add_argument
    add("--count", type=positive, default=512, help="pictures, all classes in turn (default: %(default)s)")
    add("--fit-pictures", type=positive, default=2048, help="drawn pictures a class (default: %(default)s)")
    add("--fit-steps", type=positive, default=1500, help="steps of the classifier (default: %(default)s)")
    add("--output", dest="figures", type=Path, metavar="JSON", help="file for the figures")
    add("--grid", type=Path, metavar="PNG", help="file for the first 64 generated pictures, eight a row")
    args = parser.parse_args()
    with user_errors(parser):
        for name, path in (("figures", args.figures), ("grid", args.grid)):
            if path is not None:
                check_writable(path, name)
        args.labels = tuple(index % len(CLASSES) for index in range(args.count))
        settings, run, decoder = door.ready(request_from(args))
        print(door.describe(settings, run))
        figures, pixels = recognised(settings, run, decoder, args)
        if args.grid:
            Image.fromarray(to_grid(pixels[:64], columns=8).numpy()).save(args.grid)
        if args.figures:
            args.figures.write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
