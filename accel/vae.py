"""The latent decoder: find it, load it, latents to pixels, pixels to bytes. The only home of 0.18215."""

import json
import math
import zipfile
from pathlib import Path

import torch

from accel.decoder import Decoder
from accel.meta import shapes_only
from accel.options import ROOT, UsageError
from accel.precision import convolutions

SCALE = 0.18215  # latents of sd-vae-ft-* times this have about unit variance
PUBLISHED = ("ema", "mse")
FILES = ("config.json", "diffusion_pytorch_model.safetensors")
PICKLED = "diffusion_pytorch_model.bin"
# Decibels, in which float16's picture of the check must agree with float32's. The contest gate asks for 40: at 60 the decoder's share of the mean squared
# error that the gate allows is a hundredth, and what float16 gives where it holds is 70 to 80.
AGREE = 60.0


def find_vae(name):
    """The folder of a VAE in diffusers' layout: `name` is ema or mse (a local pretrained_models/sd-vae-ft-NAME, else the hub's
    stabilityai/sd-vae-ft-NAME, fetched into the hub's cache) or a folder.

    Raises UsageError if there is none or it is not whole; nothing is loaded yet.
    """
    if name in PUBLISHED:
        folder = ROOT / "pretrained_models" / f"sd-vae-ft-{name}"
        if not folder.is_dir():
            folder = _fetch(name, folder)
    else:
        folder = Path(name)
        if not folder.is_dir():
            raise UsageError(
                f"--vae {name}: neither ema nor mse nor a folder; give a folder with {' and '.join(FILES)}"
            )
    weights = [folder / FILES[1], folder / PICKLED]
    if not (folder / FILES[0]).is_file() or not any(file.is_file() for file in weights):
        raise UsageError(f"--vae {name}: {folder} must hold {' and '.join(FILES)}")
    try:
        config = json.loads((folder / FILES[0]).read_text())
        kind = config.get("_class_name")
    except (ValueError, AttributeError):
        raise UsageError(f"--vae {name}: {folder / FILES[0]} is not JSON; copy it again") from None
    if kind != "AutoencoderKL":
        raise UsageError(f"--vae {name}: {folder} holds {kind}, not AutoencoderKL")
    try:
        with shapes_only():
            decoder = Decoder(config)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"--vae {name}: {folder / FILES[0]} has {error}, which no sd-vae-ft-* has; give a VAE of that kind"
        ) from None
    try:
        state = decoder.renamed(_mapped(folder))
    except Exception as error:  # an unpickler ends in whatever the bytes happen to mean
        file = next(file for file in weights if file.is_file())
        raise UsageError(
            f"--vae {name}: {file} is damaged ({(str(error) or type(error).__name__).splitlines()[0][:120]}); copy it again"
        ) from None
    wrong = [
        entry
        for entry, tensor in decoder.state_dict().items()
        if entry not in state or state[entry].shape != tensor.shape
    ]
    if wrong:
        raise UsageError(
            f"--vae {name}: the weights in {folder} are not those of its config.json ({len(wrong)} entries differ, first {wrong[0]}); copy it again"
        )
    return folder


def _mapped(folder):
    """The state dict in a VAE's folder, of which nothing is read until its values are."""
    if (folder / FILES[1]).is_file():
        from safetensors.torch import load_file

        return load_file(folder / FILES[1])
    return torch.load(
        folder / PICKLED, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(folder / PICKLED)
    )


def _fetch(name, folder):
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(f"stabilityai/sd-vae-ft-{name}", allow_patterns=list(FILES)))
    except Exception as error:  # every way a network can fail ends here, with the same remedy
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"--vae {name}: not on this machine and the hub cannot be reached ({reason[:120]}); put {' and '.join(FILES)} "
            f"of stabilityai/sd-vae-ft-{name} into {folder}"
        ) from None


def load_vae(folder, device):
    """The Decoder of a VAE's folder found by `find_vae`, float32, on `device`."""
    config = json.loads((folder / FILES[0]).read_text())
    with shapes_only():
        decoder = Decoder(config)
    decoder.load_state_dict(
        {name: tensor.to(device, torch.float32) for name, tensor in decoder.renamed(_mapped(folder)).items()},
        assign=True,
    )
    return decoder.eval().requires_grad_(False)


