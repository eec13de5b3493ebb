"""The pages: their figures are those of the files in log/, their commands are real, their links lead somewhere."""

import json
import re
import subprocess
from fnmatch import fnmatch
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import forks
import pytest
from conftest import ROOT, tracked
from pages import (
    CHINESE,
    CODE,
    LOG,
    PAGES,
    README,
    agrees,
    code_blocks,
    commands,
    figures,
    name,
    program,
    prose,
    recorded,
    segments,
    tables,
)

from accel.command_line import OneLineParser, add_arguments, options_from
from accel.errors import UsageError
from accel.options import DistributedOptions, SamplingOptions
from accel.start import GPUS

SPEED, PARALLEL = ROOT / "docs" / "speed.md", ROOT / "docs" / "parallel.md"
SETTINGS = {"sample.py": SamplingOptions, "sample_ddp.py": DistributedOptions}
# Programs whose commands are run here where no GPU is needed; the others have tests of their own.
QUICK = (*SETTINGS, "evaluate.py", "scripts/convert_checkpoint.py")


# ---- figures, first: under -x a wrong one is named, and not what follows from it ----


@pytest.mark.parametrize("page", [page for page in PAGES if LOG.search(page.read_text())], ids=name)
def test_figures_are_those_of_the_files_they_name(page):
    """Each is a value in its file, rounded, or the ratio of two figures beside it."""
    for text, files, block in segments(page):
        for number, unit in figures(text):
            where = f"{name(page)}: {number} {unit}: not in {', '.join(map(name, files))}: …{text[-200:]}"
            assert agrees(number, unit, recorded(files), block), where


def log(file):
    return json.loads((ROOT / "log" / file).read_text())


def test_the_tiers_are_the_measured_ones():
    for rung in log("tiers-h200-512px-16rows.json")["rungs"]:
        judged, tier = rung.get("judged"), rung["rung"].split(" ")[0]
        worst = "– | – | – | –"
        if judged:
            verdicts = " | ".join("pass" if judged[key] else "no" for key in ("contest", "strict"))
            worst = f"{judged['worst']['psnr']:.1f} dB | {255 * judged['worst']['mae']:.4f} | {verdicts}"
        assert f"| {tier} | {rung['ms']:.1f} | {rung['error']:.1e} | {worst} |\n" in SPEED.read_text()


def test_the_ladder_is_the_measured_one():
    for rung in log("ladder-h200-512px-16rows.json")["rungs"]:
        if rung["rung"] == "fp16 + one reset":  # removed since: docs/tried.md
            continue
        assert f"| {rung['rung']} | {rung['ms']:.1f} | {rung['error']:.1e} |\n" in SPEED.read_text()


def test_gains_are_neighbouring_rungs():
    """code.md's gains in ms, each with the name of its rung."""
    rungs = log("ladder-h200-512px-16rows.json")["rungs"]
    ladder = [rung for rung in rungs if rung["rung"] != "exact"]  # stands beside the ladder
    pairs = [*zip(ladder, ladder[1:]), *((rungs[0], rung) for rung in rungs if rung["rung"] == "exact")]
    steps = {after["rung"].removeprefix("fp16 + "): (before["ms"], after["ms"]) for before, after in pairs}
    gains = re.findall(r"([\d.]+) → ([\d.]+) ms \(([a-zA-Z ]+)\)", CODE.read_text())
    assert len(gains) >= 8
    for before, after, rung in gains:
        assert (before, after) == tuple(f"{ms:.1f}" for ms in steps[rung]), rung


def cases(file):
    """{(labels, px, tier): rows} of a file of bench/many_gpus.py."""
    found = {}
    for row in log(file)["plans"]:
        found.setdefault((row["labels"], row["size"], row["tier"]), []).append(row)
    return found


def test_four_gpus_are_as_measured():
    for (labels, size, tier), rows in cases("parallel-h200.json").items():
        timed = [row for row in rows if row["plan"] != "auto" and not row["plan"].startswith("stages")]
        one, two, four = (min((r for r in timed if r["gpus"] == gpus), key=lambda r: r["ms"]) for gpus in (1, 2, 4))
        best = " | ".join(f"{row['plan']}: {row['ms']:.2f}, {row['speedup']:.2f} ×" for row in (two, four))
        auto = next((f"{row['chosen']}, {row['speedup']:.2f} ×" for row in rows if row["plan"] == "auto"), "pictures")
        assert f"| {labels}, {size}, {tier} | {one['ms']:.2f} | {best} | {auto} |\n" in PARALLEL.read_text()


