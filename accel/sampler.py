"""`from accel import Sampler`: sample pictures from Python with a pipeline that is loaded once."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from accel.checkpoints import Checkpoint
from accel.checkpoints.compare import require_same
from accel.checkpoints.module import from_module, from_state, unwrapped
from accel.config.options import OPTIONS, Options
from accel.config.rules import Request
from accel.decoders.autoencoder_kl import VAE_LATENT_ENTRIES
from accel.decoders.loading import FILES
from accel.errors import InputRef, UsageError, path_errors, require_equal
from accel.families import model_names
from accel.families.spec import CallAdapter, unchanged
from accel.io.output import to_grid
from accel.io.progress import step_bar
from accel.pipeline import Pipeline, free_memory
from accel.run.opening import open_run
from accel.runtime.network import BlockNetwork, require_no_gradients
from accel.runtime.precision import arithmetic, exclusive
from accel.tensors.tensor_files import FILE_SUFFIXES, HUB_ID, require_finite_floats

log = logging.getLogger(__name__)

# Options for weights on disk, not for a module.
FILE_OPTIONS = "ckpt", "weights_entry", "num_heads"
Labels = int | str | Iterable[int | str]
Array = torch.Tensor | np.ndarray
Module = tuple[Checkpoint, CallAdapter]


class Sampler:
    """Load a network and its decoder once, then sample any labels, seeds, steps and scales.

        with Sampler("DiT-XL/2", image_size=512, precision="fp16") as sampler:
            dog, other = sampler.sample(["golden retriever", 207], seed=0)

    model: one of
      - a name, as for --model;
      - weights, as for --ckpt: a file, or the folder or hub id of a DiTPipeline;
      - a module: models.DiT, any other family or its original class, wrapped or compiled, or
        diffusers' DiTTransformer2DModel or DiTPipeline. Its weights are copied.

    vae: a decoder, as for --vae, or an AutoencoderKL; default: the pipeline's or the model's.
    config: a configuration file of the model's original repository, for options that are None.
    guide: a second network of the same family for autoguidance, as for --guide, or a module.
    check: compare modules with their copies on noise, as `accelerate`. All further options are
    flags of sample.py; None selects the default. `sample` defaults to the constructor's values.
    output_type="latent" needs no decoder.

    Pictures are bit-identical to sample.py's with the same flags. On a GPU, the first use of a
    batch size and a number of steps, with or without guidance, captures a step, and later uses
    replay it. Calls from several threads are serialised over all Samplers. torch's global
    generators and backend switches are restored; the caller's autocast, inference mode and default
    dtype have no effect. Raises ValueError (accel.errors.UsageError): one line that names the
    parameter and the remedy.
    """

    def __init__(
        self,
        model: str | torch.nn.Module | None = None,
        *,
        image_size: int | None = None,
        cfg_scale: float | None = None,
        num_sampling_steps: int | None = None,
        timestep_shift: float | None = None,
        guidance_interval: Sequence[float] | None = None,
        guidance_channels: int | None = None,
        noise_scale: float | None = None,
        t_eps: float | None = None,
        sampler: str | None = None,
        eta: float | None = None,
        seed: int | None = None,
        num_classes: int | None = None,
        precision: str | None = None,
        vae_precision: str | None = None,
        ckpt: str | Path | None = None,
        config: str | Path | None = None,
        weights_entry: str | None = None,
        num_heads: int | None = None,
        guide: str | Path | torch.nn.Module | None = None,
        vae: str | Path | torch.nn.Module | None = None,
        latent_stats: str | Path | None = None,
        device: str | int | torch.device | None = None,
        labels: "Labels | None" = None,
        class_names: str | Path | Iterable[str] | Mapping | None = None,
        batch_size: int | None = None,
        output_type: str | None = None,
        check: bool = True,
    ):
        given = {name: value for name, value in locals().items() if name in OPTIONS}
        self._check = check
        module = guide_module = None  # (checkpoint, call adapter)
        if _is_object(model):
            wrong = next((name for name in FILE_OPTIONS if given[name] is not None), None)
            if wrong:
                raise UsageError(
                    "is for weights on disk, and the model was given", "drop it", parameter=wrong
                )
            with exclusive():
                module = from_module(given.pop("model"))
            given["ckpt"] = module[0].name
            if not isinstance(model, torch.nn.Module):
                given["vae"] = getattr(model, "vae", None) if vae is None else vae
        elif model not in (None, *model_names()) and _names_weights(model):
            if ckpt is not None:
                raise UsageError(
                    f"conflicts with {model}, which are weights too",
                    "give one",
                    parameter="ckpt",
                    value=ckpt,
                )
            given["ckpt"] = str(given.pop("model"))
        if _is_object(guide):
            with exclusive():
                guide_module = from_module(guide, "guide")
            given["guide"] = guide_module[0].name
        if device is not None:
            given["device"] = f"cuda:{device}" if isinstance(device, int) else str(device)
        with ExitStack() as stack:
            if isinstance(given["vae"], torch.nn.Module):
                decodes = output_type != "latent"
                given["vae"] = stack.enter_context(_written(given["vae"])) if decodes else None
            self._open(given, module, guide_module)

    def _open(self, given: dict[str, Any], module: Module | None, guide: Module | None) -> None:
        options = Options(**given)
        request = Request.open(options)
        self._renamed = unchanged if module is None else module[1].renamed
        with exclusive():
            checkpoint, guide_checkpoint = (each and each[0] for each in (module, guide))
            self.run = open_run(request, checkpoint=checkpoint, guide=guide_checkpoint)
            self._pipeline: Pipeline | None = Pipeline.load(self.run, keep_guide=True)
            if self._pipeline.decoder is not None:
                with arithmetic(self._pipeline.tier):
                    self._pipeline.decoder.load()  # files may move later
            channels = self.run.settings.guidance_channels, None
            for part, given_part, n in zip(self._pipeline.network.parts, (module, guide), channels):
                if given_part is not None:
                    self._compare(part, *given_part, n)
                    given_part[0].tensors.state.clear()  # the network has a copy by now
        scale = self.run.settings.cfg_scale
        if self.run.guide and scale <= 1 and "cfg_scale" not in options:
            self.run.guide.given.warn(
                f"guides only where cfg_scale is above 1, and it is {scale:g}"
            )

    def refresh(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Load weights of the same shapes in place. Pictures are bit-identical to a new Sampler's,
        and captured steps stay valid. The guide does not change.

        model: a module, which is compared with its copy, or a state dict of such a module or of a
        wrapper, such as AveragedModel. If the weights do not fit, overflow or are not finite, raise
        ValueError and keep the old weights.
        """
        with self._running() as pipeline:
            if isinstance(model, Mapping):
                given = InputRef("refresh", "")
                checkpoint = from_state(given, model, self.run.spec, pipeline.side, self._renamed)
                network = pipeline.network_from(checkpoint)
            else:
                checkpoint, adapter = from_module(model)
                self._require_alike(checkpoint)
                network = pipeline.network_from(checkpoint)
                self._compare(network, checkpoint, adapter, self.run.settings.guidance_channels)
            pipeline.network.parts[0].copy_weights(network)

    def _compare(
        self,
        network: BlockNetwork,
        checkpoint: Checkpoint,
        adapter: CallAdapter,
        channels: int | None,
    ) -> None:
        """Compare a module with its copy, unless check=False."""
        assert self._pipeline is not None
        if not self._check:
            return
        tier = self._pipeline.tier
        if self._pipeline.side != checkpoint.spec.trained_side:
            network = checkpoint.build(tier, self.run.device)
        require_same(network, checkpoint, adapter, tier, channels)

    def _require_alike(self, checkpoint: Checkpoint) -> None:
        """Raise UsageError if the module's family or shapes differ from the Sampler's."""
        require_finite_floats(checkpoint.tensors.state, checkpoint.given)
        theirs, ours = (
            {
                "family": spec.family.name,
                "num_classes": spec.num_classes,
                "null_class": spec.null_class,
                "timestep_embedding": spec.timestep_embedding,
                **spec.arguments,
            }
            for spec in (checkpoint.spec, self.run.spec)
        )
        require_equal(theirs, ours, set(), "this Sampler's model has", "make another of it")

    def sample(
        self,
        labels: Labels,
        seed: int | Sequence[int] | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        noise: Array | None = None,
        progress: bool = False,
    ) -> list[Image.Image]:
        """Return one RGB picture per label. Arguments: as for `latents`."""
        self._require_decoder()
        return self.decode(
            self.latents(
                labels, seed, num_sampling_steps, cfg_scale, noise=noise, progress=progress
            )
        )

    def decode(self, latents: Array) -> list[Image.Image]:
        """Decode latents (n, channels, side, side) to n pictures. The latents come from `latents`,
        or from np.load of a file by `sample.py --output-type latent`.
        """
        self._require_decoder()
        with self._running() as pipeline:
            shape = ("n", self.run.space.channels, "side", "side")
            latents = _floats("latents", latents, shape, pipeline.device)
            if not len(latents):
                return []
            pixels = pipeline.decode(latents)  # (n, 3, H, W)
        return [Image.fromarray(to_grid(picture).numpy()) for picture in pixels.split(1)]

    def _require_decoder(self):
        if self.run.settings.output_type == "latent":
            raise UsageError(
                "loads no decoder",
                "drop it, or call latents()",
                parameter="output_type",
                value="latent",
            )

    def latents(
        self,
        labels: Labels,
        seed: int | Sequence[int] | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        noise: Array | None = None,
        progress: bool = False,
    ) -> torch.Tensor:
        """Return latents (n, channels, side, side), float32, on the sampler's device. side:
        image_size / 8 for sd-vae-ft-*.

        labels: n classes, each a number or a name. seed: one seed, or one per label: then each
        latent is the same as sampled separately. noise: initial standard normal noise, of the shape
        of the latents, which noise_scale multiplies; default: drawn with the seed. Later steps
        always draw with the seed. progress: show a progress bar of the steps. None: the
        constructor's value.
        """
        several = _listed(labels)
        seeds = _listed(seed)
        one_seed: Any = seed if seeds is None else None
        require_no_gradients(
            "sampling has none for noise; call the model itself in your own loop for gradients",
            noise,
        )
        with self._running() as pipeline:
            run = self.run.changed(
                labels=(labels,) if several is None else several,
                num_sampling_steps=num_sampling_steps,
                cfg_scale=cfg_scale,
                seed=one_seed,
            )
            of_labels = run.settings.seed if seeds is None else _seeds(seeds, run.count)
            if noise is not None:
                shape = (run.count, run.space.channels, pipeline.side, pipeline.side)
                noise = _floats("noise", noise, shape, pipeline.device)
            pipeline = replace(pipeline, process=run.process, guidance=run.guidance)
            bar: AbstractContextManager = nullcontext()
            if progress:
                steps = run.process.steps * len(pipeline.batches(run.count))
                bar = step_bar(steps, pipeline.device)
            with bar as on_step:
                return pipeline.latents(run.settings.labels, of_labels, on_step, noise)

    def close(self) -> None:
        """Free the memory of network and decoder. Later calls raise UsageError."""
        with exclusive():
            self._pipeline = None
            free_memory(self.run.device)

    def __reduce__(self):
        raise UsageError("a Sampler cannot be pickled or copied; make another of the same weights")

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _running(self) -> Iterator[Pipeline]:
        """Yield the pipeline to one thread at a time."""
        with exclusive():
            if self._pipeline is None:
                raise UsageError("this Sampler is closed; make another")
            yield self._pipeline


