"""The page: real Chromium on a CPU with the demo models. What is offered, and the
estimate on the way, without it.
"""

import http.client
import json
import re
import shlex
import signal
import socket
import time
import urllib.request
from importlib.util import find_spec
from urllib.parse import urlencode

import forks
import pytest
import torch
from browser import Browser, find
from conftest import ROOT
from jobs import Command
from test_guide_files import write_jit, write_rae

from accel.config.options import Options
from accel.launch import ENDINGS
from accel.pipeline import Pipeline
from accel.runtime.precision import exclusive
from scripts.page import Studio, choices

in_browser = pytest.mark.skipif(
    not (find() and find_spec("gradio")),
    reason="needs Chromium (Debian: apt-get install chromium) and gradio",
)


# ---- without a browser ----


@pytest.fixture(scope="module")
def studio():
    return Studio(Options(device="cpu"))


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--port=80000", "--port: 80000: must be from 1 to 65535"),
        ("--port=x", "--port: x: must be from 1 to 65535"),
        ("--host=8.8.8.8", "--host 8.8.8.8: Cannot assign requested address; give an address"),
        ("--host=nosuch.invalid", "--host nosuch.invalid: "),
    ],
)
def test_what_is_no_port_or_address_is_a_line(flag, words, here):
    assert words in forks.refused(here("scripts/page.py", flag))


def test_a_family_offers_what_it_has_and_no_more(studio):
    offered = {model.run.settings.model: choices(model.run) for model in studio.models}
    assert offered["DiT-Demo/2"] == (["ddpm", "ddim", "dpm++", "unipc"], ["fp32"])
    assert offered["Large-DiT-Demo/2"] == offered["DiT-Demo/2"]
    assert offered["SiT-Demo/2"] == (["sde", "euler", "heun"], ["fp32"])


@pytest.mark.parametrize(
    "number, sampler, steps",
    [(0, "ddpm", 9), (0, "ddim", 9), (1, "ddpm", 5), (2, "euler", 7), (2, "heun", 5)],
)
def test_before_the_last_step_the_estimate_is_the_result(studio, number, sampler, steps):
    """The last step of these samplers goes to x* itself."""
    labels = (1, 5)
    model = studio.models[number].changed(
        labels=labels,
        sampler=sampler,
        num_sampling_steps=steps,
        precision="fp32",
        guidance_interval=(0.05, 1),
    )
    seen = {}
    with exclusive():
        pipeline = Pipeline.load(model.run)
        latents = pipeline.latents(
            labels, 0, on_step=lambda index, x: seen.update({index + 1: x.clone()})
        )
    before = pipeline.estimate(seen[steps - 1], steps - 1, labels)
    torch.testing.assert_close(before, latents, atol=1e-4, rtol=1e-3)
    half = steps // 2
    nearer = pipeline.estimate(seen[half], half, labels) - latents
    assert nearer.square().mean() < (seen[half] - latents).square().mean()


def test_missing_gradio_is_a_line(tmp_path, here):
    (tmp_path / "gradio.py").write_text("raise ImportError")
    done = forks.run(["scripts/page.py", "--device", "cpu"], PYTHONPATH=str(tmp_path))
    assert forks.refused(done).endswith("install it with pip install -e '.[page]'\n")
    assert "page.py: --sampler euler: is not for a DiT" in forks.refused(
        here("scripts/page.py", "--sampler", "euler")
    )


# ---- in the browser ----


