"""Compare sampled pictures with their baselines: MAE, LPIPS (VGG16), PSNR, SSIM, and a verdict.

    python evaluate.py baseline.png sample.png
    python evaluate.py baseline.png folder/ --gate contest-2025-06 --every-tile --heatmap heat.png
    python evaluate.py baselines/ folder/ --metrics mae psnr --json verdict.json

The values equal torchmetrics 1.7.3's with its defaults, on pictures scaled to 0..1, the
baseline given first, computed on the CPU, so that the verdict does not depend on the GPU under
test. MAE and its thresholds are in levels of 0..255, as the contest's script prints it.

Exit status: 0 pass · 1 fail · 2 bad input · 3 none: no metric fails, and one could not be
computed · 130 Ctrl-C.
"""

from accel import launch

if __name__ == "__main__":
    launch.begin()

import argparse
import hashlib
import json
import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import chain
from operator import ge, gt, le
from pathlib import Path
from typing import NamedTuple


def _crash(*error):
    """End with status 3: Python's own status for a crash is 1, which would say FAIL."""
    launch.report_and_exit(*error)
    sys.exit(3)


if __name__ == "__main__":
    sys.excepthook = _crash  # before the imports that take long

import numpy as np

from accel.errors import USAGE, UsageError
from accel.io.filesystem import atomic_write, require_writable
from accel.io.picture_files import SUFFIXES, read_picture


class Metric(NamedTuple):
    """A metric's texts and criterion."""

    line: str  # of the contest's script
    short: str
    sign: str  # of the criterion
    meets: Callable[[float, float], bool]  # (value, threshold)


METRICS = {
    "mae": Metric("Pixel-wise Mean Absolute Difference: {:.4f}", "MAE {:.4f} of 0-255", "<=", le),
    "lpips": Metric("LPIPS (VGG):                        {:.4f}", "LPIPS {:.4f}", "<=", le),
    "psnr": Metric("PSNR:                              {:.2f} dB", "PSNR {:.4f}", ">", gt),
    "ssim": Metric("SSIM:                              {:.4f}", "SSIM {:.4f}", ">=", ge),
}


class Edition(NamedTuple):
    """An edition of the contest's rules."""

    thresholds: dict[str, float]  # mae: of 0..255, the unit of the organisers' evaluate.py
    most: float  # points
    full: float  # T that earns all points
    none: float  # T that earns none
    grids: int  # that one process samples from one random stream
    clock: str  # T: "seconds" from loading to the file, or "printed": a grid, noise to decoded
    arithmetic: bool  # whether the precision may be changed
    page: str  # commit of the organisers' page

    def points(self, seconds: float) -> float:
        """Return the points for T: most·log(none / T) / log(none / full), between 0 and most."""
        share = math.log(self.none / seconds) / math.log(self.none / self.full)
        return self.most * min(1.0, max(0.0, share))


# The organisers' page is pages/advanced/dit.md of Handicraft-Computing-Team/sustcsc-doc. Their
# program is Jaredanwolfgang/DiT-SUSTCSC; the rules do not define T before its commit 97dab9f.
EDITIONS = {
    "contest-2025-06": Edition(
        dict(mae=0.01, lpips=0.01, psnr=40.0, ssim=0.99),
        most=50,
        full=100,
        none=300,
        grids=1,
        clock="seconds",
        arithmetic=False,
        page="083002e, 2025-06-29",
    ),
    "contest-2025-07": Edition(
        dict(mae=80.0, lpips=0.7, psnr=5.0, ssim=0.3),
        most=100,
        full=60,
        none=360,
        grids=8,
        clock="printed",
        arithmetic=True,
        page="affc247, 2025-07-23",
    ),
}
GATES = {  # criterion → thresholds, mae of 0..255
    "close": dict(mae=0.01 * 255, lpips=0.01, psnr=40.0, ssim=0.99),
    **{name: edition.thresholds for name, edition in EDITIONS.items()},
}
FORMER_NAMES = {"contest": "close", "strict": "contest-2025-06"}
EXIT_STATUS = {"PASS": 0, "FAIL": 1, "NONE": 3}
VGG16_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
VGG16_SHA256 = "397923af"  # its first eight digits, as torch's hub names the file


