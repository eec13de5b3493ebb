"""The page: a real server and a real Chromium, started once, on a CPU with the demo models. What
is offered, and the estimate on the way, without them.
"""

import base64
import http.client
import importlib
import io
import json
import re
import shlex
import signal
import socket
import time
import urllib.request
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.parse import urlencode

import forks
import numpy as np
import pytest
import torch
from browser import Browser, find
from conftest import ROOT
from jobs import Command
from PIL import Image
from test_guide_files import write_rae

from accel.config.options import Options
from accel.launch import ENDINGS
from accel.pipeline import Pipeline
from accel.runtime.precision import exclusive
from evaluate import psnr

in_browser = pytest.mark.skipif(
    not (find() and find_spec("gradio")),
    reason="needs Chromium (Debian: apt-get install chromium) and gradio",
)


# ---- without a browser ----


DATA = ROOT / "scripts" / "page"


@pytest.fixture(scope="module")
def program():
    """Return the page's program, whose import of gradio takes five seconds."""
    return importlib.import_module("scripts.page")


@pytest.fixture(scope="module")
def studio(program):
    return program.Studio(Options(device="cpu"))


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--port=80000", "--port 80000: must be from 1 to 65535"),
        ("--port=x", "--port: invalid int value: 'x'"),
        ("--host=8.8.8.8", "--host 8.8.8.8: Cannot assign requested address; give an address"),
        ("--host=nosuch.invalid", "--host nosuch.invalid: "),
    ],
)
def test_what_is_no_port_or_address_is_a_line(flag, words, here):
    assert words in forks.refused(here("scripts/page.py", flag))


def test_a_family_offers_what_it_has_and_no_more(program, studio):
    offered = {run.settings.model: program.choices(run) for run in studio.runs}
    assert offered["DiT-Demo/2"] == (["ddpm", "ddim", "dpm++", "unipc"], ["fp32"])
    assert offered["Large-DiT-Demo/2"] == offered["DiT-Demo/2"]
    assert offered["SiT-Demo/2"] == (["sde", "euler", "heun"], ["fp32"])


@pytest.mark.parametrize(
    "number, sampler, steps",
    [(0, "ddpm", 9), (0, "ddim", 9), (1, "ddpm", 5), (2, "euler", 7), (2, "heun", 5)],
)
def test_before_the_last_step_the_estimate_is_the_result(program, studio, number, sampler, steps):
    """The last step of these samplers goes to x* itself."""
    labels = (1, 5)
    run = program.changed(
        studio.runs[number],
        labels=labels,
        sampler=sampler,
        num_sampling_steps=steps,
        precision="fp32",
        guidance_interval=(0.05, 1),
    )
    seen = {}
    with exclusive():
        pipeline = Pipeline.load(run)
        latents = pipeline.latents(
            labels, 0, on_step=lambda index, x: seen.update({index + 1: x.clone()})
        )
    before = pipeline.estimate(seen[steps - 1], steps - 1, labels)
    torch.testing.assert_close(before, latents, atol=1e-4, rtol=1e-3)
    half = steps // 2
    nearer = pipeline.estimate(seen[half], half, labels) - latents
    assert nearer.square().mean() < (seen[half] - latents).square().mean()


def test_each_text_has_a_translation():
    """Both texts name the same values."""
    english, chinese = (json.loads((DATA / f"{name}.json").read_text()) for name in ("en", "zh"))
    values = {name: re.findall(r"{.*?}", text) for name, text in english.items()}
    assert values == {name: re.findall(r"{.*?}", text) for name, text in chinese.items()}
    assert [name for name in english if english[name] == chinese[name]] == []


def test_missing_gradio_is_a_line(tmp_path, here):
    (tmp_path / "gradio.py").write_text("raise ImportError")
    done = forks.run(["scripts/page.py", "--device", "cpu"], PYTHONPATH=str(tmp_path))
    assert forks.refused(done).endswith("install it with pip install -e '.[page]'\n")
    assert "page.py: --sampler euler: is not for a DiT" in forks.refused(
        here("scripts/page.py", "--sampler", "euler")
    )


# ---- in the browser ----

