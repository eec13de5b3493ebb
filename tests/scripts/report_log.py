"""A log as scripts/measure.sh leaves it, made of the files in log/, and what traces a report's figures to a log."""

import json
import re
import shutil

from conftest import ROOT
from pages import agrees, figures, half_digit, numbers, recorded
from PIL import Image

from scripts import report_data

GPU = "NVIDIA H200"
FILES = {  # as measure.sh names them
    "ladder": "ladder-h200-512px-16rows",
    "versus": "versus-h200",
    "sweep": "sweep-h200",
    "contest": "contest-h200",
    "contest-fp32": "contest-fp32-h200",
    "profile-baseline": "profile-baseline-tf32-h200",
    "profile-fast": "profile-h200",
    "verify/verify": "verify-h200/verify",
    "ddp": "ddp_2x_h200",
    "parallel": "parallel-h200",
    "forecast": "forecast-curve-h200",
    "link": "link-h200-pair",
}


def change(path, **fields):
    """Other values of a record's fields; returns the record."""
    record = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(record))
    return record


def log(folder, gpu=GPU):
    """A whole log of measurements."""
    (folder / "verify").mkdir(parents=True)
    for name, file in FILES.items():
        shutil.copy(ROOT / "log" / f"{file}.json", folder / f"{name}.json")
        change(folder / f"{name}.json", gpu=gpu, version="3.1.4", commit="abc1234", cores=2)
    change(folder / "profile-fast.json", driver="570.1")
    ladder = change(folder / "ladder.json")["rungs"]
    change(folder / "ladder.json", rungs=[rung for rung in ladder if rung["rung"] != "exact"])  # verify has the tiers
    sweep = change(folder / "sweep.json")["sweep"]
    change(folder / "sweep.json", sweep=[*sweep, dict(image_size=2048, pictures=8, failed="out of memory")])
    for path in (ROOT / "log/verify-h200").glob("heatmap-*.png"):
        shutil.copy(path, folder / "verify")
    for index, tier in enumerate(("fp32", "fp16")):
        Image.new("RGB", (520, 260), (9, 9, 9 + 5 * index)).save(folder / "verify" / f"seed2-{tier}.png")
    return folder


def untraced(data, text):
    """Figures that no file of their section holds, in one of the report's units or as the ratio of two beside it."""
    everything, found = recorded([one["path"] for one in data["sources"]]), []
    computed = [run["timed"]["ms"] / run["floor_ms"] for run in data["profile"]["runs"]]
    computed += [row["ms"] / 4 for row in data["single"]["rungs"]]  # of 250 steps, s
    computed += [row["bytes"] / row["us"] / 1000 for row in data["design"]["link"]["link"]]  # GB/s
    computed += [job["ideal"] for job in data["many"]["ddp"]] + [
        r["points"] for job in data["many"]["ddp"] for r in job["runs"]
    ]
    computed += numbers([[vars(case["shape"]), case["strategies"]] for case in data["design"]["cases"]])
    computed += [row["bytes"] / case["shape"].depth for case in data["design"]["cases"] for row in case["strategies"]]
    for part in re.split(r"\n## ", text.rpartition("\n## ")[0]):
        roles = report_data.NEEDS.get(int(part[0]) if part[0].isdigit() else 0)
        if roles is None:
            values = everything
        else:
            wanted = set(re.findall(r"\w+", roles)) | {"forecast"}
            of_section = [one["path"] for one in data["sources"] if wanted & {*report_data.roles(one)}]
            values = recorded(of_section)
        blocks = re.split(r"\n\s*\n", part)
        for block, before in zip(blocks, ["", *blocks]):
            cells = [(cell, "") for cell in re.findall(r"(?<=\| )\d+(?= \|)", block)]  # integers
            for number, unit in [*figures(block.replace("×", " × ").replace("%", " % ")), *cells]:
                value, tolerance = half_digit(number)
                scales = (1, 100, 255, 2**-20)
                held = any(abs(value - one * scale) <= tolerance for one in values + computed for scale in scales)
                if not held and not agrees(number, unit, values, before + block):
                    found.append((number, unit, block[:90]))
    return found


# The contest's rule, and the versions of programs: no measurements.
RULE = r"T below 100 s .*? none\.|T 低于 100 秒.*?不得分。|^\| (?:driver|驱动).*?$"
