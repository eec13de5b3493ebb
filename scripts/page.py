"""A page for the browser: sample pictures, compare two settings on the same noise. Needs `pip install -e .[page]`.

    python -m scripts.page                                       # the demo models, on whatever device there is
    python -m scripts.page --model DiT-XL/2 --image-size 512     # one model; flags as sample.py takes them

It is served to this machine only, to one visitor at a time. Its files lie in a temporary folder that goes with it.
"""

if not __package__:
    __import__("_as_module")

import html
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

FOLDER = tempfile.TemporaryDirectory(prefix="dit-page-")  # matplotlib and gradio make folders while they are imported
os.environ |= dict(GRADIO_TEMP_DIR=f"{FOLDER.name}/served", MPLCONFIGDIR=FOLDER.name, TMPDIR=FOLDER.name)
tempfile.tempdir = FOLDER.name

import torch

import evaluate
from accel.command_line import OneLineParser, add_arguments, user_errors
from accel.errors import UsageError, out_of_memory
from accel.request import GridRequest
from accel.settings import GridSettings
from scripts.page_studio import PLAN, PREVIEWS, Studio

try:
    import gradio as gr
except ImportError:  # main says so
    gr = None

LEFT_OUT = "output", "output_type", "seed_list", "repeats", "parallel", "decode", "batch_size", "eta", "tf32"
MOST = 8  # pictures at a time
FEW = {"ddim": 50, "dpm++": 20, "unipc": 20, "euler": 50, "heun": 25}  # steps that suit a sampler; others: 250
NAMES = dict(labels="Classes", seed="Seed", num_sampling_steps="Steps", cfg_scale="Guidance", sampler="Sampler")
NAMES |= dict(guidance_interval="Guidance interval", precision="Arithmetic")
QUIET = dict(queue=False, show_progress="hidden", api_visibility="private")
QUEUED = dict(concurrency_id="one", concurrency_limit=1, show_progress="minimal", api_visibility="private")
CSS = """
.pixels img {image-rendering: pixelated}
.pixels .image-frame, .pixels .image-frame img {width: 100%; max-height: 75vh; object-fit: contain !important}
.status {min-height: 3em}
.bar {height: 8px; border-radius: 4px; margin: 4px 0 10px !important}
.bar {background: linear-gradient(to right, var(--primary-500) var(--share), var(--border-color-primary) 0)}
.error {color: var(--error-text-color)}
"""


class Stopped(Exception):
    """The visitor pressed Stop, or left."""


class Desk:
    """One thread that samples, for one visitor at a time."""

    def __init__(self):
        self.thread, self.stops = ThreadPoolExecutor(1), {}  # a session → the Event that stops it

    def stop(self, request: "gr.Request") -> None:
        """Stop the visitor's run, if there is one."""
        if request.session_hash in self.stops:
            self.stops[request.session_hash].set()

    def enter(self, request: "gr.Request") -> None:
        """Join the queue. A run of the same visitor makes way."""
        self.stop(request)
        self.stops[request.session_hash] = threading.Event()

    def run(self, session: str, outputs: int, work: Callable, *values) -> Iterator[list]:
        """Values of (status, outputs), as they come, of work(say, *values)."""
        news, cleared = SimpleQueue(), [None] * outputs
        stop = self.stops.setdefault(session, threading.Event())

        def say(text, share, picture=None):
            if stop.is_set():
                raise Stopped
            if picture or round(share * 1000) % 20 == 0:  # up to 50 times
                status = f'<div class="bar" style="--share: {share:.0%}"></div>{text}'
                news.put([status, picture or gr.skip(), *[gr.skip()] * (outputs - 1)])

        job = self.thread.submit(work, say, *values)
        job.add_done_callback(lambda _: news.put(None))
        try:
            yield ["", *cleared]
            yield from iter(news.get, None)
            yield ["Done.", *job.result()]
        except Stopped:
            yield ["Stopped.", *cleared]
        except Exception as error:
            mistake = error if isinstance(error, UsageError) else out_of_memory(error)
            if mistake is None:
                raise
            yield [f'<span class="error">{html.escape(mistake.by_flags(NAMES))}</span>', *cleared]
        finally:
            stop.set()
            if self.stops.get(session) is stop:
                del self.stops[session]


def buttons(desk: Desk, work: Callable, inputs: list, *outputs) -> None:
    """A button that does the work, one that stops it, a line that says how far it is, and the outputs."""

    def run(request: gr.Request, *values):
        yield from desk.run(request.session_hash, len(outputs), work, *values)

    with gr.Row():
        start, stop = gr.Button(work.__name__.title(), variant="primary", scale=4), gr.Button("Stop", min_width=80)
    status = gr.HTML(elem_classes="status")
    for one in outputs:
        one.render()
    entered = start.click(desk.enter, **QUIET)
    entered.then(run, inputs, [status, *outputs], show_progress_on=status, trigger_mode="multiple", **QUEUED)
    stop.click(desk.stop, **QUIET)


