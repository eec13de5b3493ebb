"""The contest's report and hand-in, from the team's own measurements.

    python scripts/report.py output/report --team US --edition contest-2025-06 --log log/mine \
        --picture log/mine/contest-4-exact.png --lang zh

--edition: of the contest's rules (EDITIONS of evaluate.py). --log: a folder that
scripts/measure.sh filled. --picture: the picture that is handed in, one of the log's; of several
grids the first. OUT gets report.md, a self-contained report.html, report.json with all figures, and
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
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from itertools import product
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
from scripts.report_data import collect, digest_of, plain, read_log, require_own

TEMPLATES = ROOT / "scripts" / "report"
TODO = "TO WRITE"
CODE_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
FIGURES = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png", "svg": "svg+xml"}  # ending → media type


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


def read_notes(path: Path, lang: str) -> tuple[list[tuple[str, str]], dict[str, bytes]]:
    """Return title and text of each section of the team's notes, and the pictures that they show,
    as figures. Text before the first heading has no title. Without notes they are made.
    """
    if not path.exists():
        with atomic_write(path) as file:
            file.write((TEMPLATES / f"notes.{lang}.md").read_bytes())
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8; save it as UTF-8") from None
    figures = {}

    def figure(match):
        picture = path.parent / match[2]
        if not picture.is_file() or picture.suffix[1:].lower() not in FIGURES:
            raise UsageError(f"{path}: {match[2]}: no such picture; put a PNG, JPEG or SVG there")
        figures[picture.name] = picture.read_bytes()
        return f"![{match[1]}](figures/{picture.name})"

    text = re.sub(r"!\[([^\]]*)\]\(([^)]+)\)", figure, re.sub("<!--.*?-->", "", text, flags=re.S))
    text = CODE_BLOCK.sub(lambda block: block[0].replace("\n#", "\n\0#"), text)
    before, *rest = re.split(r"^## +(.+)$", text, flags=re.M)
    sections = [("", before), *zip(rest[::2], rest[1::2])]
    bodies = [(title, body.replace("\0", "").strip()) for title, body in sections]
    return [section for section in bodies if any(section)], figures


def page(text: str, figures: dict[str, bytes], lang: str) -> str:
    """Return report.md's text as one HTML file with its pictures inside."""

    def figure(match):
        name, caption = match.groups()
        data = base64.b64encode(figures[name]).decode()
        media_type = FIGURES[name.rpartition(".")[2].lower()]
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


def draw(data: dict, words: dict) -> dict[str, bytes]:
    """Return file name → figure. A CPU has no roofline, and its ranks show no scaling, since they
    share its cores.
    """
    profiles = [data["before"], data["after"]]
    figures = {"pictures.jpg": report_plots.pictures(*data["pixels"])}
    if data["traces"]:
        figures["timeline.svg"] = report_plots.timeline(data["traces"], words)
    if data["designs"]:
        figures["designs.svg"] = report_plots.designs(data["designs"][0], words)
    if len(data["ladder"]) > 1:
        figures["ladder.svg"] = report_plots.ladder(data["ladder"], words)
    if data["machine"]["gpu"]:
        shown = [("here", "fp32"), ("here", data["result"]["tier"])]
        rows = [
            row for row in data["runs"] + data["one_label"] if (row["who"], row["tier"]) in shown
        ]
        series = {row["labels"]: {} for row in rows}
        for row, (key, name) in product(rows, words["series"].items()):
            line = series[row["labels"]].setdefault(name.format(row["tier"]), {})
            line[row["gpus"]] = row[key]
        figures["roofline.svg"] = report_plots.roofline(profiles, words)
        if data["machine"]["gpus"] > 1:
            figures["scaling.svg"] = report_plots.scaling(series, words)
    return figures


def environment(data: dict) -> str:
    """Return the packages of this Python, and each measurement's command."""
    lines = [f"{source['file']}: {source['command']}" for source in data["sources"]]
    packages = {
        f"{one.metadata['Name']}=={one.version}" for one in importlib.metadata.distributions()
    }
    ran = data["machine"]["torch"]
    if ran.partition("+")[0] != importlib.metadata.version("torch").partition("+")[0]:
        lines += ["", f"Measured with torch {ran}, in another environment than this one:"]
    lines += ["", f"Python {sys.version.split()[0]}", *sorted(packages, key=str.lower)]
    return "\n".join(lines) + "\n"


def grid_files(row: dict, name: str) -> dict[str, bytes]:
    """Return the grids of a row as files of the hand-in: name.png, or name_0.png … of several."""
    grids = [path.read_bytes() for path in row["paths"]]
    if len(grids) == 1:
        return {f"handin/{name}.png": grids[0]}
    return {f"handin/output/{name}_{index}.png": grid for index, grid in enumerate(grids)}


def report(args: Namespace, lpips: Callable) -> dict[str, bytes]:
    """Return name → content of all files of the report."""
    log = read_log(args.log)
    try:
        data = collect(log, args.picture, args.edition, lpips)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"--log {args.log}: a file lacks an entry ({error}); measure it again"
        ) from None
    notes = args.log / f"notes.{args.lang}.md"
    sections, notes_figures = read_notes(notes, args.lang)
    rows = [data["baseline"], data["result"]]
    pair = [read_picture(row["paths"][0]).pixels for row in rows]
    data |= dict(
        team=args.team,
        log=args.log,
        pixels=pair,
        most=int(np.abs(pair[0].astype(int) - pair[1]).max()),
        notes=sections,
        notes_file=dict(file=notes.name, digest=digest_of(notes)),
        bench=next(
            source["command"]
            for source in data["sources"]
            if source["file"] == data["result"]["record"]
        ),
    )
    text, words = render(data, args.lang)
    figures = draw(data, words) | notes_figures
    del data["pixels"]
    for trace in data["traces"]:
        del trace["work"], trace["calls"], trace["block"]
    data["to_write"] = text.count(TODO)
    files = {f"figures/{name}": figure for name, figure in figures.items()}
    for lang, name in (("en", "RUN.md"), ("zh", "RUN.zh.md")):
        files[f"handin/{name}"] = tidy(template(f"run.{lang}.md").render(data)).encode()
    files |= grid_files(data["baseline"], "baseline") | grid_files(data["result"], "sample")
    return files | {
        "report.md": text.encode(),
        "report.html": page(text, figures, args.lang).encode(),
        "report.json": (json.dumps(plain(data), indent=1, ensure_ascii=False) + "\n").encode(),
        "handin/verdict.txt": tidy(template("verdict.txt").render(plain(data))).encode(),
        "handin/environment.txt": environment(data).encode(),
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
    add("--edition", choices=evaluate.EDITIONS, required=True, help="of the contest's rules")
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
    for title, body in read_notes(notes, args.lang)[0]:
        if TODO in body:
            print(f"{TODO} in {notes}: {title}")


if __name__ == "__main__":
    main()
