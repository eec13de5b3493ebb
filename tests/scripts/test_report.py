"""The report: every figure in it is in a file, what is missing or mixed is refused by name, and a real browser shows
it."""

import json
import re
import shutil
import sys

import pytest
from browser import Browser, find
from conftest import ROOT
from PIL import Image

import evaluate
from accel.errors import UsageError
from bench import plots
from scripts import report

GPU = "Test GPU 9000"


def rung(name, ms, error=1e-3, psnr=None):
    row = dict(rung=name, ms=ms, p10=ms * 0.99, p90=ms * 1.02, steps=9, error=error)
    if psnr is not None:
        worst = dict(mae=1e-3, psnr=psnr, ssim=0.99)
        row["judged"] = dict(pictures=64, worst=worst, contest=psnr > 40, strict=psnr > 70)
    return row


def profile(baseline, ms):
    kinds = {
        "GEMM": dict(ms=ms * 0.7, share=0.7, tflop=14.6, tflops=600.0, of_ceiling=0.8),
        "attention": dict(ms=ms * 0.2, share=0.2, tflop=2.2, tflops=400.0, of_ceiling=0.5),
        "norm/elementwise": dict(ms=ms * 0.08, share=0.08, gb=11.0, gb_s=3500.0, of_ceiling=0.9),
        "copies": dict(ms=0.011, share=1e-4),
        "idle": dict(ms=ms * 0.02, share=0.02),
    }
    wait = dict(where="aten::to → aten::copy_ → cudaStreamSynchronize", per_step=11.0, ms_per_step=ms * 0.9)
    function = dict(name="void at::native::kernel<a|b>(int)", calls=84, total_ms=ms, average_ms=ms / 84)
    return dict(
        kind="profile",
        driver="570.1",
        threads=1,
        weights="random, seed 0",
        pictures=8,
        batch_rows=16,
        image_size=512,
        tier="tf32" if baseline else "fp16",
        baseline=baseline,
        num_sampling_steps=250,
        shape=dict(width=1152, depth=28, heads=16, patch=2, channels=4, tokens=1024, batch_rows=16),
        steps=3,
        window_ms=ms,
        launches_per_step=290.0,
        host_copies_ms=0.012,
        timed=dict(ms=ms, least=ms, most=ms),
        ceilings=dict(gemm_tflops=777.0, gemm="8192", copy_tb_s=4.2),
        kinds=kinds,
        host=[function],
        kernels=[function],
        waits=[wait] if baseline else [],
        floor_ms=24.5,
    )


