"""What the report says, as plain data by section: the JSON files of a log, read, checked and compared.

A missing measurement is an error that names it, and files of several GPUs are never mixed.
"""

import hashlib
import re
from pathlib import Path

import evaluate
from accel.errors import UsageError
from accel.files import read_json
from accel.parallel.exchanges import EXCHANGES
from bench import steps, work
from bench.harness import safe
from bench.jobs import rehearsal, score
from bench.profile_step import clip
from scripts import front_page, verify

NEEDS = {  # of each section: roles of records, a|b: one of them or both
    1: "ladder contest",
    2: "baseline fast",
    3: "ladder fast sweep contest versus verify|tiers",
    4: "fast sweep link",
    5: "ddp|parallel",
}
ALTERNATIVES = r"torch\.compile|diffusers|eager"  # in the name of a rung
METHODS = ("plan", "even", "hold", "steps", "ddim")  # of the forecast table, in its order
SCALES = 8  # lines in the scaling figure


def read_log(folder: Path) -> dict[str, list[dict]]:
    """Role → records, each with its `path`, `file` and `digest`: the folder's JSON files and verify*/verify.json.

    Raises UsageError if a file is damaged or was cut short, and for files of several GPUs.
    """
    if not folder.is_dir():
        raise UsageError(f"--log {folder}: no such folder; bash scripts/measure.sh {folder} fills one")
    found, devices = {}, {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify*/verify.json")]):
        try:
            record = read_json(path)
        except (ValueError, OSError) as error:
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


def on_gpus(found: dict) -> bool:
    return any(record.get("gpu") for records in found.values() for record in records)


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
    for need in " ".join(NEEDS[section] for section in sections).split():
        if not any(role in found for role in need.split("|")) and not (need == "versus" and not on_gpus(found)):
            lacks = f"holds no {need.split('|')[0]} measurement"
            raise UsageError(f"{log}: {lacks}; bash scripts/measure.sh {log} makes it")


def baseline(found: dict) -> dict:
    return dict(ladder=found["ladder"][0], contest=contest(found))


def contest(found: dict) -> list[dict]:
    """The contest's rows, each with the phases of the run whose time is given. Only the contest's job has points."""
    rows = []
    for record in found["contest"]:
        keys = ("model", "image_size", "steps", "pictures", "weights")
        job = dict({key: record[key] for key in keys}, rehearsal=rehearsal(record))
        for row in record["contest"]:
            run = min(row["runs"], key=lambda run: abs(run["total"] - row["seconds"]))
            phases = {phase: seconds for phase, seconds in run.items() if phase not in ("total", "process")}
            rows.append(row | dict(phases=phases, points=None if job["rehearsal"] else score(row["seconds"]), job=job))
    return rows


def profile(found: dict) -> dict:
    runs = [*found["baseline"], *reversed(found["fast"])]
    for run in runs:
        for key in ("model", "image_size", "batch_rows"):
            if run[key] != runs[0][key]:
                files = f"{runs[0]['path']} is of {key} {runs[0][key]}, {run['path']} of {run[key]}"
                raise UsageError(f"{files}: move one of them elsewhere")
        run["who"] = "upstream" if run["baseline"] else "here"
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
        record["methods"] = as_many_evaluations(record["methods"])
    rungs = [rung for rung in ladder["rungs"] if not gone(rung["rung"])]
    return dict(
        ladder=ladder,
        rungs=with_speed(rungs, "^fp32$"),
        floor=found["fast"][0],
        versus=[r | {"rungs": against_ours(r["rungs"])} for r in found.get("versus", ())],
        sweep=sweep,
        growth=(by_pictures, by_size),
        contest=contest(found),
        forecasts=found.get("forecast", []),
        tiers=judged_tiers(found["tiers"]) if "tiers" in found else None,
        verified=[verified(record) for record in found.get("verify", ())],
    )


def gone(rung: str) -> bool:
    """Whether a rung of the ladder is an optimisation that was removed since: docs/tried.md."""
    return " + " in rung and rung.partition(" + ")[2] not in dict(steps.STEPS)


def against_ours(rungs: list[dict]) -> list[dict]:
    """Ours, the fastest of its rungs, before the alternatives."""
    rungs = with_speed(rungs, f"^(?!.*({ALTERNATIVES}))")
    ours = [rung for rung in rungs if not re.search(ALTERNATIVES, rung["rung"])]
    best = min(ours, key=lambda rung: rung["ms"])
    tier = best["rung"].partition(" + ")[0]
    return [best | {"rung": f"{tier} + ours"}, *(rung for rung in rungs if rung not in ours)]


def as_many_evaluations(rows: list[dict]) -> list[dict]:
    """METHODS side by side at equal evaluations: the fewest at which the plan keeps the most grids."""
    plans = [row for row in rows if row["method"] == "plan"]
    count = max(plans, key=lambda row: (row["grids_over_40"], -row["evaluations"]))["evaluations"]
    return [row for method in METHODS for row in rows if (row["method"], row["evaluations"]) == (method, count)]


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
    return record | {"points": points, "alone": alone}


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
    sizes = sorted({row["bytes"] for row in link["link"]})
    shown = [row for row in link["link"] if row["ranks"] == gpus and row["bytes"] in (sizes[0], sizes[-1])]
    here = [row for row in sweep["sweep"] if "ms" in row and row["image_size"] == sweep["image_size"]]
    step_ms = {row["pictures"]: row["ms"] for row in here}
    cases = []
    for pictures in dict.fromkeys((min(step_ms), sweep["pictures"])):
        shape = work.Shape(**fast["shape"] | {"batch_rows": 2 * pictures})
        strategies = work.strategies(shape, gpus, width, step_ms, link["link"])
        cases.append(dict(pictures=pictures, shape=shape, alone=step_ms[pictures], strategies=strategies))
    return dict(fast=fast, link=link, shown=shown, gpus=gpus, cases=cases)


def many(found: dict) -> dict:
    series = {}  # of the figure: name → {GPUs: speed over one}
    for ddp in found.get("ddp", ()):
        most, name = str(ddp["gpus"]), f"{ddp['model']} {ddp['image_size']} px {ddp['precision']}"
        ddp["runs"] = [job_on(int(gpus), runs) for gpus, runs in ddp["grid_phases_s"].items() if gpus.isdigit()]
        ddp["name"] = name
        ddp["rehearsal"] = rehearsal(ddp | dict(pictures=8))
        ddp["ideal"] = 1 / ddp["grid_sampling_s"]["ratio"] / ddp["gpus"]
        series.setdefault(f"{name} + 8 labels", {1: 1.0})[ddp["gpus"]] = 1 / ddp["grid_sampling_s"]["ratio"]
        rates = ddp.get("fid_pictures_per_s", {})
        if "1" in rates:  # without one GPU's rate there is nothing to compare with
            series.setdefault(f"{name} + 50k job", {1: 1.0})[ddp["gpus"]] = rates[most] / rates["1"]
    for parallel in found.get("parallel", ()):
        parallel["cases"] = shared([row for row in parallel["plans"] if runs_today(row.get("chosen") or row["plan"])])
        parallel["failed"] = [row for row in parallel.get("judged", ()) if not row["contest"]]
        for case in parallel["cases"]:
            if case["labels"] in (1, 8) and len(case["best"]) > 1:
                name = f"{case['tier']}, {case['size']} px + {case['labels']} label{'s' * (case['labels'] > 1)}"
                for gpus, row in case["best"].items():
                    series.setdefault(name, {}).setdefault(gpus, row["speedup"])
    # Most numbers of GPUs first. A CPU's ranks share its cores: no scaling.
    ranked = sorted(series.items(), key=lambda item: -len(item[1]))[:SCALES] if on_gpus(found) else []
    return dict(ddp=found.get("ddp", []), parallel=found.get("parallel", []), series=dict(ranked))


def job_on(gpus: int, runs: list[dict]) -> dict:
    """The runs of a grid on so many GPUs: T of each, and the phases of the fastest."""
    best = min(runs, key=lambda run: run["total"])
    phases = {phase: seconds for phase, seconds in best.items() if phase != "total"}
    totals = [run["total"] for run in runs]
    return dict(gpus=gpus, T=best["total"], points=score(best["total"]), totals=totals, phases=phases)


def runs_today(plan: str) -> bool:
    """Whether a plan's exchange still exists; what was removed is in docs/tried.md."""
    exchange = re.search(r"exchange=(\w+)", plan)
    return not plan.startswith("stages") and (exchange is None or exchange[1] in EXCHANGES)


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
        for key in ("driver", "torch", "version", "cores")
    }
    gpus = max(record.get("gpus", 1) for record in sources)
    front = front_page.summary(data, gpus, device_of(sources[0]))
    return data | dict(about=about, device=device_of(sources[0]), gpus=gpus, sources=sources, front=front)