def model_tab(desk: Desk, studio: Studio, options: GridSettings) -> None:
    """All that is chosen and made of a model."""
    samplers, tiers = studio.choices(options)

    def settings(labels, seed, scale, low, high, sampler, steps, tier):
        if len(labels) > MOST:
            raise UsageError(f"`labels`: {len(labels)} pictures are too many for this page; choose up to {MOST}")
        how = dict(sampler="ddpm", forecast="plan") if sampler == PLAN else dict(sampler=sampler, forecast="off")
        what = dict(model=options.request.model, labels=tuple(labels), seed=seed or 0, num_sampling_steps=steps or 0)
        return dict(**what, **how, cfg_scale=float(scale), guidance_interval=(low, high), precision=tier)

    def sample(say, *values):
        chosen = settings(*values)
        path, _ = studio.sample(options, chosen, "sample.png", say, PREVIEWS)
        return path, path, studio.command(chosen)

    def compare(say, *values):
        both = settings(*values[:8]), settings(*values[:5], *values[8:])
        return studio.compare(options, both, say)

    def chooser(sampler, steps, tier, title=""):
        with gr.Row():
            name = gr.Dropdown(samplers, value=sampler, label=f"{title}Sampler", min_width=150)
            number = gr.Number(steps, label="Steps", precision=0, min_width=80)
            name.input(lambda name: FEW.get(name, 250), name, number, **QUIET)
            return [name, number, gr.Dropdown(tiers, value=tier, label="Arithmetic", min_width=100)]

    first = [PLAN if options.forecast == "plan" else options.sampler, options.num_sampling_steps, options.tier]
    other = PLAN if PLAN in samplers else samplers[-1]
    second = [*first[:2], tiers[0]] if len(tiers) > 1 else [other, FEW.get(other, 250), options.tier]
    shown = dict(format="png", buttons=["fullscreen"], render=False, interactive=False, elem_classes="pixels")
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            shared = subject(options)
        with gr.Column(scale=5):
            with gr.Tab("Sample"):
                line = gr.Textbox(label="The same picture by a command, to the bit", buttons=["copy"], render=False)
                outputs = gr.Image(label="Picture", **shown), gr.DownloadButton("Save PNG", render=False), line
                buttons(desk, sample, shared + chooser(*first), *outputs)
            with gr.Tab("Compare"):
                slider = gr.ImageSlider(label="First on the left, second on the right", **shown)
                outputs = slider, gr.Image(label="Difference", **shown), gr.Markdown(render=False)
                inputs = chooser(*first, "First: ") + chooser(*second, "Second: ")
                buttons(desk, compare, shared + inputs, *outputs)


def subject(options: GridSettings) -> list:
    """What is chosen for both, Sample and Compare."""
    names = options.class_names or [f"class {number}" for number in range(min(options.num_classes, 1000))]
    choices = [(f"{name} · {number}", str(number)) for number, name in enumerate(names)]
    info = f"A picture each, up to {MOST}. Type to search, by name or number."
    many = dict(multiselect=True, max_choices=MOST, allow_custom_value=True, label="Classes", info=info)
    labels = gr.Dropdown(choices, value=[*map(str, options.labels[:2])], **many)
    seed = gr.Number(options.seed, label="Seed", precision=0, info="The same seed gives the same noise.")
    info, scale = "How strongly a picture follows its class; 1 is none.", options.cfg_scale
    scale = gr.Slider(1, max(10, scale), scale, label="Guidance", info=info, step=0.1)
    with gr.Accordion("Guidance interval", open=False):
        gr.Markdown("Noise levels at which guidance acts, from 0 at the picture to 1 at noise.")
        ends = zip(("From", "To"), options.guidance_interval)
        return [labels, seed, scale, *[gr.Slider(0, 1, level, label=label, step=0.05) for label, level in ends]]


def main() -> None:
    parser = OneLineParser(prog="page.py", description="A page for the browser: sample and compare pictures.")
    add_arguments(parser, leave_out=LEFT_OUT)
    parser.add_argument("--port", type=int, help="of 127.0.0.1; default: the first free one from 7860 on")
    hub = Path(torch.hub.get_dir(), "checkpoints", Path(evaluate.VGG16_URL).name)
    parser.add_argument("--vgg-weights", type=Path, default=hub, help="VGG16, for LPIPS; default: torch's hub cache")
    args = parser.parse_args()
    with user_errors(parser), FOLDER as folder:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the folder would stay
        given = {name: value for name, value in vars(args).items() if getattr(GridRequest, name, value) != value}
        desk, studio = Desk(), Studio(given, Path(folder), args.vgg_weights)
        if gr is None:
            raise UsageError("gradio is missing; install it with pip install -e .[page]")
        with gr.Blocks(title="DiT, sampled faster", analytics_enabled=False, delete_cache=(600, 3600)) as page:
            gr.Markdown("# DiT, sampled faster")
            for opened in studio.opened:
                with gr.Tab(opened.model):
                    model_tab(desk, studio, opened)
            page.unload(desk.stop)
        theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
        how = dict(share=False, ssr_mode=False, run_history=False, enable_monitoring=False, footer_links=[], quiet=True)
        how |= dict(server_name="127.0.0.1", server_port=args.port, max_file_size=1, theme=theme, css=CSS)
        try:
            _, address, _ = page.queue(max_size=16).launch(prevent_thread_lock=True, **how)
        except OSError as error:
            raise UsageError(f"`port={args.port}`: {error}") from None
        print(f"{address} (Ctrl-C ends it)")
        page.block_thread()
        for stop in desk.stops.values():
            stop.set()


if __name__ == "__main__":
    main()
