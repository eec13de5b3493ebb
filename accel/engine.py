"""From options to pictures: choose the device, load the weights, denoise, decode, save."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel import precision, vae
from accel.errors import UsageError, path_errors
from accel.files import atomic_write
from accel.forecast import read_plan
from accel.gpu import missing_code
from accel.network import MODELS, Network, Plain
from accel.options import GridOptions
from accel.progress import Stopwatch, step_bar
from accel.sampling import OnStep, denoise, initial_noise, upstream_noise
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.strides import Strides
from accel.weights.checkpoint import Checkpoint, published_name
from accel.weights.held import Held
from accel.weights.identity import shapes_only
from diffusion import create_diffusion

#################################################################################
#                          What the options alone decide                        #
#################################################################################


def choose_device(options: GridOptions) -> torch.device:
    """The device asked for, or a GPU if there is one. Raises UsageError if this machine lacks it."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device {options.device}: no such kind of device; try cuda, cuda:1 or cpu") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device}: torch {torch.__version__} finds no CUDA GPU; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {device}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0")
        if remedy := missing_code(device):
            kind, version = torch.cuda.get_device_name(device), torch.__version__
            raise UsageError(f"--device {device}: torch {version} has no code for {kind}; install {remedy}")
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(f"--device {device}: torch {torch.__version__} cannot sample there; use cuda or cpu")
    return device


def choose_precision(options: GridOptions, device: torch.device) -> tuple[str, str]:
    """Set the tier asked for, or the device's default. Returns its name and the decoder's arithmetic."""
    tier = options.precision or precision.default_tier(device)
    if tier == "tf32" and options.tf32 and not precision.supports(tier, device):
        print(f"--tf32: {device} has no {precision.TIERS[tier].hardware}; sampling in fp32")
        tier = "fp32"
    try:
        precision.apply_precision(tier, device)
        return tier, precision.decoder_precision(options.vae_precision, tier, device)
    except ValueError as error:
        raise UsageError(str(error)) from None


def empty_model(options: GridOptions) -> torch.nn.Module:
    """The model of `options` on the meta device: shapes without values."""
    build = options.weights.build if options.weights else MODELS[options.model]
    with shapes_only():
        return build(input_size=options.latent_size, num_classes=options.num_classes)


def open_checkpoint(options: GridOptions) -> Checkpoint:
    """The options' weights, not fetched or read yet. Raises UsageError if there are none of that name."""
    name = options.ckpt or published_name(options.model, options.image_size, options.num_classes)
    # A CPU computes with copies: whoever writes to the file meanwhile must not change what is computed with. A network
    # that ranks divide stays in the file, of which each reads its part.
    divided = "weights" in (getattr(options, "mesh", None) or ())
    return Checkpoint(name, mapped=options.device != "cpu" or divided)


def fetch(options: GridOptions, checkpoint: Checkpoint | Held) -> GridOptions:
    """Download what is not here yet of network and decoder. Returns the options with all that follows from the weights.
    Raises UsageError that names all that is missing."""
    missing = []

    def find_vae(name):
        if options.output_type == "image":
            vae.find_vae(name)

    def attempt(work, *arguments):
        try:
            work(*arguments)
        except UsageError as error:
            missing.append(str(error))

    if options.vae:
        attempt(find_vae, options.vae)
    attempt(checkpoint.fetch)
    if not missing:
        options = options.complete(checkpoint)
        attempt(find_vae, options.vae)
    if len(missing) > 1:
        missing.append("or take --model DiT-Demo/2, which ships with both")
    if missing:
        raise UsageError("; ".join(missing))
    return options


#################################################################################
#                                 The network                                   #
#################################################################################


