"""The report: the five graded parts from a log, every figure in a file or computed from one;
incomplete, mixed and foreign logs are refused by name; a browser shows it.
"""

import base64
import importlib.metadata
import json
import re
import shutil
from argparse import Namespace

import contest_log
import numpy as np
import pytest
from browser import Browser, find
from conftest import ROOT
from contest_log import change
from forks import refused, succeeds
from pages import NO_FIGURE, code_blocks, half_digit, numbers, program, unknown_flags

import evaluate
from accel.errors import UsageError
from bench.steps import RUNGS
from scripts import report, report_data
from scripts.strategies import Machine, Shape, designs

REPORT = "scripts/report.py"
LANGUAGES = "en", "zh"


class Lpips:
    """LPIPS by a stand-in for VGG16's weights, which are not here: a hundredth of the MAE."""

    source = None

    def __call__(self, a, b):
        return evaluate.mae(a, b) / 100


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A log of four GPUs."""
    return contest_log.build(tmp_path_factory.mktemp("log") / "mine")


@pytest.fixture
def log(measured, tmp_path):
    """A copy of the log, to change."""
    return shutil.copytree(measured, tmp_path / "mine")


def files_of(log, picture="contest-4-exact.png", lang="en", lpips=None):
    args = Namespace(log=log, picture=log / picture, lang=lang, team="Us", vgg_weights=None)
    return report.report(args, lpips or Lpips())


def text_of(log, *args, **how):
    return files_of(log, *args, **how)["report.md"].decode()


@pytest.fixture(scope="module")
def written(measured):
    """Language → files of its report."""
    return {lang: files_of(measured, lang=lang) for lang in LANGUAGES}


# ---- the parts ----


def section(text, number):
    return re.search(rf"^## {number}\. .*?(?=^## )", text, re.S | re.M)[0]


def test_the_parts_are_the_contests_in_its_order(written):
    text = written["en"]["report.md"].decode()
    titles = [
        "1. Baseline on one GPU",
        "2. Profile on one GPU and the bottleneck",
        "3. Optimised result on one GPU",
        "4. Design for several GPUs",
        "5. Optimised result on several GPUs",
        "6. Key optimisations, what is new, problems and solutions",
    ]
    assert re.findall(r"^## (\d.*)$", text, re.M) == titles
    chinese = re.findall(r"^## (\d.*)$", written["zh"]["report.md"].decode(), re.M)
    assert chinese[0] == "1. 单卡 Baseline 结果" and len(chinese) == len(titles)
    figures = {name for name in written["en"] if name.startswith("figures/")}
    shown = set(re.findall(r"\]\((figures/\S+)\)", text))
    assert (
        figures
        == shown
        == {
            f"figures/{name}"
            for name in (
                "pictures.jpg",
                "kinds.svg",
                "roofline.svg",
                "ladder.svg",
                "designs.svg",
                "scaling.svg",
            )
        }
    )


def test_the_baseline_has_both_times(written, log):
    """The organisers' program where it ran, as it prints T and from loading; else our fp32."""
    part = section(written["en"]["report.md"].decode(), 1)
    assert "| organisers' sample.py | `tf32` | 39.10 | 42.50 | – |" in part
    assert (
        "| this software's reference | `fp32` | 103.29 | 104.28 | load 0.62, sample 102.43" in part
    )
    assert "unmodified (commit 97dab9f)" in part
    # a step of 16.8 TFLOP in 144.4 ms
    assert "16.8 TFLOP: 116 TFLOP/s, 30 % of the 390 TFLOP/s" in part
    (log / "fork.json").unlink()
    text = text_of(log)
    assert "| Baseline | T = 104.28 s on one GPU in `fp32`" in text
    assert "The organisers' program was not run here." in section(text, 1)
    assert "408.2 ms in `fp32`" in section(text, 1)


def test_the_profile_is_analysed_in_sentences(written):
    part = section(written["en"]["report.md"].decode(), 2)
    # 14.61 TFLOP in 38.5 ms; 2.165 in 78.2
    assert "| GEMMs | 38.5 | 27 % | 112 | 380 | 925 | 410 | 97 % | arithmetic |" in part
    assert "| attention | 78.2 | 54 % | 112 | 27.7 | 108 | 256 | 7 % | arithmetic |" in part
    assert "54 % of the step is attention.** This work performs 256 FLOP per byte; arith" in part
    assert "Attention reaches 7 % of its ceiling" in part
    assert "falls from 144.4 to 95.3 ms (1.52 ×): GEMMs 38.5 → 70.0 ms" in part
    assert "The bottleneck is now the arithmetic of GEMMs." in part
    assert "`ladder.tf32.trace.json.gz`, `ladder.exact.trace.json.gz`" in part
    assert r"| `nvjet_exact<a\|b>xxxx" in part


