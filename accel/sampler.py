"""`from accel import Sampler`: pictures from Python, from a pipeline that is loaded once."""

import difflib
import inspect
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from accel.compare import own_guidance, require_same
from accel.config import Config, Grid
from accel.errors import UsageError, path_errors
from accel.families import model_names
from accel.families.loaded_module import LoadedModule, read_state, unwrapped
from accel.families.recognise import reference_state
from accel.flags import checked
from accel.grid import batches_of, ready
from accel.isolation import alone
from accel.latents.autoencoder_kl import OF_LATENTS
from accel.latents.files import FILES
from accel.network import require_no_gradients
from accel.opening import require_schedule
from accel.output import to_grid
from accel.pipeline import Pipeline, free_memory, opened_guidance, process_of
from accel.precision import apply_precision
from accel.progress import step_bar
from accel.weights.checkpoint import FILE_SUFFIXES, HUB_ID
from accel.weights.shapes import require_fit
from accel.weights.tensor_files import require_finite_floats

log = logging.getLogger(__name__)

# Options for weights on disk, not for a module.
FOR_FILES = "ckpt", "weights_entry", "num_heads"
# Names of other libraries for options and arguments here.
ALSO_CALLED = {
    "guidance_scale": "cfg_scale",
    "cfg": "cfg_scale",
    "num_inference_steps": "num_sampling_steps",
    "steps": "num_sampling_steps",
    "sampling_method": "sampler",
    "scheduler": "sampler",
    "dtype": "precision",
    "torch_dtype": "precision",
    "checkpoint": "ckpt",
}
Labels = int | str | Iterable[int | str]
Array = torch.Tensor | np.ndarray


