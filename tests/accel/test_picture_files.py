"""accel/picture_files.py: a file is read as a viewer shows it, or refused by name. The table has
what is said about each input.
"""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from accel.errors import UsageError
from accel.picture_files import PLAIN, WHOLE, read_picture

PIXELS = np.random.default_rng(0).integers(0, 256, (21, 19, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)
GREY = RGB.convert("L")


def chunk(name, data):
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def png(*before, rows=None, header=(19, 21, 8, 2, 0, 0, 0), after=()):
    """Return PIXELS as a PNG with further chunks before and after its IDAT."""
    if rows is None:
        rows = b"".join(b"\0" + row.tobytes() for row in PIXELS)
    parts = [
        chunk(b"IHDR", struct.pack(">IIBBBBB", *header)),
        *before,
        chunk(b"IDAT", zlib.compress(rows)),
        *after,
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(image, file_format="PNG", **options):
    content = io.BytesIO()
    image.save(content, file_format, **options)
    return content.getvalue()


def rotated(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def adobe_rgb():
    """Return sRGB's profile with red and green swapped: as whole as any, and another space."""
    profile = profile_of("sRGB")
    return profile.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")


def profile_of(space):
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()


def flipped(content, name):
    """Return a PNG with a flipped bit in the data of its first chunk of that name."""
    place = content.index(name) + 6
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def primaries(*values):
    return chunk(b"cHRM", struct.pack(">8I", *values))


ROWS = b"".join(b"\0" + row.tobytes() for row in PIXELS)
HEADER = chunk(b"IHDR", struct.pack(">IIBBBBB", 19, 21, 8, 2, 0, 0, 0))
HALVES = zlib.compress(ROWS)[:500], zlib.compress(ROWS)[500:]
SRGB = 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000
BT2020 = 31270, 32900, 70800, 29200, 17000, 79700, 13100, 4600
TEXT = chunk(b"tEXt", b"Comment\0hello")
GAMMA = chunk(b"gAMA", struct.pack(">I", 100_000))
DEEP = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in PIXELS)
# With zeros where a reader that counts from the file's beginning looks for the depth.
PRIVATE = chunk(b"prVt", bytes(13))
PALETTE = chunk(b"PLTE", bytes(range(6)))

SHOWN = {
    "PNG": png(),
    "a run of two IDATs": png(chunk(b"IDAT", HALVES[0])).replace(
        chunk(b"IDAT", zlib.compress(ROWS)), chunk(b"IDAT", HALVES[1])
    ),
    "text": png(TEXT, after=[TEXT]),
    "bytes after IEND": png() + b"garbage",
    "chunk sRGB": png(chunk(b"sRGB", b"\0")),
    "gamma 0.45455": png(chunk(b"gAMA", struct.pack(">I", 45455))),
    "chunk sRGB over gAMA": png(chunk(b"sRGB", b"\0"), GAMMA),
    "sRGB's primaries": png(primaries(*SRGB)),
    "cICP of sRGB": png(chunk(b"cICP", bytes([1, 13, 0, 1]))),
    "sRGB's profile": saved(RGB, icc_profile=profile_of("sRGB")),
    "upright EXIF": saved(RGB, exif=rotated(1)),
    "WebP": saved(RGB, "WEBP", lossless=True),
    "BMP": saved(RGB, "BMP"),
    "TIFF": saved(RGB, "TIFF"),
    "PPM": saved(RGB, "PPM"),
}
NOT_PLAIN = {
    "16 bits": (png(rows=DEEP, header=(19, 21, 16, 2, 0, 0, 0)), "16 bits a channel"),
    "16-bit TIFF": (
        saved(Image.fromarray(PIXELS[..., 0].astype(np.uint16)), "TIFF"),
        "16 bits a channel",
    ),
    "16-bit PPM": (b"P6 2 2 65535\n" + bytes(24), "16 bits a channel"),
    "16-bit PGM": (b"P5 2 2 65535\n" + bytes(8), "the mode I"),
    "rotated": (saved(RGB, exif=rotated(6)), "EXIF orientation, 6"),
    "rotated JPEG": (saved(RGB, "JPEG", exif=rotated(3)), "EXIF orientation, 3"),
    "gamma": (png(GAMMA), "gamma of 1, not"),
    "primaries": (png(primaries(*BT2020)), "primaries"),
    "HDR": (png(chunk(b"cICP", bytes([9, 16, 0, 1]))), "cICP (9, 16, 0, 1)"),
    "another profile": (saved(RGB, icc_profile=adobe_rgb()), "colour profile other than sRGB"),
    "LAB's profile": (saved(RGB, icc_profile=profile_of("LAB")), "colour profile other than sRGB"),
    "JPEG's profile": (saved(RGB, "JPEG", icc_profile=adobe_rgb()), "colour profile"),
    "no profile": (saved(RGB, icc_profile=b"nonsense"), "colour profile"),
    "LAB": (saved(Image.new("LAB", (5, 5)), "TIFF"), "the mode LAB"),
    "CMYK": (saved(RGB.convert("CMYK"), "JPEG"), "the mode CMYK"),
    "alpha": (saved(RGB.convert("RGBA")), "transparency (mode RGBA)"),
    "one transparent colour": (saved(RGB, transparency=(1, 2, 3)), "transparency (mode RGB)"),
    "transparent palette": (saved(RGB.convert("P"), transparency=3), "transparency (mode P)"),
    "animated": (saved(RGB, save_all=True, append_images=[GREY.convert("RGB")]), "animated"),
    "animated WebP": (
        saved(RGB, "WEBP", save_all=True, append_images=[GREY.convert("RGB")]),
        "2 frames",
    ),
    "two pages": (saved(RGB, "TIFF", save_all=True, append_images=[RGB]), "2 frames"),
    "bomb": (png(header=(9000, 9000, 8, 2, 0, 0, 0)), "decompression bomb"),
}
DAMAGED = {
    "empty": (b"", "not a picture"),
    "text": (b"not a picture", "PNG, JPEG, WEBP, BMP, PPM, TIFF are read"),
    "a signature": (png()[:8], "truncated"),
    "cut": (png()[:-100], "truncated"),
    "no IEND": (png()[:-12], "IEND is missing"),
    "cut JPEG": (saved(RGB, "JPEG")[:-30], "truncated"),
    "cut WebP": (saved(RGB, "WEBP", lossless=True)[:-30], "not a whole picture"),
    "cut BMP": (saved(RGB, "BMP")[:-30], "truncated"),
    "cut TIFF": (saved(RGB, "TIFF")[:-30], "truncated"),
    "checksum of IDAT": (flipped(png(), b"IDAT"), "IDAT has a wrong checksum"),
    "checksum of text": (flipped(png(TEXT), b"tEXt"), "tEXt has a wrong checksum"),
    "a chunk before IHDR": (png().replace(HEADER, TEXT + HEADER), "tEXt is out of place"),
    "16 bits after a chunk": (
        png(rows=DEEP, header=(19, 21, 16, 2, 0, 0, 0)).replace(b"\x1a\n", b"\x1a\n" + PRIVATE, 1),
        "prVt is out of place",
    ),
    "only a checksum": (
        png()[:-13] + bytes([png()[-13] ^ 1]) + png()[-12:],
        "IDAT has a wrong checksum",
    ),
    "a second IHDR": (png(HEADER), "IHDR is out of place"),
    "a second run of IDAT": (
        png(after=[TEXT, chunk(b"IDAT", zlib.compress(ROWS))]),
        "not in one run",
    ),
    "no IDAT": (png().replace(chunk(b"IDAT", zlib.compress(ROWS)), b""), "IDAT are missing"),
    "a row short": (png(rows=ROWS[: -3 * 19 - 1]), "rows do not have the 1,218 bytes"),
    "a byte short": (png(rows=ROWS[:-1]), "rows do not have"),
    "a row too many": (png(rows=ROWS + bytes(58)), "rows do not have"),
    "an unknown filter": (png(rows=b"\x09" + ROWS[1:]), "not a whole picture"),
    "no end of the stream": (
        png().replace(
            chunk(b"IDAT", zlib.compress(ROWS)), chunk(b"IDAT", zlib.compress(ROWS)[:-4])
        ),
        "rows do not have",
    ),
    "no zlib": (
        png().replace(chunk(b"IDAT", zlib.compress(ROWS)), chunk(b"IDAT", b"nonsense")),
        "incorrect header check",
    ),
    "unknown interlace": (png(header=(19, 21, 8, 2, 0, 0, 7)), "unknown values"),
    "unknown critical chunk": (png(chunk(b"ABCD", b"")), "ABCD, which is unknown"),
    "a short palette": (
        png(PALETTE, rows=b"\0\0\1\2", header=(3, 1, 8, 3, 0, 0, 0)),
        "palette has 2 colours",
    ),
}


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "x.png").write_bytes(content)
        return read_picture(tmp_path / "x.png")

    return read


@pytest.mark.parametrize("name", SHOWN)
def test_a_plain_picture_is_read(name, read):
    picture = read(SHOWN[name])
    assert np.array_equal(picture.pixels, PIXELS)
    assert picture[1:] == ("RGB", "") and picture.size == "19x21"


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_a_viewer_shows_otherwise_is_refused(name, read):
    content, words = NOT_PLAIN[name]
    with pytest.raises(UsageError) as error:
        read(content)
    assert words in str(error.value) and str(error.value).endswith(PLAIN)
    assert "x.png: " in str(error.value)


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name, read):
    content, words = DAMAGED[name]
    with pytest.raises(UsageError) as error:
        read(content)
    assert words in str(error.value) and str(error.value).endswith(WHOLE)
    assert "x.png: " in str(error.value)