class CheckedDecoder:
    """`plain`, a Decoder, in the arithmetic `precision`: fp32, tf32, or fp16 where that holds.

    float16 is held to the float32 decoder (under the switches in force) once, here, on noise from a generator of its own: so the answer depends on the weights alone,
    every rank and every restart of a job finds the same, and the run's random stream is untouched. If the two disagree, by AGREE, or float16 is not finite,
    `refusal` says so in a line, `precision` is `otherwise`, and `plain` decodes. A picture that overflows float16 all the same is decoded by `plain`: its bits too
    depend on nothing but its latents and the weights.
    """

    def __init__(self, plain, precision, otherwise):
        self.plain, self.precision, self.otherwise, self.half, self.refusal = plain, precision, otherwise, None, None
        self.overflowed = False  # whether a picture has been, and was said to be
        if precision == "fp16":
            from accel.half_decoder import HalfDecoder  # brings Triton, which float32 need not wait for

            self.half = HalfDecoder(plain)
            if problem := self._problem():
                self.half, self.precision = None, otherwise
                self.refusal = f"this decoder {problem}: decoding in {_NAMES[otherwise]}"

    @torch.inference_mode()
    def _problem(self):
        """What is wrong with the float16 decoder, or None."""
        device = self.plain.decoder.conv_in.weight.device
        z = torch.randn(1, 4, 32, 32, generator=torch.Generator(device).manual_seed(0), device=device) / SCALE
        got, want = self.half(z), self.plain(z)
        if not got.isfinite().all():
            return "overflows float16"
        error = (got.clamp(-1, 1) - want.clamp(-1, 1)).square().mean().sqrt().item()
        decibels = 20 * math.log10(2 / max(error, 1e-9))
        return (
            None
            if decibels >= AGREE
            else f"loses too much in float16 ({decibels:.1f} dB from float32, {AGREE:g} asked)"
        )

    def decode(self, latents):
        """As `decode`."""
        if self.half is None:
            with convolutions(self.precision):
                return decode(self.plain, latents)
        pixels = [self.half(latent / SCALE) for latent in latents.split(1)]
        finite = torch.stack(
            [one.isfinite().all() for one in pixels]
        ).tolist()  # asked once: the GPU is not to wait for the host between pictures
        for index, holds in enumerate(finite):
            if not holds:
                pixels[index] = self.plain(latents[index : index + 1] / SCALE)
        if not all(finite) and not self.overflowed:
            print(
                f"a picture overflows the float16 decoder: decoding it, and others that do, in {_NAMES[self.otherwise]}"
            )
            self.overflowed = True
        return torch.cat(pixels)


_NAMES = {"fp32": "float32", "tf32": "float32 with TF32 convolutions"}


@torch.inference_mode()
def decode(vae, latents):
    """Latents (n, 4, L, L) → pixels (n, 3, 8L, 8L) float32, about (-1, 1).

    vae: a Decoder or CheckedDecoder. One picture at a time: memory stays small, and a picture's bits do not depend on how many are decoded beside it.
    Smaller slices there are none: a picture in bands would need its norms' statistics beforehand, every layer twice.
    """
    if isinstance(vae, CheckedDecoder):
        return vae.decode(latents)
    return torch.cat([vae(latent / SCALE) for latent in latents.split(1)])


def to_uint8(pixels):
    """Pixels (n, 3, H, W) in (-1, 1) → (n, H, W, 3) uint8 on the CPU, by 127.5·x + 128 truncated, as FID jobs write them."""
    return (127.5 * pixels + 128.0).clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8).cpu()


def to_grid(pixels, columns=4, padding=2):
    """Pixels (n, 3, H, W) in (-1, 1) → one picture (H', W', 3) uint8 on the CPU, `columns` a row, black lines of `padding` between.

    The rounding is torchvision.utils.save_image's with value_range=(-1, 1), to the bit; a single picture gets no border, as there.
    """
    tiles = pixels.float().clamp(-1, 1).sub(-1).div(2)
    if len(tiles) == 1:
        grid = tiles[0]
    else:
        n, channels, height, width = tiles.shape
        columns = min(columns, n)
        rows = -(-n // columns)
        grid = tiles.new_zeros(channels, rows * (height + padding) + padding, columns * (width + padding) + padding)
        for index, tile in enumerate(tiles):
            top = index // columns * (height + padding) + padding
            left = index % columns * (width + padding) + padding
            grid[:, top : top + height, left : left + width] = tile
    return grid.mul(255).add(0.5).clamp(0, 255).permute(1, 2, 0).to(torch.uint8).cpu()
