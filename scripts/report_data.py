"""The report's contents as plain data by section: the JSON files of a log, read, checked
and compared.

A missing measurement is an error that names it, and files of several GPUs are never
mixed.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from accel.errors import UsageError
from accel.files import read_json
from bench import steps
from bench.harness import SAME_STEPS, require_alike, safe
from bench.jobs import CONTEST, rehearsal, score
from scripts import verify

NEEDS = {  # of each section: roles of records
    1: "ladder",
    2: "baseline fast",
    3: "ladder fast contest versus verify",
    4: "parallel",
}
RIVALS = r"torch\.compile|diffusers|eager"  # in the name of a rung


def read_log(folder: Path) -> dict[str, list[dict]]:
    """Return role → records of the JSON files and verify*/verify.json, with `path`,
    `file`, `digest` and `device`. Raises UsageError if a file is damaged or was cut
    short, and for files of several GPUs.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--log {folder}: no such folder; bash scripts/measure.sh {folder} fills one"
        )
    log = {}
    devices = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify*/verify.json")]):
        try:
            record = read_json(path)
        except (ValueError, OSError) as error:
            raise UsageError(f"{path}: not JSON ({error}); measure again or remove it") from None
        if _is_cut_short(path, record):
            raise UsageError(
                f"{path}: its measurement was cut short; bash scripts/measure.sh {folder} makes "
                "it again"
            )
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        device = record.get("gpu") or "CPU"
        for role in roles(record):
            devices.setdefault(device, path)
            entry = dict(record)  # each role has its own: sections add to it
            entry.update(path=path, file=path.relative_to(folder), digest=digest, device=device)
            log.setdefault(role, []).append(entry)
    if len(devices) > 1:
        files = ", ".join(f"{path} is of {gpu}" for gpu, path in devices.items())
        raise UsageError(f"{files}: a report is of one GPU; name a folder of one by --log")
    # The longest is the ladder, the fastest the fast path.
    log.get("ladder", []).sort(key=lambda record: -len(record["rungs"]))
    log.get("fast", []).sort(key=lambda record: record["timed"]["ms"])
    return log


def _is_cut_short(path, record):
    """Return whether the measurement that writes a record did not end."""
    if path.with_name(path.name + ".unfinished").exists():
        return True
    if record.get("kind") == "verify":
        return "recommended" not in record
    return record.get("kind") == "parallel" and not record.get("plans")


def roles(record: dict) -> list[str]:
    """Return the roles that a record can have in the report."""
    if record.get("kind") == "profile":
        return ["baseline" if record["baseline"] else "fast"]
    if record.get("kind") == "steps":
        names = [rung["rung"] for rung in record["rungs"] if "ms" in rung]
        of_rivals = [bool(re.search(RIVALS, name)) for name in names]
        has_roles = {"ladder": "fp32" in names, "versus": len(set(of_rivals)) == 2}
        return [role for role, has_role in has_roles.items() if has_role]
    if record.get("kind") in ("contest", "verify", "parallel"):
        return [record["kind"]]
    return []


def contest(log: dict) -> list[dict]:
    """Return the contest's rows, fewest GPUs first, each with the phases of its median
    run. Only the contest's job has points. Raises UsageError for records of different
    jobs.
    """
    records = sorted(log["contest"], key=gpus_of)
    keys = (*CONTEST, "weights")
    require_alike(records, keys)
    job = {key: records[0][key] for key in keys}
    job["rehearsal"] = rehearsal(records[0])
    rows = []
    for record in records:
        for row in record["contest"]:
            seconds = row["seconds"]
            run = min(row["runs"], key=lambda run: abs(run["total"] - seconds))
            points = None if job["rehearsal"] else score(seconds)
            phases = {name: run[name] for name in run if name not in ("total", "process")}
            rows.append(row | dict(gpus=gpus_of(record), phases=phases, points=points, job=job))
    return rows


def gpus_of(record: dict) -> int:
    """Return the number of GPUs of a record; on a CPU, of processes."""
    return record.get("gpus", 1)


