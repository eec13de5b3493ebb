"""The contest's report from what was measured: report.md and report.html in one folder, from the JSON files in log/.

    python scripts/report.py output/report
    python scripts/report.py output/report --lang zh --log output/log --sections 1 2 3

Five sections in the contest's order: baseline on one GPU, profile and bottleneck, result on one GPU, design for many GPUs, result on many GPUs.
report.html holds everything in itself and needs no network. A section whose measurement is missing is an error that names the command
which makes it; files of several GPUs are never mixed.
"""

if not __package__:
    __import__("_as_module")

import base64
import hashlib
import html
import io
import json
from bisect import bisect_left
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
from accel import work
from accel.options import OneLineParser, UsageError, check_writable, partial_file, user_errors
from scripts.report_zh import CHINESE

#################################################################################
#                             What was measured                                 #
#################################################################################

# Kind of file → what tells it, and the command that makes one.
KINDS = {
    "ladder": (
        lambda r: "rungs" in r and any(rung.get("rung") == "fp32" and "ms" in rung for rung in r["rungs"]),
        "python scripts/benchmark.py --gate 3 --output {log}/ladder.json",
    ),
    "tiers": (
        lambda r: "rungs" in r and len(last_rungs(r)) > 2,
        "python scripts/benchmark.py --gate 3 --output {log}/ladder.json",
    ),
    "versus": (
        lambda r: (
            "rungs" in r
            and any(word in rung.get("rung", "") for rung in r["rungs"] for word in ("compile", "diffusers"))
        ),
        "python scripts/benchmark.py --only graph --vs compile,diffusers --output {log}/versus.json",
    ),
    "sweep": (
        lambda r: "sweep" in r,
        "python scripts/benchmark.py --sweep-pictures 1 2 4 8 16 32 64 --sweep-sizes 256 512 1024 --output {log}/sweep.json",
    ),
    "contest": (
        lambda r: "contest" in r,
        "python scripts/benchmark.py --contest fp32 tf32 fp16 --output {log}/contest.json",
    ),
    "baseline": (
        lambda r: r.get("kind") == "profile" and r["baseline"],
        "python scripts/profile.py --baseline --output {log}/profile-baseline.json",
    ),
    "fast": (
        lambda r: r.get("kind") == "profile" and not r["baseline"],
        "python scripts/profile.py --output {log}/profile-fast.json",
    ),
    "verify": (lambda r: r.get("kind") == "verify", "python scripts/verify.py --output {log}/verify"),
    "ddp": (lambda r: "grid_sampling_s" in r, "python scripts/measure_ddp.py --gpus 4 --output {log}/ddp.json"),
    "parallel": (
        lambda r: "rows" in r and "gates" in r,
        "torchrun --standalone --nproc_per_node=4 scripts/benchmark_parallel.py --gate --output {log}/parallel.json",
    ),
    "forecast": (
        lambda r: isinstance(r.get("rows"), list) and any("calls" in row for row in r["rows"]),
        "python scripts/forecast_curve.py --output {log}/forecast.json",
    ),
    "link": (
        lambda r: r.get("kind") == "link",
        "torchrun --standalone --nproc_per_node=4 scripts/measure_link.py --output {log}/link.json",
    ),
}
NEEDS = {
    1: ("ladder", "contest"),
    2: ("baseline", "fast"),
    3: ("ladder", "fast", "versus", "sweep", "contest"),
    4: ("fast", "sweep", "link"),
    5: (),
}
EITHER = {3: ("verify", "tiers"), 5: ("ddp", "parallel")}  # one of these, or all


def read_log(folder, gpu=None):
    """kind → records of that kind, each with its `path`, from the JSON files in `folder` and its verify*/verify.json, of one GPU.

    Raises UsageError if a file is damaged or of a measurement that was cut short, or if there are several GPUs and `gpu` chooses none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"--log {folder}: no such folder; the README's commands fill one")
    found = {kind: [] for kind in KINDS}
    for path in sorted([*folder.glob("*.json"), *folder.glob("verify*/verify.json")]):
        try:
            record = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path}: not JSON ({error}); measure again or remove it") from None
        if not isinstance(record, dict):
            continue
        if path.with_name(path.name + ".unfinished").exists():
            raise UsageError(f"{path}: its measurement was cut short; bash scripts/measure.sh {folder} makes it again")
        record["path"] = path
        for kind, (tells, _) in KINDS.items():
            if tells(record) and gpu in (None, device_of(record)):
                found[kind].append(record)
    used = {record["path"]: device_of(record) for records in found.values() for record in records}
    if len(set(used.values())) > 1:
        first, other = next((a, b) for a in used for b in used if used[a] != used[b])
        raise UsageError(
            f'{first} is of {used[first]}, {other} of {used[other]}: a report is of one GPU; choose with --gpu "{used[first]}"'
        )
    if gpu is not None and not used:
        raise UsageError(f"--gpu {gpu}: {folder} holds nothing of it")
    return found


def device_of(record):
    return record.get("gpu") or "CPU"


def one(found, kind, log):
    """The record of `kind`. Raises UsageError if there is none."""
    if not found[kind]:
        raise UsageError(f"{log}: holds no {kind} measurement; make it: {KINDS[kind][1].format(log=log)}")
    if len(found[kind]) > 1:
        raise UsageError(
            f"{found[kind][0]['path']} and {found[kind][1]['path']} are both {kind} measurements; move one of them elsewhere"
        )
    return found[kind][0]


def last_rungs(ladder):
    """The last rung of each tier that was judged and timed, by the tier's name."""
    return {rung["rung"].partition(" + ")[0]: rung for rung in ladder["rungs"] if "gate" in rung and "ms" in rung}


def comparable(records):
    """Profiles side by side must be of one network and one size. Raises UsageError, naming two files that differ."""
    for record in records[1:]:
        for key in ("model", "image_size", "rows"):
            if record[key] != records[0][key]:
                raise UsageError(
                    f"{records[0]['path']} is of {key} {records[0][key]}, {record['path']} of {record[key]}: move one of them elsewhere"
                )


#################################################################################
#                                 The document                                  #
#################################################################################

