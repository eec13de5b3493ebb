"""The pages that readers see, and what tests need of them: tables, commands, figures."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from forks import ROOT, run, succeeds

README, CHINESE, CODE = (ROOT / name for name in ("README.md", "README.zh-CN.md", "code.md"))
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, CHINESE, CODE, ROOT / "CONTRIBUTING.md", *DOCS]

NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?"
UNIT = r"ms|s|µs|dB|TFLOP/s|×|%|MiB|GiB|W|pictures/s"
# A figure: a decimal, or an integer with a unit. Not a version, not a threshold, not part
# of a name.
FIGURE = re.compile(
    rf"(?<![\w.,/=^⁻−-])({NUMBER})(?![\w.]*\w*[-–]?bit)(?:\s?({UNIT})(?![\w/]))?(?![\w=])"
)
NO_FIGURE = re.compile(
    r"torch \d+\.\d+|[<>≤≥] \d[\d.]*(?: dB)?|more than \d+ dB|over \d+ dB|40 dB|arXiv:[\d.]+"
)
LOG = re.compile(r"(?:\.\./)?(log/[\w./-]+\.json)")


def name(page: Path) -> str:
    """A page's name in a test's id."""
    return str(page.relative_to(ROOT))


def code_blocks(text: str, language: str = r"\w*") -> list[str]:
    """The contents of fenced code blocks."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def prose(page: Path) -> str:
    """A page without code blocks and comments."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, without the rule under its head."""
    found = re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.M)
    rows = [[line.strip("|").split(" | ") for line in table.splitlines()] for table in found]
    return [
        [[cell.strip() for cell in row] for row in table if not set("".join(row)) <= set("-|: ")]
        for table in rows
    ]


def commands(page: Path) -> Iterator[tuple[list[str], str]]:
    """(words, comment) of every command: lines of bash blocks, and code in tables that
    begins with a program.
    """
    lines = "\n".join(code_blocks(page.read_text(), "bash")).replace("\\\n", " ").splitlines()
    lines += [
        f"{code}  # {row[-1]}"
        for table in tables(prose(page))
        for row in table
        for code in _programs(row[0])
    ]
    for line in lines:
        command, _, comment = line.partition("#")
        command = re.sub(r"^\w+=\$\((.*)\)$", r"\1", command.strip())  # a=$(sbatch …)
        if command:
            yield shlex.split(command), comment.strip()


def _programs(cell):
    return [
        code
        for code in re.findall(r"`([^`]+)`", cell)
        if code.startswith(("python ", "torchrun ", "bash "))
    ]


def program(words: list[str]) -> tuple[str, list[str]]:
    """(the file that runs, its arguments) of a command that begins with python, torchrun
    or bash.
    """
    words = words[1:]
    while words[0].startswith("--"):  # torchrun's
        words = words[1:]
    return words[0], words[1:]


@lru_cache
def help_of(file: str) -> str:
    """Return the --help of a program, called from another folder."""
    if file.endswith(".sh"):
        return succeeds(
            subprocess.run(["bash", ROOT / file, "--help"], cwd="/", capture_output=True, text=True)
        )
    return succeeds(run([ROOT / file, "--help"], cwd="/"))


def unknown_flags(file: str, arguments: list[str]) -> list[str]:
    """Return the flags of a command that its program lacks."""
    return [
        word
        for word in arguments
        if word.startswith("--") and not re.search(rf"{word}\b", help_of(file))
    ]


# ---- figures ----


def segments(page: Path) -> Iterator[tuple[str, list[Path], str]]:
    """(text, files, its block): every stretch of text whose figures come from files in
    log/.

    Figures stand before the log files that their paragraph, list item or table row names.
    A table whose rows name none belongs to the files of the paragraph before it, which
    ends with a colon.
    """
    before = []
    for block in re.split(r"\n\s*\n", prose(page)):
        table = block.startswith("|")
        for part in block.splitlines()[2:] if table else re.split(r"\n(?=- |\d+\. )", block):
            links = list(LOG.finditer(part))
            files = [ROOT / link[1] for link in links] or before * table
            if files:
                yield part[: links[-1].start()] if links else part, files, block if table else part
        before = files if not table and part.rstrip().endswith(":") else []


def figures(text: str) -> Iterator[tuple[str, str]]:
    """(number, unit) of every figure in a text."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", NO_FIGURE.sub(" ", text.replace("*", "")))
    for number, unit in FIGURE.findall(text):
        if unit or "." in number or "e" in number:
            yield number, unit


def numbers(value) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        yield from (float(key) for key in value if re.fullmatch(NUMBER, key))
        value = [*value.values()]
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def recorded(files: list[Path]) -> list[float]:
    """All numbers in JSON files, without infinities."""
    found = (number for file in files for number in numbers(json.loads(file.read_text())))
    return [number for number in found if abs(number) < float("inf")]


def half_digit(number: str) -> tuple[float, float]:
    """(value, half a unit of its last digit)."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2])
    return float(number.replace(",", "")), 0.5000001 * 10.0 ** (int(exponent or 0) - digits)


def agrees(number: str, unit: str, values: list[float], block: str) -> bool:
    """Whether a figure is a recorded value, rounded, or the ratio of two figures in its block."""
    value, tolerance = half_digit(number)
    scales = {"%": (100,), "GiB": (1, 1 / 1024), "MiB": (1, 2**-20)}.get(
        unit, (1, 255) if "0–255" in block else (1,)
    )
    if any(abs(value - scale * one) <= tolerance for one in values for scale in scales):
        return True
    if unit not in ("×", "%") and not re.search(rf"{re.escape(number)} of\b", block):
        return False
    # As written: 5.28 is anything from 5.275 to 5.285.
    shown = [half_digit(other) for other, of in figures(block) if of not in ("×", "%")]
    value, tolerance = (value / 100, tolerance / 100) if unit == "%" else (value, tolerance)
    return any(
        (a - da) / (b + db) <= value + tolerance and value - tolerance <= (a + da) / (b - db)
        for a, da in shown
        for b, db in shown
        if b > db
    )
