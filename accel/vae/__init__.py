"""The latent decoder: find it, load it, latents to pixels, pixels to bytes. The only place of the latents' scale."""

import math
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from accel.errors import UsageError
from accel.graphs import Replayed
from accel.precision import convolutions
from accel.vae.decoder import Decoder
from accel.weights.checkpoint import FOLDER, fetch_from_hub
from accel.weights.diffusers_layout import WEIGHTS, weight_files
from accel.weights.shapes import shapes_only
from accel.weights.tensor_files import cached_digest, file_stamps, mode_of, read_json, read_tensors, require_floats

SCALE = 0.18215  # latents of sd-vae-ft-* times this have about unit variance
PUBLISHED = ("ema", "mse")
FILES = ("config.json", WEIGHTS)
# PSNR in dB that float16's picture of the check must reach against float32's. The contest's threshold is 40: at 60 the
# decoder's share of the allowed mean squared error is a hundredth. Decoders that float16 suits reach 70 to 80.
REQUIRED_PSNR = 60.0
_NAMES = {"fp32": "float32", "tf32": "float32 with TF32 convolutions"}


#################################################################################
#                                Finding and loading                            #
#################################################################################


def find_vae(name: str) -> Path:
    """The folder of a VAE in diffusers' layout.

    name: a folder, a diffusers pipeline's root with vae/ in it, or ema or mse: pretrained_models/sd-vae-ft-NAME, else
    the hub's stabilityai/sd-vae-ft-NAME, which is fetched. Raises UsageError unless it holds a decoder of that kind.
    """
    folder = FOLDER / f"sd-vae-ft-{name}" if name in PUBLISHED else Path(name)
    if not stat.S_ISDIR(mode_of(folder, "vae")):
        if name not in PUBLISHED:
            raise UsageError(
                f"`vae={name}`: neither ema nor mse nor a folder; give a folder with {' and '.join(FILES)}"
            )
        remedy = f"put {' and '.join(FILES)} of stabilityai/sd-vae-ft-{name} into {folder}"
        folder = fetch_from_hub(f"stabilityai/sd-vae-ft-{name}", "", "vae", remedy)
    if not mode_of(folder / FILES[0], "vae") and stat.S_ISDIR(mode_of(folder / "vae", "vae")):
        folder = folder / "vae"
    _open(folder)
    return folder


def load_vae(folder: Path, device: torch.device | str) -> Decoder:
    """The float32 decoder of a folder that find_vae gave, on `device`. Raises UsageError as find_vae does."""
    config, state = _open(folder)
    with shapes_only():
        decoder = Decoder(config)
    state = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in state.items()}
    decoder.load_state_dict(state, assign=True)
    return decoder.eval().requires_grad_(False)


def digest(folder: Path) -> str:
    """16 hex digits of all the decoder's weights, kept in the cache folder for later runs."""
    return cached_digest(file_stamps(_files(folder), "vae"), lambda: _open(folder)[1])


def _files(folder: Path) -> list[Path]:
    return [folder / FILES[0], *weight_files(folder, "vae")]


