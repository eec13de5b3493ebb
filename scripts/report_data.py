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
from functools import partial
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
    log = {}
    devices = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify*/verify.json")]):
        record = harness.read(path, str(path), "measure again or remove it")
        if _is_cut_short(path, record):
            raise UsageError(
                f"{path}: is not finished: wait, or if nothing runs, give the same measure.sh "
                "command again"
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
    # The longest is the ladder.
    log.get("ladder", []).sort(key=lambda record: -len(record["rungs"]))
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
        return ["baseline" if record["tier"] in UPSTREAM else "fast"]
    if record.get("kind") == "steps":
        names = [rung["rung"] for rung in record["rungs"] if "ms" in rung]
        of_rivals = [bool(re.search(RIVALS, name)) for name in names]
        has_roles = {"ladder": "fp32" in names, "versus": len(set(of_rivals)) == 2}
        return [role for role, has_role in has_roles.items() if has_role]
    if record.get("kind") in ("contest", "verify", "parallel"):
        return [record["kind"]]
    return []


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
    record = harness.read(path, f"--result {path}", "name another")
    if roles(record) != ["contest"]:
        raise UsageError(f"--result {path}: is not of bench/jobs.py --contest; name another")
    others = [log[role][0] for role in ("contest", "ladder") if role in log][:1]
    device = record.get("gpu") or "CPU"
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    record |= dict(path=shown, file=shown, device=device, result=True)
    record["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    require_alike([*others, record], ("device",))
    require_alike([*log.get("contest", ()), record], JOB)
    tiers = [row["tier"] for row in record["contest"]]
    if tier is None and len(tiers) == 1:
        tier = tiers[0]
    if tier not in tiers:
        raise UsageError(
            f"--tier{f' {tier}' if tier else ''}: {path} has {' '.join(tiers)}; give --tier the "
            "one that you hand in, or name its record by --result"
        )
    record["contest"] = [row for row in record["contest"] if row["tier"] == tier]
    log.setdefault("contest", []).append(record)
    return tier


def contest(log: dict) -> list[dict]:
    """Return the contest's rows, fewest GPUs first, each with the phases of its median
    run and its file. Of a tier and a number of GPUs there is one: the picture's that is handed
    in, if measured. Only the contest's job has points. Raises UsageError for records of
    different jobs.
    """
    records = sorted(log["contest"], key=gpus_of)
    require_alike(records, JOB)
    job = {key: records[0][key] for key in JOB}
    job["rehearsal"] = other_job(records[0])
    results = [record for record in records if record.get("result")]
    replaced = {(each["contest"][0]["tier"], gpus_of(each)) for each in results}
    rows = []
    for record in records:
        for row in record["contest"]:
            if record not in results and (row["tier"], gpus_of(record)) in replaced:
                continue
            seconds = row["seconds"]
            run = min(row["runs"], key=lambda run: abs(run["total"] - seconds))
            points = None if job["rehearsal"] else score(seconds)
            phases = {name: run[name] for name in run if name not in ("total", "process")}
            more = dict(gpus=gpus_of(record), phases=phases, points=points, job=job)
            rows.append(row | more | dict(file=record["file"], result=record in results))
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
    runs = [*log["baseline"], *log.get("fast", ())]
    require_alike([*runs, *log.get("ladder", ())[:1]], SAME_STEPS)
    for run in runs:
        run["who"] = "upstream" if run["tier"] in UPSTREAM else "here"
    return dict(runs=runs)


def single(log: dict) -> dict:
    """Return the result on one GPU: each optimisation, the rivals, the contest's job and
    the likeness of pictures.
    """
    ladder = log["ladder"][0]
    today = dict(steps.STEPS)
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


def many(log: dict, tier: str | None = None) -> dict:
    """Return the speeds on many GPUs over one: of sampling the contest's job, and of one
    label by its best layout. Those of `tier` come first.
    """
    series = defaultdict(dict)  # of the figure: name → {GPUs: speed over one}
    files = defaultdict(list)  # name → the records that it is of
    rows = contest(log) if "contest" in log else []
    alone = {row["tier"]: row["phases"]["sample"] for row in rows if row["gpus"] == 1}
    for row in rows:
        if row["tier"] in alone:
            job = row["job"]
            name = f"{row['tier']}, {job['image_size']} px + {job['pictures']} labels"
            series[name][row["gpus"]] = alone[row["tier"]] / row["phases"]["sample"]
            files[name].append(row["file"])
    for parallel in log["parallel"]:
        for row in parallel["plans"]:
            if row["labels"] == 1 and row["plan"] != "auto":
                name = f"{row['tier']}, {row['size']} px + 1 label"
                points = series[name]
                points[row["gpus"]] = max(row["speedup"], points.get(row["gpus"], 0))
                files[name].append(parallel["file"])
    of_many = [item for item in series.items() if len(item[1]) > 1]
    # Those of the tier come first, then those with the most numbers of GPUs.
    ranked = sorted(of_many, key=lambda item: (not item[0].startswith(f"{tier},"), -len(item[1])))
    ranked = ranked[:6]
    used = {file for name, _ in ranked for file in files[name]}
    return dict(series=dict(ranked), files=used)


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
    rows = everything
    if data["device"] == "CPU":
        rows = [row for row in rows if row["gpus"] == rows[0]["gpus"]]
    verified = data["single"]["verified"]
    job = data["single"]["contest"][0]["job"]
    tiers = verified["tiers"]
    judged = {plain(tier["tier"]): tier for tier in tiers}
    upstreams = {tier: first(rows, tier) for tier in UPSTREAM}
    before = upstreams["fp32"] or upstreams["tf32"]
    if before is None:
        raise UsageError(
            "--log: no contest measurement of fp32; bench/jobs.py --contest fp32 --output "
            "LOG/fp32.json"
        )
    chosen = tier or plain(verified["best"]["tier"])
    of_tier = [row for row in everything if row["tier"] == chosen]
    if tier and not of_tier:
        raise UsageError(f"--tier {tier}: was not measured; bench/jobs.py --contest {tier}")
    results = [row for row in everything if row["result"]]
    after = min(results or of_tier or rows, key=lambda row: row["seconds"])
    upstream = upstreams["tf32"] if before is not upstreams["tf32"] else None
    best = judged.get(after["tier"], verified["best"])
    weights = verified["vgg_weights"]
    missing = dict(
        weights=job["weights"] == RANDOM,
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


def first(rows: list[dict], tier: str) -> dict | None:
    """Return the first of the contest's rows of a tier."""
    return next((row for row in rows if row["tier"] == tier), None)


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
    device = next((records[0]["device"] for records in log.values()), "CPU")
    if result:
        tier = add_result(log, result, tier)
    needs = " ".join(NEEDS[section] for section in sections).split()
    for need in needs:
        if need in ("versus", "fast") and device == "CPU":  # fp32 alone runs there
            continue
        if need not in log:
            raise UsageError(
                f"{folder}: holds no {need} measurement; bash scripts/measure.sh {folder} makes it"
            )
    parts = {1: baseline, 2: profile, 3: single, 4: partial(many, tier=tier)}
    names = {1: "baseline", 2: "profile", 3: "single", 4: "many"}
    data = {names[section]: parts[section](log) for section in sections}
    data["device"] = device
    sources = sources_of(data, log)
    about = {}
    for key in ("driver", "torch", "version", "cores", "date"):
        values = [str(record[key]) for record in sources if record.get(key)]
        about[key] = "; ".join(dict.fromkeys(sorted(values) if key == "date" else values))
    return data | dict(
        about=about,
        gpus=max((gpus_of(record) for record in sources), default=1),
        sources=sources,
        front=front_page(data, tier) if "single" in data else None,
    )


def sources_of(data: dict, log: dict) -> list[dict]:
    """Return the records that the sections have figures from, by their paths."""
    records = []
    if "baseline" in data:
        records.append(data["baseline"]["ladder"])
    if "profile" in data:
        records += data["profile"]["runs"]
    if "single" in data:
        single = data["single"]
        records += [single["ladder"], single["verified"], *single["versus"]]
        shown = {row["file"] for row in single["contest"]}
        records += [record for record in log["contest"] if record["file"] in shown]
    if "many" in data and data["device"] != "CPU":
        both = log["parallel"] + log.get("contest", [])
        records += [record for record in both if record["file"] in data["many"]["files"]]
    used = {str(record["path"]): record for record in records}
    return [record for _, record in sorted(used.items())]