def baseline(log: dict) -> dict:
    """Return the ladder, whose first rungs are upstream's arithmetic."""
    return dict(ladder=log["ladder"][0])


def profile(log: dict) -> dict:
    """Return the profiles, upstream's first. Raises UsageError for profiles of different
    networks or batches.
    """
    runs = [*log["baseline"], *reversed(log["fast"])]
    require_alike(runs, SAME_STEPS)
    for run in runs:
        run["who"] = "upstream" if run["baseline"] else "here"
        if "kinds" in run:  # of a GPU
            run["largest"] = max(run["kinds"], key=lambda work: run["kinds"][work]["ms"])
    return dict(runs=runs, kinds=[run for run in runs if "kinds" in run])


def single(log: dict) -> dict:
    """Return the result on one GPU: each optimisation, the rivals, the contest's job and
    the likeness of pictures.
    """
    ladder = log["ladder"][0]
    today = dict(steps.STEPS)
    require_alike([ladder, log["fast"][0]], SAME_STEPS)
    rungs = []
    for rung in _measured(ladder):
        _, _, step = rung["rung"].partition(" + ")
        if step in ("", *today):  # others were removed since
            rungs.append(rung)
    versus = []
    for record in log.get("versus", ()):
        if record["model"] != ladder["model"]:
            continue
        rivals = [rung for rung in _measured(record) if re.search(RIVALS, rung["rung"])]
        ours = [rung for rung in _measured(record) if not re.search(RIVALS, rung["rung"])]
        fastest = min(ours, key=lambda rung: rung["ms"])
        tier, _, _ = fastest["rung"].partition(" + ")
        first = fastest | {"rung": f"{tier} + ours"}
        versus.append(record | {"rungs": [first, *rivals]})
    return dict(
        ladder=ladder,
        rungs=rungs,
        floor=log["fast"][0],
        versus=versus,
        contest=contest(log),
        verified=verified(log),
    )


def _measured(record):
    """Return the rungs of a record that have a time."""
    return [rung for rung in record["rungs"] if "ms" in rung]


def verified(log: dict) -> dict:
    """Return a verify.json, preferably of the contest's model, with its judged tiers,
    each with its worst grid and the picture that fails most.
    """
    models = [record["model"] for record in log["contest"]]
    record = min(log["verify"], key=lambda record: record["model"] not in models)
    tiers = [tier for tier in record["tiers"] if "verdicts" in tier]
    if not tiers:
        raise UsageError(f"{record['path']}: no tier was sampled ({record['tiers'][0]['refused']})")
    for tier in tiers:
        tier |= {metric: float(value) for metric, value in tier["worst"]["grid"].items()}
        tier["failed"] = verify.shown(tier, record["gate"]).get("-picture")
    best = next((tier for tier in tiers if tier["tier"] == record["recommended"]), tiers[0])
    return record | dict(tiers=tiers, best=best)


def many(log: dict) -> dict:
    """Return the speeds on many GPUs over one: of sampling the contest's job, and of one
    label by its best layout.
    """
    series = defaultdict(dict)  # of the figure: name → {GPUs: speed over one}
    rows = contest(log) if "contest" in log else []
    alone = {row["tier"]: row["phases"]["sample"] for row in rows if row["gpus"] == 1}
    for row in rows:
        if row["tier"] in alone:
            job = row["job"]
            name = f"{row['tier']}, {job['image_size']} px + {job['pictures']} labels"
            series[name][row["gpus"]] = alone[row["tier"]] / row["phases"]["sample"]
    for parallel in log["parallel"]:
        for row in parallel["plans"]:
            if row["labels"] == 1 and row["plan"] != "auto":
                points = series[f"{row['tier']}, {row['size']} px + 1 label"]
                points[row["gpus"]] = max(row["speedup"], points.get(row["gpus"], 0))
    of_many = [item for item in series.items() if len(item[1]) > 1]
    # Those with the most numbers of GPUs come first.
    ranked = sorted(of_many, key=lambda item: -len(item[1]))[:6]
    return dict(series=dict(ranked))


