"""The report's figures: measured rows → SVG. Colours are Okabe and Ito's, and no figure relies on colour alone.

Text stays text, so the reader's browser brings the fonts of its language. say: English → the report's language.
"""

import io
import math
import warnings
from collections.abc import Callable

import matplotlib
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, SKY, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
styled = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"})
COLOURS, MARKS = (BLUE, ORANGE, GREEN, RED, SKY, PINK), "osD^vP*X"
KINDS = {  # colour, hatch
    "GEMM": (BLUE, None),
    "attention": (ORANGE, "//"),
    "norm/elementwise": (GREEN, None),
    "copies": (RED, "xx"),
    "communication": (PINK, "++"),
    "idle": ("#BBBBBB", ".."),
    "host, outside operators": ("#BBBBBB", None),
}


def canvas(rows: list, width: float, height: float, panels: int = 1) -> tuple[Figure, list]:
    """A figure without pyplot, which would look for a display, and its axes. Raises ValueError for no rows."""
    if not rows:
        raise ValueError("nothing measured: no figure is drawn")
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


def roomy(text: str) -> str:
    """`text` and spaces that no browser shows: room for wide characters, whose width matplotlib's font lacks."""
    return text + " " * round(1.3 * sum(ord(letter) > 0x2E7F for letter in text))


def label(axis, text, x: float, y: float, dx: int = 0, dy: int = 4, **style) -> None:
    """`text` beside a point of the data, `dx` and `dy` points away."""
    axis.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", fontsize=8, **style)


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plain_log(axis, low: float, high: float) -> None:
    """A log axis from `low` to `high`, ticks written out: 1, 2 and 5 of each decade, of many decades 1 alone."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**decade for decade in decades for m in ((1,) if len(decades) > 4 else (1, 2, 5))]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
    getattr(axis.axes, f"set_{axis.axis_name}lim")(low, high)


def rung_name(rung: str, say: Callable[[str], str]) -> str:
    """ "fp16 + half GEMMs" in the report's language."""
    return " + ".join(map(say, rung.split(" + ")))


@styled
def ladder(rungs: list[dict], floor_ms: float, floor_tier: str, say: Callable[[str], str] = str) -> bytes:
    """A bar of ms a step for each rung (rung, ms, p10, p90), and the floor as a line."""
    figure, (axis,) = canvas(rungs, 8, 0.36 * len(rungs) + 1.4)
    for place, rung in enumerate(rungs):
        name, ms = rung["rung"], rung["ms"]
        colour = RED if name in ("fp32", "tf32") else ORANGE if "compile" in name or "diffusers" in name else BLUE
        spread = [[max(0.0, ms - rung["p10"])], [max(0.0, rung["p90"] - ms)]]
        axis.barh(place, ms, 0.7, color=colour, xerr=spread, ecolor="#444444")
        label(axis, short(ms), rung["p90"], place, 5, 0, va="center")
    plain_log(axis.xaxis, floor_ms / 1.6, max(rung["ms"] for rung in rungs) * 1.7)
    axis.axvline(floor_ms, color="black", linestyle="--", linewidth=1.2)
    label(axis, f"{say('floor')} ({floor_tier}): {floor_ms:.1f}", floor_ms, -0.75, 3, 0, va="center")
    axis.set_yticks(range(len(rungs)), [rung_name(rung["rung"], say) for rung in rungs], fontsize=9)
    axis.set_ylim(len(rungs) - 0.4, -1.1)
    axis.set_xlabel(say("ms a denoising step (median; bars: 10th to 90th percentile; log scale)"))
    return svg(figure)


