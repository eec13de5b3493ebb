"""Latent spaces and their decoders. Imports no torch.

<kind>/__init__.py   KIND, a DecoderKind: recognises, reads and builds one architecture. Folders are
                     discovered automatically
loading.py           finds and loads a decoder of any kind
decoder.py           decodes image by image; float16.py in float16, checked against float32
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.errors import UsageError

if TYPE_CHECKING:  # torch is slow to import
    import torch
    from torch import Tensor


class DecoderKind:
    """A decoder architecture and its file layout. Subclasses override the methods that raise
    NotImplementedError, and `matches`.
    """

    # Set if the kind is selected by its name and has no files: its latents are pixels.
    builtin_space: "LatentSpace | None" = None

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Whether this kind reads the decoder. content: entries of its file or config.json."""
        return False

    def files(self, path: Path, statistics: str | None) -> list[Path]:
        """List all files that determine the decoder's output. statistics: the user's
        --latent-stats. Raises UsageError if a file is missing.
        """
        raise NotImplementedError

    def read(
        self, files: "DecoderFiles", content: Mapping[str, Any]
    ) -> "tuple[dict[str, Any], dict[str, Tensor]]":
        """Return the configuration for `build`, as plain JSON, and the state dict. Raises
        UsageError if the files are corrupt or the architecture is not supported.
        """
        raise NotImplementedError

    def space(self, files: "DecoderFiles", entries: dict[str, Any]) -> "LatentSpace":
        """Return the latent space of a decoder."""
        raise NotImplementedError

    def build(self, entries: dict[str, Any]) -> "torch.nn.Module":
        """Build the float32 module: output of `LatentSpace.to_decoder` → pixels."""
        raise NotImplementedError

    def compile_half(self, device: "torch.device") -> None:
        """Compile the kernels of `half` ahead of time."""

    half_batch_size = 1  # the fastest batch size of `half`

    def half(self, network: Any) -> "Callable[[Tensor], Tensor] | None":
        """Convert a loaded module to float16, or return None if not supported. The result is
        called with batch size 1, or `half_batch_size` if that does not change any bit.
        """
        return None

    def to_uint8_range(self, pixels: "Tensor") -> "Tensor":
        """Map pixels from (-1, 1) to (0, 255); FID jobs truncate the result."""
        return 127.5 * pixels + 128.0


class DecoderFiles(NamedTuple):
    """The files of an opened decoder. stamps: to detect later changes, see `file_stamps`.

    statistics: the user's --latent-stats.
    """

    path: Path
    stamps: tuple[tuple, ...]
    kind: DecoderKind
    statistics: str | None = None


class LatentSpace(NamedTuple):
    """The latents that a network samples. Defaults: sd-vae-ft-*.

    factor: upsampling from latents to pixels. scale, shift, or mean and std per channel: see
    `to_decoder`. side: the only latent size that the decoder supports, or None. decoder: None
    if nothing is decoded.
    """

    channels: int = 4
    factor: int = 8
    scale: float = 0.18215  # latents of sd-vae-ft-* then have about unit variance
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    side: int | None = None
    decoder: DecoderFiles | None = None

    @property
    def files(self) -> DecoderFiles:
        """The decoder's files; only for a space with a decoder."""
        assert self.decoder is not None
        return self.decoder

    def to_decoder(self, latents: "Tensor") -> "Tensor":
        """Denormalise latents (n, C, L, L) as diffusers' pipelines do: latents / scale + shift,
        or latents · std / scale + mean.
        """
        if self.std:
            mean, std = (
                latents.new_tensor(values)[:, None, None] for values in (self.mean, self.std)
            )
            return latents * std / self.scale + mean
        return latents / self.scale + self.shift if self.shift else latents / self.scale

    def require_side(self, side: int) -> None:
        """Raise UsageError if the decoder does not support latents of this side."""
        if self.decoder is not None and self.side not in (None, side):
            raise UsageError(
                f"decodes only latents of {self.side}×{self.side}, {self.side * self.factor} px, "
                f"and these are {side}×{side}",
                f"give the decoder of {side * self.factor} px",
                parameter="vae",
                value=self.decoder.path,
            )
