"""A page for the browser: sample pictures, compare two settings on the same noise. Needs `pip install -e .[page]`.

    python -m scripts.page                                       # the demo models; or one model, by sample.py's flags
    python -m scripts.page --model DiT-XL/2 --image-size 512

It is served to this machine only, to one visitor at a time. Its files lie in a temporary folder that goes with it.
"""

if not __package__:
    __import__("_as_module")

import html
import io
import os
import secrets
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from PIL import Image

import evaluate
from accel import door, loading
from accel.command_line import OneLineParser, add_arguments, user_errors
from accel.diffusion import create_diffusion
from accel.door import opening
from accel.errors import UsageError, as_usage_error, path_errors
from accel.families import families
from accel.flags import flag_names
from accel.latents.pixels import to_grid
from accel.precision import TIERS, alone, apply_precision, supports
from accel.progress import Stopwatch
from accel.request import GridRequest
from accel.run import Run
from accel.settings import GridSettings

FOLDER = Path(tempfile.gettempdir(), f"dit-page-{secrets.token_hex(8)}")
if __name__ == "__main__":  # gradio and matplotlib look for their folders when they are imported
    os.environ |= dict(GRADIO_TEMP_DIR=f"{FOLDER}/served", MPLCONFIGDIR=f"{FOLDER}", TMPDIR=f"{FOLDER}")
try:
    import gradio as gr
except ImportError:  # main says so
    gr = None

PLAN, MOST, PREVIEWS = "ddpm by its plan", 8, 6  # pictures at a time; estimates on the way, an evaluation more each
LEFT_OUT = "output", "output_type", "seed_list", "repeats", "parallel", "batch_size", "eta", "tf32"
NAMES = dict(labels="Classes", seed="Seed", num_sampling_steps="Steps", cfg_scale="Guidance", sampler="Sampler")
NAMES |= dict(guidance_interval="Guidance interval", precision="Arithmetic")
QUEUED = dict(concurrency_id="one", concurrency_limit=1, trigger_mode="multiple", api_visibility="private")
LOOK = dict(format="png", buttons=["fullscreen"], interactive=False, elem_classes="pixels", render=False)
CSS = """.pixels :is(.image-frame, img) {width: 100%; max-height: 75vh; object-fit: contain !important}
.pixels img {image-rendering: pixelated}"""
Say = Callable[..., None]  # (text, share done, picture or None); raises CancelledError when the visitor stops or leaves