STYLE = """
body{font:16px/1.55 system-ui,-apple-system,"Segoe UI","Noto Sans","Noto Sans CJK SC","Microsoft YaHei","PingFang SC",sans-serif;color:#1b1b1b;background:#fff;
margin:0 auto;max-width:60rem;padding:1rem 1.2rem 4rem;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.25}h2{margin-top:2.6rem;border-bottom:2px solid #0072B2;padding-bottom:.2rem}h3{margin-top:1.8rem}
.wide{overflow-x:auto;margin:.9rem 0}table{border-collapse:collapse;font-size:.9rem;min-width:50%}th,td{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}td.n{white-space:nowrap}th{background:#f3f6f9;min-width:4rem}td:first-child{min-width:7rem}
figure{margin:1.2rem 0}img{max-width:100%;height:auto}@media(max-width:600px){figure{overflow-x:auto}figure img{max-width:none;width:640px}}figcaption,.note{color:#555;font-size:.9rem}
pre{background:#f6f6f6;padding:.8rem;overflow-x:auto;font-size:.85rem;line-height:1.4}code{font-size:.9em}
"""


class Document:
    """Headings, paragraphs, tables and pictures, written twice: Markdown with its pictures beside it, and one HTML file."""

    def __init__(self, title, lang):
        self.title, self.lang, self.blocks, self.pictures = title, lang, [], {}

    def heading(self, text, level=2):
        self.blocks.append(("h", level, text))

    def text(self, *lines):
        self.blocks.append(("p", " ".join(lines) if self.lang == "en" else "".join(lines)))

    def table(self, head, rows):
        """Columns after the first whose cells all begin with a digit, or hold a dash alone, are set as numbers."""
        self.blocks.append(("t", head, [[str(cell) for cell in row] for row in rows]))

    def picture(self, name, data, caption):
        self.pictures[name] = data
        self.blocks.append(("i", name, caption))

    def verbatim(self, text):
        self.blocks.append(("v", text))

    def markdown(self):
        lines = [f"# {self.title}", ""]
        for block in self.blocks:
            match block:
                case "h", level, text:
                    lines += ["#" * level + " " + text, ""]
                case "p", text:
                    lines += [text, ""]
                case "t", head, rows:
                    lines += [
                        "| " + " | ".join(cells).replace("\n", " ") + " |"
                        for cells in (head, ["---"] * len(head), *rows)
                    ] + [""]
                case "i", name, caption:
                    lines += [f"![{caption}](figures/{name})", ""]
                case "v", text:
                    lines += ["```", text, "```", ""]
        return "\n".join(lines)

    def html(self):
        def numeric(cell):
            return cell[:1].isdigit() or cell[:1] in "–−" and len(cell) < 8 or cell in ("inf", "nan")

        out = []
        for block in self.blocks:
            match block:
                case "h", level, text:
                    out.append(f"<h{level}>{html.escape(text)}</h{level}>")
                case "p", text:
                    out.append(f"<p>{inline(text)}</p>")
                case "t", head, rows:
                    columns = [i > 0 and all(numeric(row[i]) for row in rows) for i in range(len(head))]
                    cells = [
                        "".join(f"<{tag}{' class=n' * columns[i]}>{inline(cell)}</{tag}>" for i, cell in enumerate(row))
                        for tag, row in [("th", head), *(("td", row) for row in rows)]
                    ]
                    out.append(
                        "<div class=wide><table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>"
                    )
                case "i", name, caption:
                    kind = "jpeg" if name.endswith(".jpg") else "png"
                    data = base64.b64encode(self.pictures[name]).decode()
                    out.append(
                        f'<figure><img alt="{html.escape(caption)}" src="data:image/{kind};base64,{data}"><figcaption>{inline(caption)}</figcaption></figure>'
                    )
                case "v", text:
                    out.append(f"<pre>{html.escape(text)}</pre>")
        return (
            f'<!doctype html>\n<html lang="{"zh-CN" if self.lang == "zh" else "en"}"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{html.escape(self.title)}</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(self.title)}</h1>\n"
            + "\n".join(out)
            + "\n</body></html>\n"
        )


def inline(text):
    """Escaped, with `code` set as such."""
    parts = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def ms(value):
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def mib(value):
    return f"{value / 2**20:.2f}"


#################################################################################
#                                  The sections                                 #
#################################################################################


