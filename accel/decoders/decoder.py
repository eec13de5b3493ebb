"""Decode latents to pixels, one picture at a time. Load the decoder at the first use, or
ahead while the GPU denoises.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from accel.decoders import DecoderKind, LatentSpace, loading
from accel.errors import UsageError
from accel.runtime.network import require_no_gradients
from accel.runtime.precision import convolutions


class NoDecoder:
    """The decoder of a space whose latents are pixels: it returns them."""

    precision = "fp32"

    def __init__(self, space: LatentSpace):
        self.to_uint8_range = space.files.kind.to_uint8_range

    def load_ahead(self) -> None:
        """No-op."""

    def load(self) -> "NoDecoder":
        """Return this decoder."""
        return self

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels (n, 3, H, W) as they are."""
        return latents


class Decoder:
    """The decoder of a latent space in fp32 or tf32.

    to_uint8_range: maps pixels to 0 … 255, as the kind's FID jobs do. half: the network in
    float16, which a subclass sets.
    """

    half: Callable[[Tensor], Tensor] | None = None

    def __init__(self, space: LatentSpace, device: torch.device, precision: str = "fp32"):
        self.space = space
        self.device = device
        self.precision = precision
        self.kind: DecoderKind = space.files.kind
        self.to_uint8_range = self.kind.to_uint8_range
        self.network: Any = None  # in float32
        self._loading: Future | None = None

    def load_ahead(self) -> None:
        """On a GPU, load the network and compile its kernels in a thread. The weights
        wait on the CPU until the sampled network's memory is free.
        """
        if self.device.type == "cuda" and self.network is None and not self._loading:
            self._loading = ThreadPoolExecutor(1).submit(self._load_on_cpu)

    def _load_on_cpu(self):
        if self.precision == "fp16":
            self.kind.compile_half(self.device)
        return loading.load(self.space, "cpu")

    def load(self) -> "Decoder":
        """Load the network onto the device, at the first call. Returns this decoder."""
        if self.network is None:
            loaded = (
                self._loading.result() if self._loading else loading.load(self.space, self.device)
            )
            self.network = loaded.to(self.device)
        return self

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels (n, 3, H, W) float32, about (-1, 1), of finite latents (n, C, L,
        L); n may be 0. Raises UsageError if one picture does not fit in memory, for latents of a
        shape that the decoder does not take, or if it makes pixels that are not finite: they would
        become black. It has no gradients: raises UsageError where they are asked for.
        """
        require_no_gradients("this decoder has none; call diffusers' own for gradients", latents)
        if latents.ndim != 4 or latents.shape[1] != self.space.channels:
            raise UsageError(
                f"latents: are {tuple(latents.shape)}, must be (n, {self.space.channels}, L, L)"
            )
        self.space.require_side(latents.shape[-1])
        if not len(latents):
            side = self.space.factor * latents.shape[-1]
            return latents.new_zeros(0, 3, side, side)
        try:
            self.load()
            with torch.inference_mode():
                return self.pixels(latents)
        except torch.OutOfMemoryError:
            raise UsageError(
                "decoding a picture does not fit in free GPU memory",
                f"use {'`output_type=latent`' if self.half else '`vae_precision=fp16`'}, or a "
                "smaller size",
                parameter="image_size",
                value=self.space.factor * latents.shape[-1],
            ) from None

    def use_float32(self, precision: str) -> None:
        """Decode in fp32 or tf32 from here on."""
        self.precision = precision
        self.half = None

    def pixels(self, latents: Tensor) -> Tensor:
        """Return pixels in the decoder's arithmetic."""
        return self.in_float32(latents, self.precision)

    def in_float32(self, latents: Tensor, arithmetic: str) -> Tensor:
        """Return pixels in fp32 or tf32. Raises UsageError for those that are not finite."""
        with convolutions(arithmetic):
            pixels = self.each(self.network, latents)
        if not_finite(pixels):
            raise UsageError(
                "decodes finite latents to pixels that are not finite",
                "check its weights, or choose another",
                parameter="vae",
                value=self.space.files.path,
            )
        return pixels

    def each(self, network: Callable[[Tensor], Tensor], latents: Tensor) -> Tensor:
        """Decode one picture at a time: this takes little memory, and a picture's bits do
        not depend on the others. A single image cannot be tiled: GroupNorm needs global
        statistics.
        """
        return torch.cat([network(self.space.to_decoder(latent)) for latent in latents.split(1)])


def not_finite(pixels: Tensor) -> list[int]:
    """Return the indices of pictures with a value that is not finite; synchronise once for all."""
    return [
        index
        for index, finite in enumerate(pixels.isfinite().flatten(1).all(1).tolist())
        if not finite
    ]
