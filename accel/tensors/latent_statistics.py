"""Per-channel statistics of latents in checkpoints, under the names of the training programs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MEAN_AND_VARIANCE = "bn.running_mean", "bn.running_var"
BIAS_AND_SCALE = "latents_bias", "latents_scale"  # mean and inverse std
PAIRS = MEAN_AND_VARIANCE, BIAS_AND_SCALE


def mean_and_deviation(content: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return mean and std of the first pair that a checkpoint contains, or None. Shapes and dtypes
    are unchanged.
    """
    for pair in PAIRS:
        if all(isinstance(content.get(name), Tensor) for name in pair):
            mean, spread = (content[name] for name in pair)
            return mean, 1 / spread if pair == BIAS_AND_SCALE else spread.sqrt()
    return None
