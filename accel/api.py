"""`from accel import Sampler`: pictures from Python, from a network that is loaded once."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from accel import door
from accel.compare import OTHER, own_guidance, require_same
from accel.door import opening
from accel.errors import UsageError
from accel.families import model_names
from accel.families.loaded_module import from_module
from accel.families.recognise import reference_state
from accel.latents.autoencoder_kl import OF_LATENTS
from accel.latents.files import FILES
from accel.latents.pixels import to_grid
from accel.loading import free_memory, load_network
from accel.network import overflows, unwrapped
from accel.precision import TIERS, alone, apply_precision
from accel.progress import Stopwatch
from accel.request import GridRequest
from accel.run import Run
from accel.weights.checkpoint import FILE_SUFFIXES, HUB_ID
from accel.weights.shapes import require_fit

# Options for weights on disk, not for a module.
FOR_FILES = "model", "ckpt", "weights_entry", "num_heads", "forecast", "forecast_plan"
NOT_FOR_PYTHON = "output", "repeats", "seed_list", "tf32", "parallel"
# Facts that decide the network's function or its labels, and that shapes do not give in
# every family.
BESIDE_SHAPES = "num_heads", "num_classes", "null_class", "patch_size", "in_channels"
Labels = int | str | Iterable[int | str]


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
        with TemporaryDirectory() as folder:
            if isinstance(vae, torch.nn.Module):
                vae = _written(vae, folder)
            device, vae = (None if given is None else str(given) for given in (device, vae))
            options |= dict(
                model=model, image_size=image_size, precision=precision, device=device, vae=vae
            )
            request = GridRequest(**options)
            with alone():
                self.settings, self._run, self._decoder = door.ready(request, weights=loaded)
                self._embedding = loaded.how.timestep_embedding if loaded else None
                self._check = check
                self._checked = type(loaded.module) if loaded else None
                if self._decoder and vae == folder:
                    self._decoder.load()  # while the folder is there
                if loaded:  # the network has a copy of its weights by now
                    if check and loaded.fit.latent_size == self._run.side:
                        require_same(self._run.network, loaded, self._run.tier)
                    loaded.release()
                if self._scheduler is not None:
                    self._run = self._run._replace(
                        process=door.process_of(self.settings, self._scheduler)
                    )

    def refresh(self, model: torch.nn.Module) -> None:
        """Load the weights of `model`, of the same shape, in place: pictures equal a new
        Sampler's to the bit, and captured steps stay valid. Raises ValueError, and keeps
        the old weights, if they do not fit or overflow.
        """
        with self._running() as run:
            new = from_module(model, copy=True)
            if (new.fit.family, new.how.timestep_embedding) != (
                self.settings.fit.family,
                self._embedding,
            ):
                raise UsageError(
                    f"{new.name}: is of another class than the model of this Sampler; make "
                    "another of it"
                )
            if self.settings.forecast == "plan":
                raise UsageError(
                    "`forecast=plan`: was made for other weights; make another Sampler without it"
                )
            _renew(run, new, self.settings, self._check and type(new.module) is not self._checked)
            self._checked = type(new.module)

    def sample(
        self,
        labels: Labels,
        seed: int | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        progress: bool = False,
    ) -> list[Image.Image]:
        """Return one picture a label, (image_size, image_size) RGB. Arguments as for `latents`."""
        if self.settings.output_type == "latent":
            raise UsageError("`output_type=latent`: loads no decoder; drop it, or call latents()")
        latents = self.latents(labels, seed, num_sampling_steps, cfg_scale, progress=progress)
        with self._running():
            pixels = self._decoder.decode(latents)  # (n, 3, H, W)
        return [Image.fromarray(to_grid(one).numpy()) for one in pixels.split(1)]

    def latents(
        self,
        labels: Labels,
        seed: int | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        progress: bool = False,
    ) -> torch.Tensor:
        """Return latents (n, channels, side, side) float32, side image_size/8 for
        sd-vae-ft-*, on the sampler's device.

        labels: n classes, each a number or a name. Arguments that are None are the
        constructor's. progress: show a bar of the steps.
        """
        several = (
            isinstance(labels, Iterable)
            and not isinstance(labels, (str, bytes))
            and getattr(labels, "ndim", 1)
        )
        labels = tuple(labels) if several else (labels,)
        given = dict(seed=seed, num_sampling_steps=num_sampling_steps, cfg_scale=cfg_scale)
        given = {name: value for name, value in given.items() if value is not None}
        with self._running() as run:
            settings = opening.reopen(self.settings, labels=labels, **given)
            if (settings.num_sampling_steps, settings.cfg_scale) != (
                run.process.steps,
                run.guidance.scale,
            ):
                process = door.process_of(settings, self._scheduler)
                guidance = door.guidance_of(settings)
                self._run = run = run._replace(process=process, guidance=guidance)
            (latents,) = door.sample(settings, run, Stopwatch(run.device), show=progress)
            return latents

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
    batch = door.batch_of(settings, run.process, run.guidance)
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
    new = load_network(loaded, fit, run.tier, run.device, batch)
    if TIERS[run.tier].accelerated and overflows(new, batch, run.device, fit.family.some_times):
        raise UsageError(
            f"`precision={run.tier}`: overflows on these weights; make another Sampler of them"
        )
    if check and fit.latent_size == run.side:
        require_same(new, loaded, run.tier)
    run.network.copy_weights(new)


def _require_known(options):
    if wrong := [name for name in NOT_FOR_PYTHON if name in options]:
        raise UsageError(f"`{wrong[0]}`: is for commands; drop it")
    if wrong := sorted(options.keys() - {item.name for item in fields(GridRequest)}):
        raise UsageError(f"`{wrong[0]}`: is not an option of Sampler; docs/python.md lists them")


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


def _written(vae: torch.nn.Module, folder: str) -> str:
    """Write a decoder that the caller holds as a folder in diffusers' layout. Return the folder."""
    vae = unwrapped(vae)
    kind = type(vae)
    if kind.__name__ != "AutoencoderKL" or not kind.__module__.startswith("diffusers."):
        raise UsageError(
            f"`vae={kind.__name__}`: give ema, mse, a folder or an AutoencoderKL of diffusers"
        )
    if any(value.is_meta for value in vae.parameters()):
        raise UsageError(f"`vae={kind.__name__}`: holds no values; load the weights first")
    vae.save_pretrained(folder)
    file = Path(folder, FILES[0])
    # Pipelines read attributes, which a caller may have set. The file has the entries
    # that the module was made with.
    scales = {name: getattr(vae.config, name, None) for name in OF_LATENTS}
    file.write_text(json.dumps(json.loads(file.read_text()) | scales, default=str))
    return folder
