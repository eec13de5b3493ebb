"""The report: the five graded parts from a log, every figure in a file or computed from one;
incomplete, mixed and foreign logs are refused by name; a browser shows it.
"""

import base64
import json
import math
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
from bench.steps import LADDERS
from scripts import report, report_data

REPORT = "scripts/report.py"
RESULT = "handin/log/FINAL_RESULT.txt"
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


def files_of(log, picture="contest-4-exact.png", lang="en", lpips=None, edition="contest-2025-06"):
    args = Namespace(log=log, picture=log / picture, lang=lang, team="Us", edition=edition)
    return report.report(args, lpips or Lpips())


def data_of(log, picture="contest-4-exact.png", edition="contest-2025-06", lpips=None):
    """The report's contents, without texts and figures."""
    read = report_data.read_log(log)
    return report_data.collect(read, log / picture, edition, lpips or Lpips())


@pytest.fixture(scope="module")
def written(measured):
    """Language → files of its report."""
    return {lang: files_of(measured, lang=lang) for lang in LANGUAGES}


# ---- the parts ----


def section(text, number):
    return re.search(rf"^## {number}\. .*?(?=^## )", text, re.S | re.M)[0]


def test_the_parts_are_the_contests_in_its_order(written):
    parts = ["Baseline", "Profile", "Optimised result", "Design", "Optimised result", "Key optim"]
    text = written["en"]["report.md"].decode()
    titles = re.findall(r"^## (\d.*)$", text, re.M)
    assert all(
        title.startswith(f"{n}. {part}") for n, (title, part) in enumerate(zip(titles, parts), 1)
    )
    assert len(titles) == len(re.findall(r"^## \d", written["zh"]["report.md"].decode(), re.M)) == 6
    figures = {name for name in written["en"] if name.startswith("figures/")}
    assert figures == set(re.findall(r"\]\((figures/\S+)\)", text)) and len(figures) == 6


def test_the_baseline_is_the_organisers_program_or_ours(log):
    data = data_of(log)
    baseline = data["baseline"]
    assert (baseline["who"], baseline["printed"], baseline["T"]) == ("fork", 39.1, 42.5)
    before = data["before"]
    # a step is its trace's: 143.4 ms, of which attention takes 78.2
    assert (before["name"], before["tier"], before["main"]) == ("fork", "tf32", "attention")
    assert before["ms"] == pytest.approx(143.4) and before["tflops"] == pytest.approx(117, 0.01)
    record = json.loads((log / "ladder.json").read_text())
    del record["ceilings"]["tflops"]["tf32"]
    contest_log.write(log / "ladder.json", record)
    text = files_of(log)["report.md"].decode()  # no ceiling is made up
    assert re.search(r"\| attention \| 78.2 \| 55 % \| 28 .* \| – \| – \|\n", text)
    (log / "fork.json").unlink()
    data = data_of(log)
    assert data["baseline"]["who"] == "here" and data["baseline"]["T"] == pytest.approx(104.28)
    assert data["before"]["tier"] == data["baseline"]["tier"] == "fp32"


def test_several_gpus_are_compared_with_one(log):
    data = data_of(log)
    # T 27.07 s on one GPU, 9.02 on four
    assert data["result"]["speedup"] == pytest.approx(27.07 / 9.02, abs=0.002)
    assert data["result"]["efficiency"] == pytest.approx(27.07 / 9.02 / 4, abs=0.002)
    assert data["result"]["sample_speedup"] == pytest.approx(4 / 1.03**3)
    assert list(dict.fromkeys(row["tier"] for row in data["runs"])) == [
        *("fp32", "exact", "tf32", "fp16")
    ]


def test_report_json_names_no_folder_of_this_machine():
    home, root = report_data.Path.home(), report_data.ROOT
    found = report_data.plain({"why": [f"{home}/.cache/x: no VGG16", root / "log/mine", math.inf]})
    assert found == {"why": ["~/.cache/x: no VGG16", "log/mine", "inf"]}


