"""Accelerated networks: a family's weights, packed for the ops of a tier."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from accel.fast.network import FastNetwork, Packing
from accel.fast.ops import DirectOps, SplitOps
from accel.fast.reader import Reader
from accel.kernels.linear import Tuner
from accel.runtime.precision import TIERS
from accel.runtime.stages import stages_of

StateDict = dict[str, torch.Tensor]
# A function of each family: (reader, reference network, ops) → packed weights.
Pack = Callable[[Reader, Any, DirectOps | SplitOps], Packing]


def assemble(
    state: StateDict, model: torch.nn.Module, pack: Pack, ops: DirectOps | SplitOps
) -> FastNetwork:
    """Build the accelerated network for the weights `state`, which computes with `ops`.

    state: on any device. model: the reference network, which may be on the meta device; it defines
    heads, sizes and the timestep embedding. pack: the family's function. Raises ValueError, naming
    the layer or tensor, for weights out of the tier's range and for unread tensors.
    """
    read = Reader(state, ops.device, ops.stream)
    packing = pack(read, model, ops)
    read.require_all_read()
    return FastNetwork(packing, ops)


def build(
    state: StateDict,
    model: torch.nn.Module,
    pack: Pack,
    tier: str,
    device: torch.device,
    tuner: Tuner | None = None,
    gemm: str = "auto",
) -> FastNetwork:
    """Build the accelerated network for a tier; see `assemble`.

    tuner: chooses the algorithms of GEMMs. gemm: the backend of GEMMs.
    """
    if tier == "exact":
        return assemble(state, model, pack, SplitOps(device, gemm))
    return assemble(state, model, pack, DirectOps(TIERS[tier].dtype, device, tuner, gemm))


def load(
    state: StateDict,
    model: torch.nn.Module,
    pack: Pack,
    tier: str,
    device: torch.device,
    rows: int,
    tuner: Tuner | None = None,
) -> FastNetwork:
    """Build the accelerated network as `build` does, and compile its kernels at the same time.

    model: on the meta device. rows: batch rows per evaluation on this rank.
    """
    shallow = build(zero_state(model, device), model, pack, tier, device, tuner)
    calls = warmup_calls(shallow, rows)

    # Threads use the current stream, so that memory they free can be reused in stream order.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def warm_up(call):
        # Threads start with GPU 0 as current device. Without device_of, leaving the stream context
        # would switch back to it and create a CUDA context there.
        with (
            torch.inference_mode(),
            torch.cuda.device_of(shallow.position),
            torch.cuda.stream(stream),
        ):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = pool.map(warm_up, calls)  # starts immediately
        network = build(state, model, pack, tier, device, tuner)
        list(compiling)  # raises the exception of a failed call
    return network


def zero_state(model: torch.nn.Module, device: torch.device) -> StateDict:
    """Return a state dict of zeros for a reference network with only one block per stage.

    The zeros are expanded scalars and need no memory.
    """
    omitted: set[torch.nn.Module] = set()
    for stage in stages_of(model):
        omitted.update(stage.blocks[1:])
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module in omitted)
    zero = torch.zeros((), device=device)
    return {
        name: zero.expand(value.shape)
        for name, value in model.state_dict().items()
        if not name.startswith(prefixes)
    }


def warmup_calls(network: FastNetwork, rows: int) -> list[Callable[[], object]]:
    """Return functions that together run every kernel of an evaluation of `rows` batch rows.

    Each creates a tensor first, because a thread has no CUDA context before its first torch
    operation, and kernels launched by the driver API need one.
    """
    t = torch.zeros(rows, dtype=torch.int64, device=network.position.device)
    condition = network.condition(t, t)
    parts = tuple(position.repeat(rows, 1, 1) for position in network.positions)  # (N, T, D)
    embedded: Any = parts if len(parts) > 1 else parts[0]
    x = embedded
    calls: list[Callable[[], object]] = []
    for stage in network.stages:
        by_head_stage = network.head_stage is not None and stage is network.stages[-1]
        modulation = condition if by_head_stage else stage.modulate(x, condition)
        x = stage.enter(x, embedded, condition)  # (N, T, D)
        branch = (x.to(network.dtype), 0)
        for count in range(0 if by_head_stage else 3):
            calls.append(partial(_adaln, network.adaln, x, modulation, (branch,) * count))
        tokens = x.shape[1]
        block = stage.blocks[0]
        calls.append(partial(_attend, network, block, stage.num_heads, rows, tokens))
        calls += [partial(layer.prepare, rows * tokens) for layer in block.gemms]
        if block.activate:
            calls.append(partial(_activate, block))
    if network.head_stage is None:
        calls.append(partial(_adaln, network.last_adaln, x, modulation, (branch, branch)))
    else:
        calls += network.head_stage.warmup_calls(rows * tokens)
    picture_tokens = rows * len(network.position)
    for layer in (*network.embeddings, network.last):
        calls.append(partial(layer.prepare, picture_tokens))
    return calls


def _adaln(kernel, x, modulation, branches):
    """Run an adaLN kernel on a copy of x, because it may overwrite x."""
    kernel(x.clone(), modulation, 0, branches)


def _activate(block):
    """Run a block's activation on zeros, one token."""
    block.activate(block.fc1.zeros(1, 1))


def _attend(network, block, num_heads, rows, tokens):
    """Run a block's rotation and attention on zeros."""
    packed = block.qkv.zeros(rows, tokens)
    if block.rotate:
        packed = block.rotate(packed)
    network.attention(packed, num_heads)
