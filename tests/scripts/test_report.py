"""The report: every figure in it is in a file, what is missing or mixed is refused by name, and a real browser shows
it."""

import base64
import io
import json
import re
import shlex
import shutil
import sys

import forks
import pytest
from browser import Browser, find
from conftest import ROOT
from pages import program
from PIL import Image
from report_log import RULE, change, log, untraced

import evaluate
from accel.errors import UsageError
from scripts import report, report_data, report_plots


def write(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, args)])
    report.main()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Reports of a whole log in both languages."""
    folder = tmp_path_factory.mktemp("report")
    log(folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        for lang in ("en", "zh"):
            write(patch, folder / lang, "--log", folder / "log", "--lang", lang, "--team", "Us_7")
    return folder


def text_of(folder, lang="en", **how):
    """The report's text with its lines joined."""
    return report.markdown(report_data.collect(folder, **how), lang)


def test_both_languages_have_the_same_figures(written):
    english, chinese = ((written / lang / "report.md").read_text() for lang in ("en", "zh"))
    for text in (english, chinese):
        for there in ("| Us_7 |", "3.1.4 |", "570.1", "abc1234"):
            assert there in text, there
        for gone in ("one reset", "rank 0 decodes", "scripts/benchmark.py"):  # removed, and renamed
            assert gone not in text, gone
        assert re.search(r"\| plan \| (\d+) .*\n\| even \| \1 .*\n\| hold \| \1 ", text)  # at as many evaluations
    assert "| 2048 | 8 | out of memory |" in english and "| 2048 | 8 | 显存不足 |" in chinese
    assert "never waits" in english and "从不等待" in chinese
    assert "all meet the contest criterion" in english and "全部达到竞赛标准" in chinese
    # The same figures in the same places.
    numbers = [re.findall(r"\d+\.\d+", text.rpartition("\n## ")[0]) for text in (english, chinese)]
    assert numbers[0] == numbers[1]
    assert [line for line in english.splitlines() if line.startswith("## ")] == [
        "## Before and after",
        "## Conclusion",
        "## What was not measured",
        "## 1. Baseline on one GPU",
        "## 2. Profile and bottleneck",
        "## 3. Result on one GPU",
        "## 4. Design for many GPUs",
        "## 5. Result on many GPUs",
        "## Sources",
    ]
    assert not re.search("[\u4e00-\u9fff]", english)


# ---- every figure is traced to its log ----


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_figure_is_traced_to_its_log(lang):
    data = report_data.collect(ROOT / "log")
    text = re.sub(RULE, "", report.markdown(data, lang), flags=re.S | re.M)
    assert untraced(data, text) == []
    wrong = text.replace("| fp16 | 11.35 |", "| fp16 | 9.87 |", 1)
    assert [one[0] for one in untraced(data, wrong)][:1] == ["9.87"]


def programs_of(text):
    """(file, arguments) of every command in the last section."""
    for command in re.findall(r"\| `((?:python|torchrun) [^`]*)` \|$", text, re.M):
        for part in command.split(" && "):
            yield program(shlex.split(part))


def test_the_commands_it_prints_are_todays():
    seen = {}
    for file, arguments in programs_of((ROOT / "log/report/report.md").read_text()):
        assert (ROOT / file).is_file(), f"{file} does not exist"
        if file not in seen:
            seen[file] = forks.run([ROOT / file, "--help"], cwd="/").stdout
        for word in arguments:
            assert not word.startswith("--") or re.search(rf"{word}\b", seen[file]), f"{file} knows no {word}"
    assert {"bench/steps.py", "bench/jobs.py", "bench/profile_step.py", "bench/many_gpus.py"} <= set(seen)


# ---- honesty ----


@pytest.mark.parametrize("other", [dict(model="DiT-Demo/2"), dict(image_size=256), dict(steps=50), dict(pictures=4)])
def test_a_rehearsal_has_no_points(tmp_path, other):
    path = log(tmp_path) / "contest.json"
    assert "| 50.0 |" in text_of(tmp_path) and "rehearsal" not in text_of(tmp_path)
    change(path, **other)
    for name in ("ddp", "contest-fp32"):
        (tmp_path / f"{name}.json").unlink()
    text, chinese = text_of(tmp_path), text_of(tmp_path, "zh")
    assert "| 50.0 |" not in text and "job: a rehearsal, not the contest's" in text and "| rehearsal: none |" in text
    assert "| 50.0 |" not in chinese and "预演，不计分" in chinese


