"""The report's figures. Each takes measured rows and gives a PNG; colours are Okabe and Ito's, which colour-blind readers tell apart, and no figure
relies on colour alone. Drawn without pyplot, so that no display or backend is looked for."""

import io
import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, SKY, YELLOW, PINK, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#F0E442",
    "#CC79A7",
    "#000000",
)
KIND_COLOURS = {
    "GEMM": BLUE,
    "attention": ORANGE,
    "norm/elementwise": GREEN,
    "copies": RED,
    "communication": PINK,
    "VAE": SKY,
    "idle": "#BBBBBB",
    "host, outside operators": "#BBBBBB",
}
HATCHES = {"attention": "//", "copies": "xx", "idle": "..", "VAE": "\\\\", "communication": "++"}


def canvas(rows, width=8.0, height=4.0, panels=1):
    if not all(rows):
        raise ValueError("nothing measured: no figure is drawn")
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, (axes if panels > 1 else axes[0])


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})  # the same bytes for the same figures
    return buffer.getvalue()


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plain_log(axis, low, high):
    """A log axis from `low` to `high` with ticks at 1, 2 and 5 of each decade, written out."""
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    spread = len(decades) > 4
    ticks = [m * 10.0**d for d in decades for m in ((1,) if spread else (1, 2, 5)) if low <= m * 10.0**d <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
    axis.axes.set_xlim(low, high) if axis.axis_name == "x" else axis.axes.set_ylim(low, high)


def ladder(rungs, floor_ms, floor_name):
    """Bars of ms a step, one a rung, with the floor as a line. rungs: dicts with rung, ms, p10, p90. A log scale, lest the fast ones vanish."""
    figure, axis = canvas([rungs], 8, 0.36 * len(rungs) + 1.4)
    places = range(len(rungs))
    bars = axis.barh(
        places,
        [r["ms"] for r in rungs],
        color=[
            RED
            if r["rung"] in ("fp32", "tf32")
            else BLUE
            if "compile" not in r["rung"] and "diffusers" not in r["rung"]
            else ORANGE
            for r in rungs
        ],
        height=0.7,
        xerr=[[max(0.0, r["ms"] - r["p10"]) for r in rungs], [max(0.0, r["p90"] - r["ms"]) for r in rungs]],
        ecolor="#444444",
    )
    plain_log(axis.xaxis, floor_ms / 1.6, max(r["ms"] for r in rungs) * 1.7)
    for bar, row in zip(bars, rungs):
        axis.annotate(
            number(row["ms"]),
            (row["p90"], bar.get_y() + bar.get_height() / 2),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.axvline(floor_ms, color=BLACK, linestyle="--", linewidth=1.2)
    axis.annotate(f" {floor_name}: {floor_ms:.1f}", (floor_ms, -0.75), fontsize=9, va="center")
    axis.set_yticks(places, [r["rung"] for r in rungs], fontsize=9)
    axis.set_ylim(len(rungs) - 0.4, -1.1)
    axis.set_xlabel("ms a denoising step (median; bars: 10th to 90th percentile; log scale)")
    return png(figure)


def kinds(profiles):
    """Stacked bars of where a step's time goes, one a profile: {name: {kind: ms}}."""
    figure, axes = canvas([profiles], 8, 3.2, 2)
    every = list(dict.fromkeys(kind for parts in profiles.values() for kind in parts))
    for axis, share in zip(axes, (False, True)):
        for place, parts in enumerate(profiles.values()):
            total, left = sum(parts.values()), 0.0
            for kind in every:
                value = parts.get(kind, 0.0) * (100 / total if share else 1)
                axis.bar(
                    place,
                    value,
                    bottom=left,
                    width=0.62,
                    color=KIND_COLOURS.get(kind, YELLOW),
                    hatch=HATCHES.get(kind),
                    edgecolor="white",
                    linewidth=0.5,
                    label=kind if place == 0 else None,
                )
                left += value
            if not share:
                axis.annotate(
                    number(left), (place, left), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9
                )
        axis.set_xticks(range(len(profiles)), list(profiles), fontsize=9)
        axis.set_ylabel("share of a step, %" if share else "ms a step")
    missing = [kind for kind in every if kind not in next(iter(profiles.values()))]
    for kind in missing:
        axes[1].bar(0, 0, color=KIND_COLOURS.get(kind, YELLOW), hatch=HATCHES.get(kind), edgecolor="white", label=kind)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), fontsize=8, frameon=False)
    return png(figure)


