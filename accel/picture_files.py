"""Read picture files as a viewer shows them, and refuse all others. Imports no torch.

The reader checks what Pillow passes over: a PNG's structure, checksums and rows, and the depth of
16-bit files. It refuses everything by which a viewer changes the stored values: rotation, gamma,
colour profiles, transparency, animation.
"""

import io
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from accel.errors import UsageError, shown
from accel.files import read_small

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")
MOST_PIXELS = 2**26  # a grid of 8192×8192
MOST_BYTES = 2**28  # of a file: more than MOST_PIXELS need

SIGNATURE = b"\x89PNG\r\n\x1a\n"
APPLE_DOUBLE = b"\x00\x05\x16\x07"  # begins ._NAME, where macOS keeps attributes of NAME
CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")  # chunks that a reader has to understand
PLAIN_ROWS = [0, 0, 0]  # methods of compression, filters and interlacing
INTERLACED = [0, 0, 1]
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by a PNG's colour type
# Adam7's passes: first column, first row, step between columns, step between rows.
PASSES = [
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
]
SRGB_CODES = bytes([1, 13, 0, 1])  # sRGB in a PNG's chunks cICP, gAMA and cHRM
SRGB_GAMMA = struct.pack(">I", 45455)
SRGB_PRIMARIES = struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
ORIENTATION = 0x0112  # tags of EXIF and TIFF
BITS_PER_SAMPLE = 0x0102
OPAQUE_MODES = ("1", "L", "P", "RGB")

WHOLE = "copy or make it again"
PLAIN = "save it upright as an 8-bit sRGB PNG without alpha"


class Picture(NamedTuple):
    """A picture as a viewer shows it."""

    pixels: np.ndarray  # (H, W, 3) uint8
    mode: str  # Pillow's mode of the file: 1, L, P or RGB
    lossy: str  # the lossy compression of the file: JPEG or WebP; else empty

    @property
    def size(self) -> str:
        """Return width×height."""
        height, width, _ = self.pixels.shape
        return f"{width}x{height}"


