"""A page for the browser: sample pictures, compare two settings on the same noise. Needs
`pip install -e .[page]`.

    python -m scripts.page                                       # the demo models; or one model, by
                                                                 sample.py's flags
    python -m scripts.page --model DiT-XL/2 --image-size 512

It is served to this machine only unless --host is given, to one visitor at a time. Its
temporary folder is removed when it ends.
"""

if not __package__:
    __import__("_as_module")

import html
import io
import os
import secrets
import shlex
import shutil
import signal
import socket
import tempfile
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

import evaluate
from accel.cli import OneLineParser, add_arguments, user_errors
from accel.config import Grid
from accel.errors import UsageError, as_usage_error, path_errors, shown
from accel.families import families
from accel.flags import flag_names
from accel.grid import batches_of, load, save, warm_up
from accel.isolation import alone
from accel.opening import Opened, choose_device, open_model
from accel.output import to_grid
from accel.pipeline import Pipeline, free_memory, opened_guidance, process_of
from accel.precision import TIERS, apply_precision, supports
from accel.progress import Stopwatch
from accel.signals import ENDINGS

FOLDER = Path(tempfile.gettempdir(), f"dit-page-{secrets.token_hex(8)}")
if __name__ == "__main__":  # gradio and matplotlib look for their folders when they are imported
    os.environ |= dict(
        GRADIO_TEMP_DIR=f"{FOLDER}/served", MPLCONFIGDIR=f"{FOLDER}", TMPDIR=f"{FOLDER}"
    )
try:
    import gradio as gr
    from starlette.middleware import Middleware

    from scripts.page_guard import Guard
except ImportError:  # main says so
    gr = None

LOOPBACK = "127.0.0.1"
MOST = 8  # pictures
PREVIEWS = 6  # estimates during a run, an evaluation each
LEFT_OUT = "output", "output_type", "seed_list", "batch_size", "eta"
NAMES = dict(
    labels="Classes",
    seed="Seed",
    num_sampling_steps="Steps",
    cfg_scale="Guidance",
    sampler="Sampler",
    guidance_interval="Guidance interval",
    precision="Arithmetic",
)
CSS = """.pixels :is(.image-frame, img) {
  width: 100%; max-height: 75vh; object-fit: contain !important
}
.pixels img {image-rendering: pixelated}"""


class Model(NamedTuple):
    """A model of the page: its options as they were asked for, and its files."""

    asked: Grid
    opened: Opened

    @property
    def grid(self) -> Grid:
        """Return the options with every open one filled."""
        opened = self.opened
        return self.asked.filled(opened.config, opened.fit, opened.has_null_label)

    def changed(self, labels: tuple | None, **options: object) -> "Model":
        """Return the same files with other options. Raises UsageError."""
        before = self.asked.config
        asked = replace(self.asked, labels=labels, config=replace(before, **options))
        asked.check()
        opened = self.opened.changed(vae_precision=before.vae_precision, **options)
        return Model(asked, opened)

    def command(self) -> str:
        """Return the command that makes the same picture."""
        words = ["python", "sample.py"]
        for options in (self.asked.config, self.asked):
            for item in fields(options):
                value = getattr(options, item.name)
                if value == item.default or item.name in ("config", "class_names"):
                    continue  # the labels are numbers
                values = value if isinstance(value, tuple) else (value,)
                words += [flag_names(item)[0], *map(str, values)]
        return shlex.join(words)