STATE = """(() => {
  const seen = css => [...document.querySelectorAll(css)].filter(e => e.offsetParent)
  const text = css => (seen(css)[0] || {innerText: ''}).innerText
  return {
    status: text('.status'), label: text('.pixels label'), busy: seen('button.primary')[0].disabled,
    idle: seen('button.primary + button')[0].disabled,
    picture: (seen('.pixels img')[0] || {src: ''}).src,
    command: (seen('textarea')[0] || {value: ''}).value
  }
})()"""


class Visitor(Browser):
    """A browser at the page. Fields and buttons are those that can be seen."""

    def visit(self, address, width=1300):
        self.open(address, width)
        self.until(lambda: self.ask("!!document.querySelector('button.primary')"))

    def seen(self, selector):
        return f"[...document.querySelectorAll('{selector}')].filter(e => e.offsetParent)"

    def until(self, found):
        """Wait until found() is true, and return it."""
        return forks.until(found, 120, lambda: self.state().status, pause=0.05)

    def state(self):
        return SimpleNamespace(**self.ask(STATE))

    def press(self, text, kind="button.lg"):
        self.ask(f"{self.seen(kind)}.find(e => e.innerText.includes('{text}')).click()")

    def key(self, name, code):
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )

    def field(self, label, number=0):
        """The input with this label, or the next one."""
        labelled = f"e.closest('.block').innerText.split('\\n').some(t => t.startsWith('{label}'))"
        return f"{self.seen('.block input')}.filter(e => {labelled})[{number}]"

    def fill(self, label, value, number=0):
        """Type into a field."""
        self.ask(f"(e => (e.focus(), e.select()))({self.field(label, number)})")
        self.call("Input.insertText", text=str(value))
        self.ask("document.activeElement.blur()")

    def choose(self, label, value):
        """Choose the option that begins so from a list."""
        self.ask(f"{self.field(label)}.focus()")
        option = f"{self.seen('[role=option]')}.find(e => e.innerText.match(/^{value}/m))"
        self.until(lambda: self.ask(f"!!{option}"))
        self.ask(f"{option}.dispatchEvent(new MouseEvent('mousedown', {{bubbles: true}}))")

    def wait_for(self, words):
        """Wait until the status matches `words`, and return the match."""
        return self.until(lambda: re.search(words, self.state().status))[0]

    def text(self):
        return self.ask("document.body ? document.body.innerText : ''")

    def content(self):
        """The file of the picture."""
        source = "fetch(%s[0].src).then(r => r.bytes()).then(b => b.toBase64())"
        return base64.b64decode(self.ask(source % self.seen(".pixels img")))


def environment(home):
    """An empty home and folder for temporary files, one thread, no GPU."""
    places = {"HOME": home / "home", "TMPDIR": home / "tmp"}
    for place in places.values():
        place.mkdir()
    return {name: str(place) for name, place in places.items()} | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