class Studio:
    """The models of a page, one thread that samples, and the network that was used last.

    given: fields of GridRequest, from flags; vgg: VGG16's weights, without which LPIPS is left out.
    """

    def __init__(self, given: dict, folder: Path, vgg: Path):
        shipped = [name for family in families() for name, implied in family.models.items() if implied.ckpt]
        names = [given.get("model")] if {"model", "ckpt"} & given.keys() else shipped
        self.given, self.folder, self.vgg, self.loaded = given, folder, vgg, {}
        self.thread, self.stop = ThreadPoolExecutor(1), threading.Event()
        self.device = loading.choose_device(given.get("device"))
        every = [GridRequest(**given | dict(model=name)) for name in names]
        self.opened = [opening.open_weights(request, self.device) for request in every]

    def choices(self, options: GridSettings) -> tuple[list[str], list[str]]:
        """Return the samplers of the model's family, its default first, and the tiers of this device."""
        first, *others = options.fit.family.samplers
        planned = first == "ddpm" and door.plan_path(options).exists()
        return [first, *[PLAN] * planned, *others], [tier for tier in TIERS if supports(tier, self.device)]

    def sample(self, options: GridSettings, say: Say, *values: object) -> tuple[str, str, str]:
        """Return the picture's file, twice, and the command that makes the same."""
        wanted = opening.reopen(options, **(chosen := choose(*values)))
        given = self.given if "ckpt" in self.given else {"model": options.model} | self.given
        words = ["python", "sample.py"]
        for item in fields(GridRequest):
            name = "tier" if item.name == "precision" else item.name
            value = getattr(wanted, name) if item.name in chosen else given.get(item.name)
            if item.name in given or item.name in chosen and value != getattr(options, name):
                words += [flag_names(item)[0], *map(str, value if isinstance(value, tuple) else (value,))]
        path, _ = self.picture(wanted, "sample.png", say, PREVIEWS)
        return path, path, shlex.join(words)

    def compare(self, options: GridSettings, say: Say, *values: object) -> tuple[tuple[str, str], str, str]:
        """Return the files of two pictures, that of their difference, and evaluate.py's report in Markdown."""
        chosen = [choose(*values[:5], *last) for last in (values[5:8], values[8:])]
        both = [opening.reopen(options, **one) for one in chosen]
        files, seconds = zip(*[self.picture(one, f"{number}.png", say) for number, one in enumerate(both)])
        metrics = ["--vgg-weights", self.vgg] if self.vgg.exists() else ["--metrics", "mae", "psnr", "ssim"]
        heatmap = str(self.folder / "difference.png")
        with redirect_stdout(io.StringIO()) as printed:
            evaluate.main([str(word) for word in (*files, *metrics, "--heatmap", heatmap)])
        report, _, verdict = printed.getvalue().strip().replace(files[1], "second").rpartition("\n")
        words = "Sampling took {:.2f} s and {:.2f} s.".format(*seconds)
        return files, heatmap, f"### {verdict}\n{words}\n```\n{report}\n```"

    @alone()
    def picture(self, options: GridSettings, name: str, say: Say, previews: int = 0) -> tuple[str, float]:
        """Write the picture of settings; return its file and the seconds of sampling."""
        say(f"Loading {options.model} in {options.tier} …", 0)
        if (key := (options.model, options.tier)) not in self.loaded:
            self.loaded.clear()
            loading.free_memory(self.device)
            self.loaded[key] = door.load(options), door.decoder_of(options)
        (run, decoder), watch = self.loaded[key], Stopwatch(self.device)
        run = run._replace(process=door.process_of(options), guidance=door.guidance_of(options))
        apply_precision(run.tier, run.device)
        door.warm_up(options, run, watch)
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

    def serve(self, work: Callable, *values: object) -> Iterator[list]:
        """Yield a status and three outputs as work(say, *values) goes on in the thread. Closed, stop it at its next
        step."""
        news, skip, self.stop = SimpleQueue(), gr.skip(), (stop := threading.Event())

        def say(text, share, picture=None):
            if stop.is_set():
                raise CancelledError
            if picture or round(share * 1000) % 20 == 0:  # up to 50 times
                bar = f'<progress value="{share}" style="width: 100%"></progress><br>'
                news.put([bar + text, picture or skip, skip, skip])

        job = self.thread.submit(work, say, *values)
        job.add_done_callback(lambda _: news.put(None))
        try:
            yield ["", None, None, None]
            yield from iter(news.get, None)
            yield ["Done.", *job.result()]
        except Exception as error:
            mistake = as_usage_error(error)
            if mistake is None:
                raise
            raise gr.Error(html.escape(mistake.by_flags(NAMES)), duration=None, print_exception=False) from None
        finally:
            stop.set()


def choose(labels, seed, scale, low, high, sampler, steps, tier) -> dict[str, Any]:
    """Return fields of GridRequest from the fields of the page. Raises UsageError for too many pictures."""
    if len(labels) > MOST:
        raise UsageError(f"`labels`: {len(labels)} pictures are too many for this page; choose up to {MOST}")
    by = dict(sampler="ddpm", forecast="plan") if sampler == PLAN else dict(sampler=sampler, forecast="off")
    by |= dict(num_sampling_steps=steps or 0, cfg_scale=float(scale), guidance_interval=(low, high), precision=tier)
    return by | dict(labels=tuple(labels), seed=seed or 0)


@torch.inference_mode()
def estimate(options: GridSettings, run: Run, done: int, x: torch.Tensor) -> torch.Tensor:
    """Return the network's estimate x* of the finished latents, from latents x (n, C, L, L) after `done` steps, by one
    more evaluation: x* = (x − √(1 − ᾱ)·ε)/√ᾱ from its noise ε, x + (1 − t)·v from its velocity v."""
    ends = accumulate(steps for steps, _ in run.process.moves)
    made = sum(count for (_, count), end in zip(run.process.moves, ends) if end <= done)
    t, guidance = run.process.times()[made], run.guidance.at(run.process.levels()[made])
    y = guidance.labels(torch.tensor(options.labels, device=x.device))
    out = guidance.combine(run.network.forward(x, torch.full(y.shape, t, device=x.device), y))[:, : x.shape[1]]
    if options.fit.family.prediction == "velocity":
        return x + (1 - t) * out
    kept = create_diffusion("").alphas_cumprod[round(t)]
    return ((x - (1 - kept) ** 0.5 * out) / kept**0.5).clamp(-4, 4)  # the first overshoot; a half decoder overflows


