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
from itertools import chain
from pathlib import Path

import numpy as np

from accel.errors import UsageError
from accel.files import ROOT
from accel.picture_files import read_picture
from bench import harness, steps
from bench.harness import RANDOM, SAME_STEPS, require_alike, safe
from bench.jobs import CONTEST, other_job, score
from scripts import verify

NEEDS = {  # of each section: roles of records
    1: "ladder",
    2: "baseline fast",
    3: "ladder contest versus verify",
    4: "parallel",
}
UPSTREAM = "fp32", "tf32"  # tiers of upstream's arithmetic
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
    log = defaultdict(list)
    devices = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify*/verify.json")]):
        name = path.relative_to(folder)
        record = _read(path, name, str(path), "measure again or remove it")
        unfinished = path.with_name(path.name + ".unfinished").exists()
        if unfinished or (record.get("kind") == "parallel" and not record.get("plans")):
            raise UsageError(
                f"{path}: is not finished: wait, or if nothing runs, give the same measure.sh "
                "command again"
            )
        for role in roles(record):
            devices.setdefault(record["device"], path)
            log[role].append(dict(record))  # each role has its own: sections add to it
    if len(devices) > 1:
        files = ", ".join(f"{path} is of {gpu}" for gpu, path in devices.items())
        raise UsageError(f"{files}: a report is of one GPU; name a folder of one by --log")
    # The longest is the ladder.
    log["ladder"].sort(key=lambda record: -len(record["rungs"]))
    return log


def _read(path, name, owner, remedy):
    """Return a record with `path`, `file` (its name in the report), `digest`, `device`, and the
    number of its GPUs, on a CPU of processes.
    """
    record = harness.read(path, owner, remedy)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    machine = dict(device=record.get("gpu") or "CPU", gpus=record.get("gpus", 1))
    return record | machine | dict(path=path, file=name, digest=digest)


def roles(record: dict) -> list[str]:
    """Return the roles that a record can have in the report."""
    kind = record.get("kind")
    if kind == "profile":
        return ["baseline" if record["tier"] in UPSTREAM else "fast"]
    if kind == "steps":
        names = [rung["rung"] for rung in _measured(record)]
        of_rivals = {bool(re.search(RIVALS, name)) for name in names}
        has_roles = {"ladder": "fp32" in names, "versus": len(of_rivals) == 2}
        return [role for role, has_role in has_roles.items() if has_role]
    return [kind] if kind in ("contest", "verify", "parallel") else []


JOB = (*CONTEST, "weights")  # entries of a contest record that say what is sampled


def result_of(folder: Path) -> Path | None:
    """Return the record of the picture that is handed in: the newest of `folder`/final, else of
    the batch files' jobs; None if there is none.
    """
    records = [*folder.glob("final/*.json")] or [*ROOT.glob("output/job_*/contest.json")]
    return max(records, key=lambda path: path.stat().st_mtime, default=None)


def add_result(log: dict, path: Path, tier: str | None) -> str:
    """Add the record of the picture that is handed in to the contest's records of a log, with
    the one row of its tier. Return the tier. Raises UsageError if it is of another job, GPU or
    weights, or lacks the tier, or has several and `tier` is None.
    """
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    record = _read(path, shown, f"--result {path}", "name another")
    if roles(record) != ["contest"]:
        raise UsageError(f"--result {path}: is not of bench/jobs.py --contest; name another")
    require_alike([*log["contest"], *log["ladder"], record], ("device",))
    require_alike([*log["contest"], record], JOB)
    tiers = [row["tier"] for row in record["contest"]]
    if tier is None and len(tiers) == 1:
        tier = tiers[0]
    if tier not in tiers:
        raise UsageError(
            f"--tier{f' {tier}' if tier else ''}: {path} has {' '.join(tiers)}; give --tier the "
            "one that you hand in, or name its record by --result"
        )
    for other in log["contest"]:
        if other["gpus"] == record["gpus"]:
            other["contest"] = [row for row in other["contest"] if row["tier"] != tier]
    record["contest"] = [row for row in record["contest"] if row["tier"] == tier]
    record["result"] = True
    log["contest"].append(record)
    return tier


