"""The report's contents as plain data: a log of measurements, read, checked and analysed.

A missing measurement is an error that names it. Files of several machines, networks or weights
are never mixed.
"""

import hashlib
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

import evaluate
from accel.errors import UsageError
from accel.io.filesystem import ROOT, read_json
from accel.io.picture_files import read_picture
from accel.runtime import precision
from bench.measure import CONTEST, RANDOM
from bench.steps import RUNGS
from scripts.strategies import COPIES, Machine, Shape, bytes_moved, choose, designs, flops

KINDS = {  # kind of record → entries that must be the same in all records
    "contest": ("gpu", "model", "image_size", "weights", "steps", "decoder"),
    "fork": ("gpu", "model", "image_size", "weights", "steps"),
    "steps": ("gpu", "model", "image_size", "weights"),
    "parallel": ("gpu", "model", "image_size", "weights"),
}
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
    if a file is damaged or was cut short, if a measurement is missing, and for one of another
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
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
            record |= dict(path=path, file=path.name, digest=digest)
            log[record["kind"]].append(record)
    log["contest"].sort(key=lambda record: (-record["pictures"], record["gpus"]))
    for kind, names in KINDS.items():
        if not log[kind] and kind != "fork":
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


def other_job(record: dict) -> bool:
    """Return whether a record is of another job than the contest's. Random weights make none:
    they cost the same time.
    """
    return any(record[key] != value for key, value in CONTEST.items())


def rehearsal(record: dict) -> bool:
    """Return whether the picture of a record cannot be handed in: it is of another job, or of
    random weights.
    """
    return other_job(record) or RANDOM in (record["weights"], record.get("decoder"))


def score(seconds: float) -> float:
    """Return the contest's points for T seconds: 50 up to 100 s, none from 300 s on."""
    return 50 * min(1.0, max(0.0, math.log(300 / seconds) / math.log(3)))


def runs(log: dict) -> list[dict]:
    """Return a row for each tier, number of GPUs and number of labels of the contest's job, with
    the phases of its median run: T from loading, and as the organisers' program prints it.
    """
    rows = []
    for record in log["contest"]:
        for row in record["contest"]:
            once = min(row["runs"], key=lambda run: abs(run["total"] - row["seconds"]))
            clock = sum(once.get(phase, 0) for phase in ("sample", "decode", "gather"))
            rows.append(
                row
                | dict(
                    who="here",
                    gpus=record["gpus"],
                    labels=record["pictures"],
                    phases={
                        name: seconds
                        for name, seconds in once.items()
                        if name not in ("total", "process")
                    },
                    process=once["process"],
                    printed=clock,
                    points=None if other_job(record) else score(row["seconds"]),
                    path=record["path"].parent / row["file"],
                    record=record["file"],
                )
            )
    for record in log["fork"]:
        path = record["path"].parent / record["fork"]["file"]
        more = dict(who="fork", gpus=1, labels=CONTEST["pictures"], path=path)
        rows.append(record["fork"] | more | dict(record=record["file"]))
    return rows


def pixels_of(row: dict) -> np.ndarray:
    """Return a measured picture. Raises UsageError unless it is the one that was measured."""
    path = row["path"]
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != row["picture"]:
        raise UsageError(
            f"{path}: is not the picture that {row['record']} measured; remove that file and give "
            "the same measure.sh command again"
        )
    return read_picture(path).pixels


def find_picture(rows: list[dict], picture: Path) -> dict:
    """Return the row of the picture that is handed in, by its bytes; of equal pictures the row
    with its file name. Raises UsageError if no run of eight labels made it.
    """
    if not picture.is_file():
        raise UsageError(f"--picture {picture}: no such file")
    digest = hashlib.sha256(picture.read_bytes()).hexdigest()
    of_job = [row for row in rows if row["who"] == "here" and row["labels"] == SERIES[0]]
    found = [row for row in of_job if row["picture"] == digest]
    if not found:
        names = " ".join(str(row["path"]) for row in of_job)
        raise UsageError(f"--picture {picture}: was not measured in this log; choose from {names}")
    return min(found, key=lambda row: row["path"].resolve() != picture.resolve())


def compare(want: np.ndarray, got: np.ndarray, lpips: Callable) -> dict:
    """Return the metrics of a picture, its verdict by both readings of MAE, and the reasons for
    metrics without a value.
    """
    values, reasons = evaluate.measure(want, got, lpips)
    verdicts = {}
    for gate, thresholds in evaluate.GATES.items():
        verdicts[gate] = evaluate.verdict_of(values, thresholds)
    same = bool(np.array_equal(want, got))
    return values | dict(identical=same, verdicts=verdicts, reasons=reasons)


