"""README: its figures are those of the files in log/, its commands are real."""

import json
import re
import shlex
from fnmatch import fnmatch

from conftest import ROOT

from accel.options import DistributedOptions, OneLineParser, SamplingOptions, add_arguments

README = (ROOT / "README.md").read_text()


def ladder(*files):
    """The rungs of benchmark files as the table that README shows."""
    lines = [
        "| rung | ms a step | error of a forward against float64 | worst of 64 pictures against fp32 |",
        "|---|---|---|---|",
    ]
    for file in files:
        for rung in json.loads((ROOT / "log" / file).read_text())["rungs"]:
            judged = rung.get("judged")
            psnr = (
                "–"
                if not judged
                else f"{judged['worst']['psnr']:.1f} dB"
                if judged["contest"]
                else "see the file's note"
            )
            lines.append(f"| {rung['rung']} | {rung['ms']:.1f} | {rung['error']:.1e} | {psnr} |")
    return "\n".join(lines)


def tiers(file):
    """The rungs of a benchmark file that are tiers, with both criteria, as the table that README shows."""
    lines = [
        "| tier | ms a step | error of a forward against float64 | worst picture: PSNR | MAE of 0–255 | contest gate | strict gate |",
        "|---|---|---|---|---|---|---|",
    ]
    for rung in json.loads((ROOT / "log" / file).read_text())["rungs"]:
        judged, name = rung.get("judged"), rung["rung"].split(" ")[0]
        worst = (
            f"{judged['worst']['psnr']:.1f} dB | {255 * judged['worst']['mae']:.4f} | {' | '.join('pass' if judged[key] else 'no' for key in ('contest', 'strict'))}"
            if judged
            else "– | – | – | –"
        )
        lines.append(f"| {name} | {rung['ms']:.1f} | {rung['error']:.1e} | {worst} |")
    return "\n".join(lines)


def shared(file):
    """The plans of a parallel benchmark as the table that README shows: the best of two and of four GPUs, and auto's choice."""
    cases = {}
    for row in json.loads((ROOT / "log" / file).read_text())["plans"]:
        cases.setdefault((row["labels"], row["size"], row["tier"]), []).append(row)
    lines = [
        "| labels, px, tier | one GPU, ms a step | two GPUs, the best plan | four GPUs, the best plan | auto on four |",
        "|---|---|---|---|---|",
    ]
    for (labels, size, tier), rows in cases.items():
        timed = [row for row in rows if row["plan"] != "auto" and not row["plan"].startswith("stages")]
        best = {
            gpus: min((row for row in timed if row["gpus"] == gpus), key=lambda row: row["ms"]) for gpus in (1, 2, 4)
        }
        auto = next((f"{row['chosen']}, {row['speedup']:.2f}×" for row in rows if row["plan"] == "auto"), "pictures")
        lines.append(
            f"| {labels}, {size}, {tier} | {best[1]['ms']:.2f} | "
            + " | ".join(
                f"{best[gpus]['plan']}: {best[gpus]['ms']:.2f}, {best[gpus]['speedup']:.2f}×" for gpus in (2, 4)
            )
            + f" | {auto} |"
        )
    return "\n".join(lines)


def in_both(table):
    """Whether README has this table, and README.zh-CN.md its rows under a heading of its own."""
    return table in README and table.partition("\n")[2] in (ROOT / "README.zh-CN.md").read_text()


def test_shared_pictures_are_the_measured_ones():
    assert in_both(shared("parallel-h200.json"))


