"""The report: every figure in it is in a file, what is missing or mixed is refused by name, and a real browser shows it."""

import json
import re
import shutil
import sys

import pytest
from browser import Browser, find
from conftest import ROOT
from PIL import Image

import evaluate
from accel.options import UsageError
from scripts import plots, report

GPU = "Test GPU 9000"


def rung(name, ms, error=1e-3, psnr=None):
    gate = (
        {}
        if psnr is None
        else dict(
            gate=dict(
                pictures=64,
                worst=dict(mae=1e-3, psnr=psnr, ssim=0.99),
                mean=dict(mae=1e-4, ssim=0.999),
                passes=psnr > 40,
            )
        )
    )
    return dict(rung=name, ms=ms, p10=ms * 0.99, p90=ms * 1.02, steps=9, error=error, **gate)


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
        rows=16,
        image_size=512,
        tier="tf32" if baseline else "fp16",
        baseline=baseline,
        num_sampling_steps=250,
        shape=dict(width=1152, depth=28, heads=16, patch=2, channels=4, tokens=1024, rows=16),
        steps=3,
        window_ms=ms,
        launches_per_step=290.0,
        host_copies_ms=0.012,
        timed=dict(ms=ms, least=ms, most=ms),
        ceilings=dict(product_tflops=777.0, product="8192", copy_tb_s=4.2),
        kinds=kinds,
        host=[function],
        kernels=[function],
        waits=[wait] if baseline else [],
        floor_ms=24.5,
    )


