"""The page: real Chromium on a CPU with the demo models. What is offered, and the
estimate on the way, without it.
"""

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import socket
import time
import urllib.request
from importlib.util import find_spec
from types import SimpleNamespace

import forks
import pytest
import torch
from browser import Browser, find
from conftest import ROOT
from test_guide_files import write_jit, write_rae

from accel.config import Grid
from accel.errors import UsageError
from accel.grid import load
from accel.isolation import alone
from scripts.page import Studio, address_of, choices, choose, require_address
from scripts.page_guard import Guard

in_browser = pytest.mark.skipif(
    not (find() and find_spec("gradio")),
    reason="needs Chromium (Debian: apt-get install chromium) and gradio",
)


# ---- without a browser ----


@pytest.fixture(scope="module")
def studio():
    return Studio(Grid.of(device="cpu"))


def test_too_many_pictures_are_refused():
    with pytest.raises(
        UsageError, match="labels: 9 pictures are too many for this page; choose up to 8"
    ):
        choose(["1"] * 9, 0, 4.0, 0, 1, "ddpm", 5, "fp32")


def served_by(guard, path="/", query="", method="GET", body=b"", port=8000, **headers):
    """What the guard answers, without a server: status, text, headers."""
    answers = []
    headers["content-length"] = str(len(body))
    headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = dict(type="http", method=method, path=path, headers=headers)
    scope |= dict(query_string=query.encode(), server=("127.0.0.1", port))

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        answers.append(message)

    asyncio.run(guard(scope, receive, send))
    return answers[0]["status"], answers[1]["body"].decode(), dict(answers[0]["headers"])


def guard_of(token="", error=None):
    """The guard of a page that answers with the request's body, or fails."""

    async def app(scope, receive, send):
        if error:
            raise error
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    functions = {index: SimpleNamespace(inputs=[None] * count) for index, count in ((0, 8), (3, 0))}
    return Guard(app, SimpleNamespace(fns=functions), token)


@pytest.mark.parametrize(
    "headers, port, status",
    [
        (dict(host="127.0.0.1:8000"), 8000, 200),
        (dict(host="localhost:8000", origin="http://localhost:8000"), 8000, 200),
        (dict(host="localhost"), 80, 200),
        (dict(host="localhost:8001"), 8000, 403),
        (dict(host="localhost"), 8000, 403),
        (dict(host="evil.example:8000"), 8000, 403),
        (dict(), 8000, 403),
        (dict(host="localhost:8000", origin="http://evil.example"), 8000, 403),
        (dict(host="localhost:8000", origin="http://localhost:9000"), 8000, 403),
        (dict(host="localhost:8000", origin="null"), 8000, 403),
    ],
)
def test_other_websites_are_not_answered(headers, port, status):
    got, text, _ = served_by(guard_of(), port=port, **headers)
    assert got == status and (status == 200 or text.count("\n") == 1)


def test_another_machine_needs_the_token():
    guard = guard_of("secret")
    far = dict(host="machine.example:8000", origin="https://proxy.example")
    assert served_by(guard, **far)[0] == 401
    assert served_by(guard, query="token=guess", **far)[0] == 401
    status, _, headers = served_by(guard, query="token=secret", **far)
    assert status == 200
    cookie = headers[b"set-cookie"].decode()
    assert cookie == "page-8000=secret; HttpOnly; Path=/; SameSite=strict"
    assert served_by(guard, cookie=cookie.partition(";")[0], **far)[0] == 200
    for wrong in ("page-8000=guess", "page-8001=secret", 'a b;;="', "page-8000"):
        assert served_by(guard, cookie=wrong, **far)[0] == 401


@pytest.mark.parametrize(
    "body",
    [
        {"fn_index": 999, "data": []},
        {"fn_index": "0", "data": []},
        {"fn_index": True, "data": []},
        {"fn_index": [], "data": []},
        {"data": []},
        {"fn_index": 0, "data": [1]},
        {"fn_index": 3, "data": "x"},
        {"fn_index": 3, "data": 0},
        [],
        {"fn_index": 3, "data": [], "more": "x" * 2**20},
    ],
    ids=range(10),
)
def test_a_call_that_the_page_does_not_send_is_a_line(body):
    words = "a call is a JSON object of at most 1048576 bytes with fn_index, the number of a func"
    whole = json.dumps({"fn_index": 3, "data": []})
    for route in ("queue/join", "run/predict", "api/predict/", "call/predict", "call/v2/predict"):
        how = dict(path=f"/gradio_api/{route}", method="POST", host="localhost:8000")
        status, text, _ = served_by(guard_of(), body=json.dumps(body).encode(), **how)
        assert status == 400 and words in text and text.count("\n") == 1
        assert served_by(guard_of(), body=whole.encode(), **how)[:2] == (200, whole)


