"""The report's figures: measured rows → SVG, a heatmap → JPEG. Colours are Okabe and
Ito's; no figure needs them alone.

Text stays text, so the reader's browser brings the fonts of its language. say: English →
the report's language.
"""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from PIL import Image

BLUE, ORANGE, GREEN, RED, *_ = COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
)
MARKS = "osD^vP"
KINDS = {  # colour, hatch
    "GEMM": (BLUE, None),
    "attention": (ORANGE, "//"),
    "norm/elementwise": (GREEN, None),
    "copies": (RED, "xx"),
    "idle": ("#BBBBBB", ".."),
}
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "report"}


def canvas(width: float, height: float) -> tuple[Figure, matplotlib.axes.Axes]:
    """Return a figure without pyplot, which would look for a display, and its axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    return figure, axis


def svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    same_bytes = {"Date": None, "Creator": None}
    with warnings.catch_warnings():
        # a font that this machine lacks is the reader's browser's
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format="svg", metadata=same_bytes)
    return buffer.getvalue()


def rung_name(rung: str, say: Callable[[str], str]) -> str:
    """Return the name of a rung, such as "fp16 + half GEMMs", in the report's language."""
    return " + ".join(map(say, rung.split(" + ")))


def ladder(rungs: list[dict], floor_ms: float, floor_tier: str, say: Callable[[str], str]) -> bytes:
    """Draw a bar of ms per step for each rung (rung, ms, p10, p90), and the floor as a line."""
    figure, axis = canvas(8, 0.36 * len(rungs) + 1.4)
    ms = np.array([rung["ms"] for rung in rungs])
    p10 = np.array([rung["p10"] for rung in rungs])
    p90 = np.array([rung["p90"] for rung in rungs])
    colours = [RED if rung["rung"] in ("fp32", "tf32") else BLUE for rung in rungs]
    places = range(len(rungs))
    errors = [ms - p10, p90 - ms]
    bars = axis.barh(places, ms, 0.7, color=colours, xerr=errors, ecolor="#444444")
    labels = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in ms]
    axis.bar_label(bars, labels, padding=5, fontsize=8)
    axis.set(xscale="log", xlim=(floor_ms / 1.6, max(ms) * 1.7))
    axis.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.axvline(floor_ms, color="black", linestyle="--", linewidth=1.2)
    axis.annotate(
        f"{say('floor')} ({floor_tier}): {floor_ms:.1f}",
        (floor_ms, -0.75),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
    axis.set_yticks(places, [rung_name(rung["rung"], say) for rung in rungs], fontsize=9)
    axis.set_ylim(len(rungs) - 0.4, -1.1)
    axis.set_xlabel(say("ms a denoising step (median; bars: 10th to 90th percentile; log scale)"))
    return svg(figure)


def kinds(runs: dict[str, dict], say: Callable[[str], str]) -> bytes:
    """Draw the shares of kinds of work in a step's time, a bar a run. runs: {name: {work:
    {share}}}.
    """
    figure, axis = canvas(8, 0.45 * len(runs) + 1.2)
    ends = [0.0] * len(runs)
    for work, (colour, hatch) in KINDS.items():
        shares = [100 * parts[work]["share"] if work in parts else 0.0 for parts in runs.values()]
        if not any(shares):
            continue
        axis.barh(
            list(runs),
            shares,
            0.62,
            ends,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            label=say(work),
        )
        ends = [end + share for end, share in zip(ends, shares)]
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel=say("share of a step, %"))
    figure.legend(loc="outside lower center", ncols=len(KINDS), fontsize=8, frameon=False)
    return svg(figure)


def scaling(series: dict[str, dict[int, float]], say: Callable[[str], str]) -> bytes:
    """Draw speed over one GPU against their number, with the ideal line. series: {name:
    {GPUs: speed}}.
    """
    figure, axis = canvas(8.4, 3.8)
    most = max(max(points) for points in series.values())
    axis.plot([1, most], [1, most], "--", color="black", linewidth=1.1, label=say("ideal"))
    for index, (name, points) in enumerate(series.items()):
        x = sorted(points)
        axis.plot(
            x,
            [points[gpus] for gpus in x],
            label=rung_name(name, say),
            marker=MARKS[index],
            color=COLOURS[index],
        )
    axis.set_xticks(range(1, most + 1))
    axis.set(
        xlabel=say("GPUs"), ylabel=say("speed over one GPU, same setting"), ylim=(0, most * 1.08)
    )
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return svg(figure)


def photograph(file: Path) -> bytes:
    """Return a picture as JPEG, at most 1000 pixels wide."""
    sheet = Image.open(file).convert("RGB")
    buffer = io.BytesIO()
    sheet.thumbnail((1000, sheet.height), Image.Resampling.LANCZOS)
    sheet.save(buffer, "JPEG", quality=82, optimize=True)
    return buffer.getvalue()
