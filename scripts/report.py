"""The contest's report and hand-in, from the team's own measurements.

    python scripts/report.py output/report --team US --log log/mine \
        --picture log/mine/contest-4-exact.png --lang zh

--log: a folder that scripts/measure.sh filled. --picture: the picture that is handed in, one of
the log's. OUT gets report.md, a self-contained report.html, report.json with all figures, and
handin/, which scripts/pack.sh packs.

The team's own sections are marked TO WRITE. They are in notes.LANG.md in the log's folder, which
the first run makes; later runs take them into the report.
scripts/report_data.py computes the data, scripts/strategies.py the designs for several GPUs;
scripts/report/ has the texts of each language, each a Markdown file as it reads.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import base64
import importlib.metadata
import io
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import jinja2
import numpy as np
from markdown_it import MarkdownIt

import evaluate
from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.io.filesystem import ROOT, atomic_write
from accel.io.output import check_writable
from accel.io.picture_files import read_picture
from scripts import report_plots
from scripts.report_data import collect, plain, read_log, require_own

TEMPLATES = ROOT / "scripts" / "report"
TODO = "TO WRITE"
FIGURES = {"jpg": "jpeg", "svg": "svg+xml"}  # ending → media type


# ---- texts ----


def fmt(value: object, spec: str) -> str:
    """Format a number; a dash for none, ∞ for infinity."""
    absent = value is None or isinstance(value, jinja2.Undefined)
    number = math.nan if absent else float(value)
    if math.isfinite(number):
        return format(number, spec)
    return "–" if math.isnan(number) else "∞"


def milliseconds(value: float) -> str:
    """Format a time in ms: three digits, no decimals of a zero."""
    if value == 0:
        return "0"
    return fmt(value, ".1f" if value >= 10 else ".2f" if value >= 1 else ".3f")


def code(text: object) -> str:
    """Return a text as code in a table's cell."""
    escaped = str(text).replace("`", "'").replace("|", r"\|")
    return f"`{escaped}`"


def template(name: str) -> jinja2.Template:
    """Return a text of scripts/report/."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= dict(
        fmt=fmt,
        code=code,
        ms=milliseconds,
        pct=lambda value: fmt(100 * value, ".0f") + " %",
    )
    return environment.get_template(name)


def tidy(text: str) -> str:
    """Join broken lines of Chinese without a space, part Chinese from Latin letters and digits by
    one, and drop superfluous empty lines.
    """
    text = re.sub(r"(?<=[\u3000-\uffee])\n(?=[\u3000-\uffee])", "", text)
    text = re.sub(r"(?<=[a-zA-Z0-9])(?=[\u4e00-\u9fff])", " ", text)
    text = re.sub(r"(?<=[\u4e00-\u9fff])(?=[a-zA-Z0-9])", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render(data: dict, lang: str) -> tuple[str, dict]:
    """Return the report's text, and its words for figures. data: report.json's."""
    written = template(f"report.{lang}.md").make_module(data)
    return tidy(str(written)), written.words


def read_notes(path: Path, lang: str) -> list[tuple[str, str]]:
    """Return title and text of each section of the team's notes, which are made if there are
    none.
    """
    if not path.exists():
        with atomic_write(path) as file:
            file.write((TEMPLATES / f"notes.{lang}.md").read_bytes())
    sections = re.split(r"^## +(.+)$", path.read_text(), flags=re.M)[1:]
    return [(title, text.strip()) for title, text in zip(sections[::2], sections[1::2])]


def page(text: str, figures: dict[str, bytes], lang: str) -> str:
    """Return report.md's text as one HTML file with its pictures inside."""

    def figure(match):
        name, caption = match.groups()
        data = base64.b64encode(figures[name]).decode()
        media_type = FIGURES[name.rpartition(".")[2]]
        picture = f'<img alt="{caption}" src="data:image/{media_type};base64,{data}">'
        caption = f"<figcaption>{caption}</figcaption>"
        return f'<figure class="{Path(name).stem}">{picture}{caption}</figure>'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'<p><img src="figures/(.*?)" alt="(.*?)" /></p>', figure, body, flags=re.S)
    body = re.sub(rf"<p>({TODO}.*?)</p>", r'<p class="todo">\1</p>', body, flags=re.S)
    body = body.replace(TODO, f"<mark>{TODO}</mark>")
    # no line break before a unit or within a range
    body = re.sub(r"(?<=\d) (?=(px|s|ms|dB|TFLOP/s|TFLOP|GB/s|MB|GiB|×|%)\b|[%×])", "\u00a0", body)
    body = body.replace("0–255", "0\u2060–\u2060255")
    frame = jinja2.Template((TEMPLATES / "page.html.j2").read_text())
    return frame.render(lang=lang, title=re.match("# (.*)", text)[1], body=body) + "\n"