class Report:
    """Writes the sections from the log. `t(en, zh)` picks the language."""

    def __init__(self, log, lang="en", gpu=None, sections=(1, 2, 3, 4, 5)):
        self.log, self.lang, self.sections = log, lang, sections
        self.found, self.used = read_log(log, gpu), []
        # The ladder is the file with most rungs: a comparison with the compiler may hold fp32 too.
        self.found["ladder"], self.further = (
            (some := sorted(self.found["ladder"], key=lambda record: -len(record["rungs"])))[:1],
            some[1:],
        )
        # Profiles of several tiers: the fastest one is the fast path, the others stand beside it.
        self.profiles = self.found["baseline"] + sorted(self.found["fast"], key=lambda record: -record["timed"]["ms"])
        self.found["fast"] = self.profiles[-1:] if self.found["fast"] else []
        for kind in dict.fromkeys(kind for section in sections for kind in NEEDS[section]):
            if not self.found[kind] and (
                kind != "versus"
                or any(device_of(record) != "CPU" for records in self.found.values() for record in records)
            ):
                one(self.found, kind, log)
        for section in sections:
            if EITHER.get(section) and not any(self.found[kind] for kind in EITHER[section]):
                one(self.found, EITHER[section][0], log)
        self.document = Document(self.t("DiT sampling: measured, explained"), lang)
        self.environment()
        for section in sections:
            (self.baseline, self.bottleneck, self.single, self.design, self.many)[section - 1]()
        self.sources()

    def t(self, en, zh=None):
        return en if self.lang == "en" else zh or CHINESE[en]

    def take(self, kind):
        """The record of a kind, noted as used."""
        record = one(self.found, kind, self.log)
        self.note(record)
        return record

    def note(self, record):
        if record not in self.used:
            self.used.append(record)

    def remark(self, record):
        """What the file itself says about its figures."""
        if "note" in record:
            self.document.text(self.t(f"`{record['path'].name}`: ", f"`{record['path'].name}`：") + record["note"])

    def environment(self):
        records = [record for records in self.found.values() for record in records]
        profiles = self.profiles
        d, t = self.document, self.t

        def values(key, some=records):
            return ", ".join(dict.fromkeys(str(record[key]) for record in some if record.get(key))) or "–"

        d.table(
            [t("what"), t("value")],
            [
                [t("device"), device_of(records[0])],
                [t("driver"), values("driver", profiles)],
                ["torch", values("torch")],
                [t("network"), values("model", self.found["ladder"] or profiles)],
                [t("weights"), values("weights", profiles)],
            ],
        )
        d.text(
            t(
                "Every figure below comes from a file of measurements, listed at the end with its commit and command. Times are medians after warm-up, "
                "synchronised; ratios are taken within one run.",
                "下文每个数字都来自文末列出的测量文件（含提交号与命令）。时间为预热后、同步的中位数；比值均取自同一次运行。",
            )
        )

    # ---- 1 ----

    def baseline(self):
        d, t = self.document, self.t
        ladder = self.take("ladder")
        rungs = {rung["rung"]: rung for rung in ladder["rungs"]}
        d.heading(t("1. Baseline on one GPU"))
        d.text(
            t(
                f"Upstream's arithmetic at {ladder['image_size']} px, {ladder['pictures']} pictures with guidance ({ladder['rows']} rows): float32 as a V100 runs it, "
                "and TF32, upstream's setting on Ampere and later.",
                f"上游的算术：{ladder['image_size']} px，{ladder['pictures']} 张图，带引导（{ladder['rows']} 行）：V100 上的 float32，以及上游在 Ampere 及以后使用的 TF32。",
            )
        )
        d.table(
            [
                t("arithmetic"),
                t("ms a step"),
                t("10th to 90th percentile"),
                t("250 steps, s"),
                t("error of a forward against float64"),
            ],
            [
                [name, ms(r["ms"]), f"{ms(r['p10'])} – {ms(r['p90'])}", f"{r['ms'] / 4:.1f}", f"{r['error']:.1e}"]
                for name, r in rungs.items()
                if name in ("fp32", "tf32")
            ],
        )
        self.contest_table(("fp32", "tf32"))

    def contest_table(self, tiers=None):
        d, t = self.document, self.t
        rows = [
            row
            for record in self.found["contest"]
            for row in record["contest"]
            if tiers is None or row["tier"] in tiers
        ]
        if rows:
            self.used += [record for record in self.found["contest"] if record not in self.used]
            d.text(
                t(
                    "The contest's T runs from loading the model to the picture on disk: 50 points below 100 s, 50·log(300/T)/log 3 up to 300 s, none beyond."
                )
            )
            d.table(
                [t("tier"), "T, s", t("runs, s"), t("of which, s"), t("points")],
                [
                    [
                        row["tier"],
                        f"{row['seconds']:.2f}",
                        " ".join(f"{run['total']:.2f}" for run in row["runs"]),
                        ", ".join(
                            f"{phase} {seconds:.2f}"
                            for phase, seconds in min(
                                row["runs"], key=lambda run: abs(run["total"] - row["seconds"])
                            ).items()
                            if phase not in ("total", "process")
                        ),
                        f"{row['points']:.1f}",
                    ]
                    for row in rows
                ],
            )

    # ---- 2 ----

    def bottleneck(self):
        from scripts import plots

        d, t = self.document, self.t
        profiles = self.profiles
        for record in profiles:
            self.note(record)
        fast = profiles[-1]
        comparable(profiles)

        def name(record):
            return (t("upstream, ") if record["baseline"] else t("here, ")) + record["tier"]

        d.heading(t("2. Profile and bottleneck"))
        d.text(
            t(
                "`scripts/profile.py`: torch.profiler over warm steps. Achieved rates are the work that must be done over the time it took; ceilings are a large product and a "
                "large copy, measured on the same GPU after seconds of load.",
                "`scripts/profile.py`：对预热后的步骤使用 torch.profiler。达到的速率 = 必须完成的工作 / 所用时间；上限为同一 GPU 持续负载后的大矩阵乘与大块拷贝实测值。",
            )
        )
        d.table(
            [
                t("run"),
                t("ms a step"),
                t("kernels and copies a step"),
                t("ceiling: product, TFLOP/s"),
                t("ceiling: copy, TB/s"),
                t("floor, ms"),
            ],
            [
                [
                    name(r),
                    ms(r["timed"]["ms"]),
                    f"{r['launches_per_step']:.0f}" if "launches_per_step" in r else "–",
                    f"{r['ceilings']['product_tflops']:.3g}",
                    f"{r['ceilings']['copy_tb_s']:.3g}",
                    ms(r["floor_ms"]),
                ]
                for r in profiles
            ],
        )
        d.picture(
            "kinds.png",
            plots.kinds(
                {
                    f"{'upstream' if r['baseline'] else 'here'}, {r['tier']}": {
                        kind: row["ms"] for kind, row in r["kinds"].items()
                    }
                    for r in profiles
                }
            ),
            t("Where a step's time goes, by kind of work"),
        )
        for record in profiles:
            d.heading(name(record), 3)
            d.table(
                [t("kind"), t("ms a step"), t("share"), t("achieved"), t("of the ceiling")],
                [
                    [
                        kind,
                        ms(row["ms"]),
                        f"{row['share']:.1%}",
                        f"{row['tflops']:.3g} TFLOP/s"
                        if "tflops" in row
                        else f"{row['gb_s']:.4g} GB/s"
                        if "gb_s" in row
                        else "–",
                        f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else "–",
                    ]
                    for kind, row in record["kinds"].items()
                ],
            )
            top = record.get("kernels", record["host"])
            d.table(
                [t("ten most expensive functions"), t("calls"), t("total, ms"), t("average, ms")],
                [
                    [f"`{short(row['name'])}`", row["calls"], f"{row['total_ms']:.3f}", f"{row['average_ms']:.4f}"]
                    for row in top
                ],
            )
            self.waits(record)
        for slow in self.found["baseline"]:
            worst = max(slow["kinds"], key=lambda kind: slow["kinds"][kind]["ms"])
            idle = slow["kinds"].get("idle", {}).get("share", 0.0)
            english = f"; the GPU is idle for {idle:.1%} of it, " + (
                "so that neither copies nor the host's waits hold it up."
                if idle < 0.05
                else "while the host is late with work."
            )
            chinese = f"；GPU 空闲 {idle:.1%}，" + (
                "因此拷贝与主机等待都不是瓶颈。" if idle < 0.05 else "此时主机供给不及时。"
            )
            if slow["gpu"] is None:  # a profile of the CPU knows of neither
                english, chinese = ".", "。"
            d.text(
                t(
                    f"Upstream in {slow['tier']}: the bottleneck is {worst}, {slow['kinds'][worst]['share']:.0%} of a step{english}",
                    f"上游（{slow['tier']}）：瓶颈是 {worst}，占每步的 {slow['kinds'][worst]['share']:.0%}{chinese}",
                )
            )
        limit = max(fast["kinds"], key=lambda kind: fast["kinds"][kind]["ms"])
        d.text(
            t(
                f"Here {limit} is what is left, {fast['kinds'][limit]['share']:.0%} of a step"
                + (
                    f" at {fast['kinds'][limit]['of_ceiling']:.0%} of its ceiling"
                    if "of_ceiling" in fast["kinds"][limit]
                    else ""
                )
                + f"; a step takes {fast['timed']['ms'] / fast['floor_ms']:.2f} times its floor.",
                f"本项目中剩下的主要是 {limit}，占每步的 {fast['kinds'][limit]['share']:.0%}"
                + (
                    f"，达到其上限的 {fast['kinds'][limit]['of_ceiling']:.0%}"
                    if "of_ceiling" in fast["kinds"][limit]
                    else ""
                )
                + f"；每步为其下限的 {fast['timed']['ms'] / fast['floor_ms']:.2f} 倍。",
            )
        )

    def waits(self, record):
        d, t = self.document, self.t
        if not record["gpu"]:
            return
        if not record["waits"]:
            d.text(t("The host never waits for the GPU in these steps."))
            return
        times, length = (sum(wait[key] for wait in record["waits"]) for key in ("per_step", "ms_per_step"))
        copied = record["host_copies_ms"]
        d.text(
            t(
                f"The host waits for the GPU {times:.0f} times a step, {length:.1f} ms of it, inside calls such as `{record['waits'][0]['where']}`. That is the queue of "
                f"kernels draining, not copying: the copies between host and GPU themselves take {copied:.3f} ms a step.",
                f"主机每步等待 GPU {times:.0f} 次，共 {length:.1f} 毫秒，发生在 `{record['waits'][0]['where']}` 等调用内。这是内核队列在排空，而不是在拷贝："
                f"主机与 GPU 之间的拷贝本身每步只有 {copied:.3f} 毫秒。",
            )
        )

    # ---- 3 ----

    def single(self):
        from scripts import plots

        d, t = self.document, self.t
        ladder, fast = self.take("ladder"), self.take("fast")
        d.heading(t("3. Result on one GPU"))
        timed = [rung for rung in ladder["rungs"] if "ms" in rung]
        reference = next(rung for rung in timed if rung["rung"] == "fp32")
        d.text(
            t(
                f"One optimisation after the other, each with those above it, in one run; a whole step of sampling, after {ladder['load_seconds']:g} s of load. "
                "What each does and risks stands in code.md.",
                f"优化逐项叠加，同一次运行；计时为完整采样步，负载 {ladder['load_seconds']:g} 秒之后。各项内容与风险见 code.md。",
            )
        )
        self.rung_table(timed, reference)
        self.remark(ladder)
        name = f"floor ({fast['tier']})"
        d.picture(
            "ladder.png",
            plots.ladder(timed, fast["floor_ms"], name),
            t("The ladder; the dashed line is the same arithmetic at the speed of a large product and a large copy"),
        )
        for record in self.further:
            if record not in self.found["versus"] + self.found["tiers"]:
                self.note(record)
                d.text(
                    t(
                        f"{record['model']}, {record['image_size']} px, {record['rows']} rows, another run:",
                        f"{record['model']}，{record['image_size']} px，{record['rows']} 行，另一次运行：",
                    )
                )
                rungs = [rung for rung in record["rungs"] if "ms" in rung]
                self.rung_table(rungs, next(rung for rung in rungs if rung["rung"] == "fp32"))
        if self.found["versus"]:
            d.heading(t("Against the alternatives, in one process on the same weights"), 3)
        for versus in self.found["versus"]:
            self.note(versus)
            rows = [rung for rung in versus["rungs"] if "ms" in rung]
            ours = min(
                (rung for rung in rows if "compile" not in rung["rung"] and "diffusers" not in rung["rung"]),
                key=lambda rung: rung["ms"],
                default=None,
            )
            d.text(f"{versus['model']}, {versus['image_size']} px, {versus['rows']} " + t("rows") + t(":"))
            self.rung_table(rows, ours or rows[0], t("time over ours"), inverse=True)
        if any("diffusers" in rung["rung"] for versus in self.found["versus"] for rung in versus["rungs"]):
            d.text(
                t(
                    "diffusers embeds timesteps at other frequencies, so its error is that of another function, not of its arithmetic."
                )
            )
        sweep = self.take("sweep")
        rows = [row for row in sweep["sweep"] if "ms" in row]
        by_pictures = [row for row in rows if row["image_size"] == sweep["image_size"]]
        by_size = sorted(
            (row for row in rows if row["pictures"] == sweep["pictures"]), key=lambda row: row["image_size"]
        )
        if min(len(by_pictures), len(by_size)) < 2:
            raise UsageError(
                f"{sweep['path']}: growth needs two numbers of pictures and two sizes: {KINDS['sweep'][1].format(log=self.log)}"
            )
        d.heading(t("Growth with batch and resolution"), 3)
        d.picture(
            "growth.png",
            plots.growth(by_pictures, by_size),
            t(
                f"A step ({rows[0]['rung']}) as pictures grow in number at {sweep['image_size']} px, and in size with {sweep['pictures']} pictures",
                f"每步耗时（{rows[0]['rung']}）：左为 {sweep['image_size']} px 下图片数增长，右为 {sweep['pictures']} 张图片尺寸增长",
            ),
        )
        d.table(
            [t("size, px"), t("pictures"), t("ms a step"), t("ms a step and picture"), t("peak memory, GB")],
            [
                [
                    row["image_size"],
                    row["pictures"],
                    ms(row["ms"]) if "ms" in row else row["failed"],
                    f"{row['ms_a_picture']:.3f}" if "ms" in row else "–",
                    f"{row['peak_gb']:.1f}" if "peak_gb" in row else "–",
                ]
                for row in sweep["sweep"]
            ],
        )
        self.contest_table()
        for record in self.found["forecast"]:
            self.fewer_calls(record)
        d.heading(t("Are they the same pictures?"), 3)
        # A tier judged on fewer pictures says nothing beside the same one judged on more.
        by_evidence = sorted(
            self.found["tiers"],
            key=lambda record: -max(rung["gate"]["pictures"] for rung in last_rungs(record).values()),
        )
        for index, record in enumerate(by_evidence):
            if not any(last_rungs(record).keys() <= last_rungs(other).keys() for other in by_evidence[:index]):
                self.note(record)
                self.tiers(record)
        for verify in self.found["verify"]:
            self.note(verify)
            self.pictures(verify)

    def fewer_calls(self, record):
        """The forecast tier's curve: calls of the network against distance to all of them."""
        d, t = self.document, self.t
        self.note(record)
        d.heading(t("Fewer calls of the network"), 3)
        d.text(
            t(
                f"`--forecast`, an approximation that is off unless asked for, on {record['model']} ({record['precision']}, {record['pictures']}), against all {record['steps']} calls from the "
                "same noise.",
                f"`--forecast`：默认关闭的近似，{record['model']}（{record['precision']}，{record['pictures']}），与相同噪声下全部 {record['steps']} 次调用比较。",
            )
        )
        d.table(
            [
                t("method"),
                t("calls"),
                t("all pictures, PSNR dB"),
                t("median picture, dB"),
                t("worst picture, dB"),
                t("grids over 40 dB"),
                t("pictures over 40 dB"),
            ],
            [
                [
                    row["method"],
                    row["calls"],
                    *(f"{row[key]:.1f}" for key in ("psnr", "tile_median", "tile_worst")),
                    *(f"{row[key]:.1%}" for key in ("grids_over_40", "tiles_over_40")),
                ]
                for row in sorted(record["rows"], key=lambda row: -row["calls"])
            ],
        )
        self.remark(record)

    def rung_table(self, rungs, reference, title=None, inverse=False):
        d, t = self.document, self.t
        rows = []
        for rung in rungs:
            gate = rung.get("gate")
            ratio = rung["ms"] / reference["ms"] if inverse else reference["ms"] / rung["ms"]
            rows.append(
                [
                    rung["rung"],
                    ms(rung["ms"]),
                    f"{ms(rung['p10'])} – {ms(rung['p90'])}",
                    f"{ratio:.2f}×",
                    f"{rung['error']:.1e}" if "error" in rung else "–",
                    f"{gate['worst']['psnr']:.1f} dB, "
                    + (
                        t("passes both gates")
                        if gate.get("strict")
                        else t("passes")
                        if gate["passes"]
                        else t("falls short")
                    )
                    if gate
                    else "–",
                ]
            )
        d.table(
            [
                t("rung"),
                t("ms a step"),
                t("10th to 90th percentile"),
                title or t("speed over fp32"),
                t("error of a forward"),
                t("worst picture against fp32"),
            ],
            rows,
        )

    def tiers(self, record):
        """The tiers of a ladder that judged the demo's pictures: speed on its network, worst picture of the demo."""
        import evaluate
        from scripts import plots

        d, t = self.document, self.t
        alone = next(rung["ms"] for rung in record["rungs"] if rung["rung"] == "fp32")
        judged = list(last_rungs(record).values())
        pictures = judged[0]["gate"]["pictures"]
        d.text(
            t(
                f"The tiers on the demo's pictures, {pictures} after 250 steps against fp32 from the same noise, and their speed on {record['model']} at {record['image_size']} px: the worst picture.",
                f"各层级在演示模型的 {pictures} 张图片上（250 步，相同噪声，对照 fp32）的最差单图，以及在 {record['model']}、{record['image_size']} px 上的速度。",
            )
        )
        d.table(
            [
                t("tier"),
                t("ms a step"),
                t("speed over fp32"),
                t("worst PSNR, dB"),
                t("worst MAE of 0–255"),
                t("worst SSIM"),
                t("contest gate"),
                t("strict gate"),
            ],
            [
                [
                    r["rung"].partition(" + ")[0],
                    ms(r["ms"]),
                    f"{alone / r['ms']:.2f}×",
                    f"{r['gate']['worst']['psnr']:.1f}",
                    f"{255 * r['gate']['worst']['mae']:.4f}",
                    f"{r['gate']['worst']['ssim']:.4f}",
                    *("PASS" if r["gate"].get(key) else "FAIL" for key in ("passes", "strict")),
                ]
                for r in judged
            ],
        )
        d.picture(
            f"error-speed-tiers-{safe(record['path'].stem)}.png",
            plots.error_against_speed(
                [
                    dict(
                        tier=r["rung"].partition(" + ")[0],
                        speedup=alone / r["ms"],
                        psnr=r["gate"]["worst"]["psnr"],
                        mae=255 * r["gate"]["worst"]["mae"],
                    )
                    for r in judged
                ],
                evaluate.GATES,
                "picture",
            ),
            t("Error against speed, with the bars of the two gates"),
        )

    def pictures(self, verify):
        import evaluate
        from scripts import plots

        d, t = self.document, self.t
        if "recommended" not in verify:
            raise UsageError(f"{verify['path']}: was cut short; run scripts/verify.py again")
        tiers = [tier for tier in verify["tiers"] if "verdicts" in tier]
        if not tiers:
            raise UsageError(
                f"{verify['path']}: no tier was sampled ({verify['tiers'][0]['refused'] if verify['tiers'] else 'none asked'}); run scripts/verify.py again"
            )
        for tier in tiers:
            for where in tier["worst"].values():
                where.update({metric: float(value) for metric, value in where.items()})
        self.remark(verify)
        published = (verify.get("vgg_weights") or {}).get("published", True)
        d.text(
            t(
                f"`scripts/verify.py` on {verify['model']} ({verify['weights']}), {verify['seeds']} seeds of {verify['pictures']} pictures, {verify['num_sampling_steps']} steps, same noise, "
                "against fp32 in the same process: the worst grid and the worst picture.",
                f"`scripts/verify.py`：{verify['model']}（{verify['weights']}），{verify['seeds']} 个种子，每个 {verify['pictures']} 张图，{verify['num_sampling_steps']} 步，"
                "噪声相同，同一进程内与 fp32 比较：最差网格与最差单图。",
            )
        )
        d.table(
            [
                t("tier"),
                t("s a grid"),
                t("speed over fp32"),
                t("MAE of 0–255, worst grid"),
                "LPIPS",
                "PSNR, dB",
                "SSIM",
                t("worst picture's PSNR, dB"),
                t("contest gate"),
                t("strict gate"),
            ],
            [
                [
                    tier["tier"],
                    f"{tier['seconds']['median']:.2f}" if "seconds" in tier else "–",
                    f"{tier['speedup']:.2f}×" if "seconds" in tier else "–",
                    *(f"{tier['worst']['grid'][m]:.4f}" for m in ("mae", "lpips")),
                    f"{tier['worst']['grid']['psnr']:.1f}",
                    f"{tier['worst']['grid']['ssim']:.4f}",
                    f"{tier['worst']['tile']['psnr']:.1f}",
                    tier["verdicts"]["contest"],
                    tier["verdicts"]["strict"],
                ]
                for tier in tiers
            ],
        )
        if not published:
            d.text(
                t(
                    "LPIPS here is by a VGG16 with random weights, since the published one was not at hand: it is not the contest's figure."
                )
            )
        timed = [
            tier for tier in tiers if "seconds" in tier
        ]  # those of a run that was stopped are judged without times
        if timed:
            d.picture(
                f"error-speed-{safe(verify['model'])}.png",
                plots.error_against_speed(
                    [
                        dict(
                            tier=tier["tier"],
                            speedup=tier["speedup"],
                            psnr=tier["worst"]["grid"]["psnr"],
                            mae=tier["worst"]["grid"]["mae"],
                        )
                        for tier in timed
                    ],
                    evaluate.GATES,
                ),
                t("Error against speed, with the bars of the two gates"),
            )
        best = next((tier for tier in tiers if tier["tier"] == verify["recommended"]), tiers[0])
        worst = {
            metric: float(value)
            for metric, value in next(
                row for row in best["parts"] if row["part"] == "grid" and row["seed"] == best["worst_seed"]
            ).items()
            if metric in evaluate.METRICS
        }
        if verify["recommended"]:
            flags = best["tier"].removesuffix(" again").replace(", ", " --")
            d.text(t(f"Recommended there: `--precision {flags}`.", f"推荐：`--precision {flags}`。"))
        d.text(
            t(
                f"The worst grid in {best['tier']}, as evaluate.py prints it:",
                f"{best['tier']} 的最差网格（evaluate.py 输出）：",
            )
        )
        d.verbatim(evaluate.block(worst))
        for tier in tiers:
            name = f"heatmap-{safe(tier['tier'])}"
            path = verify["path"].parent / f"{name}.png"
            if not path.is_file():
                raise UsageError(f"{path}: missing beside {verify['path']}; run scripts/verify.py again")
            d.picture(
                f"{name}-{safe(verify['model'])}.jpg",
                small_jpeg(path),
                t(
                    f"fp32, {tier['tier']}, and their difference (worst of {verify['seeds']} seeds)",
                    f"fp32、{tier['tier']} 及其差异（{verify['seeds']} 个种子中最差者）",
                ),
            )

    # ---- 4 ----

    def design(self):
        d, t = self.document, self.t
        fast, sweep, link = self.take("fast"), self.take("sweep"), self.take("link")
        gpus = max(row["ranks"] for row in link["link"])
        d.heading(t("4. Design for many GPUs"))
        d.text(
            t(
                "Four ways to divide a step's work suit a DiT: pictures and guidance halves (rows), tokens with keys and values gathered or with heads exchanged (Ulysses), layers' "
                "widths (tensor parallel), and layers in a pipeline (PipeFusion, which works on keys and values of the step before, so it approximates). What they cost follows "
                f"from the network's sizes, and the link was measured: {device_of(link)}, {gpus} ranks, {link['backend']}.",
                "DiT 每步的工作有几种切分方式：按图片与引导的两半（行）；按 token，收集键和值，或交换注意力头（Ulysses）；按层宽（张量并行）；按层做流水（PipeFusion，使用上一步的键值，因此是近似）。"
                f"代价由网络尺寸算出，链路为实测：{device_of(link)}，{gpus} 个进程，{link['backend']}。",
            )
        )
        d.table(
            [t("collective"), t("ranks"), t("MiB a rank"), "µs", "GB/s"],
            [
                [
                    row["collective"],
                    row["ranks"],
                    mib(row["bytes"]),
                    f"{row['us']:.1f}",
                    f"{row['bytes'] / row['us'] / 1e3:.1f}",
                ]
                for row in link["link"]
            ],
        )
        self.remark(link)
        steps = {
            row["pictures"]: row["ms"]
            for row in sweep["sweep"]
            if "ms" in row and row["image_size"] == sweep["image_size"]
        }
        base = work.Shape(**fast["shape"])
        narrow = 2 if fast["tier"] in ("fp16", "bf16") else 4
        for pictures in dict.fromkeys((min(steps), sweep["pictures"])):
            shape = work.Shape(**{**fast["shape"], "rows": 2 * pictures})
            alone = steps[pictures]
            d.heading(
                t(
                    f"{pictures} picture(s), {2 * pictures} rows of {base.tokens} tokens, {gpus} GPUs, {fast['tier']}",
                    f"{pictures} 张图，{2 * pictures} 行 × {base.tokens} token，{gpus} 个 GPU，{fast['tier']}",
                ),
                3,
            )
            rows = []
            for plan in plans(shape, gpus, narrow):
                compute = (
                    steps.get(pictures / gpus)
                    if plan["what"] == "rows" and pictures >= gpus and pictures % gpus == 0
                    else None
                )
                ideal = compute is None
                compute = alone / plan["share"] if ideal else compute
                taken = link_time(link["link"], plan, gpus)
                saved = alone * (1 - 1 / plan["share"])
                need = plan["bytes"] / saved / 1e6 if plan["bytes"] and saved else 0.0
                rows.append(
                    [
                        t(*plan["name"]),
                        str(plan["calls"]),
                        mib(plan["bytes"] / max(1, shape.depth)) if plan["each_layer"] else "–",
                        mib(plan["bytes"]),
                        f"{need:.1f}",
                        "–" if taken is None else f"{taken:.2f}",
                        ms(compute) + ("" if not ideal else t(" (ideal)")),
                        "–" if taken is None else f"{alone / (compute + taken):.2f}×",
                    ]
                )
            d.table(
                [
                    t("strategy"),
                    t("collectives a step"),
                    t("MiB sent a rank and layer"),
                    t("MiB a step"),
                    t("break-even, GB/s"),
                    t("link, ms a step"),
                    t("compute, ms a step"),
                    t("speed-up at most"),
                ],
                rows,
            )
            d.text(
                t(
                    f"One GPU takes {ms(alone)} ms. Break-even is the bandwidth at which sending eats what dividing saves; below it the strategy is slower than leaving the GPUs idle.",
                    f"单 GPU 为 {ms(alone)} 毫秒。收支平衡带宽指通信恰好抵消切分收益时的带宽；低于它，不如让其余 GPU 闲置。",
                )
            )
        d.text(
            t(
                "Rows come first: pictures need no communication in a step, and a picture's two guidance halves one small gather. Tokens come next, only where a GPU has less than a "
                "picture left and the arithmetic of a step is long against its 28-fold exchange: at higher resolution attention grows with the square of the tokens and the exchange "
                "only in proportion, and float32 takes many times half precision's time for twice its bytes. Tensor parallel sends activations of full width twice a layer and serves "
                "models that do not fit into one GPU, which DiT-XL/2 does.".replace("28-fold", f"{base.depth}-fold"),
                f"首选按行切分：图片之间每步无需通信，一张图的引导两半每步只需一次很小的收集。其次才是按 token 切分，且仅当每个 GPU 分不到一整张图、并且一步的计算相对其 {base.depth} 次交换足够长："
                "分辨率升高时注意力随 token 数平方增长，而交换量只成正比；float32 的计算时间是半精度的许多倍，字节数只有两倍。张量并行每层两次发送全宽激活，适用于单 GPU 放不下的模型，而 DiT-XL/2 放得下。",
            )
        )

    # ---- 5 ----

    def many(self):
        from scripts import plots

        d, t = self.document, self.t
        d.heading(t("5. Result on many GPUs"))
        series = {}
        for ddp in self.found["ddp"]:
            self.note(ddp)
            counts = sorted(int(n) for n in ddp["grid_sampling_s"] if n.isdigit())
            most = counts[-1]
            grid, first, fid = (
                ddp["grid_sampling_s"],
                ddp["start_to_first_step_s"],
                ddp.get("fid_pictures_per_s"),
            )  # which may have been left out
            d.heading(
                t(
                    f"{ddp['model']}, {ddp['image_size']} px, {ddp['precision']}, {most} GPUs against one",
                    f"{ddp['model']}，{ddp['image_size']} px，{ddp['precision']}，{most} 个 GPU 对 1 个",
                ),
                3,
            )
            d.table(
                [t("what"), *(f"{n} GPU" for n in counts), t("ratio"), t("of the ideal")],
                [
                    [
                        t(f"8 labels: sampling, {ddp['steps']} steps, s", f"8 个标签：采样 {ddp['steps']} 步，秒"),
                        *(f"{min(grid[str(n)]):.2f}" for n in counts),
                        f"{1 / grid['ratio']:.2f}×",
                        f"{1 / grid['ratio'] / most:.0%}",
                    ],
                    *(
                        [
                            [
                                t(
                                    f"50k job: pictures/s at {fid['steps']} steps",
                                    f"5 万张任务：{fid['steps']} 步时每秒图片",
                                ),
                                *(f"{fid[str(n)]:.2f}" if str(n) in fid else "–" for n in counts),
                                *(
                                    (f"{fid[str(most)] / fid['1']:.2f}×", f"{fid['efficiency']:.0%}")
                                    if "1" in fid
                                    else ("–", "–")
                                ),
                            ]
                        ]
                        if fid
                        else []
                    ),
                    [
                        t("process start to first step, s"),
                        *(f"{min(first[str(n)]):.2f}" for n in counts),
                        f"{first['ratio']:.2f}×",
                        "–",
                    ],
                ],
            )
            pictures = ddp["grid_start_to_picture_s"]
            d.table(
                [t("8 labels, process start to picture"), t("seconds of each run")],
                [[name, " ".join(f"{value:.2f}" for value in times)] for name, times in pictures.items()],
            )
            totals = [
                run["total"]
                for name, runs in ddp.get("grid_phases_s", {}).items()
                if name == f"{most} local"
                for run in runs
                if "total" in run
            ]
            if totals:
                from scripts.benchmark import score

                best = sorted(totals)[len(totals) // 2]
                d.text(
                    t(
                        f"The contest's T on {most} GPUs, loading to picture on rank 0: {best:.2f} s of {len(totals)} run(s), {score(best):.1f} of 50 points.",
                        f"{most} 个 GPU 的竞赛 T（rank 0 从加载到图片）：{best:.2f} 秒（{len(totals)} 次运行），得分 {score(best):.1f} / 50。",
                    )
                )
            name = f"{ddp['model']} {ddp['image_size']} px {ddp['precision']}"
            series[f"{name}: 8 labels"] = {1: 1.0, most: 1 / grid["ratio"]}
            if fid and "1" in fid:  # a measurement that was cut short has one end only
                series[f"{name}: 50k job"] = {1: 1.0, most: fid[str(most)] / fid["1"]}
            self.remark(ddp)
        for parallel in self.found["parallel"]:
            self.note(parallel)
            if not parallel["rows"]:
                raise UsageError(
                    f"{parallel['path']}: holds no times, it was cut short; make it again: {KINDS['parallel'][1].format(log=self.log)}"
                )
            series |= self.shared(parallel)
        d.picture("scaling.png", plots.scaling(series), t("Speed-up over one GPU on the same path, against the ideal"))

    def shared(self, record):
        """Few pictures on many GPUs; returns the best speed-up by number of GPUs of the cases that are drawn."""
        d, t = self.document, self.t
        d.heading(
            t(
                f"Few pictures on {record['gpus']} GPUs ({record['model']})",
                f"少量图片用 {record['gpus']} 个 GPU（{record['model']}）",
            ),
            3,
        )
        self.remark(record)
        cases = {}
        for row in record["rows"]:
            cases.setdefault((row["tier"], row["size"], row["labels"]), []).append(row)
        d.text(
            t(
                "A whole step of sampling of the slowest rank, against the same network, tier and kernels on one of these GPUs. The best plan of each number of GPUs, and what "
                "`--parallel auto` chose:",
                "完整采样步、取最慢的进程，与同一网络、层级、内核在单个 GPU 上比较。各 GPU 数下的最佳方案，以及 `--parallel auto` 的选择：",
            )
        )
        rows, series = [], {}
        for (tier, size, labels), some in cases.items():
            timed = [row for row in some if row["plan"] != "auto"]
            alone = next(row for row in timed if row["gpus"] == 1)
            best = {
                n: min((row for row in timed if row["gpus"] == n), key=lambda row: row["ms"])
                for n in sorted({row["gpus"] for row in timed})
            }
            auto = next((row for row in some if row["plan"] == "auto"), None)
            rows.append(
                [
                    f"{tier}, {size} px",
                    labels,
                    ms(alone["ms"]),
                    "; ".join(
                        f"{n}: {row['plan']}, {ms(row['ms'])}, {row['speedup']:.2f}×"
                        for n, row in best.items()
                        if n > 1
                    ),
                    f"{auto['chosen']}"
                    + (f", {auto['speedup']:.2f}×, {auto['of_best']:.0%} " + t("of the best") if auto["ms"] else "")
                    if auto
                    else "–",
                ]
            )
            if labels in (1, 8) and len(best) > 1 and len(series) < 8:
                series[f"{tier}, {size} px, {labels} label(s)"] = {n: row["speedup"] for n, row in best.items()}
        d.table(
            [
                t("network"),
                t("labels"),
                t("one GPU, ms"),
                t("best plan by GPUs: ms a step, speed-up"),
                t("auto's choice"),
            ],
            rows,
        )
        for (tier, size, labels), some in cases.items():
            if labels == min(labels for *_, labels in cases):
                d.table(
                    [
                        t(f"{tier}, {size} px, {labels} label(s): plan", f"{tier}，{size} px，{labels} 个标签：方案"),
                        "GPU",
                        t("ms a step"),
                        t("speed-up"),
                        t("collectives a layer"),
                        t("MiB received a rank and layer"),
                        t("error against one GPU"),
                    ],
                    [
                        [
                            row["plan"],
                            row["gpus"],
                            ms(row["ms"]),
                            f"{row['speedup']:.2f}×",
                            f"{row['collectives']:g}" if "collectives" in row else "–",
                            mib(row["bytes"]) if "bytes" in row else "–",
                            f"{row['error']:.1e}" if "error" in row else "–",
                        ]
                        for row in some
                        if row["plan"] != "auto"
                    ],
                )
        if record["gates"]:
            d.text(t("The demo's pictures under every plan, against fp32 on one GPU:"))
            d.table(
                [t("tier"), t("plan"), t("worst picture, PSNR dB"), t("contest gate"), t("strict gate")],
                [
                    [
                        gate["tier"],
                        gate["plan"],
                        f"{gate['worst']['psnr']:.1f}",
                        *("PASS" if gate[key] else "FAIL" for key in ("passes", "strict")),
                    ]
                    for gate in record["gates"]
                ],
            )
        return series

    def sources(self):
        d, t = self.document, self.t
        d.heading(t("Sources"))
        d.table(
            [t("file"), "sha256", "torch", t("commit"), t("command")],
            [
                [
                    f"`{record['path'].relative_to(self.log)}`",
                    digest(record["path"]),
                    record.get("torch", "–"),
                    record.get("commit", "–"),
                    f"`{record['command']}`" if "command" in record else "–",
                ]
                for record in sorted(self.used, key=lambda record: str(record["path"]))
            ],
        )


def short(name, width=70):
    from scripts.profiling import clip

    return clip(name, width).replace("`", "'")


def digest(path):
    """The first eight digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def safe(name):
    """A name for a file."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def small_jpeg(path, width=1200):
    """A picture for the screen: at most `width` wide."""
    from PIL import Image

    with Image.open(path) as image:
        image = image.convert("RGB")
        if image.width > width:
            image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=82, optimize=True)
    return buffer.getvalue()