def read_picture(path: Path) -> Picture:
    """Return the picture in `path`. Raises UsageError, which names the file, unless it is
    one undamaged picture whose stored values are what a viewer shows: 8 bits, upright,
    sRGB, opaque.
    """
    try:
        return _decode(read_small(path, MOST_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; name another file") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _decode(content):
    """Return the Picture in the bytes of a file."""
    if content.startswith(APPLE_DOUBLE):
        raise UsageError(
            "holds attributes that macOS kept beside a file, and no picture; delete it"
        )
    chunks = []  # of a PNG
    if content.startswith(SIGNATURE):
        chunks = _chunks(content)
        _check_rows(chunks)
        _check_colours(dict(chunks))
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_header(image)
            image.load()
    except UsageError:
        raise
    except UnidentifiedImageError:
        raise UsageError(
            f"is not a picture, or damaged; {', '.join(FORMATS)} are read; {WHOLE}"
        ) from None
    except Exception as error:  # Pillow raises many types on damaged files
        raise UsageError(f"is not a whole picture ({shown(str(error), 200)}); {WHOLE}") from None
    palette = dict(chunks).get(b"PLTE")
    if image.mode == "P" and palette is not None and np.asarray(image).max() >= len(palette) // 3:
        raise UsageError(
            f"is damaged: its palette has {len(palette) // 3} colours, its pixels need more; "
            f"{WHOLE}"
        )
    return Picture(np.asarray(image.convert("RGB")), image.mode, _lossy(image, content))


def _chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    """Return the names and data of a PNG's chunks, from IHDR to IEND. Raises UsageError unless
    they are whole.
    """
    chunks: list[tuple[bytes, bytes]] = []
    place = len(SIGNATURE)
    name = b""
    while name != b"IEND":
        length, name = struct.unpack(">I4s", content[place : place + 8].ljust(8, b"\0"))
        end = place + 12 + length
        if end > len(content):
            raise UsageError(f"is truncated: its chunk IEND is missing; {WHOLE}")
        data = content[place + 8 : end - 4]
        checksum = int.from_bytes(content[end - 4 : end], "big")
        label = shown(name.decode("latin-1"))
        if zlib.crc32(name + data) != checksum:
            raise UsageError(f"is damaged: a chunk {label} has a wrong checksum; {WHOLE}")
        if (name == b"IHDR") != (chunks == []):
            raise UsageError(f"is damaged: its chunk {label} is out of place; {WHOLE}")
        if name[:1].isupper() and name not in CRITICAL:
            raise UsageError(
                f"has a chunk {label}, which is unknown and changes the picture; {WHOLE}"
            )
        chunks.append((name, data))
        place = end
    return chunks


def _check_rows(chunks):
    """Raise UsageError unless a PNG's compressed data are those of its rows, of at most 8 bits."""
    _, header = chunks[0]
    if len(header) != 13:
        raise UsageError(f"is damaged: its chunk IHDR has a wrong length; {WHOLE}")
    width, height, depth, colour, *methods = struct.unpack(">IIBBBBB", header)
    if colour not in CHANNELS or methods not in (PLAIN_ROWS, INTERLACED):
        raise UsageError(f"is damaged: its chunk IHDR holds unknown values; {WHOLE}")
    _check_size(width, height)
    if depth > 8:
        raise UsageError(f"has {depth} bits a channel; {PLAIN}")
    places = [index for index, (name, _) in enumerate(chunks) if name == b"IDAT"]
    if not places or places[-1] - places[0] + 1 != len(places):
        raise UsageError(f"is damaged: its chunks IDAT are missing or not in one run; {WHOLE}")
    passes = PASSES if methods == INTERLACED else [(0, 0, 1, 1)]
    expected = 0  # bytes: each row begins with the number of its filter
    for left, top, across, down in passes:
        columns = -(-(width - left) // across)
        rows = -(-(height - top) // down)
        if columns > 0 and rows > 0:
            expected += rows * (1 + -(-columns * CHANNELS[colour] * depth // 8))
    compressed = b"".join(data for name, data in chunks if name == b"IDAT")
    stream = zlib.decompressobj()
    try:
        size = len(stream.decompress(compressed, expected + 1))
    except zlib.error as error:
        raise UsageError(f"is damaged ({error}); {WHOLE}") from None
    if size != expected or not stream.eof:
        raise UsageError(
            f"is damaged: its rows do not have the {expected:,} bytes that they need; {WHOLE}"
        )


def _check_colours(chunks):
    """Raise UsageError if a PNG's chunks, data by name, say that its colours are not sRGB, or
    that it moves. `_check_header` looks at the colour profile.
    """
    if b"acTL" in chunks:
        raise UsageError(f"is animated; {PLAIN}")
    codes = chunks.get(b"cICP", SRGB_CODES)
    if codes != SRGB_CODES:
        raise UsageError(f"has other colours than sRGB (cICP {tuple(codes)}); {PLAIN}")
    if chunks.keys() & {b"sRGB", b"cICP", b"iCCP"}:
        return  # each goes before gAMA and cHRM
    gamma = chunks.get(b"gAMA", SRGB_GAMMA)
    if not _near(gamma, SRGB_GAMMA):
        gamma = int.from_bytes(gamma, "big") / 1e5
        raise UsageError(f"has a gamma of {gamma:g}, not sRGB's 0.45455 (gAMA); {PLAIN}")
    if not _near(chunks.get(b"cHRM", SRGB_PRIMARIES), SRGB_PRIMARIES):
        raise UsageError(f"has other primaries than sRGB's (cHRM); {PLAIN}")


def _near(data, expected):
    """Return whether a chunk's numbers are those of another within rounding."""
    if len(data) != len(expected):
        return False
    numbers, others = (np.frombuffer(each, ">u4").astype(np.int64) for each in (data, expected))
    return abs(numbers - others).max() <= 50


def _check_size(width, height):
    if width * height > MOST_PIXELS:
        raise UsageError(f"has {width}x{height} pixels, a decompression bomb; {PLAIN}")


def _check_header(image):
    """Raise UsageError if a viewer shows an opened picture otherwise than Pillow decodes it."""
    _check_size(image.width, image.height)
    frames = getattr(image, "n_frames", 1)
    bits = _bits(image)
    orientation = image.getexif().get(ORIENTATION, 1)
    profile = image.info.get("icc_profile")
    other_colours = bool(profile) and not _is_srgb(profile, grey=image.mode in ("1", "L"))
    reasons = {
        f"has {frames} frames": frames > 1,
        f"has {bits} bits a channel": bits > 8,
        f"has transparency (mode {image.mode})": image.has_transparency_data,
        f"has the mode {image.mode}": image.mode not in OPAQUE_MODES,
        f"is rotated or mirrored by its EXIF orientation, {orientation}": orientation not in (0, 1),
        "has a colour profile other than sRGB": other_colours,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"{reason}; {PLAIN}")


def _bits(image):
    """Return the bits of a channel where Pillow would reduce them without notice."""
    if image.format == "TIFF":
        return max(image.tag_v2.get(BITS_PER_SAMPLE, (1,)))
    if image.format == "PPM":
        arguments = image.tile[0].args  # (mode, largest value), or the mode where that is 255
        largest = arguments[1] if isinstance(arguments, tuple) else 255
        return largest.bit_length()
    return 8


@lru_cache(maxsize=64)
def _is_srgb(profile: bytes, grey: bool) -> bool:
    """Return whether a colour profile leaves sRGB's colours, or its greys, within two levels."""
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    if grey:
        colours = np.stack([levels, levels, levels], -1)[None]
    stored = Image.fromarray(colours)
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        of_rgb = source.profile.xcolor_space.strip() == "RGB"
        swatches = stored if of_rgb else stored.convert("L")
        target = ImageCms.createProfile("sRGB")
        seen = ImageCms.profileToProfile(swatches, source, target, outputMode="RGB")
    except Exception:  # a damaged profile, or one of another colour space, such as LAB
        return False
    return bool(abs(colours.astype(np.int16) - np.asarray(seen)).max() <= 2)


def _lossy(image, content):
    """Return the name of the file's lossy compression; empty if it has none."""
    compression = str(image.info.get("compression"))  # of a TIFF
    if image.format == "JPEG" or "jpeg" in compression:
        return "JPEG"
    # A lossless WebP has a chunk VP8L in place of this one.
    lossy_webp = image.format == "WEBP" and b"VP8 " in content
    return "WebP" if lossy_webp or compression == "webp" else ""
