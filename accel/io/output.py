"""Files of pictures and latents: their names; pixels → PNG, grid, folder; latents → .npy.
Imports no torch.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import about, path_errors
from accel.io.filesystem import atomic_write, require_name, require_writable
from accel.io.labels import NULL, file_name

if TYPE_CHECKING:  # torch is slow to import
    from torch import Tensor

SUFFIX = {"image": ".png", "latent": ".npy"}  # of a file, by the output type
# characters of a class's name: up to four bytes each, of 255 in the name of a file
NAME_LIMIT = 48


def is_folder(output: str, output_type: str) -> bool:
    """Return whether `output` is a folder for a file a picture. output_type: image or latent."""
    # False where the name is too long, too
    return output_type == "image" and (output.endswith("/") or os.path.isdir(output))


def picture_names(labels: tuple[int, ...], class_names: tuple[str, ...]) -> list[str]:
    """Return the names of pictures in a folder. class_names: of all classes, () where
    they are unknown.
    """
    words = [
        file_name([*class_names, NULL][label].split(",")[0])[:NAME_LIMIT] if class_names else ""
        for label in labels
    ]
    return [
        f"{index:03d}-{label}{word and '-'}{word}.png"
        for index, (label, word) in enumerate(zip(labels, words))
    ]


def of_seed(output: str, output_type: str, seed: int) -> str:
    """Return the file or folder of one of several seeds: OUTPUT-seed-0.png or OUTPUT/seed-0/."""
    path = Path(output)
    return (
        f"{path}/seed-{seed}/"
        if is_folder(output, output_type)
        else f"{path.with_suffix('')}-seed-{seed}{path.suffix}"
    )


def outputs_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the file or folder of the grid of each seed. values: of options, by name."""
    output_type = values.get("output_type", "image")
    output = values.get("output", f"sample{SUFFIX[output_type]}")
    if "seed_list" not in values:
        return (output,)
    return tuple(of_seed(output, output_type, seed) for seed in values["seed_list"])


def require_outputs(values: Mapping[str, Any]) -> None:
    """Make the folders of all outputs and prove that files can be written there. Raises
    UsageError.
    """
    output_type = values.get("output_type", "image")
    for path in outputs_of(values):
        check_writable(Path(path, "000.png") if is_folder(path, output_type) else path)


def check_writable(path: str | Path, name: str = "output") -> None:
    """Make the folder of a file and prove that the file, or a link's target, can be
    written. name: the parameter. Raises UsageError.
    """
    with path_errors(name, path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise about(name, path)("is a folder, a device or a pipe", "name a file")
        target.parent.mkdir(parents=True, exist_ok=True)
        require_name(target)
        require_writable(target.parent)


def to_uint8(pixels: "Tensor", to_uint8_range: "Callable[[Tensor], Tensor]") -> "Tensor":
    """Convert pixels (n, 3, H, W) in (-1, 1) → (n, H, W, 3) uint8 on the CPU, contiguous:
    truncated, as in FID jobs. to_uint8_range: the decoder's.
    """
    import torch

    pictures = to_uint8_range(pixels).clamp(0, 255).permute(0, 2, 3, 1)
    return pictures.to(torch.uint8, memory_format=torch.contiguous_format).cpu()


def to_grid(pixels: "Tensor", columns: int = 4, padding: int = 2) -> "Tensor":
    """Lay out pixels (n, 3, H, W) in (-1, 1) as a picture (H', W', 3) uint8 on the CPU,
    `columns` a row, black borders.

    The same bits as torchvision.utils.save_image with value_range=(-1, 1); like there, a
    single picture has no border.
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
    """Write latents as a float32 .npy, whole or not at all. Raises UsageError if the disk
    does not take it.
    """
    import numpy as np

    _write(path, lambda file: np.save(file, latents.float().cpu().numpy()))


def save_pictures(path: str | Path, pixels: "Tensor") -> None:
    """Write pixels (n, 3, H, W) in (-1, 1) as one PNG, four pictures per row. Whole or not
    at all, as `save_latents`.
    """
    from PIL import Image

    # Of photographs level 2 takes a quarter of the default's time and 8 % more bytes.
    _write(
        path,
        lambda file: Image.fromarray(to_grid(pixels).numpy()).save(file, "PNG", compress_level=2),
    )


def _write(path, save):
    with (
        path_errors("output", path, "free some space, or choose another path"),
        atomic_write(path) as file,
    ):
        save(file)