# ---- contents that the texts need besides ----


def criteria(judged: dict) -> list[dict]:
    """Return a row for each metric of the judged picture, MAE by both readings."""
    rows = []
    for name, metric, gate, scale, digits in (
        ("mae 0–255", "mae", "strict", 255, ".4f"),
        ("mae 0–1", "mae", "contest", 1, ".6f"),
        ("lpips", "lpips", "strict", 1, ".4f"),
        ("psnr", "psnr", "strict", 1, ".2f"),
        ("ssim", "ssim", "strict", 1, ".5f"),
    ):
        threshold = evaluate.GATES[gate][metric]
        value = judged[metric]
        result = evaluate.judge({metric: value}, {metric: threshold})[metric]
        if metric == "mae":
            value = value * scale / 255
        sign = evaluate.METRICS[metric].sign.replace("<=", "≤").replace(">=", "≥")
        row = dict(name=name, value=value, digits=digits, sign=sign, result=result)
        rows.append(row | dict(threshold=f"{threshold * (scale if metric == 'mae' else 1):g}"))
    return rows


def gains(data: dict) -> list[dict]:
    """Return the steps from the baseline's network to the handed-in tier's, the largest gain
    first.
    """
    tiers = data["before"]["tier"], data["after"]["tier"]
    chain = [
        rung
        for tier in dict.fromkeys(tiers)
        for rung in data["ladder"]
        if rung["rung"].partition(" + ")[0] == tier
    ]
    steps = [rung | dict(before=before["ms"]) for before, rung in zip(chain, chain[1:])]
    return sorted(steps, key=lambda step: step["ms"] - step["before"])


def draw(data: dict, words: dict) -> dict[str, bytes]:
    """Return file name → figure. A CPU's ranks share its cores, so they show no scaling."""
    profiles = [data["before"], data["after"]]
    if data["before"]["tier"] == data["after"]["tier"]:
        profiles = profiles[1:]
    figures = {
        "pictures.jpg": report_plots.pictures(*data["pixels"]),
        "kinds.svg": report_plots.kinds(profiles, words),
        "roofline.svg": report_plots.roofline(profiles, words),
        "designs.svg": report_plots.designs(data["designs"][0], words),
    }
    if len(data["ladder"]) > 1:
        figures["ladder.svg"] = report_plots.ladder(data["ladder"], words)
    if data["machine"]["gpu"]:
        tier = data["result"]["tier"]
        series = {}
        rows = [row for row in data["runs"] + data["one_label"] if row["who"] == "here"]
        for row in [row for row in rows if row["tier"] == tier]:
            for key, name in words["series"].items():
                series.setdefault(name.format(row["labels"]), {})[row["gpus"]] = row[key]
        figures["scaling.svg"] = report_plots.scaling(series, words)
    return figures


def environment(data: dict) -> str:
    """Return the packages of this Python, and each measurement's command."""
    lines = [f"{source['file']}: {source['command']}" for source in data["sources"]]
    packages = {
        f"{one.metadata['Name']}=={one.version}" for one in importlib.metadata.distributions()
    }
    ran = data["machine"]["torch"]
    here = importlib.metadata.version("torch")
    if ran.partition("+")[0] != here.partition("+")[0]:
        lines += ["", f"Measured with torch {ran}, in another environment than this one:"]
    lines += ["", f"Python {sys.version.split()[0]}", *sorted(packages, key=str.lower)]
    return "\n".join(lines) + "\n"