def judge(rows: list[dict], baseline: dict, result: dict, lpips: Callable) -> None:
    """Add to each row the distance of its picture from one GPU's in the same tier. Add to the
    rows of one GPU and to the result the metrics against the baseline.
    """
    want = pixels_of(baseline)
    alone = {}
    for row in rows:
        got = pixels_of(row)
        one = alone.setdefault((row["tier"], row["labels"], row["who"]), got)
        same = bool(np.array_equal(one, got))
        row["one_gpu"] = dict(
            identical=same, mae=evaluate.mae(one, got), psnr=evaluate.psnr(one, got)
        )
        if row["labels"] == SERIES[0] and (row["gpus"] == 1 or row is result):
            if want.shape != got.shape:
                raise UsageError(f"{baseline['path']} and {row['path']} are of different sizes")
            row["judged"] = compare(want, got, lpips)


# ---- the profile ----


def value_bytes(tier: str) -> int:
    """Return the bytes of a value in a tier's GEMMs; exact has two float16 values for one."""
    return 2 if tier in HALF else 4


def analyse(ladder: dict, tier: str) -> dict:
    """Return the time of a tier's step by kind of work: rates, their share of the machine's
    ceilings, and the ceiling that bounds each kind.
    """
    shape = Shape(**ladder["shape"])
    peak = ladder["ceilings"]["tflops"][tier] * 1e9  # FLOP/ms
    speed = ladder["ceilings"]["gb_s"] * 1e6  # bytes/ms
    rows = ladder["batch_rows"]
    work = flops(shape, rows)
    moved = bytes_moved(shape, rows, value_bytes(tier))
    [profile] = [profile for profile in ladder["profiles"] if profile["tier"] == tier]
    last = [rung for rung in ladder["rungs"] if rung["rung"].partition(" + ")[0] == tier][-1]
    times = {kind: profile["kinds"].get(kind, dict(ms=0.0, calls=0.0)) for kind in work}
    if times["attention"]["ms"] < work["attention"] / peak / 1.1:
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
        at_peak = work[kind] / peak
        at_speed = moved[kind] / speed
        kinds[kind] = dict(
            ms=ms,
            share=ms / (busy + gaps),
            calls=times[kind]["calls"],
            gflop=work[kind] / 1e9,
            mb=moved[kind] / 1e6,
            tflops=work[kind] / ms / 1e9,
            gb_s=moved[kind] / ms / 1e6,
            intensity=work[kind] / moved[kind],
            floor_ms=max(at_peak, at_speed),
            of_ceiling=max(at_peak, at_speed) / ms,
            bound="compute" if at_peak > at_speed else "memory",
        )
    total = sum(work.values())
    return dict(
        tier=tier,
        ms=last["ms"],
        p10=last["p10"],
        p90=last["p90"],
        kinds=kinds,
        busy=busy,
        gaps=dict(ms=gaps, share=gaps / (busy + gaps)),
        main=max(kinds, key=lambda kind: kinds[kind]["ms"]),
        floor_ms=sum(row["floor_ms"] for row in kinds.values()),
        gflop=total / 1e9,
        tflops=total / last["ms"] / 1e9,
        peak_tflops=peak / 1e9,
        of_peak=total / last["ms"] / peak,
        gb_s=ladder["ceilings"]["gb_s"],
        functions=profile["functions"],
        trace=profile.get("trace"),
    )


# ---- many GPUs ----


def plans_of(log: dict, tier: str, labels: int) -> list[dict]:
    """Return the measured layouts of a tier and number of labels, one GPU's first."""
    [record] = log["parallel"]
    return [row for row in record["plans"] if (row["tier"], row["labels"]) == (tier, labels)]


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
        row = dict(idle=design.idle(gpus), ms=ms, speedup=machine.ms / ms)
        row["measured"] = measured.get(plan_of(design.name, labels, gpus))
        rows.append(design._asdict() | row)
    chosen = choose(found, machine).name
    return dict(labels=labels, rows=rows, chosen=chosen, **machine._asdict())


