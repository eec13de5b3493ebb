"""Latent spaces: channels, factor, scale or statistics, and decoder of a network's
latents. Imports no torch.

<kind>/__init__.py   KIND, a kind of decoder: how its files are recognised, read and built. Kinds
                     are found by listing this folder
files.py             finds and reads a decoder of any kind
decoder.py           runs it picture by picture; float16.py in float16, checked against float32
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import UsageError

if TYPE_CHECKING:  # torch is slow to import
    import torch
    from torch import Tensor


class DecoderKind:
    """A kind of decoder. A kind with files defines all methods but those with a default."""

    # Of a kind without files, which is given by its name: latents are pixels then.
    builtin_space: "LatentSpace | None" = None

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Return whether a decoder is of this kind. content: of its file, or of the config.json
        of its folder.
        """
        return False

    def files(self, path: Path, statistics: str | None) -> list[Path]:
        """Return all files that decide the decoder's function. Raises UsageError where one is
        missing. statistics: the file that the user gives for the latents, if any.
        """
        raise NotImplementedError

    def read(
        self, files: "DecoderFiles", content: Mapping[str, Any]
    ) -> "tuple[dict[str, Any], dict[str, Tensor]]":
        """Return the entries that `build` takes, plain JSON, and the state dict of its module.
        Raises UsageError for a decoder that is damaged, or computes another function.
        """
        raise NotImplementedError

    def space(self, files: "DecoderFiles", entries: dict[str, Any]) -> "LatentSpace":
        """Return the latent space of a decoder."""
        raise NotImplementedError

    def build(self, entries: dict[str, Any]) -> "torch.nn.Module":
        """Return the float32 decoder without values: `to_decoder`'s output → pixels."""
        raise NotImplementedError

    def compile_half(self, device: "torch.device") -> None:
        """Compile the kernels of `half` ahead."""

    half_batch_size = 1  # pictures that `half` decodes fastest together

    def half(self, network: Any) -> "Callable[[Tensor], Tensor] | None":
        """Return the decoder in float16, None if there is none. network: from `build`, with values.
        It gets one picture, or `half_batch_size` where that gives the bits of each picture alone.
        """
        return None

    def to_uint8_range(self, pixels: "Tensor") -> "Tensor":
        """Map pixels from (-1, 1) to 0 … 255; FID jobs truncate the result."""
        return 127.5 * pixels + 128.0


class DecoderFiles(NamedTuple):
    """Where a decoder was opened: its folder or file, and the stamps of its files then.

    statistics: the file that the user gave for its latents.
    """

    path: Path
    stamps: tuple[tuple, ...]
    kind: DecoderKind
    statistics: str | None = None


class LatentSpace(NamedTuple):
    """The space of a network's latents. The defaults are those of sd-vae-ft-*.

    channels: of a latent. factor: pixels of a picture's side for one of the latent's.
    scale, shift, or mean and std by channel: see `to_decoder`. side: of a latent, where the
    decoder takes no other. decoder: its files; None where no picture is decoded.
    """

    channels: int = 4
    factor: int = 8
    scale: float = 0.18215  # gives the latents of sd-vae-ft-* about unit variance
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    side: int | None = None
    decoder: DecoderFiles | None = None

    @property
    def files(self) -> DecoderFiles:
        """Return the decoder's files, of a space whose pictures are decoded."""
        assert self.decoder is not None
        return self.decoder

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

    def require_side(self, side: int) -> None:
        """Raise UsageError if the decoder does not take latents of this side."""
        if self.decoder is not None and self.side not in (None, side):
            raise UsageError(
                f"decodes latents of {self.side}×{self.side} alone, {self.side * self.factor} px, "
                f"and these are {side}×{side}",
                f"give the decoder of {side * self.factor} px",
                parameter="vae",
                value=self.decoder.path,
            )
