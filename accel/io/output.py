"""Names and formats of output files: PNG of a picture or a grid, folders, .npy of latents. Imports
no torch.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import UsageError, path_errors
from accel.io.filesystem import atomic_write, require_writable
from accel.io.labels import NULL, file_name

if TYPE_CHECKING:  # torch is slow to import
    from torch import Tensor

SUFFIX = {"image": ".png", "latent": ".npy"}  # by output type
TEXT_KEY = "dit-sampling"  # of the settings in a PNG, JSON
NO_SPACE = "free some space, or choose another path"
NAME_LIMIT = 48  # characters of a class name, up to four bytes each; a file name has 255 bytes


def is_folder(output: str, output_type: str) -> bool:
    """Whether `output` is a folder with one file per picture. output_type: image or latent."""
    # isdir is also false for a name that is too long
    return output_type == "image" and (output.endswith("/") or os.path.isdir(output))


def picture_names(labels: tuple[int, ...], class_names: tuple[str, ...]) -> list[str]:
    """Return the file names of pictures in a folder. class_names: of all classes, or () if
    unknown.
    """
    words = [
        file_name([*class_names, NULL][label].split(",")[0])[:NAME_LIMIT] if class_names else ""
        for label in labels
    ]
    return [
        f"{index:03d}-{label}{word and '-'}{word}.png"
        for index, (label, word) in enumerate(zip(labels, words))
    ]


def outputs_of(values: Mapping[str, Any]) -> list[str]:
    """Return the output file or folder of each grid. values: of the options."""
    output_type = values.get("output_type", "image")
    output = values.get("output", f"sample{SUFFIX[output_type]}")
    names = [(f"seed-{seed}", f"-seed-{seed}") for seed in values.get("seed_list", ())]
    if values.get("grids", 1) > 1:
        names = [(f"grid-{index}", f"_{index}") for index in range(values["grids"])]
    path = Path(output)
    if is_folder(output, output_type):
        numbered = [f"{path}/{folder}/" for folder, _ in names]
    else:
        numbered = [f"{path.with_suffix('')}{ending}{path.suffix}" for _, ending in names]
    return numbered or [output]


def require_outputs(values: Mapping[str, Any]) -> None:
    """Create the folders of all outputs and check that they are writable. Raises UsageError, also
    if the default output is the picture of --like.
    """
    output_type = values.get("output_type", "image")
    repeated = None if "output" in values else values.get("like")
    for path in outputs_of(values):
        check_writable(Path(path, "000.png") if is_folder(path, output_type) else path)
        if repeated and os.path.exists(path) and os.path.samefile(path, repeated):
            raise UsageError(
                "would be replaced by its repetition",
                "give an `output`",
                parameter="like",
                value=repeated,
            )


def check_writable(path: str | Path, name: str = "output") -> None:
    """Create the folder of a file and check that the file, or the target of a link, is writable.
    name: the parameter. Raises UsageError.
    """
    with path_errors(name, path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise UsageError(
                "is a folder, a device or a pipe", "name a file", parameter=name, value=path
            )
        with suppress(FileNotFoundError):
            os.lstat(target)  # fails for a name that is too long
        target.parent.mkdir(parents=True, exist_ok=True)
        require_writable(target.parent)


def to_uint8(pixels: "Tensor", to_uint8_range: "Callable[[Tensor], Tensor]") -> "Tensor":
    """Convert pixels (n, 3, H, W) in (-1, 1) to contiguous (n, H, W, 3) uint8 on the CPU,
    truncating as FID jobs do. to_uint8_range: of the decoder.
    """
    import torch

    pictures = to_uint8_range(pixels).clamp(0, 255).permute(0, 2, 3, 1)
    return pictures.to(torch.uint8, memory_format=torch.contiguous_format).cpu()


def to_grid(pixels: "Tensor", columns: int = 4, padding: int = 2) -> "Tensor":
    """Arrange pixels (n, 3, H, W) in (-1, 1) as one image (H', W', 3) uint8 on the CPU, with
    `columns` images per row and black borders.

    Bit-identical to torchvision.utils.save_image with normalize and value_range=(-1, 1); a single
    image has no border.
    """
    import torch

    tiles = pixels.float().clamp(-1, 1).sub(-1).div(2)
    if len(tiles) == 1:
        grid = tiles[0]
    else:
        n, channels, height, width = tiles.shape
        columns = min(columns, n)
        rows = -(-n // columns)
        grid = tiles.new_zeros(
            channels, rows * (height + padding) + padding, columns * (width + padding) + padding
        )
        for index, tile in enumerate(tiles):
            top = index // columns * (height + padding) + padding
            left = index % columns * (width + padding) + padding
            grid[:, top : top + height, left : left + width] = tile
    return grid.mul(255).add(0.5).clamp(0, 255).permute(1, 2, 0).to(torch.uint8).cpu()


def save_latents(path: str | Path, latents: "Tensor") -> None:
    """Write latents as a float32 .npy atomically. Raises UsageError if writing fails."""
    import numpy as np

    with path_errors("output", path, NO_SPACE), atomic_write(path) as file:
        np.save(file, latents.float().cpu().numpy())


def save_pictures(
    path: str | Path, pixels: "Tensor", record: Mapping[str, Any] | None = None
) -> None:
    """Write pixels (n, 3, H, W) in (-1, 1) as one PNG, four images per row, atomically. record:
    its settings, JSON data. Raises UsageError if writing fails.
    """
    from PIL import Image, PngImagePlugin

    text = PngImagePlugin.PngInfo()
    if record is not None:
        text.add_text(TEXT_KEY, json.dumps(record))
    image = Image.fromarray(to_grid(pixels).numpy())
    # For photographs, level 2 takes a quarter of the default's time and 8 % more bytes.
    with path_errors("output", path, NO_SPACE), atomic_write(path) as file:
        image.save(file, "PNG", compress_level=2, pnginfo=text)


def print_result(
    files: Sequence[str | Path],
    seconds: Mapping[str, float],
    settings: Mapping[str, Any],
    **more: Any,
) -> None:
    """Print the last line of --json. seconds: by phase. settings: value and origin, by name."""
    result = dict(files=files, seconds=seconds, settings=settings, **more)
    print(json.dumps(result, default=str), flush=True)
