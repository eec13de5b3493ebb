"""`from accel import Sampler`: pictures from Python, from a network that is loaded once."""

import difflib
import inspect
import json
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

from accel import door
from accel.compare import OTHER, build, own_guidance, require_same
from accel.door import opening
from accel.errors import UsageError, path_errors, shown
from accel.families import model_names
from accel.families.loaded_module import LoadedModule, from_module
from accel.families.recognise import reference_state
from accel.latents.autoencoder_kl import OF_LATENTS
from accel.latents.files import FILES
from accel.latents.pixels import to_grid
from accel.loading import choose_device, free_memory, load_network
from accel.network import overflows, unwrapped
from accel.precision import TIERS, alone, apply_precision
from accel.progress import step_bar
from accel.request import GridRequest
from accel.run import Run
from accel.weights.checkpoint import FILE_SUFFIXES, HUB_ID
from accel.weights.shapes import require_fit
from accel.weights.tensor_files import require_floats

# Options for weights on disk, not for a module.
FOR_FILES = "model", "ckpt", "weights_entry", "num_heads"
# Names of other libraries for options and arguments here.
ALSO_CALLED = {
    "guidance_scale": "cfg_scale",
    "cfg": "cfg_scale",
    "num_inference_steps": "num_sampling_steps",
    "steps": "num_sampling_steps",
    "scheduler": "sampler",
    "dtype": "precision",
    "torch_dtype": "precision",
    "checkpoint": "ckpt",
}
NOT_FOR_PYTHON = "output", "repeats", "seed_list", "tf32", "parallel"
# Facts that decide the network's function or its labels, and that shapes do not give in
# every family.
BESIDE_SHAPES = "num_heads", "num_classes", "null_class", "patch_size", "in_channels"
Labels = int | str | Iterable[int | str]
Array = torch.Tensor | np.ndarray


