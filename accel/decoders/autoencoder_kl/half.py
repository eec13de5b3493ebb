"""The KL decoder in float16 for batch size 1, arranged for tensor cores.

Convolutions and attention GEMMs read and write float16 in channels_last layout and accumulate
in float32. The residual stream within a block, biases, norms and softmax statistics are float32.
A value that overflows float16 reaches the statistics of a GroupNorm and turns the whole image
into NaN, which float16.py detects. Nearest upsampling and its convolution are fused into one
transposed convolution with 4/9 of the multiplications.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.decoders.autoencoder_kl import Attention, KLDecoder, Residual
from accel.kernels.group_norm import Sum, add, group_norm


class HalfDecoder:
    """Decode (1, C, L, L) → pixels (1, 3, H, W), both float32.

    decoder: the float32 decoder, whose weights are converted once. dtype: of GEMMs and
    convolutions.
    """

    def __init__(self, decoder: KLDecoder, dtype: torch.dtype = torch.float16):
        self.decoder = decoder
        self.dtype = dtype
        self.weights: dict[torch.nn.Conv2d, Tensor] = {}  # in dtype
        self.biases: dict[Residual, Tensor] = {}  # all biases of its sum
        # weight and bias of q, k and v, then of the output
        self.attention_weights: dict[Attention, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        layers = decoder.decoder
        for layer in layers.modules():
            if isinstance(layer, torch.nn.Conv2d):
                self.weights[layer] = layer.weight.to(dtype, memory_format=torch.channels_last)
        # The bias of the preceding convolution, which is added in the next residual sum.
        pending = _bias(layers.conv_in)
        for block in (layers.mid_block, *layers.up_blocks):
            for layer in block.resnets:
                shortcut = layer.conv_shortcut
                if shortcut is not None:
                    pending = _bias(shortcut) + shortcut.weight[:, :, 0, 0] @ pending
                self.biases[layer] = _bias(layer.conv2) + pending
                pending = torch.zeros_like(_bias(layer.conv2))
            for layer in block.attentions:
                qkv = layer.to_q, layer.to_k, layer.to_v
                self.attention_weights[layer] = (
                    torch.cat([linear.weight for linear in qkv]).to(dtype),
                    torch.cat([linear.bias for linear in qkv]).to(dtype),
                    layer.to_out[0].weight.to(dtype),
                    layer.to_out[0].bias,
                )
            for layer in block.upsamplers:
                self.weights[layer.conv] = _fold_upsampling(layer.conv.weight).to(
                    dtype, memory_format=torch.channels_last
                )
                pending = _bias(layer.conv)

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        before = torch.backends.cudnn.deterministic
        # some algorithms of transposed convolutions use atomic additions
        torch.backends.cudnn.deterministic = True
        try:
            return self._decode(z)
        finally:
            torch.backends.cudnn.deterministic = before

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        outer = self.decoder
        layers = self.decoder.decoder
        # C × C: stays in float32
        z = z if outer.post_quant_conv is None else outer.post_quant_conv(z)
        z = z.to(self.dtype, memory_format=torch.channels_last)
        x = add(self._convolve(layers.conv_in, z), _bias(layers.conv_in))
        for block in (layers.mid_block, *layers.up_blocks):
            for layer in block.layers:
                compute = self._attend if isinstance(layer, Attention) else self._residual
                # An upsampling convolution reads half precision and needs no GroupNorm statistics.
                x = compute(layer, x, last=layer is block.layers[-1] and len(block.upsamplers) > 0)
            for layer in block.upsamplers:
                x = add(
                    F.conv_transpose2d(x.value, self.weights[layer.conv], None, 2, 1),
                    _bias(layer.conv),
                )
        pixels = self._convolve(layers.conv_out, self._norm(layers.conv_norm_out, x))
        return (pixels.float() + _bias(layers.conv_out)[:, None, None]).contiguous()

    def _convolve(self, layer: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        """Apply a convolution without its bias, which is added later."""
        return F.conv2d(x, self.weights[layer], None, layer.stride, layer.padding)

    def _norm(self, layer: torch.nn.GroupNorm, x: Sum, silu: bool = True) -> torch.Tensor:
        return group_norm(x, layer.weight, layer.bias, layer.num_groups, silu, self.dtype)

    def _residual(self, layer: Residual, x: Sum, last: bool) -> Sum:
        total = add(self._convolve(layer.conv1, self._norm(layer.norm1, x)), _bias(layer.conv1))
        h = self._convolve(layer.conv2, self._norm(layer.norm2, total))
        stream = x.value
        if layer.conv_shortcut is not None:
            stream = self._convolve(layer.conv_shortcut, stream.to(self.dtype))
        dtype = self.dtype if last else torch.float32
        return add(stream, self.biases[layer], h, dtype, statistics=not last)

    def _attend(self, layer: Attention, x: Sum, last: bool) -> Sum:
        weight, bias, out, out_bias = self.attention_weights[layer]
        h = self._norm(layer.group_norm, x, silu=False)
        _, channels, height, width = h.shape
        h = h.permute(0, 2, 3, 1).reshape(1, 1, height * width, channels)
        q, k, v = F.linear(h, weight, bias).split(channels, -1)  # each (1, 1, HW, C)
        h = F.linear(F.scaled_dot_product_attention(q, k, v), out)
        h = h.view(1, height, width, channels).permute(0, 3, 1, 2)
        return add(
            x.value,
            out_bias,
            h,
            self.dtype if last else torch.float32,
            statistics=not last,
        )


def _bias(layer: torch.nn.Conv2d) -> Tensor:
    """Return the bias; all convolutions of this decoder have one."""
    assert layer.bias is not None
    return layer.bias


def _fold_upsampling(weight: torch.Tensor) -> torch.Tensor:
    """Fold nearest upsampling by 2 and a 3×3 convolution into a 4×4 transposed convolution of
    stride 2. Along each axis, taps (a, b, c) become (c, b + c, a + b, a).
    """
    for axis in (2, 3):
        a, b, c = weight.unbind(axis)
        weight = torch.stack([c, b + c, a + b, a], axis)
    return weight.transpose(0, 1)
