"""A page for the browser that samples pictures and compares two settings on the same noise. Needs
`pip install -e '.[page]'`.

    python scripts/page.py                                      # the demo models
    python scripts/page.py --model DiT-XL/2 --image-size 512    # one model, by sample.py's flags

It serves only this machine unless --host is given, and samples for one visitor at a time. Its
temporary folder is removed at the end.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import html
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

import evaluate
from accel.cli import OneLineParser, add_arguments, user_errors
from accel.config import rules
from accel.config.options import OPTIONS, Options
from accel.errors import UsageError, as_usage_error, path_errors
from accel.families import families
from accel.io.output import to_grid
from accel.io.picture_files import read_picture
from accel.io.progress import Stopwatch
from accel.jobs.grid import save, warm_up
from accel.pipeline import Pipeline, free_memory
from accel.run import Run
from accel.run.opening import choose_device, open_run
from accel.runtime.precision import TIERS, exclusive, supports

FOLDER = Path(tempfile.gettempdir(), f"dit-page-{secrets.token_hex(8)}")
if __name__ == "__main__":  # gradio and matplotlib look for their folders when they are imported
    os.environ |= dict(
        GRADIO_TEMP_DIR=f"{FOLDER}/served", MPLCONFIGDIR=f"{FOLDER}", TMPDIR=f"{FOLDER}"
    )
try:
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
except ImportError:  # main raises the error
    gr = None

LOOPBACK = "127.0.0.1"
USER = "dit"  # of --host
MAX_PICTURES = 8
PREVIEWS = 6  # predictions of the result during a run, with one evaluation each
EXCLUDED_OPTIONS = (
    "output",
    "output_type",
    "seed_list",
    "grids",
    "batch_size",
    "eta",
    "quiet",
    "json",
)
FIELD_NAMES = dict(
    labels="Classes",
    seed="Seed",
    num_sampling_steps="Steps",
    cfg_scale="Guidance",
    sampler="Sampler",
    guidance_interval="Guidance interval",
    precision="Precision",
)
NOISY_SAMPLERS = "ddpm", "sde"  # they draw noise in every step: fewer steps change the picture
VERDICT_TEXTS = dict(
    PASS="by evaluate.py's criteria the second picture can stand for the first.",
    FAIL="by evaluate.py's criteria these are two pictures, as other samplers and far fewer steps "
    "make them; two precisions should not.",
    NONE="a metric could not be computed.",
)
CSS = """.pixels :is(.image-frame, img) {
  width: 100%; max-height: 75vh; object-fit: contain !important
}
.pixels img {image-rendering: pixelated}"""


class Model(NamedTuple):
    """A model of the page: its run, whose request has the user's options."""

    run: Run

    def changed(self, **options: object) -> "Model":
        """Return the model with other options and the same files. Raises UsageError."""
        run = self.run
        request = run.request.changed(**options)
        return Model(open_run(request, run.device, run.checkpoint, run.guide, run.space))

    def command(self) -> str:
        """Return the command that makes the same picture."""
        words = ["python", "sample.py"]
        for name, value in self.run.request.options.items():
            if name == "class_names":
                continue  # labels are given by number
            values = value if isinstance(value, tuple) else (value,)
            words += [OPTIONS[name].flag_names()[0], *map(str, values)]
        return shlex.join(words)


