"""The sampling behind scripts/page.py: fields of the page → pictures, how far they are, and how they differ."""

import io
import shlex
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields
from itertools import accumulate
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image

import evaluate
from accel import door, loading
from accel.diffusion import create_diffusion
from accel.door import opening
from accel.families import families
from accel.flags import flag_names
from accel.latents.pixels import to_grid
from accel.precision import TIERS, alone, apply_precision, supports
from accel.progress import Stopwatch
from accel.request import GridRequest
from accel.run import Run
from accel.settings import GridSettings

GUIDANCE = "cfg_scale", "guidance_interval", "guidance_channels"  # that a model implies
PREVIEWS = 6  # estimates on the way, each of one more network evaluation
PLAN = "ddpm by its plan"

Say = Callable[..., None]  # (text, share done, picture or None)


class Studio:
    """The models of a page. The network that was used last stays in memory.

    given: fields of GridRequest, from flags; folder: for pictures; vgg: VGG16's weights; without them LPIPS is left
    out.
    """

    def __init__(self, given: dict, folder: Path, vgg: Path):
        shipped = [name for family in families() for name, implied in family.models.items() if implied.ckpt]
        names = [given.get("model")] if {"model", "ckpt"} & given.keys() else shipped
        self.given, self.folder, self.vgg, self.loaded = given, folder, vgg, {}
        self.device = loading.choose_device(given.get("device"))
        every = [GridRequest(**given | dict(model=name)) for name in names]
        self.opened = [opening.open_weights(request, self.device) for request in every]

    def choices(self, options: GridSettings) -> tuple[list[str], list[str]]:
        """The samplers that the model's family has, its default first, and the tiers of this device."""
        first, *others = options.fit.family.samplers
        planned = first == "ddpm" and door.plan_path(options).exists()
        tiers = [tier for tier in TIERS if supports(tier, self.device)]
        return [first, *([PLAN] if planned else []), *others], tiers

    def command(self, settings: dict) -> str:
        """The command that makes the picture of `settings`, fields of GridRequest."""
        words, settings = ["python", "sample.py"], self.given | settings
        model = next(one for one in self.opened if one.model == (settings.get("model") or one.model))
        for item in fields(GridRequest):
            value = settings.get(item.name, item.default)
            implied = item.name in GUIDANCE and item.name not in self.given and value == getattr(model, item.name)
            if value != item.default and not implied:
                words += [flag_names(item)[0], *map(str, value if isinstance(value, tuple) else (value,))]
        return shlex.join(word for word in words if word != "True")

    @alone()
    def sample(self, opened: GridSettings, chosen: dict, name: str, say: Say, previews: int = 0) -> tuple[str, float]:
        """Write the picture of opened weights with fields that the visitor has chosen → its file, and the seconds of
        sampling. say is called on the way, after each step too, and may raise."""
        options = opening.reopen(opened, **chosen)
        say(f"Loading {options.model} in {options.tier} …", 0)
        if (key := (options.model, options.tier)) not in self.loaded:
            self.loaded.clear()
            loading.free_memory(self.device)
            self.loaded[key] = door.load(options), door.decoder_of(options)
        (run, decoder), watch = self.loaded[key], Stopwatch(self.device)
        run = run._replace(process=door.process_of(options), guidance=door.guidance_of(options))
        apply_precision(run.tier, run.device)
        batches = door.ALONE.batches(len(options.labels), options.batch_size)
        door.warm_up(run, options.labels, batches, watch)
        total, start = run.process.steps, time.perf_counter()
        due = [total * number // (previews + 1) for number in range(previews, 0, -1)]

        def on_step(index, x):
            if x.is_cuda and index % 4 == 3:  # the host runs ahead: neither the bar nor a stop should be late
                torch.cuda.synchronize(x.device)
            done, picture = index + 1, None
            if due and due[-1] <= done < total:
                due.pop()
                picture = Image.fromarray(to_grid(decoder.decode(estimate(options, run, done, x))).numpy())
            left = (time.perf_counter() - start) * (total - done) / done
            say(f"Step {done} of {total} · {left:.0f} s left", done / total, picture)

        with watch.phase("sample"):
            latents = door.latents(options, run, on_step=on_step)
        door.save(options, path := str(self.folder / name), latents, watch, decoder)
        return path, watch.seconds["sample"]

    def compare(self, opened: GridSettings, both: tuple, say: Say) -> tuple[tuple[str, str], Image.Image, str]:
        """The files of two pictures, a map of their difference, and evaluate.py's report in Markdown."""
        files, seconds = zip(*[self.sample(opened, chosen, f"{number}.png", say) for number, chosen in enumerate(both)])
        a, b = (np.asarray(evaluate.read_picture(path)) for path in files)
        difference = np.abs(a.astype(np.int16) - b).max(2)  # (H, W) in levels
        heat = matplotlib.colormaps["inferno"](difference / max(1, difference.max()), bytes=True)
        metrics = ["--vgg-weights", self.vgg] if self.vgg.exists() else ["--metrics", "mae", "psnr", "ssim"]
        with redirect_stdout(io.StringIO()) as printed:
            evaluate.main([str(word) for word in (*files, *metrics)])
        report, _, verdict = printed.getvalue().strip().replace(files[1], "second").rpartition("\n")
        words = "Sampling took {:.2f} s and {:.2f} s. The brightest colour of the map is {} of 255 levels."
        words = words.format(*seconds, difference.max())
        return files, Image.fromarray(heat).convert("RGB"), f"### {verdict}\n{words}\n```\n{report}\n```"


@torch.inference_mode()
def estimate(options: GridSettings, run: Run, done: int, x: torch.Tensor) -> torch.Tensor:
    """The network's estimate x* of the finished latents, from latents x (n, C, L, L) after `done` steps, by one more
    evaluation: x* = (x − √(1 − ᾱ)·ε)/√ᾱ from its noise ε, x + (1 − t)·v from its velocity v."""
    ends = accumulate(steps for steps, _ in run.process.moves)
    made = sum(count for (_, count), end in zip(run.process.moves, ends) if end <= done)
    t, guidance = run.process.times()[made], run.guidance.at(run.process.levels()[made])
    y = guidance.labels(torch.tensor(options.labels, device=x.device))
    out = guidance.combine(run.network.forward(x, torch.full(y.shape, t, device=x.device), y))[:, : x.shape[1]]
    if options.fit.family.prediction == "velocity":
        return x + (1 - t) * out
    kept = create_diffusion("").alphas_cumprod[round(t)]
    return ((x - (1 - kept) ** 0.5 * out) / kept**0.5).clamp(-4, 4)  # the first overshoot; a half decoder overflows
