"""The report's figures: its data → SVG, pictures → JPEG. Colours are Okabe and Ito's; shapes
and labels tell the same.

Text stays text, so the reader's browser brings the fonts of its language. words: the template's
words for a figure.
"""

import io
import warnings

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from PIL import Image

BLUE, ORANGE, GREEN, RED, SKY, PURPLE, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#BBBBBB",
)
MARKS = {"GEMM": "s", "attention": "o", "element-wise": "^"}
COLOURS = {"GEMM": BLUE, "attention": ORANGE, "element-wise": GREEN, "gaps": GREY}
CALL_COLOURS = {"launches": SKY, "copies": PURPLE, "waits": RED}
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 11}


def canvas(width: float, height: float, grid: str) -> tuple[Figure, Axes]:
    """Return a figure without pyplot, which would look for a display, and its axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(True, axis=grid, color="#dddddd", linewidth=0.6)
    return figure, axis


def wide(text: str) -> str:
    """Return a text with room for wide characters, whose width matplotlib's font lacks: spaces
    that no browser shows.
    """
    return text + " " * round(1.3 * sum(ord(letter) > 0x2E7F for letter in text))


def svg(figure: Figure, columns: int = 5) -> bytes:
    """Put the legend below the axis; return the figure's file."""
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    shown = {label: handle for handles, labels in pairs for handle, label in zip(handles, labels)}
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=columns, frameon=False)
    buffer = io.BytesIO()
    same_bytes = {"Date": None, "Creator": None}
    with warnings.catch_warnings():
        # a font that this machine lacks is the reader's browser's
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format="svg", metadata=same_bytes, dpi=200)
    return buffer.getvalue()


