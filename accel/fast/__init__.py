"""The accelerated networks, one file a family, and how one is loaded."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from accel.fast import dit, large_dit
from accel.fast.dit import FastDiT, Optimisations
from accel.graphs import Replayed
from accel.kernels.linear import Tuner
from accel.network import rows_of_a_latent, unwrapped
from accel.precision import TIERS, float32_gemms


class Family(NamedTuple):
    """A kind of network: how its state dict names the blocks, what its module must have, how it is built."""

    blocks: str
    first_weight: str  # of a block; the family is recognised by it
    attributes: tuple[str, ...]
    build: Callable[..., FastDiT]  # (state, module, tier, device, optimisations, tuner)


FAMILIES = (
    Family("blocks", "attn.qkv.weight", ("num_heads",), dit.build_like),
    Family("layers", "attention.wq.weight", ("n_heads", "in_channels", "patch_size", "input_size"), large_dit.build),
)


def family_of(model: torch.nn.Module) -> Family:
    """The family of a module. Raises ValueError if it is of none."""
    names, kind = set(model.state_dict()), type(model).__name__
    firsts = [f"{family.blocks}.0.{family.first_weight}" for family in FAMILIES]
    family = next((family for family, first in zip(FAMILIES, firsts) if first in names), None)
    if family is None:
        raise ValueError(f"{kind} is not a DiT: no {' and no '.join(firsts)}")
    if missing := [name for name in family.attributes if not hasattr(model, name)]:
        raise ValueError(f"{kind} is not a DiT: no {', '.join(missing)}")
    return family


def accelerate(
    model: torch.nn.Module,
    precision: str = "fp16",
    device: torch.device | str | None = None,
    optimisations: Optimisations = Optimisations(),  # noqa: B008 (frozen)
) -> FastDiT:
    """A fast copy of a trained DiT or Large-DiT for sampling, with `forward(x, t, y)` and
    `forward_with_cfg(x, t, y, cfg_scale)`.

    The weights are copied, to `device` or where they are: training `model` further does not change the copy.

    model: models.DiT, large_dit.DiT_Llama or the original classes: the published state-dict keys, and the attributes
    that FAMILIES names. DataParallel, DistributedDataParallel and torch.compile are unwrapped. precision:
    "fp16", "bf16", "exact" (DiT only), "tf32" or "fp32". Raises ValueError for another precision or model.
    """
    if precision not in TIERS:
        raise ValueError(f"precision {precision!r}: choose from {', '.join(TIERS)}")
    model = unwrapped(model)
    family, state = family_of(model), model.state_dict()
    device = state["final_layer.linear.weight"].device if device is None else torch.device(device)
    network = family.build(state, model, precision, device, optimisations)
    network.source = weakref.ref(model)
    if not TIERS[precision].accelerated:
        switch = float32_gemms(tf32=precision == "tf32")
        network.forward, network.forward_with_cfg = switch(network.forward), switch(network.forward_with_cfg)
    if optimisations.graph and device.type == "cuda":
        network.forward = Replayed(network.forward)
        network.forward_with_cfg = Replayed(network.forward_with_cfg)
    return network


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
        with torch.inference_mode(), torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = [pool.submit(warm_up, call) for call in calls]
        network = family.build(state, model, tier, device, tuner=tuner)
        for job in compiling:
            job.result()
    return network