def test_designs_and_choice_are_computed_from_the_log(written, measured):
    part = section(written["en"]["report.md"].decode(), 4)
    assert "Ultra-Scale Playbook" in part
    record = json.loads((measured / "layouts.json").read_text())
    machine = Machine(4, 94.4, **record["link"])
    for design in designs(Shape(**record["shape"]), 8, 4, 4):
        cells = f"| {design.messages} | {100 * design.idle(4):.0f} % | {design.ms(machine):.1f} |"
        assert cells in part, design
    assert "Choice for 8 labels: data parallel.** Estimated 23.6 ms" in part
    assert "measured 25.1 ms, 3.76 ×" in part
    assert "**data parallel** | 2.62 | 0.0 | 0 | 0 % | 23.6 | 4.00 × | 25.1 |" in part


def test_several_gpus_are_compared_with_one(written):
    part = section(written["en"]["report.md"].decode(), 5)
    row = next(line for line in part.splitlines() if "(handed in)" in line)
    # T 27.07 s on one: 27.07 / 9.02 = 3.00, a quarter of it 75 %
    assert row.startswith("| `exact` (handed in) | 4 | 6.76 | 9.02 | 3.00 × | 75 % | 3.66 × | ")
    assert "| `fp16` | 4 | 0.72 | 2.12 | 1.26 × | 32 % | 1.90 × |" in part  # one label
    assert "is that of one GPU up to rounding" in part
    tiers = re.findall(r"^\| `(\w+)`", part.partition("One label")[0], re.M)
    assert list(dict.fromkeys(tiers)) == ["fp32", "exact", "tf32", "fp16"]
    assert "With one label T goes from 4.90 to " in part
    assert "T is of one run, after a short one" in written["en"]["report.md"].decode()


def test_report_json_names_no_folder_of_this_machine():
    home, root = report_data.Path.home(), report_data.ROOT
    found = report_data.plain({"why": [f"{home}/.cache/x: no VGG16", root / "log/mine"]})
    assert found == {"why": ["~/.cache/x: no VGG16", "log/mine"]}


def test_another_tier_is_another_report(log):
    text = text_of(log, "contest-2-fp16.png")
    assert "on 2 GPUs in `fp16`" in text and "**After: `fp16`**, 32.2 ms" in text
    ranked = [line for line in text.splitlines() if re.match(r"- fp16 \+ ", line)]
    gains = [np.subtract(*map(float, re.findall(r"[\d.]+(?= →| ms)", line)[:2])) for line in ranked]
    assert len(gains) == len(RUNGS) and gains == sorted(gains, reverse=True)
    same = text_of(log, "contest-4-fp32.png")
    (log / "fork.json").unlink()
    assert "**After" in same and "**After" not in text_of(log, "contest-4-fp32.png")


# ---- the judged pictures ----


def test_the_verdict_is_of_the_pictures_that_are_handed_in(log):
    """By both readings of MAE: 0.4 of 255 meets the lenient one alone."""
    pixels = evaluate.read_picture(log / "contest-4-fp16.png").pixels.copy()
    pixels[:, ::5] ^= 1
    pixels[:, 1::5] ^= 1
    contest_log.Image.fromarray(pixels).save(log / "contest-4-fp16.png")
    record = json.loads((log / "contest-4.json").read_text())
    digest = report_data.hashlib.sha256((log / "contest-4-fp16.png").read_bytes()).hexdigest()
    record["contest"][-1]["picture"] = digest
    contest_log.write(log / "contest-4.json", record)
    files = files_of(log, "contest-4-fp16.png")
    text = files["report.md"].decode()
    assert "| MAE of pixels 0–255 (strict reading) | 0.40" in text
    assert "strict reading (0–255): **FAIL**; by the lenient reading (0–1): **PASS**" in text
    assert files["handin/sample.png"] == (log / "contest-4-fp16.png").read_bytes()
    assert files["handin/baseline.png"] == (log / "fork.png").read_bytes()
    assert "VERDICT: FAIL (gate strict" in files["handin/verdict.txt"].decode()
    result = files["handin/log/FINAL_RESULT.txt"].decode()
    assert "Verdict: FAIL by MAE of 0-255, PASS by MAE of 0-1" in result and digest in result


