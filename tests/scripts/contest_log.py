"""A log of measurements of four GPUs, as scripts/measure.sh leaves it: figures of the files in
log/, and pictures that are made here.
"""

import gzip
import hashlib
import json
import shutil

import numpy as np
from conftest import ROOT
from PIL import Image

from bench.measure import CONTEST

ABOUT = dict(
    gpu="NVIDIA H200",
    driver="580.159.04",
    cores=32,
    python="3.12.3",
    torch="2.11.0+cu130",
    version="1.2.3",
    commit="abc1234",
    date="2026-11-27",
    weights="DiT-XL-2-512x512.pt",
    grids=1,
    sha256=dict(weights="1" * 64, decoder="2" * 64),
    **CONTEST,
)
SHAPE = dict(
    depth=28,
    width=1152,
    heads=16,
    hidden=4608,
    tokens=1024,
    patch=2,
    channels=4,
    outputs=8,
    parameters=676_014_368,
)
# Milliseconds of a step by kind of work.
KINDS = {
    "fp32": dict(GEMM=302.2, attention=78.3, other=26.7),
    "tf32": dict(GEMM=38.5, attention=78.2, other=26.7),
    "exact": dict(GEMM=70.0, attention=19.0, other=5.0),
    "fp16": dict(GEMM=22.6, attention=5.9, other=3.2),
}
CEILINGS = dict(fp32=51.2, tf32=390.0, exact=211.0, fp16=633.0)


def read(name):
    return json.loads((ROOT / "log" / name).read_text())


def write(path, record):
    path.write_text(json.dumps(record, indent=1))


def change(path, **fields):
    """Change fields of a record; return it."""
    record = json.loads(path.read_text()) | fields
    write(path, record)
    return record


