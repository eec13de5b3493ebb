"""The contest's report from what was measured: report.md and a self-contained report.html, from the JSON files in log/.

    python scripts/report.py output/report
    python scripts/report.py output/report --lang zh --log output/log --sections 1 2 3

This file reads the log and computes plain data; the text lies in scripts/report/, a template a language.
A missing measurement is an error that names it, and files of several GPUs are never mixed.
"""

if not __package__:
    __import__("_as_module")

import base64
import hashlib
import io
import json
import re
import statistics
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt
from PIL import Image

import evaluate
from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError
from accel.files import atomic_write
from accel.options import ROOT, check_writable
from bench import plots, work
from bench.jobs import score
from bench.measure import safe
from bench.profile_step import clip
from scripts import verify

TEMPLATES = ROOT / "scripts" / "report"
NEEDS = {  # of each section: roles of records, a|b: one of them or both
    1: "ladder contest",
    2: "baseline fast",
    3: "ladder fast sweep contest versus verify|tiers",
    4: "fast sweep link",
    5: "ddp|parallel",
}
ALTERNATIVES = r"torch\.compile|diffusers"  # in the name of a rung
METHODS = ("plan", "even", "two", "line", "hold", "steps", "ddim")  # of the forecast table, in its order

#################################################################################
#                                    The log                                    #
#################################################################################


def read_log(folder: Path) -> dict[str, list[dict]]:
    """Role → records, each with its `path`, `file` and `digest`: the folder's JSON files and verify*/verify.json.

    Raises UsageError if a file is damaged or was cut short, and for files of several GPUs.
    """
    if not folder.is_dir():
        raise UsageError(f"--log {folder}: no such folder; bash scripts/measure.sh {folder} fills one")
    found, devices = {}, {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify*/verify.json")]):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path}: not JSON ({error}); measure again or remove it") from None
        if "kind" not in record:
            continue
        if cut_short(path, record):
            raise UsageError(f"{path}: its measurement was cut short; bash scripts/measure.sh {folder} makes it again")
        for role in roles(record):
            devices.setdefault(device_of(record), path)
            if role in ("sweep", "link") and role in found:
                files = f"{found[role][0]['path']} and {path}"
                raise UsageError(f"{files} are both {role} measurements; move one of them elsewhere")
            about = dict(path=path, file=path.relative_to(folder), digest=digest(path))
            found.setdefault(role, []).append(record | about)
    if len(devices) > 1:
        files = ", ".join(f"{path} is of {gpu}" for gpu, path in devices.items())
        raise UsageError(f"{files}: a report is of one GPU; name a folder of one by --log")
    found.get("ladder", []).sort(key=lambda record: -len(record["rungs"]))  # the longest is the ladder
    found.get("fast", []).sort(key=lambda record: record["timed"]["ms"])  # the fastest is the fast path
    return found


def cut_short(path: Path, record: dict) -> bool:
    """Whether measure.sh's mark or what the record lacks says that its measurement did not end."""
    lacks = {"verify": "recommended" not in record, "parallel": not record.get("plans")}
    return path.with_name(path.name + ".unfinished").exists() or lacks.get(record["kind"], False)


def digest(path: Path) -> str:
    """The first eight digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def device_of(record: dict) -> str:
    return record.get("gpu") or "CPU"


def roles(record: dict) -> list[str]:
    """What a record can serve as in the report."""
    if record["kind"] == "profile":
        return ["baseline" if record["baseline"] else "fast"]
    if record["kind"] != "steps":
        return [record["kind"]]
    names = [rung["rung"] for rung in record["rungs"] if "ms" in rung]
    serves = {
        "ladder": "fp32" in names,
        "tiers": len(last_rungs(record)) > 2,
        "versus": bool(re.search(ALTERNATIVES, str(names))),
    }
    return [role for role, does in serves.items() if does]


def last_rungs(record: dict) -> dict[str, dict]:
    """The last rung of each tier that was timed and whose pictures were judged, by the tier's name."""
    return {rung["rung"].partition(" + ")[0]: rung for rung in record["rungs"] if "ms" in rung and "judged" in rung}


def require(found: dict, sections: list[int], log: Path) -> None:
    """Raises UsageError for the first measurement that these sections lack."""
    on_cpu = all(device_of(record) == "CPU" for records in found.values() for record in records)
    for need in " ".join(NEEDS[section] for section in sections).split():
        if not any(role in found for role in need.split("|")) and not (need == "versus" and on_cpu):
            raise UsageError(
                f"{log}: holds no {need.split('|')[0]} measurement; bash scripts/measure.sh {log} makes it"
            )


