"""Compare sampled pictures with their baselines: MAE, LPIPS (VGG16), PSNR, SSIM, and a verdict.

    python evaluate.py baseline.png sample.png
    python evaluate.py baseline.png folder/ --gate strict --every-tile --heatmap heat.png
    python evaluate.py baselines/ folder/ --metrics mae psnr --json verdict.json

The values are those of torchmetrics 1.7.3 with its defaults, on pictures scaled to 0..1, the
baseline given first, computed on the CPU, so that the verdict does not depend on the GPU under
test. MAE is printed in levels of 0..255, as the contest's script does; thresholds are of 0..1.

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
import socket
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import ge, gt, le
from pathlib import Path
from typing import NamedTuple


def _crash(*error):
    """End with status 3: Python's own status for a crash is 1, which would say FAIL."""
    launch.in_a_line(*error)
    sys.exit(3)


if __name__ == "__main__":
    sys.excepthook = _crash  # before the imports that take long

import numpy as np

from accel.errors import USAGE, UsageError
from accel.files import atomic_write
from accel.picture_files import SUFFIXES, read_picture

METRICS = {  # the lines of the contest's script
    "mae": "Pixel-wise Mean Absolute Difference: {:.4f}",
    "lpips": "LPIPS (VGG):                        {:.4f}",
    "psnr": "PSNR:                              {:.2f} dB",
    "ssim": "SSIM:                              {:.4f}",
}
GATES = {  # mae of the 0..1 range; strict allows 0.01 of a 0..255 level
    "contest": {"mae": 0.01, "lpips": 0.01, "psnr": 40.0, "ssim": 0.99},
    "strict": {"mae": 0.01 / 255, "lpips": 0.01, "psnr": 40.0, "ssim": 0.99},
}
SHORT = {
    "mae": "MAE {:.4f} of 0-255",
    "lpips": "LPIPS {:.4f}",
    "psnr": "PSNR {:.4f}",
    "ssim": "SSIM {:.4f}",
}
CRITERIA = {"mae": ("<=", le), "lpips": ("<=", le), "psnr": (">", gt), "ssim": (">=", ge)}
LEVELS = "of 0-255"  # the unit of MAE where people read it
EXIT_STATUS = {"PASS": 0, "FAIL": 1, "NONE": 3}
VGG16_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
VGG16_SHA256 = "397923af"  # its first eight digits, as torch's hub names the file


class Tile(NamedTuple):
    """A picture of a grid."""

    name: str  # "row,column", from 1
    place: tuple[slice, slice]  # pixels


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
        return math.fsum(self._slices(self._network, a, b))

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

    @staticmethod
    def _slices(network, a, b):
        """Return the distance that each of VGG16's five slices adds. A slice's maps
        replace the previous slice's.
        """
        import lpips
        import torch

        distances = []
        with torch.inference_mode():
            # each (1, 3, H, W)
            maps = [torch.from_numpy(np.float32(x) / 255).permute(2, 0, 1)[None] for x in (a, b)]
            maps = [network.scaling_layer(2 * x - 1) for x in maps]
            for run, head in zip(network.net.children(), network.lins):
                maps = [run(x) for x in maps]  # each (1, C, H', W')
                units = [lpips.normalize_tensor(x) for x in maps]
                difference = units[0].sub_(units[1]).square_()
                distances.append(head(difference).mean().item())
        return distances


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
        except NotComputed as failure:
            values[metric] = math.nan
            reasons.append(str(failure))
            continue
        if math.isnan(values[metric]):
            name = metric.upper()
            reasons.append(f"{name}: undefined for constant, black or tiny pictures")
    return values, reasons


def judge(values: dict[str, float], thresholds: dict[str, float]) -> dict[str, str]:
    """Return whether each value (mae in levels) meets its threshold (mae of 0..1), if it
    has one: PASS or FAIL; NONE for NaN.
    """
    results = {}
    for metric in thresholds.keys() & values.keys():
        value = values[metric] / 255 if metric == "mae" else values[metric]
        _, meets = CRITERIA[metric]
        results[metric] = "PASS" if meets(value, thresholds[metric]) else "FAIL"
        if math.isnan(value):
            results[metric] = "NONE"
    return results