def test_no_value_is_invented_for_lpips(log, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    text = text_of(log, lpips=evaluate.Lpips())
    assert "| LPIPS (VGG16) | – | ≤ 0.01 | not computed |" in text
    assert "No value is assumed." in text and "strict reading (0–255): **NONE**" in text
    # identical pictures need no network
    (log / "fork.json").unlink()
    text = text_of(log, "contest-1-fp32.png", lpips=evaluate.Lpips())
    assert "| LPIPS (VGG16) | 0.0000 | ≤ 0.01 | yes |" in text and "identical to the bit" in text


@pytest.mark.parametrize(
    "seconds, points", [(0.5, 50), (100, 50), (300 / 3**0.5, 25), (299.9, 0.015), (900, 0)]
)
def test_the_contests_points(seconds, points):
    assert report_data.score(seconds) == pytest.approx(points, abs=0.001)


def test_random_weights_have_the_contests_time_and_no_hand_in():
    record = contest_log.ABOUT | dict(decoder="ema")
    assert not report_data.rehearsal(record) and report_data.rehearsal(record | dict(steps=25))
    for random in ("weights", "decoder"):
        other = record | {random: "random, seed 0"}
        assert report_data.rehearsal(other) and not report_data.other_job(other)


def test_a_rehearsal_has_no_points(log):
    assert "50.0 of 50 points" in text_of(log) and "rehearsal" not in text_of(log)
    for path in log.glob("*.json"):
        change(path, weights="random, seed 0")
    text = text_of(log)
    assert "points" not in text.partition("## The judged")[0].replace("earns no points", "")
    assert "The weights are random" in text
    assert files_of(log)["handin/log/FINAL_RESULT.txt"].startswith(b"REHEARSAL")


def test_a_cpu_makes_no_claims_about_gpus(log):
    for path in log.glob("*.json"):
        change(path, gpu=None)
    files = files_of(log)
    text = files["report.md"].decode()
    assert "There was no GPU." in text and "on one process" in text
    assert "figures/scaling.svg" not in files and "GPU" not in section(text, 5)


# ---- what the team writes ----


def test_what_is_to_be_written_is_marked_and_kept(log, tmp_path, here):
    flags = "--team", "Us", "--log", log, "--picture", log / "contest-4-exact.png"
    printed = succeeds(here(REPORT, tmp_path / "out", *flags, "--lang", "zh"))
    notes = log / "notes.zh.md"
    assert printed.count("TO WRITE in ") == 3 and f"TO WRITE in {notes}: 创新性说明" in printed
    page = (tmp_path / "out/report.html").read_text()
    assert page.count('<p class="todo"><mark>TO WRITE</mark>') == 3
    assert json.loads((tmp_path / "out/report.json").read_text())["to_write"] == 3
    mine = re.sub(r"^TO WRITE.*$", "我们写的 <b>内容</b>。", notes.read_text(), flags=re.M)
    notes.write_text(mine + "\n## 更多\n\n第四节。\n")
    printed = succeeds(here(REPORT, tmp_path / "out", *flags, "--lang", "zh"))
    text = (tmp_path / "out/report.md").read_text()
    assert "TO WRITE" not in printed + text and text.count("我们写的") == 3 and "### 更多" in text
    assert "&lt;b&gt;" in (tmp_path / "out/report.html").read_text()


# ---- both languages ----


def test_both_languages_have_the_same_figures(written):
    english, chinese = (written[lang]["report.md"].decode() for lang in LANGUAGES)
    found = [re.findall(r"\d+\.\d+", text) for text in (english, chinese)]
    assert found[0] == found[1] and len(found[0]) > 300
    assert not re.search("[\u4e00-\u9fff]", english)
    page = written["zh"]["report.html"].decode()
    assert "**" not in page  # emphasis that Markdown did not take
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page) and "http" not in page


# ---- every figure is traced ----

SCALES = 1, 100, 255, 1e-3, 1e-6, 2**-30
COMPUTED = r"^\| .*?arXiv.*?$|arXiv:[\d.]+|2025|29 dB"  # no measurements