def test_ranks_that_share_a_cpu_prove_no_scaling(tmp_path):
    log(tmp_path, gpu=None)
    data = report_data.collect(tmp_path)
    text = report.markdown(data, "en")
    last = text[text.index("## 5.") :]
    assert "share one CPU's cores (2)" in last and "×" not in last
    assert "scaling.svg" not in report.draw(data) and "scaling.svg" not in text


def test_a_step_below_its_floor_is_flagged(tmp_path):
    path = log(tmp_path) / "profile-fast.json"
    fast, slow = change(path), change(tmp_path / "profile-baseline.json")
    assert text_of(tmp_path).count(f"{fast['timed']['ms'] / fast['floor_ms']:.2f} times the floor") == 2
    change(path, floor_ms=40.0)
    slow["kinds"]["GEMM"]["of_ceiling"] = 1.02
    change(tmp_path / "profile-baseline.json", kinds=slow["kinds"])
    text, chinese = text_of(tmp_path), text_of(tmp_path, "zh")
    assert "102% ¹ |" in text and "holds the GPU at its power limit" in text and "使 GPU 处于功耗上限" in chinese
    assert text.count("Measure again") == 2 and "times the floor" not in text and chinese.count("请重新测量") == 2


def test_the_front_page_shows_both_pictures_or_says_what_was_not_measured(tmp_path):
    folder = log(tmp_path)
    data = report_data.collect(folder)
    assert "white is 5 of 255" in report.markdown(data, "en")
    image = Image.open(io.BytesIO(report.draw(data)["pictures.jpg"]))
    assert image.size == (1056, 260 + 16 + 260 * 1056 // 520)
    assert image.getpixel((100, 100))[2] < image.getpixel((900, 100))[2] < 30 and image.getpixel((500, 600))[0] > 240
    missing = data["front"]["missing"]
    assert {"v100", "fid", "likeness", "lpips", "weights"} == {*missing}  # verified at 128 px
    tiers = change(folder / "verify" / "verify.json")["tiers"]
    for tier in tiers:  # as verify.py leaves them without LPIPS' weights
        tier["worst"]["grid"]["lpips"] = "nan"
        tier["verdicts"] = dict.fromkeys(tier["verdicts"], "NONE")
    change(folder / "verify" / "verify.json", tiers=tiers, vgg_weights=None)
    text, missing = text_of(folder), report_data.collect(folder)["front"]["missing"]
    assert "vgg" in missing and "lpips" not in missing and "--vgg-weights" in text and " nan |" not in text
    for seed in folder.glob("verify/seed*"):
        seed.unlink()
    assert "![DiT-Demo/2: fp32, fp16 and their difference](figures/pictures.jpg)" in text_of(folder)


def test_all_numbers_of_gpus_are_in_one_figure():
    series = report_data.collect(ROOT / "log")["many"]["series"]
    assert {*series["DiT-XL/2 512 px fp16 + 8 labels"]} == {1, 2, 4} == {*series["fp16, 512 px + 1 label"]}


def test_plots_follow_the_language(tmp_path):
    """English words in a Chinese figure are names."""
    names = r"DiT-XL/2|CUDA graph|GPU|fp16|bf16|fp32|tf32|exact|px|GELU|adaLN|PSNR|MAE|SSIM|dB"
    drawn = report.draw(report_data.collect(ROOT / "log"), "zh")
    plots_of = {name: svg.decode() for name, svg in drawn.items() if name.endswith(".svg")}
    assert len(plots_of) == 5
    for name, svg in plots_of.items():
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert any(re.search("[\u4e00-\u9fff]", text) for text in texts), name
        english = [text for text in texts if re.search("[A-Za-z]{2,}", re.sub(names, "", text))]
        assert not english, f"{name}: {english}"


def test_a_picture_that_fails_in_a_grid_that_passes_is_shown(written):
    text = (written / "en" / "report.md").read_text()
    figure = r"bf16 fails the contest criterion .* picture 1,4 .* of seed 2: 37.1 dB\]\(figures/heatmap-bf16-picture-"
    assert re.search(figure, text, re.S)
    assert text.count("fails the contest criterion") == 1


def test_without_a_gpu(tmp_path):
    """A CPU is not said to idle, a tier's name is not taken for a flag's value, phases are of the run that is given."""
    log(tmp_path, gpu=None)
    names = "profile-baseline", "contest", "verify/verify"
    slow, contest, verify = (change(tmp_path / f"{name}.json") for name in names)
    del slow["kinds"]["idle"]
    slow["waits"] = []
    runs = [dict(sample=total - 1, total=total, process=total) for total in (30.0, 11.0, 10.5)]
    contest["contest"][-1] |= dict(seconds=11.0, runs=runs)
    verify["tiers"] = verify["tiers"][:1]
    verify["tiers"][0]["tier"] = verify["recommended"] = "fp32 again"
    verify["tiers"][0]["worst"]["grid"]["psnr"] = verify["tiers"][0]["parts"][0]["psnr"] = "inf"
    (tmp_path / "verify/heatmap-fp16.png").rename(tmp_path / "verify/heatmap-fp32-again.png")
    for name, record in zip(names, (slow, contest, verify)):
        change(tmp_path / f"{name}.json", **record)
    data = report_data.collect(tmp_path, sections=[1, 2, 3])
    english, chinese = (report.markdown(data, lang) for lang in ("en", "zh"))
    assert re.search(r"the bottleneck is \w+, \d+% of a step\.\n\n", english)
    assert re.search(r"瓶颈是\w+，占每步的 \d+%。\n\n", chinese)
    for text in (english, chinese):
        assert "`--precision fp32`" in text and "10.00" in text and "29.00" not in text
    assert '<td style="text-align:right">inf</td>' in report.page(english, report.draw(data), "en")


def test_a_page_of_its_own(written):
    for lang in ("en", "zh"):
        page = (written / lang / "report.html").read_text()
        assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page) and "http" not in page
        assert f'lang="{lang}' in page and "{{" not in page and "![" not in page
        assert page.count("<img ") == len(list((written / lang / "figures").iterdir())) == 7
        assert "&lt;4, " in page  # what comes from a file is escaped