class Studio:
    """The models of a page, a thread that samples, and the last pipeline."""

    def __init__(self, options: Options):
        names = [options.get("model")]
        if not {"model", "ckpt", "config"} & options.keys():
            names = [name for family in families() for name in family.shipped]
        device = choose_device(options.get("device"))
        self.models = []
        for name in names:
            request = rules.Request.open(options.changed(model=name))
            self.models.append(Model(open_run(request, device)))
        self.loaded = {}  # (model, tier, guide) → pipeline
        self.thread = ThreadPoolExecutor(1)
        self.stop = threading.Event()

    def sample(self, model: Model, say: Callable, *values: object) -> tuple[str, str]:
        """Return the picture's file and the command that makes the same picture."""
        wanted = model.changed(**choose(*values))
        file, _ = self.picture(wanted, "sample.png", say, PREVIEWS)
        return file, wanted.command()

    def compare(self, model: Model, say: Callable, *values: object) -> tuple[list[str], str, str]:
        """Return the files of two pictures, evaluate.py's verdict as Markdown, and the file of
        their difference.
        """
        shared = values[:5]
        files = []
        lines = []
        for number, name in enumerate(("First", "Second")):
            own = values[5 + 3 * number : 8 + 3 * number]
            wanted = model.changed(**choose(*shared, *own))
            file, seconds = self.picture(wanted, f"{number}.png", say, of=f"{name} of two. ")
            files.append(file)
            lines.append(f"**{name}**: {own[0]}, {own[1]} steps, {own[2]}; took {seconds:.2f} s")
        first, second = [read_picture(Path(file)).pixels for file in files]
        vgg = Path(torch.hub.get_dir(), "checkpoints", Path(evaluate.VGG16_URL).name)
        lpips = evaluate.Lpips(vgg) if vgg.exists() else None
        record = evaluate.judge_pixels(first, second, evaluate.GATES["close"], lpips)
        lines.append(f"**{record['verdict']}**: {VERDICT_TEXTS[record['verdict']]}")
        lines.append(evaluate.summary(record["values"]).replace("   ", " · "))
        difference = np.abs(first.astype(np.int16) - second).max(2)  # (H, W) in levels
        lines.append(f"The largest difference is {difference.max()} of 255, white in the map:")
        map_file = str(FOLDER / "difference.png")
        scaled = 255 * difference // max(difference.max(), 1)
        Image.fromarray(scaled.astype(np.uint8)).save(map_file)
        return files, "\n\n".join(lines), map_file

    @exclusive()
    def picture(
        self, model: Model, name: str, say: Callable, previews: int = 0, of: str = ""
    ) -> tuple[str, float]:
        """Write the picture of a model. Return its file and the seconds of sampling.

        of: prefix of the progress bar's text.
        """
        run = model.run
        say(f"{of}Loading {run.settings.model} in {run.settings.precision} …", 0)
        pipeline = self.pipeline_of(run)
        watch = Stopwatch(pipeline.device)
        warm_up(run, pipeline, watch)
        total = pipeline.process.steps
        start = time.perf_counter()
        due = [total * number // (previews + 1) for number in range(previews, 0, -1)]

        def on_step(index, x):
            if x.is_cuda and index % 4 == 3:  # limits how far the host runs ahead
                torch.cuda.synchronize(x.device)
            done = index + 1
            preview = []
            if due and due[-1] <= done < total:  # <=: one of few steps may be due twice
                due.pop()
                pixels = pipeline.decode(pipeline.estimate(x, done, run.settings.labels))
                preview = [Image.fromarray(to_grid(pixels).numpy())]
            left = (time.perf_counter() - start) * (total - done) / done
            say(f"{of}Step {done} of {total} · {left:.0f} s left", done / total, *preview)

        with watch.phase("sample"):
            latents = pipeline.latents(run.settings.labels, run.settings.seed, on_step)
        path = str(FOLDER / name)
        save(run, path, latents, watch, pipeline.decoder)
        return path, watch.seconds["sample"]

    def pipeline_of(self, run: Run) -> Pipeline:
        """Return the pipeline of a run. The network is loaded unless it is the last one."""
        key = run.settings.model, run.settings.precision, run.settings.guide
        if key not in self.loaded:
            self.loaded.clear()
            free_memory(run.device)
            self.loaded[key] = Pipeline.load(run, keep_guide=True)
        return replace(self.loaded[key], process=run.process, guidance=run.guidance)

    def serve(self, work: Callable, outputs: list, *values: object) -> Iterator[dict]:
        """Run work(say, *values) in the thread. Yield updates of `outputs`: the status while it
        runs, then its results.

        say(text, fraction done[, picture]) raises CancelledError after this generator was closed,
        by Stop or by a visitor who left.
        """
        status, picture, *_ = outputs
        updates = {status: ""}
        stop = threading.Event()
        self.stop = stop

        def say(text, share, *preview):
            if stop.is_set():
                raise CancelledError
            bar = f'<progress value="{share}" style="width: 100%"></progress><br>'
            updates.update(zip(outputs, (bar + text, *preview)))

        job = self.thread.submit(work, say, *values)
        try:
            yield dict.fromkeys(outputs)
            while not wait([job], 0.1).done:
                yield {status: updates[status], picture: updates.pop(picture, gr.skip())}
            yield dict(zip(outputs, ("Done.", *job.result())))
        except CancelledError:  # the page is closing
            return
        except Exception as error:
            mistake = as_usage_error(error)
            if mistake is None:
                raise
            raise gr.Error(
                html.escape(mistake.by_flags(FIELD_NAMES)), duration=None, print_exception=False
            ) from None
        finally:
            stop.set()


def choose(labels, seed, scale, low, high, sampler, steps, tier) -> dict:
    """Return options from the fields of the page. An empty field changes nothing. Raises UsageError
    for too many pictures, and for a seed or a number of steps that is not whole.
    """
    if len(labels) > MAX_PICTURES:
        raise UsageError(
            f"{len(labels)} pictures are too many for this page",
            f"choose up to {MAX_PICTURES}",
            parameter="labels",
        )
    return dict(
        labels=labels or None,
        seed=whole("seed", seed),
        cfg_scale=scale,
        guidance_interval=(low, high),
        sampler=sampler,
        num_sampling_steps=whole("num_sampling_steps", steps),
        precision=tier,
    )


def whole(name: str, value: float | None) -> int | None:
    """Return the whole number of a field, None if it is empty. A browser may send 1.5."""
    if value is None:
        return None
    if value != int(value):
        raise UsageError("must be a whole number", parameter=name, value=value)
    return int(value)


def choices(run: Run) -> tuple[list[str], list[str]]:
    """Return the samplers of the model's family, the default first, and the device's tiers."""
    tiers = [tier for tier in TIERS if supports(tier, run.device)]
    return [*run.spec.family.samplers], tiers


def default_comparison(model: Model) -> tuple[tuple, tuple]:
    """Return the default sampler, steps and tier of both sides of a comparison: two tiers, or with
    one tier the steps and half of them.
    """
    run = model.run
    samplers, tiers = choices(run)
    sampler = run.settings.sampler
    steps = run.settings.num_sampling_steps
    tier = run.settings.precision
    other = next((each for each in tiers if each != tier), None)
    if other:
        return (sampler, steps, tier), (sampler, steps, other)
    sampler = next(name for name in (sampler, *samplers) if name not in NOISY_SAMPLERS)
    return (sampler, steps, tier), (sampler, max(1, steps // 2), tier)


def model_tab(studio: Studio, model: Model) -> None:
    """Lay out the fields, buttons and outputs of a model."""
    run = model.run
    samplers, tiers = choices(run)

    def chooser(sampler, steps, tier):
        with gr.Row():
            return [
                gr.Dropdown(samplers, value=sampler, label="Sampler", min_width=200),
                gr.Number(steps, label="Steps", precision=0, min_width=80),
                gr.Dropdown(tiers, value=tier, label="Precision", min_width=100),
            ]

    def runner(name, work, inputs, *outputs):
        with gr.Row():
            start = gr.Button(name, variant="primary", scale=4)
            stop = gr.Button("Stop", min_width=80)
        status = gr.HTML(elem_classes="status")
        for output in outputs:
            output.render()
        changing = [status, *outputs]
        begun = start.click(
            partial(studio.serve, partial(work, model), changing),
            inputs,
            changing,
            trigger_mode="multiple",  # also after a stop
            show_progress="minimal",
            show_progress_on=status,
            concurrency_id="one",
            concurrency_limit=1,
            preprocess=False,  # Options checks the values, without tracebacks
        )
        # The button does not set the status: the run's last message may arrive after it.
        begun.failure(lambda: "Stopped.", None, status, queue=False)
        stop.click(None, cancels=begun)

    settings = run.settings
    names = settings.class_names or [f"class {number}" for number in range(settings.num_classes)]
    classes = [(f"{name} · {number}", str(number)) for number, name in enumerate(names)]
    low, high = settings.guidance_interval
    guidance = f"Autoguidance by {Path(settings.guide).name}" if settings.guide else "Guidance"
    look = dict(format="png", interactive=False, elem_classes="pixels", render=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            shared = [
                gr.Dropdown(
                    classes,
                    label="Classes",
                    info=f"Up to {MAX_PICTURES}; type to search, by name or number.",
                    value=[str(label) for label in settings.labels[:2]],
                    multiselect=True,
                    max_choices=MAX_PICTURES,
                ),
                gr.Number(settings.seed, label="Seed", precision=0),
                gr.Slider(
                    1,
                    max(10, settings.cfg_scale),
                    settings.cfg_scale,
                    label=f"{guidance}; 1 is none",
                    step=0.01,
                ),
                gr.Slider(0, 1, low, label="Guidance from noise level", step=0.05),
                gr.Slider(0, 1, high, label="to noise level; 1 is noise", step=0.05),
            ]
        with gr.Column(scale=5):
            with gr.Tab("Sample"):
                own = chooser(settings.sampler, settings.num_sampling_steps, settings.precision)
                picture = gr.Image(label="Picture", buttons=["download", "fullscreen"], **look)
                line = gr.Textbox(
                    label="The same picture by a command, to the bit",
                    buttons=["copy"],
                    render=False,
                )
                runner("Sample", studio.sample, shared + own, picture, line)
            with gr.Tab("Compare"):
                first, second = default_comparison(model)
                gr.Markdown("The first, on the left of the slider:")
                fields_of_first = chooser(*first)
                gr.Markdown("The second, on the right, from the same noise:")
                both_fields = fields_of_first + chooser(*second)
                look["buttons"] = ["fullscreen"]
                both = gr.ImageSlider(label="First and second", **look)
                report = gr.Markdown(render=False)
                difference = gr.Image(label="Difference", **look)
                runner("Compare", studio.compare, shared + both_fields, both, report, difference)


async def refuse_other_sites(request: "Request", call_next: Callable) -> "Response":
    """Answer 403 to a request that a page of another site sends through a visitor's browser."""
    origin = request.headers.get("origin")
    same_host = origin and urlsplit(origin).netloc == request.headers.get("host")
    # The browser's own statement holds also behind a proxy that changes the host.
    same_origin = request.headers.get("sec-fetch-site") == "same-origin"
    if origin and not (same_host or same_origin):
        return PlainTextResponse(f"{origin} is another site, and may not use this page\n", 403)
    return await call_next(request)


def port_of(text: str) -> int:
    """Return the number of a port, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ArgumentTypeError(f"{text}: must be from 1 to 65535")
    return int(text)


def main() -> None:
    parser = OneLineParser(
        prog="page.py", description="A page for the browser: sample and compare pictures."
    )
    add_arguments(parser, exclude=EXCLUDED_OPTIONS)
    parser.add_argument(
        "--port", type=port_of, help="of the address; default: the first free one from 7860 on"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="serve an address of this machine, or 0.0.0.0 for all, to whoever has the password "
        "that is then printed; default: only this machine's browser",
    )
    options = vars(parser.parse_args())
    port = options.pop("port")
    host = options.pop("host")
    with user_errors(parser):
        if host:
            remedy = "give an address of this machine, or 0.0.0.0"
            with path_errors("host", host, remedy), socket.socket() as probe:
                probe.bind((host, 0))
        studio = Studio(Options(**options))
        if gr is None:
            raise UsageError("gradio is missing; install it with pip install -e '.[page]'")
        FOLDER.mkdir(mode=0o700)
        try:
            serve_page(studio, host, port)
        finally:
            studio.stop.set()
            studio.thread.shutdown()
            gr.close_all(verbose=False)
            shutil.rmtree(FOLDER, ignore_errors=True)


def serve_page(studio: Studio, host: str | None, port: int | None) -> None:
    """Serve the page until a signal ends it. host: with a password; None: to this machine."""
    with gr.Blocks(
        title="DiT, sampled faster", analytics_enabled=False, delete_cache=(600, 3600)
    ) as page:
        gr.Markdown("# DiT, sampled faster")
        for model in studio.models:
            with gr.Tab(model.run.settings.model):
                model_tab(studio, model)
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    guards = [Middleware(BaseHTTPMiddleware, dispatch=refuse_other_sites)]
    password = secrets.token_urlsafe(16)
    if not host:  # a foreign DNS name that points to this machine is refused
        guards.append(Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"]))
    with path_errors("port", port, "choose another"):
        page.queue(max_size=16, api_open=False).launch(
            prevent_thread_lock=True,
            share=False,
            run_history=False,
            footer_links=[],
            quiet=True,
            max_file_size=1,
            server_name=host or LOOPBACK,
            server_port=port,
            auth=(USER, password) if host else None,
            theme=theme,
            css=CSS,
            app_kwargs=dict(middleware=guards),
        )
    name = socket.gethostname() if host == "0.0.0.0" else host or LOOPBACK
    login = f" with user {USER}, password {password}" if host else " on this machine"
    address = f"http://{name}:{page.server_port}/"
    print(f"Open {address} in a browser{login}. Ctrl-C ends the page.", flush=True)
    page.block_thread()


if __name__ == "__main__":
    main()