def find_tiles(a: np.ndarray, b: np.ndarray) -> list[Tile]:
    """Return the pictures of a grid; none if it is not a grid in sample.png's layout: square
    pictures, four per row (fewer if there is only one row), with black lines of 2 px between
    and around them.
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
            tiles.append(Tile(f"{row + 1},{column + 1}", place))
        while tiles and not a[tiles[-1].place].any() and not b[tiles[-1].place].any():
            tiles.pop()  # the last row may be unfilled
        return tiles
    return []


def verdict_of(values: dict[str, float], thresholds: dict[str, float]) -> str:
    """Return the verdict on the values of a picture."""
    return overall(judge(values, thresholds).values())


def judge_pixels(
    a: np.ndarray, b: np.ndarray, thresholds: dict[str, float], lpips: Lpips | None
) -> dict:
    """Return the values of two pictures or tiles, their verdict, and the reason for every NaN."""
    values, reasons = measure(a, b, lpips)
    return {"values": values, "verdict": verdict_of(values, thresholds), "reasons": reasons}


def judge_pair(
    args: argparse.Namespace,
    pair: tuple[Path, Path],
    a: np.ndarray,
    b: np.ndarray,
    lpips: Lpips | None,
) -> dict:
    """Return values and verdict of a candidate and of its tiles; of tiles LPIPS only with
    --every-tile.
    """
    baseline, candidate = pair
    tiles = find_tiles(a, b)
    if args.every_tile and not tiles:
        raise UsageError(
            f"{candidate}: {a.shape[1]}x{a.shape[0]} px is not a grid in sample.png's layout; "
            "drop --every-tile"
        )
    records = []
    for tile in tiles:
        lpips_of_tile = lpips if args.every_tile else None
        record = judge_pixels(a[tile.place], b[tile.place], args.thresholds, lpips_of_tile)
        records.append({"tile": tile.name, **record})
    return {
        "file": str(candidate),
        "baseline": str(baseline),
        **judge_pixels(a, b, args.thresholds, lpips),
        "tiles": records,
    }


def summary(values: dict[str, float]) -> str:
    """Return the values in one line, MAE in levels."""
    return "   ".join(SHORT[metric].format(values[metric]) for metric in SHORT if metric in values)


def json_ready(value: dict) -> dict:
    """Replace inf and NaN, which JSON lacks, by the strings that Python's float() reads back."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: str(float(constant)))


def heatmap(
    path: Path, a: np.ndarray, b: np.ndarray, values: dict, names: Sequence[str], verdict: str
) -> None:
    """Write baseline, candidate and their difference as a PNG: of each pixel the channel
    that differs most.
    """
    from matplotlib.figure import Figure

    difference = np.abs(a.astype(np.int16) - b).max(2)  # (H, W) in levels
    y, x = np.unravel_index(difference.argmax(), difference.shape)
    most = difference.max()
    wide = difference.shape[1] > 1.6 * difference.shape[0]
    figure = Figure((11, 17) if wide else (16, 6), layout="constrained")
    axes = figure.subplots(3, 1) if wide else figure.subplots(1, 3)
    titles = (
        f"baseline: {names[0]}",
        f"candidate: {names[1]}",
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
    figure.suptitle(f"{verdict}     {summary(values)}", fontsize=13, fontweight="bold")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=110)


def metric_names(text: str) -> list[str]:
    """Return the metrics that a value of --metrics names, separated by commas."""
    names = text.split(",")
    if not METRICS.keys() >= set(names):
        raise argparse.ArgumentTypeError(f"{text!r}: give one or more of {' '.join(METRICS)}")
    return names