class NotComputed(Exception):
    """A metric has no value (exit status 3)."""


def mae(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean absolute difference in 0..255 levels. a: baseline, b: candidate,
    (H, W, 3) uint8 as below.
    """
    return float(np.abs(a.astype(np.int16) - b).mean(dtype=np.float64))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return 10·log10(R²/MSE) in dB, R the largest value of b, as in torchmetrics. NaN
    for two black pictures.
    """
    from skimage.metrics import peak_signal_noise_ratio

    a = np.float64(np.float32(a) / 255)
    b = np.float64(np.float32(b) / 255)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(peak_signal_noise_ratio(a, b, data_range=b.max()))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean structural similarity (Wang et al. 2004, eq. 13): 11×11 Gaussian
    window, σ 1.5, population covariance, data range the larger (max - min) of the two
    pictures, borders reflected by 5 pixels. NaN for constant pictures or a side under 6
    pixels. In float64: float32 is off by more than 1e-4 for narrow ranges.
    """
    from skimage.metrics import structural_similarity

    a = np.float64(np.float32(a) / 255)
    b = np.float64(np.float32(b) / 255)
    data_range = max(np.ptp(a), np.ptp(b))
    if data_range == 0 or min(a.shape[:2]) < 6:
        return math.nan
    border = ((5, 5), (5, 5), (0, 0))  # scikit-image crops it
    value = structural_similarity(
        np.pad(a, border, mode="reflect"),
        np.pad(b, border, mode="reflect"),
        data_range=data_range,
        channel_axis=-1,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
    )
    return float(value)


class Lpips:
    """LPIPS (Zhang et al. 2018, arXiv:1801.03924, eq. 1) by the lpips package's VGG16,
    loaded when a pair needs it.

    weights: a torchvision VGG16 checkpoint; None is the one in torch's hub cache, fetched
    on first use. Once loaded, `source` has its path, its sha256 and whether it is the
    published one. Raises UsageError if `weights` is not a file.
    """

    def __init__(self, weights: Path | None = None):
        if weights is not None and not weights.is_file():
            raise UsageError(f"--vgg-weights {weights}: no such file; it should be {VGG16_URL}")
        self.weights = weights
        self.source = None

    def __call__(self, a: np.ndarray, b: np.ndarray) -> float:
        """Return the distance of two pictures. Raises NotComputed."""
        if np.array_equal(a, b):
            return 0.0  # by definition, without the network
        if min(a.shape[:2]) < 16:
            raise NotComputed(
                "LPIPS: VGG16 halves four times: pictures need 16x16 px, not "
                f"{a.shape[1]}x{a.shape[0]}"
            )
        if isinstance(self._network, NotComputed):
            raise self._network
        import lpips
        import torch

        distance = 0.0
        with torch.inference_mode():
            # each (1, 3, H, W)
            maps = [torch.from_numpy(np.float32(x) / 255).permute(2, 0, 1)[None] for x in (a, b)]
            maps = [self._network.scaling_layer(2 * x - 1) for x in maps]
            # VGG16's five slices: a slice's maps replace the previous slice's
            for run, head in zip(self._network.net.children(), self._network.lins):
                maps = [run(x) for x in maps]  # each (1, C, H', W')
                units = [lpips.normalize_tensor(x) for x in maps]
                distance += head(units[0].sub_(units[1]).square_()).mean().item()
        return distance

    @cached_property
    def _network(self):
        """Return the network, or a NotComputed with the reason why there is none."""
        import lpips
        import torch

        path = Path(self.weights or Path(torch.hub.get_dir(), "checkpoints", Path(VGG16_URL).name))
        timeout = socket.getdefaulttimeout()
        try:
            if self.weights is None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                socket.setdefaulttimeout(10)  # seconds; torch's hub sets none
                torch.hub.download_url_to_file(
                    VGG16_URL, str(path), VGG16_SHA256, progress=sys.stderr.isatty()
                )
            state = torch.load(path, "cpu", weights_only=True)
            heads = torch.load(
                Path(lpips.__file__).with_name("weights") / "v0.1/vgg.pth", "cpu", weights_only=True
            )
            # without filling 138 M random numbers
            with warnings.catch_warnings(), torch.device("meta"):
                # lpips calls torchvision in an outdated way
                warnings.simplefilter("ignore", UserWarning)
                network = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False)
            features = {
                f"net.{name}": state["features." + name.partition(".")[2]]
                for name in network.net.state_dict()
            }
            # lpips names each head twice
            network.load_state_dict(heads | features, strict=False, assign=True)
        except Exception as error:  # no network connection, disk full, wrong hash, other weights
            return NotComputed(
                f"LPIPS: {path}: no VGG16 ({error!r:.200}); put {VGG16_URL} there or use "
                "--vgg-weights"
            )
        finally:
            socket.setdefaulttimeout(timeout)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.source = {
            "path": str(path),
            "sha256": digest,
            "published": digest.startswith(VGG16_SHA256),
        }
        return network


def measure(
    a: np.ndarray, b: np.ndarray, lpips: Lpips | None = None
) -> tuple[dict[str, float], list[str]]:
    """Return {metric: value}, mae in 0..255 levels, and the reason for every NaN. Without
    `lpips`, three metrics.
    """
    values = {}
    reasons = []
    functions = {"mae": mae, "lpips": lpips, "psnr": psnr, "ssim": ssim}
    for metric, function in functions.items():
        if function is None:
            continue
        try:
            values[metric] = function(a, b)
            if math.isnan(values[metric]):
                reasons.append(f"{metric.upper()}: undefined for constant, black or tiny pictures")
        except NotComputed as failure:
            values[metric] = math.nan
            reasons.append(str(failure))
    return values, reasons


def judge(values: dict[str, float], thresholds: dict[str, float]) -> dict[str, str]:
    """Return PASS or FAIL for each value that has a threshold, NONE for NaN."""
    results = {}
    for metric in thresholds.keys() & values.keys():
        met = METRICS[metric].meets(values[metric], thresholds[metric])
        results[metric] = "NONE" if math.isnan(values[metric]) else "PASS" if met else "FAIL"
    return results


def overall(verdicts: Iterable[str]) -> str:
    """Return the verdict of several: FAIL before NONE before PASS; NONE if there is none."""
    return min(verdicts, key=["FAIL", "NONE", "PASS"].index, default="NONE")


def verdict_of(values: dict[str, float], thresholds: dict[str, float]) -> str:
    """Return the verdict on the values of a picture."""
    return overall(judge(values, thresholds).values())


def judge_pixels(
    a: np.ndarray, b: np.ndarray, thresholds: dict[str, float], lpips: Lpips | None
) -> dict:
    """Return the values of two pictures or tiles, their verdict, and the reason for every NaN."""
    values, reasons = measure(a, b, lpips)
    return {"values": values, "verdict": verdict_of(values, thresholds), "reasons": reasons}


def find_tiles(a: np.ndarray, b: np.ndarray) -> dict[str, tuple[slice, slice]]:
    """Return the pixels of each picture of a grid, by "row,column" from 1; {} if it is not a grid
    in sample.png's layout: square pictures, four per row (fewer if there is only one row), with
    black lines of 2 px between and around them.
    """
    line = 2
    height = a.shape[0] - line
    width = a.shape[1] - line
    for columns in (4, 3, 2):
        stride = width // columns  # a picture and the line before it
        if stride < 16 + line or width % columns or height % stride:
            continue
        rows = height // stride
        y, x = np.ogrid[: a.shape[0], : a.shape[1]]
        lines = (y % stride < line) | (x % stride < line)
        if a[lines].any() or (columns < 4 and rows > 1):
            continue
        tiles = []
        for row, column in np.ndindex(rows, columns):
            top = row * stride
            left = column * stride
            place = slice(top + line, top + stride), slice(left + line, left + stride)
            tiles.append((f"{row + 1},{column + 1}", place))
        while tiles and not a[tiles[-1][1]].any() and not b[tiles[-1][1]].any():
            tiles.pop()  # the last row may be unfilled
        return dict(tiles)
    return {}


def judge_pairs(
    pairs: Iterable[tuple[Path, Path]],
    thresholds: dict[str, float],
    lpips: Lpips | None,
    every_tile: bool = False,
) -> dict:
    """Judge pairs of files. Return the verdict; each metric's mean, without infinities (the PSNR of
    equal pictures) unless all are infinite, and worst value; a record per pair, with the values and
    verdicts of the candidate and of its tiles, of tiles LPIPS only with `every_tile`; the reasons
    for NaNs. Raises UsageError.
    """
    read = lru_cache(maxsize=2)(read_picture)  # all candidates may have one baseline
    records = []
    for pair in pairs:
        a, b = [read(path) for path in pair]
        baseline, candidate = map(str, pair)
        if (a.size, a.mode) != (b.size, b.mode):
            raise UsageError(
                f"{baseline} has {a.size} px, {a.mode}, {candidate} has {b.size} px, {b.mode}; "
                "save both alike"
            )
        places = find_tiles(a.pixels, b.pixels)
        if every_tile and not places:
            raise UsageError(
                f"{candidate}: {b.size} px is not a grid in sample.png's layout; drop --every-tile"
            )
        tiles = []
        for name, place in places.items():
            tile = a.pixels[place], b.pixels[place]
            record = judge_pixels(*tile, thresholds, lpips if every_tile else None)
            tiles.append({"tile": name, **record})
        whole = judge_pixels(a.pixels, b.pixels, thresholds, lpips)
        records.append({"file": candidate, "baseline": baseline, **whole, "tiles": tiles})
    judged = [*records]
    if every_tile:
        judged += chain.from_iterable(record["tiles"] for record in records)
    mean = {}
    worst = {}
    for metric in records[0]["values"]:
        values = np.array([record["values"][metric] for record in records])
        differing = values[values != math.inf]
        mean[metric] = float(differing.mean()) if len(differing) else math.inf
        worst[metric] = float(values.max() if METRICS[metric].meets is le else values.min())
    # as a dict's keys: each once, in order
    reasons = dict.fromkeys(chain.from_iterable(record["reasons"] for record in judged))
    return dict(
        verdict=overall(record["verdict"] for record in judged),
        mean=mean,
        worst=worst,
        files=records,
        reasons=[*reasons],
    )


def summary(values: dict[str, float]) -> str:
    """Return the values in one line, MAE in levels."""
    return "   ".join(
        METRICS[name].short.format(values[name]) for name in METRICS if name in values
    )


def json_ready(value: dict) -> dict:
    """Replace inf and NaN, which JSON lacks, by the strings that Python's float() reads back."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: str(float(constant)))