#################################################################################
#                          The sections, as plain data                          #
#################################################################################


def baseline(found: dict) -> dict:
    return dict(ladder=found["ladder"][0], contest=contest(found))


def contest(found: dict) -> list[dict]:
    """The contest's rows, each with the phases of the run whose time is given."""
    rows = [row for record in found["contest"] for row in record["contest"]]
    for row in rows:
        run = min(row["runs"], key=lambda run: abs(run["total"] - row["seconds"]))
        row["phases"] = {phase: seconds for phase, seconds in run.items() if phase not in ("total", "process")}
    return rows


def profile(found: dict) -> dict:
    runs = [*found["baseline"], *reversed(found["fast"])]
    for run in runs:
        for key in ("model", "image_size", "batch_rows"):
            if run[key] != runs[0][key]:
                files = f"{runs[0]['path']} is of {key} {runs[0][key]}, {run['path']} of {run[key]}"
                raise UsageError(f"{files}: move one of them elsewhere")
        run["largest"] = max(run["kinds"], key=lambda kind: run["kinds"][kind]["ms"])
        run["functions"] = [row | {"name": clip(row["name"], 70)} for row in run.get("kernels", run["host"])]
        run["waiting"] = {key: sum(wait[key] for wait in run["waits"]) for key in ("per_step", "ms_per_step")}
    return dict(runs=runs)


def single(found: dict) -> dict:
    ladder, sweep = found["ladder"][0], found["sweep"][0]
    timed = [row for row in sweep["sweep"] if "ms" in row]
    by_pictures = [row for row in timed if row["image_size"] == sweep["image_size"]]
    by_size = sorted((row for row in timed if row["pictures"] == sweep["pictures"]), key=lambda row: row["image_size"])
    if min(len(by_pictures), len(by_size)) < 2:
        raise UsageError(f"{sweep['path']}: growth needs two numbers of pictures and two sizes; measure it again")
    for record in found.get("forecast", ()):
        rows = [row for row in record["methods"] if row["method"] in METHODS]
        record["methods"] = sorted(rows, key=lambda row: (METHODS.index(row["method"]), -row["evaluations"]))
    return dict(
        ladder=ladder,
        rungs=with_speed(ladder["rungs"], "^fp32$"),
        floor=found["fast"][0],
        versus=[r | {"rungs": with_speed(r["rungs"], f"^(?!.*({ALTERNATIVES}))")} for r in found.get("versus", ())],
        sweep=sweep,
        growth=(by_pictures, by_size),
        contest=contest(found),
        forecasts=found.get("forecast", []),
        tiers=judged_tiers(found["tiers"]) if "tiers" in found else None,
        verified=[verified(record) for record in found.get("verify", ())],
    )


def with_speed(rungs: list[dict], reference: str) -> list[dict]:
    """The timed rungs, each with its `speed` over the fastest whose name matches `reference`, else over the first."""
    timed = [rung for rung in rungs if "ms" in rung]
    matching = [rung["ms"] for rung in timed if re.search(reference, rung["rung"])]
    return [rung | {"speed": min(matching or [timed[0]["ms"]]) / rung["ms"]} for rung in timed]


def judged_tiers(records: list[dict]) -> dict:
    """The record that judged most pictures: each tier's speed and worst picture, its MAE in levels of 255."""
    record = max(records, key=lambda record: max(r["judged"]["pictures"] for r in last_rungs(record).values()))
    alone = next(rung["ms"] for rung in record["rungs"] if rung["rung"] == "fp32")
    points = []
    for tier, rung in last_rungs(record).items():
        worst = rung["judged"]["worst"]
        figures = dict(psnr=worst["psnr"], ssim=worst["ssim"], mae=255 * worst["mae"])
        points.append(dict(tier=tier, ms=rung["ms"], speedup=alone / rung["ms"], judged=rung["judged"], **figures))
    return record | {"points": points}