class Visitor(Browser):
    """A browser at the page. Fields and buttons are those that can be seen."""

    def __init__(self, address):
        super().__init__()
        self.open(address, 1300)
        self.until(lambda: self.ask("!!document.querySelector('button.primary')"))

    def seen(self, selector):
        return f"[...document.querySelectorAll('{selector}')].filter(e => e.offsetParent)"

    def until(self, found):
        """What found() returns, once it is something."""
        return forks.until(found, 120, self.status, pause=0.05)

    def press(self, text, kind="button.lg"):
        self.ask(f"{self.seen(kind)}.find(e => e.innerText.trim() === '{text}').click()")

    def fill(self, label, value):
        """Type into a field."""
        inputs = (
            f"({self.seen('input[type=number]')}.find(e => (e.ariaLabel || '').includes('{label}'))"
            f" || {self.seen('label')}.find(e => e.innerText.startsWith('{label}'))"
            ".querySelector('input'))"
        )
        self.ask(f"{inputs}.focus(), {inputs}.select(), true")
        self.call("Input.insertText", text=str(value))
        self.ask("document.activeElement.blur()")

    def status(self):
        """The status, or the newest toast of a mistake."""
        return (
            self.ask(
                f"({self.seen('.toast-body')}.pop() || {self.seen('.status')}[0] || {{}}).innerText"
            )
            or ""
        )

    def wait_for(self, words):
        """What the status says of `words`, a regular expression."""
        return self.until(lambda: re.search(words, self.status()))[0]

    def picture(self):
        return self.ask(f"({self.seen('.pixels img')}[0] || {{}}).src")


def environment(home):
    """An empty home and folder for temporary files, one thread, no GPU."""
    places = {"HOME": home / "home", "TMPDIR": home / "tmp"}
    for place in places.values():
        place.mkdir()
    return {name: str(place) for name, place in places.items()} | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def served(home, *flags):
    """The page, in a process of its own, and its address."""
    words = "scripts/page.py", "--port", forks.free_port(), *flags
    process = forks.Fork(words, **environment(home))
    process.wait_for("Ctrl-C")
    return process, re.search(r"http://\S+/", process.text()[0])[0]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    process, address = served(
        tmp_path_factory.mktemp("page"), "--num-sampling-steps", "12", "--labels", "sea", "ball"
    )
    yield address
    process.kill()


@pytest.fixture
def visitor(address):
    with Visitor(address) as visitor:
        yield visitor
        assert all(
            url.startswith((address, "data:", "blob:", "about:")) for url in visitor.requested
        )
        # a stream that ended
        errors = [one for one in visitor.problems if one.get("errorText") != "net::ERR_ABORTED"]
        assert errors == []


@in_browser
def test_a_picture_is_that_of_the_command_to_the_bit(visitor, run, tmp_path):
    visitor.ask(f"{visitor.seen('input[aria-label=Classes]')}[0].focus()")
    visitor.call("Input.insertText", text="mushr")
    visitor.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
    )
    pictures = set()
    visitor.press("Sample")
    while visitor.status() != "Done.":
        pictures.add(visitor.picture())
    line = visitor.ask(f"{visitor.seen('textarea')}[0].value")
    for flags in "--num-sampling-steps 12", "--precision fp32", "--labels 5 3 7":
        assert flags in line
    words = shlex.split(line)
    assert run(ROOT / words[1], *words[2:], cwd=tmp_path, OMP_NUM_THREADS="1").returncode == 0
    made = (tmp_path / "sample.png").read_bytes()
    assert urllib.request.urlopen(visitor.picture()).read() == made
    visitor.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    visitor.ask(
        f"{visitor.seen('.pixels [aria-label=Download], .pixels [title=Download]')}[0].click()"
    )
    saved = visitor.until(lambda: list(tmp_path.glob("saved/*.png")))
    assert [path.read_bytes() for path in saved] == [made]
    assert len(pictures - {None, visitor.picture()}) >= 2  # estimates on the way
    look = (
        "(e => [e.offsetWidth > 600, getComputedStyle(e).objectFit, "
        "getComputedStyle(e).imageRendering])"
    )
    assert visitor.ask(f"{look}({visitor.seen('.pixels img')}[0])") == [
        True,
        "contain",
        "pixelated",
    ]


@pytest.fixture(params=("JiT", "RAE"))
def guided(request, tmp_path):
    """Flags of a network with a guide."""
    if request.param == "RAE":
        return ["--config", write_rae(tmp_path)()]
    guide = write_jit(tmp_path)()
    return ["--ckpt", tmp_path / "jit.pth", "--guide", guide]


