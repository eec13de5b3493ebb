"""Fetch the missing files of a run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from accel.checkpoints.loading import WeightFiles
from accel.config import rules
from accel.decoders.loading import recognise
from accel.errors import UsageError


def fetch(opened: list[WeightFiles], values: rules.Values) -> None:
    """Fetch files of weights, and the decoder that is known without them. Raises one UsageError
    for all that is missing.
    """
    work: list[Callable[[], Any]] = [each.fetch for each in opened]
    default = None if "ckpt" in values else rules.named_defaults(values).vae
    decoder = values.get("vae", default)
    if rules.decodes(values) and decoder is not None:
        # Statistics of its latents may follow from the weights.
        work.insert(0, partial(recognise, str(decoder)))
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
