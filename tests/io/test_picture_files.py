"""accel/io/picture_files.py: a file is read as a viewer shows it, or refused by name."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from conftest import mistake
from PIL import Image, ImageCms

from accel.errors import UsageError
from accel.io.picture_files import CONVERT, REMAKE, read_picture

PIXELS = np.random.default_rng(0).integers(0, 256, (21, 19, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)
GREY = RGB.convert("L")


def saved(image, file_format="PNG", **options):
    content = io.BytesIO()
    image.save(content, file_format, **options)
    return content.getvalue()


def png_of_16_bits():
    """Return PIXELS as a PNG of 16 bits, which Pillow does not write."""

    def chunk(name, data):
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in PIXELS)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 19, 21, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def rotated(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def profile_of(space):
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()


def other_rgb():
    """Return sRGB's profile with the description of another space."""
    name = "sRGB".encode("utf-16-be")
    return profile_of("sRGB").replace(name, "P3 D".encode("utf-16-be"))


def flipped(content, place):
    """Return a file with a flipped bit."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


SHOWN = {
    "PNG": saved(RGB),
    "sRGB's profile": saved(RGB, icc_profile=profile_of("sRGB")),
    "upright EXIF": saved(RGB, exif=rotated(1)),
    "WebP": saved(RGB, "WEBP", lossless=True),
    "BMP": saved(RGB, "BMP"),
    "TIFF": saved(RGB, "TIFF"),
    "PPM": saved(RGB, "PPM"),
}
MOVING = dict(save_all=True, append_images=[GREY.convert("RGB")])
NOT_PLAIN = {
    "16 bits": (png_of_16_bits(), "16 bits a channel"),
    "16-bit grey": (saved(Image.fromarray(PIXELS[..., 0].astype(np.uint16))), "16 bits a channel"),
    "16-bit PPM": (b"P6 2 2 65535\n" + bytes(24), "16 bits a channel"),
    "rotated": (saved(RGB, exif=rotated(6)), "EXIF orientation, 6"),
    "rotated JPEG": (saved(RGB, "JPEG", exif=rotated(3)), "EXIF orientation, 3"),
    "another profile": (saved(RGB, icc_profile=other_rgb()), "colour profile other than sRGB"),
    "LAB's profile": (saved(RGB, icc_profile=profile_of("LAB")), "colour profile other than sRGB"),
    "JPEG's profile": (saved(RGB, "JPEG", icc_profile=other_rgb()), "colour profile"),
    "CMYK": (saved(RGB.convert("CMYK"), "JPEG"), "the mode CMYK"),
    "alpha": (saved(RGB.convert("RGBA")), "transparency (mode RGBA)"),
    "transparent palette": (saved(RGB.convert("P"), transparency=3), "transparency (mode P)"),
    "animated": (saved(RGB, **MOVING), "2 frames"),
    "animated WebP": (saved(RGB, "WEBP", **MOVING), "2 frames"),
    "two pages": (saved(RGB, "TIFF", **MOVING), "2 frames"),
}
LARGE = flipped(saved(Image.new("1", (20000, 10000))), -20)
DAMAGED = {
    "empty": (b"", "PNG, JPEG, WEBP, BMP, PPM, TIFF"),
    "text": (b"not a picture", "PNG, JPEG"),
    "cut": (saved(RGB)[:-100], "corrupt (Truncated File Read)"),
    "no end": (saved(RGB)[:-12], "corrupt (truncated PNG file)"),
    "cut JPEG": (saved(RGB, "JPEG")[:-30], "truncated"),
    "cut WebP": (saved(RGB, "WEBP")[:-30], "corrupt"),
    "cut BMP": (saved(RGB, "BMP")[:-30], "truncated"),
    "cut TIFF": (saved(RGB, "TIFF", compression="tiff_lzw")[:-30], "corrupt"),
    "a flipped bit": (flipped(saved(RGB), 500), "checksum in b'IDAT'"),
    "a bomb": (LARGE, "decompression bomb"),
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
    assert picture.mode == "RGB" and picture.size == "19x21"


@pytest.mark.parametrize(
    "case, remedy",
    [
        *((case, CONVERT) for case in NOT_PLAIN.values()),
        *((case, REMAKE) for case in DAMAGED.values()),
    ],
    ids=[*NOT_PLAIN, *DAMAGED],
)
def test_what_a_viewer_shows_otherwise_and_damage_are_refused(case, remedy, read):
    content, words = case
    with pytest.raises(UsageError) as error:
        read(content)
    assert words in str(error.value) and str(error.value).endswith(remedy)


@pytest.mark.parametrize("mode, bits", [("1", 1), ("L", 8), ("P", 8), ("P", 2)])
def test_palettes_greys_and_packed_bits_are_shown(mode, bits, read):
    image = RGB.quantize(2**bits) if mode == "P" else RGB.convert(mode)
    picture = read(saved(image, bits=bits) if mode == "P" else saved(image))
    assert np.array_equal(picture.pixels, np.asarray(image.convert("RGB")))
    assert picture.mode == mode


def test_a_grey_picture_may_have_the_profile_of_srgb(read):
    picture = read(saved(GREY, icc_profile=profile_of("sRGB")))
    assert np.array_equal(picture.pixels, np.asarray(GREY.convert("RGB")))


def test_no_file_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name, words in (("none.png", "No such file"), ("pipe.png", "a pipe"), (".", "a folder")):
        with mistake("", words):
            read_picture(tmp_path / name)
