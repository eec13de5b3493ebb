"""Decode latents to pixels, one picture at a time. Load the decoder at the first use, or
ahead while the GPU denoises.
"""

import logging
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from accel.errors import UsageError
from accel.latents import LatentSpace, files
from accel.network import require_no_gradients
from accel.precision import convolutions

log = logging.getLogger(__name__)

# PSNR in dB that float16's picture of the check must reach against float32's. The
# contest's threshold is 40: at 60 the decoder's share of the allowed mean squared error
# is a hundredth. Decoders that float16 suits reach 70 to 80.
REQUIRED_PSNR = 60.0
CHECKED_PIXELS = 256  # of a side
OF_DECODER = "this decoder has none; call diffusers' own for gradients"
NAMES = {"fp32": "float32", "tf32": "float32 with TF32 convolutions"}


class NoDecoder:
    """The decoder of a space whose latents are pixels: it returns them."""

    precision = "fp32"

    def __init__(self, space: LatentSpace):
        self.levels = space.decoder.kind.levels

    def load_ahead(self) -> None:
        """No-op."""

    def load(self) -> "NoDecoder":
        """Return this decoder."""
        return self

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels (n, 3, H, W) as they are."""
        return latents


def decoder_of(space: LatentSpace, *options: Any) -> "Decoder | NoDecoder":
    """Return the decoder of a space. options: those of `Decoder`."""
    if space.decoder.kind.without_files is not None:
        return NoDecoder(space)
    return Decoder(space, *options)


class Decoder:
    """The decoder of a latent space in fp32, tf32 or fp16; in fp16 only where that loses
    nothing that can be seen.

    precision: the arithmetic asked for; otherwise: fp32 or tf32, used where fp16 fails.
    captured: float16 on a GPU is replayed as a CUDA graph, the same bits; the capture
    takes as long as some pictures. levels: turns pixels into levels, as the kind's FID jobs do.

    float16 is compared with float32 once, at loading, on noise of a generator of its own.
    So the outcome depends on the weights alone: every rank and every restart finds the
    same, and the run's random stream is untouched. If float16 overflows or stays below
    REQUIRED_PSNR, a line is printed and `precision` becomes `otherwise`. A single picture
    that overflows later is decoded in float32: its bits, too, depend on its latents and
    the weights alone.
    """

    def __init__(
        self,
        space: LatentSpace,
        device: torch.device,
        precision: str = "fp32",
        otherwise: str = "fp32",
        captured: bool = False,
    ):
        self.space = space
        self.device = device
        self.precision = precision
        self.otherwise = otherwise
        self.captured = captured
        self.levels = space.decoder.kind.levels
        self._warned = False
        self.network = self.half = self._loading = None  # network: in float32

    def load_ahead(self) -> None:
        """On a GPU, load the network and compile its kernels in a thread. The weights
        wait on the CPU until the sampled network's memory is free.
        """
        if self.device.type == "cuda" and self.network is None and not self._loading:
            self._loading = ThreadPoolExecutor(1).submit(self._load_on_cpu)

    def _load_on_cpu(self):
        interval = sys.getswitchinterval()
        # imports are long stretches of Python; the loop that feeds the GPU goes first
        sys.setswitchinterval(1e-4)
        try:
            if self.precision == "fp16":
                self.space.decoder.kind.compile_half(self.device)
            return files.load(self.space, "cpu")
        finally:
            sys.setswitchinterval(interval)

    def load(self) -> "Decoder":
        """Load the network onto the device and check float16, at the first call. Returns
        this decoder.
        """
        if self.network is None:
            loaded = (
                self._loading.result() if self._loading else files.load(self.space, self.device)
            )
            self.network = loaded.to(self.device)
        if self.precision == "fp16" and self.half is None:
            half = self.space.decoder.kind.half(self.network)
            problem = self._problem(half) if half else "has no float16 version"
            if problem:
                self.precision = self.otherwise
                log.warning(f"this decoder {problem}: decoding in {NAMES[self.otherwise]}")
            else:
                self.half = half
                if self.captured and self.device.type == "cuda":
                    from accel.graphs import Replayed

                    self.half = Replayed(half)
        return self

    @torch.inference_mode()
    def _problem(self, half) -> str | None:
        """Compare the float16 decoder with float32 on noise. Return the fault in words, or None."""
        side = self.space.side or CHECKED_PIXELS // self.space.factor
        generator = torch.Generator(self.device).manual_seed(0)
        noise = torch.randn(
            1, self.space.channels, side, side, generator=generator, device=self.device
        )
        z = self.space.to_decoder(noise)
        got = half(z)
        want = self.network(z)
        if not got.isfinite().all():
            return "overflows float16"
        error = (got.clamp(-1, 1) - want.clamp(-1, 1)).square().mean().sqrt().item()
        psnr = 20 * math.log10(2 / max(error, 1e-9))
        if psnr < REQUIRED_PSNR:
            return (
                f"loses too much in float16 ({psnr:.1f} dB from float32, at least "
                f"{REQUIRED_PSNR:g} required)"
            )
        return None

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels (n, 3, H, W) float32, about (-1, 1), of finite latents (n, C, L,
        L); n may be 0. Raises UsageError if one picture does not fit in memory, for latents of a
        side that the decoder does not take, or if it makes pixels that are not finite: they would
        become black. It has no gradients: raises UsageError where they are asked for.
        """
        require_no_gradients(OF_DECODER, latents)
        self.space.require_side(latents.shape[-1])
        if not len(latents):
            side = self.space.factor * latents.shape[-1]
            return latents.new_zeros(0, 3, side, side)
        try:
            self.load()
            with torch.inference_mode():
                return (
                    self._in_float32(latents, self.precision)
                    if self.half is None
                    else self._in_half(latents)
                )
        except torch.OutOfMemoryError:
            raise UsageError(
                f"`image_size={self.space.factor * latents.shape[-1]}`: decoding a picture does "
                "not fit in free GPU memory; use "
                f"{'`output_type=latent`' if self.half else '`vae_precision=fp16`'}, or a smaller "
                "size"
            ) from None

    def _in_half(self, latents):
        pixels = self._each(self.half, latents)
        failed = _not_finite(pixels)
        if failed:
            if not self._warned:
                log.warning(
                    "a picture overflows the float16 decoder; such pictures are decoded in "
                    f"{NAMES[self.otherwise]}"
                )
                self._warned = True
            pixels[failed] = self._in_float32(latents[failed], self.otherwise)
        return pixels

    def _in_float32(self, latents, arithmetic):
        with convolutions(arithmetic):
            pixels = self._each(self.network, latents)
        if _not_finite(pixels):
            raise UsageError(
                f"`vae={self.space.decoder}`: decodes finite latents to pixels that are not "
                "finite; check its weights, or choose another"
            )
        return pixels

    def _each(self, network: Callable[[Tensor], Tensor], latents: Tensor) -> Tensor:
        """Decode one picture at a time: this takes little memory, and a picture's bits do
        not depend on the others. A single image cannot be tiled: GroupNorm needs global
        statistics.
        """
        return torch.cat([network(self.space.to_decoder(latent)) for latent in latents.split(1)])


def _not_finite(pixels):
    """Return the indices of pictures with a value that is not finite; synchronise once for all."""
    return [
        index
        for index, finite in enumerate(pixels.isfinite().flatten(1).all(1).tolist())
        if not finite
    ]