class Page:
    """The page, in a process of its own, its address, and the lines that it prints."""

    def __init__(self, home, *flags):
        self.home = home
        words = "scripts/page.py", "--port", forks.free_port(), *flags
        self.command = Command(*words, **environment(home))
        self.lines = []
        while "Ctrl-C" not in (self.lines or [""])[-1]:
            self.lines.append(self.command.process.stdout.readline())
            assert self.lines[-1], self.command.end()
        self.address = re.search(r"http://\S+/", self.lines[-1])[0]

    def end(self, number):
        """End it by a signal: by a line and its status, and nothing is left."""
        try:
            self.command.process.send_signal(number)
            text, error = self.command.process.communicate(timeout=60)
            assert not self.command.alive()
        finally:
            self.command.kill()
        self.lines += text.splitlines()
        status, line = ENDINGS[number]
        assert self.command.process.returncode == status and "Traceback" not in error, error
        assert error.splitlines()[-1] == f"page.py: {line}"  # gradio may print closed streams
        assert sorted(self.home.rglob("*")) == [self.home / "home", self.home / "tmp"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    page = Page(tmp_path_factory.mktemp("page"))
    yield page
    page.end(signal.SIGINT)


@pytest.fixture(scope="module")
def address(page):
    return page.address


@pytest.fixture(scope="module")
def browser():
    with Visitor() as browser:
        yield browser


@pytest.fixture
def visitor(browser, address):
    browser.problems.clear(), browser.requested.clear()
    browser.visit(address)
    yield browser
    assert all(url.startswith((address, "data:", "blob:", "about:")) for url in browser.requested)
    # a stream that Stop or leaving ended: the browser's error, and those that gradio prints
    aborted = "net::ERR_ABORTED", "AbortError", "Connection errored out"
    errors = [one for one in browser.problems if not any(text in str(one) for text in aborted)]
    assert errors == []


def pixels(content):
    """(H, W, 3) of a PNG file."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@in_browser
@pytest.mark.parametrize("width", [1300, 390])
def test_the_first_view_has_a_sentence_and_a_finished_picture(visitor, address, width):
    visitor.visit(address, width)
    assert "This page draws pictures of classes that you choose" in visitor.text()
    place = "JSON.parse(JSON.stringify(%s[0].getBoundingClientRect()))"
    for model in ("DiT", "Large-DiT", "SiT"):
        if width > 600 or model == "DiT":  # the others are in a menu
            visitor.press(f"{model}-Demo/2", "button[role=tab]")
            assert visitor.until(lambda: visitor.state().picture)
            assert visitor.state().label == "Example, made earlier"
            assert visitor.ask(place % visitor.seen(".pixels img"))["bottom"] < 900
    assert visitor.ask("document.documentElement.scrollWidth") <= width


@in_browser
def test_sample_draws_the_example_again_and_is_disabled_meanwhile(visitor, tmp_path):
    visitor.until(lambda: visitor.state().picture)
    example = pixels(visitor.content())
    visitor.press("Sample")
    seen = [visitor.until(lambda: (state := visitor.state()).busy and state)]
    while seen[-1].busy:
        time.sleep(0.1)
        seen.append(visitor.state())
    done = visitor.state()
    assert re.fullmatch(r"Done in [\d.]+ s\.", done.status) and done.label == "Picture"
    assert all(state.idle is not state.busy for state in seen)
    previews = {state.label: state.picture for state in seen if state.label.startswith("Preview")}
    assert len(set(previews.values()) - {done.picture}) >= 2
    assert all(re.fullmatch(r"Preview at step \d+ of 50, unfinished", label) for label in previews)
    for flags in "--num-sampling-steps 50", "--precision fp32", "--labels 0 1":
        assert flags in done.command
    made = visitor.content()
    assert psnr(example, pixels(made)) > 40
    visitor.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    visitor.ask(
        f"{visitor.seen('.pixels [aria-label=Download], .pixels [title=Download]')}[0].click()"
    )
    saved = visitor.until(lambda: list(tmp_path.glob("saved/*.png")))
    assert [path.read_bytes() for path in saved] == [made]
    look = (
        "(e => [e.offsetWidth > 600, getComputedStyle(e).objectFit, "
        "getComputedStyle(e).imageRendering])"
    )
    assert visitor.ask(f"{look}({visitor.seen('.pixels img')}[0])") == [
        True,
        "contain",
        "pixelated",
    ]


@in_browser
def test_the_command_makes_the_same_picture_to_the_bit(visitor, here, tmp_path):
    """Three classes are drawn twice, with a seed by the dice."""
    visitor.choose("Classes", "mushr")
    visitor.choose("Pictures of each", 2)
    visitor.press("Another seed", "button")
    seed = visitor.until(lambda: visitor.ask(f"{visitor.field('Seed')}.value").lstrip("0"))
    visitor.fill("Steps", 2)
    visitor.press("Sample")
    visitor.wait_for("Done")
    command = visitor.state().command
    assert f"--labels 0 0 1 1 7 7 --seed {seed} " in command
    words = shlex.split(command)[2:]
    forks.succeeds(here("sample.py", *words, "--output", tmp_path / "command.png"))
    made = pixels(visitor.content())
    assert np.array_equal(made, pixels((tmp_path / "command.png").read_bytes()))


@in_browser
def test_a_newcomers_comparison_passes_and_explains_itself(visitor):
    """Nothing is chosen: on a CPU, which has one tier, twice the steps and the steps."""
    visitor.press("Compare", "button[role=tab]")
    visitor.press("Compare")
    for half in ("Left half", "Right half"):
        visitor.wait_for(rf"{half} · Step \d+ of \d+")
    assert visitor.wait_for("Done|must") == "Done"
    text = visitor.text()
    assert "PASS: the right picture can stand for the left one." in text
    assert re.search(r"Mean difference \(MAE\) [\d.]+ of 255, must be at most 2.55", text)
    assert re.search(r"Signal to noise \(PSNR\) [\d.]+ dB, must exceed 40", text)
    assert re.search(r"100 steps · [\d.]+ s\s.*\s50 steps · [\d.]+ s\s", text)
    addresses = visitor.ask(f"{visitor.seen('figure img')}.map(e => e.src)")
    left, right, drawn = [pixels(urllib.request.urlopen(each).read()) for each in addresses]
    difference = np.abs(left.astype(int) - right).max(2)
    assert 0 < difference.max() < 32  # else the scale is not seen
    assert np.array_equal(drawn, np.dstack([difference * 255 // 32] * 3))
    assert "white: 32 or more of 255" in text
    assert f"The largest difference is {difference.max()} of 255." in text
    colour = f"getComputedStyle({visitor.seen('.verdict b')}[0]).color"
    green = visitor.ask(colour)
    edge = "getComputedStyle(document.querySelector('.stack .right')).clipPath"
    before = visitor.ask(f"document.querySelector('.stack input').focus(), {edge}")
    visitor.key("ArrowLeft", 37)
    assert (before, visitor.ask(edge)) == ("inset(0px 0px 0px 50%)", "inset(0px 0px 0px 49%)")
    visitor.fill("Steps", 3)
    visitor.fill("Steps", 2, 1)
    visitor.press("Compare")
    visitor.until(lambda: "FAIL: these are two different pictures" in visitor.text())
    assert visitor.ask(colour) != green


@in_browser
@pytest.mark.parametrize("late", [0, 1000])
def test_stop_leaves_a_preview_that_is_called_one_and_the_next_run_is_whole(visitor, late):
    """Also in a busy browser, which takes in the run's messages `late` milliseconds after
    they came.
    """
    delay = (
        f"window.setTimeout = (f, time, ...rest) => own(f, rest[0] && rest[0].msg ? {late} : "
        "time, ...rest)"
    )
    visitor.ask(f"{{const own = window.setTimeout; {delay}; true}}")
    visitor.fill("Steps", 200)
    visitor.press("Sample")
    visitor.until(lambda: visitor.state().label.startswith("Preview"))
    visitor.press("Stop")
    visitor.wait_for("Stopped")
    visitor.ask("new Promise(done => setTimeout(done, 2000, true))")
    state = visitor.state()
    assert (state.status, state.command, state.busy) == ("Stopped.", "", False)
    assert re.fullmatch(r"Preview at step \d+ of 200, unfinished", state.label)
    visitor.fill("Steps", 3)
    visitor.press("Sample")
    assert visitor.wait_for("Done|must") == "Done"
    assert visitor.state().label == "Picture"


@in_browser
def test_a_mistake_is_a_line_and_leaves_the_last_picture(visitor):
    visitor.fill("Steps", 2)
    visitor.press("Sample")
    visitor.wait_for("Done")
    last = visitor.state()
    for steps, seed, line in (
        (5000, 0, "Steps 5000: must be from 1 to 1000"),
        (2, 1.5, "Seed 1.5: must be a whole number"),
        (2, -1e19, "Seed -1.*must be"),
    ):
        visitor.fill("Steps", steps)
        visitor.fill("Seed", seed)
        visitor.press("Sample")
        visitor.wait_for(line)
        state = visitor.state()
        assert (state.picture, state.command) == (last.picture, last.command)
        assert not state.busy
    visitor.fill("Seed", 0)
    visitor.choose("Pictures of each", 8)
    visitor.press("Sample")
    visitor.wait_for("16 pictures are too many for this page; choose up to 8")


@in_browser
def test_the_second_visitor_sees_the_queue_and_is_served_when_the_first_leaves(visitor, address):
    visitor.fill("Steps", 1000)
    visitor.press("Sample")
    visitor.wait_for(r"Step \d+ of 1000")
    first = visitor.page
    visitor.add_page()
    visitor.visit(address)
    visitor.fill("Steps", 2)
    visitor.press("Sample")
    visitor.wait_for("In the queue: 1 before you.")
    visitor.close_page(first)
    assert visitor.wait_for("Done") == "Done"


@in_browser
def test_a_chinese_browser_gets_chinese_and_can_switch(visitor, address):
    english, chinese = (json.loads((DATA / f"{name}.json").read_text()) for name in ("en", "zh"))
    visitor.call("Network.setExtraHTTPHeaders", headers={"Accept-Language": "zh-CN,zh;q=0.9"})
    try:
        visitor.visit(address)
        assert "本页就用按类别生成图片的扩散 Transformer" in visitor.text()
        visitor.press("比较", "button[role=tab]")
        visitor.fill("步数", 3)
        visitor.fill("步数", 2, 1)
        visitor.press("比较")
        visitor.until(lambda: chinese["FAIL"] in visitor.text())
        texts = {text for name, text in english.items() if text != chinese[name]} - {"English"}
        assert [text for text in texts if len(text) > 3 and text in visitor.text()] == []
        visitor.press("English", "a")
        visitor.until(lambda: "This page draws pictures" in visitor.text())
    finally:
        visitor.call("Network.setExtraHTTPHeaders", headers={})


def asked(address, path, body=None, **headers):
    """Return a page's answer to another program: status, text, cookies."""
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=30)
    connection.request("POST" if body else "GET", path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers.get_all("set-cookie")


CALL = json.dumps({"fn_index": 0, "data": [["1"], 1, 0, 2, 4, 0, 1, "ddpm", "fp32"]})
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
def test_another_machine_needs_the_password_and_a_guide_is_named(browser, tmp_path, here):
    """A network and its guide by a configuration file, the browser after the login. Slurm ends the
    page in the middle of a run.
    """
    (tmp_path / "served").mkdir()
    page = Page(tmp_path / "served", "--host", "0.0.0.0", "--config", write_rae(tmp_path)())
    try:
        user, password = re.search(r"user (\S+), password (\S+)\. Ctrl", page.lines[-1]).groups()
        assert page.address.startswith(f"http://{socket.gethostname()}:")
        near = page.address.replace(socket.gethostname(), "127.0.0.1")
        require_password(near, user, password)
        browser.open(near, 1300)
        browser.until(lambda: browser.ask("document.querySelectorAll('input').length >= 2"))
        for number, text in enumerate((user, password)):
            browser.ask(f"document.querySelectorAll('input')[{number}].focus()")
            browser.call("Input.insertText", text=text)
        browser.press("Login")
        browser.until(lambda: browser.ask("!!document.querySelector('button.primary + button')"))
        assert (
            browser.until(lambda: browser.state().label) == "Picture"
        )  # the examples are of other weights
        browser.press("More settings", "button")
        browser.fill("Steps", 8)
        made = []
        for scale in (1.5, 1):
            browser.fill("Autoguidance by g.pt", scale)
            before = browser.state().picture
            browser.press("Sample")
            browser.until(lambda before=before: browser.state().picture != before)
            browser.until(lambda: not browser.state().busy)
            words = shlex.split(browser.state().command)[2:]
            assert "--config" in words
            forks.succeeds(here("sample.py", *words, "--output", tmp_path / "command.png"))
            made.append(browser.content())
            command = pixels((tmp_path / "command.png").read_bytes())
            assert np.array_equal(pixels(made[-1]), command)
        assert made[0] != made[1]
        browser.fill("Steps", 1000)
        browser.press("Sample")
        browser.wait_for("Step")
        page.end(signal.SIGTERM)
        assert len(set(page.lines)) == len(page.lines) > 1  # each notice is printed once
    finally:
        page.command.kill()


def require_password(address, user, password):
    """Refuse who does not know it, and pages of other sites."""
    far = {"Host": "machine.example:8000", "Origin": "http://machine.example:8000"}
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    json_text = {"Content-Type": "application/json"}
    for path, body in (("/config", None), ("/gradio_api/queue/join", CALL)):
        assert asked(address, path, body, **far, **json_text)[0] == 401
    wrong = urlencode(dict(username=user, password="guess"))
    assert asked(address, "/login", wrong, **far, **form)[0] == 400
    right = urlencode(dict(username=user, password=password))
    status, _, cookies = asked(address, "/login", right, **far, **form)
    assert status == 200
    known = {"Cookie": "; ".join(cookie.partition(";")[0] for cookie in cookies)}
    assert asked(address, "/config", **far, **known)[0] == 200
    far["Origin"] = ELSEWHERE  # of a proxy, or of a stranger
    assert asked(address, "/config", **far, **known, **{"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert asked(address, "/config", **far, **known, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
