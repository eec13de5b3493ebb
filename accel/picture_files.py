"""Read picture files as a viewer shows them, and refuse all others. Imports no torch.

The reader checks what Pillow passes over: a PNG's structure, checksums and rows, and the depth of
16-bit files. It refuses everything by which a viewer changes the stored values: rotation, gamma,
colour profiles, transparency, animation.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

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
SRGB_GAMMA = 45455  # the values of sRGB in a PNG's chunks gAMA, cHRM and cICP
SRGB_PRIMARIES = (31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
SRGB_CODES = bytes([1, 13, 0, 1])
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


class Chunk(NamedTuple):
    """A chunk of a PNG."""

    name: bytes
    data: bytes


class _Damaged(ValueError):
    """The file's bytes are not those of a whole picture."""


class _NoPicture(ValueError):
    """The file is beside a picture, and none itself."""


class _NotPlain(ValueError):
    """A viewer shows other values than the file stores."""


def read_picture(path: Path) -> Picture:
    """Return the picture in `path`. Raises UsageError, which names the file, unless it is
    one undamaged picture whose stored values are what a viewer shows: 8 bits, upright,
    sRGB, opaque.
    """
    try:
        return _decode(read_small(path, MOST_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; name another file") from None
    except _NotPlain as error:
        raise UsageError(f"{path}: {error}; {PLAIN}") from None
    except _NoPicture as error:
        raise UsageError(f"{path}: {error}, and no picture; delete it") from None
    except _Damaged as error:
        raise UsageError(f"{path}: {error}; {WHOLE}") from None


def _decode(content):
    """Return the Picture in the bytes of a file."""
    if content.startswith(APPLE_DOUBLE):
        raise _NoPicture("holds attributes that macOS kept beside a file")
    chunks = []
    if content.startswith(SIGNATURE):
        chunks = list(_chunks(content))
        _check_rows(chunks)
        _check_colours(chunks)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_header(image)
            image.load()
    except _NotPlain:
        raise
    except UnidentifiedImageError:
        raise _Damaged(f"is not a picture, or damaged; {', '.join(FORMATS)} are read") from None
    except Exception as error:  # Pillow raises many types on damaged files
        raise _Damaged(f"is not a whole picture ({shown(str(error), 200)})") from None
    if image.mode == "P":
        _check_palette(image, chunks)
    return Picture(np.asarray(image.convert("RGB")), image.mode, _lossy(image, content))


def _chunks(content: bytes) -> Iterator[Chunk]:
    """Yield a PNG's chunks, from IHDR to IEND. Raises _Damaged unless they are whole."""
    place = len(SIGNATURE)
    before = b""  # the name of the previous chunk
    while before != b"IEND":
        length, name = struct.unpack(">I4s", content[place : place + 8].ljust(8, b"\0"))
        end = place + 12 + length
        if end > len(content):
            raise _Damaged("is truncated: its chunk IEND is missing")
        data = content[place + 8 : end - 4]
        [checksum] = struct.unpack(">I", content[end - 4 : end])
        label = shown(name.decode("latin-1"))
        if zlib.crc32(name + data) != checksum:
            raise _Damaged(f"is damaged: a chunk {label} has a wrong checksum")
        if (name == b"IHDR") != (before == b""):
            raise _Damaged(f"is damaged: its chunk {label} is out of place")
        if name[:1].isupper() and name not in CRITICAL:
            raise _Damaged(f"has a chunk {label}, which is unknown and changes the picture")
        yield Chunk(name, data)
        before = name
        place = end


def _check_rows(chunks):
    """Raise _Damaged unless a PNG's compressed data are those of its rows, _NotPlain for
    more than 8 bits.
    """
    header = chunks[0].data
    if len(header) != 13:
        raise _Damaged("is damaged: its chunk IHDR has a wrong length")
    width, height, depth, colour, *methods = struct.unpack(">IIBBBBB", header)
    if colour not in CHANNELS or methods not in (PLAIN_ROWS, INTERLACED):
        raise _Damaged("is damaged: its chunk IHDR holds unknown values")
    _check_size(width, height)
    if depth > 8:
        raise _NotPlain(f"has {depth} bits a channel")
    places = [index for index, chunk in enumerate(chunks) if chunk.name == b"IDAT"]
    if not places or places[-1] - places[0] + 1 != len(places):
        raise _Damaged("is damaged: its chunks IDAT are missing or not in one run")
    passes = PASSES if methods == INTERLACED else [(0, 0, 1, 1)]
    expected = 0  # bytes: each row begins with the number of its filter
    for left, top, across, down in passes:
        columns = -(-(width - left) // across)
        rows = -(-(height - top) // down)
        if columns > 0 and rows > 0:
            expected += rows * (1 + -(-columns * CHANNELS[colour] * depth // 8))
    compressed = b"".join(chunks[place].data for place in places)
    stream = zlib.decompressobj()
    try:
        size = len(stream.decompress(compressed, expected + 1))
    except zlib.error as error:
        raise _Damaged(f"is damaged ({error})") from None
    if size != expected or not stream.eof:
        raise _Damaged(f"is damaged: its rows do not have the {expected:,} bytes that they need")


def _check_colours(chunks):
    """Raise _NotPlain if a PNG's chunks say that its colours are not sRGB, or that it
    moves. `_check_header` looks at the colour profile.
    """
    values = {chunk.name: chunk.data for chunk in chunks}
    if b"acTL" in values:
        raise _NotPlain("is animated")
    if b"cICP" in values and values[b"cICP"] != SRGB_CODES:
        raise _NotPlain(f"has other colours than sRGB (cICP {tuple(values[b'cICP'])})")
    if b"sRGB" in values or b"cICP" in values or b"iCCP" in values:
        return  # each goes before gAMA and cHRM
    if b"gAMA" in values:
        gamma = int.from_bytes(values[b"gAMA"], "big")
        if abs(gamma - SRGB_GAMMA) > 50:
            raise _NotPlain(f"has a gamma of {gamma / 1e5:g}, not sRGB's 0.45455 (gAMA)")
    if b"cHRM" in values and not _near_srgb(values[b"cHRM"]):
        raise _NotPlain("has other primaries than sRGB's (cHRM)")


def _near_srgb(primaries):
    """Return whether a chunk cHRM holds sRGB's white point and primaries."""
    if len(primaries) != 32:
        return False
    values = np.array(struct.unpack(">8I", primaries))
    return abs(values - SRGB_PRIMARIES).max() <= 50


def _check_size(width, height):
    if width * height > MOST_PIXELS:
        raise _NotPlain(f"has {width}x{height} pixels, a decompression bomb")


def _check_header(image):
    """Raise _NotPlain if a viewer shows an opened picture otherwise than Pillow decodes it."""
    _check_size(image.width, image.height)
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise _NotPlain(f"has {frames} frames")
    bits = _bits(image)
    if bits > 8:
        raise _NotPlain(f"has {bits} bits a channel")
    if image.has_transparency_data:
        raise _NotPlain(f"has transparency (mode {image.mode})")
    if image.mode not in OPAQUE_MODES:
        raise _NotPlain(f"has the mode {image.mode}")
    orientation = image.getexif().get(ORIENTATION, 1)
    if orientation not in (0, 1):
        raise _NotPlain(f"is rotated or mirrored by its EXIF orientation, {orientation}")
    profile = image.info.get("icc_profile")
    if profile and not _is_srgb(profile, grey=image.mode in ("1", "L")):
        raise _NotPlain("has a colour profile other than sRGB")


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
    if grey:
        swatches = Image.fromarray(levels[None])
    else:
        cube = np.stack(np.meshgrid(levels, levels, levels), -1)  # (9, 9, 9, 3)
        swatches = Image.fromarray(cube.reshape(1, -1, 3))
    stored = swatches.convert("RGB")
    try:
        from PIL import ImageCms

        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() == "RGB":
            swatches = stored
        target = ImageCms.createProfile("sRGB")
        seen = ImageCms.profileToProfile(swatches, source, target, outputMode="RGB")
    except Exception:  # a damaged profile, or one of another colour space, such as LAB
        return False
    difference = np.asarray(stored, np.int16) - np.asarray(seen)
    return bool(abs(difference).max() <= 2)


def _check_palette(image, chunks):
    """Raise _Damaged if a PNG's pixels name colours that its palette lacks."""
    sizes = [len(chunk.data) // 3 for chunk in chunks if chunk.name == b"PLTE"]
    if sizes and np.asarray(image).max() >= sizes[0]:
        raise _Damaged(f"is damaged: its palette has {sizes[0]} colours, its pixels need more")


def _lossy(image, content):
    """Return the name of the file's lossy compression; empty if it has none."""
    file_format = image.format
    if file_format == "JPEG" or "jpeg" in str(image.info.get("compression")):  # of a TIFF
        return "JPEG"
    if image.info.get("compression") == "webp":  # of a TIFF
        return "WebP"
    # A lossless WebP has a chunk VP8L in place of this one.
    return "WebP" if file_format == "WEBP" and b"VP8 " in content else ""