class Sampler:
    """Sample pictures of any labels, seeds, steps and guidance from a network and its
    decoder, loaded once.

        with Sampler("DiT-XL/2", image_size=512, precision="fp16") as sampler:
            dog, other = sampler.sample(["golden retriever", 207], seed=0)

    model, or the first argument, is one of these. A name, as --model has it. Weights, as --ckpt
    has them, such as a file, or the folder or hub id of a DiTPipeline. A network that the caller
    has, whose weights are copied: models.DiT, another family's, the original classes, wrapped or
    compiled, or diffusers' DiTTransformer2DModel or DiTPipeline. vae: ema, mse, a folder or
    an AutoencoderKL; a pipeline brings its own. config: a configuration file of the model's own
    repository, for options that are open. guide: autoguidance by a second network of the same
    family, weights as --guide has them or a network that the caller has. check: compare networks
    that the caller has with their copies on noise, as `accelerate` does. The other options are
    those of sample.py's flags; None leaves one open. Arguments of `sample` have the
    constructor's values as defaults. With output_type="latent" no decoder is needed.

    Pictures equal those of sample.py with the same flags, to the bit. On a GPU a step is
    captured at its first use with a number of pictures, steps and guidance, then replayed.
    Callers in several threads, of this and of other Samplers, are served one at a time.
    torch's global generators and backend switches are left as they were, and the caller's
    autocast, inference mode and default dtype change nothing. Raises ValueError
    (accel.errors.UsageError): one line that names the parameter and the remedy.
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
        device: str | torch.device | None = None,
        labels: "Labels | None" = None,
        class_names: str | Path | Iterable[str] | Mapping | None = None,
        batch_size: int | None = None,
        output_type: str | None = None,
        check: bool = True,
        **unknown: Any,
    ):
        given = {name: value for name, value in locals().items() if value is not None}
        for name in ("self", "check", "unknown"):
            given.pop(name, None)
        _refuse(unknown, "an option of Sampler", Sampler.__init__.__kwdefaults__)
        self._check = check
        loaded = None
        if _is_object(model):
            wrong = next((name for name in FOR_FILES if name in given), None)
            if wrong:
                raise UsageError(
                    f"`{wrong}`: is for weights on disk, and the model was given; drop it"
                )
            loaded = _load_module(given.pop("model"))
            given["ckpt"] = loaded.name
            if not isinstance(model, torch.nn.Module):
                given.setdefault("vae", getattr(model, "vae", None))  # a pipeline's
        elif model not in (None, *model_names()) and _names_weights(model):
            if ckpt is not None:
                raise UsageError(
                    f"`ckpt={ckpt}`: conflicts with {model}, which are weights too; give one"
                )
            given["ckpt"] = str(given.pop("model"))
        loaded_guide = None
        if _is_object(guide):
            try:
                loaded_guide = _load_module(guide)
            except UsageError as error:
                raise UsageError(f"`guide`: {error.marked}") from None
            given["guide"] = loaded_guide.name
        if device is not None:
            given["device"] = str(device)
        decoder = given.get("vae")
        if not isinstance(decoder, torch.nn.Module):
            self._open(given, loaded, loaded_guide)
        elif output_type == "latent":  # needs no decoder
            del given["vae"]
            self._open(given, loaded, loaded_guide)
        else:
            with _written(decoder) as given["vae"]:
                self._open(given, loaded, loaded_guide)
                with self._running() as pipeline:
                    pipeline.decoder.load()  # while the folder is there

    def _open(self, options, loaded, guide):
        grid = Grid.of(**options)
        grid.check()
        self._guidance_is_given = grid.config.guidance_channels is not None
        with alone():
            if loaded and self._check and not self._guidance_is_given:
                channels = {"guidance_channels": _guided_channels(loaded)}
                loaded.fit = loaded.fit._replace(recipe={**loaded.fit.recipe, **channels})
            self.grid, self.opened, self._pipeline = ready(grid, loaded, guide)
            network = self._pipeline.network
            networks = (network.network, network.guide) if self.opened.guide else (network,)
            for part, module in zip(networks, (loaded, guide)):
                if module is None:
                    continue
                if self._check:
                    require_same(part, module, self._pipeline.tier, self._pipeline.side)
                module.release()  # the network has a copy of its weights by now
        scale = self.config.cfg_scale
        if self.opened.guide and scale <= 1 and "cfg_scale" not in options:
            log.warning(
                f"{self.opened.guide.weights.name}: guides only where cfg_scale is above 1, and it "
                f"is {scale:g}"
            )

    @property
    def config(self) -> Config:
        """Return the options, the open ones filled."""
        return self.opened.config

    def refresh(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Load the weights of `model`, of the same shape, in place: pictures equal a new
        Sampler's to the bit, and captured steps stay valid. A guide stays as it is. model: a
        network, or the state dict of one like that of this Sampler or of a wrapper around it,
        such as an average of its weights. Raises ValueError, and keeps the old weights, if they
        do not fit, overflow or are not finite. A network is compared with its copy.
        """
        with self._running() as pipeline:
            first = self.opened.weights
            fit = self.opened.fit
            if isinstance(model, Mapping):
                weights = read_state("refresh", model, first, fit, pipeline.side)
                network = pipeline.like(weights, fit)
            else:
                loaded = LoadedModule(model)
                self._require_alike(loaded)
                network = pipeline.like(loaded, fit)
                if self._check:
                    require_same(network, loaded, pipeline.tier, pipeline.side)
            pipeline.network.copy_weights(network)

    def _require_alike(self, loaded):
        """Raise UsageError for a module of another family, shape or guidance."""
        require_finite_floats(loaded.state, loaded.name)
        require_schedule(loaded.name, loaded.fit)
        mine = self.opened.fit
        wanted = _beside_shapes(self.opened.weights, mine)
        has = _beside_shapes(loaded, loaded.fit)
        if self._check and not self._guidance_is_given:
            wanted["guidance_channels"] = self.config.guidance_channels
            has["guidance_channels"] = _guided_channels(loaded) or self.config.guidance_channels
        for name, value in has.items():
            if value != wanted[name]:
                raise UsageError(
                    f"{loaded.name}: has {name} {value}, unlike the model of this Sampler; make "
                    "another of it"
                )
        state = reference_state(loaded, loaded.fit)
        require_fit(loaded.name, state, mine.empty(self.opened.latent_size))

    def sample(
        self,
        labels: Labels,
        seed: int | Sequence[int] | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        noise: Array | None = None,
        progress: bool = False,
        **unknown: Any,
    ) -> list[Image.Image]:
        """Return one picture per label, (image_size, image_size) RGB. Arguments: of `latents`."""
        self._require_decoder()
        return self.decode(
            self.latents(
                labels,
                seed,
                num_sampling_steps,
                cfg_scale,
                noise=noise,
                progress=progress,
                **unknown,
            )
        )

    def decode(self, latents: Array) -> list[Image.Image]:
        """Return a picture for each of latents (n, channels, side, side), such as `latents`
        returns or `sample.py --output-type latent` writes: np.load reads these.
        """
        self._require_decoder()
        with self._running() as pipeline:
            shape = ("n", self.opened.space.channels, "side", "side")
            latents = _floats("latents", latents, shape, pipeline.device)
            if not len(latents):
                return []
            pixels = pipeline.decode(latents)  # (n, 3, H, W)
        return [Image.fromarray(to_grid(picture).numpy()) for picture in pixels.split(1)]

    def _require_decoder(self):
        if self.grid.output_type == "latent":
            raise UsageError("`output_type=latent`: loads no decoder; drop it, or call latents()")

    def latents(
        self,
        labels: Labels,
        seed: int | Sequence[int] | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        noise: Array | None = None,
        progress: bool = False,
        **unknown: Any,
    ) -> torch.Tensor:
        """Return latents (n, channels, side, side) float32, side image_size/8 for
        sd-vae-ft-*, on the sampler's device.

        labels: n classes, each a number or a name. seed: of all, or n seeds: each label is
        then sampled as it is alone with its seed. noise: n latents of normal noise of deviation
        1 to start from, which noise_scale multiplies, in place of those that the seed gives; the
        noise of later steps is the seed's.
        Arguments that are None are the constructor's. progress: show a bar of the steps.
        """
        arguments = inspect.signature(self.latents).parameters.keys() - {"unknown"}
        _refuse(unknown, "an argument of sample and latents", arguments)
        several = _listed("labels", labels)
        seeds = _listed("seed", seed)
        options = dict(num_sampling_steps=num_sampling_steps, cfg_scale=cfg_scale)
        if seeds is None:
            options["seed"] = seed
        changes = {name: value for name, value in options.items() if value is not None}
        require_no_gradients(
            "sampling has none for noise; call the model itself in your own loop for gradients",
            noise,
        )
        with self._running() as pipeline:
            opened = self.opened.changed(**changes)
            grid = replace(self.grid, labels=(labels,) if several is None else several)
            grid = grid.filled(opened.config, opened.fit, opened.has_null_label)
            seed = opened.config.seed if seeds is None else _seeds(seeds, grid.count)
            if noise is not None:
                shape = (grid.count, opened.space.channels, pipeline.side, pipeline.side)
                noise = _floats("noise", noise, shape, pipeline.device)
            pipeline = pipeline.with_(process=process_of(opened), guidance=opened_guidance(opened))
            batches = batches_of(grid)
            steps = pipeline.process.steps * len(batches)
            with step_bar(steps, pipeline.device, disable=not progress) as on_step:
                return pipeline.latents(grid.labels, seed, batches, on_step, noise)

    def close(self) -> None:
        """Free the memory of network and decoder. The sampler cannot be used afterwards."""
        with alone():
            self._pipeline = None
            free_memory(self.opened.device)

    def __reduce__(self):
        raise UsageError("a Sampler cannot be pickled or copied; make another of the same weights")

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _running(self) -> Iterator[Pipeline]:
        """Yield the pipeline to one thread at a time, with its tier's switches."""
        with alone():
            if self._pipeline is None:
                raise UsageError("this Sampler is closed; make another")
            apply_precision(self._pipeline.tier, self._pipeline.device)
            yield self._pipeline