def front_page(data: dict) -> dict:
    """Return before and after, from the sections' data.

    before, after: the contest's rows of upstream's arithmetic on the fewest GPUs, and the
    fastest of the recommended tier. upstream: as it ships. here: all other rows; a CPU's
    only with one process, since ranks share its cores. judged: tier → its likeness.
    shown: the heatmap of `after`. missing: keys of text about gaps. Raises UsageError if
    the heatmap or upstream's arithmetic is missing.
    """
    rows = data["single"]["contest"]
    if data["device"] == "CPU":
        rows = [row for row in rows if row["gpus"] == rows[0]["gpus"]]
    verified = data["single"]["verified"]
    job = data["single"]["contest"][0]["job"]
    tiers = verified["tiers"]
    judged = {plain(tier["tier"]): tier for tier in tiers}
    upstreams = {tier: first(rows, tier) for tier in ("fp32", "tf32")}
    before = upstreams["fp32"] or upstreams["tf32"]
    if before is None:
        raise UsageError(
            "--log: no contest measurement of fp32; bench/jobs.py --contest fp32 --output "
            "LOG/fp32.json"
        )
    recommended = [row for row in rows if row["tier"] == plain(verified["best"]["tier"])]
    after = min(recommended or rows, key=lambda row: row["seconds"])
    upstream = upstreams["tf32"] if before is not upstreams["tf32"] else None
    best = judged.get(after["tier"], verified["best"])
    shown = verified["path"].parent / f"heatmap-{safe(best['tier'])}.png"
    if not shown.is_file():
        raise UsageError(f"{shown}: missing beside {verified['path']}; run scripts/verify.py again")
    weights = verified["vgg_weights"]
    missing = dict(
        weights=job["weights"].startswith("random"),
        likeness=any(verified[key] != job[key] for key in ("model", "image_size")),
        lpips=weights and not weights["published"],
        vgg=any(math.isnan(tier["lpips"]) for tier in tiers),
        contest=job["rehearsal"],
    )
    return dict(
        job=job,
        contest=CONTEST,
        before=before,
        after=after,
        upstream=upstream,
        here=[row for row in rows if row is not before and row is not upstream],
        judged=judged,
        verified=verified,
        shown=shown,
        tier=best["tier"],
        missing=[key for key, value in missing.items() if value],
    )


def first(rows: list[dict], tier: str) -> dict | None:
    """Return the first of the contest's rows of a tier."""
    return next((row for row in rows if row["tier"] == tier), None)


def plain(tier: str) -> str:
    """Return a tier's name without "again", by which verify.py calls a second fp32."""
    return tier.removesuffix(" again")


def collect(folder: Path, sections: Collection[int] = (1, 2, 3, 4)) -> dict:
    """Return the contents by section. Raises UsageError for missing or damaged files and
    files of another GPU.
    """
    log = read_log(folder)
    device = next((records[0]["device"] for records in log.values()), "CPU")
    needs = " ".join(NEEDS[section] for section in sections).split()
    for need in needs:
        if need == "versus" and device == "CPU":
            continue
        if need not in log:
            raise UsageError(
                f"{folder}: holds no {need} measurement; bash scripts/measure.sh {folder} makes it"
            )
    parts = {1: baseline, 2: profile, 3: single, 4: many}
    data = {parts[section].__name__: parts[section](log) for section in sections}
    data["device"] = device
    used = {}  # path → record
    for need in needs:
        for record in log.get(need, ()):
            used[record["path"]] = record
    sources = [record for _, record in sorted(used.items())]
    about = {}
    for key in ("driver", "torch", "version", "cores"):
        values = [str(record[key]) for record in sources if record.get(key)]
        about[key] = "; ".join(dict.fromkeys(values))
    return data | dict(
        about=about,
        gpus=max(gpus_of(record) for record in sources),
        sources=sources,
        front=front_page(data) if "single" in data else None,
    )
