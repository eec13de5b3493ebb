"""The report: every figure in it is in a file, incomplete or mixed logs are refused by
name, and a browser shows it.
"""

import base64
import io
import json
import re
import shlex
import shutil

import jinja2
import numpy as np
import pytest
from browser import Browser, find
from conftest import ROOT
from forks import refused, succeeds
from pages import agrees, figures, half_digit, program, recorded, unknown_flags
from PIL import Image

from accel.errors import UsageError
from scripts import report, report_data, verify

REPORT = "scripts/report.py"
FILES = {  # as measure.sh names them
    "ladder": "ladder-h200-512px-16rows",
    "versus": "versus-h200",
    "contest": "contest-h200",
    "contest-fp32": "contest-fp32-h200",
    "profile-baseline": "profile-baseline-tf32-h200",
    "profile-fast": "profile-h200",
    "verify/verify": "verify-h200/verify",
    "parallel": "parallel-h200",
}


def change(path, **fields):
    """Change fields of a record; returns it."""
    record = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(record))
    return record


@pytest.fixture
def log(tmp_path):
    """A whole log of measurements."""
    (tmp_path / "log/verify").mkdir(parents=True)
    for name, file in FILES.items():
        shutil.copy(ROOT / "log" / f"{file}.json", tmp_path / "log" / f"{name}.json")
        change(tmp_path / "log" / f"{name}.json", gpu="NVIDIA H200", version="3.1.4", cores=2)
    shutil.copy(ROOT / "log/verify-h200/heatmap-fp16.png", tmp_path / "log/verify")
    return tmp_path / "log"


def text_of(folder, lang="en", **how):
    return report.markdown(report_data.collect(folder, **how), lang)