def picture(path, noise, one=False):
    """Write a grid, or one picture of it, with so many changed values; return its SHA-256."""
    grid = Image.open(ROOT / "pretrained_models/demo/golden-cuda.png").convert("RGB")
    pixels = np.asarray(grid).copy()
    generator = np.random.default_rng(noise)
    for _ in range(noise):
        y, x = generator.integers(2, 130, 2)
        pixels[y, x, 1] ^= 1
    Image.fromarray(pixels[2:130, 2:130] if one else pixels).save(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contest(folder, name, gpus, labels, seconds):
    """Write a contest record. seconds: tier → (load, sample, decode, save)."""
    rows = []
    for tier, (load, sample, decode, save) in seconds.items():
        file = f"{name}-{tier}.png"
        noise = {"fp32": 0, "exact": 3, "tf32": 900, "fp16": 800}[tier] + gpus - 1
        phases = dict(load=load, sample=sample, decode=decode, save=save)
        total = sum(phases.values())
        flags = f"--gpus {gpus} " if gpus > 1 else ""
        rows.append(
            dict(
                tier=tier,
                seconds=total,
                runs=[phases | dict(total=total, process=total + 3)],
                grids=[dict(file=file, picture=picture(folder / file, noise, one=labels == 1))],
                settings=f"{labels} labels · {tier}",
                command=f"python sample.py {flags}--ckpt DiT-XL-2-512x512.pt --precision {tier}",
            )
        )
    record = ABOUT | dict(kind="contest", gpus=gpus, decoder="ema", contest=rows, pictures=labels)
    command = f"python bench/measure.py jobs --gpus {gpus} --output log/mine/{name}.json"
    write(folder / f"{name}.json", record | dict(command=command))


BLOCK = (  # name of a kernel, share of the kind's ms in a block
    ("attention_kernel", "attention", 1.0),
    ("proj_gemm", "GEMM", 0.1),
    ("norm", "other", 0.5),
    ("fc1_gemm", "GEMM", 0.35),
    ("fc2_gemm", "GEMM", 0.3),
    ("norm", "other", 0.5),
    ("qkv_gemm", "GEMM", 0.25),
)


def trace(path, kinds, waits=0):
    """Write a trace of three steps: a kernel at a time, and launches of the CPU, of which every
    step has so many that wait.
    """
    events = []
    now = 0.0  # µs
    for _ in range(3):
        for name in waits * ["cudaStreamSynchronize"] + ["cudaLaunchKernel"]:
            events.append(dict(ph="X", cat="cuda_runtime", name=name, ts=now, dur=20.0, tid=1))
        for name, kind, share in SHAPE["depth"] * BLOCK:
            ms = share * kinds[kind] / SHAPE["depth"]
            events.append(dict(ph="X", cat="kernel", name=name, ts=now, dur=1e3 * ms, tid=7))
            now += 1e3 * ms
    with gzip.open(path, "wt") as file:
        json.dump(dict(traceEvents=events), file)


def ladder(folder):
    profiles = []
    for tier, kinds in KINDS.items():
        rows = {
            {"other": "element-wise"}.get(kind, kind): dict(ms=ms, calls=112.0)
            for kind, ms in kinds.items()
        }
        functions = [
            dict(name=f"nvjet_{tier}<a|b>" + 70 * "x", kind="GEMM", ms=kinds["GEMM"], calls=112.0),
            dict(name="attention_kernel", kind="attention", ms=kinds["attention"], calls=28.0),
        ]
        row = dict(tier=tier, steps=3, kinds=rows, functions=functions)
        profiles.append(row | dict(trace=f"ladder.{tier}.trace.json.gz"))
        trace(folder / f"ladder.{tier}.trace.json.gz", kinds)
    more = dict(
        kind="steps",
        batch_rows=16,
        load_seconds=5.0,
        shape=SHAPE,
        rungs=read("ladder-h200-512px-16rows.json")["rungs"],
        profiles=profiles,
        ceilings=dict(tflops=CEILINGS, gemm="8192 × 8192 × 8192", gb_s=4214.0),
        command="python bench/measure.py ladder --gate 1 --profile --output log/mine/ladder.json",
    )
    write(folder / "ladder.json", ABOUT | more)


def layouts(folder):
    plans = []

    def add(tier, labels, *times):
        for plan, gpus, ms in times:
            row = dict(tier=tier, size=512, labels=labels, gpus=gpus, plan=plan, ms=ms)
            row |= dict(p10=ms, p90=ms, speedup=times[0][2] / ms)
            plans.append(row if plan == "pictures" else row | dict(error=8.7e-4))

    add("fp16", 1, ("one GPU", 1, 4.49), ("rows=2", 2, 2.67), ("rows=2,tokens=2", 4, 2.06))
    eight = ("one GPU", 1, 32.3), ("pictures", 2, 16.4), ("pictures", 4, 8.75), ("rows=4", 4, 8.9)
    add("fp16", 8, *eight)
    add("exact", 1, ("one GPU", 1, 13.0), ("rows=2", 2, 8.96))
    add("exact", 8, ("one GPU", 1, 94.4), ("pictures", 2, 48.7), ("pictures", 4, 25.1))
    add("fp32", 1, ("one GPU", 1, 64.7), ("rows=2", 2, 34.1))
    add("fp32", 8, ("one GPU", 1, 408.0), ("pictures", 2, 205.0), ("pictures", 4, 104.0))
    more = dict(
        kind="parallel",
        gpus=4,
        load_seconds=1.0,
        shape=SHAPE,
        link=dict(gb_s=250.0, us=18.0),
        topology="GPU0\tGPU1\nX\tNV18",
        tensor=[
            dict(tier=tier, labels=labels, ms=ms * labels)
            for tier, ms in dict(fp16=1.1, exact=2.2, fp32=2.3).items()
            for labels in (1, 8)
        ],
        plans=plans,
        command="torchrun --standalone --nproc_per_node=4 bench/measure.py layouts --output layouts.json",
    )
    record = ABOUT | more
    del record["pictures"], record["steps"]
    write(folder / "layouts.json", record)


def fork(folder):
    row = dict(
        tier="tf32",
        seconds=42.5,
        printed=39.1,
        grids=[dict(file="fork.png", picture=picture(folder / "fork.png", 0))],
        of_commit="97dab9f",
        trace="fork.trace.json.gz",
    )
    trace(folder / row["trace"], KINDS["tf32"], waits=5)
    command = "python bench/measure.py jobs --fork ../fork --ckpt DiT-XL-2-512x512.pt --output log/mine/fork.json"
    record = ABOUT | dict(kind="fork", gpus=1, decoder="ema", fork=row, command=command)
    write(folder / "fork.json", record)


def build(folder):
    """Fill a folder with a log of four GPUs. It has the organisers' program too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    alone = dict(
        fp32=(0.62, 102.43, 0.86, 0.37),
        tf32=(0.60, 36.63, 0.40, 0.44),
        exact=(1.79, 23.87, 0.94, 0.47),
        fp16=(1.62, 8.13, 0.79, 0.63),
    )
    label = dict(exact=(1.3, 3.3, 0.1, 0.2), fp16=(1.2, 1.17, 0.1, 0.2))
    for gpus in (1, 2, 4):
        several = {
            tier: (load, sample / gpus * 1.03 ** (gpus - 1), decode / gpus, save)
            for tier, (load, sample, decode, save) in alone.items()
        }
        contest(folder, f"contest-{gpus}", gpus, 8, several if gpus > 1 else alone)
        few = {
            tier: (load, sample / (1, 1.5, 1.9)[gpus // 2], decode, save)
            for tier, (load, sample, decode, save) in label.items()
        }
        contest(folder, f"label-{gpus}", gpus, 1, few)
    ladder(folder)
    layouts(folder)
    fork(folder)
    asked = "bash scripts/measure.sh log/mine --ckpt DiT-XL-2-512x512.pt --vae ema --fork ../fork"
    files = sorted(path.name for path in folder.glob("*.json"))
    (folder / "asked.txt").write_text(
        "\n".join([asked, "up to 4 × NVIDIA H200", "fp32 tf32 exact fp16", *files]) + "\n"
    )
    return folder
