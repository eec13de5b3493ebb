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
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image

import evaluate
from accel import door, loading
from accel.command_line import OneLineParser, add_arguments, user_errors
from accel.door import opening
from accel.errors import UsageError, as_usage_error, path_errors, shown
from accel.families import families
from accel.flags import flag_names
from accel.latents.pixels import to_grid
from accel.precision import TIERS, alone, apply_precision, supports
from accel.progress import Stopwatch
from accel.request import GridRequest
from accel.settings import GridSettings
from accel.signals import ENDINGS
from scripts.page_guard import LOOPBACK, Guard

FOLDER = Path(tempfile.gettempdir(), f"dit-page-{secrets.token_hex(8)}")
if __name__ == "__main__":  # gradio and matplotlib look for their folders when they are imported
    os.environ |= dict(
        GRADIO_TEMP_DIR=f"{FOLDER}/served", MPLCONFIGDIR=f"{FOLDER}", TMPDIR=f"{FOLDER}"
    )
try:
    import gradio as gr
except ImportError:  # main says so
    gr = None

MOST = 8  # pictures
PREVIEWS = 6  # estimates during a run, an evaluation each
LEFT_OUT = "output", "output_type", "seed_list", "repeats", "batch_size", "eta"
NAMES = dict(
    labels="Classes",
    seed="Seed",
    num_sampling_steps="Steps",
    cfg_scale="Guidance",
    sampler="Sampler",
)
NAMES |= dict(guidance_interval="Guidance interval", precision="Arithmetic")
CSS = """.pixels :is(.image-frame, img) {
  width: 100%; max-height: 75vh; object-fit: contain !important
}
.pixels img {image-rendering: pixelated}"""