def untraced(data, text):
    """Figures of the report that report.json does not hold, in one of the report's units, nor as
    the ratio of two numbers in it.
    """
    text = re.sub(COMPUTED, "", NO_FIGURE.sub("", re.sub(r"`[^`]*`", "", text)))
    values = np.array([value for value in numbers(data) if np.isfinite(value)])
    found = []
    for number in dict.fromkeys(re.findall(r"(?<![\w.,/-])\d+\.\d+(?:e[-+]\d+)?(?![\w.])", text)):
        value, tolerance = half_digit(number)
        if not any((np.abs(values * scale - value) <= tolerance).any() for scale in SCALES):
            found.append(number)
    return found


def derived(data):
    """Numbers that the text computes from report.json by the formula beside them."""
    before, after = data["before"], data["after"]
    yield before["ms"] / after["ms"]
    for profile in (before, after):
        yield profile["ms"] / profile["floor_ms"]
        yield profile["ms"] * data["job"]["steps"] / 1e3
        yield profile["gflop"] / 1e3
        for row in profile["kinds"].values():
            yield row["ms"] - row["floor_ms"]
    baseline = data["baseline"]["seconds"]
    result = data["result"]
    yield from (baseline / row["seconds"] for row in data["runs"])
    yield result["seconds"] - result["phases"]["sample"]
    slowest = data["ladder"][0]["ms"]
    yield from (slowest / rung["ms"] for rung in data["ladder"])
    for table in data["designs"]:
        for row in table["rows"]:
            if row["measured"]:
                yield row["measured"] / row["ms"]
                yield table["ms"] / row["measured"]
    size = 2 if after["tier"] == "fp16" else 4
    yield data["shape"]["parameters"] * size / 2**30


def test_every_figure_is_traced_to_report_json(written):
    data = json.loads(written["en"]["report.json"])
    text = written["en"]["report.md"].decode().partition("## Sources")[0]
    assert untraced([data, list(derived(data))], text) == []
    wrong = text.replace("| 9.02 |", "| 9.87 |", 1)
    assert untraced([data, list(derived(data))], wrong) == ["9.87"]


def test_the_committed_example_is_that_of_its_files():
    """Its text follows from its report.json, which has the figures of the log beside it. Its
    pictures are not kept.
    """
    folder = ROOT / "log/example"
    data = json.loads((folder / "report/report.json").read_text())
    text = (folder / "report/report.md").read_text()
    assert report.render(data, "en")[0] == text
    chinese = json.loads((folder / "report-zh/report.json").read_text())
    assert report.render(chinese, "zh")[0] == (folder / "report-zh/report.md").read_text()
    assert untraced([data, list(derived(data))], text.partition("## Sources")[0]) == []
    for source in data["sources"] + chinese["sources"]:
        content = (folder / source["file"]).read_bytes()
        assert report_data.hashlib.sha256(content).hexdigest().startswith(source["digest"])
    kept = {path.name for path in folder.glob("*.json")}
    assert kept == {source["file"] for source in data["sources"]}
    for name in ("report", "report-zh"):
        page = (folder / name / "report.html").read_text()
        assert len(page) < 8e6 and page.count("<img ") >= 4


def profiled(kinds, tflops=1.0, gb_s=100.0, ms=100.0):
    """A ladder's record of one tier: L = 2, D = 4, MLP 16, T = 16, 3 batch rows."""
    shape = dict(contest_log.SHAPE, depth=2, width=4, heads=4, hidden=16, tokens=16, parameters=500)
    rung = dict(rung="fp16 + CUDA graph", ms=ms, p10=ms, p90=ms)
    kinds = {kind: dict(ms=value, calls=1.0) for kind, value in kinds.items()}
    return dict(
        shape=shape,
        batch_rows=3,
        rungs=[rung],
        profiles=[dict(tier="fp16", kinds=kinds, functions=[])],
        ceilings=dict(tflops=dict(fp16=tflops), gb_s=gb_s),
    )