def digits(value: float) -> str:
    """Return a time in ms for a figure."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ladder(rungs: list[dict], words: dict) -> bytes:
    """Draw a dot at ms per step for each rung. A logarithmic axis has no zero, so that bars would
    have no length.
    """
    figure, axis = canvas(8, 0.36 * len(rungs) + 1.4, "x")
    ms = np.array([rung["ms"] for rung in rungs])
    places = np.arange(len(rungs))
    axis.hlines(places, [r["p10"] for r in rungs], [r["p90"] for r in rungs], color="#444444")
    for name, mark, colour, upstream in (("upstream", "s", RED, True), ("here", "o", BLUE, False)):
        chosen = np.array([(rung["rung"] in ("fp32", "tf32")) == upstream for rung in rungs])
        axis.plot(ms[chosen], places[chosen], mark, color=colour, label=wide(words[name]))
    for place, value in zip(places, ms):
        axis.annotate(
            digits(value),
            (value, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set(xscale="log", xlim=(min(ms) / 1.6, max(ms) * 1.7), xlabel=words["ms"])
    axis.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    names = []
    for rung in rungs:
        parts = rung["rung"].split(" + ")
        names.append(wide(" + ".join(words["rung_names"].get(part, part) for part in parts)))
    axis.set_yticks(places, names)
    axis.set_ylim(len(rungs) - 0.4, -0.6)
    return svg(figure)


def timeline(traces: list[dict], words: dict) -> bytes:
    """Draw three steps of each trace, with the calls of the CPU above the work of the GPU, and the
    layers of a block.
    """
    figure = Figure(figsize=(8, 1.35 * len(traces) + 0.9), layout="constrained")
    rows = figure.subplots(len(traces), 2, squeeze=False, width_ratios=(3, 2))
    shown = {}
    for (steps, block), trace in zip(rows, traces):
        lanes = (0, trace["work"], COLOURS), (1, trace["calls"], CALL_COLOURS)
        for place, events, colours in lanes:
            for name in dict.fromkeys(event[0] for event in events):
                shown[name] = colours[name]
                spans = [(start, ms) for each, start, ms in events if each == name]
                # thousands of bars: pixels; the CPU's are too short without an edge
                bars = dict(color=colours[name], linewidth=0.5 * place, rasterized=True)
                steps.broken_barh(spans, (place - 0.35, 0.7), **bars)
        for name, start, ms in trace["block"]:
            colour = COLOURS.get(name, BLUE)
            block.broken_barh([(start, ms)], (-0.35, 0.7), color=colour)
            if name != "element-wise" and ms > 0.09 * sum(trace["block"][-1][1:]):
                label = wide(words.get(name, name))
                block.text(start + ms / 2, 0.5, label, ha="center", fontsize=9)
        steps.set_yticks((0, 1), (words["unit"], "CPU") if trace["calls"] else (words["unit"], ""))
        block.set(yticks=(), ylim=(-0.5, 1.1))
        steps.set_title(wide(words["names"].get(trace["name"], trace["name"])), loc="left")
    steps.set_xlabel(words["ms_of_steps"])
    block.set_xlabel(words["ms_of_block"])
    for name, colour in shown.items():
        steps.plot([], [], "s", color=colour, label=wide(words[name]))
    return svg(figure, columns=3)


def roofline(profiles: list[dict], words: dict) -> bytes:
    """Draw attained TFLOP/s over FLOP per byte, below the memory's roof and the roof of each
    profile's tier, where one was measured.
    """
    figure, axis = canvas(8, 3.8, "both")
    speed = profiles[0]["gb_s"] / 1e3  # TB/s
    peaks = [profile["peak_tflops"] for profile in profiles if profile["peak_tflops"]]
    ends = np.array([min(peaks) / 30, max(peaks)]) / speed  # FLOP per byte
    axis.plot(ends, ends * speed, color="black", linewidth=1.1)
    kinds = {}
    for profile, colour, name in zip(profiles, (RED, BLUE), ("before", "after")):
        peak = profile["peak_tflops"]
        whose = words["names"].get(profile["name"], profile["tier"])
        label = f"{wide(words[name])} ({wide(whose)})"
        if peak:
            axis.plot([peak / speed, 30 * ends[1]], [peak, peak], color=colour)
            label += f": {peak:.3g} TFLOP/s"
        axis.plot([], [], color=colour, label=label)
        for kind, row in profile["kinds"].items():
            if row["gflop"]:
                axis.plot(row["intensity"], row["tflops"], MARKS[kind], color=colour, markersize=8)
                kinds[kind] = wide(words[kind])
    for kind, label in kinds.items():
        axis.plot([], [], MARKS[kind], color="black", label=label)
    axis.set(xscale="log", yscale="log", xlabel=words["intensity"], ylabel=words["tflops"])
    return svg(figure, columns=2)


def designs(table: dict, words: dict) -> bytes:
    """Draw the estimated step of each design, divided into work and exchange, and the measured
    one.
    """
    rows = sorted(table["rows"], key=lambda row: row["ms"])
    figure, axis = canvas(8, 0.32 * len(rows) + 1.4, "x")
    places = np.arange(len(rows))
    work = np.array([table["ms"] * row["share"] for row in rows])
    total = np.array([row["ms"] for row in rows])
    axis.barh(places, work, color=BLUE, height=0.6, label=wide(words["work"]))
    axis.barh(places, total - work, left=work, color=SKY, height=0.6, label=wide(words["exchange"]))
    measured = [row["measured"] or np.nan for row in rows]
    axis.plot(measured, places, "D", color="black", label=wide(words["measured"]))
    axis.axvline(table["ms"], color="black", linestyle="--", linewidth=1, label=words["alone"])
    axis.set_yticks(places, [wide(words["designs"][row["name"]]) for row in rows])
    axis.set(xlabel=words["ms"], ylim=(len(rows) - 0.5, -0.5))
    return svg(figure, columns=4)


def scaling(series: dict[int, dict[str, dict[int, float]]], words: dict) -> bytes:
    """Draw speed over one GPU against their number, with the ideal line: a panel for each number of
    labels. series: {labels: {name: {GPUs: speed}}}.
    """
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, len(series), sharey=True, squeeze=False)[0]
    names = dict.fromkeys(name for lines in series.values() for name in lines)
    looks = dict(zip(names, zip("osD^", (BLUE, SKY, RED, ORANGE))))
    for axis, (labels, lines) in zip(panels, series.items()):
        gpus = sorted({count for points in lines.values() for count in points})
        axis.plot(gpus, gpus, "--", color="black", linewidth=1.1, label=words["ideal"])
        for name, points in lines.items():
            mark, colour = looks[name]
            y = [points[count] for count in sorted(points)]
            axis.plot(sorted(points), y, label=wide(name), marker=mark, color=colour)
        axis.set(xticks=gpus, xlabel=words["gpus"], title=words["labels"].format(labels))
        axis.grid(True, color="#dddddd", linewidth=0.6)
    panels[0].set(ylabel=words["speedup"], ylim=0)
    return svg(figure, columns=3)


def pictures(want: np.ndarray, got: np.ndarray) -> bytes:
    """Return baseline, candidate and, unless they are identical, their difference, one below the
    other, as JPEG of at most 1000 pixels' width.
    """
    difference = np.abs(want.astype(int) - got).max(2)
    panels = [want, got]
    if difference.any():
        scaled = difference / difference.max()
        panels.append(matplotlib.colormaps["inferno"](scaled, bytes=True)[..., :3])
    margin = np.full((want.shape[0] // 40, want.shape[1], 3), 255, np.uint8)
    rows = [part for panel in panels for part in (panel, margin)]
    sheet = Image.fromarray(np.concatenate(rows[:-1]))
    buffer = io.BytesIO()
    sheet.thumbnail((1000, sheet.height), Image.Resampling.LANCZOS)
    sheet.save(buffer, "JPEG", quality=85, optimize=True)
    return buffer.getvalue()
