"""Fetch the files of a run that are not on this machine."""

from collections.abc import Callable
from typing import Any

from accel.config import Config
from accel.errors import UsageError
from accel.guide import about_guide
from accel.latents import LatentSpace
from accel.latents.files import find
from accel.weights import Weights
from accel.weights.checkpoint import Checkpoint


def fetch(
    config: Config, weights: Weights, guide: Weights | None, decodes: bool
) -> LatentSpace | None:
    """Fetch weights and guide, and the decoder that is known without them. Return its space or
    None. Raises one UsageError for all that is missing.
    """
    missing = []

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UsageError as error:
            missing.append(error.marked)
            return None

    name = config.named_decoder
    space = None
    if decodes and name is not None:
        space = attempt(lambda: find(name, config.latent_stats))
    if isinstance(weights, Checkpoint):
        attempt(weights.fetch)
    if isinstance(guide, Checkpoint):
        attempt(about_guide()(guide.fetch))
    if len(missing) > 1:
        missing.append("or use `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
    return space