class Studio:
    """The models of a page, one thread that samples, and the pipeline that was used last."""

    def __init__(self, grid: Grid):
        config = grid.config
        names = [config.model]
        if config.model is None and config.ckpt is None:
            names = [name for family in families() for name in family.shipped]
        device = choose_device(config.device)
        self.models = []
        for name in names:
            asked = replace(grid, config=replace(config, model=name))
            asked.check()
            self.models.append(Model(asked, open_model(asked.config, device)))
        self.loaded = {}  # (model, tier) → pipeline
        self.thread = ThreadPoolExecutor(1)
        self.stop = threading.Event()

    def sample(self, model: Model, say: Callable, *values: object) -> tuple[str, str]:
        """Return the picture's file and the command that makes the same."""
        wanted = model.changed(**choose(*values))
        file, _ = self.picture(wanted, "sample.png", say, PREVIEWS)
        return file, wanted.command()

    def compare(
        self, model: Model, say: Callable, *values: object
    ) -> tuple[tuple[str, str], str, str]:
        """Return the files of two pictures, that of their difference, and evaluate.py's
        report in Markdown.
        """
        first = model.changed(**choose(*values[:8]))
        second = model.changed(**choose(*values[:5], *values[8:]))
        first_file, first_seconds = self.picture(first, "0.png", say)
        second_file, second_seconds = self.picture(second, "1.png", say)
        files = first_file, second_file
        vgg = Path(torch.hub.get_dir(), "checkpoints", Path(evaluate.VGG16_URL).name)
        metrics = ["--vgg-weights", vgg] if vgg.exists() else ["--metrics", "mae", "psnr", "ssim"]
        heatmap = str(FOLDER / "difference.png")
        with redirect_stdout(io.StringIO()) as printed:
            evaluate.main([str(word) for word in (*files, *metrics, "--heatmap", heatmap)])
        text = printed.getvalue().strip().replace(second_file, "second")
        report, _, verdict = text.rpartition("\n")
        took = f"Sampling took {first_seconds:.2f} s and {second_seconds:.2f} s."
        return files, heatmap, f"### {verdict}\n{took}\n```\n{report}\n```"

    @alone()
    def picture(
        self, model: Model, name: str, say: Callable, previews: int = 0
    ) -> tuple[str, float]:
        """Write the picture of a model; return its file and the seconds of sampling."""
        grid = model.grid
        config = grid.config
        say(f"Loading {config.model} in {config.tier} …", 0)
        pipeline = self.pipeline_of(grid, model.opened)
        apply_precision(pipeline.tier, pipeline.device)
        batches = batches_of(grid)
        watch = Stopwatch(pipeline.device)
        warm_up(grid, pipeline, batches, watch)
        total = pipeline.process.steps
        start = time.perf_counter()
        due = [total * number // (previews + 1) for number in range(previews, 0, -1)]

        def on_step(index, x):
            if x.is_cuda and index % 4 == 3:  # else the host runs ahead, and bar and stop are late
                torch.cuda.synchronize(x.device)
            done = index + 1
            preview = []
            if due and due[-1] <= done < total:  # <=: of few steps some have several
                due.pop()
                pixels = pipeline.decode(pipeline.estimate(x, done, grid.labels))
                preview = [Image.fromarray(to_grid(pixels).numpy())]
            left = (time.perf_counter() - start) * (total - done) / done
            say(f"Step {done} of {total} · {left:.0f} s left", done / total, *preview)

        with watch.phase("sample"):
            latents = pipeline.latents(grid.labels, config.seed, batches, on_step)
        path = str(FOLDER / name)
        save(grid, path, latents, watch, pipeline.decoder)
        return path, watch.seconds["sample"]

    def pipeline_of(self, grid: Grid, opened: Opened) -> Pipeline:
        """Return the pipeline of a grid. Its network is loaded unless it was used last."""
        key = opened.config.model, opened.config.tier
        if key not in self.loaded:
            self.loaded.clear()
            free_memory(opened.device)
            self.loaded[key] = load(grid, opened)
        return self.loaded[key].with_(process=process_of(opened), guidance=opened_guidance(opened))

    def serve(self, work: Callable, outputs: list, *values: object) -> Iterator[dict]:
        """Run work(say, *values) in the thread. Yield values of `outputs`: its status
        until it ends, then its results. say(text, share done[, picture]) raises
        CancelledError when this generator was closed: by Stop or by leaving.
        """
        status, picture, *_ = outputs
        news = {status: ""}
        stop = threading.Event()
        self.stop = stop

        def say(text, share, *preview):
            if stop.is_set():
                raise CancelledError
            bar = f'<progress value="{share}" style="width: 100%"></progress><br>'
            news.update(zip(outputs, (bar + text, *preview)))

        job = self.thread.submit(work, say, *values)
        try:
            yield dict.fromkeys(outputs)
            while not wait([job], 0.1).done:
                yield {status: news[status], picture: news.pop(picture, gr.skip())}
            yield dict(zip(outputs, ("Done.", *job.result())))
        except Exception as error:
            mistake = as_usage_error(error)
            if mistake is None:
                raise
            raise gr.Error(
                html.escape(mistake.by_flags(NAMES)), duration=None, print_exception=False
            ) from None
        finally:
            stop.set()


def choose(labels, seed, scale, low, high, sampler, steps, tier) -> dict:
    """Return labels, None for the default, and options of a Config from the fields of the
    page; a field that is empty leaves its option as it is. Raises UsageError for too many
    pictures.
    """
    # The browser sends lists of strings, and numbers; other clients may send anything.
    if isinstance(labels, Collection) and len(labels) > MOST:
        raise UsageError(
            f"`labels`: {len(labels)} pictures are too many for this page; choose up to {MOST}"
        )
    options = dict(
        seed=whole(seed) or 0,
        cfg_scale=scale,
        guidance_interval=(low, high),
        sampler=sampler,
        num_sampling_steps=whole(steps),
        precision=tier,
    )
    filled_in = {name: value for name, value in options.items() if value is not None}
    return {"labels": labels or None, **filled_in}


def whole(value: object) -> object:
    """Return a whole number as an int, as a browser means it (1e25); other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def choices(opened: Opened) -> tuple[list[str], list[str]]:
    """Return the samplers of the model's family, its default first, and the tiers of this
    device.
    """
    tiers = [tier for tier in TIERS if supports(tier, opened.device)]
    return [*opened.fit.family.samplers], tiers


def model_tab(studio: Studio, model: Model) -> None:
    """Lay out the fields, buttons and outputs of a model."""
    grid = model.grid
    config = grid.config
    samplers, tiers = choices(model.opened)

    def chooser(sampler, tier):
        with gr.Row():
            name = gr.Dropdown(samplers, value=sampler, label="Sampler", min_width=200)
            steps = gr.Number(config.num_sampling_steps, label="Steps", precision=0, min_width=80)
            return [name, steps, gr.Dropdown(tiers, value=tier, label="Arithmetic", min_width=100)]

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
            preprocess=False,  # its errors are tracebacks; Config checks all values
        )
        # Not by a function of the button: the run's last message may reach the browser
        # after its result.
        begun.failure(lambda: "Stopped.", None, status, queue=False)
        stop.click(None, cancels=begun)

    names = grid.class_names or [f"class {number}" for number in range(config.num_classes)]
    classes = [(f"{name} · {number}", str(number)) for number, name in enumerate(names)]
    low, high = config.guidance_interval
    guidance = f"Autoguidance by {Path(config.guide).name}" if config.guide else "Guidance"
    look = dict(format="png", interactive=False, elem_classes="pixels", render=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            shared = [
                gr.Dropdown(
                    classes,
                    label="Classes",
                    info=f"Up to {MOST}; type to search, by name or number.",
                    value=[str(label) for label in grid.labels[:2]],
                    multiselect=True,
                    max_choices=MOST,
                ),
                gr.Number(config.seed, label="Seed", precision=0),
                gr.Slider(
                    1,
                    max(10, config.cfg_scale),
                    config.cfg_scale,
                    label=f"{guidance}; 1 is none",
                    step=0.01,
                ),
                gr.Slider(0, 1, low, label="Guidance from noise level", step=0.05),
                gr.Slider(0, 1, high, label="to noise level; 1 is noise", step=0.05),
                *chooser(config.sampler, config.tier),
            ]
        with gr.Column(scale=5):
            with gr.Tab("Sample"):
                picture = gr.Image(label="Picture", buttons=["download", "fullscreen"], **look)
                line = gr.Textbox(
                    label="The same picture by a command, to the bit",
                    buttons=["copy"],
                    render=False,
                )
                runner("Sample", studio.sample, shared, picture, line)
            with gr.Tab("Compare"):
                gr.Markdown("The settings on the left, and on the same noise:")
                other = chooser(config.sampler if len(tiers) > 1 else samplers[1], tiers[0])
                look["buttons"] = ["fullscreen"]
                both = gr.ImageSlider(label="First on the left, second on the right", **look)
                difference = gr.Image(label="Difference", **look)
                report = gr.Markdown(render=False)
                runner("Compare", studio.compare, shared + other, both, difference, report)


def require_address(host: str) -> None:
    """Raise UsageError unless `host` is an address or a name of this machine."""
    try:
        with (
            path_errors("host", shown(host), "give an address of this machine, or 0.0.0.0"),
            socket.socket() as probe,
        ):
            probe.bind((host or " ", 0))  # "" would be every address
    except UnicodeError:
        raise UsageError(f"`host={shown(host)}`: is not the name of a machine") from None


def address_of(host: str | None, port: int, token: str) -> str:
    """Return the page's address for a browser, on this machine unless `host` is given."""
    name = socket.gethostname() if host == "0.0.0.0" else host or LOOPBACK
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def port_of(text: str) -> int:
    """Return the number of a port, for argparse."""
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 65535:
        raise ArgumentTypeError(f"{shown(text)}: must be from 1 to 65535")
    return int(text)


def main() -> None:
    parser = OneLineParser(
        prog="page.py", description="A page for the browser: sample and compare pictures."
    )
    add_arguments(parser, leave_out=LEFT_OUT)
    parser.add_argument(
        "--port", type=port_of, help="of the address; default: the first free one from 7860 on"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="serve an address of this machine, or 0.0.0.0 for all, to whoever has the token "
        "that is then printed; default: this machine's own browser alone",
    )
    options = vars(parser.parse_args())
    port = options.pop("port")
    host = options.pop("host")
    with user_errors(parser):
        if host is not None:
            require_address(host)
        studio = Studio(Grid.of(**options))
        if gr is None:
            raise UsageError("gradio is missing; install it with pip install -e .[page]")
        # one during an import would leave the folder
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        FOLDER.mkdir(mode=0o700)
        try:
            with gr.Blocks(
                title="DiT, sampled faster", analytics_enabled=False, delete_cache=(600, 3600)
            ) as page:
                gr.Markdown("# DiT, sampled faster")
                for model in studio.models:
                    with gr.Tab(model.opened.config.model):
                        model_tab(studio, model)
            theme = gr.themes.Default(
                font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
            )
            token = secrets.token_urlsafe(16) if host else ""
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
                    theme=theme,
                    css=CSS,
                    app_kwargs=dict(middleware=[Middleware(Guard, page=page, token=token)]),
                )
            address = address_of(host, page.server_port, token)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
            print(f"{address} (Ctrl-C ends it)", flush=True)
            page.block_thread()
        finally:
            studio.stop.set()
            studio.thread.shutdown()
            gr.close_all(verbose=False)
            shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