def contest(log: dict) -> list[dict]:
    """Return the contest's rows, fewest GPUs first, each with its record, the job, and the phases
    of its median run. Only the contest's job has points. Raises UsageError for records of
    different jobs.
    """
    records = sorted(log["contest"], key=lambda record: record["gpus"])
    require_alike(records, JOB)
    job = {key: records[0][key] for key in JOB}
    job["rehearsal"] = other_job(records[0])
    rows = []
    for record in records:
        of_record = dict(record=record, gpus=record["gpus"], file=record["file"], job=job)
        of_record["result"] = record.get("result", False)
        for row in record["contest"]:
            seconds = row["seconds"]
            run = min(row["runs"], key=lambda run: abs(run["total"] - seconds))
            points = None if job["rehearsal"] else score(seconds)
            phases = {name: run[name] for name in run if name not in ("total", "process")}
            rows.append(row | of_record | dict(phases=phases, points=points))
    return rows


def profile(log: dict) -> dict:
    """Return the profiles, upstream's first. Raises UsageError for profiles of different
    networks or batches.
    """
    runs = [*log["baseline"], *log["fast"]]
    require_alike([*runs, *log["ladder"][:1]], SAME_STEPS)
    for run in runs:
        run["who"] = "upstream" if run["tier"] in UPSTREAM else "here"
    return dict(runs=runs, sources=runs)


