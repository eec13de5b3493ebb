"""Decode latents to pixels image by image. The decoder is loaded at its first use, or in the
background while the GPU denoises.
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


class Decoder:
    """The decoder of a latent space in fp32 or tf32; the identity if the latents are pixels.

    half: set by Float16Decoder.
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
        """Load the network and compile its kernels for a GPU in a background thread. The weights
        stay on the CPU until the memory of the sampled network is free.
        """
        self._loading = ThreadPoolExecutor(1).submit(self._load_on_cpu)

    def _load_on_cpu(self):
        if self.precision == "fp16":
            self.kind.compile_half(self.device)
        return loading.load(self.space, "cpu")

    def load(self) -> "Decoder":
        """Load the network onto the device if needed. Returns self."""
        if self.network is None:
            loaded = (
                self._loading.result() if self._loading else loading.load(self.space, self.device)
            )
            self.network = loaded.to(self.device)
        return self

    def decode(self, latents: Tensor) -> Tensor:
        """Decode finite latents (n, C, L, L) to float32 pixels (n, 3, H, W), about (-1, 1). n may
        be 0. Raises UsageError if memory runs out, the shape is not supported, the pixels are not
        finite (they would be saved as black), or gradients are required.
        """
        require_no_gradients("this decoder has none; use diffusers' AutoencoderKL", latents)
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
        """Decode in fp32 or tf32 from now on."""
        self.precision = precision
        self.half = None

    def pixels(self, latents: Tensor, arithmetic: str | None = None) -> Tensor:
        """Decode in fp32 or tf32, by default the decoder's. Raises UsageError if a pixel is not
        finite.
        """
        with convolutions(arithmetic or self.precision):
            pixels = self.one_by_one(self.network, latents)
        if not pixels.isfinite().all():
            raise UsageError(
                "decodes finite latents to pixels that are not finite",
                "check its weights, or choose another",
                parameter="vae",
                value=self.space.files.path,
            )
        return pixels

    def one_by_one(self, network: Callable[[Tensor], Tensor], latents: Tensor) -> Tensor:
        """Decode with batch size 1: little memory, and the bits of an image do not depend on the
        batch. Tiling an image is impossible, because GroupNorm needs global statistics.
        """
        return torch.cat([network(self.space.to_decoder(latent)) for latent in latents.split(1)])
