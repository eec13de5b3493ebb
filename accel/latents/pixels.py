"""Pixels → bytes: of single pictures, as FID jobs take them, and of a grid."""

import torch


def to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Convert pixels (n, 3, H, W) in (-1, 1) → (n, H, W, 3) uint8 on the CPU, contiguous:
    127.5·x + 128, truncated, as in FID jobs.
    """
    levels = (127.5 * pixels + 128.0).clamp(0, 255).permute(0, 2, 3, 1)
    return levels.to(torch.uint8, memory_format=torch.contiguous_format).cpu()


def to_grid(pixels: torch.Tensor, columns: int = 4, padding: int = 2) -> torch.Tensor:
    """Lay out pixels (n, 3, H, W) in (-1, 1) as a picture (H', W', 3) uint8 on the CPU,
    `columns` a row, black borders.

    The same bits as torchvision.utils.save_image with value_range=(-1, 1); like there, a
    single picture has no border.
    """
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