def load_network(
    options: GridOptions,
    checkpoint: Checkpoint | Held,
    tier: str,
    device: torch.device,
    latents: int,
    copies: int,
    tuner: Any = None,
    divided: bool = False,
) -> Network:
    """The network of `tier` on `device`. No weights are initialised to be thrown away, and each goes straight from the
    mapped file to the device. latents: of one evaluation, each in `copies` batch rows, to warm up for. tuner: of its
    GEMMs. divided: a plain network's weights stay in the file, as ranks will each take their part.

    Raises UsageError for missing weights, those of another model, and those that the tier cannot hold.
    """
    state, model, trained = checkpoint.state, empty_model(options), options.weights.image_size
    if trained not in (None, options.image_size):
        print(f"{options.model}: weights trained at {trained} px, sampling at {options.image_size} px")
    table = state.get("pos_embed")
    if table is not None and table.shape != model.pos_embed.shape:  # a function of the grid: any size will do
        state = {**state, "pos_embed": model.position_table()}
    if precision.TIERS[tier].accelerated:
        from accel import fast  # brings Triton; the other tiers need not wait for it

        try:
            return fast.load(state, model, tier, device, latents, copies, guidance_of(options).channels, tuner)
        except ValueError as error:
            raise UsageError(f"--ckpt {checkpoint.name}: {error}") from None
    if not divided:  # first to the device: of weights in half precision the CPU never holds a float32 copy
        state = {name: value.to(device).float() for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return Plain(model.eval().requires_grad_(False))


@torch.inference_mode()
def overflows(network: Network, options: GridOptions, device: torch.device, n: int, copies: int) -> bool:
    """Whether `network` gives infinities or NaN on noise, at the first, the middle and the last timestep."""
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random stream begins untouched
    side = options.latent_size
    labels = (list(options.labels or (0,)) * n)[:n] + [options.num_classes] * (n * copies - n)
    y = torch.tensor(labels, device=device)
    x = torch.randn(n, network.in_channels, side, side, generator=generator, device=device)
    # On the rows of the run: other shapes would be compiled and tuned for nothing.
    outputs = (network.tokens(x, torch.full_like(y, t), y) for t in (999, 500, 0))
    return not all(out.isfinite().all() for out in outputs)


def guidance_of(options: GridOptions) -> Guidance | Unguided:
    """The options' guidance."""
    return Guidance(options.cfg_scale, options.num_classes) if options.guided else Unguided()


#################################################################################
#                                   The run                                     #
#################################################################################


class Engine:
    """One loaded sampling run: `sample()` gives latents, `decode()` pixels, `save()` the file, `watch` the seconds.

    batch: (latents, batch rows of each) of one network evaluation on this rank; by default a latent for every label.
    share(make): `make()` of rank 0, on every rank. tuner_folders: where the GEMM autotuner keeps what it measures.
    divided: as load_network has it. checkpoint: the weights, where they are opened already.
    """

    def __init__(
        self,
        options: GridOptions,
        batch: tuple[int, int] | None = None,
        share: Callable[[Callable[[], Any]], Any] = lambda make: make(),
        tuner_folders: list[Path] | None = None,
        divided: bool = False,
        checkpoint: Checkpoint | Held | None = None,
    ):
        self.device = choose_device(options)
        self.share, self.tuner_folders = share, tuner_folders
        self.watch = Stopwatch(self.device)
        self.decoder = self._loading_decoder = None
        with self.watch.phase("load"):
            # What the flags alone decide is refused before weights are fetched and read.
            self.checkpoint = checkpoint or open_checkpoint(replace(options, device=str(self.device)))
            self.precision, self.decoder_precision = choose_precision(options, self.device)
            self.options = options = options if options.weights else fetch(options, self.checkpoint)
            at_once = min(len(options.labels or ()), options.batch_size or len(options.labels or ()))
            self.batch = batch or (at_once, guidance_of(options).copies)
            self.vae_folder = vae.find_vae(options.vae) if options.output_type == "image" else None
            self._prepare_steps(options)
            with self._memory():
                self._load_network(divided)

    def _prepare_steps(self, options):
        diffusion = create_diffusion(str(options.num_sampling_steps), learn_sigma=options.weights.learn_sigma)
        self.guidance = guidance_of(options)
        if options.forecast == "plan":
            self.process = Strides(diffusion, read_plan(options, self.checkpoint))
        else:
            self.process = Ddim(diffusion, options.eta) if options.sampler == "ddim" else Ancestral(diffusion)

    def reconfigure(self, options: GridOptions) -> None:
        """Sample by `options` from now on. They may differ from those before in labels, seed, steps and guidance."""
        before = self.options
        if (before.num_sampling_steps, before.cfg_scale) != (options.num_sampling_steps, options.cfg_scale):
            self._prepare_steps(options)
        self.options = options

    def _load_network(self, divided=False):
        tier, how = self.precision, {}
        if precision.TIERS[tier].accelerated:
            from accel.kernels.linear import Tuner  # brings Triton; the other tiers need not wait for it

            how = dict(tuner=Tuner(self.tuner_folders, self.share))
        how["divided"] = divided
        self.network = load_network(self.options, self.checkpoint, tier, self.device, *self.batch, **how)
        if not divided:
            self.checkpoint.close()
        if not precision.TIERS[tier].accelerated:
            return
        latents, copies = self.batch
        self.network.tune([latents * copies * (self.options.latent_size // self.network.patch_size) ** 2])
        if tier != "bf16" and overflows(self.network, self.options, self.device, *self.batch):
            self._leave_float16()

    def _leave_float16(self):
        """Sample in bfloat16 where the user left the tier open, else refuse."""
        if self.precision == "exact" or self.options.precision == "fp16" or not precision.supports("bf16", self.device):
            raise UsageError(f"--precision {self.precision}: overflows on these weights; {self._remedy()}")
        print("these weights overflow float16: sampling in bfloat16")
        self.precision = "bf16"
        precision.apply_precision("bf16", self.device)
        self.network = None  # free its memory first
        self._load_network()

    def _remedy(self):
        """What to do where a tier's values are not finite."""
        if layer := self.network.overflowed():
            return f"{layer} gives values beyond a high/low split; use --precision fp32"
        if self.precision == "fp16" and precision.supports("bf16", self.device):
            return "use --precision bf16"
        return "check the weights" if self.precision == "fp32" else "use --precision fp32"

    def describe(self) -> str:
        options, gpu = self.options, self.device.type == "cuda"
        where = torch.cuda.get_device_name(self.device) if gpu else f"CPU, {torch.get_num_threads()} threads"
        planned = self.process.evaluations < self.process.steps
        plan = f" ({self.process.evaluations} network evaluations)" if planned else ""
        ddim = "DDIM " * (options.sampler == "ddim")
        return (
            f"{options.model} · {options.image_size} px · {options.pictures} · "
            f"{options.num_sampling_steps} {ddim}steps{plan} · cfg {options.cfg_scale:g} · {self.precision} · "
            f"{where} · torch {torch.__version__}"
        )

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """UsageError where the GPU's memory does not hold what is done inside."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise UsageError(self.options.smaller_batch) from None

    def denoise(
        self,
        z: torch.Tensor,
        labels: torch.Tensor,
        draw: Callable[[], torch.Tensor],
        on_step: OnStep | None = None,
        moves=None,
    ) -> torch.Tensor:
        """Noise z (n, C, L, L) and labels (n,) → latents; arguments as sampling.denoise has them. Raises UsageError,
        naming the step and a remedy, if they are not finite."""
        sums = torch.zeros(self.process.steps, device=self.device)  # read once, after the loop

        def after_step(index, x):
            torch.sum(x.flatten(), 0, out=sums[index])
            if on_step is not None:
                on_step(index, x)

        values = self.network, self.process, self.guidance, z, labels, draw
        with self._memory():
            latents = denoise(*values, moves=moves, on_step=after_step)
        failed = torch.nonzero(~sums.isfinite())
        if len(failed):
            raise UsageError(
                f"--precision {self.precision}: the latents are not finite from step {int(failed[0]) + 1} of "
                f"{len(sums)} on; {self._remedy()}"
            )
        return latents

    def run(self, rows: slice = slice(None), on_step: OnStep | None = None, moves=None) -> torch.Tensor:
        """Latents (n', C, L, L) of `rows` of the options' labels, from the options' seed; the same on every call.

        With a batch size one slice of them after the other; each draws the noise of all and uses its own. on_step
        counts the steps of all slices.
        """
        side, latents = self.options.latent_size, []
        labels = torch.tensor(self.options.labels, device=self.device)
        for part in self._slices(rows):
            with self._memory():
                generator = torch.Generator(self.device).manual_seed(self.options.seed)  # a run's own
                z = initial_noise(len(labels), 4, side, generator)
            done, draw = len(latents) * self.process.steps, upstream_noise(z, self.guidance.copies, part, generator)
            count_on = on_step and (lambda index, x, done=done: on_step(done + index, x))
            latents.append(self.denoise(z[part], labels[part], draw, count_on, moves))
        return torch.cat(latents) if latents else torch.empty(0, 4, side, side, device=self.device)

    def _slices(self, rows):
        """`rows` of the labels, no more than a batch in each."""
        first, end, _ = rows.indices(len(self.options.labels))
        size = self.options.batch_size or max(1, end - first)
        return [slice(start, min(start + size, end)) for start in range(first, end, size)]

    def sample(self, rows: slice = slice(None), show: bool = True) -> torch.Tensor:
        """`run` with a bar, repeated and timed as the options say → latents. show: whether this process prints."""
        runs, times = self.options.repeats, []
        captured = self.device.type == "cuda" and self.network.captures
        # The first step compiles and is recorded: the bar should not learn its pace from it. Other seeds find it done.
        if (runs > 1 or captured) and "warm-up" not in self.watch.seconds:
            with self.watch.phase("warm-up"):
                for part in self._slices(rows)[:1]:
                    self.run(part, moves=self.process.every_kind)
        self._load_decoder_beside()
        for index in range(runs):
            start = time.perf_counter()
            bar = step_bar(
                self.options.num_sampling_steps * len(self._slices(rows)),
                self.device,
                disable=not show,
                desc=f"run {index + 1}/{runs}" if runs > 1 else None,
            )
            with self.watch.phase("sample"), bar as queued:
                latents = self.run(rows, lambda index, _, queued=queued: queued(index))
            times.append(time.perf_counter() - start)
        if runs > 1 and show:
            median = statistics.median(times)
            print(f"sampling, {runs} runs after warm-up: median {median:.3f} s, {min(times):.3f} to {max(times):.3f} s")
        return latents

    def release_network(self) -> None:
        """Free the network's memory, its captured steps included, before pictures are decoded. The sampling is over."""
        self.network = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    # ---- from latents to the file ----

    def load_decoder(self) -> vae.CheckedDecoder:
        """The VAE's decoder, on the device since the first call."""
        if self.decoder is None:
            loading = self._loading_decoder
            plain = loading.result() if loading else vae.load_vae(self.vae_folder, self.device)
            otherwise = precision.float32_decoder(self.precision, self.device)
            self.decoder = vae.CheckedDecoder(plain.to(self.device), self.decoder_precision, otherwise)
            if self.decoder.refusal:
                print(self.decoder.refusal)
        return self.decoder

    def _load_decoder_beside(self):
        """On a GPU, load the VAE and compile for it in a thread while the GPU denoises. The weights wait on the CPU
        until the network's memory is free."""
        if self.vae_folder is None or self.device.type != "cuda" or self.decoder or self._loading_decoder:
            return

        def load():
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e-4)  # imports are long stretches of Python; the loop that feeds the GPU goes first
            try:
                if self.decoder_precision == "fp16":
                    from accel.kernels.group_norm import compile_ahead

                    compile_ahead(self.device)
                return vae.load_vae(self.vae_folder, "cpu")
            finally:
                sys.setswitchinterval(interval)

        self._loading_decoder = ThreadPoolExecutor(1).submit(load)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents, finite → pixels (n, 3, H, W), about (-1, 1). Raises UsageError if one picture does not fit in
        memory, or if the decoder makes pixels that are not finite, which would become black ones."""
        with self.watch.phase("decode"):
            try:
                pixels = vae.decode(self.load_decoder(), latents)
            except torch.OutOfMemoryError:
                half = self.decoder and self.decoder.half
                raise UsageError(
                    f"--image-size {self.options.image_size}: decoding a picture does not fit in free GPU memory; use "
                    f"{'--output-type latent' if half else '--vae-precision fp16'}, or a smaller size"
                ) from None
            if not pixels.isfinite().all():
                raise UsageError(
                    f"--vae {self.options.vae}: decodes finite latents to pixels that are not finite; check its "
                    "weights, or choose another"
                )
            return pixels

    def save(self, latents: torch.Tensor | None = None, pixels: torch.Tensor | None = None) -> None:
        """Write the options' output: the latents, or a grid or a folder of `pixels`, decoded here if not given.

        Every file is whole or absent. Raises UsageError if the disk does not take it.
        """
        options = self.options
        if options.output_type == "latent":
            self._write(options.output, latents.float().cpu())
        elif options.into_folder:
            pictures = (latents if pixels is None else pixels).split(1)
            for name, picture in zip(options.picture_names, pictures, strict=True):
                picture = self.decode(picture) if pixels is None else picture
                self._write(Path(options.output, name), vae.to_grid(picture))
        else:
            self._write(options.output, vae.to_grid(self.decode(latents) if pixels is None else pixels))

    def _write(self, path, content):
        remedy = "free some space, or choose another path"
        with self.watch.phase("save"), path_errors("--output", path, remedy), atomic_write(path) as file:
            if self.options.output_type == "latent":
                import numpy as np

                np.save(file, content.numpy())
            else:
                from PIL import Image

                Image.fromarray(content.numpy()).save(file, format="PNG")