def error_against_speed(points, bars, part="grid"):
    """Worst PSNR and worst MAE of verified pictures against the speed over fp32, with the gates' bars. points: dicts with tier, speedup, psnr,
    mae (of 0–255); bars: {gate: {psnr, mae}}. Pictures equal to the bit stand at the upper edge."""
    figure, axes = canvas([points], 8, 3.6, 2)
    marks = "osD^vP*X"
    ceiling = 10 + max([60.0, *(p["psnr"] for p in points if math.isfinite(p["psnr"]))])
    least = min([1e-3, *(p["mae"] for p in points if p["mae"] > 0)]) / 2
    for index, point in enumerate(points):
        style = dict(
            marker=marks[index % len(marks)],
            color=list(KIND_COLOURS.values())[index % 6],
            s=60,
            zorder=3,
            edgecolor="black",
            linewidth=0.5,
        )
        for axis, value in zip(axes, (min(point["psnr"], ceiling), max(point["mae"], least))):
            axis.scatter(point["speedup"], value, **style)
            axis.annotate(
                point["tier"], (point["speedup"], value), xytext=(7, 5), textcoords="offset points", fontsize=9
            )
    axes[0].axhline(bars["contest"]["psnr"], color=RED, linestyle="--", linewidth=1.2)
    axes[0].annotate(
        "both gates: above 40 dB",
        (0.98, bars["contest"]["psnr"]),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axes[0].set_ylim(min(bars["contest"]["psnr"], *(p["psnr"] for p in points)) - 5, ceiling + 4)
    axes[0].set_ylabel(f"worst {part}'s PSNR, dB")
    for gate, line in (("contest", "--"), ("strict", ":")):
        bar = bars[gate]["mae"] * 255
        axes[1].axhline(bar, color=RED, linestyle=line, linewidth=1.2)
        axes[1].annotate(
            f"{gate} gate: {bar:.2g}",
            (0.98, bar),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    plain_log(axes[1].yaxis, least / 2, max(bars["contest"]["mae"] * 255, *(p["mae"] for p in points)) * 4)
    axes[1].set_ylabel(f"worst {part}'s MAE, levels of 255")
    reach = max(p["speedup"] for p in points)
    for axis in axes:
        axis.set_xlabel("speed over fp32, same run")
        axis.set_xlim(0, reach * 1.25)
        axis.grid(True, color="#dddddd", linewidth=0.6)
    return png(figure)


def growth(by_pictures, by_size):
    """ms a step and a picture, as pictures grow in number (rows of one size) and in size."""
    figure, axes = canvas([by_pictures, by_size], 8, 3.4, 2)
    for axis, rows, key, label in (
        (axes[0], by_pictures, "pictures", "pictures at a time (with guidance, twice as many rows)"),
        (axes[1], by_size, "image_size", "side of a picture, px"),
    ):
        x = [row[key] for row in rows]
        axis.plot(x, [row["ms"] for row in rows], "o-", color=BLUE, label="ms a step")
        axis.plot(x, [row["ms_a_picture"] for row in rows], "s--", color=ORANGE, label="ms a step and picture")
        for row in rows:
            axis.annotate(
                number(row["ms"]),
                (row[key], row["ms"]),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axis.set_xscale("log", base=2)
        values = [row[name] for row in rows for name in ("ms", "ms_a_picture")]
        plain_log(axis.yaxis, min(values) / 1.4, max(values) * 1.6)
        axis.set_xticks(x, [str(value) for value in x])
        axis.minorticks_off()
        axis.set_xlabel(label, fontsize=9)
        axis.set_ylabel("ms")
        axis.grid(True, color="#dddddd", linewidth=0.6)
    axes[0].legend(fontsize=8, frameon=False)
    return png(figure)


def scaling(series):
    """Speed-up over one GPU against their number, with the ideal line. series: {name: {gpus: speed-up}}."""
    figure, axis = canvas([series], 8.4, 3.8)
    most = max(max(points) for points in series.values())
    axis.plot([1, most], [1, most], color=BLACK, linestyle="--", linewidth=1.1, label="ideal")
    for index, (name, points) in enumerate(series.items()):
        x = sorted(points)
        axis.plot(
            x,
            [points[n] for n in x],
            marker="osD^vPX*"[index % 8],
            color=[BLUE, ORANGE, GREEN, RED, SKY, PINK][index % 6],
            label=name,
            linestyle=["-", "-.", ":"][index // 6 % 3],
        )
    axis.set_xticks(range(1, most + 1))
    axis.set_xlabel("GPUs")
    axis.set_ylabel("speed over one GPU, same path")
    axis.set_ylim(0, most * 1.08)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.legend(
        fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )  # beside the lines, however many
    return png(figure)
