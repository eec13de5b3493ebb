"""The contest's report from measurements: report.md and a self-contained report.html,
from the JSON files in log/.

    python scripts/report.py output/report --team US --log log/mine
    python scripts/report.py output/report --lang zh --log log/mine --sections 1 2 3
    python scripts/report.py output/report --log log/mine --tier exact

The conclusion is about the picture that is handed in: its tier and its T, from the record of
bench/jobs.py --contest that --result names.

scripts/report_data.py computes plain data from the log, scripts/report/ holds the text in
English and its translations.
"""

if not __package__:
    __import__("_as_module")

import base64
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt

from accel import precision
from accel.cli import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import ROOT, atomic_write
from accel.flags import check_writable
from scripts import report_plots
from scripts.report_data import NEEDS, collect, result_of

TEMPLATES = ROOT / "scripts" / "report"


def words(lang: str) -> Callable[[str], str]:
    """Return the function that translates an English text and fills in its {fields}.
    Names have no entry.
    """
    translations = {}
    if lang != "en":
        translations = json.loads((TEMPLATES / f"words.{lang}.json").read_text())

    def say(text, /, **values):
        text = translations.get(" ".join(text.split()), text)
        return text.format(**values) if values else text

    return say


def draw(data: dict, lang: str = "en") -> dict[str, bytes]:
    """Return file name → picture."""
    figures = {}
    translate = words(lang)

    def say(text):
        """Translate, with room for wide characters, whose width matplotlib's font lacks:
        spaces that no browser shows.
        """
        translated = translate(text)
        wide = sum(ord(letter) > 0x2E7F for letter in translated)
        return translated + " " * round(1.3 * wide)

    if data["front"]:
        figures["pictures.jpg"] = report_plots.pictures(data["front"]["shown"])
    if "single" in data and data["device"] != "CPU":  # a CPU has no ladder
        figures["ladder.svg"] = report_plots.ladder(data["single"]["rungs"], say)
    series = data.get("many", {}).get("series")
    if series and data["device"] != "CPU":  # a CPU's ranks share its cores
        figures["scaling.svg"] = report_plots.scaling(series, say)
    return figures


def markdown(data: dict, lang: str) -> str:
    """Return the report's text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True
    )

    say = words(lang)

    def fmt(value, spec):
        absent = isinstance(value, (type(None), jinja2.Undefined)) or math.isnan(float(value))
        return "–" if absent else format(float(value), spec)

    def code(text):
        escaped = str(text).replace("`", "'").replace("|", r"\|")
        return f"`{escaped}`"

    environment.globals["say"] = say
    environment.filters["fmt"] = fmt
    environment.filters["code"] = code
    environment.filters["ms"] = lambda value: f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    environment.filters["rung"] = lambda name: report_plots.rung_name(name, say)
    text = environment.get_template("report.md.j2").render(data)
    # Chinese lines join without a space
    text = re.sub(r"(?<=[\u3000-\uffee])\n(?=[\u3000-\uffee])", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page(text: str, figures: dict[str, bytes], lang: str) -> str:
    """Return report.md's text as one HTML file with its pictures inside."""

    def figure(match):
        name, caption = match.groups()
        media_type = "jpeg" if name.endswith("jpg") else "svg+xml"
        data = base64.b64encode(figures[name]).decode()
        picture = f'<img alt="{caption}" src="data:image/{media_type};base64,{data}">'
        return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'<p><img src="figures/(.*?)" alt="(.*?)" /></p>', figure, body, flags=re.S)
    body = body.replace("<h2>1. ", '<h2 class="after-front">1. ')
    # no line break before a unit or within a range
    body = re.sub(r"(?<=\d) (?=(px|s|ms|dB|TFLOP/s|TB/s|GB/s|%)\b|%)", "\u00a0", body)
    body = body.replace("0–255", "0\u2060–\u2060255")
    frame = jinja2.Template((TEMPLATES / "page.html.j2").read_text())
    return frame.render(lang=lang, title=re.match("# (.*)", text)[1], body=body) + "\n"


def main() -> None:
    parser = OneLineParser(description="The contest's report from measurements.")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="folder for report.md, report.html and figures/"
    )
    parser.add_argument("--team", help="the team's name, for the front page")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the report")
    parser.add_argument(
        "--log",
        type=Path,
        default=ROOT / "log",
        help="folder with the measurements (default: log/)",
    )
    parser.add_argument(
        "--sections", nargs="+", type=int, choices=NEEDS, default=[*NEEDS], help="default: all"
    )
    parser.add_argument(
        "--tier", choices=precision.TIERS, help="tier that you hand in (default: the result's)"
    )
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="record of the picture that you hand in (default: the newest of LOG/final/*.json, "
        "else of output/job_*/contest.json; without one the fastest tier is recommended)",
    )
    args = parser.parse_args()
    with user_errors(parser):
        result = args.result
        if result is None and args.log.resolve() != ROOT / "log":  # the software's own report
            result = result_of(args.log)
        try:
            data = collect(args.log, args.sections, args.tier, result) | dict(team=args.team)
            figures = draw(data, args.lang)
            text = markdown(data, args.lang)
        except (KeyError, jinja2.UndefinedError) as error:
            raise UsageError(
                f"--log {args.log}: a file lacks an entry ({error}); measure it again"
            ) from None
        files = {f"figures/{name}": picture for name, picture in figures.items()}
        files |= {
            "report.md": text.encode(),
            "report.html": page(text, figures, args.lang).encode(),
        }
        for name, content in files.items():
            check_writable(args.out / name, "OUT")
            with atomic_write(args.out / name) as file:
                file.write(content)
        print(
            f"{args.out / 'report.html'}: {len(figures)} pictures, "
            f"{len(files['report.html']) / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