def test_two_gpus_are_as_measured():
    for (labels, _, _), rows in cases("parallel-2x-h200.json").items():
        rows = [row for row in rows if row["plan"] != "auto"]
        alone, best = rows[0]["ms"], min((row for row in rows if row["gpus"] == 2), key=lambda row: row["ms"])
        assert best["plan"] == ("rows=2" if labels == 1 else "pictures")
        cell = f"| {alone:.2f} → {best['ms']:.2f}, {alone / best['ms']:.2f} × |"
        assert cell in PARALLEL.read_text()


# ---- the pages' shape ----


@pytest.mark.parametrize("page", [README, CHINESE, CODE], ids=name)
def test_landing_pages_are_short(page):
    assert len(page.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, anchor = target.partition("#")
        if not target.startswith("http"):
            path = page.parent / file if file else page
            assert path.exists(), f"{name(page)}: {target}"
            assert not anchor or anchor in anchors(path), f"{name(page)}: {target}"


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_linked_from_both_landing_pages():
    for page in (ROOT / "docs").glob("*.md"):
        for landing in (README, CHINESE):
            assert f"](docs/{page.name})" in landing.read_text(), f"{name(landing)} does not link docs/{page.name}"


def test_the_chinese_page_has_the_same_commands_links_and_tables():
    english, chinese = README.read_text(), CHINESE.read_text()

    def plain(text):
        return [[line.partition("#")[0].strip() for line in block.splitlines()] for block in code_blocks(text)]

    assert plain(chinese) == plain(english), "README.zh-CN.md: bring its code blocks up to README.md's"
    links = [re.findall(r"\]\(([^)]+)\)", text)[1:] for text in (english, chinese)]  # each first links the other
    assert links[0] == links[1]
    pairs = zip_longest(tables(english), tables(chinese), fillvalue=[])
    for row, other in (rows for pair in pairs for rows in zip_longest(*pair, fillvalue=[])):
        assert len(row) == len(other), (row, other)
        assert [list(figures(cell)) for cell in row] == [list(figures(cell)) for cell in other]


# ---- commands ----


@lru_cache(maxsize=None)
def help_of(file):
    """What a program prints for --help, from any folder."""
    if file.endswith(".sh"):
        done = subprocess.run(["bash", ROOT / file, "--help"], cwd="/", capture_output=True, text=True)
    else:
        done = forks.run([ROOT / file, "--help"], cwd="/")
    assert done.returncode == 0, f"{file} --help: {done.stderr[-400:]}"
    return done.stdout


def every_command():
    """(page, file, arguments, comment) of each command that names a program of ours."""
    for page in PAGES:
        for words, comment in commands(page):
            if words[0] in ("python", "torchrun", "bash"):
                yield page, *program(words), comment


@pytest.mark.parametrize("file", sorted({file for _, file, _, _ in every_command()}))
def test_programs_know_the_flags_that_pages_give_them(file):
    known = help_of(file)
    for page, other, arguments, _ in every_command():
        for word in arguments if other == file else ():
            assert not word.startswith("--") or re.search(rf"{word}\b", known), f"{name(page)}: {file} knows no {word}"


def test_sampling_commands_are_valid():
    """Every sample.py and sample_ddp.py command passes the checks of its options."""
    seen = 0
    for page, file, arguments, _ in every_command():
        if file in SETTINGS and "--help" not in arguments:
            parser = OneLineParser()
            add_arguments(parser, SETTINGS[file])
            parser.add_argument("--gpus", **GPUS)
            try:
                options_from(parser.parse_args(arguments), SETTINGS[file])
            except (UsageError, SystemExit) as error:
                pytest.fail(f"{name(page)}: {file} {' '.join(arguments)}: {error}")
            seen += 1
    assert seen >= 20


def test_other_commands_exist():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for page in PAGES:
        for words, _ in commands(page):
            if words[0] == "make":
                assert words[1] in targets, f"{name(page)}: {words}"
            if words[0] == "sbatch":
                assert any((ROOT / word).is_file() for word in words if word.endswith(".sbatch")), (
                    f"{name(page)}: {words}"
                )


def quick_commands(page):
    """Commands of a page that need neither a GPU nor a download."""
    for words, comment in commands(page):
        if "GPU" in comment or "download" in comment or words[0] not in ("python", "torchrun"):
            continue
        file, arguments = program(words)
        if file in QUICK and (
            "--help" in arguments or any(re.search("DiT-Demo|demo/|output/", word) for word in arguments)
        ):
            yield words, file


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page != CHINESE and any(quick_commands(page))], ids=name)
def test_commands_for_any_machine_run(page, tmp_path):
    """In an empty folder with links to the repository's files, with few steps where a command leaves them open."""
    for item in ROOT.iterdir():
        if item.name not in ("output", "samples", ".git"):
            (tmp_path / item.name).symlink_to(item)
    for words, file in quick_commands(page):
        command = ["-m", "torch.distributed.run"] * (words[0] == "torchrun") + words[1:]
        if file in SETTINGS and not {"--num-sampling-steps", "--forecast"} & {*words}:
            command += ["--num-sampling-steps", "4"]
        done = forks.run(command, tmp_path, timeout=300, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, f"{name(page)}: {' '.join(words)}\n{done.stdout[-800:]}{done.stderr[-800:]}"


@pytest.mark.timeout(300)
def test_the_python_example_runs(tmp_path, monkeypatch):
    (example,) = code_blocks(README.read_text(), "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    exec(compile(example.replace("seed=0", "seed=0, num_sampling_steps=4"), "README.md", "exec"), {})
    assert len(list(tmp_path.glob("*.png"))) == 2


# ---- completeness and words ----


def test_code_md_names_every_changed_file():
    named = re.findall(r"`([\w./*-]+)`", "".join(re.findall(r"^\| [^|]+ \|", CODE.read_text(), re.M)))
    files = tracked("*.py", "*.cu", "*.cuh", "*.ipynb", "*.sbatch", "scripts/*.sh")
    ours = [path for path in files if not path.startswith(("tests/", "log/", ".ci/"))]
    assert len(ours) > 90
    for path in ours:
        assert any(fnmatch(path, pattern) for pattern in named), f"code.md does not name {path}"


def test_measuring_md_names_every_log():
    text = (ROOT / "docs" / "measuring.md").read_text()
    for entry in {path.split("/")[1] + "/" * (path.count("/") > 1) for path in tracked("log")}:
        assert f"`{entry}`" in text, f"docs/measuring.md does not name log/{entry}"


def test_logs_name_no_path_of_a_machine():
    for path in tracked("log/*.json"):
        assert not re.search(r"(?<![\w.~])/(root|home|work|tmp)/", (ROOT / path).read_text()), path


# Words of our own where the field has a term, and the term.
WORDS = {
    r"\bproducts\b(?!-)": "GEMMs",
    r"\b(own|half|split|matrix|measured|large) product\b": "GEMM",
    r"\brow kernel": "fused adaLN kernel",
    r"\b(float16|split|two) terms\b|\"terms\"": "high/low split",
    r"\btwins?\b": "reference implementation",
    r"\bcopy engine": "TMA",
    r"\btowers?\b": "forward_blocks",
    r"\broutes?\b": "backend",
    r"\bcalls? of the network\b": "network evaluations",
    r"\bat hand\b": "available",
    r"\bis no DiT\b": "is not a DiT",
    r"\bgoes on\b": "resumes",
    r"does not fit into what is free": "does not fit in free GPU memory",
    r"\ball the bars\b|\bthe bars hold\b": "thresholds",
    r"[Ss]maller slices there are none": "a single image cannot be tiled",
    "少 1.70 倍|候选者|已热": "natural Chinese",
}
ALLOWED = {
    "docs/measuring.md": r'"(products|row kernel|route)"',  # explains the words of older files
    "tests/diffusion/test_diffusion_against_diffusers.py": "cumulative products",
    "tests/diffusion/test_diffusion_steps.py": "two routes to one number",
    "tests/test_readme.py": ".*",
}
TEXT = ("*.py", "*.cu", "*.cuh", "*.sh", "*.sbatch", "*.j2", "*.md", "Makefile", ".ci/*")


def texts():
    """(path, text) of every text file but measurements."""
    for path in tracked(*TEXT):
        if not path.startswith("log/"):
            yield path, (ROOT / path).read_text()


def test_standard_terms_only():
    found = []
    for path, text in texts():
        text = re.sub(ALLOWED.get(path, "(?!)"), "", text)
        for number, line in enumerate(text.splitlines(), start=1):
            found += [
                f"{path}:{number}: {match[0]} → {term}"
                for word, term in WORDS.items()
                for match in re.finditer(word, line)
            ]
    assert not found, "\n".join(found)


def test_no_file_names_a_path_of_a_machine():
    for path, text in texts():
        match = re.search(r"(?<![\w.:/}$)])/(?:home|root|Users|mnt|scratch)/\w+", text)
        assert not match and str(ROOT) not in text and str(Path.home()) + "/" not in text, f"{path}: {match}"