def log(folder, gpu=GPU):
    """A whole log of measurements, as the scripts write them."""
    part = dict(
        seed=1,
        part="grid",
        mae=0.0371,
        lpips=0.0002,
        psnr=61.27,
        ssim=0.9998,
        verdict=dict(contest="PASS", strict="FAIL"),
    )
    worst = {where: {metric: part[metric] for metric in evaluate.METRICS} for where in ("grid", "tile")}
    tier = dict(
        tier="fp16",
        seconds=dict(median=1.5, least=1.4, most=1.6),
        speedup=6.54,
        verdicts=part["verdict"],
        parts=[part],
        reasons=[],
        worst=worst,
        worst_seed=1,
    )
    run = dict(load=1.0, sample=8.3, decode=0.4, save=0.3, total=10.0, process=15.0)
    files = {
        "ladder": dict(
            rungs=[
                rung("fp32", 407.9, 1e-6),
                rung("tf32", 144.6, psnr=50.0),
                rung("fp16 + half products", 58.2, psnr=39.0),
                rung("fp16 + one reset", 33.1, psnr=54.0),
            ],
            image_size=512,
            pictures=8,
            rows=16,
            load_seconds=5.0,
        ),
        "versus": dict(
            rungs=[
                rung("fp16 + one reset", 33.3),
                rung("fp16 + torch.compile default", 38.8),
                rung("fp16 + diffusers' DiTTransformer2DModel", 48.4),
            ],
            image_size=512,
            pictures=8,
            rows=16,
            load_seconds=5.0,
        ),
        "sweep": dict(
            sweep=[
                dict(
                    image_size=size,
                    pictures=n,
                    rung="fp16 + one reset",
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
            rows=16,
        ),
        "contest": dict(
            contest=[
                dict(tier="fp32", seconds=104.2, points=48.12, runs=[{**run, "total": 104.2}]),
                dict(tier="fp16", seconds=10.0, points=50.0, runs=[run]),
            ]
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
            tiers=[tier, dict(tier="bf16", refused="overflows")],
            vgg_weights=dict(sha256="0", published=False),
        ),
        "ddp": dict(
            gpus=4,
            image_size=512,
            precision="fp16",
            steps=250,
            grid_sampling_s={"1": [8.5, 8.4], "4": [2.21, 2.2], "ratio": 0.262},
            start_to_first_step_s={"1": [9.0], "4": [11.0], "ratio": 1.22},
            grid_start_to_picture_s={"1 local": [19.2], "4 local": [20.1], "4 gather": [20.5]},
            grid_phases_s={"4 local": [dict(total=11.8)]},
            fid_pictures_per_s={"1": 9.0, "4": 35.1, "steps": 25, "batch": 32, "efficiency": 0.975},
        ),
        "parallel": dict(
            gpus=4,
            rows=[
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
            gates=[
                dict(
                    tier="fp16",
                    plan="rows=2",
                    pictures=64,
                    worst=dict(mae=1e-3, psnr=51.2, ssim=0.99),
                    passes=True,
                    strict=False,
                )
            ],
        ),
        "forecast": dict(
            model="DiT-Demo/2",
            steps=250,
            pictures="128, of 4 seeds",
            precision="fp32",
            note="held-out seeds",
            rows=[
                dict(
                    method="plan",
                    calls=147,
                    psnr=46.2,
                    tile_median=51.3,
                    tile_worst=35.4,
                    grids_over_40=0.9921,
                    tiles_over_40=0.955,
                )
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
    Image.radial_gradient("L").resize((900, 500)).convert("RGB").save(folder / "verify" / "heatmap-fp16.png")
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


def test_its_figures_are_those_of_the_files(written):
    text = (written / "en" / "report.md").read_text()
    for figure in (
        "| fp32 | 407.9 | 403.8 – 416.1 | 102.0 | 1.0e-06 |",  # 250 steps are ms / 4
        "| fp32 | 104.20 | 104.20 |",
        "48.1 |",
        "| fp16 + one reset | 33.1 |",
        f"{407.9 / 33.1:.2f}×",
        "39.0 dB, falls short",
        "| plan | 147 | 46.2 | 51.3 | 35.4 | 99.2% | 95.5% |",
        "held-out seeds",
        "| fp16 + torch.compile default | 38.8 |",
        f"{38.8 / 33.3:.2f}×",
        "| fp16 | 1.50 | 6.54× | 0.0371 | 0.0002 | 61.3 | 0.9998 | 61.3 | PASS | FAIL |",
        "| 2048 | 8 | out of memory |",
        "570.1",
        "abc1234",
        "11 times a step, 135.3 ms",
        "themselves take 0.012 ms a step",
        "| 8.40 | 2.20 | 3.82× | 95% |",
        "35.10 | 3.90× | 98% |",
        "4: rows=2,tokens=2,exchange=push, 2.00, 2.35×",
        "| rows=2,tokens=2,exchange=push | 4 | 2.00 | 2.35× | 1 | 2.25 | 2.0e-04 |",
        "| fp16 | rows=2 | 51.2 | PASS | FAIL |",
        "The host never waits",
    ):
        assert figure in text, figure
    chinese = (written / "zh" / "report.md").read_text()
    assert re.findall(r"\d+\.\d+", text.partition("Sources")[0]) == re.findall(
        r"\d+\.\d+", chinese.partition("数据来源")[0]
    )  # the same figures in the same places
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## 1. Baseline on one GPU",
        "## 2. Profile and bottleneck",
        "## 3. Result on one GPU",
        "## 4. Design for many GPUs",
        "## 5. Result on many GPUs",
        "## Sources",
    ]


def test_without_a_gpu(tmp_path):
    """What is said of a GPU's idleness is not said of a CPU, a tier's name is not taken for a flag's value, phases are those of the run whose time is given."""
    log(tmp_path, gpu=None)
    slow, contest, verify = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("profile-baseline", "contest", "verify/verify")
    )
    del slow["kinds"]["idle"]
    slow["waits"] = []
    contest["contest"][1] |= dict(
        seconds=11.0, runs=[dict(sample=total - 1, total=total, process=total) for total in (30.0, 11.0, 10.5)]
    )
    verify["tiers"][0]["tier"] = verify["recommended"] = "fp32 again"
    verify["tiers"][0]["worst"]["grid"]["psnr"] = "inf"
    (tmp_path / "verify/heatmap-fp16.png").rename(tmp_path / "verify/heatmap-fp32-again.png")
    for name, record in (("profile-baseline", slow), ("contest", contest), ("verify/verify", verify)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    for chinese in (False, True):
        document = report.Report(tmp_path, sections=[1, 2, 3], lang="zh" if chinese else "en").document
        text = document.markdown()
        assert (
            "瓶颈是 GEMM，占每步的 70%。" if chinese else "the bottleneck is GEMM, 70% of a step."
        ) in text and "`--precision fp32`" in text
        assert "sample 10.00" in text and "sample 29.00" not in text and "<td class=n>inf</td>" in document.html()


def test_a_page_of_its_own(written):
    for lang in ("en", "zh"):
        page = (written / lang / "report.html").read_text()
        assert (
            not re.findall(r'(?:src|href)="(?!data:)[^"]*"', page)
            and "http" not in page.replace("http-equiv", "")
            and f'lang="{lang}' in page
        )
        assert page.count("<img ") == len(list((written / lang / "figures").iterdir())) == 6
        assert "&lt;a|b&gt;" in page  # what comes from a file is escaped


@pytest.mark.skipif(
    find() is None, reason="needs Chromium (Debian: apt-get install chromium); the test above reads the page's text"
)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_browser_shows_it(written, lang):
    with Browser() as browser:
        for width in (400, 1400):
            browser.open(written / lang / "report.html", width)
            assert not browser.problems
            assert browser.ask("[...document.images].map(i => i.complete && i.naturalWidth > 300)") == [True] * 6
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
            assert (
                browser.ask(
                    "Math.min(...[...document.querySelectorAll('p,td,li')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
                )
                >= 13
            )
        browser.ask("console.error('seen')")
        assert len(browser.problems) == 1  # what the lines above would have caught


def test_a_missing_measurement_is_an_error_with_its_command(tmp_path, monkeypatch, capsys):
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
        assert (
            stop.value.code == 2
            and error.count("\n") == 1
            and f"holds no {kind} measurement" in error
            and "scripts/" in error
            and str(tmp_path / "log") in error
        )
        path.write_text(text)
    assert not (tmp_path / "out").exists()
    (tmp_path / "log" / "ddp.json").unlink()
    write(monkeypatch, tmp_path / "out", "--log", tmp_path / "log", "--sections", 1, 3)
    assert "## 5." not in (tmp_path / "out" / "report.md").read_text()


def test_mixed_and_damaged_files_are_refused_by_name(tmp_path):
    log(tmp_path / "log")
    other = json.loads((tmp_path / "log" / "ladder.json").read_text())
    (tmp_path / "log" / "other.json").write_text(json.dumps({**other, "gpu": "Another GPU"}))
    with pytest.raises(UsageError, match=r"ladder.json is of Test GPU 9000, .*other.json of Another GPU: .*--gpu"):
        report.Report(tmp_path / "log")
    report.Report(tmp_path / "log", gpu=GPU)
    with pytest.raises(UsageError, match="holds nothing of it"):
        report.read_log(tmp_path / "log", "V100")
    (tmp_path / "log" / "other.json").write_text((tmp_path / "log" / "sweep.json").read_text())
    with pytest.raises(UsageError, match=r"other.json and .*sweep.json are both sweep measurements"):
        report.Report(tmp_path / "log")
    (tmp_path / "log" / "other.json").write_text(
        json.dumps({**profile(False, 9.0), "rows": 2, "gpu": GPU, "torch": "2", "model": "DiT-XL/2"})
    )
    with pytest.raises(UsageError, match=r"profile-baseline.json is of rows 16, .*other.json of 2"):
        report.Report(tmp_path / "log")
    (tmp_path / "log" / "other.json").write_text('{"rungs": [')
    with pytest.raises(UsageError, match="other.json: not JSON"):
        report.Report(tmp_path / "log")
    with pytest.raises(UsageError, match="no such folder"):
        report.Report(tmp_path / "nowhere")


def test_files_that_were_cut_short_are_refused_by_name(tmp_path):
    """By measure.sh's mark, and by what they lack; a part that was left out on purpose is none."""
    log(tmp_path / "log")

    def without(name, change):
        path = tmp_path / "log" / f"{name}.json"
        text = path.read_text()
        record = json.loads(text)
        change(record)
        path.write_text(json.dumps(record))
        try:
            return report.Report(tmp_path / "log").document.markdown()
        finally:
            path.write_text(text)

    for name, change in (
        ("verify/verify", lambda record: record.pop("recommended")),
        ("parallel", lambda record: record["rows"].clear()),
    ):
        with pytest.raises(UsageError, match=f"{name}.json: .*was cut short; .*scripts/"):
            without(name, change)
    text = without("ddp", lambda record: record.pop("fid_pictures_per_s"))
    assert "8.40 | 2.20 | 3.82" in text and "50k job" not in text
    (tmp_path / "log" / "sweep.json.unfinished").touch()
    with pytest.raises(UsageError, match="sweep.json: its measurement was cut short; bash scripts/measure.sh"):
        report.Report(tmp_path / "log")


def test_no_figure_without_measurements():
    for draw in (
        lambda: plots.ladder([], 1.0, "floor"),
        lambda: plots.scaling({}),
        lambda: plots.kinds({}),
        lambda: plots.error_against_speed([], evaluate.GATES),
        lambda: plots.growth([dict(pictures=1, image_size=8, ms=1, ms_a_picture=1)], []),
    ):
        with pytest.raises(ValueError, match="nothing measured"):
            draw()


def test_what_the_strategies_send():
    """Bytes by another way: summing what one rank gives to the others, call by call."""
    shape = report.work.Shape(width=1152, depth=28, heads=16, patch=2, channels=4, tokens=1024, rows=2)
    plans = {plan["what"]: plan for plan in report.plans(shape, 4, 2)}
    token = 1152 * 2
    mine = 2 * 1024 // 4  # tokens of two rows that a rank keeps
    assert plans["kv"]["bytes"] == 28 * mine * 2 * token * 3 and plans["kv"]["message"] == mine * 2 * token
    assert plans["ulysses"]["bytes"] == 28 * mine * (3 + 1) * token * 3 // 4 and plans["ulysses"]["calls"] == 56
    assert plans["tensor"]["bytes"] == 28 * 2 * 2 * (2 * 1024 * token) * 3 // 4
    assert (
        plans["rows"]["share"] == 2 and plans["rows"]["bytes"] == 8 * 64 * 64 * 4
    )  # one row of output to the other half
    eight = {plan["what"]: plan for plan in report.plans(report.work.Shape(1152, 28, 16, 2, 4, 1024, 16), 4, 2)}
    assert eight["rows"]["share"] == 4 and eight["rows"]["calls"] == eight["rows"]["bytes"] == 0
    link = [
        dict(collective="all-gather", ranks=4, bytes=size, us=us) for size, us in ((1 << 20, 20.0), (1 << 22, 50.0))
    ]
    assert report.link_time(
        link, dict(calls=10, share=4, collective="all-gather", message=(1 << 20) + 3 * (1 << 19)), 4
    ) == pytest.approx(0.35)
    assert report.link_time(
        link, dict(calls=10, share=4, collective="all-gather", message=1 << 24), 4
    ) == pytest.approx(1.7)  # the last line goes on
    assert report.link_time(link, dict(calls=10, share=4, collective="all-gather", message=16), 4) == pytest.approx(0.2)
    assert report.link_time(link, dict(calls=10, share=4, collective="all-reduce", message=16), 4) is None


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
    document = report.Report(tmp_path, sections=[int(n) for n in re.findall(r"^## (\d)\.", text, re.M)]).document
    assert document.markdown() == text
    page = (ROOT / "log/report/report.html").read_text()
    assert len(page) < 3e6 and re.sub(r'src="[^"]*"', "", document.html()) == re.sub(
        r'src="[^"]*"', "", page
    )  # pictures' bytes are matplotlib's version's