def plans(shape, gpus, narrow):
    """What each strategy sends in a step of `shape` over `gpus`: collectives (calls, which kind, bytes a rank and call), bytes a rank sends in
    all, and into how many parts it divides the arithmetic.

    Activations of a layer are R·T·D values. Keys and values gathered: a rank sends its 2RTD/P to P − 1 others. Ulysses: q, k, v and then the output
    change hands, 4RTD/P, of which 1/P stays. Tensor parallel: two all-reduces of RTD, each 2(P − 1)/P of it sent. PipeFusion: activations pass
    each stage once."""
    r, t_, w, layers = shape.rows, shape.tokens, shape.width, shape.depth
    layer = r * t_ * w * narrow
    out = 2 * shape.channels * (shape.patch**2) * t_ * 4  # a row of the network's output, float32
    rows = min(gpus, r)
    halves = (
        r // 2 < gpus
    )  # pictures alone do not go round: their guidance halves are divided too, and meet once a step
    gather = -(-r // rows) * out
    return [
        dict(
            what="rows",
            name=("rows: pictures, then guidance halves", "行：图片，再到引导两半"),
            calls=int(halves),
            collective="all-gather",
            message=gather,
            bytes=gather * (rows - 1) * halves,
            share=rows,
            each_layer=False,
        ),
        dict(
            what="kv",
            name=("tokens, keys and values gathered", "token，收集键和值"),
            calls=layers,
            collective="all-gather",
            message=2 * layer // gpus,
            bytes=layers * 2 * layer // gpus * (gpus - 1),
            share=gpus,
            each_layer=True,
        ),
        dict(
            what="ulysses",
            name=("tokens, heads exchanged (Ulysses)", "token，交换注意力头（Ulysses）"),
            calls=2 * layers,
            collective="all-to-all",
            message=2 * layer // gpus,
            bytes=layers * 4 * layer // gpus * (gpus - 1) // gpus,
            share=gpus,
            each_layer=True,
        ),
        dict(
            what="tensor",
            name=("tensor parallel", "张量并行"),
            calls=2 * layers,
            collective="all-reduce",
            message=layer,
            bytes=layers * 2 * 2 * layer * (gpus - 1) // gpus,
            share=gpus,
            each_layer=True,
        ),
        dict(
            what="pipe",
            name=("PipeFusion, approximate", "PipeFusion，近似"),
            calls=gpus - 1,
            collective=None,
            message=layer,
            bytes=layer,
            share=gpus,
            each_layer=False,
        ),
    ]


def link_time(rows, plan, gpus):
    """Milliseconds a step of a plan's collectives, from the measured times by straight lines between sizes; None if there are none of its kind."""
    if not plan["calls"]:
        return 0.0
    ranks = min(gpus, plan["share"])
    points = sorted(
        (row["bytes"], row["us"]) for row in rows if row["collective"] == plan["collective"] and row["ranks"] == ranks
    )
    if len(points) < 2:
        return None
    sizes = [size for size, _ in points]
    place = min(max(bisect_left(sizes, plan["message"]), 1), len(points) - 1)
    (a, at_a), (b, at_b) = points[place - 1], points[place]
    per_call = max(
        at_a + (at_b - at_a) * (plan["message"] - a) / (b - a), points[0][1] if plan["message"] < sizes[0] else 0.0
    )
    return plan["calls"] * per_call / 1e3


def main():
    parser = OneLineParser(description="The contest's report from what was measured.")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="folder to write report.md, report.html and figures/ into"
    )
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the report")
    parser.add_argument("--log", type=Path, default=ROOT / "log", help="folder with the measurements (default: log/)")
    parser.add_argument("--gpu", help="use the files of this GPU only, by its name in them")
    parser.add_argument(
        "--sections",
        nargs="+",
        type=int,
        choices=(1, 2, 3, 4, 5),
        default=[1, 2, 3, 4, 5],
        help="sections to write (default: all)",
    )
    args = parser.parse_args()
    with user_errors(parser):
        document = Report(args.log, args.lang, args.gpu, args.sections).document
        check_writable(args.out / "report.html", "OUT")
        (args.out / "figures").mkdir(exist_ok=True)
        for name, data in document.pictures.items():
            (args.out / "figures" / name).write_bytes(data)
        for name, text in (("report.md", document.markdown()), ("report.html", document.html())):
            with partial_file(args.out / name) as partial:
                partial.write_text(text, encoding="utf-8")
        print(
            f"{args.out / 'report.html'}: {len(document.pictures)} pictures, {(args.out / 'report.html').stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
