"""Compare a sampled picture with its baseline: mean absolute difference, LPIPS (VGG16), PSNR, SSIM, and a verdict.

    python evaluate.py baseline.png sample.png
    python evaluate.py baseline.png folder/ --gate strict --every-tile --heatmap heat.png --json verdict.json
    python evaluate.py --latents baseline.npy sample.npy

The numbers are those of torchmetrics 1.7.3 with its defaults, on pictures scaled to 0..1, the baseline given first.
Everything runs on the CPU, so that the verdict does not depend on the GPU under test.

Exit status: 0 passes · 1 falls short · 2 bad input · 3 a metric could not be computed (never a PASS).
"""

import argparse
import hashlib
import json
import math
import os
import socket
import struct
import sys
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

PASSES, FALLS_SHORT, BAD_INPUT, NOT_COMPUTED = 0, 1, 2, 3
METRICS = ("mae", "lpips", "psnr", "ssim")
LABELS = {"mae": "MAE", "lpips": "LPIPS", "psnr": "PSNR", "ssim": "SSIM"}
GATES = {  # mae in the 0..1 range; strict asks 0.01 of a 0..255 level
    "contest": {"mae": 0.01, "lpips": 0.01, "psnr": 40.0, "ssim": 0.99},
    "strict": {"mae": 0.01 / 255, "lpips": 0.01, "psnr": 40.0, "ssim": 0.99},
}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg")  # what is looked at in a folder
MAX_PIXELS = 64 * 2**20  # an 8192 x 8192 grid; more is refused as a decompression bomb
GRID_PADDING = 2  # torchvision's make_grid and save_image
VGG16_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
VGG16_SHA256 = "397923af"  # as torch's hub names it: the first eight digits
STRIP = 2 * 2**20  # values of one feature map held at once, a picture
WINOGRAD_TILES = 512  # tiles in work at once
NETWORK_TIMEOUT = 10  # seconds


class BadInput(Exception):
    """The user's input cannot be compared (exit 2)."""


class NotComputed(Exception):
    """A metric has no value (exit 3)."""


# ---- pictures ------------------------------------------------------------------------------------------------------


@dataclass
class Picture:
    path: Path
    pixels: np.ndarray  # (H, W, 3) uint8
    mode: str  # what the file holds, as "RGB, 8 bit"
    alpha: "np.ndarray | None"  # (H, W) uint8
    notes: list = field(default_factory=list)

    @property
    def size(self):
        return f"{self.pixels.shape[1]}x{self.pixels.shape[0]}"


def _bits(path, image):
    """Bits a sample. Pillow reduces 16-bit colour PNGs to 8 bits without a word, so their header is read here."""
    if image.format == "PNG":
        with open(path, "rb") as file:
            return max(8, file.read(25)[24])  # signature 8, IHDR length and name 8, width 4, height 4, then the depth
    if image.format == "TIFF":
        return max(8, *np.atleast_1d(image.tag_v2.get(258, 8)))
    return 8


def read_picture(path):
    """The picture in `path` as RGB, 8 bit: (H, W, 3) uint8. Whatever was done to get there stands in `notes`.

    Raises BadInput for what is unreadable, truncated, damaged, animated, too large or of another sample type."""
    path = Path(path)
    if path.is_dir():
        raise BadInput(f"{path}: is a folder; name a picture")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is the lower one
            with Image.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise BadInput(
                        f"{path}: {width}x{height} px is more than {MAX_PIXELS} pixels; refused as a decompression bomb"
                    )
                if getattr(image, "n_frames", 1) > 1:
                    raise BadInput(f"{path}: holds {image.n_frames} frames; save one picture")
                bits = _bits(path, image)
                image.verify()  # checks every chunk of a PNG; the file has to be opened anew after it
            with Image.open(path, formats=FORMATS) as image:
                image.load()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except Image.DecompressionBombError:
        raise BadInput(f"{path}: more than {MAX_PIXELS} pixels; refused as a decompression bomb") from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        MemoryError,
        struct.error,
    ) as error:  # what Pillow raises on damaged files
        raise BadInput(
            f"{path}: not a readable picture ({' '.join(str(error).split()) or type(error).__name__}); "
            f"give an undamaged {', '.join(FORMATS)} file"
        ) from None

    mode, notes, alpha = f"{image.mode}, {bits} bit", [], None
    has_alpha = "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info
    if image.mode.startswith("I;16") or (image.mode == "I" and bits == 16):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise BadInput(f"{path}: samples outside 0..65535; save it with 8 bits")
        image, mode = Image.fromarray((levels >> 8).astype(np.uint8)), "L, 16 bit"
    elif image.mode in ("I", "F") or bits > 16:
        raise BadInput(f"{path}: mode {mode}: only 8 and 16 bits a sample are understood; save it as RGB, 8 bit")
    if bits == 16:
        notes.append("16-bit samples reduced to 8 bits (high byte)")
    if has_alpha:
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
        notes.append("alpha channel dropped (not composed)")
        image = image.convert("RGBA")
    if image.mode not in ("RGB", "RGBA"):
        notes.append(f"{image.mode} converted to RGB")
    return Picture(path, np.asarray(image.convert("RGB")), mode, alpha, notes)