def _refuse(unknown, owner, options):
    """Raise UsageError for a name that `owner` does not have, naming the nearest one."""
    for name in sorted(unknown):
        near = ALSO_CALLED.get(name) or next(
            iter(difflib.get_close_matches(name, options, 1)), name
        )
        remedy = "docs/python.md lists them"
        if near in options:
            remedy = f"did you mean {near}?"
        elif near in Sampler.__init__.__kwdefaults__:
            remedy = f"give {near} to Sampler(…)"
        raise UsageError(f"`{name}`: is not {owner}; {remedy}")


def _beside_shapes(weights, fit):
    """Return what shapes of tensors do not say, by name."""
    facts = "num_heads", "num_classes", "null_class", "patch_size", "in_channels"
    embedding = weights.rules.timestep_embedding if isinstance(weights, LoadedModule) else None
    return {
        "family": fit.family.name,
        "timestep_embedding": embedding and embedding.__module__,
        **{name: getattr(fit, name) for name in facts},
    }


def _listed(name, values):
    """Return several values as a tuple; None for a single one, such as a text or an array
    without dimensions. Raises UsageError about `name` for nested tensors.
    """
    if getattr(values, "is_nested", False):
        raise UsageError(f"`{name}`: is a nested tensor; give a list")
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return None
    return tuple(values) if getattr(values, "ndim", 1) else None


