"""Decode in float16 if a check against float32 passes, else in float32."""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from accel.decoders import LatentSpace
from accel.decoders.decoder import Decoder
from accel.runtime.graphs import GraphedFunction

log = logging.getLogger(__name__)

# Least PSNR in dB of float16 against float32. The contest's threshold is 40 dB; at 60 dB the
# decoder uses 1 % of the allowed mean squared error. Typical decoders reach 70 to 80 dB.
REQUIRED_PSNR = 60.0
CHECK_SIDE = 256  # pixels
NAMES = {"fp32": "float32", "tf32": "float32 with TF32 convolutions"}


class Float16Decoder(Decoder):
    """The decoder of a latent space in float16.

    fallback: precision if float16 fails, fp32 or tf32. use_graph: replay float16 as a CUDA graph;
    the bits are the same, and the capture takes as long as a few images.

    At loading, float16 is compared with float32 on noise from a separate generator. The result
    depends only on the weights, so all ranks and restarts agree, and the run's random stream is
    unchanged. If float16 overflows or stays below REQUIRED_PSNR, `precision` becomes `fallback`
    and a notice is printed. An image that overflows later is decoded in `fallback`: its bits
    depend only on its latents and the weights. Images are batched if batching noise does not
    change any bit.
    """

    def __init__(
        self,
        space: LatentSpace,
        device: torch.device,
        fallback: str = "fp32",
        use_graph: bool = False,
    ):
        super().__init__(space, device, "fp16")
        self.fallback = fallback
        self.use_graph = use_graph
        self.batch_size = 1  # of float16
        self._warned = False

    def load(self) -> "Float16Decoder":
        """Load the network onto the device and check float16, if needed. Returns self."""
        super().load()
        if self.precision != "fp16" or self.half is not None:
            return self
        half = self.kind.half(self.network)
        problem = "has no float16 version" if half is None else self._problem(half)
        if half is None or problem:
            self.use_float32(self.fallback)
            log.warning(f"this decoder {problem}: decoding in {NAMES[self.fallback]}")
            return self
        count = self.kind.half_batch_size
        on_gpu = self.device.type == "cuda"
        if on_gpu and count > 1 and self._is_batch_invariant(half, count):
            self.batch_size = count
        self.half = GraphedFunction(half) if on_gpu and self.use_graph else half
        return self

    @torch.inference_mode()
    def _is_batch_invariant(self, half: Callable[[Tensor], Tensor], count: int) -> bool:
        """Whether decoding `count` latents of noise at a time gives the same bits as batch size 1
        and as another order of the batch.
        """
        z = self.space.to_decoder(self._noise(count))
        try:
            batched = half(z)
            reordered = half(z.flip(0)).flip(0)
        except torch.OutOfMemoryError:
            return False
        single = torch.cat([half(z[:1]), half(z[-1:])])
        return torch.equal(batched, reordered) and torch.equal(batched[[0, -1]], single)

    def _noise(self, count: int) -> Tensor:
        """Draw latents from a separate generator."""
        side = self.space.side or CHECK_SIDE // self.space.factor
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (count, self.space.channels, side, side)
        return torch.randn(shape, generator=generator, device=self.device)

    @torch.inference_mode()
    def _problem(self, half: Callable[[Tensor], Tensor]) -> str | None:
        """Compare float16 with float32 on noise. Return a description of the failure, or None."""
        z = self.space.to_decoder(self._noise(1))
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

    def pixels(self, latents: Tensor, arithmetic: str | None = None) -> Tensor:
        if self.half is None:
            return super().pixels(latents, arithmetic)
        pixels = self._float16_pixels(latents)
        is_finite = pixels.isfinite().flatten(1).all(1)  # of each picture
        if not is_finite.all():
            if not self._warned:
                log.warning(
                    "a picture overflows the float16 decoder; such pictures are decoded in "
                    f"{NAMES[self.fallback]}"
                )
                self._warned = True
            pixels[~is_finite] = super().pixels(latents[~is_finite], self.fallback)
        return pixels

    def _float16_pixels(self, latents):
        """Decode in float16 with one batch size, since each size has its own CUDA graph. A partial
        batch is padded, or decoded one by one if it is small.
        """
        if self.batch_size == 1:
            return self.one_by_one(self.half, latents)
        pixels = []
        for part in latents.split(self.batch_size):
            if 4 * len(part) < self.batch_size:
                pixels.append(self.one_by_one(self.half, part))
                continue
            numbers = torch.arange(self.batch_size, device=part.device).clamp(max=len(part) - 1)
            pixels.append(self.half(self.space.to_decoder(part[numbers]))[: len(part)])
        return torch.cat(pixels)