def test_the_ladder_is_of_the_tier_that_is_handed_in(log):
    """From fp32 by the baseline's tier, each rung with its gain over the one before. The last rung
    of another tier stands alone. A rung is within the spread if its interval overlaps the
    interval of the rung above.
    """
    ladder = json.loads((log / "ladder.json").read_text())["rungs"]
    ms = {rung["rung"]: rung["ms"] for rung in ladder}
    slow = dict(rung="exact + split GEMMs", ms=120.0, p10=120.0, p90=120.0, error=5e-7)
    same = dict(slow, rung="exact + CUDA graph")
    rungs = [rung for rung in ladder if rung["rung"] != "exact"]
    change(log / "ladder.json", rungs=[*rungs, slow, same])
    files = files_of(log, "contest-2-exact.png")
    rows = json.loads(files["report.json"])["ladder"]
    names = ["fp32", "tf32", "exact + split GEMMs", "exact + CUDA graph", "fp16 + CUDA graph"]
    assert [row["rung"] for row in rows] == names
    assert [row.get("before") for row in rows] == [None, ms["fp32"], ms["tf32"], 120.0, None]
    text = section(files["report.md"].decode(), 3)
    assert (
        "| exact + CUDA graph | 120.0 | 120.0 to 120.0 | within the spread |" in text
        and "fp16 + CUDA graph (all rungs)" in text
    )
    assert "Within the spread: exact + CUDA graph." in text
    assert "Rungs of `fp16`, ms per step: " in text
    rows = data_of(log, "contest-2-fp16.png")["ladder"]
    assert sum(row["tier"] == "fp16" for row in rows) == len(LADDERS["fp16"])


# ---- the judged pictures ----


def change_picture(log, name, levels):
    """Change a measured picture by so many levels in two fifths of its columns."""
    pixels = evaluate.read_picture(log / f"{name}.png").pixels.copy()
    pixels[:, ::5] ^= levels
    pixels[:, 1::5] ^= levels
    contest_log.Image.fromarray(pixels).save(log / f"{name}.png")
    record, tier = name.rsplit("-", 1)
    content = json.loads((log / f"{record}.json").read_text())
    [row] = [row for row in content["contest"] if row["tier"] == tier]
    row["grids"][0]["picture"] = report_data.digest_of(log / f"{name}.png")
    contest_log.write(log / f"{record}.json", content)


def test_the_verdict_is_by_the_edition_and_of_the_files_of_the_hand_in(log):
    """0.4 of 255 misses the first edition's MAE. The last edition's clock starts after loading."""
    change_picture(log, "contest-4-fp16", 1)
    files = files_of(log, "contest-4-fp16.png")
    data = json.loads(files["report.json"])
    judged = data["result"]["judged"]
    assert judged["verdict"] == "FAIL" and 0.39 < judged["worst"]["mae"] < 0.41
    assert data["job"]["rehearsal"] == ["verdict"] and data["points"] is None
    assert b"REHEARSAL, which earns no points: the verdict is FAIL" in files[RESULT]
    assert "Verdict: **FAIL**" in files["report.md"].decode()
    assert b"VERDICT: FAIL (gate contest-2025-06)" in files["handin/verdict.txt"]
    assert files["handin/sample.png"] == (log / "contest-4-fp16.png").read_bytes()
    assert files["handin/baseline.png"] == (log / "fork.png").read_bytes()
    data = data_of(log, "contest-4-fp16.png", "contest-2025-07")
    assert data["result"]["judged"]["verdict"] == "PASS" and data["job"]["rehearsal"] == ["grids"]
    assert data["result"]["T"] == data["result"]["printed"] < data["result"]["seconds"]