def model_tab(studio: Studio, options: GridSettings) -> None:
    """Lay out the fields, buttons and outputs of a model."""
    samplers, tiers = studio.choices(options)

    def chooser(sampler, tier):
        with gr.Row():
            name = gr.Dropdown(samplers, value=sampler, label="Sampler", min_width=200)
            steps = gr.Number(options.num_sampling_steps, label="Steps", precision=0, min_width=80)
            return [name, steps, gr.Dropdown(tiers, value=tier, label="Arithmetic", min_width=100)]

    def buttons(name, work, inputs, *outputs):
        with gr.Row():
            start, stop = gr.Button(name, variant="primary", scale=4), gr.Button("Stop", min_width=80)
        status = gr.HTML(elem_classes="status")
        for one in outputs:
            one.render()
        run = partial(studio.serve, partial(work, options))
        begun = start.click(run, inputs, [status, *outputs], show_progress="minimal", show_progress_on=status, **QUEUED)
        stop.click(lambda: "Stopped.", None, status, cancels=begun, queue=False, api_visibility="private")

    first = PLAN if options.forecast == "plan" else options.sampler
    other = first if len(tiers) > 1 else PLAN if PLAN in samplers else samplers[-1]
    names = options.class_names or [f"class {number}" for number in range(min(options.num_classes, 1000))]
    choices = [(f"{name} · {number}", str(number)) for number, name in enumerate(names)]
    many = dict(value=[*map(str, options.labels[:2])], multiselect=True, max_choices=MOST, allow_custom_value=True)
    low, high = options.guidance_interval
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            shared = [
                gr.Dropdown(choices, label="Classes", info=f"Up to {MOST}; type to search, by name or number.", **many),
                gr.Number(options.seed, label="Seed", precision=0),
                gr.Slider(1, max(10, options.cfg_scale), options.cfg_scale, label="Guidance; 1 is none", step=0.1),
                gr.Slider(0, 1, low, label="Guidance from noise level", step=0.05),
                gr.Slider(0, 1, high, label="to noise level; 1 is noise", step=0.05),
                *chooser(first, options.tier),
            ]
        with gr.Column(scale=5):
            with gr.Tab("Sample"):
                line = gr.Textbox(label="The same picture by a command, to the bit", buttons=["copy"], render=False)
                save = gr.DownloadButton("Save PNG", render=False)
                buttons("Sample", studio.sample, shared, gr.Image(label="Picture", **LOOK), save, line)
            with gr.Tab("Compare"):
                gr.Markdown("The settings on the left, and on the same noise:")
                inputs = shared + chooser(other, tiers[0])
                slider = gr.ImageSlider(label="First on the left, second on the right", **LOOK)
                outputs = slider, gr.Image(label="Difference", **LOOK), gr.Markdown(render=False)
                buttons("Compare", studio.compare, inputs, *outputs)


def main() -> None:
    parser = OneLineParser(prog="page.py", description="A page for the browser: sample and compare pictures.")
    add_arguments(parser, leave_out=LEFT_OUT)
    parser.add_argument("--port", type=int, help="of 127.0.0.1; default: the first free one from 7860 on")
    hub = Path(torch.hub.get_dir(), "checkpoints", Path(evaluate.VGG16_URL).name)
    parser.add_argument("--vgg-weights", type=Path, default=hub, help="VGG16, for LPIPS; default: torch's hub cache")
    args = parser.parse_args()
    with user_errors(parser):
        given = {name: value for name, value in vars(args).items() if getattr(GridRequest, name, value) != value}
        studio = Studio(given, FOLDER, args.vgg_weights)
        if gr is None:
            raise UsageError("gradio is missing; install it with pip install -e .[page]")
        FOLDER.mkdir(mode=0o700)
        try:
            with gr.Blocks(title="DiT, sampled faster", analytics_enabled=False, delete_cache=(600, 3600)) as page:
                gr.Markdown("# DiT, sampled faster")
                for opened in studio.opened:
                    with gr.Tab(opened.model):
                        model_tab(studio, opened)
            theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
            how = dict(share=False, run_history=False, footer_links=[], quiet=True, max_file_size=1)
            how |= dict(server_name="127.0.0.1", server_port=args.port, theme=theme, css=CSS)
            with path_errors("port", args.port, "choose another"):
                _, address, _ = page.queue(max_size=16).launch(prevent_thread_lock=True, **how)
            print(f"{address} (Ctrl-C ends it)", flush=True)
            page.block_thread()
        finally:
            studio.stop.set()
            studio.thread.shutdown()
            gr.close_all(verbose=False)
            shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