def verdict(baseline: Path, sample: Path, vgg_weights: Path | None) -> str:
    """Return the text that evaluate.py prints about two pictures, by the strict criterion."""
    words = [str(baseline), str(sample), "--gate", "strict"]
    if vgg_weights:
        words += ["--vgg-weights", str(vgg_weights)]
    text = io.StringIO()
    with redirect_stdout(text):
        evaluate.main(words)
    return text.getvalue().replace(str(sample), "sample.png")


def report(args: Namespace, lpips: Callable) -> dict[str, bytes]:
    """Return name → content of all files of the report."""
    log = read_log(args.log)
    try:
        data = collect(log, args.picture, lpips)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"--log {args.log}: a file lacks an entry ({error}); measure it again"
        ) from None
    baseline = data["baseline"]["path"]
    pair = [read_picture(path).pixels for path in (baseline, data["result"]["path"])]
    asked = args.log / "asked.txt"
    data |= dict(
        team=args.team,
        log=args.log,
        pixels=pair,
        most=int(np.abs(pair[0].astype(int) - pair[1]).max()),
        criteria=criteria(data["result"]["judged"]),
        gains=gains(data),
        notes=read_notes(args.log / f"notes.{args.lang}.md", args.lang),
        asked=asked.read_text().splitlines()[0] if asked.is_file() else None,
        bench=next(
            source["command"]
            for source in data["sources"]
            if source["file"] == data["result"]["record"]
        ),
    )
    text, words = render(data, args.lang)
    figures = draw(data, words)
    del data["pixels"]
    data["to_write"] = text.count(TODO)
    files = {f"figures/{name}": figure for name, figure in figures.items()}
    return files | {
        "report.md": text.encode(),
        "report.html": page(text, figures, args.lang).encode(),
        "report.json": (json.dumps(plain(data), indent=1, ensure_ascii=False) + "\n").encode(),
        "handin/sample.png": data["result"]["path"].read_bytes(),
        "handin/baseline.png": baseline.read_bytes(),
        "handin/verdict.txt": verdict(baseline, data["result"]["path"], args.vgg_weights).encode(),
        "handin/environment.txt": environment(data).encode(),
        "handin/RUN.md": tidy(template(f"run.{args.lang}.md").render(data)).encode(),
        "handin/log/FINAL_RESULT.txt": tidy(template("final_result.txt").render(data)).encode(),
    }


def team_name(text: str) -> str:
    """Return a team's name, for argparse: it is part of the archive's."""
    if not re.fullmatch(r"\w[\w-]*", text):
        raise ValueError
    return text


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder for the report and the hand-in")
    add("--team", type=team_name, required=True, help="name: letters, digits, - and _")
    add("--log", type=Path, required=True, help="folder that scripts/measure.sh filled")
    add("--picture", type=Path, required=True, help="picture of the log that you hand in")
    add("--lang", choices=("en", "zh"), default="en", help="language (default: en)")
    add("--vgg-weights", type=Path, help="LPIPS' VGG16, as in evaluate.py")
    args = parser.parse_args()
    with user_errors(parser):
        require_own(args.log)
        check_writable(args.out / "report.md", "OUT")
        files = report(args, evaluate.Lpips(args.vgg_weights))
        for name, content in files.items():
            check_writable(args.out / name, "OUT")
            with atomic_write(args.out / name) as file:
                file.write(content)
    print(f"{args.out / 'report.html'}: {len(files['report.html']) / 1e6:.2f} MB")
    notes = args.log / f"notes.{args.lang}.md"
    for title, body in read_notes(notes, args.lang):
        if TODO in body:
            print(f"{TODO} in {notes}: {title}")


if __name__ == "__main__":
    main()