def log(folder, gpu=GPU):
    """A whole log of measurements, as the scripts write them."""

    def part(name, psnr, contest):
        return dict(seed=1, part=name, mae=0.0371, lpips=0.0002, psnr=psnr, ssim=0.9998) | dict(
            verdict=dict(contest=contest, strict="FAIL")
        )

    def tier(name, picture, verdict, **more):
        parts = [part("grid", 61.27, "PASS"), part("1,4", picture, verdict)]
        worst = {
            where: {metric: one[metric] for metric in evaluate.METRICS} for where, one in zip(("grid", "tile"), parts)
        }
        return dict(
            tier=name, verdicts=dict(contest=verdict, strict="FAIL"), parts=parts, reasons=[], worst=worst
        ) | dict(worst_seed=1, **more)

    fp16 = tier("fp16", 58.1, "PASS", seconds=dict(median=1.5, least=1.4, most=1.6), speedup=6.54)
    bf16 = tier("bf16", 37.12, "FAIL", seconds=dict(median=1.6, least=1.5, most=1.7), speedup=6.1)
    run = dict(load=1.0, sample=8.3, decode=0.4, save=0.3, total=10.0, process=15.0)
    files = {
        "ladder": dict(
            kind="steps",
            rungs=[
                rung("fp32", 407.9, 1e-6),
                rung("tf32", 144.6, psnr=50.0),
                rung("fp16 + half GEMMs", 58.2, psnr=39.0),
                rung("fp16 + CUDA graph", 33.1, psnr=54.0),
            ],
            image_size=512,
            pictures=8,
            batch_rows=16,
            load_seconds=5.0,
        ),
        "versus": dict(
            kind="steps",
            rungs=[
                rung("fp16 + CUDA graph", 33.3),
                rung("fp16 + torch.compile default", 38.8),
                rung("fp16 + diffusers' DiTTransformer2DModel", 48.4),
            ],
            image_size=512,
            pictures=8,
            batch_rows=16,
            load_seconds=5.0,
        ),
        "sweep": dict(
            kind="sweep",
            sweep=[
                dict(
                    image_size=size,
                    pictures=n,
                    rung="fp16 + CUDA graph",
                    ms=ms,
                    p10=ms,
                    p90=ms,
                    ms_a_picture=ms / n,
                    peak_gb=4.0,
                )
                for size, n, ms in ((512, 1, 4.7), (512, 2, 8.7), (512, 8, 33.2), (256, 8, 7.8), (1024, 8, 190.0))
            ]
            + [dict(image_size=2048, pictures=8, failed="out of memory")],
            image_size=512,
            pictures=8,
            batch_rows=16,
        ),
        "contest": dict(
            kind="contest",
            contest=[
                dict(tier="fp32", seconds=104.2, points=48.12, runs=[{**run, "total": 104.2}]),
                dict(tier="fp16", seconds=10.0, points=50.0, runs=[run]),
            ],
        ),
        "profile-baseline": profile(True, 150.3),
        "profile-fast": profile(False, 34.1),
        "verify/verify": dict(
            kind="verify",
            weights="dit.safetensors",
            image_size=128,
            pictures=8,
            num_sampling_steps=250,
            seeds=3,
            gate="contest",
            recommended="fp16",
            reference=dict(tier="fp32", seconds=dict(median=9.0, least=9.0, most=9.0)),
            tiers=[fp16, bf16, dict(tier="exact", refused="overflows")],
            vgg_weights=dict(sha256="0", published=False),
        ),
        "ddp": dict(
            kind="ddp",
            gpus=4,
            image_size=512,
            precision="fp16",
            steps=250,
            grid_sampling_s={"1": [8.5, 8.4], "4": [2.21, 2.2], "ratio": 0.262},
            start_to_first_step_s={"1": [9.0], "4": [11.0], "ratio": 1.22},
            grid_start_to_picture_s={"1": [19.2], "4": [20.1]},
            grid_phases_s={"4": [dict(total=11.8)]},
            fid_pictures_per_s={"1": 9.0, "4": 35.1, "steps": 25, "batch": 32, "efficiency": 0.975},
        ),
        "parallel": dict(
            kind="parallel",
            gpus=4,
            plans=[
                dict(case, **row)
                for case in (dict(tier="fp16", size=512, labels=1),)
                for row in (
                    dict(gpus=1, plan="one GPU", ms=4.7, speedup=1.0, error=0.0),
                    dict(gpus=2, plan="rows=2", ms=2.7, speedup=1.74, error=1e-4),
                    dict(
                        gpus=4,
                        plan="rows=2,tokens=2,exchange=push",
                        ms=2.0,
                        speedup=2.35,
                        error=2e-4,
                        collectives=1,
                        bytes=2359296,
                    ),
                    dict(
                        plan="auto",
                        chosen="rows=2,tokens=2,exchange=push",
                        reason="x",
                        ms=2.0,
                        speedup=2.35,
                        of_best=1.0,
                    ),
                )
            ],
            judged=[
                dict(
                    tier="fp16",
                    plan="rows=2",
                    pictures=64,
                    worst=dict(mae=1e-3, psnr=51.2, ssim=0.99),
                    contest=True,
                    strict=False,
                )
            ],
        ),
        "forecast": dict(
            kind="forecast",
            model="DiT-Demo/2",
            steps=250,
            pictures="128, of 4 seeds",
            precision="fp32",
            note="held-out seeds",
            methods=[
                dict(method=method, evaluations=147, psnr=46.2, tile_median=51.3, tile_worst=35.4)
                | dict(grids_over_40=0.9921, tiles_over_40=0.955)
                for method in ("auto", "hold", "plan")
            ],
        ),
        "link": dict(
            kind="link",
            backend="nccl",
            link=[
                dict(collective=name, ranks=ranks, bytes=size, us=10 + size / 2e5)
                for name in ("all-gather", "all-to-all", "all-reduce")
                for ranks in (2, 4)
                for size in (1 << 16, 1 << 20, 1 << 24)
            ],
        ),
    }
    (folder / "verify").mkdir(parents=True)
    for name, record in files.items():
        (folder / f"{name}.json").write_text(
            json.dumps(
                {
                    **dict(
                        gpu=gpu, torch="2.11.0", commit="abc1234", command=f"python scripts/{name}.py", model="DiT-XL/2"
                    ),
                    **record,
                }
            )
        )
    for name in ("fp16", "bf16", "bf16-picture"):
        Image.radial_gradient("L").resize((900, 500)).convert("RGB").save(folder / "verify" / f"heatmap-{name}.png")
    return folder


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
            write(patch, folder / lang, "--log", folder / "log", "--lang", lang)
    return folder


def text_of(folder, lang="en", **how):
    """The report's text with its lines joined."""
    return report.markdown(report.collect(folder, **how), lang)