def test_several_grids_are_compared_in_pairs(log):
    """Eight of them are the last edition's; T is of one."""
    digests = [contest_log.picture(log / f"{index}.png", 5 * index) for index in range(8)]
    for path in log.glob("*.json"):
        record = json.loads(path.read_text()) | dict(grids=8)
        for row in record.get("contest", [record.get("fork", {})]):
            names = [f"{path.stem}-{row.get('tier')}_{index}.png" for index in range(8)]
            for index, name in enumerate(names):
                shutil.copy(log / f"{index}.png", log / name)
            row["grids"] = [dict(file=name, picture=digest) for name, digest in zip(names, digests)]
        contest_log.write(path, record)
    files = files_of(log, "contest-4-fp16_0.png", edition="contest-2025-07")
    data = json.loads(files["report.json"])
    assert data["job"]["rehearsal"] == [] and data["result"]["judged"]["mean"]["mae"] == 0
    once = data["result"]["phases"]
    assert data["result"]["T"] == pytest.approx((once["sample"] + once["decode"]) / 8)
    assert data["points"] == 100 and "100.0 of 100 points" in files["report.md"].decode()
    for index in range(8):
        content = (log / f"contest-4-fp16_{index}.png").read_bytes()
        assert files[f"handin/output/sample_{index}.png"] == content
        assert files[f"handin/output/baseline_{index}.png"] == content


def test_one_of_their_eight_grids_is_handed_in_next_to_our_one(log):
    record = json.loads((log / "fork.json").read_text())
    more = [dict(file=f"fork_{index}.png") for index in range(1, 8)]
    for grid in more:
        grid["picture"] = contest_log.picture(log / grid["file"], 9)
    record["fork"]["grids"] += more
    contest_log.write(log / "fork.json", record)
    files = files_of(log)
    pictures = {name for name in files if name.startswith("handin/") and name.endswith(".png")}
    assert pictures == {"handin/baseline.png", "handin/sample.png"}
    assert files["handin/baseline.png"] == (log / "fork.png").read_bytes()
    assert "It sampled 8 grids one after the other" in files["report.md"].decode()