@in_browser
def test_a_network_and_its_guide_make_the_commands_picture(guided, tmp_path, here):
    """The field of the scale names the guide; at 1 another picture is made."""
    (tmp_path / "served").mkdir()
    process, address = served(tmp_path / "served", *guided, "--device", "cpu")
    try:
        with Visitor(address) as visitor:
            made = []
            for scale in (None, 1):
                if scale is not None:
                    visitor.fill("Autoguidance by", scale)
                before = visitor.picture()
                visitor.press("Sample")
                visitor.until(lambda before=before: visitor.picture() not in (None, before))
                assert visitor.wait_for("Done|must") == "Done"
                line = visitor.ask(f"{visitor.seen('textarea')}[0].value")
                words = [*shlex.split(line)[2:], "--output", tmp_path / "command.png"]
                assert {"--guide", "--config"} & {*words}
                forks.succeeds(here("sample.py", *words))
                made.append(urllib.request.urlopen(visitor.picture()).read())
                assert made[-1] == (tmp_path / "command.png").read_bytes()
            assert made[0] != made[1]
            text = visitor.ask("document.body.innerText")
            assert re.search(r"Autoguidance by (small.pth|g.pt); 1 is none", text)
    finally:
        process.kill()


@in_browser
def test_a_newcomers_comparison_passes(tmp_path):
    """Nothing is chosen: on a CPU, which has one tier, a number of steps and its half."""
    process, address = served(tmp_path, "--model", "DiT-Demo/2", "--labels", "sea")
    try:
        with Visitor(address) as visitor:
            visitor.press("Compare", "button[role=tab]")
            visitor.press("Compare")
            for name in ("First", "Second"):
                visitor.wait_for(rf"{name} of two\. Step \d+ of \d+")
            assert visitor.wait_for("Done|Error") == "Done"
            text = visitor.ask("document.body.innerText")
            sizes = visitor.ask(f"{visitor.seen('.prose p')}.map(e => e.offsetHeight)")
            pictures = visitor.ask(f"{visitor.seen('.pixels img')}.map(e => e.src)")
    finally:
        process.kill()
    assert re.search(r"First: ddim, 250 steps, fp32; took [\d.]+ s\s", text)
    assert re.search(r"Second: ddim, 125 steps, fp32; took [\d.]+ s\s", text)
    assert "PASS: by evaluate.py's criteria the second picture can stand for the first." in text
    assert re.search(r"MAE [\d.]+ of 0-255 · PSNR [\d.]+ · SSIM [\d.]+", text)
    assert len(set(pictures)) == 3 and min(sizes) >= 16


@in_browser
@pytest.mark.parametrize("late", [0, 1000])
def test_stop_stops_between_steps_and_the_next_run_is_whole(visitor, late):
    """Also in a busy browser, which takes in the run's messages `late` milliseconds after
    they came.
    """
    delay = (
        f"window.setTimeout = (f, time, ...rest) => own(f, rest[0] && rest[0].msg ? {late} : "
        "time, ...rest)"
    )
    visitor.ask(f"{{const own = window.setTimeout; {delay}; true}}")
    visitor.fill("Steps", 1000)
    visitor.press("Sample")
    visitor.wait_for(r"Step \d+ of 1000")
    visitor.press("Stop")
    visitor.wait_for("Stopped")
    visitor.ask("new Promise(done => setTimeout(done, 2000, true))")
    assert visitor.status() == "Stopped."
    visitor.fill("Steps", 3)
    visitor.press("Sample")
    assert visitor.wait_for("Done|must") == "Done"