@pytest.mark.skipif(find() is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_browser_shows_it(written, lang):
    sizes = "[...document.querySelectorAll('p,td,li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    with Browser() as browser:
        for width in (400, 1400):
            browser.open(written / lang / "report.html", width)
            assert not browser.problems
            assert browser.ask("[...document.images].map(i => i.complete && i.naturalWidth > 300)") == [True] * 7
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
            assert browser.ask(f"Math.min(...{sizes})") >= 13
        browser.ask("console.error('seen')")
        assert len(browser.problems) == 1  # what the lines above would have caught


@pytest.mark.skipif(find() is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_it_prints_on_a4(written, tmp_path, lang):
    """No table is wider than the page, the front page is one page, and a row is not cut in two."""
    width, height = (round(mm / 25.4 * 96) for mm in (210 - 2 * 13, 297 - 2 * 14))
    with Browser() as browser:
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.open(written / lang / "report.html", width)
        wide = "[...document.querySelectorAll('table, img, pre')].map(e => Math.max(e.scrollWidth, e.offsetWidth))"
        assert max(browser.ask(wide)) <= width
        assert browser.ask("document.querySelector('h2.after-front').offsetTop") < height
        assert browser.ask("getComputedStyle(document.querySelector('h2.after-front')).breakBefore") == "page"
        assert browser.ask("getComputedStyle(document.querySelector('tr')).breakInside") == "avoid"
        pdf = browser.call("Page.printToPDF", preferCSSPageSize=True)["data"]
        assert 6 <= base64.b64decode(pdf).count(b"/Type /Page\n") <= 15
        data = report_data.collect(written / "log")
        missing = ["weights", "likeness", "vgg", "contest", "v100", "gpus", "fid"]  # all that a GPU's can lack
        data["front"] |= dict(missing=missing, here=[data["front"]["after"]] * 3)
        (tmp_path / "long.html").write_text(report.page(report.markdown(data, lang), report.draw(data), lang))
        browser.open(tmp_path / "long.html", width)
        last = "document.querySelector('h2.after-front').previousElementSibling.getBoundingClientRect().bottom"
        assert browser.ask(f"{last} + scrollY") < height


def test_a_missing_measurement_is_an_error_that_names_it(tmp_path, monkeypatch, capsys):
    log(tmp_path / "log")
    (tmp_path / "log" / "parallel.json").unlink()  # one of the two is enough for the fifth section
    for name, kind in (
        ("ddp", "ddp"),
        ("link", "link"),
        ("verify/verify", "verify"),
        ("profile-fast", "fast"),
        ("ladder", "ladder"),
        ("sweep", "sweep"),
    ):
        path = tmp_path / "log" / f"{name}.json"
        text = path.read_text()
        path.unlink()
        with pytest.raises(SystemExit) as stop:
            write(monkeypatch, tmp_path / "out", "--log", tmp_path / "log")
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        assert f"holds no {kind} measurement; bash scripts/measure.sh {tmp_path / 'log'} makes it" in error
        path.write_text(text)
    assert not (tmp_path / "out").exists()
    (tmp_path / "log" / "ddp.json").unlink()
    write(monkeypatch, tmp_path / "out", "--log", tmp_path / "log", "--sections", 1, 3)
    assert "## 5." not in (tmp_path / "out" / "report.md").read_text()


def test_mixed_and_damaged_files_are_refused_by_name(tmp_path):
    folder = tmp_path / "log"
    log(folder)
    other = folder / "other.json"
    other.write_text((folder / "ladder.json").read_text())
    change(other, gpu="Another GPU")
    with pytest.raises(
        UsageError, match=r"contest-fp32.json is of NVIDIA H200, .*other.json is of Another GPU: .*--log"
    ):
        report_data.collect(folder)
    other.write_text((folder / "sweep.json").read_text())
    with pytest.raises(UsageError, match=r"other.json and .*sweep.json are both sweep measurements"):
        report_data.collect(folder)
    other.write_text((folder / "profile-fast.json").read_text())
    change(other, batch_rows=2)
    with pytest.raises(UsageError, match=r"profile-baseline.json is of batch_rows 16, .*other.json of 2"):
        report_data.collect(folder)
    for damaged in '{"rungs": [', "5", "[" * 100_000, "":
        other.write_text(damaged)
        with pytest.raises(UsageError, match="other.json: not JSON"):
            report_data.collect(folder)
    with pytest.raises(UsageError, match="no such folder"):
        report_data.collect(tmp_path / "nowhere")


def test_files_that_were_cut_short_are_refused_by_name(tmp_path):
    """By measure.sh's mark, and by what they lack. A part that was left out on purpose is no lack."""
    log(tmp_path / "log")

    def without(name, remove):
        path = tmp_path / "log" / f"{name}.json"
        text = path.read_text()
        record = json.loads(text)
        remove(record)
        path.write_text(json.dumps(record))
        try:
            return text_of(tmp_path / "log")
        finally:
            path.write_text(text)

    for name, remove in (
        ("verify/verify", lambda record: record.pop("recommended")),
        ("parallel", lambda record: record["plans"].clear()),
    ):
        with pytest.raises(UsageError, match=f"{name}.json: .*was cut short; .*scripts/"):
            without(name, remove)
    text = without("ddp", lambda record: record.pop("fid_pictures_per_s"))
    assert "## 5." in text and "50k job" not in text
    (tmp_path / "log" / "sweep.json.unfinished").touch()
    with pytest.raises(UsageError, match="sweep.json: its measurement was cut short; bash scripts/measure.sh"):
        report_data.collect(tmp_path / "log")


def test_no_figure_without_measurements():
    for draw in (
        lambda: report_plots.ladder([], 1.0, "floor"),
        lambda: report_plots.scaling({}),
        lambda: report_plots.kinds({}),
        lambda: report_plots.error_against_speed([], evaluate.GATES, "grid"),
        lambda: report_plots.growth([dict(pictures=1, image_size=8, ms=1, ms_a_picture=1)], []),
    ):
        with pytest.raises(ValueError, match="nothing measured"):
            draw()


def test_the_committed_report_is_that_of_the_log(tmp_path):
    """log/report was written from the files in log/ that it names: written from these again, it is the same."""
    text = (ROOT / "log/report/report.md").read_text()
    sources = dict(re.findall(r"^\| `([^`]+\.json)` \| (\w{8}) \|", text, re.M))
    assert len(sources) >= 8
    renewed = [name for name, digits in sources.items() if report_data.digest(ROOT / "log" / name) != digits]
    assert not renewed, f"{', '.join(renewed)}: measured anew since; python scripts/report.py log/report"
    for name in sources:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for file in [ROOT / "log" / name, *(ROOT / "log" / name).parent.glob("heatmap-*.png")]:
            shutil.copy(file, (tmp_path / name).parent)
    data = report_data.collect(tmp_path, sections=[int(n) for n in re.findall(r"^## (\d)\.", text, re.M)])
    assert report.markdown(data, "en") == text
    page = (ROOT / "log/report/report.html").read_text()
    again = report.page(text, report.draw(data), "en")
    without_pictures = [
        re.sub(r'src="[^"]*"', "", one) for one in (again, page)
    ]  # their bytes are matplotlib's version's
    assert len(page) < 3e6 and without_pictures[0] == without_pictures[1]
