"""Fetch the files of a run that are not on this machine."""

from collections.abc import Callable
from functools import partial

from accel.config import Config
from accel.errors import UsageError
from accel.guide import about_guide
from accel.latents.files import find
from accel.weights import Weights
from accel.weights.checkpoint import Checkpoint


def fetch(config: Config, weights: Weights, guide: Weights | None, decodes: bool) -> None:
    """Fetch weights and guide, and the decoder that is known without them. Raises one UsageError
    for all that is missing.
    """
    work: list[Callable[[], object]] = []
    decoder = config.vae or (config.defaults.vae if config.ckpt is None else None)
    if decodes and decoder is not None:
        work.append(partial(find, decoder, config.latent_stats))
    if isinstance(weights, Checkpoint):
        work.append(weights.fetch)
    if isinstance(guide, Checkpoint):
        work.append(about_guide()(guide.fetch))
    missing = []
    for fetch_one in work:
        try:
            fetch_one()
        except UsageError as error:
            missing.append(error.marked)
    if len(missing) > 1:
        missing.append("or use `model=DiT-Demo/2`, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