def asked(address, path, body=None, **headers):
    """Return a page's answer to another program: status, text, cookies."""
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=30)
    connection.request("POST" if body else "GET", path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers.get_all("set-cookie")


CALL = json.dumps({"fn_index": 0, "data": [["1"], 0, 4, 0, 1, "ddpm", 2, "fp32"]})
ELSEWHERE = "http://evil.example"


@in_browser
def test_other_sites_run_nothing(address):
    """Whatever a page of theirs sends through a visitor's browser."""
    own = address.rstrip("/")
    port = own.rpartition(":")[2]
    assert asked(address, "/config")[0] == 200
    assert asked(address, "/config", Origin=own)[0] == 200
    # a name that its owner has changed to lead here
    assert asked(address, "/config", Host=f"evil.example:{port}")[0] == 400
    for origin in (ELSEWHERE, "null", "http://127.0.0.1:1"):
        for path in ("/gradio_api/queue/join", "/gradio_api/run/predict"):
            kind = {"Content-Type": "application/json"}
            status, text, _ = asked(address, path, CALL, Origin=origin, **kind)
            assert (
                status == 403 and text == f"{origin} is another site, and may not use this page\n"
            )


@in_browser
def test_another_machine_needs_the_password(tmp_path):
    process, address = served(tmp_path, "--host", "0.0.0.0", "--model", "DiT-Demo/2")
    try:
        assert address.startswith(f"http://{socket.gethostname()}:")
        here = address.replace(socket.gethostname(), "127.0.0.1")
        user, password = re.search(r"user (\S+), password (\S+)\. Ctrl", process.text()[0]).groups()
        far = {"Host": "machine.example:8000", "Origin": "http://machine.example:8000"}
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        json_text = {"Content-Type": "application/json"}
        for path, body in (("/config", None), ("/gradio_api/queue/join", CALL)):
            assert asked(here, path, body, **far, **json_text)[0] == 401
        wrong = urlencode(dict(username=user, password="guess"))
        assert asked(here, "/login", wrong, **far, **form)[0] == 400
        right = urlencode(dict(username=user, password=password))
        status, _, cookies = asked(here, "/login", right, **far, **form)
        assert status == 200
        known = {"Cookie": "; ".join(cookie.partition(";")[0] for cookie in cookies)}
        assert asked(here, "/config", **far, **known)[0] == 200
        far["Origin"] = ELSEWHERE  # of a proxy, or of a stranger
        assert asked(here, "/config", **far, **known, **{"Sec-Fetch-Site": "same-origin"})[0] == 200
        assert asked(here, "/config", **far, **known, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    finally:
        process.kill()


@in_browser
def test_a_mistake_is_a_line_in_the_page(visitor):
    for steps, seed, said in (
        (5000, 0, "Steps 5000: must be from 1 to 1000"),
        (12, 1.5, "Seed 1.5: must be a whole number"),
        (12, 1e25, "Seed 1.*must be from -9223372036854775808"),
    ):
        visitor.fill("Steps", steps)
        visitor.fill("Seed", seed)
        visitor.press("Sample")
        visitor.wait_for(said)


@in_browser
def test_the_second_visitor_waits_and_is_served_when_the_first_leaves(address, visitor):
    with Visitor(address) as first:
        first.fill("Steps", 1000)
        first.press("Sample")
        first.wait_for(r"Step \d+ of 1000")
        visitor.press("Sample")
        visitor.wait_for("queue: 1/1")
        assert first.wait_for(r"Step \d+ of 1000")
    assert visitor.wait_for("Done") == "Done"


@in_browser
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left(tmp_path, number):
    """Ended in the middle of a run, by Ctrl-C or as Slurm does."""
    flags = "--model", "DiT-Demo/2", "--num-sampling-steps", "40", "--labels", "sea"
    page = Command("scripts/page.py", "--port", forks.free_port(), *flags, **environment(tmp_path))
    try:
        address = re.search(r"http://\S+/", page.process.stdout.readline())[0]
        with Visitor(address) as visitor:
            visitor.press("Sample")
            visitor.wait_for("Done")
            assert list((tmp_path / "tmp").iterdir())
            visitor.press("Sample")
            visitor.wait_for("Step")
            time.sleep(0.5)
            page.process.send_signal(number)
            status, line = ENDINGS[number]
            assert page.end() == (status, f"page.py: {line}\n")
    finally:
        page.kill()
    assert sorted(tmp_path.rglob("*")) == [
        tmp_path / "home",
        tmp_path / "tmp",
    ]