class Studio:
    """The models of a page, one thread that samples, and the network that was used last."""

    def __init__(self, request: GridRequest):
        shipped = [
            name for family in families() for name, implied in family.models.items() if implied.ckpt
        ]
        names = [request.model] if request.model or request.ckpt else shipped
        device = loading.choose_device(request.device)
        self.opened = [opening.open_weights(replace(request, model=name), device) for name in names]
        self.loaded = {}
        self.thread = ThreadPoolExecutor(1)
        self.stop = threading.Event()

    def sample(self, options: GridSettings, say: Callable, *values: object) -> tuple[str, str]:
        """Return the picture's file and the command that makes the same."""
        wanted = opening.reopen(options, **choose(*values))
        words = ["python", "sample.py"]
        for item in fields(GridRequest):
            value = getattr(wanted.request, item.name)
            if value != item.default and item.name != "class_names":  # the labels are numbers
                words += [
                    flag_names(item)[0],
                    *map(str, value if isinstance(value, tuple) else (value,)),
                ]
        return self.picture(wanted, "sample.png", say, PREVIEWS)[0], shlex.join(words)

    def compare(
        self, options: GridSettings, say: Callable, *values: object
    ) -> tuple[tuple[str, str], str, str]:
        """Return the files of two pictures, that of their difference, and evaluate.py's
        report in Markdown.
        """
        both = [
            opening.reopen(options, **choose(*values[:5], *last))
            for last in (values[5:8], values[8:])
        ]
        files, seconds = zip(
            *[self.picture(one, f"{number}.png", say) for number, one in enumerate(both)]
        )
        vgg = Path(torch.hub.get_dir(), "checkpoints", Path(evaluate.VGG16_URL).name)
        metrics = ["--vgg-weights", vgg] if vgg.exists() else ["--metrics", "mae", "psnr", "ssim"]
        heatmap = str(FOLDER / "difference.png")
        with redirect_stdout(io.StringIO()) as printed:
            evaluate.main([str(word) for word in (*files, *metrics, "--heatmap", heatmap)])
        report, _, verdict = printed.getvalue().strip().replace(files[1], "second").rpartition("\n")
        took = "Sampling took {:.2f} s and {:.2f} s.".format(*seconds)
        return files, heatmap, f"### {verdict}\n{took}\n```\n{report}\n```"

    @alone()
    def picture(
        self, options: GridSettings, name: str, say: Callable, previews: int = 0
    ) -> tuple[str, float]:
        """Write the picture of settings; return its file and the seconds of sampling."""
        say(f"Loading {options.model} in {options.tier} …", 0)
        if (key := (options.model, options.tier)) not in self.loaded:
            self.loaded.clear()
            loading.free_memory(options.device)
            self.loaded[key] = door.load(options), door.decoder_of(options)
        (run, decoder) = self.loaded[key]
        watch = Stopwatch(options.device)
        run = run._replace(process=door.process_of(options), guidance=door.guidance_of(options))
        apply_precision(run.tier, run.device)
        door.warm_up(options, run, watch)
        total = run.process.steps
        start = time.perf_counter()
        due = [total * number // (previews + 1) for number in range(previews, 0, -1)]

        def on_step(index, x):
            if x.is_cuda and index % 4 == 3:  # else the host runs ahead, and bar and stop are late
                torch.cuda.synchronize(x.device)
            done = index + 1
            preview = []
            if due and due[-1] <= done < total:  # <=: of few steps some have several
                due.pop()
                preview = [
                    Image.fromarray(
                        to_grid(decoder.decode(run.estimate(x, done, options.labels))).numpy()
                    )
                ]
            left = (time.perf_counter() - start) * (total - done) / done
            say(f"Step {done} of {total} · {left:.0f} s left", done / total, *preview)

        with watch.phase("sample"):
            latents = door.latents(options, run, on_step=on_step)
        door.save(options, path := str(FOLDER / name), latents, watch, decoder)
        return path, watch.seconds["sample"]

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
            if (mistake := as_usage_error(error)) is None:
                raise
            raise gr.Error(
                html.escape(mistake.by_flags(NAMES)), duration=None, print_exception=False
            ) from None
        finally:
            stop.set()


def choose(labels, seed, scale, low, high, sampler, steps, tier) -> dict:
    """Return fields of GridRequest from the fields of the page. Raises UsageError for too
    many pictures.
    """
    # The browser sends lists of strings, and numbers; other clients may send anything.
    if not isinstance(labels, list):
        raise UsageError(f"`labels={shown(repr(labels))}`: must be a list")
    if len(labels) > MOST:
        raise UsageError(
            f"`labels`: {len(labels)} pictures are too many for this page; choose up to {MOST}"
        )
    return dict(
        labels=tuple(labels) or None,
        seed=whole(seed) or 0,
        cfg_scale=scale,
        guidance_interval=(low, high),
        sampler=sampler,
        num_sampling_steps=whole(steps),
        precision=tier,
    )


def whole(value: object) -> object:
    """Return a whole number as an int, as a browser means it (1e25); other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def choices(options: GridSettings) -> tuple[list[str], list[str]]:
    """Return the samplers of the model's family, its default first, and the tiers of this
    device.
    """
    tiers = [tier for tier in TIERS if supports(tier, options.device)]
    return [*options.fit.family.samplers], tiers


def model_tab(studio: Studio, options: GridSettings) -> None:
    """Lay out the fields, buttons and outputs of a model."""
    samplers, tiers = choices(options)

    def chooser(sampler, tier):
        with gr.Row():
            name = gr.Dropdown(samplers, value=sampler, label="Sampler", min_width=200)
            steps = gr.Number(options.num_sampling_steps, label="Steps", precision=0, min_width=80)
            return [name, steps, gr.Dropdown(tiers, value=tier, label="Arithmetic", min_width=100)]

    def runner(name, work, inputs, *outputs):
        with gr.Row():
            start = gr.Button(name, variant="primary", scale=4)
            stop = gr.Button("Stop", min_width=80)
        status = gr.HTML(elem_classes="status")
        for output in outputs:
            output.render()
        run = partial(studio.serve, partial(work, options), shown := [status, *outputs])
        how = dict(
            show_progress="minimal",
            show_progress_on=status,
            concurrency_id="one",
            concurrency_limit=1,
            preprocess=False,  # its errors are tracebacks; GridRequest checks all values
        )
        begun = start.click(run, inputs, shown, trigger_mode="multiple", **how)  # also after a stop
        # Not by a function of the button: the run's last message may reach the browser
        # after its result.
        begun.failure(lambda: "Stopped.", None, status, queue=False)
        stop.click(None, cancels=begun)

    names = options.class_names or [f"class {number}" for number in range(options.num_classes)]
    classes = [(f"{name} · {number}", str(number)) for number, name in enumerate(names)]
    many = dict(value=[*map(str, options.labels[:2])], multiselect=True, max_choices=MOST)
    low, high = options.guidance_interval
    look = dict(format="png", interactive=False, elem_classes="pixels", render=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            shared = [
                gr.Dropdown(
                    classes,
                    label="Classes",
                    info=f"Up to {MOST}; type to search, by name or number.",
                    **many,
                ),
                gr.Number(options.seed, label="Seed", precision=0),
                gr.Slider(
                    1,
                    max(10, options.cfg_scale),
                    options.cfg_scale,
                    label="Guidance; 1 is none",
                    step=0.1,
                ),
                gr.Slider(0, 1, low, label="Guidance from noise level", step=0.05),
                gr.Slider(0, 1, high, label="to noise level; 1 is noise", step=0.05),
                *chooser(options.sampler, options.tier),
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
                other = chooser(options.sampler if len(tiers) > 1 else samplers[1], tiers[0])
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
    name = socket.gethostname() if host == "0.0.0.0" else host or LOOPBACK[0]
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _guard(page, token):
    from starlette.middleware import Middleware  # gradio brings it

    def inputs_of():
        return {index: len(function.inputs) for index, function in page.fns.items()}

    return Middleware(Guard, inputs_of=inputs_of, token=token)


def main() -> None:
    parser = OneLineParser(
        prog="page.py", description="A page for the browser: sample and compare pictures."
    )
    add_arguments(parser, leave_out=LEFT_OUT)
    parser.add_argument(
        "--port", type=int, help="of the address; default: the first free one from 7860 on"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="serve an address of this machine, or 0.0.0.0 for all, to whoever has the token "
        "that is then printed; default: this machine's own browser alone",
    )
    given = vars(parser.parse_args())
    port = given.pop("port")
    host = given.pop("host")
    with user_errors(parser):
        if host is not None:
            require_address(host)
        studio = Studio(GridRequest(**given))
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
                for opened in studio.opened:
                    with gr.Tab(opened.model):
                        model_tab(studio, opened)
            theme = gr.themes.Default(
                font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
            )
            how = dict(share=False, run_history=False, footer_links=[], quiet=True, max_file_size=1)
            how |= dict(server_name=host or LOOPBACK[0], server_port=port, theme=theme, css=CSS)
            token = secrets.token_urlsafe(16) if host else ""
            how["app_kwargs"] = dict(middleware=[_guard(page, token)])
            with path_errors("port", port, "choose another"):
                page.queue(max_size=16).launch(prevent_thread_lock=True, **how)
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