FIGURES = (
    "| fp32 | 407.9 | 403.8 – 416.1 | 102.0 | 1.0e-06 |",  # 250 steps are ms / 4
    "| fp32 | 104.20 | 104.20 |",
    "48.1 |",
    "| fp16 + CUDA graph | 33.1 |",
    f"{407.9 / 33.1:.2f}×",
    "| plan | 147 | 46.2 | 51.3 | 35.4 | 99.2% | 95.5% |",
    "held-out seeds",
    "| fp16 + torch.compile default | 38.8 |",
    f"{38.8 / 33.3:.2f}×",
    "| fp16 | 1.50 | 6.54× | 0.0371 | 0.0002 | 61.3 | 0.9998 | 58.1 | PASS | FAIL |",
    "570.1",
    "abc1234",
    "11 ",
    "135.3 ",
    "0.012 ",
    "| 8.40 | 2.20 | 3.82× | 95% |",
    "35.10 | 3.90× | 98% |",
    "4: rows=2,tokens=2,exchange=push, 2.00, 2.35×",
    "| rows=2,tokens=2,exchange=push | 4 | 2.00 | 2.35× | 1 | 2.25 | 2.0e-04 |",
    "| fp16 | rows=2 | 51.2 | PASS | FAIL |",
)


def test_its_figures_are_those_of_the_files(written):
    english, chinese = ((written / lang / "report.md").read_text() for lang in ("en", "zh"))
    for text in (english, chinese):
        for figure in FIGURES:
            assert figure in text, figure
        assert text.index("| plan | 147") < text.index("| hold | 147") and "| auto | 147" not in text
        assert len(re.findall(r"^- (?:plan|even|two|line|hold|steps|ddim)", text, re.M)) == 7  # the table's legend
    assert "39.0 dB | none |" in english and "54.0 dB | contest |" in english
    assert "| 2048 | 8 | out of memory |" in english and "| 2048 | 8 | 显存不足 |" in chinese
    assert "never waits" in english and "从不等待" in chinese
    # The same figures in the same places.
    numbers = [re.findall(r"\d+\.\d+", text.rpartition("\n## ")[0]) for text in (english, chinese)]
    assert numbers[0] == numbers[1]
    assert [line for line in english.splitlines() if line.startswith("## ")] == [
        "## 1. Baseline on one GPU",
        "## 2. Profile and bottleneck",
        "## 3. Result on one GPU",
        "## 4. Design for many GPUs",
        "## 5. Result on many GPUs",
        "## Sources",
    ]
    assert not re.search("[\u4e00-\u9fff]", english)


def test_a_picture_that_fails_in_a_grid_that_passes_is_shown(written):
    text = (written / "en" / "report.md").read_text()
    assert re.search(r"bf16 fails the contest criterion .* picture 1,4 .* of seed 1: 37.1 dB\]", text, re.S)
    assert "the picture that fails most](figures/heatmap-bf16-picture-DiT-XL-2.jpg)" in text
    assert text.count("fails the contest criterion") == 1


def test_without_a_gpu(tmp_path):
    """A CPU is not said to idle, a tier's name is not taken for a flag's value, phases are of the run that is given."""
    log(tmp_path, gpu=None)
    slow, contest, verify = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("profile-baseline", "contest", "verify/verify")
    )
    del slow["kinds"]["idle"]
    slow["waits"] = []
    runs = [dict(sample=total - 1, total=total, process=total) for total in (30.0, 11.0, 10.5)]
    contest["contest"][1] |= dict(seconds=11.0, runs=runs)
    verify["tiers"] = verify["tiers"][:1]
    verify["tiers"][0]["tier"] = verify["recommended"] = "fp32 again"
    verify["tiers"][0]["worst"]["grid"]["psnr"] = verify["tiers"][0]["parts"][0]["psnr"] = "inf"
    (tmp_path / "verify/heatmap-fp16.png").rename(tmp_path / "verify/heatmap-fp32-again.png")
    for name, record in (("profile-baseline", slow), ("contest", contest), ("verify/verify", verify)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    data = report.collect(tmp_path, sections=[1, 2, 3])
    english, chinese = (report.markdown(data, lang) for lang in ("en", "zh"))
    assert "the bottleneck is GEMM, 70% of a step.\n\n" in english and "瓶颈是矩阵乘，占每步的 70%。\n\n" in chinese
    for text in (english, chinese):
        assert "`--precision fp32`" in text and "10.00" in text and "29.00" not in text
    assert '<td style="text-align:right">inf</td>' in report.page(english, report.draw(data), "en")


def test_a_page_of_its_own(written):
    for lang in ("en", "zh"):
        page = (written / lang / "report.html").read_text()
        assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page) and "http" not in page
        assert f'lang="{lang}' in page and "{{" not in page and "![" not in page
        assert page.count("<img ") == len(list((written / lang / "figures").iterdir())) == 8
        assert "&lt;a|b&gt;" in page  # what comes from a file is escaped


