"""The report's contents as plain data: a log of measurements, read, checked and analysed.

A missing measurement is an error that names it. Files of several machines, networks or weights
are never mixed.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import numpy as np

import evaluate
from accel.errors import UsageError
from accel.io.filesystem import ROOT, read_json
from accel.io.picture_files import read_picture
from accel.runtime import precision
from bench import traces
from bench.measure import CONTEST, RANDOM
from bench.steps import LADDERS
from scripts.strategies import (
    COPIES,
    Machine,
    Shape,
    bytes_moved,
    choose,
    designs,
    flops,
    layer_flops,
)

KINDS = {  # kind of record → entries that must be the same in all records
    "contest": ("gpu", "model", "image_size", "weights", "steps", "decoder", "grids"),
    "fork": ("gpu", "model", "image_size", "weights", "steps"),
    "steps": ("gpu", "model", "image_size", "weights"),
    "parallel": ("gpu", "model", "image_size", "weights"),
}
# Name and SHA-256 of the contest's files. An empty string is a digest that no source here has: the
# report has the measured one, to compare.
PUBLISHED = {"weights": ("DiT-XL-2-512x512.pt", ""), "decoder": ("ema", "")}
PROGRAM = (  # the organisers' commits of Jaredanwolfgang/DiT-SUSTCSC
    "97dab9f6de494ef09a3d3dd308f062de6ef69ed7",
    "6869b78fb7574b20e059c4550d76c9d7fb2ca483",
    "d639819772bcc231c600b5e50060b95faa2a7b36",
    "3da2b46632d1778021b456e789ad1d5b5ca1fad4",
)
HALF = "fp16", "bf16"
SERIES = CONTEST["pictures"], 1  # numbers of labels


def require_own(folder: Path) -> None:
    """Raise UsageError for a log of the repository's authors, and unless there is a folder."""
    if folder.resolve() in (ROOT / "log", ROOT / "log/example"):
        raise UsageError(
            f"--log {folder}: is of this software's authors; measure on your own machine: bash "
            "scripts/measure.sh log/mine"
        )
    if not folder.is_dir():
        raise UsageError(
            f"--log {folder}: no such folder; bash scripts/measure.sh {folder} fills one"
        )


def read_log(folder: Path) -> dict[str, list[dict]]:
    """Return kind → records of the JSON files, with `path`, `file` and `digest`. Raises UsageError
    if a file is corrupt or was cut short, if a measurement is missing, and for one of another
    machine, network or weights.
    """
    log = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("*.json")):
        try:
            record = read_json(path)
        except (ValueError, OSError) as error:
            raise UsageError(f"{path}: not JSON ({error}); measure again or remove it") from None
        if path.with_name(path.name + ".unfinished").exists():
            raise UsageError(
                f"{path}: is not finished: wait, or if nothing runs, give the same measure.sh "
                "command again"
            )
        if record.get("kind") in KINDS:
            record |= dict(path=path, file=path.name, digest=digest_of(path)[:8])
            log[record["kind"]].append(record)
    log["contest"].sort(key=lambda record: (-record["pictures"], record["gpus"]))
    for kind, names in KINDS.items():
        if not log[kind] and kind in ("contest", "steps"):
            raise UsageError(
                f"{folder}: holds no {kind} measurement; bash scripts/measure.sh {folder} makes it"
            )
        first = log["contest"][0]
        for record, name in product(log[kind], names):
            if record[name] != first[name]:
                raise UsageError(
                    f"{first['path']} is of {name} {first[name]}, {record['path']} of "
                    f"{record[name]}: move one of them elsewhere"
                )
    return log


# ---- the contest's job ----