def test_no_value_is_invented_for_lpips(log, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    data = data_of(log, lpips=evaluate.Lpips())
    judged = data["result"]["judged"]
    assert judged["verdict"] == judged["results"]["lpips"] == "NONE"
    assert data["job"]["rehearsal"] == ["verdict"]
    # identical pictures need no network
    data = data_of(log, "contest-1-fp32.png", lpips=evaluate.Lpips())
    assert data["result"]["judged"]["verdict"] == "PASS" and data["points"] is not None


@pytest.mark.parametrize(
    "edition, seconds, points",
    [
        ("contest-2025-06", 100, 50),
        ("contest-2025-06", 300 / 3**0.5, 25),
        ("contest-2025-06", 300, 0),
        ("contest-2025-06", 900, 0),
        ("contest-2025-07", 20, 100),
        ("contest-2025-07", 60, 100),
        ("contest-2025-07", 360 / 6**0.5, 50),
        ("contest-2025-07", 360, 0),
    ],
)
def test_the_contests_points(edition, seconds, points):
    assert evaluate.EDITIONS[edition].points(seconds) == pytest.approx(points, abs=1e-9)


@pytest.mark.parametrize(
    "fields, why",
    [
        ({}, []),
        (dict(steps=25), ["job"]),
        (dict(weights="random, seed 0"), ["random", "files"]),
        (dict(weights="mine.pt"), ["files"]),
        (dict(decoder="mse"), ["files"]),
    ],
)
def test_another_job_or_other_files_are_a_rehearsal(fields, why, log):
    for path in log.glob("*.json"):
        change(path, **fields)
    data = data_of(log)
    assert data["job"]["rehearsal"] == why and (data["points"] is None) == bool(why)


def test_other_weights_of_the_same_name_are_a_rehearsal(log, monkeypatch):
    name = contest_log.ABOUT["weights"]
    monkeypatch.setitem(report_data.PUBLISHED, "weights", (name, "abc"))
    assert data_of(log)["job"]["rehearsal"] == ["files"]
    monkeypatch.setitem(report_data.PUBLISHED, "weights", (name, "1" * 64))
    assert data_of(log)["job"]["rehearsal"] == []


def test_what_was_asked_for_and_is_missing_is_named(log):
    (log / "fork.json").unlink()
    (log / "label-2.json").unlink()
    files = files_of(log)
    data = json.loads(files["report.json"])
    assert data["missing"] == ["fork.json", "label-2.json"]
    assert data["job"]["rehearsal"] == ["missing"] and data["points"] is None
    assert files[RESULT].startswith(b"REHEARSAL, which earns no points: missing fork.json, label-2")
    text = files["report.md"].decode()
    assert "**This is a rehearsal.** Measurements are missing: `fork.json`, `label-2.json`" in text


@pytest.mark.parametrize(
    "commit, unmodified",
    [("97dab9f", True), ("97dab9f-dirty", False), ("abc1234", False), (None, False)],
)
def test_only_a_clean_checkout_of_a_known_commit_is_unmodified(commit, unmodified, log):
    record = json.loads((log / "fork.json").read_text())
    record["fork"]["of_commit"] = commit
    contest_log.write(log / "fork.json", record)
    assert data_of(log)["baseline"]["unmodified"] == unmodified


@pytest.mark.parametrize("lang", LANGUAGES)
def test_one_gpu_gives_a_report_that_names_its_gaps(lang, log):
    for name in ("contest-2", "contest-4", "label-2", "label-4", "label-1", "layouts"):
        (log / f"{name}.json").unlink()
    asked = (log / "asked.txt").read_text().splitlines()[:3]
    kept = ["contest-1.json", "fork.json", "ladder.json"]
    (log / "asked.txt").write_text("\n".join([*asked, *kept]))
    files = files_of(log, "contest-1-exact.png", lang)
    data = json.loads(files["report.json"])
    assert data["machine"]["gpus"] == 1 and not data["job"]["rehearsal"] and not data["designs"]
    text = files["report.md"].decode()
    assert text.count({"en": "missing", "zh": "缺"}[lang]) == 2 and "scaling.svg" not in text


def test_a_cpu_makes_no_claims_about_gpus(log):
    for path in log.glob("*.json"):
        change(path, gpu=None)
    files = files_of(log)
    text = files["report.md"].decode()
    assert "There was no GPU." in text and "on one process" in text
    assert not {"figures/scaling.svg", "figures/roofline.svg"} & set(files)
    assert "GPU" not in section(text, 5) and "ceiling" not in text and "GB/s |" not in text


# ---- what the team writes ----


def test_what_is_to_be_written_is_marked_and_kept(log, tmp_path, here):
    printed = succeeds(here(REPORT, tmp_path / "out", *flags_of(log), "--lang", "zh"))
    notes = log / "notes.zh.md"
    count = notes.read_text().count("TO WRITE（")
    assert printed.count("TO WRITE in ") == count and f"TO WRITE in {notes}: 创新性说明" in printed
    page = (tmp_path / "out/report.html").read_text()
    assert page.count('<p class="todo"><mark>TO WRITE</mark>') == count
    assert json.loads((tmp_path / "out/report.json").read_text())["to_write"] == count
    mine = re.sub(r"^TO WRITE.*$", "我们写的 <b>内容</b>。", notes.read_text(), flags=re.M)
    notes.write_text(mine + "\n## 更多\n\n第四节。\n")
    files = files_of(log, lang="zh")
    text = files["report.md"].decode()
    assert "TO WRITE" not in text and text.count("我们写的") == count and "### 更多" in text
    assert b"&lt;b&gt;" in files["report.html"]


def test_notes_as_people_write_them(log):
    """A byte-order mark, text before the first heading, a comment in code that looks like one, a
    picture; a file in another encoding and a picture that is not there are refused.
    """
    shutil.copy(log / "fork.png", log / "trace.png")
    notes = log / "notes.en.md"
    text = (
        "Before.\n\n## One\n\n```\n## no heading\n```\n\n![a trace](trace.png)\n\n## Two\n\nLast.\n"
    )
    notes.write_text(text, encoding="utf-8-sig")
    files = files_of(log)
    found = json.loads(files["report.json"])["notes"]
    assert [title for title, _ in found] == ["", "One", "Two"] and found[0][1] == "Before."
    assert "\n## no heading\n" in found[1][1]
    assert files["figures/trace.png"] == (log / "fork.png").read_bytes()
    assert b'<figure class="trace"><img alt="a trace" src="data:image/png' in files["report.html"]
    for content, words in (
        ("## 一\n\n内容".encode("gbk"), "notes.en.md: is not UTF-8; save it as UTF-8"),
        (b"![x](none.png)", "notes.en.md: none.png: no such picture"),
    ):
        notes.write_bytes(content)
        with pytest.raises(UsageError, match=words):
            files_of(log)


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
        yield profile["ms"] / (profile["floor_ms"] or 1)
        yield profile["ms"] * data["job"]["steps"] / 1e3
        yield profile["gflop"] / 1e3
        for row in profile["kinds"].values():
            yield row["ms"] - (row["floor_ms"] or 0)
    result = data["result"]
    yield from (data["baseline"]["T"] / row["T"] for row in data["runs"])
    yield result["seconds"] - result["phases"]["sample"]
    yield data["baseline"]["seconds"] - before["ms"] * data["job"]["steps"] / 1e3
    yield after["kinds"]["GEMM"]["ms"] - before["kinds"]["GEMM"]["ms"]
    # Amdahl's law
    alone = next(row for row in data["runs"] if row["tier"] == after["tier"])
    divided = alone["phases"]["sample"] + alone["phases"]["decode"]
    fixed = alone["seconds"] - divided
    gpus = result["gpus"]
    yield from (divided, fixed, fixed + divided / gpus, fixed * (1 - 1 / gpus))
    yield from (alone["seconds"] / fixed, alone["seconds"] / (fixed + divided / gpus))
    yield from (alone["seconds"] / result["seconds"], result["seconds"] - alone["seconds"] / gpus)
    yield from (rung["before"] - rung["ms"] for rung in data["other_rungs"])
    for trace in data["traces"]:
        yield trace["ms"] - trace["busy"]
        yield trace["busy"] - sum(row["ms"] for row in trace["layers"].values())
    slowest = data["ladder"][0]["ms"]
    yield from (slowest / rung["ms"] for rung in data["ladder"])
    for table in data["designs"]:
        for row in table["rows"]:
            if row["measured"]:
                yield row["measured"] / row["ms"]
                yield table["ms"] / row["measured"]
            yield row["ms"] - table["ms"] / table["gpus"]  # an exchange
            yield table["ms"] * (1 - row["share"])
            if row["name"] == table["chosen"]:
                bad = table["ms"] / table["gpus"] + (table["tensor"] or 0)
                yield from (table["ms"] / table["gpus"], table["gpus"], bad)
                yield bad / (row["measured"] or row["ms"])
    size = 2 if after["tier"] == "fp16" else 4
    yield data["shape"]["parameters"] * size / 2**30


def test_every_figure_is_traced_to_report_json(written):
    data = json.loads(written["en"]["report.json"])
    text = written["en"]["report.md"].decode().partition("## Sources")[0]
    assert untraced([data, list(derived(data))], text) == []
    wrong = text.replace("| 9.02 |", "| 9.87 |", 1)
    assert untraced([data, list(derived(data))], wrong) == ["9.87"]


@pytest.mark.parametrize("lang, name", [("en", "report"), ("zh", "report-zh")])
def test_the_committed_example_is_that_of_its_files(lang, name):
    """Its text follows from its report.json, whose measurements lie next to it, without their
    pictures.
    """
    folder = ROOT / "log/example"
    data = json.loads((folder / name / "report.json").read_text())
    text = (folder / name / "report.md").read_text()
    assert report.render(data, lang)[0] == text
    assert (
        lang == "zh" or untraced([data, list(derived(data))], text.partition("## Sources")[0]) == []
    )
    for source in data["sources"]:
        assert report_data.digest_of(folder / source["file"]).startswith(source["digest"])


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
    for command in commands:
        file, arguments = program(command.split())
        assert unknown_flags(file, arguments) == [], command
    again = "python sample.py --gpus 4 --ckpt DiT-XL-2-512x512.pt --precision exact --output again"
    assert len(commands) == 5 and again in text
    assert commands[-1].endswith("--log log/again --picture log/again/contest-4-exact.png")
    environment = written[lang]["handin/environment.txt"].decode()
    assert "\ntorch==" in environment and "contest-4.json: python bench/measure.py" in environment


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
    flags = ["--team", "Us", "--edition", "contest-2025-06", "--log", log]
    return [*flags, "--picture", log / picture]


def test_nothing_is_assumed(log, tmp_path, here):
    flags = flags_of(log)
    for place in range(0, len(flags), 2):
        line = refused(here(REPORT, tmp_path / "out", *flags[:place], *flags[place + 2 :]))
        assert f"the following arguments are required: {flags[place]}" in line


@pytest.mark.parametrize("folder", ["log", "log/example"])
def test_the_authors_log_is_no_teams(folder, tmp_path, here):
    flags = flags_of(ROOT / folder)
    line = refused(here(REPORT, tmp_path / "out", *flags))
    assert "is of this software's authors; measure on your own machine" in line
    assert not (tmp_path / "out/report.md").exists()


@pytest.mark.parametrize(
    "file, field, words",
    [
        ("ladder", dict(gpu="NVIDIA V100"), "is of gpu NVIDIA H200, .*ladder.json of NVIDIA V100"),
        (
            "layouts",
            dict(weights="B.pt"),
            "is of weights DiT-XL-2-512x512.pt, .*layouts.json of B.pt",
        ),
        ("contest-4", dict(steps=20), "of steps 250, .*contest-4.json of 20"),
        ("fork", dict(image_size=256), "of image_size 512, .*fork.json of 256"),
    ],
)
def test_another_machine_or_other_weights_are_refused(file, field, words, log):
    change(log / f"{file}.json", **field)
    with pytest.raises(UsageError, match=words):
        files_of(log)


def test_a_picture_that_was_not_measured_is_refused(log, tmp_path):
    shutil.copy(ROOT / "docs/page.png", log / "other.png")
    for name, words in (
        ("none.png", "none.png: no such file"),
        ("other.png", "other.png: was not measured in this log; choose from .*contest-4-exact.png"),
        ("label-4-exact.png", "was not measured"),  # the first of eight labels' pictures
    ):
        with pytest.raises(UsageError, match=words):
            files_of(log, name)
    contest_log.picture(log / "contest-1-fp16.png", 5)
    words = "contest-1-fp16.png: is not the picture that contest-1.json measured"
    with pytest.raises(UsageError, match=words):
        files_of(log)


def test_a_missing_measurement_is_an_error_that_names_it(log):
    (log / "ladder.json").unlink()
    with pytest.raises(UsageError, match=f"no steps measurement; bash scripts/measure.sh {log} "):
        files_of(log)


def test_a_tier_without_a_profile_or_layouts_is_a_line(log):
    record = json.loads((log / "ladder.json").read_text())
    profiles = [row for row in record["profiles"] if row["tier"] != "exact"]
    change(log / "ladder.json", profiles=profiles)
    with pytest.raises(UsageError, match="holds no profile of exact"):
        files_of(log)
    with pytest.raises(UsageError, match="layouts.json: has no tf32 with 8 labels"):
        files_of(log, "contest-4-tf32.png")


@pytest.mark.parametrize("key", ["rungs", "shape"])
def test_a_measurement_without_an_entry_is_a_line(key, log):
    record = json.loads((log / "ladder.json").read_text())
    del record[key]
    contest_log.write(log / "ladder.json", record)
    with pytest.raises(UsageError, match=f"a file lacks an entry .*{key}"):
        files_of(log)


def test_damaged_and_unfinished_files_are_refused_by_name(log):
    for damaged in '{"rungs": [', "5", "":
        (log / "other.json").write_text(damaged)
        with pytest.raises(UsageError, match="other.json: not JSON"):
            files_of(log)
    (log / "other.json").unlink()
    (log / "layouts.json.unfinished").touch()
    with pytest.raises(UsageError, match="layouts.json: is not finished: wait, or if nothing"):
        files_of(log)
