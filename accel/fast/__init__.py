"""Accelerated networks: weights of any family, laid out for the ops of a tier."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from accel.fast.network import FastNetwork, Layout
from accel.fast.ops import Half, Split
from accel.fast.reader import Reader
from accel.kernels.linear import Tuner
from accel.network import WHOLE, Part
from accel.precision import TIERS

# A family's function: (reader, reference network, ops) → its weights, laid out.
LayOut = Callable[[Reader, torch.nn.Module, Half | Split], Layout]


def laid_out(
    state: dict[str, torch.Tensor], model: torch.nn.Module, lay_out: LayOut, ops: Half | Split
) -> FastNetwork:
    """Make the accelerated network of the weights `state`, on any device, computed with
    `ops`.

    model: the module, with or without values, for heads, sizes and the timestep's
    embedding. lay_out: its family's. Raises ValueError, naming the layer, for weights that
    the tier cannot hold, and for a tensor that the layout does not read.
    """
    read = Reader(state, ops.device, ops.stream, ops.part)
    layout = lay_out(read, model, ops)
    read.require_all()
    return FastNetwork(layout, ops)


def build(
    state: dict[str, torch.Tensor],
    model: torch.nn.Module,
    lay_out: LayOut,
    tier: str,
    device: torch.device,
    tuner: Tuner | None = None,
    gemm: str = "auto",
    part: Part = WHOLE,
) -> FastNetwork:
    """Make the accelerated network as `laid_out` does, with the ops of a tier. tuner:
    chooses the GEMMs' algorithms; gemm: their backend.
    """
    ops = (
        Split(device, gemm, part)
        if tier == "exact"
        else Half(TIERS[tier].dtype, device, tuner, gemm, part)
    )
    return laid_out(state, model, lay_out, ops)


def load(
    state: dict[str, torch.Tensor],
    model: torch.nn.Module,
    lay_out: LayOut,
    tier: str,
    device: torch.device,
    rows: int,
    tuner: Tuner | None = None,
    part: Part = WHOLE,
) -> FastNetwork:
    """Make the accelerated network as `build` does. Compile its kernels while the weights
    are copied.

    model: of the same shape, without values (on the meta device). rows: batch rows of one
    evaluation on this rank.
    """
    zero = torch.zeros((), device=device)
    # without the blocks after the first, whose names begin with their list's and an index
    zeros = {
        name: zero.expand(value.shape)
        for name, value in model.state_dict().items()
        if not re.match(r"\w+\.[1-9]", name)
    }
    alone = part._replace(all_reduce=lambda x: None)  # threads must not exchange anything
    shallow = build(zeros, model, lay_out, tier, device, tuner, part=alone)
    calls = kernel_calls(shallow, rows)

    # The threads' tensors are freed below: in the order of this stream.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def warm_up(call):
        # A thread begins on GPU 0, to which leaving a stream of another one would return:
        # that makes a context there.
        with (
            torch.inference_mode(),
            torch.cuda.device_of(shallow.position),
            torch.cuda.stream(stream),
        ):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = pool.map(warm_up, calls)  # begins at once
        network = build(state, model, lay_out, tier, device, tuner, part=part)
        list(compiling)  # raises what a call has raised
    return network


def kernel_calls(network: FastNetwork, rows: int) -> list[Callable[[], object]]:
    """Return calls of every kernel of a network evaluation of so many batch rows, for
    warming up.
    """
    tokens = len(network.position)
    t = torch.zeros(rows, dtype=torch.int64, device=network.position.device)
    h = network.position.repeat(rows, 1, 1)  # (N, T, D)
    branch = (h.to(network.dtype), 0)
    condition = network.condition(t, t)
    (qkv, proj, fc1, fc2), rotate, activate, _ = network.blocks[0]

    def attend():
        packed = qkv.zeros(rows, tokens)
        network.attention(rotate(packed, 0) if rotate else packed, network.num_heads)

    # Each makes a tensor first: a thread has no CUDA context before its first operation
    # of torch, which kernels of our own ask for.
    return [
        *(partial(network.adaln, h.clone(), condition, 0, (branch,) * count) for count in range(3)),
        lambda: network.last_adaln(h.clone(), condition, 0, (branch, branch)),
        attend,
        *(partial(layer.prepare, rows * tokens) for layer in (qkv, proj, fc1, fc2)),
        *([lambda: activate(fc1.zeros(1, 1))] if activate else []),
    ]
