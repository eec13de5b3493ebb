"""Statistics of latents by channel, under the names that training programs give them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MEAN_AND_VARIANCE = "bn.running_mean", "bn.running_var"
BIAS_AND_SCALE = "latents_bias", "latents_scale"  # mean and inverse deviation
PAIRS = MEAN_AND_VARIANCE, BIAS_AND_SCALE


def mean_and_deviation(content: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of a file's first pair, each as it lies there; None
    without a whole pair.
    """
    for pair in PAIRS:
        if all(isinstance(content.get(name), Tensor) for name in pair):
            mean, spread = (content[name] for name in pair)
            return mean, 1 / spread if pair == BIAS_AND_SCALE else spread.sqrt()
    return None
