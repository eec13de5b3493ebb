"""Decode in float16, where that loses nothing that can be seen, else in float32."""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from accel.decoders import LatentSpace
from accel.decoders.decoder import Decoder, not_finite
from accel.runtime.graphs import GraphedFunction

log = logging.getLogger(__name__)

# PSNR in dB that float16's picture of the check must reach against float32's. The
# contest's threshold is 40: at 60 the decoder's share of the allowed mean squared error
# is a hundredth. Decoders that float16 suits reach 70 to 80.
REQUIRED_PSNR = 60.0
CHECK_SIDE = 256  # of a side
NAMES = {"fp32": "float32", "tf32": "float32 with TF32 convolutions"}


class Float16Decoder(Decoder):
    """The decoder of a latent space in float16.

    fallback: fp32 or tf32, used where float16 fails. use_graph: on a GPU float16 is replayed as a
    CUDA graph, the same bits; the capture takes as long as some pictures.

    float16 is compared with float32 once, at loading, on noise of a generator of its own.
    So the outcome depends on the weights alone: every rank and every restart finds the
    same, and the run's random stream is untouched. If float16 overflows or stays below
    REQUIRED_PSNR, a line is printed and `precision` becomes `fallback`. A single picture
    that overflows later is decoded in float32: its bits, too, depend on its latents and
    the weights alone. Several pictures are decoded at once where noise shows that this gives the
    same bits.
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
        self.batch_size = 1  # pictures that float16 decodes together
        self._warned = False

    def load(self) -> "Float16Decoder":
        """Load the network onto the device and check float16, at the first call. Returns
        this decoder.
        """
        super().load()
        if self.precision != "fp16" or self.half is not None:
            return self
        half = self.kind.half(self.network)
        problem = "has no float16 version" if half is None else self._problem(half)
        if half is None or problem:
            self.use_float32(self.fallback)
            log.warning(f"this decoder {problem}: decoding in {NAMES[self.fallback]}")
            return self
        if self.device.type == "cuda" and self._is_batch_invariant(half):
            self.batch_size = self.kind.half_batch_size
        use_graph = self.use_graph and self.device.type == "cuda"
        self.half = GraphedFunction(half) if use_graph else half
        return self

    @torch.inference_mode()
    def _is_batch_invariant(self, half: Callable[[Tensor], Tensor]) -> bool:
        """Return whether a batch of the kind's size decodes noise to the bits of each picture
        alone, and of pictures in another order.
        """
        count = self.kind.half_batch_size
        if count == 1:
            return False
        z = self.space.to_decoder(self._noise(count))
        try:
            together = half(z)
            turned = half(z.flip(0)).flip(0)
        except torch.OutOfMemoryError:
            return False
        alone = torch.cat([half(z[:1]), half(z[-1:])])
        return torch.equal(together, turned) and torch.equal(together[[0, -1]], alone)

    def _noise(self, count: int) -> Tensor:
        """Return latents of noise from a generator of its own."""
        side = self.space.side or CHECK_SIDE // self.space.factor
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (count, self.space.channels, side, side)
        return torch.randn(shape, generator=generator, device=self.device)

    @torch.inference_mode()
    def _problem(self, half: Callable[[Tensor], Tensor]) -> str | None:
        """Compare the float16 decoder with float32 on noise. Return the fault in words, or None."""
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

    def pixels(self, latents: Tensor) -> Tensor:
        if self.half is None:
            return self.in_float32(latents, self.precision)
        pixels = self._float16_pixels(latents)
        failed = not_finite(pixels)
        if failed:
            if not self._warned:
                log.warning(
                    "a picture overflows the float16 decoder; such pictures are decoded in "
                    f"{NAMES[self.fallback]}"
                )
                self._warned = True
            pixels[failed] = self.in_float32(latents[failed], self.fallback)
        return pixels

    def _float16_pixels(self, latents):
        """Return the pixels in float16, of batches of one size: a captured graph is kept for each.

        A last batch is filled up with copies, unless few pictures are left.
        """
        if self.batch_size == 1:
            return self.each(self.half, latents)
        pixels = []
        for part in latents.split(self.batch_size):
            if 4 * len(part) < self.batch_size:
                pixels.append(self.each(self.half, part))
                continue
            numbers = torch.arange(self.batch_size, device=part.device).clamp(max=len(part) - 1)
            pixels.append(self.half(self.space.to_decoder(part[numbers]))[: len(part)])
        return torch.cat(pixels)