class Sampler:
    """Sample pictures of any labels, seeds, steps and guidance from a DiT and its
    decoder, loaded once.

        with Sampler("DiT-XL/2", image_size=512, precision="fp16") as sampler:
            dog, other = sampler.sample(["golden retriever", 207], seed=0)

    model, also the first argument: a name as --model takes it; weights as --ckpt takes
    them, such as a file or the folder or hub id of a DiTPipeline; or a network that you
    hold: models.DiT, another family's, the original classes, wrapped or compiled, or
    diffusers' DiTTransformer2DModel or DiTPipeline. Its weights are copied. vae: ema,
    mse, a folder or an AutoencoderKL; a pipeline brings its own. check: of a model that
    you hold, evaluate it on a batch row of noise and compare, as `accelerate` does.
    options: other fields of GridRequest by their names, such as ckpt, num_classes,
    vae_precision, batch_size; arguments of `sample` become its defaults; `sampler` may be
    a scheduler of diffusers that draws no noise. With output_type="latent" no decoder is
    needed.

    Pictures equal those of sample.py with the same flags, to the bit. On a GPU a step is
    captured at its first use with a number of pictures, steps and guidance, then
    replayed. Callers in several threads, of this and of other Samplers, are served one at
    a time. torch's global generators and backend switches are left as they were, and the
    caller's autocast, inference mode and default dtype change nothing. Raises ValueError
    (accel.errors.UsageError): one line that names the parameter and the remedy.
    """

    def __init__(
        self,
        source: str | torch.nn.Module | None = None,
        /,
        *,
        model: str | torch.nn.Module | None = None,
        image_size: int | None = None,
        precision: str | None = None,
        device: str | torch.device | None = None,
        vae: str | Path | torch.nn.Module | None = None,
        check: bool = True,
        **options,
    ):
        if None not in (source, model):
            raise UsageError(
                f"`model={model}`: the first argument is the model already; give weights as ckpt="
            )
        model = source if model is None else model
        # None leaves an option open
        options = {name: value for name, value in options.items() if value is not None}
        loaded = None
        if not isinstance(model, (str, Path, type(None))):
            loaded = _load_module(model, options, check)
            if not isinstance(model, torch.nn.Module) and options.get("output_type") != "latent":
                vae = model.vae if vae is None else vae  # a pipeline's
            model = None
            options["ckpt"] = loaded.name
        elif model not in (None, *model_names()) and _names_weights(model):
            if "ckpt" in options:
                raise UsageError(
                    f"`ckpt={options['ckpt']}`: conflicts with {model}, which are weights too; "
                    "give one"
                )
            model, options["ckpt"] = None, str(model)
        _require_known(options)
        named = isinstance(options.get("sampler", ""), str)
        self._scheduler = None if named else options.pop("sampler")
        options |= dict(model=model, image_size=image_size, precision=precision)
        options["device"] = None if device is None else str(device)
        if not isinstance(vae, torch.nn.Module):
            options["vae"] = None if vae is None else str(vae)
            self._open(options, loaded, check)
            return
        with _written(vae) as options["vae"]:
            self._open(options, loaded, check)
            if self._decoder:
                with alone():
                    self._decoder.load()  # while the folder is there

    def _open(self, options, loaded, check):
        request = GridRequest(**options)
        with alone():
            device = choose_device(request.device)
            self.settings = opening.open_weights(request, device, loaded)
            process = door.process_of(self.settings, self._scheduler)  # may refuse the scheduler
            self._run = door.load(self.settings)._replace(process=process)
            self._decoder = door.decoder_of(self.settings)
            self._embedding = loaded.how.timestep_embedding if loaded else None
            self._check = check
            self._checked = type(loaded.module) if loaded else None
            if loaded:  # the network has a copy of its weights by now
                if check:
                    _require_same(self._run.network, loaded, self._run)
                loaded.release()
            self._sampled = self.settings.num_sampling_steps, self.settings.cfg_scale

    def refresh(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Load the weights of `model`, of the same shape, in place: pictures equal a new
        Sampler's to the bit, and captured steps stay valid. model: a network, or the state
        dict of one like that of this Sampler, such as an average of its weights. Raises
        ValueError, and keeps the old weights, if they do not fit or overflow.
        """
        with self._running() as run:
            if isinstance(model, Mapping):
                weights = _read_state(model, self.settings)
                run.network.copy_weights(
                    _network_of(weights, self.settings.fit, run, self.settings)
                )
                return
            new = from_module(model, copy=True)
            if (new.fit.family, new.how.timestep_embedding) != (
                self.settings.fit.family,
                self._embedding,
            ):
                raise UsageError(
                    f"{new.name}: is of another class than the model of this Sampler; make "
                    "another of it"
                )
            changed = new.patched or type(new.module) is not self._checked
            _renew(run, new, self.settings, self._check and changed)
            self._checked = type(new.module)

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
        """Return one picture a label, (image_size, image_size) RGB. Arguments as for `latents`."""
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
        with self._running() as run:
            shape = ("n", self.settings.space.channels, "side", "side")
            latents = _floats("latents", latents, shape, run.device)
            if not len(latents):
                return []
            pixels = self._decoder.decode(latents)  # (n, 3, H, W)
        return [Image.fromarray(to_grid(one).numpy()) for one in pixels.split(1)]

    def _require_decoder(self):
        if self.settings.output_type == "latent":
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
    ) -> torch.Tensor:
        """Return latents (n, channels, side, side) float32, side image_size/8 for
        sd-vae-ft-*, on the sampler's device.

        labels: n classes, each a number or a name. seed: of all, or n seeds: each label is
        then sampled as it is alone with its seed. noise: n latents of normal noise to start
        from, in place of those that the seed gives; the noise of later steps is the seed's.
        Arguments that are None are the constructor's. progress: show a bar of the steps.
        """
        several = _listed("labels", labels)
        labels = (labels,) if several is None else several
        given = dict(num_sampling_steps=num_sampling_steps, cfg_scale=cfg_scale)
        given = {name: value for name, value in given.items() if value is not None}
        seeds = _listed("seed", seed)
        if seed is not None and seeds is None:
            given["seed"] = seed
        with self._running() as run:
            settings = opening.reopen(self.settings, labels=labels, **given)
            if seeds is not None:
                seeds = _seeds(seeds, settings)
            if noise is not None:
                shape = (len(labels), settings.space.channels, run.side, run.side)
                noise = _floats("noise", noise, shape, run.device)
            wanted = settings.num_sampling_steps, settings.cfg_scale
            if wanted != self._sampled:
                process = door.process_of(settings, self._scheduler)
                guidance = door.guidance_of(settings)
                self._run = run = run._replace(process=process, guidance=guidance)
                self._sampled = wanted
            batches = door.ALONE.batches(len(labels), settings.batch_size)
            steps = run.process.steps * len(batches)
            with step_bar(steps, run.device, disable=not progress) as on_step:
                return run.latents(settings.labels, seeds or settings.seed, batches, on_step, noise)

    def close(self) -> None:
        """Free the memory of network and decoder. The sampler cannot be used afterwards."""
        with alone():
            self._run = self._decoder = None
            free_memory(self.settings.device)

    def __reduce__(self):
        raise UsageError("a Sampler cannot be pickled or copied; make another of the same weights")

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _running(self) -> Iterator[Run]:
        """Yield the run to one thread at a time, with its tier's switches."""
        with alone():
            if self._run is None:
                raise UsageError("this Sampler is closed; make another")
            apply_precision(self._run.tier, self._run.device)
            yield self._run


def _renew(run, loaded, settings, check):
    """Copy a module's weights into the run's network, all or none. check: compare its
    function and guidance. Raises UsageError for weights that do not fit.
    """
    fit = opening.fit_of(loaded)
    require_fit(loaded.name, reference_state(loaded, fit), settings.fit.empty(settings.latent_size))
    has = {name: getattr(fit, name) for name in BESIDE_SHAPES}
    wanted = {name: getattr(settings.fit, name) for name in BESIDE_SHAPES}
    if check and settings.request.guidance_channels is None and (own := _guided_channels(loaded)):
        has["guidance_channels"], wanted["guidance_channels"] = own, settings.guidance_channels
    for name, value in has.items():
        if value != wanted[name]:
            raise UsageError(
                f"{loaded.name}: has {name} {value}, unlike the model of this Sampler; make "
                "another of it"
            )
    new = _network_of(loaded, fit, run, settings)
    if check:
        _require_same(new, loaded, run)
    run.network.copy_weights(new)


def _require_same(network, loaded, run):
    """Raise UsageError unless a network for the run computes the module's function. For
    latents of another size than the module's, one of the module's own size is compared.
    """
    if loaded.fit.latent_size != run.side:
        state = reference_state(loaded, loaded.fit)
        network = build(state, loaded.model, run.tier, run.device)
    require_same(network, loaded, run.tier)


def _network_of(weights, fit, run, settings):
    """Return a network like the run's, of other weights. Raises UsageError if they overflow."""
    batch = door.batch_of(settings, run.process, run.guidance)
    new = load_network(weights, fit, run.tier, run.device, batch)
    if TIERS[run.tier].accelerated and overflows(new, batch, run.device, fit.family.some_times):
        raise UsageError(
            f"`precision={run.tier}`: overflows on these weights; make another Sampler of them"
        )
    return new


@dataclass(frozen=True)
class _State:
    """A state dict in place of a Checkpoint."""

    name: str
    state: dict[str, torch.Tensor]
    metadata: dict[str, Any]


def _read_state(state, settings):
    """Return a state dict with the names of the Sampler's model, or of its file. Raises
    UsageError if it does not fit.
    """
    name = "refresh"
    require_floats(state, name)
    first = settings.weights
    state = first.renamed(state) if isinstance(first, LoadedModule) else dict(state)
    weights = _State(name, state, first.metadata)
    try:
        state = reference_state(weights, settings.fit)
    except KeyError as missing:
        raise UsageError(f"{name}: is not such a state dict: no {missing.args[0]}") from None
    require_fit(name, state, settings.fit.empty(settings.latent_size))
    return weights


def _require_known(options):
    if wrong := [name for name in NOT_FOR_PYTHON if name in options]:
        raise UsageError(f"`{wrong[0]}`: is for commands; drop it")
    names = {item.name for item in fields(GridRequest)} - set(NOT_FOR_PYTHON)
    names |= inspect.signature(Sampler).parameters.keys() - {"source", "options"}
    for wrong in sorted(options.keys() - names):
        near = ALSO_CALLED.get(wrong) or next(
            iter(difflib.get_close_matches(wrong, names, 1)), None
        )
        meant = f"did you mean {near}?" if near else "docs/python.md lists them"
        raise UsageError(f"`{wrong}`: is not an option of Sampler; {meant}")


def _listed(name, values):
    """Return several values as a tuple; None for a single one, such as a text or an array
    without dimensions. Raises UsageError about `name` for nested tensors.
    """
    if getattr(values, "is_nested", False):
        raise UsageError(f"`{name}`: is a nested tensor; give a list")
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return None
    return tuple(values) if getattr(values, "ndim", 1) else None


def _seeds(seeds, settings):
    """Return a seed for each label, checked. Raises UsageError."""
    labels = len(settings.labels)
    if len(seeds) != labels:
        raise UsageError(
            f"`seed`: are {len(seeds)} seeds for {labels} labels; give one for each, or one number"
        )
    if None in seeds:
        raise UsageError("`seed=None`: must be a whole number in a list of seeds")
    return [replace(settings.request, seed=seed).seed for seed in seeds]


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
            raise UsageError(f"{owner}: holds {values.dtype}; give an array of floats")
        values = torch.from_numpy(np.array(values, np.float32, order="C"))
    if values.is_nested or not values.is_floating_point():
        raise UsageError(f"{owner}: holds {values.dtype}; give a dense array of floats")
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
    with alone():
        loaded = from_module(model, copy=True)
        if loaded.assumed:
            print(f"{loaded.name}: {loaded.assumed}")
        if check and "guidance_channels" not in options:
            loaded.fit = loaded.fit._replace(recipe={"guidance_channels": _guided_channels(loaded)})
    return loaded


def _guided_channels(loaded):
    """Return the number of channels that the module guides, None without
    forward_with_cfg. Raises UsageError for guidance of another kind.
    """
    channels = own_guidance(loaded)
    if channels == OTHER:
        raise UsageError(
            f"{loaded.name}: its forward_with_cfg guides in a way of its own; call "
            "accelerate(model).forward in your loop, or give `guidance_channels`"
        )
    return channels


@contextmanager
def _written(vae: torch.nn.Module) -> Iterator[str]:
    """Write a decoder that the caller holds as a folder in diffusers' layout. Yield the
    folder, which is removed after the block.
    """
    vae = unwrapped(vae)
    kind = type(vae)
    if kind.__name__ != "AutoencoderKL" or not kind.__module__.startswith("diffusers."):
        raise UsageError(
            f"`vae={kind.__name__}`: give ema, mse, a folder or an AutoencoderKL of diffusers"
        )
    if any(value.is_meta for value in vae.parameters()):
        raise UsageError(f"`vae={kind.__name__}`: holds no values; load the weights first")
    with ExitStack() as stack:
        with path_errors(
            "vae", kind.__name__, "set TMPDIR to a folder with space, or give a folder"
        ):
            folder = stack.enter_context(TemporaryDirectory())
            vae.save_pretrained(folder)
            file = Path(folder, FILES[0])
            # Pipelines read attributes, which a caller may have set. The file has the entries that
            # the module was made with.
            scales = {name: getattr(vae.config, name, None) for name in OF_LATENTS}
            file.write_text(json.dumps(json.loads(file.read_text()) | scales, default=str))
        yield folder