def test_both_languages_have_the_same_figures(log, tmp_path, here):
    for lang in ("en", "zh"):
        succeeds(here(REPORT, tmp_path / lang, "--log", log, "--lang", lang, "--team", "Us|7"))
    english, chinese = ((tmp_path / lang / "report.md").read_text() for lang in ("en", "zh"))
    assert r"| Us\|7 |" in english and r"| Us\|7 |" in chinese
    numbers = [re.findall(r"\d+\.\d+", text.rpartition("\n## ")[0]) for text in (english, chinese)]
    assert numbers[0] == numbers[1] and len(numbers[0]) > 150
    assert not re.search("[\u4e00-\u9fff]", english)
    # English, in Chinese figures too
    names = r"DiT-XL/2|CUDA graph|GPU|fp16|bf16|fp32|tf32|exact|px|GELU|adaLN"
    for path in (tmp_path / "zh/figures").glob("*.svg"):
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
        assert not [text for text in texts if re.search("[A-Za-z]{2,}", re.sub(names, "", text))], (
            path
        )
    page = (tmp_path / "zh/report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page) and "http" not in page
    assert page.count("<img ") == len(list((tmp_path / "zh/figures").iterdir())) == 3


def test_every_text_is_translated():
    known = json.loads((report.TEMPLATES / "words.zh.json").read_text())
    tokens = jinja2.Environment().lex((report.TEMPLATES / "report.md.j2").read_text())
    texts = [" ".join(value[1:-1].split()) for _, kind, value in tokens if kind == "string"]
    sentences = {text for text in texts if re.search(r"\w\w[,.:]? \w", text)}
    assert len(sentences) > 50 and not {*sentences, verify.AGAIN} - {*known}


# ---- every figure is traced to its log ----

# of the contest, and versions of programs: no measurements
RULE = r"T below 100 s .*? none\.|^\| (?:driver|torch|version|date) .*?$"


def untraced(data, text):
    """Figures that no file of their section holds, in one of the report's units or as the
    ratio of two beside it.
    """
    computed = [row["ms"] / 4 for row in data["single"]["rungs"]]  # of 250 steps, s
    found = []
    for part in re.split(r"\n## ", text.rpartition("\n## ")[0]):
        roles = set(
            re.findall(r"\w+", report_data.NEEDS.get(int(part[0]) if part[0].isdigit() else 0, ""))
        )
        used = [
            one["path"] for one in data["sources"] if not roles or roles & {*report_data.roles(one)}
        ]
        values = recorded(used) + computed
        blocks = re.split(r"\n\s*\n", part)
        for block, before in zip(blocks, ["", *blocks]):
            cells = [(cell, "") for cell in re.findall(r"(?<=\| )\d+(?= \|)", block)]  # integers
            for number, unit in [*figures(block.replace("×", " × ").replace("%", " % ")), *cells]:
                value, tolerance = half_digit(number)
                held = any(
                    abs(value - one * scale) <= tolerance
                    for one in values
                    for scale in (1, 100, 255)
                )
                if not held and not agrees(number, unit, values, before + block):
                    found.append((number, unit, block[:90]))
    return found


def test_every_figure_is_traced_to_its_log():
    data = report_data.collect(ROOT / "log")
    text = re.sub(RULE, "", report.markdown(data, "en"), flags=re.S | re.M)
    assert untraced(data, text) == []
    wrong = text.replace("| fp16 | 1 | 11.35 |", "| fp16 | 1 | 9.87 |", 1)
    assert [one[0] for one in untraced(data, wrong)][:1] == ["9.87"]


def test_the_commands_it_prints_are_todays():
    seen = set()
    text = (ROOT / "log/report/report.md").read_text()
    for command in re.findall(r"\| `((?:python|torchrun) [^`]*)` \|$", text, re.M):
        file, arguments = program(shlex.split(command))
        assert unknown_flags(file, arguments) == [], file
        seen.add(file)
    assert {
        "bench/steps.py",
        "bench/jobs.py",
        "bench/profile_step.py",
        "bench/many_gpus.py",
    } <= seen


def test_the_committed_report_is_that_of_the_log():
    """log/report was written from the files in log/ that it names: written again, it is
    the same.
    """
    text = (ROOT / "log/report/report.md").read_text()
    data = report_data.collect(ROOT / "log")
    assert report.markdown(data, "en") == text, "python scripts/report.py log/report"
    pages = (
        report.page(text, report.draw(data), "en"),
        (ROOT / "log/report/report.html").read_text(),
    )
    # the pictures' bytes are matplotlib's version's
    again, page = (re.sub(r'src="[^"]*"', "", one) for one in pages)
    assert again == page and len(pages[1]) < 3e6


# ---- honesty ----


@pytest.mark.parametrize(
    "other", [dict(model="DiT-Demo/2"), dict(image_size=256), dict(steps=50), dict(pictures=4)]
)
def test_a_rehearsal_has_no_points_and_a_report_has_upstreams_arithmetic(log, other):
    assert "| 50.0 |" in text_of(log) and "rehearsal" not in text_of(log)
    change(log / "contest.json", **other)
    (log / "contest-fp32.json").unlink()
    assert "| 50.0 |" not in text_of(log) and "| rehearsal: none |" in text_of(log)
    # without upstream's arithmetic
    change(log / "contest.json", contest=change(log / "contest.json")["contest"][1:])
    with pytest.raises(UsageError, match="no contest measurement of fp32"):
        report_data.collect(log)


def on_two(log):
    """Add a measurement of the contest's job in fp16 on two GPUs."""
    shutil.copy(log / "contest.json", log / "contest-gpus.json")
    row = next(row for row in change(log / "contest.json")["contest"] if row["tier"] == "fp16")
    runs = [dict(load=1.5, sample=4.2, gather=0.1, save=0.4, total=6.25)]
    change(log / "contest-gpus.json", gpus=2, contest=[row | dict(seconds=6.25, runs=runs)])


def test_the_contests_job_on_several_gpus_is_in_the_tables_and_the_conclusion(log):
    on_two(log)
    text = text_of(log)
    assert "### T by tier and GPUs" in text
    assert (
        "| fp16 | 2 | 6.25 | 6.25 | load 1.50, sample 4.20, gather 0.10, save 0.40 | 50.0 |" in text
    )
    assert "| here | fp16 | 2 | 6.25 | 16.69× | " in text
    words = "makes the grid in 6.25 s on 2 × NVIDIA H200, measured in `contest-gpus.json`."
    assert f"`--precision fp16` {words}" in text
    assert "| fp16, 512 px + 8 labels | 2: 1.94× |" in text  # 8.13 s of sampling on one


def test_ranks_that_share_a_cpu_prove_no_scaling(log):
    on_two(log)
    for path in log.rglob("*.json"):
        change(path, gpu=None)
    data = report_data.collect(log)
    text = report.markdown(data, "en")
    assert "×" not in text[text.index("## 4.") :] and "scaling.svg" not in report.draw(data)
    assert "| fp16 | 2 | 6.25 |" in text and "### T by tier and processes" in text
    assert "| here | fp16 | 1 |" in text and "| here | fp16 | 2 |" not in text


def test_the_front_page_shows_both_pictures_and_names_gaps(log):
    data = report_data.collect(log)
    assert {"likeness", "lpips", "weights"} == {*data["front"]["missing"]}  # verified at 128 px
    image = Image.open(io.BytesIO(report.draw(data)["pictures.jpg"]))
    heatmap = Image.open(data["front"]["shown"]["heatmap"])
    assert image.width == 1800 and abs(image.height / 1800 - heatmap.height / heatmap.width) < 0.01
    tiers = change(log / "verify/verify.json")["tiers"]
    for tier in tiers:  # as verify.py leaves them without LPIPS' weights
        tier["worst"]["grid"]["lpips"] = "nan"
    change(log / "verify/verify.json", tiers=tiers, vgg_weights=None)
    assert "vgg" in report_data.collect(log)["front"]["missing"] and " nan |" not in text_of(log)


def test_the_picture_that_is_handed_in_decides_tier_and_time(log, tmp_path, here):
    """The T of the picture replaces that of the same tier on as many GPUs. It names its file. A
    record of several tiers needs --tier.
    """
    rows = {row["tier"]: row for row in change(log / "contest.json")["contest"]}
    (log / "final").mkdir()
    result = log / "final/contest.json"
    shutil.copy(log / "contest.json", result)
    run = rows["exact"]["runs"][0] | dict(total=26.5)
    change(result, contest=[rows["exact"] | dict(seconds=26.5, runs=[run])], decoder="ema")
    (log / "verify/heatmap-exact.png").write_bytes((log / "verify/heatmap-fp16.png").read_bytes())
    succeeds(here(REPORT, tmp_path / "out", "--log", log))
    text = (tmp_path / "out/report.md").read_text()
    assert "handed in was made with `--precision exact`. T = 26.50 s on 1 × NVIDIA H200" in text
    assert f"measured in `{result}`" in text and f"| `{result}` |" in text
    assert "| handed in | exact | 1 | 26.50 |" in text and "27.29" not in text
    change(log / "contest.json", contest=[rows["exact"]])  # replaced: no figure is of it
    succeeds(here(REPORT, tmp_path / "out", "--log", log))
    assert "| `contest.json` |" not in (tmp_path / "out/report.md").read_text()
    change(log / "contest.json", contest=[*rows.values()])
    change(result, contest=[rows["exact"], rows["fp16"]])
    words = "--tier: .* has exact fp16; give --tier the one that you hand in"
    assert re.search(words, refused(here(REPORT, tmp_path / "out", "--log", log)))
    succeeds(here(REPORT, tmp_path / "out", "--log", log, "--tier", "fp16"))
    assert "| handed in | fp16 |" in (tmp_path / "out/report.md").read_text()
    change(result, weights="another.pt")
    words = "is of weights random, seed 0, .*/final/contest.json of another.pt"
    assert re.search(words, refused(here(REPORT, tmp_path / "out", "--log", log)))
    result.unlink()
    succeeds(here(REPORT, tmp_path / "out", "--log", log, "--tier", "exact"))
    text = (tmp_path / "out/report.md").read_text()
    assert "`--precision exact` makes the grid in 27.29 s" in text and "handed in" not in text


def test_the_front_page_draws_three_panels_without_texts(log):
    """From verify.py's pictures; identical ones are said to be so."""
    want = np.zeros((20, 40, 3), np.uint8)
    seed = change(log / "verify/verify.json")["tiers"][2]["worst_seed"]
    Image.fromarray(want).save(log / f"verify/seed{seed}-fp32.png")
    for most, words in ((0, "They are identical."), (9, "at most 9 of 0–255, shown brightest.")):
        got = want.copy()
        got[3, 5, 1] = most
        Image.fromarray(got).save(log / f"verify/seed{seed}-fp16.png")
        data = report_data.collect(log)
        image = Image.open(io.BytesIO(report.draw(data)["pictures.jpg"]))
        assert image.size == ((3 * 40 + 2, 20) if most else (2 * 40 + 1, 20))
        assert words in report.markdown(data, "en")


def test_the_functions_that_take_the_most_are_shown(log):
    functions = [dict(name="void gemm<a|b>" + 99 * "x", ms=1.2344, calls=28.0)]
    change(log / "profile-fast.json", functions=functions)
    text = text_of(log)
    assert "| here, fp16: function | ms per step | calls per step |" in text
    assert re.search(r"\| `void gemm<a\\\|bx?>x{55}\.\.\.` \| 1.234 \| 28 \|", text), text


def test_a_cpu_has_nothing_to_compare(log):
    """A report of a CPU has one tier, fp32."""
    for path in log.rglob("*.json"):
        change(path, gpu=None)
    rows = change(log / "contest-fp32.json")["contest"]
    change(log / "contest.json", contest=rows)
    (log / "contest-fp32.json").unlink()
    (log / "profile-fast.json").unlink()
    data = report_data.collect(log)
    text = report.markdown(data, "en")
    assert "This machine runs fp32 alone. There is nothing to compare with." in text
    assert "| speed-up |" not in text
    assert [*report.draw(data)] == ["pictures.jpg"]
    assert not re.search("parallel.*json", text)  # shown nowhere
    assert "on one GPU" not in text and "| fp32 | 1.00× |" not in text


# ---- a browser shows it ----


@pytest.mark.skipif(find() is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_browser_shows_and_prints_it(log, tmp_path, lang, here):
    """At the width of a telephone and on A4: nothing is wider than the page, and the
    front page is one page.
    """
    succeeds(here(REPORT, tmp_path / "out", "--log", log, "--lang", lang))
    width, height = (round(mm / 25.4 * 96) for mm in (210 - 2 * 13, 297 - 2 * 14))
    with Browser() as browser:
        browser.open(tmp_path / "out/report.html", 400)
        assert (
            browser.ask("[...document.images].map(i => i.complete && i.naturalWidth > 300)")
            == [True] * 3
        )
        assert (
            browser.ask("document.documentElement.scrollWidth <= innerWidth")
            and not browser.problems
        )
        browser.open(tmp_path / "out/report.html", 900)
        front = "document.querySelectorAll('table')[1]"
        assert browser.ask(f"{front}.scrollWidth <= {front}.clientWidth")
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.open(tmp_path / "out/report.html", width)
        wide = (
            "[...document.querySelectorAll('table, img, pre')].map(e => Math.max(e.scrollWidth, "
            "e.offsetWidth))"
        )
        assert max(browser.ask(wide)) <= width
        assert browser.ask("document.querySelector('h2.after-front').offsetTop") < height
        pdf = browser.call("Page.printToPDF", preferCSSPageSize=True)["data"]
        assert 4 <= base64.b64decode(pdf).count(b"/Type /Page\n") <= 9


# ---- refusals ----


def test_a_missing_measurement_is_an_error_that_names_it(log, tmp_path, here):
    for name, kind in (
        ("parallel", "parallel"),
        ("verify/verify", "verify"),
        ("profile-fast", "fast"),
    ):
        path = log / f"{name}.json"
        path.rename(path.with_suffix(".away"))
        error = refused(here(REPORT, tmp_path / "out", "--log", log))
        assert f"holds no {kind} measurement; bash scripts/measure.sh {log} makes it" in error
        assert not (tmp_path / "out").exists()
        path.with_suffix(".away").rename(path)
    (log / "parallel.json").unlink()
    succeeds(here(REPORT, tmp_path / "out", "--log", log, "--sections", 1, 3))
    assert "## 4." not in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("key", ["model", "rungs"])
def test_a_measurement_without_an_entry_is_a_line(key, log, tmp_path, here):
    record = json.loads((log / "ladder.json").read_text())
    (log / "ladder.json").write_text(
        json.dumps({name: value for name, value in record.items() if name != key})
    )
    error = refused(here(REPORT, tmp_path / "out", "--log", log))
    assert "a file lacks an entry" in error and key in error


def test_mixed_damaged_and_unfinished_files_are_refused_by_name(log):
    other = log / "other.json"
    shutil.copy(log / "ladder.json", other)
    longer = 2 * json.loads(other.read_text())["rungs"]
    change(other, gpu="Another GPU")
    with pytest.raises(
        UsageError, match=r"contest-fp32.json is of NVIDIA H200, .*other.json is of Another GPU: "
    ):
        report_data.collect(log)
    for name, words, field, sections in (
        (
            "profile-fast",
            "profile-baseline.json is of batch_rows 16, .*other.json of 2",
            dict(batch_rows=2),
            (2,),
        ),
        (
            "contest",
            "contest-fp32.json is of image_size 512, .*other.json of 256",
            dict(image_size=256),
            (3,),
        ),
        (
            "ladder",
            "profile-baseline.json is of image_size 512, .*other.json of 64",
            dict(image_size=64, rungs=longer),
            (1, 2),
        ),
    ):
        shutil.copy(log / f"{name}.json", other)
        change(other, **field)
        with pytest.raises(UsageError, match=words):
            report_data.collect(log, sections)
    for damaged in '{"rungs": [', "5", "[" * 100_000, "":
        other.write_text(damaged)
        with pytest.raises(UsageError, match="other.json: not JSON"):
            report_data.collect(log)
    other.unlink()
    (log / "parallel.json.unfinished").touch()
    with pytest.raises(
        UsageError, match="parallel.json: is not finished: wait, or if nothing runs, give"
    ):
        report_data.collect(log)