def verified(record: dict) -> dict:
    """A verify.json: its judged tiers, each with its worst grid, the picture that fails most, and its heatmaps."""
    tiers = [tier for tier in record["tiers"] if "verdicts" in tier]
    if not tiers:
        raise UsageError(f"{record['path']}: no tier was sampled ({record['tiers'][0]['refused']})")
    for tier in tiers:
        shown = verify.shown(tier, record["gate"])
        heatmaps = [record["path"].with_name(f"heatmap-{safe(tier['tier'])}{suffix}.png") for suffix in shown]
        for path in heatmaps:
            if not path.is_file():
                raise UsageError(f"{path}: missing beside {record['path']}; run scripts/verify.py again")
        values = {metric: float(shown[""][metric]) for metric in evaluate.METRICS}
        tier |= {metric: float(value) for metric, value in tier["worst"]["grid"].items()}
        tier |= dict(block=evaluate.block(values), failed=shown.get("-picture"))
        tier["heatmaps"] = {f"{path.stem}-{safe(record['model'])}.jpg": path for path in heatmaps}
    best = next((tier for tier in tiers if tier["tier"] == record["recommended"]), tiers[0])
    return record | dict(tiers=tiers, best=best)


def design(found: dict) -> dict:
    fast, sweep, link = found["fast"][0], found["sweep"][0], found["link"][0]
    gpus, width = max(row["ranks"] for row in link["link"]), 2 if fast["tier"] in ("fp16", "bf16") else 4
    here = [row for row in sweep["sweep"] if "ms" in row and row["image_size"] == sweep["image_size"]]
    step_ms = {row["pictures"]: row["ms"] for row in here}
    cases = []
    for pictures in dict.fromkeys((min(step_ms), sweep["pictures"])):
        shape = work.Shape(**fast["shape"] | {"batch_rows": 2 * pictures})
        strategies = work.strategies(shape, gpus, width, step_ms, link["link"])
        cases.append(dict(pictures=pictures, shape=shape, alone=step_ms[pictures], strategies=strategies))
    return dict(fast=fast, link=link, gpus=gpus, cases=cases)


def many(found: dict) -> dict:
    series = {}  # of the figure: name → {GPUs: speed over one}
    for ddp in found.get("ddp", ()):
        most, name = str(ddp["gpus"]), f"{ddp['model']} {ddp['image_size']} px {ddp['precision']}"
        totals = [run["total"] for run in ddp.get("grid_phases_s", {}).get(most, ()) if "total" in run]
        ddp["T"] = statistics.median(totals) if totals else None
        ddp["points"] = score(ddp["T"]) if totals else None
        series[f"{name}: 8 labels"] = {1: 1.0, ddp["gpus"]: 1 / ddp["grid_sampling_s"]["ratio"]}
        rates = ddp.get("fid_pictures_per_s", {})
        if "1" in rates:  # without one GPU's rate there is nothing to compare with
            series[f"{name}: 50k job"] = {1: 1.0, ddp["gpus"]: rates[most] / rates["1"]}
    for parallel in found.get("parallel", ()):
        parallel["cases"] = shared(parallel["plans"])
        for case in parallel["cases"]:
            if case["labels"] in (1, 8) and len(case["best"]) > 1 and len(series) < 8:
                name = f"{case['tier']}, {case['size']} px, {case['labels']} label{'s' * (case['labels'] > 1)}"
                series[name] = {gpus: row["speedup"] for gpus, row in case["best"].items()}
    return dict(ddp=found.get("ddp", []), parallel=found.get("parallel", []), series=series)


def shared(plans: list[dict]) -> list[dict]:
    """Timed plans → by network, size and labels: all of them, the best of each number of GPUs, and auto's choice."""
    cases = {}
    for row in plans:
        key = dict(tier=row["tier"], size=row["size"], labels=row["labels"])
        case = cases.setdefault(tuple(key.values()), key | dict(timed=[], best={}, auto=None))
        if row["plan"] == "auto":
            case["auto"] = row
            continue
        case["timed"].append(row)
        case["best"][row["gpus"]] = min(case["best"].get(row["gpus"], row), row, key=lambda row: row["ms"])
    return list(cases.values())


def collect(log: Path, sections=(1, 2, 3, 4, 5)) -> dict:
    """All that the text says, by section. Raises UsageError for what is missing, damaged or of another GPU."""
    found = read_log(log)
    require(found, sections, log)
    parts = {1: baseline, 2: profile, 3: single, 4: design, 5: many}
    data = {parts[section].__name__: parts[section](found) for section in sections}
    wanted = set(re.findall(r"\w+", " ".join(NEEDS[section] for section in sections))) | {"forecast"}
    used = {record["path"]: record for role in wanted for record in found.get(role, ())}
    sources = [record for _, record in sorted(used.items())]
    about = {
        key: "; ".join(dict.fromkeys(str(record[key]) for record in sources if record.get(key)))
        for key in ("driver", "torch", "model", "weights")
    }
    return data | dict(about=about, device=device_of(sources[0]), sources=sources)