def join_metrics(words: list[str]) -> list[str]:
    """Return the words of a command with the names after --metrics as one word, so that
    files may follow them: --metrics mae psnr A B → --metrics=mae,psnr A B.
    """
    joined = [""]
    for word in words:
        flag, _, names = joined[-1].partition("=")
        if flag == "--metrics" and word in METRICS:
            joined[-1] = f"--metrics={names},{word}" if names else f"--metrics={word}"
        else:
            joined.append(word)
    return joined[1:]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("baseline", type=Path, help="the reference picture, or a folder of them")
    add(
        "candidate",
        type=Path,
        help="the picture to judge, or a folder of pictures, all of which must pass; a folder "
        "against a folder compares files of the same name",
    )
    add(
        "--gate",
        choices=GATES,
        default="contest",
        help=f"thresholds; strict: MAE <= 0.01 {LEVELS} (default: contest)",
    )
    add(
        "--metrics",
        nargs="?",
        const="",  # no name: metric_names refuses it
        type=metric_names,
        default=[*METRICS],
        metavar="NAME",
        help=f"judge by these only, of {' '.join(METRICS)} (default: all)",
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
    words = sys.argv[1:] if argv is None else argv
    args, others = parser.parse_known_args(join_metrics(words))
    if others:
        parser.error(
            f"unrecognized arguments: {' '.join(others)}; give a baseline, a candidate "
            f"and flags; metrics are {', '.join(METRICS)}"
        )
    gate = GATES[args.gate]
    args.thresholds = {metric: gate[metric] for metric in METRICS if metric in args.metrics}
    return args


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder, sorted by name; none if it is not a folder."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)


def find_pairs(baseline: Path, candidate: Path) -> list[tuple[Path, Path]]:
    """Return the files to compare, the baseline first: a baseline with a candidate or with
    every picture in a folder, or the pictures of the same name in two folders.
    """
    candidates = pictures_in(candidate) or [candidate]
    if baseline.is_dir() and candidate.is_dir():
        return [(baseline / path.name, path) for path in candidates]
    return [(baseline, path) for path in candidates]


def prepare(args: argparse.Namespace, report: dict) -> None:
    """Find the inputs, remove what an earlier run left, and refuse outputs that are
    inputs or cannot be written.
    """
    args.pairs = find_pairs(args.baseline, args.candidate)
    inputs = {*chain.from_iterable(args.pairs), args.vgg_weights}
    taken = [path.resolve() for path in inputs if path is not None]
    for flag, path in (("--heatmap", args.heatmap), ("--json", args.json)):
        if path is not None:
            try:
                if path.resolve() in taken or (path.exists() and not path.is_file()):
                    raise FileExistsError(0, "is an input or not a file")
                path.unlink(missing_ok=True)  # a link too: nothing is written through one
                path.touch(exist_ok=False)
                path.unlink()
            except OSError as error:
                raise UsageError(f"{flag} {path}: {error.strerror}; name another file") from None
            taken.append(path.resolve())


def check_inputs(args: argparse.Namespace) -> None:
    """Raise UsageError unless two folders hold pictures of the same names."""
    for folder in (args.baseline, args.candidate):
        if folder.is_dir() and not pictures_in(folder):
            raise UsageError(f"{folder}: holds no picture; name another")
    if args.baseline.is_dir() and args.candidate.is_file():
        raise UsageError(
            f"{args.baseline}: is a folder, and {args.candidate} is not; name two pictures or two "
            "folders"
        )
    if args.baseline.is_dir() and args.candidate.is_dir():
        names = {path.name for path in pictures_in(args.baseline)}
        alone = sorted(names ^ {path.name for path in pictures_in(args.candidate)})
        if alone:
            folder = args.candidate if alone[0] in names else args.baseline
            raise UsageError(
                f"{folder}: lacks {alone[0]} ({len(alone)} names are in one folder only); compare "
                "folders with the same names"
            )


def mean_of(values: list[float]) -> float:
    """Return the mean of the values without infinities, the PSNR of equal pictures; infinity if
    there are no others.
    """
    others = [value for value in values if value != math.inf]
    return float(np.mean(others)) if others else math.inf


def print_table(
    mean: dict[str, float], worst: dict[str, float], files: int, args: argparse.Namespace
) -> None:
    """Print the lines of the contest's script for the mean of all files, and each metric's worst
    value with its threshold.
    """
    print("=== Image Comparison Metrics ===")
    for metric, value in mean.items():
        print(METRICS[metric].format(value))
    gate = args.gate
    if files > 1:
        print(f"\nThese are means of {files} files; PSNR's leaves equal pictures out.")
        gate += f", the worst of {files} files"
    print(f"\nMAE is for pixels {LEVELS}. The gate divides it by 255.\nGate: {gate}")
    results = judge(worst, args.thresholds)
    for metric, threshold in args.thresholds.items():
        value = worst[metric]
        rows = {metric.upper(): (value, threshold)}
        if metric == "mae":
            rows = {"MAE of 0-1": (value / 255, threshold)}
            rows[f"MAE {LEVELS}"] = value, threshold * 255
        sign, _ = CRITERIA[metric]
        result = results[metric].replace("NONE", "NOT COMPUTED")
        for label, (value, threshold) in rows.items():
            print(f"  {label:14}{value:<12.6g}{sign:3}{threshold:<12.6g}{result}")


def print_records(records: list[dict], every_tile: bool) -> None:
    """Print a line for each picture and each tile."""
    for record in records:
        name = record["file"]
        print(f"\n{name}: {summary(record['values'])}   {record['verdict']}")
        for tile in record["tiles"]:
            verdict = f"   {tile['verdict']}" if every_tile else ""
            print(f"  {tile['tile']:6}{summary(tile['values'])}{verdict}")


def draw_worst(args: argparse.Namespace, records: list[dict]) -> None:
    """Write the heatmap of the record with the least PSNR."""
    worst = min(records, key=lambda record: record["values"]["psnr"])
    pair = Path(worst["baseline"]), Path(worst["file"])
    a, b = [read_picture(path).pixels for path in pair]
    names = [path.name for path in pair]
    heatmap(args.heatmap, a, b, worst["values"], names, worst["verdict"])


def overall(verdicts: Iterable[str]) -> str:
    """Return the verdict of several: FAIL before NONE before PASS; NONE of nothing."""
    return min(verdicts, key=["FAIL", "NONE", "PASS"].index, default="NONE")


def run(args: argparse.Namespace, report: dict) -> None:
    """Judge what the arguments name, print the figures and fill the report."""
    check_inputs(args)
    lpips = Lpips(args.vgg_weights) if "lpips" in args.metrics else None
    read = lru_cache(maxsize=2)(read_picture)  # a baseline may be that of all candidates
    records = []
    lossy = {}  # file → its compression
    for pair in args.pairs:
        pictures = [read(path) for path in pair]
        lossy |= {path: each.lossy for path, each in zip(pair, pictures) if each.lossy}
        a, b = pictures
        if (a.size, a.mode) != (b.size, b.mode):
            raise UsageError(
                f"{pair[0]} has {a.size} px, {a.mode}, {pair[1]} has {b.size} px, {b.mode}; save "
                "both alike"
            )
        records.append(judge_pair(args, pair, a.pixels, b.pixels, lpips))
    mean = {}
    worst = {}
    for metric in records[0]["values"]:
        values = [record["values"][metric] for record in records]
        mean[metric] = mean_of(values)
        worst_of = np.max if CRITERIA[metric][1] is le else np.min
        worst[metric] = float(worst_of(values))
    print_table(mean, worst, len(records), args)
    print_records(records, args.every_tile)
    if args.heatmap:
        draw_worst(args, records)
    judged = list(records)
    if args.every_tile:
        judged += chain.from_iterable(record["tiles"] for record in records)
    verdict = overall(record["verdict"] for record in judged)
    if lossy:
        path, compression = next(iter(lossy.items()))
        print(
            f"note: {compression} is lossy, and the figures include its loss: "
            f"{path}{f' and {len(lossy) - 1} more' if len(lossy) > 1 else ''}; "
            "compare PNGs"
        )
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
    # a dict keeps the order
    for reason in dict.fromkeys(chain.from_iterable(record["reasons"] for record in judged)):
        print(f"evaluate.py: {reason}", file=sys.stderr)
    print(f"VERDICT: {verdict} ({applying})")
    report.update(
        verdict=verdict,
        exit_status=EXIT_STATUS[verdict],
        gate=args.gate,
        thresholds=args.thresholds,
        mae_units={"values": "0-255", "thresholds": "0-1"},
        mean=mean,
        worst=worst,
        files=records,
        vgg_weights=vgg,
    )


def write_json(args: argparse.Namespace, report: dict) -> None:
    if args.json:
        with atomic_write(args.json, "w") as file:
            file.write(json.dumps(json_ready(report), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Compare the pictures; draw the heatmap and write the JSON report if asked for. Return
    the exit status. The report includes the error of an earlier step that failed.
    """
    args = arguments(argv)
    warnings.filterwarnings("ignore", module="PIL")  # the reader's error is the line
    report = {"verdict": "NONE", "exit_status": 0}
    for step in (prepare, run, write_json):
        try:
            step(args, report)
        except Exception as error:
            # a name that no file system takes too
            bad = step is prepare or isinstance(error, (UsageError, OSError))
            report["error"] = f"{error!s:.500}" if bad else repr(error)
            report["exit_status"] = USAGE if bad else EXIT_STATUS["NONE"]
            if not bad:
                traceback.print_exc()
            print(f"evaluate.py: {report['error']}", file=sys.stderr)
            if step is prepare:
                break
    return report["exit_status"]


if __name__ == "__main__":
    sys.exit(main())