def test_an_analysis_by_hand():
    """GEMMs: 55,296 FLOP and 13,056 bytes, so 4.24 FLOP a byte; the ceilings balance at 10."""
    kinds = {"GEMM": 0.2, "attention": 0.03, "element-wise": 0.1}
    ladder = profiled(kinds, tflops=1e-3, gb_s=0.1, ms=0.4)
    found = report_data.analyse(ladder, "fp16")
    gemm = found["kinds"]["GEMM"]
    assert gemm["gflop"] == pytest.approx(55_296e-9) and gemm["mb"] == pytest.approx(13_056e-6)
    assert gemm["intensity"] == pytest.approx(4.235, rel=1e-3) and gemm["bound"] == "memory"
    # 13,056 bytes at 100,000 bytes a ms; 55,296 FLOP at 1,000,000 a ms would take 0.055
    assert gemm["floor_ms"] == pytest.approx(0.13056) and gemm["share"] == pytest.approx(0.5)
    assert gemm["of_ceiling"] == pytest.approx(0.6528) and gemm["gb_s"] == pytest.approx(0.06528)
    assert found["gaps"]["ms"] == pytest.approx(0.07) and found["main"] == "GEMM"
    # attention: 24,576 FLOP, 3,072 bytes; element-wise: 96 tokens of 4 values of 22 bytes
    floor = 0.13056 + 0.03072 + 0.08448
    assert found["floor_ms"] == pytest.approx(floor)
    fast = report_data.analyse(profiled(kinds, tflops=2.5e-3, gb_s=1.0, ms=0.4), "fp16")
    assert fast["kinds"]["GEMM"]["bound"] == "compute"  # they balance at 2.5
    assert fast["kinds"]["GEMM"]["tflops"] == pytest.approx(55_296 / 0.2e9)


def test_attention_by_cublas_counts_as_gemms():
    """No kernel is named so: what is left of its time is too short for its work."""
    found = report_data.analyse(profiled({"GEMM": 50.0, "element-wise": 20.0}), "fp16")
    assert "attention" not in found["kinds"]
    assert found["kinds"]["GEMM"]["gflop"] == pytest.approx((55_296 + 24_576) * 1e-9)


# ---- the hand-in ----


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_commands_that_it_gives_are_todays(lang, written):
    text = written[lang]["handin/RUN.md"].decode()
    commands = [
        line
        for block in code_blocks(text, "bash")
        for line in block.splitlines()
        if line.startswith(("python ", "bash "))
    ]
    assert len(commands) == 5
    for command in commands:
        file, arguments = program(command.split())
        assert unknown_flags(file, arguments) == [], command
    assert "python sample.py --gpus 4 --ckpt XL.pt --precision exact --output again.png" in text
    assert "measure.sh log/mine --ckpt" not in text or "log/again" in text
    environment = written[lang]["handin/environment.txt"].decode()
    assert (
        "\ntorch==" in environment and "contest-4.json: python bench/measure.py jobs" in environment
    )
    ran = contest_log.ABOUT["torch"].partition("+")[0]
    elsewhere = not importlib.metadata.version("torch").startswith(ran)
    assert ("in another environment than this one" in environment) == elsewhere


# ---- a browser shows it ----


