"""Latent spaces: channels, factor, scale or statistics, and decoder of a network's
latents. Imports no torch.

files.py finds and reads a decoder, decoder.py runs it picture by picture,
autoencoder_kl.py and half.py are its mathematics. PIXELS is the space of networks that sample
pixels: it has no decoder.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # torch is slow to import
    from torch import Tensor


class DecoderFiles(NamedTuple):
    """Where a decoder was opened: its folder or file, and the stamps of its files then."""

    path: Path
    stamps: tuple[tuple, ...]

    def __str__(self):
        return str(self.path)


class LatentSpace(NamedTuple):
    """The space of a network's latents. The defaults are those of sd-vae-ft-*.

    channels: of a latent. factor: pixels of a picture's side for one of the latent's.
    scale, shift, or mean and std by channel: see `to_decoder`. decoder: its files;
    None where no picture is decoded.
    """

    channels: int = 4
    factor: int = 8
    scale: float = 0.18215  # gives the latents of sd-vae-ft-* about unit variance
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    decoder: DecoderFiles | None = None

    def to_decoder(self, latents: "Tensor") -> "Tensor":
        """Turn latents (n, C, L, L) into the decoder's input as diffusers' pipelines do:
        latents / scale + shift, or latents · std / scale + mean.
        """
        if self.std:
            mean, std = (
                latents.new_tensor(values)[:, None, None] for values in (self.mean, self.std)
            )
            return latents * std / self.scale + mean
        return latents / self.scale + self.shift if self.shift else latents / self.scale


PIXELS = LatentSpace(
    channels=3, factor=1, scale=1.0, decoder=DecoderFiles(path=Path("pixels"), stamps=())
)