def designs_of(log: dict, tier: str, gpus: int) -> list[dict]:
    """Return the tables of designs for the contest's labels and for one. Raises UsageError if the
    tier's step was not timed on one GPU.
    """
    [record] = log["parallel"]
    tables = []
    for labels in SERIES:
        plans = plans_of(log, tier, labels)
        if not plans:
            raise UsageError(
                f"{record['path']}: has no {tier} with {labels} labels; remove it and give the "
                "same measure.sh command again"
            )
        machine = Machine(gpus, plans[0]["ms"], **record["link"])
        shape = Shape(**record["shape"])
        table = design_table(shape, labels, machine, value_bytes(tier), plans)
        tables.append(table | dict(fastest=min(plans, key=lambda row: row["ms"])))
    return tables


def scaling(rows: list[dict]) -> None:
    """Add to each row its speed-up over one GPU and its efficiency, of T and of sampling."""
    alone = {}
    for row in rows:
        if row["who"] == "here":
            first = alone.setdefault((row["tier"], row["labels"]), row)
            row["speedup"] = first["seconds"] / row["seconds"]
            row["efficiency"] = row["speedup"] / row["gpus"]
            row["sample_speedup"] = first["phases"]["sample"] / row["phases"]["sample"]


# ---- all of it ----


def collect(log: dict, picture: Path, lpips: Callable) -> dict:
    """Return the report's contents from a log and the picture that is handed in. Raises
    UsageError for a picture that was not measured, and for missing measurements.
    """
    first = log["contest"][0]
    rows = runs(log)
    ladder = max(log["steps"], key=lambda record: len(record["rungs"]))
    result = find_picture(rows, picture)
    tier = result["tier"]
    ours = [row for row in rows if (row["who"], row["tier"], row["gpus"]) == ("here", "fp32", 1)]
    if not ours or not any(profile["tier"] == tier for profile in ladder["profiles"]):
        missing = "fp32 on one GPU" if not ours else f"profile of {tier}"
        raise UsageError(
            f"{first['path'].parent}: holds no {missing}; measure it too (measure.sh --precision)"
        )
    baseline = next((row for row in rows if row["who"] == "fork"), ours[0])
    judge(rows, baseline, result, lpips)
    scaling(rows)
    tiers = list(precision.TIERS)
    rows.sort(key=lambda row: tiers.index(row["tier"]))  # of a tier one GPU's first, as before
    gpus = max(row["gpus"] for row in rows)
    before = baseline["tier"]
    profiled = [profile["tier"] for profile in ladder["profiles"]]
    steps_today = {"", *dict(RUNGS)}
    sources = [*log["contest"], *log["fork"], ladder, *log["parallel"]]
    versions = {}
    for key in ("driver", "torch", "python", "cores", "version", "commit", "date"):
        values = sorted({str(record[key]) for record in sources if record.get(key)})
        versions[key] = ", ".join(values)
    return dict(
        machine=dict(gpu=first["gpu"], gpus=gpus, **versions),
        job=dict(
            {name: first[name] for name in ("model", "image_size", "steps", "pictures")},
            weights=first["weights"],
            decoder=first["decoder"],
            random=RANDOM in (first["weights"], first["decoder"]),
            other=other_job(first),
            rehearsal=rehearsal(first),
        ),
        contest=CONTEST,
        result=result,
        baseline=baseline,
        runs=[row for row in rows if row["labels"] == SERIES[0]],
        one_label=[row for row in rows if row["labels"] == 1],
        shape=ladder["shape"],
        pictures=ladder["pictures"],
        batch_rows=ladder["batch_rows"],
        ceilings=ladder["ceilings"],
        before=analyse(ladder, before if before in profiled else "fp32"),
        after=analyse(ladder, tier),
        ladder=[
            rung
            for rung in ladder["rungs"]
            if "ms" in rung and rung["rung"].partition(" + ")[2] in steps_today
        ],
        load_seconds=ladder["load_seconds"],
        designs=designs_of(log, tier, gpus),
        link=log["parallel"][0]["link"],
        plans=[row for labels in SERIES for row in plans_of(log, tier, labels)],
        sources=[
            {name: record.get(name) for name in ("file", "digest", "torch", "commit", "command")}
            for record in sources
        ],
        vgg=lpips.source and lpips.source["published"],
    )


def plain(value: object) -> object:
    """Return data as JSON has it: no paths, no home folder, and no NaN or infinities."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return re.sub(rf"^{re.escape(str(ROOT))}/", "", str(value))
    if isinstance(value, str):
        return value.replace(f"{Path.home()}/", "~/")
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
