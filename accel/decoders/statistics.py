"""Read the mean and standard deviation by which latents are normalised."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from accel.decoders import LatentSpace
from accel.errors import UsageError
from accel.tensors.tables import mean_and_deviation
from accel.tensors.tensor_files import read_tensors

MAX_MAGNITUDE = 1e6  # far above plausible values
MINIMUM = {"mean": -MAX_MAGNITUDE, "std": 1 / MAX_MAGNITUDE, "var": 0.0}


def read_statistics(file: Path, spread: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Read the mean and `spread` ("std" or "var") of latents, expanded to `shape` (C, H, W). In
    RAE's files with var the mean is optional and defaults to 0. Raises UsageError.
    """
    content = read_tensors(file, "latent_stats")
    pair = mean_and_deviation(content)
    if pair is not None:
        mean, std = pair
        content = {"mean": mean, "std": std, "var": std.square()}
    elif spread == "var" and content.get("mean") is None:
        content = {**content, "mean": torch.zeros(shape)}
    statistics = []
    for name in ("mean", spread):
        value = content.get(name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise UsageError(
                f"must contain tensors mean and {spread}, and lacks {name}",
                parameter="latent_stats",
                value=file,
            )
        if value.numel() == shape[0]:  # per channel
            value = value.reshape(-1, 1, 1).expand(shape)
        elif value.numel() == prod(shape) and value.shape[-3:] == shape:
            value = value.reshape(shape)
        else:
            raise UsageError(
                f"{name} is of shape {tuple(value.shape)}, and the decoder's latents are {shape}",
                "give its own",
                parameter="latent_stats",
                value=file,
            )
        if not ((value >= MINIMUM[name]) & (value <= MAX_MAGNITUDE)).all():
            raise UsageError(
                f"contains invalid values of {name}",
                "compute it again",
                parameter="latent_stats",
                value=file,
            )
        statistics.append(value)
    return statistics


def with_statistics(space: LatentSpace, file: str | Path) -> LatentSpace:
    """Return the space with the per-channel mean and std of a file in place of its scale."""
    mean, std = read_statistics(Path(file), "std", (space.channels, 1, 1))
    return space._replace(
        mean=tuple(mean.flatten().tolist()), std=tuple(std.flatten().tolist()), scale=1.0, shift=0.0
    )