def _seeds(seeds, count):
    """Return a seed for each of `count` labels, checked. Raises UsageError."""
    if len(seeds) != count:
        raise UsageError(
            f"`seed`: {len(seeds)} given, and `labels`: {count}; give one seed for each label, or "
            "one number"
        )
    return [checked(seed, Config.__dataclass_fields__["seed"]) for seed in seeds]


def _floats(name, values, shape, device):
    """Return an array as float32 on `device`. shape: of its dimensions, a text for one of any
    size. Raises UsageError about the parameter `name`.
    """
    owner = f"`{name}`"
    if not torch.is_tensor(values):
        values = np.asarray(values)
        if values.dtype.kind == "f":
            values = torch.from_numpy(values.astype(np.float32))
    if not torch.is_tensor(values) or not values.is_floating_point():
        raise UsageError(f"{owner}: has dtype {values.dtype}; give a dense array of floats")
    if values.is_meta or values.is_nested or values.layout is not torch.strided:
        raise UsageError(
            f"{owner}: is sparse, nested or holds no values; give a dense array of floats"
        )
    fits = len(shape) == values.ndim and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, values.shape)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise UsageError(f"{owner}: is of shape {tuple(values.shape)}, must be ({wanted})")
    values = values.detach().to(device, torch.float32)
    if not values.isfinite().all():
        raise UsageError(f"{owner}: has values that are not finite")
    return values


def _names_weights(name):
    return (
        os.path.exists(Path(name))
        or Path(name).suffix in FILE_SUFFIXES
        or bool(HUB_ID.fullmatch(str(name)))
    )


def _is_object(value):
    """Return whether a network is given itself, not by a name."""
    return not isinstance(value, (str, Path, type(None)))


def _load_module(model):
    """Copy the weights of a network that the caller holds. Print what is assumed of it."""
    with alone():
        loaded = LoadedModule(model, copy=True)
        if loaded.assumed:
            log.warning(f"{loaded.name}: {loaded.assumed}")
    return loaded


def _guided_channels(loaded):
    """Return the number of channels that the module guides, None without
    forward_with_cfg. Raises UsageError for guidance of another kind.
    """
    channels = own_guidance(loaded)
    if channels == 0:
        raise UsageError(
            f"{loaded.name}: its forward_with_cfg guides in a way of its own; call "
            "accelerate(model).forward in your loop, or give `guidance_channels`"
        )
    return channels


def _written(vae: torch.nn.Module) -> TemporaryDirectory:
    """Write a decoder that the caller holds into a temporary folder in diffusers' layout.
    Raises UsageError for a module of another class.
    """
    vae = unwrapped(vae)
    name = type(vae).__name__
    if name != "AutoencoderKL" or not type(vae).__module__.startswith("diffusers."):
        raise UsageError(f"`vae={name}`: give ema, mse, a folder or an AutoencoderKL of diffusers")
    if any(value.is_meta for value in vae.parameters()):
        raise UsageError(f"`vae={name}`: holds no values; load the weights first")
    with path_errors("vae", name, "set TMPDIR to a folder with space, or give a folder"):
        folder = TemporaryDirectory()
        vae.save_pretrained(folder.name)
        file = Path(folder.name, FILES[0])
        # Pipelines read attributes, which a caller may have set. The file has the entries that
        # the module was made with.
        scales = {name: getattr(vae.config, name, None) for name in OF_LATENTS}
        file.write_text(json.dumps(json.loads(file.read_text()) | scales, default=str))
    return folder