def matched(baseline, candidate, resize):
    """`candidate` in the size of `baseline`; BadInput where size, mode or alpha differ and `resize` is off."""
    notes = list(candidate.notes)
    if candidate.mode != baseline.mode:
        if not resize:
            raise BadInput(
                f"{baseline.path} is {baseline.mode}, {candidate.path} is {candidate.mode}; save both in one "
                "mode, or give --resize to compare both as RGB"
            )
        notes.append(f"mode {candidate.mode} compared with {baseline.mode}, both as RGB")
    if candidate.size != baseline.size:
        if not resize:
            raise BadInput(
                f"{baseline.path} is {baseline.size} px, {candidate.path} is {candidate.size} px; give pictures "
                "of one size, or --resize to scale the candidate (Lanczos)"
            )
        height, width = baseline.pixels.shape[:2]
        scaled = Image.fromarray(candidate.pixels).resize((width, height), Image.Resampling.LANCZOS)
        notes.append(f"resized from {candidate.size} to {baseline.size} px (Lanczos)")
        return Picture(candidate.path, np.asarray(scaled), candidate.mode, None, notes)
    if candidate.alpha is not None and baseline.alpha is not None and (candidate.alpha != baseline.alpha).any():
        raise BadInput(
            f"{baseline.path} and {candidate.path} differ in their alpha channels, which no metric sees; save "
            "both without alpha"
        )
    return Picture(candidate.path, candidate.pixels, candidate.mode, candidate.alpha, notes)


# ---- metrics -------------------------------------------------------------------------------------------------------


def unit_range(pixels):
    """(H, W, 3) uint8 → float32 in 0..1, rounded as torchvision's ToTensor does."""
    return pixels.astype(np.float32) / np.float32(255)


def mae(a, b):
    """Mean absolute difference of two (H, W, 3) uint8 pictures, in 0..255 levels."""
    return float(np.abs(a.astype(np.int16) - b).mean(dtype=np.float64))