def _listed(values: Any) -> tuple | None:
    """Return several values as a tuple; None for a single one, such as a text or an array
    without dimensions.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        return None
    return tuple(values) if getattr(values, "ndim", 1) else None


def _seeds(seeds: Sequence[int], count: int) -> list[int]:
    """Return a seed for each of `count` labels, checked. Raises UsageError."""
    if len(seeds) != count:
        raise UsageError(
            f"{len(seeds)} given, and `labels`: {count}",
            "give one seed for each label, or one number",
            parameter="seed",
        )
    return [OPTIONS["seed"].checked(seed) for seed in seeds]


def _floats(
    name: str, values: Array, shape: tuple[int | str, ...], device: torch.device
) -> torch.Tensor:
    """Return an array as float32 on `device`. shape: of its dimensions, a text for one of any
    size. Raises UsageError about the parameter `name`.
    """
    try:
        tensor = values if torch.is_tensor(values) else torch.as_tensor(np.asarray(values))
    except TypeError:
        raise UsageError("must be an array of numbers", parameter=name) from None
    if not tensor.is_floating_point():
        raise UsageError(f"has dtype {tensor.dtype}", "give floats", parameter=name)
    fits = len(shape) == tensor.ndim and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, tensor.shape)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise UsageError(f"is of shape {tuple(tensor.shape)}, must be ({wanted})", parameter=name)
    tensor = tensor.detach().to(device, torch.float32)
    if not tensor.isfinite().all():
        raise UsageError("has values that are not finite", parameter=name)
    return tensor


def _names_weights(name):
    return (
        os.path.exists(Path(name))
        or Path(name).suffix in FILE_SUFFIXES
        or bool(HUB_ID.fullmatch(str(name)))
    )


def _is_object(value):
    """Return whether an argument is an object, not a name or path."""
    return not isinstance(value, (str, Path, type(None)))


def _written(decoder: torch.nn.Module) -> TemporaryDirectory:
    """Save a caller's decoder to a temporary folder in diffusers' layout. Raises UsageError for a
    module of another class.
    """
    vae: Any = unwrapped(decoder)
    name = type(vae).__name__
    if name != "AutoencoderKL" or not type(vae).__module__.startswith("diffusers."):
        raise InputRef(name, "vae").error(
            "give ema, mse, a folder or an AutoencoderKL of diffusers"
        )
    if any(value.is_meta for value in vae.parameters()):
        raise InputRef(name, "vae").error("contains no values", "load the weights first")
    with path_errors("vae", name, "set TMPDIR to a folder with space, or give a folder"):
        folder = TemporaryDirectory()
        vae.save_pretrained(folder.name)
        file = Path(folder.name, FILES[0])
        # Pipelines read these attributes, which a caller may have set after construction; the file
        # has the constructor's values.
        scales = {name: getattr(vae.config, name, None) for name in VAE_LATENT_ENTRIES}
        file.write_text(json.dumps(json.loads(file.read_text()) | scales, default=str))
    return folder