def test_two_gpus_against_one_are_as_measured():
    """README's sentence and code.md's table."""
    rows = [
        row for row in json.loads((ROOT / "log/parallel-2x-h200.json").read_text())["plans"] if row["plan"] != "auto"
    ]
    cells = {}
    for case in {(row["labels"], row["size"], row["tier"]) for row in rows}:
        here = [row for row in rows if (row["labels"], row["size"], row["tier"]) == case]
        alone, best = here[0]["ms"], min((row for row in here if row["gpus"] == 2), key=lambda row: row["ms"])
        assert best["plan"] == ("rows=2" if case[0] == 1 else "pictures")
        cells[case] = f"{alone:.2f} → {best['ms']:.2f} ms, {alone / best['ms']:.2f}×"
    code = (ROOT / "code.md").read_text()
    assert all(f"| {cell} |" in code for cell in cells.values()), cells
    assert all(
        cells[case] in README for case in ((1, 512, "fp16"), (2, 512, "fp16"), (1, 1024, "fp16"), (1, 512, "fp32"))
    )
    four = {row["tier"]: row for row in json.loads((ROOT / "log/four-from-two-h200.json").read_text())["rows"]}
    assert (
        "is {:.1f} times as fast as one GPU in fp16 and {:.1f} times in fp32".format(
            *(four[tier]["speed_up"] for tier in ("fp16", "fp32"))
        )
        in README
    )
    rates = json.loads((ROOT / "log/ddp_2x_h200.json").read_text())["fid_pictures_per_s"]
    assert (
        f"two GPUs make {rates['2']:.2f} pictures/s, one GPU beside them in the same run {rates['1']:.2f}, {rates['efficiency']:.3f} of the ideal"
        in code
    )


def test_the_tiers_are_the_measured_ones():
    assert in_both(tiers("tiers-h200-512px-16rows.json"))


def test_the_ladder_is_the_measured_one():
    assert in_both(ladder("ladder-h200-512px-16rows.json"))


def test_alternatives_and_waits_are_the_measured_ones():
    """In both languages."""
    rungs = {rung["rung"]: rung["ms"] for rung in json.loads((ROOT / "log/versus-h200.json").read_text())["rungs"]}
    profile = json.loads((ROOT / "log/profile-baseline-fp32-h200.json").read_text())
    figures = [f"{ms:.1f}" for ms in rungs.values()] + [
        f"{sum(wait['ms_per_step'] for wait in profile['waits']):.1f}",
        f"{profile['timed']['ms']:.1f}",
        f"{profile['host_copies_ms']:.3f}",
        f"{profile['kinds']['idle']['share']:.1%}".replace("%", " %"),
    ]
    assert list(rungs) == [
        "fp16 + one reset",
        "fp16 + torch.compile default",
        "fp16 + diffusers' DiTTransformer2DModel",
    ]
    for text in (README, (ROOT / "README.zh-CN.md").read_text()):
        assert all(figure in text for figure in figures), figures


def test_four_gpus_against_one_is_as_measured():
    grid = json.loads((ROOT / "log/ddp_4x_h200.json").read_text())["grid_sampling_s"]
    for file in ("README.md", "README.zh-CN.md", "code.md"):
        assert all(f"{min(grid[n]):.2f} " in (ROOT / file).read_text() for n in "14"), file


def test_start_and_decoder_are_as_measured():
    start = json.loads((ROOT / "log/cold-start-h200.json").read_text())
    runs = [start[kind] for kind in ("empty_kernel_caches", "warm_kernel_caches")]
    decoder = {
        row["arithmetic"]: row["ms"] for row in json.loads((ROOT / "log/decoder-h200.json").read_text())["decoder"]
    }
    figures = [f"{max(run['process'] for run in kind):.1f} s" for kind in runs] + [
        f"{max(run['peak_mib'] for kind in runs for run in kind) / 1024:.1f} GiB"
    ]
    assert all(figure in (ROOT / file).read_text() for file in ("README.md", "code.md") for figure in figures), figures
    assert f"in {decoder['fp16']:.0f} ms, in float32 with TF32 in {decoder['tf32']:.0f} " in README
    assert all(f"| {name} | {ms:.1f} |" in (ROOT / "code.md").read_text() for name, ms in decoder.items())