@styled
def kinds(runs: dict[str, dict], say: Callable[[str], str] = str) -> bytes:
    """Where a step's time goes, stacked, in ms and in shares. runs: {name: {kind: {ms}}}."""
    figure, axes = canvas(runs, 8, 3.2, 2)
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
def error_against_speed(points: list[dict], criteria: dict, part: str, say: Callable[[str], str] = str) -> bytes:
    """Worst PSNR and worst MAE against the speed over fp32, with the criteria's thresholds.

    points: tier, speedup, psnr in dB, mae in levels of 255. Pictures equal to the bit stand at the upper edge.
    """
    figure, axes = canvas(points, 8, 3.6, 2)
    ceiling = 10 + max([60.0, *(point["psnr"] for point in points if math.isfinite(point["psnr"]))])
    least = min([1e-3, *(point["mae"] for point in points if point["mae"] > 0)]) / 2
    for index, point in enumerate(points):
        for axis, value in zip(axes, (min(point["psnr"], ceiling), max(point["mae"], least))):
            axis.plot(point["speedup"], value, MARKS[index % 8], color=COLOURS[index % 6], markeredgecolor="black")
            label(axis, point["tier"], point["speedup"], value, 7, 5)
    psnr = criteria["contest"]["psnr"]
    contest, strict = (255 * criteria[name]["mae"] for name in ("contest", "strict"))
    thresholds = (
        (axes[0], psnr, f"{say('both criteria: above')} {psnr:g} dB", "--"),
        (axes[1], contest, f"{say('contest criterion')}: {contest:.2g}", "--"),
        (axes[1], strict, f"{say('strict criterion')}: {strict:.2g}", ":"),
    )
    speed = max(point["speedup"] for point in points) * 1.25
    for axis, height, text, style in thresholds:
        axis.axhline(height, color=RED, linestyle=style, linewidth=1.2)
        label(axis, text, speed, height, -3, 2, ha="right")
    axes[0].set_ylim(min(psnr, *(point["psnr"] for point in points)) - 5, ceiling + 4)
    plain_log(axes[1].yaxis, least / 2, 4 * max(contest, *(point["mae"] for point in points)))
    for axis, unit in zip(axes, (f"worst {part}'s PSNR, dB", f"worst {part}'s MAE, levels of 255")):
        axis.set(xlabel=say("speed over fp32, same run"), ylabel=say(unit), xlim=(0, speed))
        axis.grid(True, color="#dddddd", linewidth=0.6)
    return svg(figure)


@styled
def growth(by_pictures: list[dict], by_size: list[dict], say: Callable[[str], str] = str) -> bytes:
    """Ms a step and ms a picture, as pictures grow in number and in size."""
    figure, axes = canvas(by_pictures and by_size, 8, 3.4, 2)
    texts = "pictures in a batch (with guidance, two rows each)", "side of a picture, px"
    for axis, rows, key, text in zip(axes, (by_pictures, by_size), ("pictures", "image_size"), texts):
        x = [row[key] for row in rows]
        for name, style, colour, unit in (
            ("ms", "o-", BLUE, "step"),
            ("ms_a_picture", "s--", ORANGE, "step and picture"),
        ):
            axis.plot(x, [row[name] for row in rows], style, color=colour, label=say(f"ms a {unit}"))
        for row in rows:
            label(axis, short(row["ms"]), row[key], row["ms"], 0, 6, ha="center")
        axis.set_xscale("log", base=2)
        plain_log(axis.yaxis, min(row["ms_a_picture"] for row in rows) / 1.4, max(row["ms"] for row in rows) * 1.6)
        axis.set_xticks(x, [str(value) for value in x])
        axis.minorticks_off()
        axis.set_xlabel(say(text), fontsize=9)
        axis.grid(True, color="#dddddd", linewidth=0.6)
    axes[0].legend(fontsize=8, frameon=False)
    return svg(figure)


@styled
def scaling(series: dict[str, dict[int, float]], say: Callable[[str], str] = str) -> bytes:
    """Speed over one GPU against their number: {name: {GPUs: speed}}, with the ideal line."""
    figure, (axis,) = canvas(series, 8.4, 3.8)
    most = max(max(points) for points in series.values())
    axis.plot([1, most], [1, most], "--", color="black", linewidth=1.1, label=say("ideal"))
    for index, (name, points) in enumerate(series.items()):
        x = sorted(points)
        style = dict(marker=MARKS[index % 8], color=COLOURS[index % 6], linestyle=("-", "-.")[index // 6 % 2])
        axis.plot(x, [points[gpus] for gpus in x], label=rung_name(name, say), **style)
    axis.set_xticks(range(1, most + 1))
    axis.set(xlabel=say("GPUs"), ylabel=say("speed over one GPU, same setting"), ylim=(0, most * 1.08))
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return svg(figure)
