"""The accelerated networks, one file a family, and how one is loaded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from accel.fast import dit, large_dit
from accel.fast.dit import FastDiT
from accel.kernels.linear import Tuner
from accel.network import rows_of_a_latent
from accel.precision import TIERS


class Family(NamedTuple):
    """A kind of network: how its state dict names the blocks, and how it is built."""

    blocks: str
    build: Callable[..., FastDiT]  # (state, module, tier, device, optimisations, tuner)


FAMILIES = Family("blocks", dit.build_like), Family("layers", large_dit.build)


def family_of(model: torch.nn.Module) -> Family:
    """The family of a module of network.MODELS' classes, whose parameters begin with its blocks' name."""
    names = model.state_dict()
    return next(family for family in FAMILIES if f"{family.blocks}.0.adaLN_modulation.1.weight" in names)


def load(
    state: dict[str, torch.Tensor],
    model: torch.nn.Module,
    tier: str,
    device: torch.device,
    batch_rows: int,
    guided: bool = True,
    tuner: Tuner | None = None,
) -> FastDiT:
    """The accelerated network of `tier` with the weights `state`. Kernels are compiled while the weights are copied.

    model: of the same shape, without values (on the meta device). batch_rows: of one evaluation on this rank; guided:
    whether the steps have guidance. Raises ValueError, naming the layer, for weights that the tier cannot hold.
    """
    tuner, family = tuner or Tuner(), family_of(model)
    first, others = f"{family.blocks}.0.", f"{family.blocks}."
    zeros = {
        name: torch.zeros(value.shape, dtype=TIERS[tier].dtype, device=device)
        for name, value in model.state_dict().items()
        if name.startswith(first) or not name.startswith(others)
    }
    shallow = family.build(zeros, model, tier, device, tuner=tuner)
    n = batch_rows // rows_of_a_latent(batch_rows, guided)
    side = round(len(shallow.position) ** 0.5) * shallow.patch_size
    latents = torch.zeros(n, shallow.in_channels, side, side, device=device)
    calls = shallow.kernel_calls(latents, batch_rows, guided)

    # The threads' tensors are freed below: in the order of this stream.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def warm_up(call):
        # A thread begins on GPU 0, to which leaving a stream of another one would return: that makes a context there.
        with torch.inference_mode(), torch.cuda.device_of(latents), torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = [pool.submit(warm_up, call) for call in calls]
        network = family.build(state, model, tier, device, tuner=tuner)
        for job in compiling:
            job.result()
    return network