@pytest.mark.skipif(find() is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_browser_shows_it(written, lang):
    sizes = "[...document.querySelectorAll('p,td,li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    with Browser() as browser:
        for width in (400, 1400):
            browser.open(written / lang / "report.html", width)
            assert not browser.problems
            assert browser.ask("[...document.images].map(i => i.complete && i.naturalWidth > 300)") == [True] * 8
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
            assert browser.ask(f"Math.min(...{sizes})") >= 13
        browser.ask("console.error('seen')")
        assert len(browser.problems) == 1  # what the lines above would have caught


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
    other.write_text(json.dumps({**json.loads((folder / "ladder.json").read_text()), "gpu": "Another GPU"}))
    with pytest.raises(UsageError, match=r"contest.json is of Test GPU 9000, .*other.json is of Another GPU: .*--log"):
        report.collect(folder)
    other.write_text((folder / "sweep.json").read_text())
    with pytest.raises(UsageError, match=r"other.json and .*sweep.json are both sweep measurements"):
        report.collect(folder)
    record = {**profile(False, 9.0), "batch_rows": 2, "gpu": GPU, "torch": "2", "model": "DiT-XL/2"}
    other.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=r"profile-baseline.json is of batch_rows 16, .*other.json of 2"):
        report.collect(folder)
    other.write_text('{"rungs": [')
    with pytest.raises(UsageError, match="other.json: not JSON"):
        report.collect(folder)
    with pytest.raises(UsageError, match="no such folder"):
        report.collect(tmp_path / "nowhere")


def test_files_that_were_cut_short_are_refused_by_name(tmp_path):
    """By measure.sh's mark, and by what they lack. A part that was left out on purpose is no lack."""
    log(tmp_path / "log")

    def without(name, change):
        path = tmp_path / "log" / f"{name}.json"
        text = path.read_text()
        record = json.loads(text)
        change(record)
        path.write_text(json.dumps(record))
        try:
            return text_of(tmp_path / "log")
        finally:
            path.write_text(text)

    for name, change in (
        ("verify/verify", lambda record: record.pop("recommended")),
        ("parallel", lambda record: record["plans"].clear()),
    ):
        with pytest.raises(UsageError, match=f"{name}.json: .*was cut short; .*scripts/"):
            without(name, change)
    text = without("ddp", lambda record: record.pop("fid_pictures_per_s"))
    assert "8.40 | 2.20 | 3.82" in text and "50k job" not in text
    (tmp_path / "log" / "sweep.json.unfinished").touch()
    with pytest.raises(UsageError, match="sweep.json: its measurement was cut short; bash scripts/measure.sh"):
        report.collect(tmp_path / "log")


def test_no_figure_without_measurements():
    for draw in (
        lambda: plots.ladder([], 1.0, "floor"),
        lambda: plots.scaling({}),
        lambda: plots.kinds({}),
        lambda: plots.error_against_speed([], evaluate.GATES, "grid"),
        lambda: plots.growth([dict(pictures=1, image_size=8, ms=1, ms_a_picture=1)], []),
    ):
        with pytest.raises(ValueError, match="nothing measured"):
            draw()


def test_the_committed_report_is_that_of_the_log(tmp_path):
    """log/report was written from the files in log/ that it names: written from these again, it is the same."""
    text = (ROOT / "log/report/report.md").read_text()
    sources = dict(re.findall(r"^\| `([^`]+\.json)` \| (\w{8}) \|", text, re.M))
    assert len(sources) >= 8
    renewed = [name for name, digits in sources.items() if report.digest(ROOT / "log" / name) != digits]
    assert not renewed, f"{', '.join(renewed)}: measured anew since; python scripts/report.py log/report"
    for name in sources:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for file in [ROOT / "log" / name, *(ROOT / "log" / name).parent.glob("heatmap-*.png")]:
            shutil.copy(file, (tmp_path / name).parent)
    data = report.collect(tmp_path, sections=[int(n) for n in re.findall(r"^## (\d)\.", text, re.M)])
    assert report.markdown(data, "en") == text
    page = (ROOT / "log/report/report.html").read_text()
    again = report.page(text, report.draw(data), "en")
    without_pictures = [
        re.sub(r'src="[^"]*"', "", one) for one in (again, page)
    ]  # their bytes are matplotlib's version's
    assert len(page) < 3e6 and without_pictures[0] == without_pictures[1]


def test_this_projects_report_is_of_its_log():
    made = report.markdown(report.collect(report.ROOT / "log"), "en")
    assert made == (report.ROOT / "log" / "report" / "report.md").read_text()