def test_files_that_are_named_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_scripts_know_their_flags():
    """Every flag that README gives a script or a benchmark stands in its help."""
    given = {}
    for command in re.findall(r"(?:python|nproc_per_node=\d+) ((?:scripts|bench)/\w+\.py[^`#\n]*)", README):
        script, *words = shlex.split(command)
        given.setdefault(script, set()).update(word for word in words if word.startswith("--"))
    assert {"bench/profile_step.py", "bench/steps.py", "scripts/verify.py", "scripts/report.py"} <= set(given)
    for script, flags in given.items():
        source = (ROOT / script).read_text()
        if "measure.add_arguments(" in source:
            source += (ROOT / "bench/measure.py").read_text()
        shared = {"--" + name.replace("_", "-") for name in SamplingOptions.__dataclass_fields__}
        known = set(re.findall(r'"(--[a-z][a-z0-9-]*)"', source))
        assert flags <= known | (shared if " add_arguments(" in source else set()), script


def test_commands_parse():
    """Every sample.py and sample_ddp.py line in a code block is understood by its parser."""
    seen = 0
    for line in "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S)).splitlines():
        words = shlex.split(line, comments=True)
        for script, options in (("sample.py", SamplingOptions), ("sample_ddp.py", DistributedOptions)):
            if script in words and "--help" not in words:
                parser = OneLineParser()
                add_arguments(parser, options)
                parser.parse_args(words[words.index(script) + 1 :])
                seen += 1
    assert seen >= 8


def test_code_md_gives_measured_gains_and_names_every_file():
    """The table "File by file": its times are neighbouring rungs of the ladder, and no module of ours is left out."""
    text = (ROOT / "code.md").read_text()
    table = text.partition("## File by file")[2].partition("\n## ")[0]
    rungs = [
        rung
        for rung in json.loads((ROOT / "log/ladder-h200-512px-16rows.json").read_text())["rungs"]
        if rung["rung"] != "exact"
    ]  # beside the ladder
    steps = {
        after["rung"].removeprefix("fp16 + "): (before["ms"], after["ms"]) for before, after in zip(rungs, rungs[1:])
    }
    gains = re.findall(r"([\d.]+) → ([\d.]+) ms \(([^)]+)\)", table)
    assert len(gains) >= 6
    stale = {
        f"{before} → {after} ms ({rung})": "{:.1f} → {:.1f} ms".format(*steps[rung]) for before, after, rung in gains
    }
    assert all(text.startswith(measured) for text, measured in stale.items()), (
        f"code.md, File by file, against the ladder: {stale}"
    )
    waits = [
        sum(wait["per_step"] for wait in json.loads((ROOT / f"log/{name}.json").read_text())["waits"])
        for name in ("profile-baseline-fp32-h200", "profile-h200")
    ]
    assert f"waits {waits[0]:.0f} times a step" in table and waits[1] == 0
    for path in [
        *ROOT.glob("accel/*.py"),
        *ROOT.glob("accel/kernels/*.*"),
        *ROOT.glob("accel/parallel/*.py"),
        *ROOT.glob("diffusion/*.py"),
        *ROOT.glob("*.py"),
    ]:
        name = str(path.relative_to(ROOT))
        named = [
            pattern for cell in re.findall(r"^\| ([^|]+) \|", table, re.M) for pattern in re.findall(r"`([^`]+)`", cell)
        ]
        folder = name.rpartition("/")[0]
        assert path.name == "__init__.py" or any(
            fnmatch(name, pattern) or fnmatch(name, f"{folder}/{pattern}") for pattern in named
        ), name


def test_the_chinese_readme_has_the_same_commands():
    """README.zh-CN.md: the code blocks of README.md in their order (comments may differ), and links that lead somewhere."""
    chinese = (ROOT / "README.zh-CN.md").read_text()

    def commands(text):
        return [
            [line.partition("#")[0].strip() for line in block.splitlines()]
            for block in re.findall(r"^```\w+\n(.*?)^```", text, re.S | re.M)
        ]

    assert commands(chinese) == commands(README), "README.zh-CN.md: bring its code blocks up to README.md's"
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", chinese):
        assert target.startswith("http") or (ROOT / target).exists(), target
    parts = [len(re.findall(r"^##+ ", text, re.M)) for text in (chinese, README)]
    assert parts[0] == parts[1] and "@@" not in chinese and "{{" not in chinese