#################################################################################
#                          Data → figures, text, page                           #
#################################################################################


def draw(data: dict) -> dict[str, bytes]:
    """File name → picture."""
    figures = {}
    if "profile" in data:
        names = {True: "upstream", False: "here"}
        figures["kinds.png"] = plots.kinds(
            {f"{names[run['baseline']]}, {run['tier']}": run["kinds"] for run in data["profile"]["runs"]}
        )
    if single := data.get("single"):
        floor = single["floor"]
        figures["ladder.png"] = plots.ladder(single["rungs"], floor["floor_ms"], f"floor ({floor['tier']})")
        figures["growth.png"] = plots.growth(*single["growth"])
        if single["tiers"]:
            points = single["tiers"]["points"]
            figures["error-speed-tiers.png"] = plots.error_against_speed(points, evaluate.GATES, "picture")
        for record in single["verified"]:
            name = f"error-speed-{safe(record['model'])}.png"
            figures[name] = plots.error_against_speed(record["tiers"], evaluate.GATES, "grid")
            figures |= {name: small_jpeg(path) for tier in record["tiers"] for name, path in tier["heatmaps"].items()}
    if "many" in data:
        figures["scaling.png"] = plots.scaling(data["many"]["series"])
    return figures


def small_jpeg(path: Path, width: int = 1200) -> bytes:
    """A picture for the screen: at most `width` pixels wide."""
    buffer = io.BytesIO()
    with Image.open(path) as image:
        small = image.convert("RGB")
        small.thumbnail((width, image.height), Image.Resampling.LANCZOS)
        small.save(buffer, "JPEG", quality=82, optimize=True)
    return buffer.getvalue()


def markdown(data: dict, lang: str) -> str:
    """The report's text, by the language's template."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    absent = (type(None), jinja2.Undefined)
    environment.filters["fmt"] = lambda value, spec: "–" if isinstance(value, absent) else format(float(value), spec)
    environment.filters["ms"] = lambda value: f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    environment.filters["code"] = lambda text: "`" + str(text).replace("`", "'").replace("|", r"\|") + "`"
    text = environment.get_template(f"report.{lang}.md.j2").render(data, safe=safe)
    text = re.sub(r"(?<=[\u3000-\uffee])\n(?=[\u3000-\uffee])", "", text)  # Chinese lines join without a space
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page(text: str, figures: dict[str, bytes], lang: str) -> str:
    """report.md's text as one HTML file with its pictures inside."""

    def figure(match):
        kind = "jpeg" if match[1].endswith("jpg") else "png"
        source = f"data:image/{kind};base64,{base64.b64encode(figures[match[1]]).decode()}"
        return f'<figure><img alt="{match[2]}" src="{source}"><figcaption>{match[2]}</figcaption></figure>'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'<p><img src="figures/(.*?)" alt="(.*?)" /></p>', figure, body, flags=re.S)
    frame = jinja2.Template((TEMPLATES / "page.html.j2").read_text())
    return frame.render(lang=lang, title=re.match("# (.*)", text)[1], body=body) + "\n"


def main() -> None:
    parser = OneLineParser(description="The contest's report from what was measured.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for report.md, report.html and figures/")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the report")
    parser.add_argument("--log", type=Path, default=ROOT / "log", help="folder with the measurements (default: log/)")
    parser.add_argument("--sections", nargs="+", type=int, choices=NEEDS, default=[*NEEDS], help="default: all")
    args = parser.parse_args()
    with user_errors(parser):
        data = collect(args.log, args.sections)
        figures, text = draw(data), markdown(data, args.lang)
        files = {"report.md": text.encode(), "report.html": page(text, figures, args.lang).encode()}
        for name, content in {**{f"figures/{name}": png for name, png in figures.items()}, **files}.items():
            check_writable(args.out / name, "OUT")
            with atomic_write(args.out / name) as file:
                file.write(content)
        print(f"{args.out / 'report.html'}: {len(figures)} pictures, {len(files['report.html']) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