def shortcomings(record: dict, result: dict, edition: evaluate.Edition, missing: list) -> list[str]:
    """Return why a result earns no points: names that the texts have sentences for."""
    measured = record.get("sha256", {})
    found = {
        "job": any(record[key] != value for key, value in CONTEST.items()),
        "random": RANDOM in (record["weights"], record["decoder"]),
        "files": any(
            record[key].removeprefix("sd-vae-ft-") != name
            or not measured.get(key, "").startswith(digest)
            for key, (name, digest) in PUBLISHED.items()
        ),
        "grids": len(result["grids"]) != edition.grids,
        "verdict": result["judged"]["verdict"] != "PASS",
        "missing": bool(missing),
    }
    return [name for name, applies in found.items() if applies]


def asked_for(folder: Path) -> tuple[str | None, list[str]]:
    """Return the command of scripts/measure.sh that filled a log, and the files of it that are
    missing.
    """
    asked = folder / "asked.txt"
    command, _, _, *files = asked.read_text().splitlines() if asked.is_file() else (None,) * 3
    return command, [file for file in files if not (folder / file).is_file()]


def runs(log: dict, clock: str) -> list[dict]:
    """Return a row for each tier, number of GPUs and number of labels of the contest's job, with
    the phases of its median run. T is its entry `clock`: "seconds" from loading to the files, or
    "printed" of a grid, as the organisers' program does.
    """
    rows = []
    for record in log["contest"]:
        for row in record["contest"]:
            once = min(row["runs"], key=lambda run: abs(run["total"] - row["seconds"]))
            of_grid = sum(once.get(phase, 0) for phase in ("sample", "decode", "gather"))
            more = dict(
                who="here",
                gpus=record["gpus"],
                labels=record["pictures"],
                phases={
                    name: seconds
                    for name, seconds in once.items()
                    if name not in ("total", "process")
                },
                process=once["process"],
                printed=of_grid / record["grids"],
            )
            rows.append(row | more | dict(record=record["file"]))
    for record in log["fork"]:
        commit = record["fork"]["of_commit"] or "none"  # a changed checkout's ends in -dirty
        more = dict(
            who="fork",
            gpus=1,
            labels=CONTEST["pictures"],
            phases=dict(sample=record["fork"]["printed"] or record["fork"]["seconds"]),
            record=record["file"],
            unmodified=any(each.startswith(commit) for each in PROGRAM),
        )
        rows.append(record["fork"] | more)
    folder = log["contest"][0]["path"].parent
    for row in rows:
        row["T"] = row[clock] or row["seconds"]  # their program was stopped early
        row["paths"] = [folder / grid["file"] for grid in row["grids"]]
    return rows


def digest_of(path: Path) -> str:
    """Return a file's SHA-256, or an empty string if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def require_measured(row: dict) -> None:
    """Raise UsageError unless a row's pictures are those that were measured."""
    for path, grid in zip(row["paths"], row["grids"]):
        if digest_of(path) != grid["picture"]:
            raise UsageError(
                f"{path}: is not the picture that {row['record']} measured; remove that file and "
                "give the same measure.sh command again"
            )


def find_picture(rows: list[dict], picture: Path) -> dict:
    """Return the row of the picture that is handed in, by its bytes; of equal pictures the row
    with its file name. Raises UsageError if no run of eight labels made it.
    """
    if not picture.is_file():
        raise UsageError(f"--picture {picture}: no such file")
    digest = digest_of(picture)
    of_job = [row for row in rows if row["who"] == "here" and row["labels"] == SERIES[0]]
    found = [row for row in of_job if row["grids"][0]["picture"] == digest]
    if not found:
        names = " ".join(str(row["paths"][0]) for row in of_job)
        raise UsageError(f"--picture {picture}: was not measured in this log; choose from {names}")
    return min(found, key=lambda row: row["paths"][0].resolve() != picture.resolve())


def distance(want: np.ndarray, got: np.ndarray) -> dict:
    """Return how much two pictures differ."""
    identical = bool(np.array_equal(want, got))
    return dict(identical=identical, mae=evaluate.mae(want, got), psnr=evaluate.psnr(want, got))


