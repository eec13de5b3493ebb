"""A page for the browser that samples pictures and compares two settings on the same noise. Needs
`pip install -e '.[page]'`.

    python scripts/page.py                                      # the demo models
    python scripts/page.py --model DiT-XL/2 --image-size 512    # one model, by sample.py's flags

It serves only this machine unless --host is given, and samples for one visitor at a time; the
others wait in a queue. Its temporary folder is removed at the end. page/ has its texts, a file per
language, and its style.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import base64
import html
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

import evaluate
from accel.cli import OneLineParser, add_arguments, user_errors
from accel.config import rules
from accel.config.options import FILES_AND_LOGS, MODEL, OPTIONS, Options
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
SERVED = FOLDER / "served"
if __name__ == "__main__":  # gradio and matplotlib look for their folders when they are imported
    os.environ |= dict(GRADIO_TEMP_DIR=f"{SERVED}", MPLCONFIGDIR=f"{FOLDER}", TMPDIR=f"{FOLDER}")
try:
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response

    ON, OFF = gr.Button(interactive=True), gr.Button(interactive=False)
except ImportError:  # main raises the error
    gr = None

LOOPBACK = "127.0.0.1"
MAX_PICTURES = 8
MAX_VISITORS = 16  # in the queue
PREVIEWS = 6  # predictions of the result during a run, with one evaluation each
THRESHOLDS = evaluate.GATES["close"]
SIDES = "left", "right"  # of a comparison
STEPS = 50  # by default
WHITE = 32  # levels of the difference that the map shows as white
NOISY_SAMPLERS = "ddpm", "sde"  # they draw noise in every step: fewer steps change the picture
DATA = Path(__file__).with_suffix("")
TEXTS = [json.loads((DATA / f"{name}.json").read_text("utf-8")) for name in ("en", "zh")]
RUNNING = "() => [false, true].map(on => ({__type__: 'update', interactive: on}))"
COMPARISON = Template((DATA / "comparison.html").read_text("utf-8"))


def changed(run: Run, **options: object) -> Run:
    """Return the run of other options on the same files. Raises UsageError."""
    return open_run(
        run.request.changed(**options), run.device, run.checkpoint, run.guide, run.space
    )


def command(run: Run) -> str:
    """Return the command that makes the picture of a run."""
    words = ["python", "sample.py"]
    for name, value in run.request.options.items():
        if name != "class_names":  # labels are given by number
            values = value if isinstance(value, tuple) else (value,)
            words += [OPTIONS[name].flag_names()[0], *map(str, values)]
    return shlex.join(words)


class Studio:
    """The models of a page as runs, a thread that samples, and the last pipeline."""

    def __init__(self, options: Options):
        options = Options(num_sampling_steps=STEPS).changed(**options)
        names = [options.get("model")]
        if not {"model", "ckpt", "config"} & options.keys():
            names = [name for family in families() for name in family.shipped]
        device = choose_device(options.get("device"))
        self.runs = [
            open_run(rules.Request.open(options.changed(model=name)), device) for name in names
        ]
        self.loaded = {}  # (model, tier, guide) → pipeline
        self.thread = ThreadPoolExecutor(1)
        self.queue = []  # the jobs of visitors, in the order of their start
        self.closing = threading.Event()

    def sample(
        self, run: Run, texts: dict, say: Callable, labels: list, repeats: int, *values: object
    ) -> tuple:
        """Return the picture and the command that makes the same picture."""
        labels = [each for each in labels for _ in range(repeats)]
        if len(labels) > MAX_PICTURES:
            raise UsageError(texts["too_many"].format(len(labels), MAX_PICTURES))
        wanted = changed(run, **choose(labels, *values))
        path = SERVED / secrets.token_hex(8) / "sample.png"
        self.picture(wanted, path, texts, say, PREVIEWS)
        return gr.Image(str(path), label=texts["picture"]), command(wanted)

    def compare(
        self, run: Run, texts: dict, say: Callable, label: str, seed: int, *values: object
    ) -> tuple[str]:
        """Return two pictures from the same noise, their difference and evaluate.py's verdict as
        HTML.
        """
        halves, guidance = (values[:3], values[3:6]), values[6:]
        runs = [
            changed(run, **choose([label], seed, steps, *guidance, *solver))
            for steps, *solver in halves
        ]
        words = [
            (texts["steps"].format(each.num_sampling_steps), each.sampler, each.precision)
            for each in (wanted.settings for wanted in runs)
        ]
        names = {}
        for side, wanted, own, others in zip(SIDES, runs, words, words[::-1]):
            texts_of_half = texts | {"step": f"{texts[side]} · {texts['step']}"}
            seconds = self.picture(wanted, FOLDER / f"{side}.png", texts_of_half, say)
            differing = ", ".join(word for word, other in zip(own, others) if word != other)
            names[f"{side}_name"] = texts["took"].format(differing or texts["same"], seconds)
        left, right = [read_picture(FOLDER / f"{side}.png").pixels for side in SIDES]
        difference = np.abs(left.astype(np.int16) - right).max(2)  # (H, W) in levels
        shades = np.minimum(difference * 255 // WHITE, 255).astype(np.uint8)
        Image.fromarray(shades).save(FOLDER / "map.png")
        pictures = {
            name: "data:image/png;base64,"
            + base64.b64encode((FOLDER / f"{name}.png").read_bytes()).decode()
            for name in (*SIDES, "map")
        }
        vgg = Path(torch.hub.get_dir(), "checkpoints", Path(evaluate.VGG16_URL).name)
        metrics, _ = evaluate.measure(left, right, evaluate.Lpips(vgg) if vgg.exists() else None)
        results = evaluate.judge(metrics, THRESHOLDS)
        verdict = evaluate.overall(results.values())
        items = [
            f'<li class="{results[name]}">{texts[name].format(value, THRESHOLDS[name])}'
            for name, value in metrics.items()
        ]
        return (
            COMPARISON.substitute(
                texts | names | pictures,
                verdict=verdict,
                sentence=texts[verdict],
                metrics="".join(items),
                largest=texts["largest"].format(difference.max()),
            ),
        )

    @exclusive()
    def picture(self, run: Run, path: Path, texts: dict, say: Callable, previews: int = 0) -> float:
        """Write the picture of a run. Return the seconds of sampling."""
        say(texts["loading"].format(run.settings.model, run.settings.precision), 0)
        pipeline = self.pipeline_of(run)
        watch = Stopwatch(pipeline.device)
        warm_up(run, pipeline, watch)
        total = pipeline.process.steps
        start = time.perf_counter()
        due = {total * number // (previews + 1) for number in range(1, previews + 1)}

        def on_step(index, x):
            if x.is_cuda and index % 4 == 3:  # limits how far the host runs ahead
                torch.cuda.synchronize(x.device)
            done = index + 1
            preview = ()
            if done in due:
                pixels = pipeline.decode(pipeline.estimate(x, done, run.settings.labels))
                label = texts["preview"].format(done, total)
                preview = gr.Image(Image.fromarray(to_grid(pixels).numpy()), label=label), ""
            left = (time.perf_counter() - start) * (total - done) / done
            say(texts["step"].format(done, total, left), done / total, *preview)

        with watch.phase("sample"):
            latents = pipeline.latents(run.settings.labels, run.settings.seed, on_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(run, str(path), latents, watch, pipeline.decoder)
        return watch.seconds["sample"]

    def pipeline_of(self, run: Run) -> Pipeline:
        """Return the pipeline of a run. The network is loaded unless it is the last one."""
        key = run.settings.model, run.settings.precision, run.settings.guide
        if key not in self.loaded:
            self.loaded.clear()
            free_memory(run.device)
            self.loaded[key] = Pipeline.load(run, keep_guide=True)
        return replace(self.loaded[key], process=run.process, guidance=run.guidance)

    def serve(self, work: Callable, texts: dict, outputs: list, *values: object) -> Iterator[dict]:
        """Run work(say, *values) in the thread. Yield updates of `outputs`: the status and the
        buttons Start and Stop, previews while it runs, then its results.

        say(text, fraction done, *previews) raises CancelledError after this generator was closed,
        by Stop or by a visitor who left. An error leaves the results of the run before.
        """
        status, start, stop, *results = outputs
        gone = threading.Event()
        began = time.perf_counter()
        updates = {status: "", start: OFF, stop: ON}

        def say(text, share, *previews):
            if gone.is_set() or self.closing.is_set():
                raise CancelledError
            updates[status] = f'<progress value="{share}"></progress><br>{text}'
            updates.update(zip(results, previews))

        job = self.thread.submit(work, say, *values)
        self.queue.append(job)
        try:
            while not wait([job], 0.1).done:
                if before := self.queue.index(job):
                    updates[status] = texts["waiting"].format(before)
                if updates:
                    yield {output: updates.pop(output) for output in [*updates]}
            done = texts["done"].format(time.perf_counter() - began)
            updates |= dict(zip(results, job.result())) | {status: f'<p role="status">{done}</p>'}
        except CancelledError:  # the page is closing
            return
        except Exception as error:
            mistake = as_usage_error(error)
            if mistake is None:
                raise  # gradio prints the traceback
            line = html.escape(mistake.by_flags(texts))
            updates = {status: f'<p role="alert" class="wrong">{line}</p>'}
        finally:
            gone.set()
            self.queue.remove(job)
        yield updates | {start: ON, stop: OFF}


def choose(labels, seed, steps, scale, low, high, sampler, tier) -> dict:
    """Return options from the fields of the page. An empty number changes nothing."""
    return dict(
        labels=labels,
        seed=seed,
        cfg_scale=scale,
        guidance_interval=(low, high),
        sampler=sampler,
        num_sampling_steps=steps,
        precision=tier,
    )


def choices(run: Run) -> tuple[list[str], list[str]]:
    """Return the samplers of the model's family, the default first, and the device's tiers."""
    tiers = [tier for tier in TIERS if supports(tier, run.device)]
    return [*run.spec.family.samplers], tiers


def default_comparison(run: Run) -> tuple[tuple, tuple]:
    """Return the default steps, sampler and tier of both halves: another tier and the default one,
    or on a device with one tier twice the steps and the steps.
    """
    samplers, tiers = choices(run)
    settings = run.settings
    steps = settings.num_sampling_steps
    for tier in tiers:
        if tier != settings.precision:
            return (steps, settings.sampler, tier), (steps, settings.sampler, settings.precision)
    names = settings.sampler, *samplers
    sampler = next(name for name in names if name not in NOISY_SAMPLERS)
    return (min(2 * steps, 1000), sampler, tier), (steps, sampler, tier)


def model_tab(studio: Studio, run: Run, texts: dict) -> None:
    """Lay out the fields, buttons and outputs of a model."""
    samplers, tiers = choices(run)
    settings = run.settings
    names = settings.class_names or map(texts["class"].format, range(settings.num_classes))
    classes = [(f"{name} · {number}", str(number)) for number, name in enumerate(names)]
    class_field = partial(gr.Dropdown, classes, info=texts["labels_info"])
    steps_field = partial(gr.Number, label=texts["num_sampling_steps"], precision=0, min_width=80)
    guide = Path(settings.guide or "").name

    def seed_field():
        dice = gr.Button(texts["dice"], size="sm")
        seed = gr.Number(settings.seed, label=texts["seed"], precision=0, buttons=[dice])
        dice.click(lambda: secrets.randbelow(2**32), None, seed, queue=False)
        return seed

    def solver_fields(sampler, tier):
        return [
            gr.Dropdown(samplers, value=sampler, label=texts["sampler"], min_width=105),
            gr.Dropdown(tiers, value=tier, label=texts["precision"], min_width=105),
        ]

    def guidance_fields():
        low, high = settings.guidance_interval
        rows = (
            ("autoguidance" if guide else "cfg_scale", 1, settings.cfg_scale, 0.01),
            ("low", 0, low, 0.05),
            ("high", 0, high, 0.05),
        )
        return [
            gr.Slider(
                least,
                1 if least == 0 else max(10, value),
                value,
                label=texts[name].format(guide),
                info=texts[f"{name}_info"],
                step=step,
            )
            for name, least, value, step in rows
        ]

    def runner(name, work, inputs, *outputs):
        with gr.Row():
            start = gr.Button(texts[name], variant="primary", scale=4)
            stop = gr.Button(texts["stop"], min_width=80, interactive=False)
        changing = [gr.HTML(texts[f"{name}_info"], elem_classes="status"), start, stop, *outputs]
        for output in outputs:
            output.render()
        start.click(None, None, [start, stop], js=RUNNING)
        begun = start.click(
            partial(studio.serve, partial(work, run, texts), texts, changing),
            inputs,
            changing,
            trigger_mode="multiple",  # also after a stop
            show_progress="hidden",
            concurrency_limit=MAX_VISITORS,
            preprocess=False,  # Options checks the values, without tracebacks
        )
        # The button does not set the status: the run's last message may arrive after it.
        begun.failure(lambda: (texts["stopped"], ON, OFF), None, changing[:3], queue=False)
        stop.click(None, cancels=begun)

    with gr.Tab(texts["sample"]), gr.Row(elem_classes="workbench"):
        with gr.Column(scale=1, min_width=320):
            fields = [
                class_field(
                    value=[str(label) for label in settings.labels[:2]],
                    label=texts["labels"],
                    multiselect=True,
                    max_choices=MAX_PICTURES,
                ),
                gr.Dropdown([*range(1, MAX_PICTURES + 1)], value=1, label=texts["repeats"]),
                seed_field(),
                steps_field(settings.num_sampling_steps),
            ]
            with gr.Accordion(texts["more"], open=False):
                fields += guidance_fields()
                with gr.Row():
                    fields += solver_fields(settings.sampler, settings.precision)
        with gr.Column(scale=2, min_width=320):
            has_example = settings.origins.get("ckpt") == MODEL  # the weights are shipped
            picture = gr.Image(
                DATA / f"{settings.model.replace('/', '-')}.png" if has_example else None,
                label=texts["example" if has_example else "picture"],
                buttons=["download", "fullscreen"],
                format="png",
                interactive=False,
                elem_classes="pixels",
                render=False,
            )
            words = gr.Textbox(label=texts["command"], buttons=["copy"], render=False)
            runner("sample", studio.sample, fields, picture, words)
    with gr.Tab(texts["compare"]), gr.Row(elem_classes="workbench"):
        with gr.Column(scale=1, min_width=320):
            fields = [
                class_field(value=str(settings.labels[0]), label=texts["label"]),
                seed_field(),
            ]
            for side, (steps, *solver) in zip(SIDES, default_comparison(run)):
                gr.Markdown(f"**{texts[side]}**")
                with gr.Row():
                    fields += [steps_field(steps), *solver_fields(*solver)]
            with gr.Accordion(texts["more"], open=False):
                fields += guidance_fields()
        with gr.Column(scale=2, min_width=320):
            runner("compare", studio.compare, fields, gr.HTML(render=False))


async def guard(request: "Request", call_next: Callable) -> "Response":
    """Answer 403 to a request that a page of another site sends through a visitor's browser. Lead
    a browser that prefers Chinese to the Chinese page.
    """
    origin = request.headers.get("origin")
    same_host = origin and urlsplit(origin).netloc == request.headers.get("host")
    # The browser's own statement holds also behind a proxy that changes the host.
    same_origin = request.headers.get("sec-fetch-site") == "same-origin"
    if origin and not (same_host or same_origin):
        return PlainTextResponse(f"{origin} is another site, and may not use this page\n", 403)
    chinese = request.headers.get("accept-language", "").startswith("zh")
    if request.url.path == "/" and chinese and not same_origin:  # same_origin: the page's switch
        return RedirectResponse("zh")
    return await call_next(request)


def main() -> None:
    parser = OneLineParser(
        prog="page.py", description="A page for the browser: sample and compare pictures."
    )
    printed = set()  # notices: each run opens its request again
    logging.getLogger("accel").handlers[0].addFilter(
        lambda record: not (str(record.msg) in printed or printed.add(str(record.msg)))
    )
    add_arguments(parser, exclude=(*FILES_AND_LOGS, "grids", "batch_size", "eta"))
    parser.add_argument(
        "--port", type=int, help="of the address; default: the first free one from 7860 on"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="serve an address of this machine, or 0.0.0.0 for all, to whoever has the password "
        "that is then printed; default: only this machine's browser",
    )
    options = vars(parser.parse_args())
    port, host = options.pop("port"), options.pop("host")
    with user_errors(parser):
        if port is not None and not 1 <= port <= 65535:
            raise UsageError("must be from 1 to 65535", parameter="port", value=port)
        remedy = "give an address of this machine, or 0.0.0.0"
        with path_errors("host", host, remedy), socket.socket() as probe:
            probe.bind((host or LOOPBACK, 0))
        studio = Studio(Options(**options))
        if gr is None:
            raise UsageError("gradio is missing; install it with pip install -e '.[page]'")
        FOLDER.mkdir(mode=0o700)
        try:
            serve_page(studio, host, port)
        finally:
            studio.closing.set()
            studio.thread.shutdown()
            gr.close_all(verbose=False)
            shutil.rmtree(FOLDER, ignore_errors=True)


def serve_page(studio: Studio, host: str | None, port: int | None) -> None:
    """Serve the page until a signal ends it. host: with a password; None: to this machine."""
    page = gr.Blocks(title=TEXTS[0]["title"], analytics_enabled=False, delete_cache=(600, 3600))
    for texts in TEXTS:
        with page.route(texts["language"], texts["path"]) if texts["path"] else page:
            gr.Navbar(main_page_name=TEXTS[0]["language"])
            gr.Markdown(f"# {texts['title']}\n\n{texts['intro']}")
            for run in studio.runs:
                with gr.Tab(run.settings.model):
                    model_tab(studio, run, texts)
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    guards = [Middleware(BaseHTTPMiddleware, dispatch=guard)]
    password = secrets.token_urlsafe(16)
    if not host:  # a foreign DNS name that points to this machine is refused
        guards.append(Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"]))
    with path_errors("port", port, "choose another"):
        page.queue(max_size=MAX_VISITORS, api_open=False).launch(
            prevent_thread_lock=True,
            share=False,
            run_history=False,
            footer_links=[],
            quiet=True,
            max_file_size=1,
            server_name=host or LOOPBACK,
            server_port=port,
            auth=("dit", password) if host else None,
            theme=theme,
            css_paths=[DATA / "page.css"],
            app_kwargs=dict(middleware=guards),
        )
    name = socket.gethostname() if host == "0.0.0.0" else host or LOOPBACK
    login = f" with user dit, password {password}" if host else " on this machine"
    print(
        f"Open http://{name}:{page.server_port}/ in a browser{login}. Ctrl-C ends the page.",
        flush=True,
    )
    page.block_thread()


if __name__ == "__main__":
    main()
