"""Compare a sampled picture with its baseline: MAE, LPIPS (VGG16), PSNR, SSIM, and a
verdict.

    python evaluate.py baseline.png sample.png
    python evaluate.py baseline.png folder/ --gate strict --every-tile --heatmap heat.png --json
    verdict.json

The values are those of torchmetrics 1.7.3 with its defaults, on pictures scaled to 0..1,
the baseline given first, computed on the CPU, so that the verdict does not depend on the
GPU under test. Exit status: 0 pass · 1 fail · 2 bad input · 3 a metric could not be
computed (never a pass) · 130 Ctrl-C.
"""

import argparse
import hashlib
import io
import json
import math
import os
import re
import socket
import sys
import traceback
import warnings
from contextlib import redirect_stdout, suppress
from operator import ge, gt, le
from pathlib import Path


def _end(status, text, stream=sys.stderr):
    """Print `text` and exit. A stream that is closed, full or no longer read does not
    change the status.
    """
    with suppress(OSError, AttributeError):
        # an ASCII terminal degrades a file's name, not the run
        stream.reconfigure(errors="backslashreplace")
        print(text, end="", file=stream, flush=True)
    os._exit(status)


def _traced(error):
    """Return where `error` was raised, for whoever changes this file: with DIT_TRACEBACK=1,
    which tests set.
    """
    if os.environ.get("DIT_TRACEBACK") != "1" or isinstance(error, KeyboardInterrupt):
        return ""
    return "".join(traceback.format_exception(error))


def _crash(error_type, error, _):
    """End with status 3: Python's own status for a crash is 1, which would say FAIL."""
    status = 130 if error_type is KeyboardInterrupt else 3
    _end(status, f"{_traced(error)}evaluate.py: {error!r}\n")


if __name__ == "__main__":
    sys.excepthook = _crash  # before the imports that take long

import numpy as np
from PIL import Image

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
CRITERIA = {"mae": ("<=", le), "lpips": ("<=", le), "psnr": (">", gt), "ssim": (">=", ge)}
# own thresholds
FLAGS = {"mae": "--max-mae", "lpips": "--max-lpips", "psnr": "--min-psnr", "ssim": "--min-ssim"}
BAD_INPUT = 2
EXIT_STATUS = {"PASS": 0, "FAIL": 1, "NONE": 3}
# the pictures of a folder: all that read_picture takes
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VGG16_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
VGG16_SHA256 = "397923af"  # its first eight digits, as torch's hub names the file


class BadInput(Exception):
    """The user's input cannot be compared (exit status 2)."""


class NotComputed(Exception):
    """A metric has no value (exit status 3)."""


def read_picture(path: Path) -> Image.Image:
    """Return the picture in `path`. Raises BadInput unless it is one undamaged picture of
    8 bits without alpha.
    """
    try:
        with Image.open(path, formats=("PNG", "JPEG", "WEBP", "BMP")) as image:
            if image.width * image.height > 64 * 2**20:  # a grid of 8192 x 8192
                raise ValueError(f"{image.width}x{image.height} px, a decompression bomb")
            # Pillow drops the low byte of 16-bit colour without a word.
            bits = Path(path).read_bytes()[24] if image.format == "PNG" else 8
            frames = getattr(image, "n_frames", 1)
            if bits > 8 or frames > 1 or image.has_transparency_data:
                raise ValueError(f"{frames} frames of {bits} bits a sample, mode {image.mode}")
            image.load()
            return image
    except Exception as error:  # Pillow raises many types on damaged files
        raise BadInput(
            f"{path}: {error!r:.200}; give one undamaged picture of 8 bits, without alpha"
        ) from None


