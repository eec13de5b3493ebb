"""The space of networks that sample pixels and need no decoder."""

from pathlib import Path

from accel.decoders import DecoderFiles, DecoderKind, LatentSpace


class Pixels(DecoderKind):
    """Latents are pixels."""


KIND = Pixels()
PIXELS = LatentSpace(
    channels=3, factor=1, scale=1.0, decoder=DecoderFiles(Path("pixels"), (), KIND)
)
KIND.builtin_space = PIXELS
