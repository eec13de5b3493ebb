"""`from accel import Sampler`: pictures from Python, from a pipeline that is loaded once."""

import difflib
import inspect
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from accel.compare import build, own_guidance, require_same
from accel.config import Config, Grid, require_seed
from accel.errors import UsageError, path_errors, shown
from accel.families import model_names
from accel.families.loaded_module import LoadedModule, from_module, unwrapped
from accel.families.recognise import reference_state
from accel.grid import ready
from accel.isolation import alone
from accel.latents.autoencoder_kl import OF_LATENTS
from accel.latents.files import FILES
from accel.network import require_no_gradients
from accel.opening import require_schedule
from accel.output import to_grid
from accel.pipeline import ALONE, Pipeline, free_memory, guidance_of, process_of
from accel.precision import apply_precision
from accel.progress import step_bar
from accel.weights.checkpoint import FILE_SUFFIXES, HUB_ID
from accel.weights.safetensors_layout import without_prefix
from accel.weights.shapes import require_fit
from accel.weights.tensor_files import require_finite_floats, require_floats

log = logging.getLogger(__name__)

# Options for weights on disk, not for a module.
FOR_FILES = "model", "ckpt", "weights_entry", "num_heads"
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
# Facts that decide the network's function or its labels, and that shapes do not give in
# every family.
BESIDE_SHAPES = "num_heads", "num_classes", "null_class", "patch_size", "in_channels"
OF_SAMPLING = "sampling has none for noise; call the model itself in your own loop for gradients"
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
        source: str | torch.nn.Module | None = None,
        /,
        *,
        model: str | torch.nn.Module | None = None,
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
        for name in ("self", "source", "model", "vae", "check", "unknown", "device"):
            given.pop(name, None)
        _refuse(unknown)
        if None not in (source, model):
            raise UsageError(
                f"`model={model}`: the first argument is the model already; give weights as ckpt="
            )
        model = source if model is None else model
        loaded = None
        if not isinstance(model, (str, Path, type(None))):
            loaded = _load_module(model, given, check)
            if not isinstance(model, torch.nn.Module) and output_type != "latent":
                vae = model.vae if vae is None else vae  # a pipeline's
            given["ckpt"] = loaded.name
        elif model not in (None, *model_names()) and _names_weights(model):
            if ckpt is not None:
                raise UsageError(
                    f"`ckpt={ckpt}`: conflicts with {model}, which are weights too; give one"
                )
            given["ckpt"] = str(model)
        elif model is not None:
            given["model"] = model
        loaded_guide = None
        if not isinstance(guide, (str, Path, type(None))):
            try:
                loaded_guide = _copied(guide)
            except UsageError as error:
                raise UsageError(f"`guide`: {error.marked}") from None
            given["guide"] = loaded_guide.name
        if device is not None:
            given["device"] = str(device)
        is_module = isinstance(vae, torch.nn.Module)
        if is_module:
            vae = _autoencoder(vae)
        elif vae is not None:
            given["vae"] = str(vae)
        if not is_module or output_type == "latent":  # latents need no decoder
            self._open(given, loaded, loaded_guide, check)
            return
        with _written(vae) as given["vae"]:
            self._open(given, loaded, loaded_guide, check)
            if self._pipeline.decoder is not None:
                with alone():
                    self._pipeline.decoder.load()  # while the folder is there

    def _open(self, options, loaded, guide, check):
        grid = Grid.of(**options)
        grid.check()
        with alone():
            self.grid, self.opened, self._pipeline = ready(grid, loaded, guide)
            self._embedding = loaded.rules.timestep_embedding if loaded else None
            self._check = check
            scale = self.opened.config.cfg_scale
            if self.opened.guide and scale <= 1 and "cfg_scale" not in options:
                log.warning(
                    f"{self.opened.guide.weights.name}: guides only where cfg_scale is above 1, "
                    f"and it is {scale:g}"
                )
            self._checked = type(loaded.module) if loaded else None
            self._guidance_is_given = grid.config.guidance_channels is not None
            network = self._pipeline.network
            networks = (network.network, network.guide) if self.opened.guide else (network,)
            for part, module in zip(networks, (loaded, guide)):
                if module is None:
                    continue
                if check:
                    _require_same(part, module, self._pipeline)
                module.release()  # the network has a copy of its weights by now
            self._sampled = self.opened

    @property
    def config(self) -> Config:
        """Return the options, the open ones filled."""
        return self.opened.config

    def refresh(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Load the weights of `model`, of the same shape, in place: pictures equal a new
        Sampler's to the bit, and captured steps stay valid. A guide stays as it is. model: a
        network, or the state dict of one like that of this Sampler or of a wrapper around it,
        such as an average of its weights. Raises ValueError, and keeps the old weights, if they
        do not fit, overflow or are not finite. A network is compared with its copy, at one time
        where its class is as before.
        """
        with self._running() as pipeline:
            classes = self.opened.config.num_classes
            if isinstance(model, Mapping):
                weights = self._read_state(model)
                pipeline.refresh(pipeline.like(weights, self.opened.fit, classes))
                return
            if isinstance(model, (str, Path, list, tuple)):
                kind = type(model).__name__
                raise UsageError(f"refresh: takes a network or a state dict, and this is a {kind}")
            loaded = from_module(model, copy=True)
            require_finite_floats(loaded.state, loaded.name)
            changed = loaded.patched or type(loaded.module) is not self._checked
            self._require_alike(loaded, self._check and changed)
            network = pipeline.like(loaded, loaded.fit, classes)
            if self._check:
                # Of a known class this sees replaced parts. All times would take as long as ten
                # steps do.
                times = loaded.fit.family.some_times
                _require_same(network, loaded, pipeline, times if changed else times[:1])
            pipeline.refresh(network)
            self._checked = type(loaded.module)

    def _require_alike(self, loaded, check):
        """Raise UsageError for a module of another class, shape or guidance. check: evaluate
        its guidance.
        """
        fit = loaded.fit
        require_schedule(loaded.name, fit)
        mine = self.opened.fit
        embedding = loaded.rules.timestep_embedding
        if (fit.family, embedding) != (mine.family, self._embedding):
            raise UsageError(
                f"{loaded.name}: is of another class than the model of this Sampler; make another "
                "of it"
            )
        empty = mine.empty(self.opened.latent_size)
        require_fit(loaded.name, reference_state(loaded, fit), empty)
        wanted = {name: getattr(mine, name) for name in BESIDE_SHAPES}
        has = {name: getattr(fit, name) for name in BESIDE_SHAPES}
        if check and not self._guidance_is_given:
            channels = _guided_channels(loaded)
            if channels is not None:
                has["guidance_channels"] = channels
                wanted["guidance_channels"] = self.opened.config.guidance_channels
        for name, value in has.items():
            if value != wanted[name]:
                raise UsageError(
                    f"{loaded.name}: has {name} {value}, unlike the model of this Sampler; make "
                    "another of it"
                )

    def _read_state(self, state):
        """Return a state dict with the names of the Sampler's model, or of its file. Raises
        UsageError if it does not fit.
        """
        name = "refresh"
        require_floats(state, name)
        require_finite_floats(state, name)
        first = self.opened.weights
        state = first.renamed(state) if isinstance(first, LoadedModule) else without_prefix(state)
        weights = _State(name, state, first.metadata)
        try:
            state = reference_state(weights, self.opened.fit)
        except KeyError as missing:
            raise UsageError(f"{name}: is not such a state dict: no {missing.args[0]}") from None
        require_fit(name, state, self.opened.fit.empty(self.opened.latent_size))
        return weights

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
        _refuse_arguments(unknown)
        self._require_decoder()
        return self.decode(
            self.latents(
                labels, seed, num_sampling_steps, cfg_scale, noise=noise, progress=progress
            )
        )

    def decode(self, latents: Array | str | Path) -> list[Image.Image]:
        """Return a picture for each of latents (n, channels, side, side), such as `latents`
        returns or `sample.py --output-type latent` writes. latents: an array, or a .npy file.
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
        _refuse_arguments(unknown)
        several = _listed("labels", labels)
        seeds = _listed("seed", seed)
        options = dict(num_sampling_steps=num_sampling_steps, cfg_scale=cfg_scale)
        if seeds is None:
            options["seed"] = seed
        changes = {name: value for name, value in options.items() if value is not None}
        require_no_gradients(OF_SAMPLING, noise)
        with self._running() as pipeline:
            opened = self.opened.changed(**changes)
            grid = replace(self.grid, labels=(labels,) if several is None else several)
            grid = grid.filled(opened.config, opened.fit, opened.has_null_label)
            if seeds is not None:
                seeds = _seeds(seeds, grid)
            if noise is not None:
                side = pipeline.side
                shape = (len(grid.labels), opened.space.channels, side, side)
                noise = _floats("noise", noise, shape, pipeline.device)
            pipeline = self._pipeline_for(opened)
            batches = ALONE.batches(len(grid.labels), grid.batch_size)
            steps = pipeline.process.steps * len(batches)
            with step_bar(steps, pipeline.device, disable=not progress) as on_step:
                seed = opened.config.seed if seeds is None else seeds
                return pipeline.latents(grid.labels, seed, batches, on_step, noise)

    def _pipeline_for(self, opened):
        """Return the pipeline with the steps and the guidance of `opened`."""
        before = self._sampled.config
        config = opened.config
        if (config.num_sampling_steps, config.cfg_scale) != (
            before.num_sampling_steps,
            before.cfg_scale,
        ):
            self._pipeline = self._pipeline.with_(
                process=process_of(opened), guidance=guidance_of(opened)
            )
            self._sampled = opened
        return self._pipeline

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


@dataclass(frozen=True)
class _State:
    """A state dict in place of a file's weights."""

    name: str
    state: dict[str, torch.Tensor]
    metadata: dict[str, Any]


def _refuse(unknown):
    """Raise UsageError for an option that Sampler does not have, naming the nearest."""
    for name in sorted(unknown):
        names = {item.name for item in (*fields(Config), *fields(Grid))}
        options = Sampler.__init__.__kwdefaults__
        if name in names:
            raise UsageError(f"`{name}`: is for commands; drop it")
        raise UsageError(f"`{name}`: is not an option of Sampler; {_meant(name, options)}")


def _refuse_arguments(unknown):
    """Raise UsageError for an argument that `sample` and `latents` do not have, naming the
    nearest, or the constructor if it is an option.
    """
    arguments = list(inspect.signature(Sampler.latents).parameters)[1:-1]
    for name in sorted(unknown):
        meant = _meant(name, arguments)
        if ALSO_CALLED.get(name, name) in Sampler.__init__.__kwdefaults__.keys() - {*arguments}:
            meant = f"give {ALSO_CALLED.get(name, name)} to Sampler(…)"
        raise UsageError(f"`{name}`: is not an argument of sample and latents; {meant}")


def _meant(name, options):
    """Return which of some options a name may stand for, in words."""
    close = difflib.get_close_matches(name, options, 1)
    near = ALSO_CALLED.get(name) or next(iter(close), None)
    return f"did you mean {near}?" if near else "docs/python.md lists them"


def _require_same(network, loaded, pipeline, times=None):
    """Raise UsageError unless a network for the pipeline computes the module's function; times:
    as for require_same. For latents of another size than the module's, one of the module's own
    size is compared.
    """
    if loaded.fit.latent_size != pipeline.side:
        state = reference_state(loaded, loaded.fit)
        network = build(state, loaded, pipeline.tier, pipeline.device)
    require_same(network, loaded, pipeline.tier, times)


def _listed(name, values):
    """Return several values as a tuple; None for a single one, such as a text or an array
    without dimensions. Raises UsageError about `name` for nested tensors.
    """
    if getattr(values, "is_nested", False):
        raise UsageError(f"`{name}`: is a nested tensor; give a list")
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return None
    return tuple(values) if getattr(values, "ndim", 1) else None


def _seeds(seeds, grid):
    """Return a seed for each label, checked. Raises UsageError."""
    labels = len(grid.labels)
    if len(seeds) != labels:
        raise UsageError(
            f"`seed`: {len(seeds)} given, and `labels`: {labels}; give one seed for each label, or "
            "one number"
        )
    if None in seeds:
        raise UsageError("`seed=None`: must be a whole number in a list of seeds")
    configs = [replace(grid.config, seed=seed) for seed in seeds]
    for config in configs:
        require_seed(config.seed)
    return [config.seed for config in configs]


def _floats(name, values, shape, device):
    """Return an array, or that of a .npy file, as float32 on `device`. shape: of its
    dimensions, a text for one of any size. Raises UsageError about the parameter `name`.
    """
    owner = f"`{name}`"
    if isinstance(values, (str, Path)):
        owner = f"`{name}={shown(str(values))}`"
        with path_errors(name, shown(str(values)), "give a .npy file or an array"):
            try:
                values = np.load(values, allow_pickle=False)
            except (ValueError, EOFError):
                raise UsageError(f"{owner}: is not a .npy file of numbers") from None
    if not torch.is_tensor(values):
        values = np.asarray(values)
        if values.dtype.kind != "f":
            raise UsageError(f"{owner}: has dtype {values.dtype}; give an array of floats")
        values = torch.from_numpy(np.array(values, np.float32, order="C"))
    if values.is_meta or not values.is_nested and values.layout is not torch.strided:
        raise UsageError(f"{owner}: is sparse or holds no values; give a dense array of floats")
    if values.is_nested or not values.is_floating_point():
        raise UsageError(f"{owner}: has dtype {values.dtype}; give a dense array of floats")
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


def _load_module(model, options, check):
    """Copy a network that the caller holds. Raises UsageError for options that are for
    weights on disk.
    """
    wrong = [name for name in FOR_FILES if name in options]
    if wrong:
        raise UsageError(f"`{wrong[0]}`: is for weights on disk, and the model was given; drop it")
    loaded = _copied(model)
    with alone():
        if check and "guidance_channels" not in options:
            channels = {"guidance_channels": _guided_channels(loaded)}
            loaded.fit = loaded.fit._replace(recipe={**loaded.fit.recipe, **channels})
    return loaded


def _copied(model):
    """Copy the weights of a network that the caller holds. Print what is assumed of it."""
    with alone():
        loaded = from_module(model, copy=True)
        if loaded.assumed:
            log.warning(f"{loaded.name}: {loaded.assumed}")
    return loaded


def _guided_channels(loaded):
    """Return the number of channels that the module guides, None without
    forward_with_cfg. Raises UsageError for guidance of another kind.
    """
    guidance = own_guidance(loaded)
    if guidance.is_other:
        raise UsageError(
            f"{loaded.name}: its forward_with_cfg guides in a way of its own; call "
            "accelerate(model).forward in your loop, or give `guidance_channels`"
        )
    return guidance.channels


def _autoencoder(vae):
    """Return a decoder that the caller holds, without wrappers. Raises UsageError for a module of
    another class.
    """
    vae = unwrapped(vae)
    vae_class = type(vae)
    if vae_class.__name__ != "AutoencoderKL" or not vae_class.__module__.startswith("diffusers."):
        raise UsageError(
            f"`vae={vae_class.__name__}`: give ema, mse, a folder or an AutoencoderKL of diffusers"
        )
    if any(value.is_meta for value in vae.parameters()):
        raise UsageError(f"`vae={vae_class.__name__}`: holds no values; load the weights first")
    return vae


@contextmanager
def _written(vae: torch.nn.Module) -> Iterator[str]:
    """Write a decoder that the caller holds as a folder in diffusers' layout. Yield the
    folder, which is removed after the block.
    """
    with ExitStack() as stack:
        with path_errors(
            "vae", type(vae).__name__, "set TMPDIR to a folder with space, or give a folder"
        ):
            folder = stack.enter_context(TemporaryDirectory())
            vae.save_pretrained(folder)
            file = Path(folder, FILES[0])
            # Pipelines read attributes, which a caller may have set. The file has the entries that
            # the module was made with.
            scales = {name: getattr(vae.config, name, None) for name in OF_LATENTS}
            file.write_text(json.dumps(json.loads(file.read_text()) | scales, default=str))
        yield folder