def pixel_pair(baseline: Image.Image, candidate: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return both pictures as (H, W, 3) uint8. Raises BadInput for different sizes or modes."""
    if (baseline.size, baseline.mode) != (candidate.size, candidate.mode):
        have = [
            f"{one.filename} has {one.width}x{one.height} px, {one.mode}"
            for one in (baseline, candidate)
        ]
        raise BadInput(f"{', '.join(have)}; save both alike")
    return np.asarray(baseline.convert("RGB")), np.asarray(candidate.convert("RGB"))


def mae(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean absolute difference in 0..255 levels. a: baseline, b: candidate,
    (H, W, 3) uint8 as below.
    """
    return float(np.abs(a.astype(np.int16) - b).mean(dtype=np.float64))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return 10·log10(R²/MSE) in dB, R the largest value of b, as in torchmetrics. NaN
    for two black pictures.
    """
    a = np.float32(a) / 255
    b = np.float32(b) / 255
    mse = np.square(a - b).mean(dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(20 * np.log10(np.float64(b.max())) - 10 * np.log10(mse))


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
    # scikit-image crops 5
    a, b = (np.pad(x, ((5, 5), (5, 5), (0, 0)), mode="reflect") for x in (a, b))
    window = dict(gaussian_weights=True, sigma=1.5, use_sample_covariance=False)
    return float(structural_similarity(a, b, data_range=data_range, channel_axis=-1, **window))


class Lpips:
    """LPIPS (Zhang et al. 2018, arXiv:1801.03924, eq. 1) by the lpips package's VGG16,
    loaded when a pair needs it.

    weights: a torchvision VGG16 checkpoint; None is the one in torch's hub cache, fetched
    on first use. Once loaded, `source` has its path, its sha256 and whether it is the
    published one.
    """

    def __init__(self, weights: Path | None = None):
        self.weights = weights
        self.source = None
        self._network = None  # the network, or why there is none

    def __call__(self, a: np.ndarray, b: np.ndarray) -> float:
        """Return the distance of two pictures. Raises NotComputed."""
        if np.array_equal(a, b):
            return 0.0  # by definition, without the network
        if min(a.shape[:2]) < 16:
            raise NotComputed(
                "LPIPS: VGG16 halves four times: pictures need 16x16 px, not "
                f"{a.shape[1]}x{a.shape[0]}"
            )
        self._network = self._network or self._load()
        if isinstance(self._network, NotComputed):
            raise self._network
        return math.fsum(self._slices(self._network, a, b))

    def _load(self):
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
            board = (np.indices((32, 32, 3))[:2].sum(0) // 4 % 2 * 255).astype(np.uint8)
            if not all(
                0 < part < math.inf
                for part in self._slices(network, board, np.full_like(board, 128))
            ):
                raise ValueError("it cannot tell a checkerboard from grey")
        # no network connection, disk full, wrong hash, other weights: one remedy
        except Exception as error:
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
        import torch

        distances = []
        with torch.inference_mode():
            # each (1, 3, H, W)
            maps = [torch.from_numpy(np.float32(x) / 255).permute(2, 0, 1)[None] for x in (a, b)]
            maps = [network.scaling_layer(2 * x - 1) for x in maps]
            for run, head in zip(network.net.children(), network.lins):
                maps = [run(x) for x in maps]  # each (1, C, H', W')
                # Unit vectors along C, 1e-8 inside the root as in torchmetrics; made one
                # by one, freed at once.
                units = (
                    x * (torch.linalg.vector_norm(x, dim=1, keepdim=True).square() + 1e-8).rsqrt()
                    for x in maps
                )
                distances.append(head(next(units).sub_(next(units)).square_()).mean().item())
        return distances


def measure(
    a: np.ndarray, b: np.ndarray, lpips: Lpips | None = None
) -> tuple[dict[str, float], list[str]]:
    """Return {metric: value}, mae in 0..255 levels, and the reason for every NaN. Without
    `lpips`, three metrics.
    """
    values = {}
    reasons = []
    for metric, function in {"mae": mae, "lpips": lpips, "psnr": psnr, "ssim": ssim}.items():
        if function is not None:
            try:
                values[metric] = function(a, b)
                if math.isnan(values[metric]):
                    raise NotComputed(
                        f"{metric.upper()}: undefined for constant, black or tiny pictures"
                    )
            except NotComputed as failure:
                values[metric] = math.nan
                reasons.append(str(failure))
    return values, reasons


def judge(values: dict[str, float], thresholds: dict[str, float]) -> dict[str, bool | None]:
    """Return whether each value (mae in levels) meets its threshold (mae of 0..1), if it
    has one; None for NaN.
    """
    scaled = values | {"mae": values["mae"] / 255}
    limits = {metric: limit for metric, limit in thresholds.items() if metric in values}
    meets = {metric: CRITERIA[metric][1](scaled[metric], limit) for metric, limit in limits.items()}
    return {metric: None if math.isnan(scaled[metric]) else met for metric, met in meets.items()}


def find_tiles(
    a: np.ndarray, b: np.ndarray, asked: tuple[int, int] | None = None
) -> list[tuple[str, slice, slice]]:
    """Return the pictures of a grid as ("row,column", pixel rows, pixel columns); none if
    it is not a grid.

    asked: (rows, columns). None looks for sample.png's layout: square pictures, four a
    row (fewer if there is one row only), with black lines of 2 px between and around
    them.
    """
    height = a.shape[0] - 2
    width = a.shape[1] - 2
    line = 2
    for rows, columns in [asked] if asked else [(height * 4 // max(width, 1), 4), (1, 3), (1, 2)]:
        if min(rows, columns) < 1 or height % rows or width % columns:
            continue
        tall = height // rows
        wide = width // columns  # a picture and the line before it
        y, x = np.ogrid[: a.shape[0], : a.shape[1]]
        lines = (y % tall < line) | (x % wide < line)
        if min(tall, wide) <= line or (
            not asked and (tall != wide or tall < 16 + line or a[lines].any())
        ):
            continue
        corners = [(row * tall, column * wide) for row, column in np.ndindex(rows, columns)]
        tiles = [(slice(y + line, y + tall), slice(x + line, x + wide)) for y, x in corners]
        while tiles and not a[tiles[-1]].any() and not b[tiles[-1]].any():
            tiles.pop()  # the last row may be unfilled
        return [
            (f"{index // columns + 1},{index % columns + 1}", *tile)
            for index, tile in enumerate(tiles)
        ]
    return []


def judge_file(
    args: argparse.Namespace, baseline: Image.Image, path: Path, lpips: Lpips | None
) -> dict:
    """Return values and verdict of a candidate and of its tiles; of tiles LPIPS only with
    --every-tile.
    """
    a, b = pixel_pair(baseline, read_picture(path))
    tiles = find_tiles(a, b, args.tiles)
    if (args.tiles or args.every_tile) and not tiles:
        raise BadInput(
            f"{path}: {a.shape[1]}x{a.shape[0]} px is no such grid with lines of 2 px; give "
            "--tiles RxC"
        )

    def judged(a, b, lpips):
        values, reasons = measure(a, b, lpips)
        results = judge(values, args.thresholds).values()
        verdict = "NONE" if None in results else "PASS" if all(results) else "FAIL"
        return {"values": values, "verdict": verdict, "reasons": reasons}

    of_tile = lpips if args.every_tile else None
    tiles = [
        {"tile": name, **judged(a[rows, columns], b[rows, columns], of_tile)}
        for name, rows, columns in tiles
    ]
    return {"file": str(path), **judged(a, b, lpips), "tiles": tiles}


def shown(text: object) -> str:
    """Return `text` on one line, without control characters."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text))


def summary(values: dict[str, float]) -> str:
    return "   ".join(
        f"{metric.upper()} {values[metric]:.4f}" for metric in METRICS if metric in values
    )


def json_ready(value: dict) -> dict:
    """Replace inf and NaN, which JSON lacks, by the strings that Python's float() reads back."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: str(float(constant)))


def heatmap(
    path: Path, a: np.ndarray, b: np.ndarray, values: dict, names: tuple[str, str], verdict: str
) -> None:
    """Write baseline, candidate and their difference (largest channel, amplified by its
    colour scale) as a PNG.
    """
    from matplotlib.figure import Figure

    difference = np.abs(a.astype(np.int16) - b).max(2)  # (H, W) in levels
    (y, x) = np.unravel_index(difference.argmax(), difference.shape)
    most = difference.max()
    wide = difference.shape[1] > 1.6 * difference.shape[0]
    figure = Figure((11, 17) if wide else (16, 6), layout="constrained")
    axes = figure.subplots(3, 1) if wide else figure.subplots(1, 3)
    titles = (
        f"baseline: {names[0]}",
        f"candidate: {names[1]}",
        f"difference: at most {most} of 255, at x {x}, y {y}",
    )
    for axis, pixels, title in zip(axes, (a, b, difference), titles):
        # colours stay as they are
        drawn = axis.imshow(pixels, cmap="inferno", vmin=0, vmax=max(most, 1))
        axis.set_title(
            title.encode(errors="replace").decode(), fontsize=10, loc="left", parse_math=False
        )
    figure.colorbar(
        drawn, ax=axes[2], fraction=0.046, pad=0.015, label="largest channel, levels of 255"
    )
    figure.suptitle(f"{verdict}     {summary(values)}", fontsize=13, fontweight="bold")
    figure.savefig(path, format="png", dpi=110)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("baseline", type=Path, help="the reference picture")
    add(
        "candidate",
        type=Path,
        help="the picture to judge, or a folder of pictures, all of which must pass",
    )
    add(
        "--gate",
        choices=GATES,
        default="contest",
        help="thresholds; strict: MAE <= 0.01 of 0-255 (default: contest)",
    )
    for metric, flag in FLAGS.items():
        unit = " of 0-1" if metric == "mae" else ""
        add(
            flag,
            dest=metric,
            type=float,
            metavar="X",
            help=f"own threshold for {metric.upper()}{unit}",
        )
    add(
        "--metrics",
        nargs="+",
        choices=METRICS,
        default=METRICS,
        help="judge by these only (default: all)",
    )
    add(
        "--tiles",
        metavar="RxC",
        help="rows x columns of the grid; sample.png's layout is found without it",
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
    if given := re.search(
        r"^--[a-z-]+=--$", "\n".join(sys.argv[1:] if argv is None else argv), re.M
    ):
        parser.error(f"{given[0]}: gives no value")
    args = parser.parse_args(argv)
    if args.tiles and not re.fullmatch("[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", args.tiles):
        parser.error("--tiles: give rows x columns, as 2x4")
    args.tiles = args.tiles and tuple(map(int, args.tiles.split("x")))
    own = {metric: getattr(args, metric) for metric in METRICS if getattr(args, metric) is not None}
    for metric, threshold in own.items():
        if metric not in args.metrics or not math.isfinite(threshold):
            parser.error(
                f"{FLAGS[metric]} {threshold}: give a finite number, and {metric} among --metrics"
            )
    args.thresholds = {
        metric: value
        for metric, value in (GATES[args.gate] | own).items()
        if metric in args.metrics
    }
    args.gate += " with own thresholds for " + ", ".join(own).upper() if own else ""
    return args


def prepare(args: argparse.Namespace, report: dict) -> None:
    """Find the inputs, remove what an earlier run left, and refuse outputs that are
    inputs or cannot be written.
    """
    # of a folder
    pictures = sorted(path for path in args.candidate.glob("*") if path.suffix.lower() in SUFFIXES)
    args.files = pictures or [args.candidate]
    args.inputs = [path for path in (args.baseline, *args.files, args.vgg_weights) if path]
    taken = [path.resolve() for path in args.inputs]
    for flag, path in (("--heatmap", args.heatmap), ("--json", args.json)):
        if path is not None:
            try:
                if path.resolve() in taken or (path.exists() and not path.is_file()):
                    raise FileExistsError(0, "is an input or not a file")
                path.unlink(missing_ok=True)  # a link too: nothing is written through one
                path.touch(exist_ok=False)
                path.unlink()
            except OSError as error:
                raise BadInput(f"{flag} {path}: {error.strerror}; name another file") from None
            taken.append(path.resolve())


def run(args: argparse.Namespace, report: dict) -> None:
    """Judge what the arguments name, print the figures and fill the report."""
    for path in args.inputs:
        if not path.is_file():  # a FIFO or a device could block or never end
            folder = (
                "holds no picture"
                if path == args.candidate
                else "is a folder, as only a candidate may be"
            )
            raise BadInput(
                f"{path}: {folder if path.is_dir() else 'no such regular file'}; name another"
            )
    baseline = read_picture(args.baseline)
    lpips = Lpips(args.vgg_weights) if "lpips" in args.metrics else None
    records = [judge_file(args, baseline, path, lpips) for path in args.files]
    mean = {
        metric: float(np.mean([one["values"][metric] for one in records]))
        for metric in records[0]["values"]
    }
    print("=== Image Comparison Metrics ===")
    for metric, value in mean.items():
        print(METRICS[metric].format(value))
    print(f"\nGate: {args.gate}")
    for metric, meets in judge(mean, args.thresholds).items():
        name, value = (
            ("MAE of 0-1", mean["mae"] / 255) if metric == "mae" else (metric.upper(), mean[metric])
        )
        word = {True: "PASS", False: "FAIL", None: "NOT COMPUTED"}[meets]
        print(
            "  "
            f"{name:12}{value:<12.6g}{CRITERIA[metric][0]:3}{args.thresholds[metric]:<12.6g}{word}"
        )
    for record in records:
        print(f"\n{shown(record['file'])}: {summary(record['values'])}   {record['verdict']}")
        for tile in record["tiles"]:
            print(
                f"  {tile['tile']:6}{summary(tile['values'])}",
                *[f"  {tile['verdict']}"] * args.every_tile,
            )
    if args.heatmap:
        worst = min(records, key=lambda record: record["values"]["psnr"])
        a, b = pixel_pair(baseline, read_picture(worst["file"]))
        heatmap(
            args.heatmap,
            a,
            b,
            worst["values"],
            (args.baseline.name, Path(worst["file"]).name),
            worst["verdict"],
        )
    judged = records + [tile for record in records for tile in record["tiles"] if args.every_tile]
    verdict = next(
        word for word in ("NONE", "FAIL", "PASS") if word in [one["verdict"] for one in judged]
    )
    failed = sum(record["verdict"] != "PASS" for record in records)
    vgg = lpips and lpips.source
    caveats = {
        f"gate {args.gate}": True,
        "a metric could not be computed": verdict == "NONE",
        f"{failed} of {len(records)} pictures do not pass": failed and len(records) > 1,
        "every tile held to it": args.every_tile,
        f"judged by {', '.join(args.thresholds).upper()}": len(args.thresholds) < len(METRICS),
        "not the published VGG16": vgg and not vgg["published"],
    }
    for reason in dict.fromkeys(reason for one in judged for reason in one["reasons"]):
        print(f"evaluate.py: {shown(reason)}", file=sys.stderr)
    print(
        f"VERDICT: {verdict} "
        f"({'; '.join(caveat for caveat, applies in caveats.items() if applies)})"
    )
    report.update(
        verdict=verdict,
        exit_status=EXIT_STATUS[verdict],
        gate=args.gate,
        thresholds=args.thresholds,
    )
    report.update(mean=mean, files=records, vgg_weights=vgg)


def write_json(args: argparse.Namespace, report: dict) -> None:
    if args.json:
        args.json.write_text(json.dumps(json_ready(report), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    report = {"verdict": "NONE", "exit_status": 0}
    for step, output in ((prepare, None), (run, args.heatmap), (write_json, args.json)):
        try:
            step(args, report)
        except Exception as error:
            # a name that no file system takes too
            bad = step is prepare or isinstance(error, (BadInput, OSError))
            report["error"] = f"{error!s:.500}" if bad else repr(error)
            report["exit_status"] = BAD_INPUT if bad else EXIT_STATUS["NONE"]
            if output:
                # torn by a full disk; a run that failed is still reported
                output.unlink(missing_ok=True)
            trace = "" if bad else _traced(error)
            print(f"{trace}evaluate.py: {shown(report['error'])}", file=sys.stderr)
            if step is prepare:
                break
    return report["exit_status"]


if __name__ == "__main__":
    with redirect_stdout(io.StringIO()) as said:
        try:
            status = main()
        except SystemExit as leaving:  # argparse's
            status = leaving.code
    _end(status, said.getvalue(), sys.stdout)
