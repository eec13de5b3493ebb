"""Load a network: weights, a tier and a device → a network that is ready to sample."""

import gc
from math import prod
from typing import TYPE_CHECKING

import torch

from accel.errors import UsageError
from accel.families.recognise import Fit, reference_state, require_sinusoid
from accel.gpu import missing_code
from accel.network import WHOLE, Batch, Network, Part, Plain, overflows, remedy
from accel.precision import TIERS, apply_precision, supports
from accel.weights import Weights

if TYPE_CHECKING:  # chooses GEMMs: other tiers need not wait for it
    from accel.kernels.linear import Tuner


def choose_device(name: str | None) -> torch.device:
    """Return the device of this name, by default a GPU if there is one. Raises UsageError
    if this machine lacks it.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(
            f"`device={name}`: no such kind of device; try cuda, cuda:1 or cpu"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                f"`device={device}`: torch {torch.__version__} finds no CUDA GPU; use `device=cpu`"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"`device={device}`: this machine has {torch.cuda.device_count()} GPU(s), counted "
                "from 0"
            )
        if remedy := missing_code(device):
            kind = torch.cuda.get_device_name(device)
            version = torch.__version__
            raise UsageError(
                f"`device={device}`: torch {version} has no code for {kind}; install {remedy}"
            )
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(
            f"`device={device}`: torch {torch.__version__} cannot sample there; use cuda or cpu"
        )
    return device


def load(
    weights: Weights,
    fit: Fit,
    tier: str,
    device: torch.device,
    batch: Batch,
    *,
    fixed: bool = True,
    tuner: "Tuner | None" = None,
    part: Part = WHOLE,
) -> tuple[Network, str]:
    """Return (network, its tier): bf16 if the weights overflow float16 and the tier is
    not `fixed`.

    fit: of the weights; tuner: chooses the GEMMs' algorithms; part: the part of the
    weights that this rank reads and holds. Raises UsageError for weights that are
    missing, that belong to another model, or that the tier cannot hold.
    """
    with weights.reading():
        network = load_network(weights, fit, tier, device, batch, tuner, part)
    network.tune({prod(rows) * (batch.side // network.patch_size) ** 2 for rows in batch.rows})
    if not TIERS[tier].accelerated or tier == "bf16":
        return network, tier
    from_rank_0 = tuner.share if part.ranks > 1 else lambda make: make()
    from_rank_0(lambda: None)  # a rank that failed raises here: none waits for it below
    too_large = overflows(network, batch, device, fit.family.some_times)
    if not from_rank_0(lambda: too_large):
        return network, tier
    if fixed or tier == "exact" or not supports("bf16", device):
        raise UsageError(
            f"`precision={tier}`: overflows on these weights; {remedy(network, tier, device)}"
        )
    print("these weights overflow float16: sampling in bfloat16")
    apply_precision("bf16", device)
    del network  # free its memory first
    return load(weights, fit, "bf16", device, batch, tuner=tuner, part=part)


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


def free_memory(device: torch.device) -> None:
    """Free the memory of a network that nothing refers to any more, with its captured steps."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
