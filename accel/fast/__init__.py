"""The accelerated networks, one file a family, and how one is loaded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from accel.families.dit.network import DiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.sit.network import SiT
from accel.fast import dit, large_dit, sit
from accel.fast.dit import FastDiT
from accel.kernels.ancestral_update import ancestral_update
from accel.kernels.linear import Tuner
from accel.precision import TIERS


class Family(NamedTuple):
    """A kind of network: how its state dict names the blocks, and how it is built."""

    blocks: str
    build: Callable[..., FastDiT]  # (state, module, tier, device, tuner, gemm)


FAMILIES = {  # by the classes of network.MODELS
    DiT: Family("blocks", dit.build),
    DiT_Llama: Family("layers", large_dit.build),
    SiT: Family("blocks", sit.build),
}


def family_of(model: torch.nn.Module) -> Family:
    """The family of a module of network.MODELS' classes, or of one derived from them."""
    return next(FAMILIES[kind] for kind in type(model).__mro__ if kind in FAMILIES)


def load(
    state: dict[str, torch.Tensor],
    model: torch.nn.Module,
    tier: str,
    device: torch.device,
    latents: int,
    copies: int = 1,
    guided_channels: int = 0,
    tuner: Tuner | None = None,
) -> FastDiT:
    """The accelerated network of `tier` with the weights `state`. Kernels are compiled while the weights are copied.

    model: of the same shape, without values (on the meta device). latents: of one evaluation on this rank, each in
    `copies` batch rows. guided_channels: of a step's guidance, 0 without. Raises ValueError, naming the layer, for
    weights that the tier cannot hold.
    """
    tuner, family = tuner or Tuner(), family_of(model)
    first, others = f"{family.blocks}.0.", f"{family.blocks}."
    zeros = {
        name: torch.zeros(value.shape, dtype=TIERS[tier].dtype, device=device)
        for name, value in model.state_dict().items()
        if name.startswith(first) or not name.startswith(others)
    }
    shallow = family.build(zeros, model, tier, device, tuner)
    calls = kernel_calls(shallow, latents, copies, guided_channels)

    # The threads' tensors are freed below: in the order of this stream.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def warm_up(call):
        # A thread begins on GPU 0, to which leaving a stream of another one would return: that makes a context there.
        with torch.inference_mode(), torch.cuda.device_of(shallow.position), torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = [pool.submit(warm_up, call) for call in calls]
        network = family.build(state, model, tier, device, tuner)
        for job in compiling:
            job.result()
    return network


def kernel_calls(network: FastDiT, latents: int, copies: int, guided_channels: int) -> list[Callable[[], object]]:
    """Every kernel of a sampling step, once, for warming up: an evaluation on so many latents in `copies` batch rows
    each, and an update of a latent."""
    rows, tokens = latents * copies, len(network.position)
    side = round(tokens**0.5) * network.patch_size
    x = network.position.new_zeros(latents, network.in_channels, side, side)
    t = torch.zeros(rows, dtype=torch.int64, device=x.device)
    h = network.position.repeat(rows, 1, 1)  # (N, T, D)
    branch, condition = (h.to(network.dtype), 0), network.condition(t, t)
    layers, one = network.blocks[0], x[:1]
    out = h.new_zeros(2 if guided_channels else 1, tokens, 2 * network.patches.shape[1])
    # Each makes a tensor first: a thread has no CUDA context before its first operation of torch, which kernels of our
    # own ask for.
    return [
        partial(network.embed, x, copies=copies),
        *(partial(network.adaptive_norm, h.clone(), condition, 0, (branch,) * count) for count in range(3)),
        lambda: network.last_norm(h.clone(), condition, 0, (branch, branch)),
        lambda: network.attention(layers[0].zeros(rows, tokens), network.num_heads),
        lambda: network.attend_in_block(0, layers[0].zeros(1, tokens), lambda qkv, heads: qkv),
        *(partial(layer.prepare, rows * tokens) for layer in layers),
        lambda: ancestral_update(out, one, one, t[:1], h.new_zeros(1, 6), 1.0, guided_channels),
    ]
