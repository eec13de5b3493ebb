"""The arithmetic of a DiT's denoising step: its work, and designs that divide it among GPUs.

The designs are the Ultra-Scale Playbook's (Hugging Face, 2025), applied to inference, and two
of diffusion's own. Conditioning is left out: it is computed once before the steps.

Symbols: n labels, B = 2n batch rows with guidance, T tokens of a row, D width, L blocks, e bytes
of a value, W bytes of all weights, A = T·D·e bytes of a row's tokens, G GPUs.
"""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

STREAM = 4  # bytes of a value of the residual stream, float32 in every tier
COPIES = 2  # batch rows of a label: with its class and with the null class


class Shape(NamedTuple):
    """A DiT's sizes, as bench/measure.py records them."""

    depth: int
    width: int
    heads: int
    hidden: int  # of the MLP
    tokens: int
    patch: int
    channels: int
    outputs: int
    parameters: int


def flops(shape: Shape, rows: int) -> dict[str, float]:
    """Return the floating-point operations of a step by kind of work, 2 a multiply-add."""
    blocks = shape.depth * shape.width * (4 * shape.width + 2 * shape.hidden)
    ends = shape.patch**2 * (shape.channels + shape.outputs) * shape.width
    return {
        "GEMM": rows * 2.0 * shape.tokens * (blocks + ends),
        "attention": rows * 4.0 * shape.depth * shape.tokens**2 * shape.width,
        "element-wise": 0.0,
    }


def layer_flops(shape: Shape, rows: int) -> dict[str, float]:
    """Return the floating-point operations of a step by layer of the blocks."""
    square = 2.0 * rows * shape.tokens * shape.depth * shape.width**2
    mlp = square * shape.hidden / shape.width
    attention = flops(shape, rows)["attention"]
    return dict(qkv=3 * square, attention=attention, proj=square, fc1=mlp, fc2=mlp)


def bytes_moved(shape: Shape, rows: int, value: int) -> dict[str, float]:
    """Return the fewest bytes that a step moves by kind of work. value: bytes of a value.

    Each GEMM reads its weights and input and writes its output; attention reads q, k, v and
    writes its output; one pass between two GEMMs adds to the float32 residual stream, normalises
    and modulates.
    """
    values = rows * shape.tokens * shape.depth
    weights = shape.depth * shape.width * (4 * shape.width + 2 * shape.hidden)
    before_mlp = STREAM + 2 * value  # reads stream and branch, writes the GEMM's input
    after_mlp = 2 * STREAM + 3 * value  # reads stream and both branches, writes stream and input
    return {
        "GEMM": value * (weights + values * (8.0 * shape.width + 2 * shape.hidden)),
        "attention": value * values * 4.0 * shape.width,
        "element-wise": values * shape.width * (before_mlp + after_mlp * 1.0),
    }


class Machine(NamedTuple):
    """GPUs and their link, as measured."""

    gpus: int
    ms: float  # of the step on one GPU
    gb_s: float  # that a GPU sends
    us: float  # of an exchange of a few bytes


class Design(NamedTuple):
    """A design, with its costs for one GPU in a step."""

    name: str
    share: float  # of one GPU's work, with the time that it waits for other GPUs
    memory: float  # bytes of weights and of a block's largest tensors
    sent: float = 0.0  # bytes
    messages: int = 0  # exchanges, one after the other
    same: bool = True  # whether the picture is the same

    def idle(self, gpus: int) -> float:
        """Return the share of all GPUs' time in which they have no work, without exchanges."""
        return 1 - 1 / (gpus * self.share)

    def ms(self, machine: Machine) -> float:
        """Return the step's estimated time: work, bytes and messages, nothing overlapped."""
        exchange = self.sent / machine.gb_s / 1e6 + self.messages * machine.us / 1e3
        return machine.ms * self.share + exchange


def designs(shape: Shape, labels: int, gpus: int, value: int) -> Iterator[Design]:
    """Yield every design that can run. value: bytes of a value, in GEMMs and between GPUs."""
    rows = COPIES * labels
    weights = shape.parameters * value
    row = shape.tokens * shape.width * value  # A
    others = gpus - 1

    def tensors(rows, tokens=shape.tokens):
        return rows * tokens * (STREAM * shape.width + value * (shape.width + shape.hidden))

    # data: whole labels a GPU; nothing is exchanged
    of_gpu = ceil(labels / gpus)
    yield Design("data", of_gpu / labels, weights + tensors(COPIES * of_gpu))
    # ZeRO stage 3: as data, with divided weights that are gathered block by block
    memory = weights / gpus + weights / shape.depth + tensors(COPIES * of_gpu)
    sent = others * weights / gpus
    yield Design("zero", of_gpu / labels, memory, sent, shape.depth)

    # guidance rows: a label's two rows on two GPUs; all outputs are gathered for the sampler
    most = ceil(rows / gpus)
    output = STREAM * shape.tokens * shape.patch**2 * shape.outputs
    sent = most * output * (min(gpus, rows) - 1)
    yield Design("rows", most / rows, weights + tensors(most), sent, 1)

    # sequence: tokens are divided; keys and values go round a ring, or are gathered
    if shape.tokens % gpus == 0:
        slice_ = tensors(rows, shape.tokens // gpus)
        sent = shape.depth * others * 2 * rows * row / gpus
        held = 2 * rows * row  # a block's keys and values
        yield Design("ring", 1 / gpus, weights + slice_ + held / gpus, sent, shape.depth * others)
        yield Design("gather", 1 / gpus, weights + slice_ + held, sent, shape.depth)
        # all-to-all of q, k, v and of the output, so that a GPU has all tokens of some heads
        if shape.heads % gpus == 0:
            sent = shape.depth * 4 * others / gpus * rows * row / gpus
            yield Design("ulysses", 1 / gpus, weights + slice_, sent, 4 * shape.depth)

    # guidance rows on two halves of the GPUs, tokens gathered within each half
    half = gpus // 2
    if gpus > 2 and gpus % 2 == 0 and shape.tokens % half == 0:
        sent = shape.depth * (half - 1) * 2 * (rows / 2) * row / half
        sent += rows / gpus * output  # to the GPU with the label's other row
        memory = weights + tensors(rows // 2, shape.tokens // half) + rows * row
        yield Design("rows + gather", 1 / gpus, memory, sent, shape.depth + 1)

    # tensor (Megatron): heads and hidden values are divided; two all-reduces a block
    if shape.heads % gpus == 0:
        sent = shape.depth * 2 * 2 * others / gpus * rows * row
        yield Design("tensor", 1 / gpus, weights / gpus + tensors(rows), sent, 2 * shape.depth)

    # pipeline (GPipe): blocks are divided, batch rows follow one another, and every step waits
    # for the last one
    if shape.depth >= gpus:
        busy = (rows + others) / rows
        yield Design("pipeline", busy / gpus, weights / gpus + tensors(1), rows * row, rows)
        # PipeFusion: parts of a picture follow one another, with the last step's keys and values
        held = 2 * rows * row * ceil(shape.depth / gpus)
        memory = weights / gpus + tensors(rows, ceil(shape.tokens / gpus)) + held
        yield Design("pipefusion", 1 / gpus, memory, rows * row, gpus, same=False)


def choose(found: list[Design], machine: Machine) -> Design:
    """Return the fastest design that makes the same picture; of equals the first."""
    return min((design for design in found if design.same), key=lambda each: each.ms(machine))
