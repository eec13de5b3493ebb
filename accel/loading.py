"""Load a network: weights, a tier and a device → a network that is ready to be tuned."""

from math import prod
from typing import TYPE_CHECKING

import torch

from accel.errors import UsageError
from accel.families.recognise import Fit, reference_state, require_sinusoid
from accel.network import WHOLE, Batch, Network, Part, Plain
from accel.precision import TIERS
from accel.weights import Weights

if TYPE_CHECKING:  # chooses GEMMs: other tiers need not wait for it
    from accel.kernels.linear import Tuner


def load_network(
    weights: Weights,
    fit: Fit,
    tier: str,
    device: torch.device,
    batch: Batch,
    tuner: "Tuner | None" = None,
    part: Part = WHOLE,
) -> Network:
    """Return the network of a tier, not tuned and not checked. Each weight goes from the
    mapped file to the device.
    """
    state = reference_state(weights, fit)
    model = fit.empty(batch.side)
    table = state.get("pos_embed")
    # a function of the grid: any size will do
    if table is not None and table.shape != model.pos_embed.shape:
        require_sinusoid(weights.name, table, "sample at the size that it was trained at")
        state = {**state, "pos_embed": model.position_table()}
    if TIERS[tier].accelerated or part.ranks > 1:  # a reference network is never divided
        pack = fit.family.pack
        from accel import fast  # brings Triton; the other tiers need not wait for it

        try:
            return fast.load(state, model, pack, tier, device, prod(batch.rows[0]), tuner, part)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"`ckpt={weights.name}`: {error}") from None
    # First to the device: of weights in half precision the CPU never holds a float32
    # copy. Strides decide rounding.
    state = {name: value.to(device).float().contiguous() for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return Plain(model.eval().requires_grad_(False))