@pytest.mark.skipif(find() is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_browser_shows_and_prints_it(written, tmp_path, lang):
    """At the width of a telephone and on A4: nothing is wider than the page, and the
    judged pictures are on the first page.
    """
    page = tmp_path / "report.html"
    page.write_bytes(written[lang]["report.html"])
    width, height = (round(mm / 25.4 * 96) for mm in (210 - 2 * 13, 297 - 2 * 14))
    with Browser() as browser:
        browser.open(page, 400)
        loaded = "[...document.images].map(i => i.complete && i.naturalWidth > 300)"
        assert browser.ask(loaded) == [True] * 6
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        assert not browser.problems
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.open(page, width)
        wide = (
            "[...document.querySelectorAll('table, img, pre')].map(e => Math.max(e.scrollWidth, "
            "e.offsetWidth))"
        )
        assert max(browser.ask(wide)) <= width
        figure = "document.querySelector('figure.pictures')"
        assert browser.ask(f"{figure}.offsetTop + {figure}.offsetHeight") < height
        pdf = browser.call("Page.printToPDF", preferCSSPageSize=True)["data"]
        assert 8 <= base64.b64decode(pdf).count(b"/Type /Page\n") <= 11


# ---- refusals ----


def flags_of(log, picture="contest-4-exact.png"):
    return ["--team", "Us", "--log", log, "--picture", log / picture]


@pytest.mark.parametrize("flag", ["--team", "--log", "--picture"])
def test_nothing_is_assumed(flag, log, tmp_path, here):
    flags = flags_of(log)
    place = flags.index(flag)
    line = refused(here(REPORT, tmp_path / "out", *flags[:place], *flags[place + 2 :]))
    assert f"the following arguments are required: {flag}" in line


@pytest.mark.parametrize("folder", ["log", "log/example"])
def test_the_authors_log_is_no_teams(folder, tmp_path, here):
    flags = "--team", "Us", "--log", ROOT / folder, "--picture", ROOT / "docs/page.png"
    line = refused(here(REPORT, tmp_path / "out", *flags))
    assert "is of this software's authors; measure on your own machine" in line
    assert not (tmp_path / "out/report.md").exists()


@pytest.mark.parametrize(
    "file, field, words",
    [
        ("ladder", dict(gpu="NVIDIA V100"), "is of gpu NVIDIA H200, .*ladder.json of NVIDIA V100"),
        ("layouts", dict(weights="B.pt"), "is of weights XL.pt, .*layouts.json of B.pt"),
        ("contest-4", dict(steps=20), "of steps 250, .*contest-4.json of 20"),
        ("fork", dict(image_size=256), "of image_size 512, .*fork.json of 256"),
    ],
)
def test_another_machine_or_other_weights_are_refused(file, field, words, log, tmp_path, here):
    change(log / f"{file}.json", **field)
    assert re.search(words, refused(here(REPORT, tmp_path / "out", *flags_of(log))))


def test_a_picture_that_was_not_measured_is_refused(log, tmp_path, here):
    out = tmp_path / "out"
    line = refused(here(REPORT, out, *flags_of(log, "none.png")))
    assert "none.png: no such file" in line
    shutil.copy(ROOT / "docs/page.png", log / "other.png")
    line = refused(here(REPORT, out, *flags_of(log, "other.png")))
    assert "other.png: was not measured in this log; choose from " in line
    assert f"{log}/contest-4-exact.png" in line and "label-" not in line and "fork" not in line
    # the first of eight labels' pictures is not the job's
    assert "was not measured" in refused(here(REPORT, out, *flags_of(log, "label-4-exact.png")))
    (log / "contest-4-exact.png").rename(tmp_path / "elsewhere.png")  # found by its bytes
    line = refused(here(REPORT, out, *flags_of(log)[:-1], tmp_path / "elsewhere.png"))
    assert "contest-4-exact.png: is not the picture that contest-4.json measured" in line
    contest_log.picture(log / "contest-1-fp16.png", 5)
    (tmp_path / "elsewhere.png").rename(log / "contest-4-exact.png")
    line = refused(here(REPORT, out, *flags_of(log)))
    assert "contest-1-fp16.png: is not the picture that contest-1.json measured" in line


@pytest.mark.parametrize("file, kind", [("ladder", "steps"), ("layouts", "parallel")])
def test_a_missing_measurement_is_an_error_that_names_it(file, kind, log, tmp_path, here):
    (log / f"{file}.json").unlink()
    line = refused(here(REPORT, tmp_path / "out", *flags_of(log)))
    assert f"holds no {kind} measurement; bash scripts/measure.sh {log} makes it" in line


def test_a_tier_without_a_profile_or_layouts_is_a_line(log):
    record = json.loads((log / "ladder.json").read_text())
    profiles = [row for row in record["profiles"] if row["tier"] != "exact"]
    change(log / "ladder.json", profiles=profiles)
    with pytest.raises(UsageError, match="holds no profile of exact"):
        files_of(log)
    with pytest.raises(UsageError, match="layouts.json: has no tf32 with 8 labels"):
        files_of(log, "contest-4-tf32.png")


@pytest.mark.parametrize("key", ["rungs", "shape"])
def test_a_measurement_without_an_entry_is_a_line(key, log, tmp_path, here):
    record = json.loads((log / "ladder.json").read_text())
    del record[key]
    contest_log.write(log / "ladder.json", record)
    line = refused(here(REPORT, tmp_path / "out", *flags_of(log)))
    assert "a file lacks an entry" in line and key in line


def test_damaged_and_unfinished_files_are_refused_by_name(log):
    for damaged in '{"rungs": [', "5", "":
        (log / "other.json").write_text(damaged)
        with pytest.raises(UsageError, match="other.json: not JSON"):
            files_of(log)
    (log / "other.json").unlink()
    (log / "layouts.json.unfinished").touch()
    with pytest.raises(UsageError, match="layouts.json: is not finished: wait, or if nothing"):
        files_of(log)
