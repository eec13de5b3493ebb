"""What a call of the network must do, whoever does it: operations and bytes, by kind. The floor under every measured time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A DiT's sizes, and those of a call: `rows` pictures (with guidance two a picture) of `tokens` each."""

    width: int  # D
    depth: int
    heads: int
    patch: int
    channels: int  # of the latent
    tokens: int  # T
    rows: int  # R

    @classmethod
    def of(cls, model, rows):
        """The sizes of a models.DiT."""
        tokens, width = model.pos_embed.shape[1:]
        return cls(width, len(model.blocks), model.num_heads, model.patch_size, model.in_channels, tokens, rows)


def product_flops(shape):
    """Floating-point operations of the matrix products (2 a multiply-add): qkv 3D², proj D², MLP 8D² a token and block, embedding and
    final layer. Conditioning is not counted: it is one small product a pair of timestep and label."""
    per_token = shape.depth * 12 * shape.width**2 + 3 * shape.width * shape.patch**2 * shape.channels
    return 2 * shape.rows * shape.tokens * per_token


def attention_flops(shape):
    """Of softmax(q·kᵀ)·v: 4·T²·D a row and block."""
    return 4 * shape.rows * shape.tokens**2 * shape.width * shape.depth


def row_bytes(shape, narrow):
    """Fewest bytes that everything between the products moves, if each pass over the tokens is one kernel: the float32 stream, branches and
    products' inputs of `narrow` bytes a value (2 in half precision, 4 in float32), as accel/fast.py has it."""
    stream = 4
    middle = stream + narrow + narrow  # reads x and a, writes h
    joined = stream + 2 * narrow + stream + narrow  # reads x, a and m, writes x and h
    per_value = shape.depth * (middle + joined) + stream + narrow  # the first pass reads x alone
    return shape.rows * shape.tokens * shape.width * per_value


def floor_ms(shape, narrow, product_tflops, copy_tb_s):
    """Milliseconds under which no arrangement of the same arithmetic comes: all products and attention at the speed of a large product,
    all other bytes at the speed of a large copy."""
    return (
        (product_flops(shape) + attention_flops(shape)) / product_tflops + row_bytes(shape, narrow) / copy_tb_s
    ) / 1e9
