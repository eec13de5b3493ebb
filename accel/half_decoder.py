"""The decoder in float16, for one picture at a time: accel.decoder's mathematics, arranged for a GPU.

Convolutions and the attention's products take and give float16 and sum in float32, channels innermost, as tensor cores want them. The residual stream inside a stage,
biases, norms and softmax statistics are float32. What overflows float16 all the same turns the picture into NaN, since a norm's statistics meet every
value of a group and the next convolution every group; `accel.vae` looks for that. Doubling a picture's sides and then convolving it is one transposed convolution, with
4/9 of the products and no picture of four times the size in between.
"""

import torch
import torch.nn.functional as F

from accel.kernels.group_norm import add, group_norm


class HalfDecoder:
    """`decoder`, an accel.decoder.Decoder, with its weights converted once. Called with latents (1, 4, L, L) float32, unscaled, it gives pixels
    (1, 3, 8L, 8L) float32. dtype: of the products."""

    def __init__(self, decoder, dtype=torch.float16):
        self.decoder, self.dtype, self.weights, self.biases = decoder, dtype, {}, {}
        network = decoder.decoder
        before = network.conv_in  # the convolution whose bias a residual layer finds not yet added to what comes in
        for layer in network.modules():
            if isinstance(layer, torch.nn.Conv2d):
                self.weights[layer] = layer.weight.to(dtype, memory_format=torch.channels_last)
        for stage in (network.mid_block, *network.up_blocks):
            for layer in stage.resnets:
                waiting = 0 if before is None else before.bias
                if layer.conv_shortcut is not None:
                    waiting = layer.conv_shortcut.bias + (
                        0 if before is None else layer.conv_shortcut.weight[:, :, 0, 0] @ waiting
                    )
                self.biases[layer], before = layer.conv2.bias + waiting, None
            for layer in getattr(stage, "upsamplers", ()):
                self.weights[layer.conv] = _doubling(layer.conv.weight).to(dtype, memory_format=torch.channels_last)
                before = layer.conv
        for attention in network.mid_block.attentions:
            qkv = attention.to_q, attention.to_k, attention.to_v
            self.weights[attention] = (
                torch.cat([layer.weight for layer in qkv]).to(dtype),
                torch.cat([layer.bias for layer in qkv]).to(dtype),
                attention.to_out[0].weight.to(dtype),
            )

    def __call__(self, z):
        before = torch.backends.cudnn.deterministic
        torch.backends.cudnn.deterministic = True  # transposed convolutions have algorithms that add in any order
        try:
            return self._decode(z)
        finally:
            torch.backends.cudnn.deterministic = before

    def _decode(self, z):
        outer, network = self.decoder, self.decoder.decoder
        z = z if outer.post_quant_conv is None else outer.post_quant_conv(z)  # 4 × 4: left as it is
        x = add(
            self._convolve(network.conv_in, z.to(self.dtype, memory_format=torch.channels_last)), network.conv_in.bias
        )
        middle = network.mid_block
        x = self._residual(middle.resnets[0], x)
        for attention in middle.attentions:
            x = self._attend(attention, x)
        x = self._residual(middle.resnets[1], x)
        for stage in network.up_blocks:
            for layer in stage.resnets:
                # Before an upsampling no norm looks at the sum, and a convolution reads it.
                x = self._residual(layer, x, last=layer is stage.resnets[-1] and len(stage.upsamplers) > 0)
            for layer in stage.upsamplers:
                x = add(F.conv_transpose2d(x.value, self.weights[layer.conv], None, 2, 1), layer.conv.bias)
        x = self._convolve(network.conv_out, self._norm(network.conv_norm_out, x))
        return (x.float() + network.conv_out.bias[:, None, None]).contiguous()

    def _convolve(self, layer, x):
        return F.conv2d(
            x, self.weights[layer], None, layer.stride, layer.padding
        )  # its bias is added by a later pass over the result

    def _norm(self, layer, x, silu=True):
        return group_norm(x, layer.weight, layer.bias, layer.num_groups, silu, self.dtype)

    def _residual(self, layer, x, last=False):
        h = add(self._convolve(layer.conv1, self._norm(layer.norm1, x)), layer.conv1.bias)
        h = self._convolve(layer.conv2, self._norm(layer.norm2, h))
        x = x.value if layer.conv_shortcut is None else self._convolve(layer.conv_shortcut, x.value.to(self.dtype))
        return add(x, self.biases[layer], h, self.dtype if last else torch.float32, statistics=not last)

    def _attend(self, layer, x):
        weight, bias, out = self.weights[layer]
        h = self._norm(layer.group_norm, x, silu=False)
        _, channels, height, width = h.shape
        h = h.permute(0, 2, 3, 1).reshape(1, 1, height * width, channels)
        q, k, v = F.linear(h, weight, bias).split(channels, -1)  # each (1, 1, HW, C)
        h = F.linear(F.scaled_dot_product_attention(q, k, v), out)
        return add(x.value, layer.to_out[0].bias, h.view(1, height, width, channels).permute(0, 3, 1, 2), torch.float32)


def _doubling(weight):
    """A 3 × 3 convolution of the picture whose sides were doubled by repeating pixels, as a transposed convolution of the picture, 4 × 4 at stride 2:
    per axis, taps (a, b, c) become (c, b + c, a + b, a)."""
    for axis in (2, 3):
        a, b, c = weight.unbind(axis)
        weight = torch.stack([c, b + c, a + b, a], axis)
    return weight.transpose(0, 1)