@pytest.mark.parametrize("mode, bits", [("1", 1), ("L", 8), ("P", 8), ("P", 2)])
def test_palettes_greys_and_packed_bits_are_shown(mode, bits, read):
    image = RGB.quantize(2**bits) if mode == "P" else RGB.convert(mode)
    picture = read(saved(image, bits=bits) if mode == "P" else saved(image))
    assert np.array_equal(picture.pixels, np.asarray(image.convert("RGB")))
    assert picture.mode == mode


@pytest.mark.parametrize("side", [1, 2, 3, 5, 9, 18])
def test_interlaced_pictures_are_read(side, read):
    """Each of Adam7's passes has rows of its own, and small pictures lack some passes."""
    pixels = PIXELS[:side, : side + 1]
    rows = b""
    passes = "0088 4088 0448 2044 0224 1022 0112"
    for left, top, across, down in (map(int, word) for word in passes.split()):
        part = pixels[top::down, left::across]
        if part.size:
            rows += b"".join(b"\0" + row.tobytes() for row in part)
    header = (side + 1, side, 8, 2, 0, 0, 1)
    assert np.array_equal(read(png(rows=rows, header=header)).pixels, pixels)
    with pytest.raises(UsageError, match="rows do not have"):
        read(png(rows=rows[:-1], header=header))


def test_a_grey_picture_may_have_the_profile_of_srgb(read):
    picture = read(saved(GREY, icc_profile=profile_of("sRGB")))
    assert np.array_equal(picture.pixels, np.asarray(GREY.convert("RGB")))


def test_what_macos_keeps_beside_a_picture_is_to_be_deleted(read):
    with pytest.raises(UsageError, match="macOS kept beside a file, and no picture; delete it$"):
        read(b"\0\5\x16\7" + bytes(4092))


def test_lossy_compression_is_noticed(read):
    assert read(saved(RGB, "JPEG")).lossy == "JPEG"
    assert read(saved(RGB, "TIFF", compression="jpeg")).lossy == "JPEG"
    assert read(saved(RGB, "TIFF", compression="tiff_adobe_deflate")).lossy == ""
    assert read(saved(RGB, "WEBP")).lossy == "WebP"
    assert read(saved(RGB, "WEBP", exif=rotated(1))).lossy == "WebP"  # the picture is a later chunk


def test_no_file_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name, words in (("none.png", "No such file"), ("pipe.png", "a pipe"), (".", "a folder")):
        with pytest.raises(UsageError, match=words):
            read_picture(tmp_path / name)