def judge(
    rows: list[dict], baseline: dict, result: dict, ours: dict, gate: dict, lpips: Callable
) -> None:
    """Add to each row its speed-up over one GPU in the same tier, the efficiency, and the distance
    of its first grid. Add to the rows of one GPU and to the result the verdict on their grids
    against the baseline's, and the distance from fp32's, `ours`.
    """
    alone = {}
    reference = read_picture(ours["paths"][0]).pixels
    for row in rows:
        require_measured(row)
        got = read_picture(row["paths"][0]).pixels
        one, want = alone.setdefault((row["tier"], row["labels"], row["who"]), (row, got))
        row["one_gpu"] = distance(want, got)
        row["speedup"] = one["T"] / row["T"]
        row["efficiency"] = row["speedup"] / row["gpus"]
        row["sample_speedup"] = one["phases"]["sample"] / row["phases"]["sample"]
        if row["labels"] == SERIES[0] and (row["gpus"] == 1 or row is result):
            row["of_fp32"] = distance(reference, got)
            judged = evaluate.judge_pairs(zip(baseline["paths"], row["paths"]), gate, lpips)
            results = dict(results=evaluate.judge(judged["worst"], gate))
            row["judged"] = results | {
                name: judged[name] for name in ("verdict", "mean", "worst", "reasons")
            }


# ---- the profile ----


def value_bytes(tier: str) -> int:
    """Return the bytes of a value in a tier's GEMMs; exact has two float16 values for one."""
    return 2 if tier in HALF else 4


def analyse(ladder: dict, tier: str, fork: dict | None = None) -> dict:
    """Return the time of a tier's step by kind of work: rates, their share of the machine's
    ceilings, and the ceiling that bounds each kind. fork: the recorded step of the organisers'
    program in that tier, instead of the ladder's. Where the tier's GEMM was not measured, work with
    FLOP has no ceiling.
    """
    shape = Shape(**ladder["shape"])
    tflops = ladder["ceilings"]["tflops"].get(tier)
    peak = (tflops or 0.0) * 1e9  # FLOP/ms
    speed = ladder["ceilings"]["gb_s"] * 1e6  # bytes/ms
    rows = ladder["batch_rows"]
    work = flops(shape, rows)
    moved = bytes_moved(shape, rows, value_bytes(tier))
    profile = fork or next(each for each in ladder["profiles"] if each["tier"] == tier)
    last = (
        fork or [rung for rung in ladder["rungs"] if rung["rung"].partition(" + ")[0] == tier][-1]
    )
    times = {kind: profile["kinds"].get(kind, dict(ms=0.0, calls=0.0)) for kind in work}
    if peak and times["attention"]["ms"] < work["attention"] / peak / 1.1:
        # by cuBLAS: its kernels are among the GEMMs
        work["GEMM"] += work.pop("attention")
        moved["GEMM"] += moved.pop("attention")
        times["GEMM"] = {
            name: value + times["attention"][name] for name, value in times["GEMM"].items()
        }
    busy = sum(times[kind]["ms"] for kind in work)
    gaps = max(0.0, last["ms"] - busy)
    kinds = {}
    for kind in work:
        ms = times[kind]["ms"]
        at_peak = work[kind] / peak if peak else 0.0
        at_speed = moved[kind] / speed
        floor = max(at_peak, at_speed) if peak or not work[kind] else None
        kinds[kind] = dict(
            ms=ms,
            share=ms / (busy + gaps),
            calls=times[kind]["calls"],
            gflop=work[kind] / 1e9,
            mb=moved[kind] / 1e6,
            tflops=work[kind] / ms / 1e9,
            gb_s=moved[kind] / ms / 1e6,
            intensity=work[kind] / moved[kind],
            floor_ms=floor,
            of_ceiling=floor and floor / ms,
            bound=floor and ("compute" if at_peak > at_speed else "memory"),
        )
    total = sum(work.values())
    return dict(
        name="fork" if fork else tier,
        tier=tier,
        ms=last["ms"],
        p10=last.get("p10"),
        p90=last.get("p90"),
        kinds=kinds,
        busy=busy,
        gaps=dict(ms=gaps, share=gaps / (busy + gaps)),
        main=max(kinds, key=lambda kind: kinds[kind]["ms"]),
        floor_ms=sum(row["floor_ms"] for row in kinds.values()) if peak else None,
        gflop=total / 1e9,
        tflops=total / last["ms"] / 1e9,
        peak_tflops=tflops,
        of_peak=total / last["ms"] / peak if peak else None,
        gb_s=ladder["ceilings"]["gb_s"],
        functions=profile["functions"],
    )


