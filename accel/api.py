"""`from accel import Sampler`: pictures from Python, from a network that is loaded once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from accel.engine import Engine
from accel.errors import UsageError
from accel.options import MODELS, SamplingOptions
from accel.precision import apply_precision, switches_kept
from accel.progress import step_bar
from accel.vae import to_grid
from accel.weights.checkpoint import HUB_ID, Held

Labels = int | str | Iterable[int | str]


class Sampler:
    """A DiT and its decoder, ready to sample any labels, seeds, steps and guidance, again and again.

        with Sampler("DiT-XL/2", image_size=512, precision="fp16") as sampler:
            dog, other = sampler.sample(["golden retriever", 207], seed=0)

    model: a name as --model takes it, or a DiT that you hold: models.DiT, the original class, wrapped or compiled.
    Its weights are copied. vae: ema, mse or a folder. options: other fields of SamplingOptions by their names, such as
    ckpt, num_classes, vae_precision, batch_size; those that `sample` takes become its defaults. With
    output_type="latent" no decoder is needed.

    Pictures are those of sample.py with the same flags, to the bit. On a GPU a step is captured at its first use with a
    number of pictures, steps and guidance, then replayed. torch's global generators and backend switches are left as
    they were. Raises ValueError (accel.errors.UsageError): one line that names the flag of that name and the remedy.
    """

    def __init__(
        self,
        model: str | torch.nn.Module | None = None,
        *,
        image_size: int | None = None,
        precision: str | None = None,
        device: str | torch.device | None = None,
        vae: str | Path | None = None,
        **options,
    ):
        held = Held(model) if isinstance(model, torch.nn.Module) else None
        if held:
            if wrong := [name for name in ("ckpt", "forecast", "forecast_plan") if name in options]:
                raise UsageError(f"{wrong[0]}: is for weights on disk, and the model was given; drop it")
            model, options["ckpt"] = None, held.name
        elif model not in (None, *MODELS) and (Path(model).exists() or HUB_ID.fullmatch(model)):
            if "ckpt" in options:
                raise UsageError(f"ckpt={options['ckpt']}: conflicts with {model}, which are weights too; give one")
            model, options["ckpt"] = None, model
        if isinstance(vae, torch.nn.Module):
            raise UsageError(f"--vae {type(vae).__name__}: give ema, mse or a folder; save_pretrained writes one")
        device, vae = (None if given is None else str(given) for given in (device, vae))
        options |= dict(model=model, image_size=image_size, precision=precision, device=device, vae=vae)
        options = SamplingOptions(**options).resolve()
        with switches_kept():
            self._engine = Engine(options, checkpoint=held)
        self.options = self._engine.options
        if held:
            self._engine.checkpoint = None  # a copy of the caller's weights, which the network has by now

    def sample(
        self,
        labels: Labels,
        seed: int | None = None,
        num_sampling_steps: int | None = None,
        cfg_scale: float | None = None,
        *,
        progress: bool = False,
    ) -> list[Image.Image]:
        """One picture a label, (image_size, image_size) RGB. Arguments as `latents` takes them."""
        if self.options.output_type == "latent":
            raise UsageError("--output-type latent: loads no decoder; drop it, or call latents()")
        latents = self.latents(labels, seed, num_sampling_steps, cfg_scale, progress=progress)
        with self._running() as engine:
            pixels = engine.decode(latents)  # (n, 3, H, W)
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
        """Latents (n, 4, image_size/8, image_size/8) float32, on the sampler's device.

        labels: n classes, each a number or a name. What is None is as the constructor was given it. progress: show a
        bar of the steps.
        """
        several = isinstance(labels, Iterable) and not isinstance(labels, str)
        labels = tuple(labels) if several else (labels,)
        given = dict(seed=seed, num_sampling_steps=num_sampling_steps, cfg_scale=cfg_scale)
        given = {name: value for name, value in given.items() if value is not None}
        options = replace(self.options, labels=labels, **given).resolve()
        with self._running() as engine:
            engine.reconfigure(options)
            with step_bar(options.num_sampling_steps, engine.device, disable=not progress) as queued:
                latents = engine.run(on_step=lambda index, _: queued(index))
            return latents.clone()  # no inference tensor: the caller may want gradients

    def close(self) -> None:
        """Free the memory of the network and the decoder. The sampler cannot be used after it."""
        if self._engine is not None:
            self._engine.decoder = None
            self._engine.release_network()
            self._engine = None

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _running(self) -> Iterator[Engine]:
        """The engine, with the switches of its tier and a random stream of its own."""
        if self._engine is None:
            raise UsageError("this Sampler is closed; make another")
        gpus = range(torch.cuda.device_count()) if self._engine.device.type == "cuda" else ()
        with switches_kept(), torch.random.fork_rng(gpus):
            apply_precision(self._engine.precision, self._engine.device)
            yield self._engine