def draw_worst(path: Path, records: list[dict]) -> None:
    """Write baseline, candidate and their difference, of each pixel the channel that differs most,
    as a PNG: of the record with the lowest PSNR.
    """
    from matplotlib.figure import Figure

    worst = min(records, key=lambda record: record["values"]["psnr"])
    files = Path(worst["baseline"]), Path(worst["file"])
    a, b = [read_picture(file).pixels for file in files]
    difference = np.abs(a.astype(np.int16) - b).max(2)  # (H, W) in levels
    y, x = np.unravel_index(difference.argmax(), difference.shape)
    most = difference.max()
    wide = difference.shape[1] > 1.6 * difference.shape[0]
    figure = Figure((11, 17) if wide else (16, 6), layout="constrained")
    axes = figure.subplots(3, 1) if wide else figure.subplots(1, 3)
    titles = (
        f"baseline: {files[0].name}",
        f"candidate: {files[1].name}",
        f"difference: at most {most} of 255, at x {x}, y {y}" if most else "identical",
    )
    for axis, pixels, title in zip(axes, (a, b, difference), titles):
        # The map and its limits are of the difference: they leave colours as they are.
        drawn = axis.imshow(pixels, cmap="inferno", vmin=0, vmax=max(most, 1))
        title = title.encode(errors="replace").decode()
        axis.set_title(title, fontsize=10, loc="left", parse_math=False)
    figure.colorbar(
        drawn, ax=axes[2], fraction=0.046, pad=0.015, label="largest difference of a channel, 0–255"
    )
    title = f"{worst['verdict']}     {summary(worst['values'])}"
    figure.suptitle(title, fontsize=13, fontweight="bold")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=110)


