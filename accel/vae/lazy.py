"""A decoder that is loaded when it is needed, or ahead while the GPU denoises."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from accel import vae
from accel.errors import UsageError


class LazyDecoder:
    """The decoder in the folder of a VAE, on a device.

    name: the VAE's, as the user gave it. precision, otherwise, captured: as CheckedDecoder has them.
    """

    def __init__(
        self, name: str, folder: Path, precision: str, otherwise: str, device: torch.device, captured: bool = False
    ):
        self.name, self.folder, self.device = name, folder, device
        self.precision, self.otherwise, self.captured = precision, otherwise, captured
        self._decoder = self._loading = None

    def load_ahead(self) -> None:
        """On a GPU, load it and compile for it in a thread. The weights wait on the CPU until the network's memory is
        free."""
        if self.device.type == "cuda" and not self._decoder and not self._loading:
            self._loading = ThreadPoolExecutor(1).submit(self._load_on_cpu)

    def _load_on_cpu(self):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # imports are long stretches of Python; the loop that feeds the GPU goes first
        try:
            if self.precision == "fp16":
                from accel.kernels.group_norm import compile_ahead

                compile_ahead(self.device)
            return vae.load_vae(self.folder, "cpu")
        finally:
            sys.setswitchinterval(interval)

    def load(self) -> "vae.CheckedDecoder":
        """It, on the device since the first call."""
        if self._decoder is None:
            plain = self._loading.result() if self._loading else vae.load_vae(self.folder, self.device)
            how = self.precision, self.otherwise, self.captured
            self._decoder = vae.CheckedDecoder(plain.to(self.device), *how)
            if self._decoder.refusal:
                print(self._decoder.refusal)
        return self._decoder

    def decode(self, latents: Tensor) -> Tensor:
        """Latents, finite → pixels (n, 3, H, W), about (-1, 1). Raises UsageError if one picture does not fit in
        memory, or if the decoder makes pixels that are not finite, which would become black ones."""
        try:
            return vae.decode(self.load(), latents)
        except torch.OutOfMemoryError:
            half = self._decoder and self._decoder.half
            raise UsageError(
                f"`image_size={8 * latents.shape[-1]}`: decoding a picture does not fit in free GPU memory; use "
                f"{'`output_type=latent`' if half else '`vae_precision=fp16`'}, or a smaller size"
            ) from None
        except FloatingPointError:
            raise UsageError(
                f"`vae={self.name}`: decodes finite latents to pixels that are not finite; check its weights, or "
                "choose another"
            ) from None
