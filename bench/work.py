"""Operations and bytes that a step of a DiT needs, by kind of work."""

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
        """Return the sizes of a models.DiT."""
        tokens, width = model.pos_embed.shape[1:]
        return cls(width, len(model.blocks), model.num_heads, model.patch_size, model.in_channels, tokens, batch_rows)


def gemm_flops(shape: Shape) -> int:
    """Floating-point operations of the GEMMs, 2 a multiply-add: 12D² a token and block (qkv 3, proj 1, MLP 8), patch
    embedding and final layer. Conditioning is left out: one small GEMM for each pair of timestep and label."""
    per_token = shape.depth * 12 * shape.width**2 + 3 * shape.width * shape.patch**2 * shape.channels
    return 2 * shape.batch_rows * shape.tokens * per_token


def attention_flops(shape: Shape) -> int:
    """Return the operations of softmax(q·kᵀ)·v: 4·T²·D a batch row and block."""
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