def gains(rungs: list[dict]) -> list[dict]:
    """Return the rungs after the first one, each with the ms of the rung before it. within: the
    intervals of the two from the 10th to the 90th percentile overlap.
    """
    return [
        rung
        | dict(
            before=last["ms"],
            gain=last["ms"] / rung["ms"],
            within=rung["p10"] <= last["p90"] and last["p10"] <= rung["p90"],
        )
        for last, rung in pairwise(rungs)
    ]


def ladder_of(rungs: list[dict], before: str, tier: str) -> tuple[list[dict], list[dict]]:
    """Return the rungs from fp32 by the baseline's tier to the tier that is handed in, and then the
    last rung of each other tier; and all rungs of the other tiers.
    """
    known = {"", *(name for ladder in LADDERS.values() for name, _ in ladder)}
    of = {}
    for rung in rungs:
        name, _, part = rung["rung"].partition(" + ")
        if "ms" in rung and part in known:
            of.setdefault(name, []).append(rung | dict(tier=name))
    chain = [rung for name in dict.fromkeys(("fp32", before, tier)) for rung in of.pop(name, ())]
    others = [rung for each in of.values() for rung in gains(each)]
    return [*chain[:1], *gains(chain), *(each[-1] for each in of.values())], others


# GEMMs from one block's attention to the next one's, by their number. Where cuBLAS computes
# attention there are two more.
LAYERS = {
    4: ("proj", "fc1", "fc2", "qkv"),
    5: ("proj", "fc1", "fc2", "adaLN", "qkv"),
    6: ("attention", "proj", "fc1", "fc2", "qkv", "attention"),
}
CALLS = {"launches": "Launch", "copies": "Memcpy", "waits": "(Stream|Event)Synchronize"}


def named_layers(block: list[traces.Event]) -> list[tuple[str, traces.Event]]:
    """Return a block's events, from its attention on, each with the name of its layer."""
    gemms = [event for event in block if event.kind == "GEMM" and "splitK" not in event.name]
    names = dict(zip(map(id, gemms), LAYERS.get(len(gemms), ())))
    return [(names.get(id(event), event.kind), event) for event in block]


