"""The report's figures: measured rows → SVG, grids → JPEG. Colours are Okabe and Ito's; no figure needs them alone.

Text stays text, so the reader's browser brings the fonts of its language. say: English → the report's language.
"""

import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

BLUE, ORANGE, GREEN, RED, SKY, PINK = COLOURS = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
MARKS = "osD^vP"
KINDS = {  # colour, hatch
    "GEMM": (BLUE, None),
    "attention": (ORANGE, "//"),
    "norm/elementwise": (GREEN, None),
    "copies": (RED, "xx"),
    "communication": (PINK, "++"),
    "idle": ("#BBBBBB", ".."),
    "host, outside operators": ("#BBBBBB", None),
}
styled = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"})


def canvas(width: float, height: float, panels: int = 1) -> tuple[Figure, list]:
    """Return a figure without pyplot, which would look for a display, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, axes


def svg(figure: Figure) -> bytes:
    buffer, same_bytes = io.BytesIO(), {"Date": None, "Creator": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a font that this machine lacks is the reader's browser's
        figure.savefig(buffer, format="svg", metadata=same_bytes)
    return buffer.getvalue()


def label(axis, text, x: float, y: float, dx: int = 0, dy: int = 4, **style) -> None:
    """Write `text` beside a point of the data, `dx` and `dy` points away."""
    axis.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", fontsize=8, **style)


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def rung_name(rung: str, say: Callable[[str], str]) -> str:
    """Return the name of a rung, such as "fp16 + half GEMMs", in the report's language."""
    return " + ".join(map(say, rung.split(" + ")))


@styled
def ladder(rungs: list[dict], floor_ms: float, floor_tier: str, say: Callable[[str], str]) -> bytes:
    """Draw a bar of ms a step for each rung (rung, ms, p10, p90), and the floor as a line."""
    figure, (axis,) = canvas(8, 0.36 * len(rungs) + 1.4)
    for place, rung in enumerate(rungs):
        ms, colour = rung["ms"], RED if rung["rung"] in ("fp32", "tf32") else BLUE
        spread = [[max(0.0, ms - rung["p10"])], [max(0.0, rung["p90"] - ms)]]
        axis.barh(place, ms, 0.7, color=colour, xerr=spread, ecolor="#444444")
        label(axis, short(ms), rung["p90"], place, 5, 0, va="center")
    low, high = floor_ms / 1.6, max(rung["ms"] for rung in rungs) * 1.7
    axis.set(xscale="log", xlim=(low, high))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**decade for decade in decades for m in (1, 2, 5) if low <= m * 10.0**decade <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.axvline(floor_ms, color="black", linestyle="--", linewidth=1.2)
    label(axis, f"{say('floor')} ({floor_tier}): {floor_ms:.1f}", floor_ms, -0.75, 3, 0, va="center")
    axis.set_yticks(range(len(rungs)), [rung_name(rung["rung"], say) for rung in rungs], fontsize=9)
    axis.set_ylim(len(rungs) - 0.4, -1.1)
    axis.set_xlabel(say("ms a denoising step (median; bars: 10th to 90th percentile; log scale)"))
    return svg(figure)


@styled
def kinds(runs: dict[str, dict], say: Callable[[str], str]) -> bytes:
    """Draw where a step's time goes, stacked, in ms and in shares. runs: {name: {kind: {ms}}}."""
    figure, axes = canvas(8, 3.2, 2)
    runs = {name: {kind: row["ms"] for kind, row in parts.items()} for name, parts in runs.items()}
    every = dict.fromkeys(kind for parts in runs.values() for kind in parts)
    for axis, unit in zip(axes, ("ms a step", "share of a step, %")):
        scale = [1 if axis is axes[0] else 100 / sum(parts.values()) for parts in runs.values()]
        tops = [0.0] * len(runs)
        for kind in every:
            heights = [parts.get(kind, 0.0) * factor for parts, factor in zip(runs.values(), scale)]
            colour, hatch = KINDS[kind]
            axis.bar(list(runs), heights, 0.62, tops, color=colour, hatch=hatch, edgecolor="white", label=say(kind))
            tops = [top + height for top, height in zip(tops, heights)]
        axis.tick_params("x", labelsize=9)
        axis.set_ylabel(say(unit))
    for place, parts in enumerate(runs.values()):
        label(axes[0], short(sum(parts.values())), place, sum(parts.values()), ha="center")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    return svg(figure)


@styled
def scaling(series: dict[str, dict[int, float]], say: Callable[[str], str]) -> bytes:
    """Draw speed over one GPU against their number, with the ideal line. series: {name: {GPUs: speed}}."""
    figure, (axis,) = canvas(8.4, 3.8)
    most = max(max(points) for points in series.values())
    axis.plot([1, most], [1, most], "--", color="black", linewidth=1.1, label=say("ideal"))
    for index, (name, points) in enumerate(series.items()):
        x, style = sorted(points), dict(marker=MARKS[index], color=COLOURS[index])
        axis.plot(x, [points[gpus] for gpus in x], label=rung_name(name, say), **style)
    axis.set_xticks(range(1, most + 1))
    axis.set(xlabel=say("GPUs"), ylabel=say("speed over one GPU, same setting"), ylim=(0, most * 1.08))
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return svg(figure)


def pictures(files: list[Path], width: int = 1600) -> bytes:
    """Draw two grids side by side, below them their largest differences, white where largest; or a heatmap as it is."""
    sheet, *other = (Image.open(path).convert("RGB") for path in files)
    if other:
        a, b = (np.asarray(image, dtype=np.int16) for image in (sheet, *other))
        gap, (height, side, _) = 16, a.shape
        across, difference = 2 * side + gap, np.abs(a - b).max(axis=2)
        difference = Image.fromarray((difference * (255 / max(1, difference.max()))).astype(np.uint8))
        large = difference.resize((across, height * across // side), Image.Resampling.NEAREST)
        left, sheet = sheet, Image.new("RGB", (across, height + gap + large.height), "white")
        for picture, at in ((left, (0, 0)), (other[0], (side + gap, 0)), (large, (0, height + gap))):
            sheet.paste(picture, at)
    sheet.thumbnail((width, sheet.height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=82, optimize=True)
    return buffer.getvalue()