def psnr(a, b):
    """10·log10(R²/MSE) in dB. R is the largest value of the second picture: what torchmetrics' PeakSignalNoiseRatio()
    infers, since it tracks the second picture's range from a start of 0. Identical: inf. Black b: -inf. Both: NaN."""
    a, b = unit_range(a), unit_range(b)
    mse = np.square(a - b).mean(dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(20 * np.log10(np.float64(b.max())) - 10 * np.log10(mse))


def ssim(a, b):
    """Mean structural similarity (Wang et al. 2004, eq. 13): 11×11 Gaussian window, σ 1.5, population covariance, data
    range the larger of the two pictures' own (max - min), borders kept by reflecting 5 pixels.

    NaN where both pictures are constant (the range is 0 and the index 0/0) or a side is under 6 pixels. float64, where
    torchmetrics computes in float32: for pictures of a few levels' range that rounds away more than 1e-4."""
    from skimage.metrics import structural_similarity

    a, b = unit_range(a).astype(np.float64), unit_range(b).astype(np.float64)
    data_range = max(np.ptp(a), np.ptp(b))
    if data_range == 0 or min(a.shape[:2]) < 6:
        return math.nan
    a, b = (np.pad(x, ((5, 5), (5, 5), (0, 0)), mode="reflect") for x in (a, b))  # scikit-image crops 5
    return float(
        structural_similarity(
            a, b, data_range=data_range, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
    )


class Lpips:
    """LPIPS (Zhang et al. 2018, 1801.03924, eq. 1) with VGG16, loaded when a pair first needs it.

    `weights` is a torchvision VGG16 checkpoint; None means torch's hub cache, filled on first use."""

    def __init__(self, weights=None):
        self.weights, self.source = weights, None
        self._failure = self._stages = None

    def __call__(self, a, b):
        """Two (H, W, 3) uint8 pictures → their distance. Raises NotComputed."""
        if np.array_equal(a, b):
            return 0.0  # by definition; the one pair that does not pass through the network
        if self._failure:
            raise self._failure  # one download attempt, not one a picture
        try:
            if self._stages is None:
                self._load()
            return self._distance(a, b)
        except NotComputed as failure:
            self._failure = failure if self._stages is None else None
            raise

    def _file(self):
        import torch

        if self.weights is not None:
            return Path(self.weights)
        path = Path(torch.hub.get_dir(), "checkpoints", Path(VGG16_URL).name)
        if path.exists():
            return path
        timeout = socket.getdefaulttimeout()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            socket.setdefaulttimeout(NETWORK_TIMEOUT)  # torch's hub sets none
            torch.hub.download_url_to_file(VGG16_URL, str(path), VGG16_SHA256, progress=sys.stderr.isatty())
        except Exception as error:  # refused, no route, disk full, wrong hash, ...: the remedy is the same
            raise NotComputed(
                f"LPIPS: {VGG16_URL} cannot be fetched ({error}); put that file at {path}, or name it with "
                "--vgg-weights PATH"
            ) from None
        finally:
            socket.setdefaulttimeout(timeout)
        return path

    def _load(self):
        path = self._file()
        import lpips
        import torch

        try:
            # The published file is in torch's older format, which cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            state = {name: value for name, value in state.items() if name.startswith("features.")}  # 59 of 553 MB
            heads = torch.load(
                Path(lpips.__file__).with_name("weights") / "v0.1" / "vgg.pth", map_location="cpu", weights_only=True
            )
            with warnings.catch_warnings(), torch.device("meta"):  # without filling 138 M random numbers
                warnings.simplefilter("ignore", UserWarning)  # lpips' call of torchvision is dated
                network = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False)
            tensors = {
                "scaling_layer.shift": network.scaling_layer.shift,
                "scaling_layer.scale": network.scaling_layer.scale,
            }
            for name in network.state_dict():
                layer, _, rest = name.partition(".")
                if layer == "net":  # net.slice2.5.weight → features.5.weight
                    tensors[name] = state["features." + rest.partition(".")[2]].float()
                elif layer == "lins":  # lpips lists its heads twice
                    tensors[name] = heads["lin" + rest]
                elif layer.startswith("lin"):
                    tensors[name] = heads[name]
            network.load_state_dict(tensors, strict=True, assign=True)
        except Exception as error:
            raise NotComputed(
                f"LPIPS: {path} does not load as torchvision's VGG16 ({' '.join(str(error).split())[:160]}); "
                f"replace it by {VGG16_URL}"
            ) from None
        self._scale = network.scaling_layer
        self._stages = []
        for i in range(5):
            convs = [m for m in getattr(network.net, f"slice{i + 1}") if isinstance(m, torch.nn.Conv2d)]
            self._stages.append(
                (
                    [
                        (_winograd_kernel(c.weight) if c.in_channels > 3 else c.weight.detach(), c.bias.detach())
                        for c in convs
                    ],
                    network.lins[i].model[1].weight.detach().flatten(),
                )
            )

        with open(path, "rb") as file:
            digest = (
                hashlib.file_digest(file, "sha256").hexdigest()
                if sys.version_info >= (3, 11)
                else hashlib.sha256(file.read()).hexdigest()
            )
        published = digest.startswith(VGG16_SHA256)
        self.source = {"path": str(path), "sha256": digest, "published": published}
        # Zeroed or broken weights would call every pair alike: all five stages must tell a checkerboard from grey.
        probe = np.indices((32, 32)).sum(0) // 4 % 2 * 255
        stages = self._distances(
            np.repeat(probe[..., None], 3, 2).astype(np.uint8), np.full((32, 32, 3), 128, np.uint8)
        )
        if not all(0 < stage < math.inf for stage in stages):
            self._stages = None
            raise NotComputed(
                f"LPIPS: {path}: this network cannot tell a checkerboard from grey; replace it by {VGG16_URL}"
            )

    def _distance(self, a, b):
        if min(a.shape[:2]) < 16:
            raise NotComputed(
                f"LPIPS: VGG16 halves four times, so pictures need 16x16 px; these have {a.shape[1]}x{a.shape[0]}"
            )
        return math.fsum(self._distances(a, b))

    def _distances(self, a, b):
        """The five stages' distances. Each stage runs over strips of rows, both pictures together, so that no full
        feature map but the pooled ones is held; a strip's halo covers what its convolutions see, so nothing changes."""
        import torch
        import torch.nn.functional as F

        distances = []
        with torch.inference_mode():
            x = torch.stack([torch.from_numpy(unit_range(p)).permute(2, 0, 1) for p in (a, b)])  # (2, 3, H, W)
            x = self._scale(2 * x - 1).permute(0, 2, 3, 1)  # (2, H, W, 3)
            for convs, weight in self._stages:
                halo = len(convs)  # 3×3: one row each
                height, width = x.shape[1:3]
                rows = max(16, STRIP // (width * len(weight)) // 2 * 2)  # even, for the pooling
                total, pooled = 0.0, []
                for top in range(0, height, rows):
                    first = max(top - halo, 0)
                    y = x[:, first : top + rows + halo]
                    for kernel, bias in convs:
                        if kernel.ndim == 4:  # the first one, from three channels
                            y = F.conv2d(y.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1).contiguous()
                        else:
                            y = _winograd(y, kernel)
                        y = y.add_(bias).relu_()
                    y = y[:, top - first : top - first + rows]  # (2, rows, W, C)
                    for row in y.unbind(1):  # (2, W, C): a row at a time stays in the cache
                        # 1e-8 inside the root, as torchmetrics has it.
                        unit = row * row.square().sum(2, keepdim=True).add_(1e-8).rsqrt_()
                        total += float(((unit[0] - unit[1]).square_() @ weight).sum(dtype=torch.float64))
                    if len(distances) < 4 and y.shape[1] > 1:
                        pooled.append(F.max_pool2d(y.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1))
                distances.append(total / (height * width))
                x = torch.cat(pooled, 1) if pooled else None
        return distances


# Winograd's F(4×4, 3×3) with Lavin & Gray's matrices (1509.09308): a quarter of a convolution's products. Features move by 1e-5 of their maximum.
_INPUT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_KERNEL = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


def _winograd_kernel(weight):
    """(O, C, 3, 3) → (36, C, O), transformed in float64."""
    import torch

    g = torch.tensor(_KERNEL, dtype=torch.float64)
    u = torch.kron(g, g) @ weight.detach().double().permute(2, 3, 1, 0).reshape(9, -1)  # both directions in one product
    return u.float().view(36, weight.shape[1], weight.shape[0])


def _winograd(x, kernel):
    """3×3 convolution with a border of zeros: (N, H, W, C) contiguous in rows, (36, C, O) → (N, H, W, O)."""
    import torch
    import torch.nn.functional as F

    into, out_of = (torch.kron(m, m) for m in map(torch.tensor, (_INPUT, _OUTPUT)))  # both directions in one product
    into, out_of = into.float(), out_of.float()  # (36, 36), (16, 36)
    n, height, width, channels = x.shape
    down, across = -(-height // 4), -(-width // 4)  # tiles of 4×4 outputs from 6×6 inputs
    x = F.pad(x, (0, 0, 1, 4 * across - width + 1, 1, 4 * down - height + 1))
    batch, row, column, _ = x.stride()
    y = x.new_empty(n, down, 4, across, 4, kernel.shape[2])
    step = max(1, WINOGRAD_TILES // (n * across))  # rows of tiles whose intermediates stay in the cache
    for top in range(0, down, step):
        k = min(step, down - top)
        if top == 0 or k < step:  # allocated once: fresh pages for each chunk are not free
            tiles, v = x.new_empty(2, 36, n * k * across * channels)
            m = x.new_empty(36, n * k * across, kernel.shape[2])
            out = x.new_empty(16, m[0].numel())
        tiles.view(6, 6, n, k, across, channels).copy_(
            x.as_strided(
                (6, 6, n, k, across, channels),
                (row, column, batch, 4 * row, 4 * column, 1),
                x.storage_offset() + 4 * top * row,
            )
        )
        torch.mm(into, tiles, out=v)
        torch.bmm(v.view(36, -1, channels), kernel, out=m)  # (36, tiles, C) · (36, C, O)
        torch.mm(out_of, m.view(36, -1), out=out)
        y[:, top : top + k] = out.view(4, 4, n, k, across, -1).permute(2, 3, 0, 4, 1, 5)
    return y.view(n, 4 * down, 4 * across, -1)[:, :height, :width]


def measure(a, b):
    """MAE, PSNR and SSIM of two (H, W, 3) uint8 pictures."""
    return {"mae": mae(a, b), "psnr": psnr(a, b), "ssim": ssim(a, b)}


def with_lpips(values, distance):
    """`values` and what `distance()` returns, in the order of METRICS; and the reasons for those that are NaN."""
    values, reasons = dict(values), []
    try:
        values["lpips"] = distance()
    except NotComputed as failure:
        values["lpips"] = math.nan
        reasons.append(str(failure))
    if math.isnan(values["ssim"]):
        reasons.append("SSIM: undefined for two constant pictures and for sides under 6 px")
    if math.isnan(values["psnr"]):
        reasons.append("PSNR: undefined for two black pictures")
    if math.isnan(values["lpips"]) and not any(r.startswith("LPIPS") for r in reasons):
        reasons.append("LPIPS: the network returned NaN; check its weights")
    return {m: values[m] for m in METRICS}, reasons


# ---- gate ----------------------------------------------------------------------------------------------------------


def judge(values, bars):
    """Each metric of `values` (mae in levels) against `bars` (mae in 0..1): True, False, or None where it is NaN."""
    holds = {
        "mae": values["mae"] / 255 <= bars["mae"],
        "lpips": values["lpips"] <= bars["lpips"],
        "psnr": values["psnr"] > bars["psnr"],
        "ssim": values["ssim"] >= bars["ssim"],
    }
    return {m: None if math.isnan(values[m]) else bool(holds[m]) for m in METRICS}


def find_tiles(baseline, candidate, asked):
    """The grid's cells as [(name, row slice, column slice)], none where the picture is no grid.

    `asked` is (rows, columns) or None: then sample.png's layout is looked for, which is square pictures, four a row
    (fewer if there is one row only), with black lines of 2 px between and around them."""
    height, width = baseline.shape[:2]
    pad = GRID_PADDING
    layouts = [asked] if asked else [((height - pad) * 4 // max(width - pad, 1), 4), (1, 3), (1, 2)]
    for rows, columns in layouts:
        if rows < 1 or (height - pad) % rows or (width - pad) % columns:
            continue
        cell_h, cell_w = (height - pad) // rows, (width - pad) // columns
        if min(cell_h, cell_w) - pad < 1 or (not asked and (cell_h != cell_w or cell_h - pad < 16)):
            continue
        lines = np.ones((height, width), bool)
        cells = []
        for row in range(rows):
            for column in range(columns):
                y, x = row * cell_h + pad, column * cell_w + pad
                cells.append((f"{row + 1},{column + 1}", slice(y, y + cell_h - pad), slice(x, x + cell_w - pad)))
                lines[cells[-1][1:]] = False
        if not asked and baseline[lines].any():
            continue
        while cells and not baseline[cells[-1][1:]].any() and not candidate[cells[-1][1:]].any():
            cells.pop()  # the last row of a grid may be left unfilled
        return cells
    if asked:
        raise BadInput(
            f"--tiles {asked[0]}x{asked[1]}: {width}x{height} px is no such grid with {pad} px between and around "
            "its pictures; give rows x columns"
        )
    return []


# ---- output --------------------------------------------------------------------------------------------------------


def block(values):
    """The contest's four lines; `mae` in 0..255 levels."""
    return (
        f"=== Image Comparison Metrics ===\n"
        f"Pixel-wise Mean Absolute Difference: {values['mae']:.4f}\n"
        f"LPIPS (VGG):                        {values['lpips']:.4f}\n"
        f"PSNR:                              {values['psnr']:.2f} dB\n"
        f"SSIM:                              {values['ssim']:.4f}"
    )


def bar_lines(values, bars):
    word = {True: "PASS", False: "FAIL", None: "NOT COMPUTED"}
    holds = judge(values, bars)
    text = {
        "mae": (
            f"{values['mae'] / 255:.3g} of 0-1 ({values['mae']:.4g} of 0-255)",
            f"<= {bars['mae']:.3g} ({bars['mae'] * 255:.3g} of 0-255)",
        ),
        "lpips": (f"{values['lpips']:.6f}", f"<= {bars['lpips']:g}"),
        "psnr": (f"{values['psnr']:.4f} dB", f"> {bars['psnr']:g} dB"),
        "ssim": (f"{values['ssim']:.6f}", f">= {bars['ssim']:g}"),
    }
    return [f"  {LABELS[m]:6}{text[m][0]:36}{text[m][1]:32}{word[holds[m]]}" for m in METRICS]


def json_ready(value):
    """JSON has no inf and no NaN; they become the strings Python's float() reads back."""
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path, write):
    """Let `write(temporary path)` make the file, then rename it into place."""
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        part.unlink(missing_ok=True)


def heatmap(path, baseline, candidate, values, names, verdict):
    """Write baseline, candidate and their difference (largest channel, amplified by its colour scale) side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    difference = np.abs(baseline.astype(np.int16) - candidate).max(2)  # (H, W) in levels
    top = int(difference.max())
    scale = max(top, 1)
    height, width = difference.shape
    columns = width <= 1.6 * height  # wide grids stack, square pictures stand side by side
    panel = (5.2, 5.2 * height / width) if columns else (10.0, 10.0 * height / width)
    rows, cols = (1, 3) if columns else (3, 1)
    figure, axes = plt.subplots(
        rows, cols, layout="constrained", squeeze=False, figsize=(cols * panel[0] + 0.9, rows * (panel[1] + 0.4) + 1.0)
    )
    axes = axes.ravel()
    at = np.unravel_index(difference.argmax(), difference.shape)
    titles = (
        f"baseline: {names[0]}",
        f"candidate: {names[1]}",
        f"difference, largest channel (x{255 / scale:.0f}; at most {top} of 255, at x {at[1]}, y {at[0]})"
        if top
        else "difference: none",
    )
    for axis, shown, title in zip(axes, (baseline, candidate, difference), titles):
        drawn = axis.imshow(
            shown,
            interpolation="nearest" if max(height, width) < 400 else "antialiased",
            **({"cmap": "inferno", "vmin": 0, "vmax": scale} if shown is difference else {}),
        )
        axis.set_title(title, fontsize=10, loc="left", color="#333333")
        axis.set_xticks([]), axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_color("#bbbbbb")
    figure.colorbar(drawn, ax=axes[2], fraction=0.046, pad=0.015, label="levels of 255")
    numbers = (
        f"MAE {values['mae']:.4f} of 255     LPIPS {values['lpips']:.4f}     PSNR {values['psnr']:.2f} dB     "
        f"SSIM {values['ssim']:.4f}"
    )
    color = {"PASS": "#1a7f37", "FAIL": "#b42318"}.get(verdict, "#8a6100")
    figure.suptitle(f"{verdict}     {numbers}", fontsize=13, fontweight="bold", color=color)
    write_whole(path, lambda part: figure.savefig(part, format="png", dpi=110))
    plt.close(figure)


# ---- latents -------------------------------------------------------------------------------------------------------


def read_latents(path):
    """A .npy array of floats as float64; BadInput for anything else, NaN and infinity included."""
    try:
        array = np.load(path, allow_pickle=False, mmap_mode="r")
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.size == 0:
            raise ValueError("not a .npy file with floating-point values")
        array = np.asarray(array, dtype=np.float64)
    except (OSError, ValueError, EOFError, SyntaxError, OverflowError, MemoryError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if "pickle" in reason:  # what numpy takes any other file for, with the advice to load it as one
            reason = "not an array"
        raise BadInput(f"--latents {path}: {reason}; give a .npy file of floats") from None
    bad = array.size - int(np.isfinite(array).sum())
    if bad:
        raise BadInput(
            f"--latents {path}: {bad} of {array.size} values are NaN or infinite; that run is broken, sample again"
        )
    return array


def compare_latents(paths):
    """Relative error |b - a|/|a|, largest absolute difference and cosine of two latents, in float64."""
    a, b = map(read_latents, paths)
    if a.shape != b.shape:
        raise BadInput(
            f"--latents: {paths[0]} has shape {a.shape}, {paths[1]} has {b.shape}; give latents of one shape"
        )
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(a.ravel()), np.linalg.norm(b.ravel())
        return {
            "relative_error": float(np.linalg.norm((b - a).ravel()) / norms[0]),
            "max": float(np.abs(b - a).max()),
            "cosine": float(a.ravel() @ b.ravel() / (norms[0] * norms[1])),
        }


# ---- command -------------------------------------------------------------------------------------------------------


def finite(text):
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no bar; give a finite number")
    return value


def grid(text):
    rows, cross, columns = text.partition("x")
    if not (cross and rows.isdigit() and columns.isdigit() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{text} is no grid; give rows x columns, as 2x4")
    return int(rows), int(columns)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def arguments(argv):
    parser = OneLineParser(description="Compare a picture, or a folder of them, with its baseline.", allow_abbrev=False)
    parser.add_argument("baseline", nargs="?", type=Path, help="the reference picture")
    parser.add_argument(
        "candidate",
        nargs="?",
        type=Path,
        help="the picture to judge, or a folder of pictures: each is "
        "compared with the baseline, the mean is printed, and every one has to pass",
    )
    parser.add_argument(
        "--gate",
        choices=GATES,
        default="contest",
        help="contest: MAE <= 0.01 of the 0-1 range, LPIPS <= "
        "0.01, SSIM >= 0.99, PSNR > 40 dB; strict: MAE <= 0.01 of the 0-255 range (default: %(default)s)",
    )
    parser.add_argument(
        "--max-mae", type=finite, metavar="X", help="own bar for MAE, of the 0-1 range whatever the gate"
    )
    parser.add_argument("--max-lpips", type=finite, metavar="X", help="own bar for LPIPS")
    parser.add_argument("--min-psnr", type=finite, metavar="DB", help="own bar for PSNR, which has to be above it")
    parser.add_argument("--min-ssim", type=finite, metavar="X", help="own bar for SSIM")
    parser.add_argument(
        "--tiles",
        type=grid,
        metavar="RxC",
        help="rows x columns of the grid, 2 px between its pictures; "
        "sample.png's layout (four a row) is found without it",
    )
    parser.add_argument(
        "--every-tile",
        action="store_true",
        help="hold each tile to the gate as well, LPIPS included (takes twice as long)",
    )
    parser.add_argument(
        "--resize",
        action="store_true",
        help="scale a candidate of another size (Lanczos) and compare "
        "differing modes as RGB, as the contest's script does",
    )
    parser.add_argument(
        "--heatmap",
        type=Path,
        metavar="PNG",
        help="write baseline, candidate and difference side by side (of a folder: its worst file)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything for machines")
    parser.add_argument(
        "--latents",
        type=Path,
        nargs=2,
        metavar=("A.npy", "B.npy"),
        help="compare two latents, with or without pictures; they have no bar",
    )
    parser.add_argument(
        "--vgg-weights",
        type=Path,
        metavar="PATH",
        help=f"torchvision's {Path(VGG16_URL).name}, from anywhere (default: torch's hub cache, fetched on first use)",
    )
    args = parser.parse_args(argv)
    if args.candidate is None and (args.baseline is not None or args.latents is None):
        parser.error("name BASELINE and CANDIDATE, or --latents A.npy B.npy")
    if args.candidate is None and (args.heatmap or args.tiles or args.every_tile):
        parser.error("--heatmap, --tiles and --every-tile need BASELINE and CANDIDATE")
    return args


def candidates(args):
    """The files to judge, sorted by name, and the names a folder holds beside them."""
    if not args.candidate.is_dir():
        return [args.candidate], []
    try:
        entries = sorted(args.candidate.iterdir())
    except OSError as error:
        raise BadInput(f"{args.candidate}: {error.strerror}") from None
    pictures = [p for p in entries if p.suffix.lower() in SUFFIXES]
    return pictures, [p.name for p in entries if p not in pictures]


def protect_inputs(args, files):
    """Refuse to write over anything that is read; then remove what an earlier run left, lest it pass for this one's."""
    inputs = [p for p in (args.baseline, args.vgg_weights, *files, *(args.latents or ())) if p is not None]
    outputs = {flag: p for flag, p in (("--heatmap", args.heatmap), ("--json", args.json)) if p is not None}
    for flag, path in outputs.items():
        for other in inputs:
            if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
                raise BadInput(f"{flag} {path}: is an input; name another file")
        if path.exists() and not path.is_file() or not path.resolve().parent.is_dir():
            raise BadInput(f"{flag} {path}: no place for a file; name one in an existing folder")
    if len(outputs) == 2 and args.heatmap.resolve() == args.json.resolve():
        raise BadInput(f"--heatmap and --json both name {args.json}; name two files")
    for flag, path in outputs.items():
        try:
            path.unlink(missing_ok=True)
            path.touch()  # to be refused now rather than after minutes of LPIPS
            path.unlink()
        except OSError as error:
            raise BadInput(f"{flag} {path}: cannot be written ({error.strerror}); name another file") from None


def judge_file(args, bars, lpips, baseline, path):
    """One candidate against the baseline: a record of its values, reasons and tiles (printed later)."""
    candidate = matched(baseline, read_picture(path), args.resize)
    a, b = baseline.pixels, candidate.pixels
    cells = find_tiles(a, b, args.tiles)
    if args.every_tile and not cells:
        raise BadInput(f"--every-tile: {path} has no layout of sample.png; give --tiles RxC")
    record = {"file": str(path), "notes": [f"{path}: {note}" for note in candidate.notes], "tiles": []}
    try:
        if args.baseline.samefile(path):
            record["notes"].append(f"{path}: is the baseline file itself")
    except OSError:
        pass
    tiles = [
        (name, np.ascontiguousarray(a[rows, columns]), np.ascontiguousarray(b[rows, columns]))
        for name, rows, columns in cells
    ]
    with ThreadPoolExecutor(
        1
    ) as beside:  # the network is loaded, and runs, beside the other metrics, which take one core
        distance = beside.submit(lpips, a, b)
        whole, parts = measure(a, b), [measure(tile_a, tile_b) for _, tile_a, tile_b in tiles]
        record["values"], record["reasons"] = with_lpips(whole, distance.result)
    for (name, tile_a, tile_b), values in zip(tiles, parts):
        if args.every_tile:
            values, reasons = with_lpips(values, lambda: lpips(tile_a, tile_b))
            record["reasons"] += [f"tile {name}: {r}" for r in reasons if r not in record["reasons"]]
        record["tiles"].append({"tile": name, "values": values})
    return record, candidate


def worst(records):
    """The record nearest to failing: lowest PSNR (NaN below all), then largest MAE."""
    return min(
        records,
        key=lambda r: (-math.inf if math.isnan(r["values"]["psnr"]) else r["values"]["psnr"], -r["values"]["mae"]),
    )


def tile_lines(record):
    lines = [f"Tiles (row,column) of {Path(record['file']).name}:"]
    for tile in record["tiles"]:
        v = tile["values"]
        lines.append(
            f"  {tile['tile']:6}MAE {v['mae']:8.4f} of 0-255   "
            + (f"LPIPS {v['lpips']:.4f}   " if "lpips" in v else "")
            + f"PSNR {v['psnr']:7.2f} dB   SSIM {v['ssim']:.4f}"
            + f"   {tile.get('verdict', '')}".rstrip()
        )
    return lines + [f"  worst tile: {worst(record['tiles'])['tile']}"]


def run(args, report):
    """Judge what `args` name, print it, fill `report`; → exit status."""
    files, left_out = candidates(args) if args.candidate is not None else ([], [])
    protect_inputs(args, files)
    report["outputs_are_free"] = True
    if args.candidate is not None and not files:
        raise BadInput(f"{args.candidate}: holds no picture ({', '.join(SUFFIXES)}); name a picture or another folder")
    if args.vgg_weights is not None and not args.vgg_weights.is_file():
        raise BadInput(f"--vgg-weights {args.vgg_weights}: no such file; it should be {VGG16_URL}")

    if args.latents:
        latents = compare_latents(args.latents)
        report["latents"] = latents
        print(
            f"=== Latents ===\nRelative error: {latents['relative_error']:.6g}\nMax difference: {latents['max']:.6g}\n"
            f"Cosine:         {latents['cosine']:.12g}"
        )
        undefined = not all(map(math.isfinite, latents.values()))
        if undefined:
            report["reasons"].append("latents: undefined, one of them is zero or too large")
            print(f"evaluate.py: {report['reasons'][-1]}", file=sys.stderr)
        if not files:
            report["verdict"] = "NONE"
            print(f"VERDICT: NONE (latents {'cannot be compared' if undefined else 'have no bar'})")
            return NOT_COMPUTED if undefined else PASSES
        print()

    bars = dict(GATES[args.gate])
    own = {
        m: v
        for m, v in (("mae", args.max_mae), ("lpips", args.max_lpips), ("psnr", args.min_psnr), ("ssim", args.min_ssim))
        if v is not None
    }
    bars.update(own)
    gate = args.gate + (" with own bars for " + ", ".join(LABELS[m] for m in own) if own else "")

    baseline, lpips = read_picture(args.baseline), Lpips(args.vgg_weights)
    notes = [f"{baseline.path}: {note}" for note in baseline.notes]
    if left_out:
        notes.append(f"{args.candidate}: left out, by suffix: {', '.join(left_out)}")
    print(
        f"Comparing {args.baseline} with "
        + (f"{len(files)} pictures in {args.candidate}" if args.candidate.is_dir() else f"{args.candidate}"),
        flush=True,
    )
    records, shown = [], None
    for path in files:
        record, candidate = judge_file(args, bars, lpips, baseline, path)
        records.append(record)
        if args.heatmap and worst(records) is record:
            shown = candidate
        notes += record["notes"]
        report["reasons"] += [r for r in record["reasons"] if r not in report["reasons"]]

    with np.errstate(invalid="ignore"):  # inf - inf
        mean = {m: float(np.mean([r["values"][m] for r in records])) for m in METRICS}
    everything = [mean, *(r["values"] for r in records)]
    if args.every_tile:
        everything += [t["values"] for r in records for t in r["tiles"]]
    outcome = [hold for values in everything for hold in judge(values, bars).values()]
    for held in [*records, *(t for r in records for t in r["tiles"] if args.every_tile)]:
        holds = judge(held["values"], bars).values()
        held["verdict"] = "NONE" if None in holds else "PASS" if all(holds) else "FAIL"
    status = NOT_COMPUTED if None in outcome or report["reasons"] else PASSES if all(outcome) else FALLS_SHORT
    verdict = {PASSES: "PASS", FALLS_SHORT: "FAIL", NOT_COMPUTED: "NONE"}[status]
    if lpips.source and not lpips.source["published"]:
        notes.append(
            f"{lpips.source['path']}: not the published VGG16 (sha256 {lpips.source['sha256'][:8]}, published "
            f"{VGG16_SHA256}); this LPIPS is not the contest's"
        )

    if args.candidate.is_dir():
        for record in records:
            v = record["values"]
            print(
                f"  {Path(record['file']).name}: MAE {v['mae']:.4f}, LPIPS {v['lpips']:.4f}, PSNR {v['psnr']:.2f} dB, SSIM "
                f"{v['ssim']:.4f}: {record['verdict']}"
            )
    print(f"\n{block(mean)}\n\nGate: {gate}")
    print(*bar_lines(mean, bars), sep="\n")
    for record in records:
        if record["tiles"]:
            print("", *tile_lines(record), sep="\n")
    print(*(f"Note: {note}" for note in notes), sep="\n", end="\n" if notes else "")
    report.update(
        gate=gate, bars=bars, mean=mean, files=records, notes=notes, vgg_weights=lpips.source, verdict=verdict
    )
    if args.heatmap:
        record = worst(records)
        heatmap(
            args.heatmap,
            baseline.pixels,
            shown.pixels,
            record["values"],
            (args.baseline.name, Path(record["file"]).name),
            record["verdict"] if len(records) > 1 else verdict,
        )
        print(f"Heatmap: {args.heatmap}" + (f" ({Path(record['file']).name}, the worst)" if len(records) > 1 else ""))

    short = len([r for r in records if r["verdict"] != "PASS"])
    caveats = [
        c
        for c, is_so in (
            (f"{short} of {len(records)} pictures do not pass", short and len(records) > 1),
            ("every tile held to it", args.every_tile),
            ("candidate resized (Lanczos)", any("Lanczos" in n for n in notes)),
            ("modes differ, compared as RGB", any("both as RGB" in n for n in notes)),
            ("not the published VGG16", lpips.source and not lpips.source["published"]),
        )
        if is_so
    ]
    for reason in report["reasons"]:
        print(f"evaluate.py: {reason}", file=sys.stderr)
    if status == NOT_COMPUTED:
        caveats.insert(0, "a metric could not be computed")
    print(f"VERDICT: {verdict} ({'; '.join([f'gate {gate}', *caveats])})")
    return status


def main(argv=None):
    args = arguments(argv)
    report, error = {"verdict": "NONE", "reasons": []}, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' notices do not belong between the figures
        try:
            status = run(args, report)
        except BadInput as bad:
            status, error = BAD_INPUT, str(bad)
        except KeyboardInterrupt:
            status, error = 130, "interrupted"
        except Exception as unforeseen:  # Python's own status for a crash is 1, which would say "falls short"
            status, error = NOT_COMPUTED, f"{type(unforeseen).__name__}: {' '.join(str(unforeseen).split())}"
    if error:
        report.update(verdict="NONE", error=error)
        print(f"evaluate.py: {error}", file=sys.stderr)
    if report.pop("outputs_are_free", False) and args.json:  # a refused output path is not written to
        report["exit_status"] = status
        try:
            write_whole(
                args.json, lambda part: part.write_text(json.dumps(json_ready(report), indent=1, allow_nan=False))
            )
        except BadInput as bad:
            print(f"evaluate.py: {bad}", file=sys.stderr)
            status = BAD_INPUT
    return status


if __name__ == "__main__":
    sys.exit(main())
