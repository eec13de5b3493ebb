"""What a step of a DiT must do, by kind: operations, bytes, and what its division over GPUs sends."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A DiT's sizes, and those of a batch: `batch_rows` rows (with guidance two a picture) of `tokens` each."""

    width: int  # D
    depth: int
    heads: int
    patch: int
    channels: int  # of the latent
    tokens: int  # T
    batch_rows: int  # N

    @classmethod
    def of(cls, model, batch_rows: int) -> "Shape":
        """The sizes of a models.DiT."""
        tokens, width = model.pos_embed.shape[1:]
        return cls(width, len(model.blocks), model.num_heads, model.patch_size, model.in_channels, tokens, batch_rows)


def gemm_flops(shape: Shape) -> int:
    """Floating-point operations of the GEMMs, 2 a multiply-add: 12D² a token and block (qkv 3, proj 1, MLP 8), patch
    embedding and final layer. Conditioning is left out: one small GEMM for each pair of timestep and label."""
    per_token = shape.depth * 12 * shape.width**2 + 3 * shape.width * shape.patch**2 * shape.channels
    return 2 * shape.batch_rows * shape.tokens * per_token


def attention_flops(shape: Shape) -> int:
    """Of softmax(q·kᵀ)·v: 4·T²·D a batch row and block."""
    return 4 * shape.batch_rows * shape.tokens**2 * shape.width * shape.depth


def adaln_bytes(shape: Shape, value_bytes: int) -> int:
    """Fewest bytes that move between the GEMMs if each pass over the tokens is one fused adaLN kernel, as in
    accel/fast: the float32 residual stream, and branches and GEMM inputs of `value_bytes` a value (2 in half
    precision, else 4)."""
    stream = 4
    middle = stream + 2 * value_bytes  # reads x and a, writes h
    joined = 2 * stream + 3 * value_bytes  # reads x, a and m, writes x and h
    per_value = shape.depth * (middle + joined) + stream + value_bytes  # the first pass reads x alone
    return shape.batch_rows * shape.tokens * shape.width * per_value


def floor_ms(shape: Shape, value_bytes: int, gemm_tflops: float, copy_tb_s: float) -> float:
    """Milliseconds that no arrangement of the same arithmetic beats: all GEMMs and attention at the speed of a large
    GEMM, all other bytes at the speed of a large copy."""
    compute = (gemm_flops(shape) + attention_flops(shape)) / gemm_tflops
    return (compute + adaln_bytes(shape, value_bytes) / copy_tb_s) / 1e9


def strategies(shape: Shape, gpus: int, value_bytes: int, step_ms: dict[int, float], link: list[dict]) -> list[dict]:
    """What each way to divide a step over `gpus` sends and gains.

    step_ms: milliseconds of a step on one GPU, by number of pictures, those of `shape` among them. link: measured
    collectives (collective, ranks, bytes a rank, us). Each result holds what is sent (calls, bytes a rank and call as
    `message`, bytes a rank and step) and, in milliseconds a step, `compute` (`ideal` where it was not measured) and
    `link`; `break_even` is the GB/s at which sending cancels the gain, `speedup` the most to be had.

    Activations of a layer are N·T·D values. Keys and values gathered: a rank sends its 2NTD/P to P − 1 others. Ulysses:
    q, k, v and then the output change ranks, 4NTD/P, of which 1/P stays. Tensor parallel: two all-reduces of NTD, each
    sending 2(P − 1)/P of it. PipeFusion: activations pass each stage once.
    """
    layers, layer = shape.depth, shape.batch_rows * shape.tokens * shape.width * value_bytes
    rows = min(gpus, shape.batch_rows)
    pictures = shape.batch_rows // 2
    output = 2 * shape.channels * shape.patch**2 * shape.tokens * 4  # bytes of a batch row of the network's output
    gather = -(-shape.batch_rows // rows) * output * (pictures < gpus)  # guidance halves are joined once a step
    plans = [  # what, collective, calls a step, bytes a rank and call, bytes a rank and step, parts
        ("rows", "all-gather", int(pictures < gpus), gather, gather * (rows - 1), rows),
        ("kv", "all-gather", layers, 2 * layer // gpus, layers * 2 * layer // gpus * (gpus - 1), gpus),
        ("ulysses", "all-to-all", 2 * layers, 2 * layer // gpus, layers * 4 * layer // gpus * (gpus - 1) // gpus, gpus),
        ("tensor", "all-reduce", 2 * layers, layer, layers * 4 * layer * (gpus - 1) // gpus, gpus),
        ("pipe", None, gpus - 1, layer, layer, gpus),
    ]
    alone, found = step_ms[pictures], []
    for what, collective, calls, message, sent, parts in plans:
        measured = step_ms.get(pictures // gpus) if what == "rows" and pictures % gpus == 0 else None
        compute = alone / parts if measured is None else measured
        us = collective_us(link, collective, parts, message) if calls else 0.0
        taken = None if us is None else calls * us / 1e3
        plan = dict(what=what, calls=calls, message=message, bytes=sent, compute=compute, ideal=measured is None)
        plan["break_even"] = sent / (alone * (1 - 1 / parts)) / 1e6
        found.append(plan | dict(link=taken, speedup=None if taken is None else alone / (compute + taken)))
    return found


def collective_us(link: list[dict], collective: str, ranks: int, size: int) -> float | None:
    """Microseconds of a collective on `size` bytes a rank, by straight lines between measured sizes; None without
    any."""
    points = sorted(
        (one["bytes"], one["us"]) for one in link if (one["collective"], one["ranks"]) == (collective, ranks)
    )
    if len(points) < 2:
        return None
    place = min(max(bisect_left(points, (size,)), 1), len(points) - 1)
    (a, at_a), (b, at_b) = points[place - 1], points[place]
    return points[0][1] if size < points[0][0] else at_a + (at_b - at_a) * (size - a) / (b - a)
