"""The pages: their figures are those of the files in log/, their commands are real, their
links lead somewhere.
"""

import re
from functools import lru_cache
from itertools import zip_longest

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
    unknown_flags,
)

import sample
import sample_ddp
from accel.cli import request_from
from accel.errors import UsageError

SETTINGS = {"sample.py": sample.make_parser, "sample_ddp.py": sample_ddp.make_parser}
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# Programs whose commands are run here where no GPU is needed; the others have tests of
# their own.
QUICK = (*SETTINGS, "evaluate.py", "scripts/convert_checkpoint.py")


# ---- figures, first: under -x a wrong one is named, and not what follows from it ----


@pytest.mark.parametrize("page", [page for page in PAGES if LOG.search(page.read_text())], ids=name)
def test_figures_are_those_of_the_files_they_name(page):
    """Each is a value in its file, rounded, or the ratio of two figures beside it."""
    for text, files, block in segments(page):
        for number, unit in figures(text):
            where = (
                f"{name(page)}: {number} {unit}: not in {', '.join(map(name, files))}: "
                f"…{text[-200:]}"
            )
            assert agrees(number, unit, recorded(files), block), where


# ---- the pages' shape ----


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", prose(page)):
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), f"{name(page)}: {target}"
        assert not anchor or anchor in anchors(path), f"{name(page)}: {target}"


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_chinese_page_has_the_same_commands_links_and_tables():
    english = README.read_text()
    chinese = CHINESE.read_text()

    def plain(text):
        return [
            [line.partition("#")[0].strip() for line in block.splitlines()]
            for block in code_blocks(text)
        ]

    assert plain(chinese) == plain(english), (
        "README.zh-CN.md: bring its code blocks up to README.md's"
    )
    # each first links the other
    links = [re.findall(r"\]\(([^)]+)\)", text)[1:] for text in (english, chinese)]
    assert links[0] == [link.replace(".zh-CN.png", ".png") for link in links[1]]
    pairs = zip_longest(tables(english), tables(chinese), fillvalue=[])
    for row, other in (rows for pair in pairs for rows in zip_longest(*pair, fillvalue=[])):
        assert len(row) == len(other), (row, other)
        assert [list(figures(cell)) for cell in row] == [list(figures(cell)) for cell in other]


# ---- commands ----


def every_command():
    """(page, file, arguments, comment) of each command that names a program of ours."""
    for page in PAGES:
        for words, comment in commands(page):
            if words[0] in ("python", "torchrun", "bash"):
                yield page, *program(words), comment


@pytest.mark.parametrize("file", sorted({file for _, file, _, _ in every_command()}))
def test_programs_know_the_flags_that_pages_give_them(file):
    for page, other, arguments, _ in every_command():
        assert other != file or unknown_flags(file, arguments) == [], f"{name(page)}: {file}"


def test_sampling_commands_are_valid():
    """Every sample.py and sample_ddp.py command passes the checks of its options."""
    seen = 0
    for page, file, arguments, _ in every_command():
        # --like reads a picture that an earlier command makes
        if file in SETTINGS and not {"--help", "--like"} & set(arguments):
            try:
                request_from(SETTINGS[file]().parse_args(arguments))
            except (UsageError, SystemExit) as error:
                pytest.fail(f"{name(page)}: {file} {' '.join(arguments)}: {error}")
            seen += 1
    assert seen >= 20


@lru_cache(maxsize=None)
def quick_commands(page):
    """Commands of a page, with their programs, that need neither a GPU nor a download and
    are on no earlier page.
    """
    earlier = [words for one in PAGES[: PAGES.index(page)] for words, _ in commands(one)]
    found = []
    for words, comment in commands(page):
        if (
            "GPU" in comment
            or "download" in comment
            or words[0] not in ("python", "torchrun")
            or words in earlier
        ):
            continue
        file, arguments = program(words)
        if file in QUICK and re.search("--help|DiT-Demo|demo/|output/", " ".join(arguments)):
            found.append((words, file))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != CHINESE and quick_commands(page)], ids=name
)
def test_commands_for_any_machine_run(page, tmp_path):
    """They run in an empty folder with links to the repository's files, and with two steps if a
    command gives no number.
    """
    for item in ROOT.iterdir():
        if item.name not in ("output", "samples", ".git"):
            (tmp_path / item.name).symlink_to(item)
    for words, file in quick_commands(page):
        command = ["-m", "torch.distributed.run"] * (words[0] == "torchrun") + words[1:]
        if file in SETTINGS and "--num-sampling-steps" not in words:
            command += ["--num-sampling-steps", "2"]
        done = forks.run(
            command, tmp_path, timeout=300, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
        )
        assert done.returncode == 0, (
            f"{name(page)}: {' '.join(words)}\n{done.stdout[-800:]}{done.stderr[-800:]}"
        )


@pytest.mark.timeout(300)
def test_the_python_example_runs(tmp_path, monkeypatch):
    *_, example = code_blocks(README.read_text(), "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    exec(
        compile(example.replace("seed=0", "seed=0, num_sampling_steps=2"), "README.md", "exec"), {}
    )
    assert len(list(tmp_path.glob("*.png"))) == 2


# ---- completeness ----


def test_the_index_of_log_names_every_file():
    text = (ROOT / "log" / "README.md").read_text()
    for entry in {path.split("/")[1] + "/" * (path.count("/") > 1) for path in tracked("log")} - {
        "README.md"
    }:
        assert f"`{entry}`" in text, f"log/README.md does not name log/{entry}"


def test_files_and_members_that_pages_name_are_there():
    for page in (CODE, ARCHITECTURE):
        named = r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cuh?|sh|sbatch))`(?:, `(\w+)`)?"
        for path, member in re.findall(named, page.read_text()):
            file = ROOT / path
            assert re.search(rf"(def|class) {member}" if member else "", file.read_text()), (
                page.name,
                path,
                member,
            )
        places = r"`(?:\w+\.)*(\w+)` (?:of|in)\s+`(accel/[\w./]+\.py)`"
        for member, path in re.findall(places, page.read_text()):
            assert re.search(rf"\b{member}\b", (ROOT / path).read_text()), (page.name, member, path)