def recorded(path: Path, shape: Shape, rows: int) -> dict:
    """Return a trace's step: ms, busy ms, functions, ms and TFLOP/s of each layer, CUDA's calls by
    the CPU, and the events of a block in the middle, in ms from its start.
    """
    trace = traces.read(path)
    work = trace.work
    kinds = [event.kind for event in work]
    starts = [n for n in range(1, len(work)) if kinds[n - 1] != kinds[n] == "attention"]
    starts = starts[:: len(starts) // (traces.STEPS * shape.depth) or 1]
    blocks = [
        named_layers(work[first:last])
        for place, (first, last) in enumerate(pairwise(starts), start=1)
        if place % shape.depth  # not the end of a step and the beginning of the next one
    ]
    ms = Counter()
    for name, event in (each for block in blocks for each in block):
        ms[name] += event.ms * shape.depth / len(blocks)
    shown = blocks[len(blocks) // 2] if blocks else named_layers(work)
    begin = shown[0][1].start
    work_of = layer_flops(shape, rows)
    calls = {name: [e for e in trace.host if re.search(of, e.name)] for name, of in CALLS.items()}
    return dict(
        ms=(work[-1].start + work[-1].ms - work[0].start) / traces.STEPS,
        busy=sum(event.ms for event in work) / traces.STEPS,
        **traces.summary(trace),
        layers={
            name: dict(ms=value, tflops=work_of[name] / value / 1e9 if name in work_of else None)
            for name, value in sorted(ms.items(), key=lambda item: -item[1])
        },
        host={
            name: dict(
                calls=len(events) / traces.STEPS,
                ms=sum(event.ms for event in events) / traces.STEPS,
            )
            for name, events in calls.items()
        },
        block=[(name, event.start - begin, event.ms) for name, event in shown],
        work=[(event.kind, event.start - work[0].start, event.ms) for event in work],
        calls=[
            (name, event.start - work[0].start, event.ms)
            for name, events in calls.items()
            for event in events
        ],
    )


# ---- many GPUs ----


def plans_of(record: dict, tier: str, labels: int, entry: str = "plans") -> list[dict]:
    """Return the measured layouts of a tier and number of labels, one GPU's first. entry: "tensor"
    for the exchanges of tensor parallelism.
    """
    rows = record.get(entry, [])
    return [row for row in rows if (row["tier"], row["labels"]) == (tier, labels)]


def plan_of(design: str, labels: int, gpus: int) -> str | None:
    """Return the layout of bench/measure.py that measures a design."""
    return {
        "data": "pictures",
        "rows": f"rows={min(gpus, COPIES * labels)}",
        "gather": f"tokens={gpus}",
        "rows + gather": f"rows=2,tokens={gpus // 2}",
    }.get(design)


def design_table(
    shape: Shape, labels: int, machine: Machine, value: int, plans: list[dict]
) -> dict:
    """Return every design with its costs, its estimated step and the measured one, and the
    chosen design. plans: measured layouts of so many labels.
    """
    gpus = machine.gpus
    found = list(designs(shape, labels, gpus, value))
    measured = {
        row["plan"]: row["ms"] for row in plans if row["plan"] != "pictures" or row["gpus"] == gpus
    }
    rows = []
    for design in found:
        ms = design.ms(machine)
        row = dict(
            idle=design.idle(gpus),
            ms=ms,
            speedup=machine.ms / ms,
            measured=measured.get(plan_of(design.name, labels, gpus)),
        )
        rows.append(design._asdict() | row)
    chosen = choose(found, machine).name
    return dict(labels=labels, rows=rows, chosen=chosen, **machine._asdict())


def designs_of(record: dict, tier: str, gpus: int) -> list[dict]:
    """Return the tables of designs for the contest's labels and for one. Raises UsageError if the
    tier's step was not timed on one GPU.
    """
    tables = []
    for labels in SERIES:
        plans = plans_of(record, tier, labels)
        if not plans:
            raise UsageError(
                f"{record['path']}: has no {tier} with {labels} labels; remove it and give the "
                "same measure.sh command again"
            )
        machine = Machine(gpus, plans[0]["ms"], **record["link"])
        shape = Shape(**record["shape"])
        table = design_table(shape, labels, machine, value_bytes(tier), plans)
        tensor = (row["ms"] for row in plans_of(record, tier, labels, "tensor"))
        fastest = min(plans, key=lambda row: row["ms"])
        tables.append(table | dict(fastest=fastest, tensor=next(tensor, None)))
    return tables


# ---- all of it ----


def collect(log: dict, picture: Path, gate: str, lpips: Callable) -> dict:
    """Return the report's contents from a log and the picture that is handed in, by an edition of
    the rules. Raises UsageError for a picture that was not measured, and without the measurements
    that every report needs.
    """
    first = log["contest"][0]
    edition = evaluate.EDITIONS[gate]
    rows = runs(log, edition.clock)
    ladder = max(log["steps"], key=lambda record: len(record["rungs"]))
    result = find_picture(rows, picture)
    tier = result["tier"]
    ours = [row for row in rows if (row["who"], row["tier"], row["gpus"]) == ("here", "fp32", 1)]
    profiled = [profile["tier"] for profile in ladder["profiles"]]
    if not ours or tier not in profiled:
        missing = "fp32 on one GPU" if not ours else f"profile of {tier}"
        raise UsageError(
            f"{first['path'].parent}: holds no {missing}; measure it too (measure.sh --precision)"
        )
    baseline = next((row for row in rows if row["who"] == "fork"), ours[0])
    # their program makes eight grids; as many are handed in as of ours
    judged = {name: baseline[name][: len(result["grids"])] for name in ("grids", "paths")}
    baseline |= judged | dict(sampled=len(baseline["grids"]))
    judge(rows, baseline, result, ours[0], edition.thresholds, lpips)
    tiers = list(precision.TIERS)
    rows.sort(key=lambda row: tiers.index(row["tier"]))  # of a tier one GPU's first, as before
    gpus = max(row["gpus"] for row in rows)
    sources = [*log["contest"], *log["fork"], ladder, *log["parallel"]]
    versions = {
        key: ", ".join(sorted({str(record[key]) for record in sources if record.get(key)}))
        for key in ("driver", "torch", "python", "cores", "version", "commit", "date")
    }
    asked, missing = asked_for(first["path"].parent)
    why = shortcomings(first, result, edition, missing)
    job = {name: first[name] for name in (*CONTEST, "grids", "weights", "decoder")}
    before = baseline["tier"] if baseline["tier"] in profiled else "fp32"
    folder = first["path"].parent
    traced = {baseline["who"]: baseline} if baseline.get("trace") else {}
    traced |= {row["tier"]: row for row in ladder["profiles"] if row["tier"] in (before, tier)}
    links = log["parallel"][:1]
    shape = Shape(**ladder["shape"])
    steps = [
        dict(name=name, file=row["trace"])
        | recorded(folder / row["trace"], shape, ladder["batch_rows"])
        for name, row in traced.items()
        if row.get("trace") and (folder / row["trace"]).is_file()
    ]
    theirs = next((step for step in steps if step["name"] == "fork"), None)
    rungs, other_rungs = ladder_of(ladder["rungs"], before, tier)
    return dict(
        machine=dict(gpu=first["gpu"], gpus=gpus, **versions),
        job=job | dict(sha256=first.get("sha256", {}), rehearsal=why),
        contest=CONTEST,
        edition=edition._asdict() | dict(name=gate),
        points=None if why else edition.points(result["T"]),
        asked=asked,
        missing=missing,
        result=result,
        baseline=baseline,
        runs=[row for row in rows if row["labels"] == SERIES[0]],
        one_label=[row for row in rows if row["labels"] == 1],
        shape=ladder["shape"],
        pictures=ladder["pictures"],
        batch_rows=ladder["batch_rows"],
        ceilings=ladder["ceilings"],
        before=analyse(ladder, baseline["tier"] if theirs else before, theirs),
        after=analyse(ladder, tier),
        traces=steps,
        ladder=rungs,
        other_rungs=other_rungs,
        load_seconds=ladder["load_seconds"],
        designs=[table for record in log["parallel"] for table in designs_of(record, tier, gpus)],
        plans=[row for record in log["parallel"] for row in record["plans"]],
        link=links[0]["link"] if links else None,
        # without nvidia-smi's colours and legend
        topology=re.sub(
            "\x1b\\[\\d*m|Legend:.*", "", links[0].get("topology") or "", flags=re.S
        ).strip()
        if links
        else None,
        sources=[
            {name: record.get(name) for name in ("file", "digest", "torch", "commit", "command")}
            for record in sources
        ],
        vgg=lpips.source and lpips.source["published"],
    )


def plain(value: dict) -> dict:
    """Return data as JSON has it: no paths of this machine, and no NaN or infinities."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")
    return json.loads(text, parse_constant=lambda constant: str(float(constant)))
