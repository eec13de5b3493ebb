"""Read image files whose stored values are the values that a viewer shows. Imports no torch.

Refused are corrupt files, rotation, colour profiles, transparency, animation and more than 8 bits
per channel.
"""

import io
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from accel.errors import UsageError, shown
from accel.io.filesystem import read_small

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")
MAX_BYTES = 2**28  # of a file; Pillow limits the number of pixels
ORIENTATION = 0x0112  # EXIF tag
OPAQUE_MODES = ("1", "L", "P", "RGB")
REMAKE = "make it again, or delete it"
CONVERT = "save it upright as an 8-bit sRGB PNG without alpha"


class Picture(NamedTuple):
    """The content of an image file."""

    pixels: np.ndarray  # (H, W, 3) uint8
    mode: str  # of the file, as Pillow names it: 1, L, P or RGB

    @property
    def size(self) -> str:
        """Width and height as text, such as 512x256."""
        height, width, _ = self.pixels.shape
        return f"{width}x{height}"


def read_picture(path: Path) -> Picture:
    """Read an image file. Raises UsageError unless it contains one intact image of 8 bits per
    channel, upright, sRGB and opaque.
    """
    try:
        content = read_small(path, MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; name another file") from None
    try:
        Image.open(io.BytesIO(content), formats=FORMATS).verify()
        image = Image.open(io.BytesIO(content))
        has_16_bits = _has_16_bits(image)
        image.load()
    except UnidentifiedImageError:
        raise UsageError(f"{path}: is not {', '.join(FORMATS)}, or is corrupt; {REMAKE}") from None
    except Exception as error:  # corrupt files can raise any exception
        raise UsageError(f"{path}: is corrupt ({shown(str(error), 200)}); {REMAKE}") from None
    frames = getattr(image, "n_frames", 1)
    orientation = image.getexif().get(ORIENTATION, 1)
    profile = image.info.get("icc_profile")
    reasons = {
        f"has {frames} frames": frames > 1,
        "has 16 bits a channel": has_16_bits,
        f"has transparency (mode {image.mode})": image.has_transparency_data,
        f"has the mode {image.mode}": image.mode not in OPAQUE_MODES,
        f"is rotated or mirrored by its EXIF orientation, {orientation}": orientation not in (0, 1),
        "has a colour profile other than sRGB": bool(profile) and not _is_srgb(profile),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(f"{path}: {reason}; {CONVERT}")
    return Picture(np.asarray(image.convert("RGB")), image.mode)


def _has_16_bits(image):
    """Whether Pillow would drop bits. image: not loaded yet."""
    if image.format == "PPM" and isinstance(image.tile[0].args, tuple):
        _, largest = image.tile[0].args
        return largest > 255
    return any(";16" in str(tile.args) for tile in image.tile)  # raw mode such as RGB;16B


@lru_cache(maxsize=64)
def _is_srgb(profile: bytes) -> bool:
    """Whether a colour profile is sRGB's by its description."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return "srgb" in ImageCms.getProfileDescription(source).lower()
    except (OSError, ImageCms.PyCMSError):  # corrupt
        return False
