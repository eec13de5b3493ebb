"""The report's figures: measured rows → SVG, a heatmap → JPEG. Colours are Okabe and
Ito's; no figure needs them alone.

Text stays text, so the reader's browser brings the fonts of its language. say: English →
the report's language.
"""

import io
import warnings
from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from PIL import Image

BLUE, _, _, RED, *_ = COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
)
MARKS = "osD^vP"
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "report"}


def canvas(width: float, height: float) -> tuple[Figure, matplotlib.axes.Axes]:
    """Return a figure without pyplot, which would look for a display, and its axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    return figure, axis


def svg(figure: Figure, columns: int = 5) -> bytes:
    """Put the legend below the axis; return the figure's file."""
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
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


def ladder(rungs: list[dict], say: Callable[[str], str]) -> bytes:
    """Draw a dot at ms per step for each rung (rung, ms, p10, p90). A logarithmic axis has
    no zero, so that bars would have no length.
    """
    figure, axis = canvas(8, 0.36 * len(rungs) + 1.4)
    ms, p10, p90 = np.array([(rung["ms"], rung["p10"], rung["p90"]) for rung in rungs]).T
    upstream = np.array([rung["rung"] in ("fp32", "tf32") for rung in rungs])
    places = np.arange(len(rungs))
    axis.hlines(places, p10, p90, color="#444444")
    for name, mark, colour, chosen in (
        ("upstream's arithmetic", "s", RED, upstream),
        ("here", "o", BLUE, ~upstream),
    ):
        axis.plot(ms[chosen], places[chosen], mark, color=colour, label=say(name))
    for place, value in zip(places, ms):
        text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        offset = dict(xytext=(7, 0), textcoords="offset points")
        axis.annotate(text, (value, place), va="center", fontsize=8, **offset)
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axis.set(xscale="log", xlim=(min(ms) / 1.6, max(ms) * 1.7))
    axis.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_yticks(places, [rung_name(rung["rung"], say) for rung in rungs], fontsize=9)
    axis.set_ylim(len(rungs) - 0.4, -0.6)
    axis.set_xlabel(say("ms per step (median; lines: 10th to 90th percentile; log scale)"))
    return svg(figure)


def scaling(series: dict[str, dict[int, float]], say: Callable[[str], str]) -> bytes:
    """Draw speed over one GPU against their number, with the ideal line. series: {name:
    {GPUs: speed}}.
    """
    figure, axis = canvas(8, 3.8)
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
    return svg(figure, columns=3)


def pictures(shown: dict) -> bytes:
    """Return baseline, candidate and their difference, if any, side by side as JPEG, at most 1800
    pixels wide. shown: as report_data.pictures_of gives it.
    """
    if "heatmap" in shown:
        sheet = Image.open(shown["heatmap"]).convert("RGB")
    else:
        want = shown["want"]
        got = shown["got"]
        difference = np.abs(want.astype(int) - got).max(2) / max(shown["most"], 1)
        coloured = matplotlib.colormaps["inferno"](difference, bytes=True)[..., :3]
        margin = np.full((want.shape[0], want.shape[1] // 40, 3), 255, np.uint8)
        panels = [want, margin, got]
        if shown["most"]:  # else identical
            panels += [margin, coloured]
        sheet = Image.fromarray(np.concatenate(panels, 1))
    buffer = io.BytesIO()
    sheet.thumbnail((1800, sheet.height), Image.Resampling.LANCZOS)
    sheet.save(buffer, "JPEG", quality=85, optimize=True)
    return buffer.getvalue()