def _open(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and the decoder's weights, memory-mapped. They are opened once and kept until a file changes."""
    files = _files(folder)
    return _read(tuple(files), tuple(file_stamps(files, "vae")))


@lru_cache(maxsize=1)
def _read(files: tuple[Path, ...], stamps: tuple) -> tuple[dict, dict[str, torch.Tensor]]:
    config = read_json(files[0], "vae")
    if config.get("_class_name") != "AutoencoderKL":
        raise UsageError(f"`vae={files[0]}`: describes {config.get('_class_name')}, not AutoencoderKL")
    try:
        with shapes_only():
            decoder = Decoder(config)
    except ValueError as error:
        raise UsageError(f"`vae={files[0]}`: {error}, unlike any sd-vae-ft-*; give a VAE of that kind") from None
    state = {}
    for file in files[1:]:
        state |= read_tensors(file, "vae")
    require_floats(state, "vae", files[1])
    state, want = decoder.renamed(state), decoder.state_dict()
    wrong = [name for name in want if name not in state or state[name].shape != want[name].shape]
    if wrong:
        raise UsageError(
            f"`vae={files[1]}`: these weights are not those of config.json ({len(wrong)} entries differ, "
            f"first {wrong[0]}); copy both again"
        )
    return config, state


#################################################################################
#                                    Decoding                                   #
#################################################################################


class CheckedDecoder:
    """A Decoder in fp32, tf32 or fp16; in fp16 only where that loses nothing that can be seen.

    plain: the float32 decoder. precision: the arithmetic asked for; otherwise: fp32 or tf32, used where fp16 fails.
    captured: float16 on a GPU is replayed as a CUDA graph, the same bits. The capture takes as long as some pictures.

    float16 is compared with `plain` once, here, on noise of a generator of its own. So the outcome depends on the
    weights alone: every rank and every restart finds the same, and the run's random stream is untouched. If float16
    overflows or stays below REQUIRED_PSNR, `refusal` says so in one line and `precision` is `otherwise`. A single
    picture that overflows later is decoded by `plain`: its bits, too, depend on its latents and the weights alone.
    """

    def __init__(self, plain: Decoder, precision: str, otherwise: str, captured: bool = False):
        self.plain, self.precision, self.otherwise = plain, precision, otherwise
        self.half = self.refusal = None
        self.overflowed = False  # whether the line about overflowing pictures was printed
        if precision == "fp16":
            from accel.vae.half import HalfDecoder  # imports Triton, which float32 does not need

            self.half = HalfDecoder(plain)
            if problem := self._problem():
                self.half, self.precision = None, otherwise
                self.refusal = f"this decoder {problem}: decoding in {_NAMES[otherwise]}"
            elif captured and plain.decoder.conv_in.weight.is_cuda:
                self.half = Replayed(self.half)

    @torch.inference_mode()
    def _problem(self) -> str | None:
        """What is wrong with the float16 decoder."""
        device = self.plain.decoder.conv_in.weight.device
        z = torch.randn(1, 4, 32, 32, generator=torch.Generator(device).manual_seed(0), device=device) / SCALE
        got, want = self.half(z), self.plain(z)
        if not got.isfinite().all():
            return "overflows float16"
        error = (got.clamp(-1, 1) - want.clamp(-1, 1)).square().mean().sqrt().item()
        psnr = 20 * math.log10(2 / max(error, 1e-9))
        if psnr < REQUIRED_PSNR:
            return f"loses too much in float16 ({psnr:.1f} dB from float32, at least {REQUIRED_PSNR:g} required)"
        return None

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """As the function `decode`. Raises FloatingPointError if float32, too, gives pixels that are not finite."""
        if self.half is None:
            with convolutions(self.precision):
                pixels = decode(self.plain, latents)
            failed = _not_finite(pixels)
        else:
            pixels = decode(self.half, latents)
            failed = _not_finite(pixels)
            if failed:
                if not self.overflowed:
                    in_float32 = f"such pictures are decoded in {_NAMES[self.otherwise]}"
                    print(f"a picture overflows the float16 decoder; {in_float32}")
                    self.overflowed = True
                pixels[failed] = decode(self.plain, latents[failed])
                failed = _not_finite(pixels[failed])
        if failed:
            raise FloatingPointError("pixels are not finite")
        return pixels


def _not_finite(pixels):
    """Which pictures have a value that is not finite; one synchronisation for all."""
    return [index for index, finite in enumerate(pixels.isfinite().flatten(1).all(1).tolist()) if not finite]


@torch.inference_mode()
def decode(vae: Callable[[torch.Tensor], torch.Tensor] | CheckedDecoder, latents: torch.Tensor) -> torch.Tensor:
    """Latents (n, 4, L, L) → pixels (n, 3, 8L, 8L) float32, about (-1, 1).

    One picture at a time: this takes little memory, and a picture's bits do not depend on the others of the batch.
    A single image cannot be tiled: GroupNorm needs global statistics.
    """
    if isinstance(vae, CheckedDecoder):
        return vae.decode(latents)
    return torch.cat([vae(latent / SCALE) for latent in latents.split(1)])


def to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels (n, 3, H, W) in (-1, 1) → (n, H, W, 3) uint8 on the CPU, contiguous: 127.5·x + 128, truncated, as in FID
    jobs."""
    levels = (127.5 * pixels + 128.0).clamp(0, 255).permute(0, 2, 3, 1)
    return levels.to(torch.uint8, memory_format=torch.contiguous_format).cpu()


def to_grid(pixels: torch.Tensor, columns: int = 4, padding: int = 2) -> torch.Tensor:
    """Pixels (n, 3, H, W) in (-1, 1) → one picture (H', W', 3) uint8 on the CPU, `columns` a row, black borders.

    The same bits as torchvision.utils.save_image with value_range=(-1, 1); like there, a single picture has no border.
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