def gate_name(text: str) -> str:
    """Return a criterion's name of today, for argparse; print a notice for a former one."""
    if text in FORMER_NAMES:
        print(f"--gate {text}: its name is now {FORMER_NAMES[text]}", file=sys.stderr)
    return FORMER_NAMES.get(text, text)


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Add the flag --gate."""
    parser.add_argument(
        "--gate",
        type=gate_name,
        choices=GATES,
        default="close",
        help="thresholds: close, or an edition of the contest's rules (default: close)",
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("baseline", type=Path, help="a picture, or a folder of pictures")
    add(
        "candidate",
        type=Path,
        help="a picture, or a folder: all its pictures must pass; of a baseline folder, those of "
        "the same names are compared",
    )
    add_gate(parser)
    add(
        "--metrics",
        nargs="+",
        default=[*METRICS],
        choices=METRICS,
        help="after the pictures: judge by these only (default: all)",
    )
    add(
        "--every-tile",
        action="store_true",
        help="each tile must pass as well, LPIPS included (takes twice as long)",
    )
    add(
        "--heatmap",
        type=Path,
        metavar="PNG",
        help="write baseline, candidate and difference (of a folder: its worst)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything for machines")
    add(
        "--vgg-weights",
        type=Path,
        metavar="PATH",
        help="torchvision's VGG16 (default: torch's hub cache)",
    )
    args = parser.parse_args(argv)
    gate = GATES[args.gate]
    args.thresholds = {metric: gate[metric] for metric in METRICS if metric in args.metrics}
    return args


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder, sorted by name; [] if it is not a folder."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)


def find_pairs(baseline: Path, candidate: Path) -> list[tuple[Path, Path]]:
    """Return the pairs of files to compare, the baseline first: a baseline with a candidate or
    with every picture in a folder, or the pictures of the same name in two folders. Raises
    UsageError.
    """
    for folder in (baseline, candidate):
        if folder.is_dir() and not pictures_in(folder):
            raise UsageError(f"{folder}: contains no picture; name another")
    if not baseline.is_dir():
        return [(baseline, path) for path in pictures_in(candidate) or [candidate]]
    if not candidate.is_dir():
        raise UsageError(
            f"{baseline}: is a folder, and {candidate} is not; name two pictures or two folders"
        )
    names = {path.name for path in pictures_in(baseline)}
    only_one = sorted(names ^ {path.name for path in pictures_in(candidate)})
    if only_one:
        folder = candidate if only_one[0] in names else baseline
        raise UsageError(
            f"{folder}: lacks {only_one[0]} ({len(only_one)} names are in one folder only); "
            "compare folders with the same names"
        )
    return [(baseline / name, candidate / name) for name in sorted(names)]


def require_outputs(args: argparse.Namespace) -> None:
    """Remove the files of an earlier run. Raise UsageError for outputs that are inputs or cannot
    be written.
    """
    inputs = [args.baseline, args.candidate, args.vgg_weights]
    inputs += chain(pictures_in(args.baseline), pictures_in(args.candidate))
    taken = {os.path.realpath(path) for path in inputs if path is not None}
    for flag, path in (("--heatmap", args.heatmap), ("--json", args.json)):
        if path is None:
            continue
        try:
            if os.path.realpath(path) in taken or (path.exists() and not path.is_file()):
                raise FileExistsError(0, "is an input or not a file")
            path.unlink(missing_ok=True)  # a link too: nothing is written through one
            require_writable(path.parent)
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror}; name another file") from None
        taken.add(os.path.realpath(path))


def print_table(
    mean: dict[str, float], worst: dict[str, float], files: int, args: argparse.Namespace
) -> None:
    """Print the lines of the contest's script for the mean of all files, and each metric's worst
    value with its threshold.
    """
    print("=== Image Comparison Metrics ===")
    for metric, value in mean.items():
        print(METRICS[metric].line.format(value))
    gate = args.gate
    if files > 1:
        print(f"\nThese are means of {files} files; PSNR's leaves equal pictures out.")
        gate += f", the worst of {files} files"
    print(f"\nGate: {gate}")
    results = judge(worst, args.thresholds)
    for metric, threshold in args.thresholds.items():
        value = worst[metric]
        rows = {metric.upper(): (value, threshold)}
        if metric == "mae":
            rows = {
                "MAE of 0-1": (value / 255, threshold / 255),
                "MAE of 0-255": (value, threshold),
            }
        result = results[metric].replace("NONE", "NOT COMPUTED")
        for label, (number, limit) in rows.items():
            print(f"  {label:14}{number:<12.6g}{METRICS[metric].sign:3}{limit:<12.6g}{result}")


def print_records(records: list[dict], every_tile: bool) -> None:
    """Print a line per picture and per tile."""
    for record in records:
        print(f"\n{record['file']}: {summary(record['values'])}   {record['verdict']}")
        for tile in record["tiles"]:
            verdict = f"   {tile['verdict']}" if every_tile else ""
            print(f"  {tile['tile']:6}{summary(tile['values'])}{verdict}")


def run(args: argparse.Namespace) -> dict:
    """Judge the pictures, print the figures, and return the report."""
    pairs = find_pairs(args.baseline, args.candidate)
    lpips = Lpips(args.vgg_weights) if "lpips" in args.thresholds else None
    judged = judge_pairs(pairs, args.thresholds, lpips, args.every_tile)
    reasons = judged.pop("reasons")
    records = judged["files"]
    verdict = judged["verdict"]
    print_table(judged["mean"], judged["worst"], len(records), args)
    print_records(records, args.every_tile)
    if args.heatmap:
        draw_worst(args.heatmap, records)
    for reason in reasons:
        print(f"evaluate.py: {reason}", file=sys.stderr)
    failed = sum(record["verdict"] != "PASS" for record in records)
    vgg = lpips.source if lpips else None
    caveats = {
        f"gate {args.gate}": True,
        "a metric could not be computed": verdict == "NONE",
        f"{failed} of {len(records)} pictures do not pass": failed and len(records) > 1,
        "every tile held to it": args.every_tile,
        f"judged by {', '.join(args.thresholds).upper()}": len(args.thresholds) < len(METRICS),
        "not the published VGG16": vgg and not vgg["published"],
    }
    applying = "; ".join(caveat for caveat, applies in caveats.items() if applies)
    print(f"VERDICT: {verdict} ({applying})")
    return dict(
        exit_status=EXIT_STATUS[verdict],
        gate=args.gate,
        thresholds=args.thresholds,
        mae_unit="0-255",
        vgg_weights=vgg,
        **judged,
    )


def main(argv: list[str] | None = None) -> int:
    """Compare the pictures; draw the heatmap and write the JSON report if asked for. Return the
    exit status.
    """
    args = arguments(argv)
    warnings.filterwarnings("ignore", module="PIL")  # the reader's error is the line
    try:
        require_outputs(args)
        report = run(args)
        if args.json:
            with atomic_write(args.json, "w") as file:
                file.write(json.dumps(json_ready(report), indent=1) + "\n")
    except (UsageError, OSError) as error:
        print(f"evaluate.py: {error!s:.500}", file=sys.stderr)
        return USAGE
    return report["exit_status"]


if __name__ == "__main__":
    sys.exit(main())