def test_an_error_of_a_request_is_a_line(capsys):
    guard = guard_of(error=KeyError("a\nb"))
    status, text, _ = served_by(guard, path="/x", host="localhost:8000")
    assert (status, text) == (400, "KeyError: 'a\\nb'\n")
    assert capsys.readouterr().err == "page.py: GET /x: KeyError: 'a\\nb'\n"


@pytest.mark.parametrize(
    "values, words",
    [
        ((5, 0, 4, 0, 1, "ddpm", 5, "fp32"), "labels=5: must be several; give a list"),
        (([None], 0, 4, 0, 1, "ddpm", 5, "fp32"), "labels=None: must be a class's number or name"),
        ((["1"], "z", 4, 0, 1, "ddpm", 5, "fp32"), "seed='z': must be a whole number"),
        ((["1"], 1e25, 4, 0, 1, "ddpm", 5, "fp32"), "must be from -9223372036854775808 to"),
        ((["1"], 0, [4], 0, 1, "ddpm", 5, "fp32"), "cfg_scale=[4]: must be a number"),
        ((["1"], 0, 4, "0", 1, "ddpm", 5, "fp32"), "guidance_interval='0': must be a number"),
        ((["1"], 0, 4, 0, 1, {"a": []}, 5, "fp32"), "sampler={'a': []}: choose from"),
        ((["1"], 0, 4, 0, 1, "sde", 5, "fp32"), "sampler=sde: is not for a DiT"),
        ((["1"], 0, 4, 0, 1, "ddpm", 5.5, "fp32"), "num_sampling_steps=5.5: must be a whole"),
        ((["1"], 0, 4, 0, 1, "ddpm", 5, 7), "precision=7: choose from"),
    ],
    ids=range(10),
)
def test_values_of_wrong_types_are_a_line(studio, values, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        studio.models[0].changed(**choose(*values))
    right = choose(["1"], 3.0, 4, 0, 1, "ddpm", 5.0, "fp32")
    assert (right["seed"], right["num_sampling_steps"]) == (3, 5)


@pytest.mark.parametrize("host", ["8.8.8.8", "nosuch.invalid", "", "::1", "a" * 300])
def test_an_address_that_is_not_this_machines_is_refused(host):
    with pytest.raises(UsageError, match="^host="):
        require_address(host)


@pytest.mark.parametrize("port", ["80000", "0", "-1", "x"])
def test_what_is_no_port_is_a_line(port, here):
    line = forks.refused(here("scripts/page.py", f"--port={port}"))
    assert f"--port: {port}: must be from 1 to 65535" in line


def test_the_address_that_is_printed():
    assert address_of(None, 7860, "") == "http://127.0.0.1:7860/"
    assert address_of("127.0.0.1", 7860, "x") == "http://127.0.0.1:7860/?token=x"
    assert address_of("0.0.0.0", 8000, "x") == f"http://{socket.gethostname()}:8000/?token=x"


def test_a_family_offers_what_it_has_and_no_more(studio):
    offered = {model.grid.config.model: choices(model.opened) for model in studio.models}
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
    with alone():
        pipeline = load(model.grid, model.opened)
        latents = pipeline.latents(
            labels, 0, on_step=lambda index, x: seen.update({index + 1: x.clone()})
        )
    before = pipeline.estimate(seen[steps - 1], steps - 1, labels)
    torch.testing.assert_close(before, latents, atol=1e-4, rtol=1e-3)
    half = steps // 2
    nearer = pipeline.estimate(seen[half], half, labels) - latents
    assert nearer.square().mean() < (seen[half] - latents).square().mean()


def test_few_steps_show_an_estimate_each(studio, tmp_path, monkeypatch):
    """Six previews are due in four steps, one after each step but the last."""
    monkeypatch.setattr("scripts.page.FOLDER", tmp_path)
    model = studio.models[0].changed(labels=(1,), num_sampling_steps=4)
    seen = []
    studio.picture(model, "a.png", lambda text, share, *estimate: seen.extend(estimate), previews=6)
    assert len(seen) == 3 and (tmp_path / "a.png").is_file()


def test_missing_gradio_is_a_line(tmp_path, here):
    (tmp_path / "gradio.py").write_text("raise ImportError")
    done = forks.run(["-m", "scripts.page", "--device", "cpu"], PYTHONPATH=str(tmp_path))
    assert forks.refused(done).endswith("install it with pip install -e .[page]\n")
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
        """The status, or the toast of a mistake."""
        return (
            self.ask(
                f"({self.seen('[class*=toast]')}[0] || {self.seen('.status')}[0] || {{}}).innerText"
            )
            or ""
        )

    def wait_for(self, words):
        """What the status says of `words`, a regular expression."""
        return self.until(lambda: re.search(words, self.status()))[0]

    def picture(self):
        return self.ask(f"({self.seen('.pixels img')}[0] || {{}}).src")


def served(home, *flags):
    """The page, on two threads of nobody else, with an empty home and folder for
    temporary files.
    """
    for name in ("home", "tmp"):
        (home / name).mkdir()
    environment = dict(
        HOME=str(home / "home"),
        TMPDIR=str(home / "tmp"),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    process = forks.Fork(["-m", "scripts.page", "--port", forks.free_port(), *flags], **environment)
    process.wait_for("Ctrl-C")
    return process, re.search(r"http://127.0.0.1:\d+/", process.text()[0])[0]


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
    assert " --num-sampling-steps 12 " in line and line.endswith(" --precision fp32 --labels 5 3 7")
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


def test_before_the_last_step_the_estimate_is_the_result_of_both_networks(guided):
    """Also where the times end before 1, and of a network that estimates the data."""
    options = {name.strip("-"): str(value) for name, value in zip(guided[::2], guided[1::2])}
    (model,) = Studio(Grid.of(device="cpu", **options)).models
    model = model.changed(labels=(1, 5), guidance_interval=(0.05, 1))
    seen = {}
    with alone():
        pipeline = load(model.grid, model.opened)
        latents = pipeline.latents((1, 5), 0, on_step=lambda i, x: seen.update({i + 1: x.clone()}))
    last = pipeline.process.steps - 1
    before = pipeline.estimate(seen[last], last, (1, 5))
    torch.testing.assert_close(before, latents, atol=1e-4, rtol=1e-3)


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
                assert "--guide" in words
                forks.succeeds(here("sample.py", *words))
                made.append(urllib.request.urlopen(visitor.picture()).read())
                assert made[-1] == (tmp_path / "command.png").read_bytes()
            assert made[0] != made[1]
            text = visitor.ask("document.body.innerText")
            assert re.search(r"Autoguidance by (small.pth|g.pt); 1 is none", text)
            visitor.press("Compare", "button[role=tab]")
            visitor.press("Compare")
            assert visitor.wait_for("Done|Error") == "Done"
    finally:
        process.kill()


@in_browser
def test_two_settings_are_compared(visitor):
    visitor.press("SiT-Demo/2", "button[role=tab]")
    visitor.press("Compare", "button[role=tab]")
    visitor.press("Compare")
    assert visitor.wait_for("Done|Error") == "Done"
    text = visitor.ask("document.body.innerText")
    # other samplers
    assert re.search(r"VERDICT: FAIL \(gate contest; judged by MAE, PSNR, SSIM\)", text)
    assert re.search(r"Sampling took [\d.]+ s and [\d.]+ s\.", text) and "/tmp" not in text
    assert len(set(visitor.ask(f"{visitor.seen('.pixels img')}.map(e => e.src)"))) == 3


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
    begun = time.monotonic()
    visitor.fill("Steps", 3)
    visitor.press("Sample")
    assert visitor.wait_for("Done|must") == "Done"
    assert time.monotonic() - begun < 15


@in_browser
def test_the_server_has_the_guard(address):
    """Host, Origin and calls as other programs and websites send them."""
    port = int(address.rpartition(":")[2].strip("/"))
    body = json.dumps({"fn_index": 999, "data": [], "session_hash": "a"})
    cases = [
        ("GET", "/config", {}, None, 200),
        ("GET", "/config", {"Host": f"evil.example:{port}"}, None, 403),
        ("GET", "/config", {"Origin": "http://evil.example"}, None, 403),
    ]
    as_json = {"Content-Type": "application/json"}
    for route in ("queue/join", "run/predict", "api/predict", "call/predict"):
        cases.append(("POST", f"/gradio_api/{route}", as_json, body, 400))
    # A call that would not wait for its turn.
    whole = json.dumps({"fn_index": 0, "data": [["1"], 0, 4, 0, 1, "ddpm", 2, "fp32"]})
    cases.append(("POST", "/gradio_api/run/predict", as_json, whole, 404))
    for method, path, headers, body, status in cases:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        assert answer.status == status, (path, headers)
        if status == 400:
            assert b"a call is a JSON object of at most" in answer.read()
        connection.close()


@in_browser
def test_a_mistake_is_a_line_in_the_page(visitor):
    for steps, seed, said in (
        (5000, 0, "Steps 5000: must be from 1 to 1000"),
        (12, 1e25, "Seed 1.*must be from -9223372036854775808 to"),
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
    process, address = served(
        tmp_path, "--model", "DiT-Demo/2", "--num-sampling-steps", "40", "--labels", "sea"
    )
    try:
        with Visitor(address) as visitor:
            visitor.press("Sample")
            visitor.wait_for("Done")
            assert list((tmp_path / "tmp").iterdir())
            visitor.press("Sample")
            visitor.wait_for("Step")
            os.kill(process.pid, number)
            process.wait(20)
    finally:
        process.kill()
    assert process.returncode and sorted(tmp_path.rglob("*")) == [
        tmp_path / "home",
        tmp_path / "tmp",
    ]