def single(log: dict) -> dict:
    """Return the result on one GPU: each optimisation, the rivals, the contest's job and
    the likeness of pictures.
    """
    ladder = log["ladder"][0]
    # A rung is of a tier, or adds a step to it. Other steps were removed since.
    steps_today = {"", *dict(steps.STEPS)}
    rungs = [rung for rung in _measured(ladder) if rung["rung"].partition(" + ")[2] in steps_today]
    versus = []
    for record in log["versus"]:
        if record["model"] != ladder["model"]:
            continue
        rivals = [rung for rung in _measured(record) if re.search(RIVALS, rung["rung"])]
        ours = [rung for rung in _measured(record) if not re.search(RIVALS, rung["rung"])]
        fastest = min(ours, key=lambda rung: rung["ms"])
        tier, _, _ = fastest["rung"].partition(" + ")
        first = fastest | {"rung": f"{tier} + ours"}
        versus.append(record | {"rungs": [first, *rivals]})
    rows = contest(log)
    judged = verified(log)
    sources = [ladder, *versus, judged, *(row["record"] for row in rows)]
    return dict(
        ladder=ladder,
        rungs=rungs,
        versus=versus,
        contest=rows,
        verified=judged,
        sources=sources,
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


def many(log: dict, tier: str | None = None) -> dict:
    """Return the speeds on many GPUs over one: of sampling the contest's job, and of one
    label by its best layout. Those of `tier` come first.
    """
    series = defaultdict(dict)  # of the figure: name → {GPUs: speed over one}
    records = defaultdict(list)  # name → the records that it is of
    rows = contest(log) if log["contest"] else []
    alone = {row["tier"]: row["phases"]["sample"] for row in rows if row["gpus"] == 1}
    for row in rows:
        if row["tier"] in alone:
            name = "{}, {image_size} px + {pictures} labels".format(row["tier"], **row["job"])
            series[name][row["gpus"]] = alone[row["tier"]] / row["phases"]["sample"]
            records[name].append(row["record"])
    for parallel in log["parallel"]:
        for row in parallel["plans"]:
            if row["labels"] == 1 and row["plan"] != "auto":
                name = f"{row['tier']}, {row['size']} px + 1 label"
                points = series[name]
                points[row["gpus"]] = max(row["speedup"], points.get(row["gpus"], 0))
                records[name].append(parallel)
    names = [name for name in series if len(series[name]) > 1]
    # Those of the tier come first, then those with the most numbers of GPUs.
    names.sort(key=lambda name: (not name.startswith(f"{tier},"), -len(series[name])))
    names = names[:6]
    sources = []
    if log["parallel"][0]["device"] != "CPU":  # a CPU's ranks share its cores
        sources += chain.from_iterable(records[name] for name in names)
    return dict(series={name: series[name] for name in names}, sources=sources)


def front_page(data: dict, tier: str | None = None) -> dict:
    """Return before and after, from the sections' data.

    before: the contest's row of upstream's arithmetic on the fewest GPUs. after: the picture's
    that is handed in, else the fastest of `tier`, else of the recommended one. upstream: as it
    ships. here: all other rows; a CPU's only with one process, since ranks share its cores.
    judged: tier → its likeness. shown: the pictures of the tier of `after`. missing: keys of
    text about gaps. Raises UsageError if the pictures, the tier or upstream's arithmetic are
    missing.
    """
    everything = data["single"]["contest"]
    verified = data["single"]["verified"]
    job = everything[0]["job"]
    rows = everything
    if data["device"] == "CPU":
        rows = [row for row in rows if row["gpus"] == rows[0]["gpus"]]
    on_fewest = {row["tier"]: row for row in reversed(rows)}
    before = on_fewest.get("fp32") or on_fewest.get("tf32")
    if before is None:
        raise UsageError(
            "--log: no contest measurement of fp32; bench/jobs.py --contest fp32 --output "
            "LOG/fp32.json"
        )
    upstream = on_fewest.get("tf32") if "fp32" in on_fewest else None
    chosen = tier or plain(verified["best"]["tier"])
    of_tier = [row for row in everything if row["tier"] == chosen]
    if tier and not of_tier:
        raise UsageError(f"--tier {tier}: was not measured; bench/jobs.py --contest {tier}")
    results = [row for row in everything if row["result"]]
    after = min(results or of_tier or rows, key=lambda row: row["seconds"])
    judged = {plain(tier["tier"]): tier for tier in verified["tiers"]}
    best = judged.get(after["tier"], verified["best"])
    weights = verified["vgg_weights"]
    missing = dict(
        weights=job["weights"] == RANDOM,
        likeness=any(verified[key] != job[key] for key in ("model", "image_size")),
        lpips=weights and not weights["published"],
        vgg=any(math.isnan(tier["lpips"]) for tier in verified["tiers"]),
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
        shown=pictures_of(verified, best),
        tier=best["tier"],
        missing=[key for key, value in missing.items() if value],
    )


def pictures_of(verified: dict, tier: dict) -> dict:
    """Return fp32's grid, a tier's worst one and the largest difference of a channel, by their
    files beside verify.json, else the heatmap that has all three. Raises UsageError if both are
    missing.
    """
    folder = verified["path"].parent
    name = safe(tier["tier"])
    seed = tier["worst_seed"]
    grids = [folder / f"seed{seed}-{each}.png" for each in ("fp32", name)]
    if all(path.is_file() for path in grids):
        want, got = [read_picture(path).pixels for path in grids]
        most = int(np.abs(want.astype(int) - got).max())
        return dict(want=want, got=got, seed=seed, most=most)
    heatmap = folder / f"heatmap-{name}.png"
    if heatmap.is_file():
        return dict(heatmap=heatmap)
    raise UsageError(f"{heatmap}: missing beside {verified['path']}; run scripts/verify.py again")


def plain(tier: str) -> str:
    """Return a tier's name without "again", by which verify.py calls a second fp32."""
    return tier.removesuffix(" again")


def collect(
    folder: Path,
    sections: Collection[int] = (1, 2, 3, 4),
    tier: str | None = None,
    result: Path | None = None,
) -> dict:
    """Return the contents by section. tier: what the conclusion is about; result: the contest
    record of the picture that is handed in, which names a tier by itself. Raises UsageError for
    missing or damaged files and files of another GPU.
    """
    log = read_log(folder)
    device = next(chain.from_iterable(log.values()), {"device": "CPU"})["device"]
    if result:
        tier = add_result(log, result, tier)
    needs = " ".join(NEEDS[section] for section in sections).split()
    for need in needs:
        if not log[need] and not (need in ("versus", "fast") and device == "CPU"):  # fp32 only
            raise UsageError(
                f"{folder}: holds no {need} measurement; bash scripts/measure.sh {folder} makes it"
            )
    data = {}
    if 1 in sections:
        data["baseline"] = dict(ladder=log["ladder"][0], sources=log["ladder"][:1])
    if 2 in sections:
        data["profile"] = profile(log)
    if 3 in sections:
        data["single"] = single(log)
    if 4 in sections:
        data["many"] = many(log, tier)
    records = chain.from_iterable(section["sources"] for section in data.values())
    by_path = {str(record["path"]): record for record in records}
    sources = [by_path[path] for path in sorted(by_path)]
    data["device"] = device
    about = {}
    for key in ("driver", "torch", "version", "cores", "date"):
        values = [str(record[key]) for record in sources if record.get(key)]
        about[key] = "; ".join(dict.fromkeys(sorted(values) if key == "date" else values))
    return data | dict(
        about=about,
        gpus=max((record["gpus"] for record in sources), default=1),
        sources=sources,
        front=front_page(data, tier) if "single" in data else None,
    )
