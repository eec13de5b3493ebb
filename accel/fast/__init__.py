"""Accelerated networks: weights of any family, packed for the ops of a tier."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from accel.fast.network import FastNetwork, Packing
from accel.fast.ops import HalfOps, SplitOps
from accel.fast.reader import Reader
from accel.kernels.linear import Tuner
from accel.runtime.precision import TIERS
from accel.runtime.stages import stages_of

StateDict = dict[str, torch.Tensor]
# A family's function: (reader, reference network, ops) → its weights, packed.
Pack = Callable[[Reader, Any, HalfOps | SplitOps], Packing]


def assemble(
    state: StateDict, model: torch.nn.Module, pack: Pack, ops: HalfOps | SplitOps
) -> FastNetwork:
    """Make the accelerated network of the weights `state`, on any device, computed with `ops`.

    model: the reference network, with or without values, for heads, sizes and the timestep's
    embedding. pack: its family's. Raises ValueError, naming the layer, for weights that the tier
    cannot hold, and for tensors that the packing did not read.
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
    """Make the accelerated network as `assemble` does, with the ops of a tier.

    tuner: chooses the GEMMs' algorithms. gemm: their backend.
    """
    if tier == "exact":
        return assemble(state, model, pack, SplitOps(device, gemm))
    return assemble(state, model, pack, HalfOps(TIERS[tier].dtype, device, tuner, gemm))


def load(
    state: StateDict,
    model: torch.nn.Module,
    pack: Pack,
    tier: str,
    device: torch.device,
    rows: int,
    tuner: Tuner | None = None,
) -> FastNetwork:
    """Make the accelerated network as `build` does; compile its kernels while weights are copied.

    model: of the same shape, without values (on the meta device). rows: batch rows of one
    evaluation on this rank.
    """
    shallow = build(zero_state(model, device), model, pack, tier, device, tuner)
    calls = warmup_calls(shallow, rows)

    # The threads' tensors are freed below: in the order of this stream.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def warm_up(call):
        # A thread begins on GPU 0. Leaving a stream of another GPU would return to it, and make
        # a context there.
        with (
            torch.inference_mode(),
            torch.cuda.device_of(shallow.position),
            torch.cuda.stream(stream),
        ):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = pool.map(warm_up, calls)  # begins at once
        network = build(state, model, pack, tier, device, tuner)
        list(compiling)  # raises what a call has raised
    return network


def zero_state(model: torch.nn.Module, device: torch.device) -> StateDict:
    """Return zeros for a reference network's tensors, of each stage with its first block alone.

    The zeros take no memory.
    """
    later: set[torch.nn.Module] = set()
    for stage in stages_of(model):
        later.update(stage.blocks[1:])
    left_out = tuple(f"{name}." for name, module in model.named_modules() if module in later)
    zero = torch.zeros((), device=device)
    return {
        name: zero.expand(value.shape)
        for name, value in model.state_dict().items()
        if not name.startswith(left_out)
    }


def warmup_calls(network: FastNetwork, rows: int) -> list[Callable[[], object]]:
    """Return calls of every kernel of a network evaluation of so many batch rows.

    They are for warming up. Each makes a tensor first: a thread has no CUDA context before its
    first operation of torch, which kernels of our own ask for.
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
    outer = (*network.embeddings, network.last)
    calls += [partial(layer.prepare, picture_tokens) for layer in outer]
    return calls


def _adaln(kernel, x, modulation, branches):
    """Run an adaLN kernel on a copy of x, which it may overwrite."""
    kernel(x.clone(), modulation, 0, branches)


def _activate(block):
    """Run a block's activation on a token of zeros."""
    block.activate(block.fc1.zeros(1, 1))


def _attend(network, block, num_heads, rows, tokens):
    """Run a block's rotation and attention on zeros."""
    packed = block.qkv.zeros(rows, tokens)
    if block.rotate:
        packed = block.rotate(packed)
    network.attention(packed, num_heads)
