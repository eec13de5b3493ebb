"""From options to pictures: choose the device, load the weights, denoise, decode, save. Commands are thin around this."""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from accel import precision, vae
from accel.forecast import Auto, Plan, read_plan
from accel.graphs import Replayed
from accel.meta import shapes_only
from accel.options import UsageError, partial_file
from diffusion import create_diffusion
from models import DiT_models
from pretrained_models.download import check_there, find_model, pretrained_models

#################################################################################
#                             Before any work is done                           #
#################################################################################


def choose_device(options):
    """The device asked for, or a GPU if there is one. Raises UsageError if it is not there."""
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device {options.device}: no such kind of device; try cuda, cuda:1 or cpu") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device}: torch {torch.__version__} finds no CUDA GPU; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {device}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0")
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise UsageError(f"--device {device}: torch {torch.__version__} cannot sample there; use cuda or cpu")
    return device


def choose_precision(options, device):
    """Set the tier asked for, or the device's default; returns its name."""
    tier = options.precision or precision.default_tier(device)
    if tier == "exact" and options.compile:
        raise UsageError("--compile: the compiler has no split products; leave it out, or choose another --precision")
    try:
        precision.apply_precision(tier, device)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tier


def choose_decoder_precision(options, device, tier):
    """The decoder's arithmetic beside `tier`. Raises UsageError for one that `device` lacks."""
    try:
        return precision.decoder_precision(options.vae_precision, tier, device)
    except ValueError as error:
        raise UsageError(str(error)) from None


#################################################################################
#                                    Loading                                    #
#################################################################################


def _empty_model(options):
    """The network of `options` without memory, on the meta device. Raises UsageError for a model or size that there is not."""
    if options.model not in DiT_models:
        raise UsageError(f"--model {options.model}: unknown; choose from {', '.join(DiT_models)}")
    with shapes_only():
        model = DiT_models[options.model](input_size=options.latent_size, num_classes=options.num_classes)
    if options.latent_size % model.patch_size:
        raise UsageError(
            f"--image-size {options.image_size}: must be a multiple of {8 * model.patch_size} for {options.model}"
        )
    return model


def network_shape(options):
    """(tokens of a row, heads, blocks) of the network of `options`, without its weights. Raises UsageError as `load_model` does."""
    model = _empty_model(options)
    return model.pos_embed.shape[1], model.num_heads, len(model.blocks)


def load_model(options, device, tier="fp32"):
    """The network of `options` on `device`, its weights straight from the file: nothing is initialised to be thrown away, and a file that
    torch can map is read once. A models.DiT in eval mode and float32; for the half and exact tiers a FastDiT.

    Raises UsageError for an unknown model, weights that are missing or those of another model.
    """
    model = _empty_model(options)
    state = find_model(options.ckpt or published(options))
    _check_fit(options, model, state)
    if (
        state["pos_embed"].shape != model.pos_embed.shape
    ):  # the table is a function of the grid, so the network runs at any size
        trained = round(state["pos_embed"].shape[1] ** 0.5) * model.patch_size * 8
        print(
            f"{options.model}: weights trained at {trained} px, sampling at {options.image_size} px with recomputed positions"
        )
        state = {**state, "pos_embed": model.position_table()}
    if tier in precision.FAST and not options.compile:
        from accel.fast import LAYERS, FastDiT  # brings Triton, which the other tiers need not wait for
        from accel.kernels.adaln import Modulation, adaln, adaln_split
        from accel.kernels.ancestral_update import ancestral_update
        from accel.kernels.attention import attention
        from accel.kernels.linear.tuner import Tuner
        from accel.kernels.patch_embed import patch_embed
        from accel.kernels.split_attention import split_attention
        from accel.kernels.split_linear import SplitLinear, split

        tokens, width = model.pos_embed.shape[1:]
        rows = 2 * len(options.labels) * tokens
        dtype = precision.FAST[tier]

        def meet_attention():
            if tier == "exact":
                qkv = split(torch.zeros(1, tokens, 3 * width, device=device), per_row=False)
                split_attention(qkv, model.num_heads)
                weight, bias = torch.zeros(width, width, device=device), torch.zeros(width, device=device)
                x = split(torch.zeros(1, tokens, width, device=device))
                for how in ({}, dict(result="high_low"), dict(result="high_low", gelu=True, after=bias)):
                    SplitLinear(weight, bias, **how)(x)
            else:
                attention(torch.zeros(1, tokens, 3 * width, dtype=dtype, device=device), model.num_heads)
            synchronize(device)

        def meet_rows():
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                x = torch.zeros(1, rows, width, device=device)
                branch = x if tier == "exact" else x.to(dtype)
                table = torch.zeros(1, 1, width, device=device)
                modulation = Modulation(table, torch.zeros(1, dtype=torch.int64, device=device))
                for branches in range(3):
                    how = x, modulation, 0, 0, ((branch, 0),) * branches, branches == 2
                    if tier == "exact":
                        adaln_split(*how)
                    else:
                        adaln(*how, dtype)
                adaln(x, modulation, 0, 0, ((branch, 0),) * 2, True, torch.float32)
                torch.cuda.current_stream().synchronize()

        def meet_ends():
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                x, count = (
                    torch.zeros(1, 4, options.latent_size, options.latent_size, device=device),
                    model.patch_size**2,
                )
                embedded = patch_embed(
                    x, torch.zeros(width, 4 * count, device=device), torch.zeros(tokens, width, device=device), copies=2
                )
                ancestral_update(
                    embedded[..., : 8 * count].contiguous(),
                    x,
                    x,
                    torch.zeros(1, dtype=torch.int64, device=device),
                    torch.zeros(1, 6, device=device),
                    options.cfg_scale,
                )
                torch.cuda.current_stream().synchronize()

        products = (
            [(rows, *state[f"blocks.0.{layer}.weight"].shape, layer == "mlp.fc1") for layer in LAYERS]
            if tier != "exact"
            else ()
        )
        tuner = Tuner()
        with ThreadPoolExecutor(7) as pool:  # the compilers' seconds go by while weights are copied
            compiling = [
                pool.submit(meet_rows),
                pool.submit(meet_attention),
                pool.submit(meet_ends),
                *(pool.submit(tuner.prepare, *product, dtype, device) for product in products),
            ]
            try:
                network = FastDiT(state, model.num_heads, dtype, device, tuner=tuner)
            except ValueError as error:
                raise UsageError(f"--ckpt {options.ckpt or published(options)}: {error}") from None
            for one in compiling:
                one.result()
        return network
    state = {name: tensor if tensor.dtype == torch.float32 else tensor.float() for name, tensor in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    model = model.to(device).eval().requires_grad_(False)
    if options.compile:
        from accel.fast import CompiledDiT

        return CompiledDiT(model, precision.HALF.get(tier, torch.float32))
    return model


@torch.inference_mode()
def overflows(network, options, device):
    """Whether `network` gives infinities or NaN on noise, at the first, the middle and the last timestep, with guidance."""
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random stream begins untouched
    n = len(options.labels)
    labels = torch.tensor([*options.labels, *[options.num_classes] * n], device=device)
    x = torch.randn(2 * n, 4, options.latent_size, options.latent_size, generator=generator, device=device)
    return not all(
        network.forward_with_cfg(x, torch.full_like(labels, t), labels, options.cfg_scale).isfinite().all()
        for t in (999, 500, 0)
    )


def fetch_weights(options):
    """Download the published weights if the options want them and they are not here yet. Raises UsageError."""
    if options.ckpt is None:
        find_model(published(options))


def published(options):
    name = f"DiT-XL-2-{options.image_size}x{options.image_size}.pt"
    if options.model != "DiT-XL/2" or name not in pretrained_models or options.num_classes != 1000:
        raise UsageError(
            f"--ckpt: no published weights for {options.model} at {options.image_size} px with {options.num_classes} classes "
            f"(there are DiT-XL/2 at 256 and 512); give a file"
        )
    return name


def _mismatches(model, state):
    """Names on which a model's keys or shapes differ from a state dict's, the position table's length aside."""
    want = {name: tensor.shape for name, tensor in model.state_dict().items()}
    have = {name: tensor.shape for name, tensor in state.items()}
    for shapes in (want, have):
        if "pos_embed" in shapes:
            shapes["pos_embed"] = shapes["pos_embed"][2:]
    return [name for name in {**want, **have} if want.get(name) != have.get(name)]


def _check_fit(options, model, state):
    wrong = _mismatches(model, state)
    if not wrong:
        return
    name = options.ckpt or published(options)
    table = state.get("y_embedder.embedding_table.weight")
    if wrong == ["y_embedder.embedding_table.weight"] and table is not None:
        raise UsageError(
            f"--num-classes {options.num_classes}: the weights in {name} know {len(table) - 1} classes; "
            f"use --num-classes {len(table) - 1}"
        )
    for other, build in DiT_models.items():
        with shapes_only():
            candidate = build(input_size=options.latent_size, num_classes=len(table) - 1 if table is not None else 1000)
        if not _mismatches(candidate, state):
            raise UsageError(
                f"--ckpt {name}: holds the weights of {other}, not of {options.model}; use --model {other}"
            )
    raise UsageError(
        f"--ckpt {name}: fits none of {', '.join(DiT_models)} ({len(wrong)} entries differ, first {wrong[0]})"
    )


#################################################################################
#                                    Sampling                                   #
#################################################################################


def draw_latents(n, latent_size, seed, device):
    """Seed the device's generator and draw the run's first normal, z (n, 4, L, L)."""
    torch.manual_seed(seed)
    return torch.randn(n, 4, latent_size, latent_size, device=device)


@torch.inference_mode()
def denoise(
    network,
    diffusion,
    z,
    labels,
    cfg_scale,
    null_label,
    guided=True,
    rows=slice(None),
    draw=None,
    steps=None,
    progress=None,
    sums=None,
    forecast=None,
):
    """Ancestral sampling (Ho et al. 2020, arXiv:2006.11239, algorithm 2) with classifier-free guidance.

    network: anything with `forward(x, t, y)` and `forward_with_cfg(x, t, y, cfg_scale)`; a FastDiT's conditioning is hoisted and its steps are
    captured, as its switches say. z (n, 4, L, L): the whole batch's noise; labels (n,) on z's device. rows: the part of the batch to compute
    (a rank's share); returns its latents (n', 4, L, L).
    guided: with guidance a step's normal draw covers 2n rows. The null half's update is never computed, since the network only
    reads the first half, but its draw is made: the random stream stays upstream's.
    draw: called once a step for the noise of `rows` (n', 4, L, L), in place of that stream.
    steps: stop after so many (for warm-up). progress: called after each step has been queued. sums (steps,), on z's device: receives the
    latents' sum after each step, which tells afterwards at which one they ceased to be finite.
    forecast: which steps call the network (a Plan or an Auto of accel.forecast; see diffusion.forecast); without it all do.
    """
    x, y = z[rows], labels[rows]
    mine, n = len(x), len(z)
    if guided:
        y = torch.cat([y, torch.full_like(y, null_label)])  # (2n',)

    def model_for(y):
        def model(x, t):
            if guided:
                return network.forward_with_cfg(torch.cat([x, x]), torch.cat([t, t]), y, cfg_scale)[: len(x)]
            return network.forward(x, t, y)

        return model

    switches = getattr(network, "optimisations", None)
    one_kernel = switches is not None and switches.ends != "torch" and z.is_cuda and diffusion.learns_range
    if one_kernel:
        from accel.kernels.ancestral_update import (
            ancestral_update,
        )  # brings Triton, which the other tiers need not wait for

    def step(x, t, y, noise):
        if not one_kernel:
            return diffusion.p_sample(model_for(y), x, t, clip_denoised=False, noise=noise)["sample"]
        tokens = network.last_tokens(x, diffusion.original_timesteps(t).repeat(len(y) // len(x)), y)
        return ancestral_update(
            tokens,
            x,
            noise,
            t,
            diffusion.ancestral_coefficients(x.device),
            cfg_scale if guided else None,
            switches.ends,
        )

    def stride(x, t, y, m, values, noise, calls):
        return forecast.strides.stride(model_for(y), x, t, m, values, noise, calls)

    conditions, drawn = nullcontext(), (2 * n if guided else n, *z.shape[1:])
    if switches is not None:
        from accel.fast import hoist_conditioning

        if switches.hoist:
            met = diffusion.timestep_map[::-1] if forecast is None else forecast.timesteps()
            conditions = hoist_conditioning(
                network, met, y.tolist(), together=1 if forecast is None else 2
            )  # a stride's calls
        if switches.graph and z.is_cuda:
            if forecast is None:
                diffusion.prepare(z.device)
                step = network.captured.setdefault((diffusion, guided, cfg_scale), Replayed(step))
            else:
                forecast.strides.prepare(z.device)
                stride = network.captured.setdefault((forecast.strides, guided, cfg_scale), Replayed(stride))
    if hasattr(network, "begin_run"):  # what it does depends on the number of the step
        network.begin_run()

    def noise_of_step():
        # Draw 2n rows, use this rank's: upstream's random stream.
        return draw() if draw is not None else torch.randn(drawn, device=z.device)[:n][rows]

    timesteps = torch.arange(diffusion.num_timesteps - 1, -1, -1, device=z.device)
    with conditions as table:
        if forecast is not None:
            return _strides(stride, forecast, table, x, y, timesteps[:steps], noise_of_step, sums, progress)
        for index in range(diffusion.num_timesteps)[:steps]:
            if table is not None:
                table.reach(index)
            x = step(x, timesteps[index].expand(mine), y, noise_of_step())
            if sums is not None:
                torch.sum(x.flatten(), 0, out=sums[index])
            if progress is not None:
                progress()
    return x


def _strides(stride, forecast, table, x, y, timesteps, noise_of_step, sums, progress):
    """denoise's loop where a call of the network serves several steps."""
    (m, values), index, call = forecast.strides.start(x), 0, 0
    for kind in forecast.run():
        steps, calls = kind
        if index >= len(timesteps):
            break
        if table is not None:
            table.reach(*forecast.places(call, index, kind))
        noise = torch.stack([noise_of_step() for _ in range(steps)])  # drawn ahead, in the stream's order
        x, m, values, error = stride(x, timesteps[index].expand(len(x)), y, m, values, noise, calls)
        forecast.observe(error, index, kind)
        index, call = index + steps, call + calls
        if sums is not None:
            torch.sum(x.flatten(), 0, out=sums[index - 1])
        if progress is not None:
            for _ in range(steps):
                progress()
    return x


@contextmanager
def progress_bar(total, device, **options):
    """A tqdm bar as a callable to call after each queued step. It advances when the device has finished the step, and asks without
    making anything wait for the answer."""
    from tqdm import tqdm

    with tqdm(total=total, unit="step", **options) as bar:
        if device.type != "cuda":
            yield bar.update
            return
        pending = []

        def step():
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            while pending and pending[0].query():
                pending.pop(0)
                bar.update()

        yield step
        for event in pending:
            event.synchronize()
            bar.update()


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Wall-clock seconds by phase, the device's queue drained at each end."""

    def __init__(self, device):
        self.device, self.seconds = device, {}

    @contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def __str__(self):
        return " · ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()) + (
            f" · total {sum(self.seconds.values()):.2f} s"
        )


class Engine:
    """One loaded sampling run: `sample()` gives latents, `decode()` pixels, and `watch` where the time went. place: the device to load the network
    to, where that is to be divided before it comes to the options' device."""

    def __init__(self, options, place=None):
        self.options = options
        self.device = choose_device(options)
        self.watch = Stopwatch(self.device)
        self.decoder = self.loading = None  # the VAE, loaded when it is first needed, and the load under way
        with self.watch.phase("load"):
            _empty_model(options)  # what the flags alone decide comes before weights that are fetched and read
            check_there(options.ckpt or published(options))
            self.precision = choose_precision(options, self.device)
            self.decoder_precision = choose_decoder_precision(options, self.device, self.precision)
            self.vae_folder = vae.find_vae(options.vae) if options.output_type == "image" else None
            gaps = read_plan(options, options.ckpt or published(options)) if options.forecast == "plan" else None
            with self._room_for_all():
                self.network = load_model(options, place or self.device, self.precision)
                if self.precision in ("fp16", "exact") and overflows(self.network, options, self.device):
                    self._leave_fp16()
            self.diffusion = create_diffusion(str(options.num_sampling_steps))
            if options.forecast == "plan":
                self.forecast = Plan(self.diffusion, gaps)
            else:
                self.forecast = Auto(self.diffusion, options.forecast_tolerance) if options.forecast == "auto" else None

    def _leave_fp16(self):
        if self.precision == "exact" and (layer := self.network.overflowed()):
            raise UsageError(
                f"--precision exact: {layer} gives values that float16 terms do not hold; use --precision fp32"
            )
        if self.precision == "exact":
            raise UsageError(
                "--precision exact: the network's output is not finite; check the weights with --precision fp32"
            )
        if self.options.precision == "fp16" or not precision.supports("bf16", self.device):
            raise UsageError(f"--precision fp16: overflows on these weights; use --precision {self._wider_than_fp16()}")
        print("these weights overflow float16: sampling in bfloat16")
        self.precision = "bf16"
        precision.apply_precision("bf16", self.device)
        self.network = None  # first its memory
        self.network = load_model(self.options, self.device, "bf16")

    def _wider_than_fp16(self):
        return "bf16" if precision.supports("bf16", self.device) else "fp32"

    def describe(self):
        where = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"CPU, {torch.get_num_threads()} threads"
        )
        calls = "" if self.forecast is None else f" ({self.forecast})"
        n, fid = len(self.options.labels), getattr(self.options, "num_fid_samples", None)  # which draws its labels
        return (
            f"{self.options.model} · {self.options.image_size} px · {f'{fid} pictures' if fid else f'{n} label' + 's' * (n > 1)} · "
            f"{self.options.num_sampling_steps} steps{calls} · cfg {self.options.cfg_scale:g} · {self.precision} · {where} · "
            f"torch {torch.__version__}"
        )

    def denoise(self, z, labels, **how):
        """Noise z (n, 4, L, L) and labels (n,) → latents; `how` as in the function of the same name. Raises UsageError, naming the step and a
        remedy, if they are not finite."""
        sums = torch.zeros(self.diffusion.num_timesteps, device=self.device)
        latents = denoise(
            self.network,
            self.diffusion,
            z,
            labels,
            self.options.cfg_scale,
            self.options.num_classes,
            sums=sums,
            **{"forecast": self.forecast, **how},
        )
        failed = torch.nonzero(~sums.isfinite())
        if len(failed):
            remedies = dict.fromkeys(precision.TIERS, "use --precision fp32") | {
                "fp16": f"use --precision {self._wider_than_fp16()}",
                "fp32": "check the weights",
            }
            if self.precision == "exact" and (layer := self.network.overflowed()):
                remedies["exact"] = f"{layer} gives values that float16 terms do not hold; use --precision fp32"
            raise UsageError(
                f"--precision {self.precision}: the latents are not finite from step {int(failed[0]) + 1} of {len(sums)} on; "
                f"{remedies[self.precision]}"
            )
        return latents

    def run(self, rows=slice(None), **how):
        """Latents (n', 4, L, L) of `rows` of the options' labels, from the options' seed; the same on every call."""
        options = self.options
        z = draw_latents(len(options.labels), options.latent_size, options.seed, self.device)
        labels = torch.tensor(options.labels, device=self.device)
        with self._room_for_all():
            return self.denoise(z, labels, rows=rows, **how) if len(labels[rows]) else z[rows]

    @contextmanager
    def _room_for_all(self):
        """UsageError where the GPU's memory does not hold what is done inside."""
        try:
            yield
        except torch.OutOfMemoryError:
            options = self.options
            raise UsageError(
                f"--labels: {options.model} with {len(options.labels)} pictures of {options.image_size} px at a time does not fit into what is free of "
                "the GPU's memory; sample fewer, or smaller ones, or free some"
            ) from None

    def sample(self, rows=slice(None), show=True):
        """`run` with a bar, repeated and timed as the options say. Returns latents. show: whether this process talks."""
        runs, times = self.options.repeats, []
        captured = self.device.type == "cuda" and getattr(self.network, "optimisations", None) is not None
        if (
            runs > 1 or captured
        ):  # the first step loads kernels and is recorded: not sampling, and not what the bar should learn its pace from
            with self.watch.phase("warm-up"):
                if self.forecast is None:
                    self.run(rows, steps=3 if runs > 1 else 1)
                else:
                    self.run(rows, forecast=self.forecast.each_kind_once())
        if self.options.output_type == "image" and self.device.type == "cuda":
            self._load_decoder_beside()
        for index in range(runs):
            start = time.perf_counter()
            with (
                self.watch.phase("sample"),
                progress_bar(
                    self.options.num_sampling_steps,
                    self.device,
                    disable=not show,
                    desc=f"run {index + 1}/{runs}" if runs > 1 else None,
                ) as progress,
            ):
                latents = self.run(rows, progress=progress)
            times.append(time.perf_counter() - start)
        if runs > 1 and show:
            times.sort()
            median = (times[(runs - 1) // 2] + times[runs // 2]) / 2
            print(
                f"sampling, {runs} runs after warm-up: median {median:.3f} s, from {times[0]:.3f} to {times[-1]:.3f} s"
            )
        return latents

    def release_network(self):
        """Give the network's memory back, its captured steps included, before pictures are decoded; there is no sampling after this."""
        self.network = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def load_decoder(self):
        """The VAE as a vae.CheckedDecoder, on the device since the first call."""
        if self.decoder is None:
            plain = self.loading.result() if self.loading else vae.load_vae(self.vae_folder, self.device)
            self.decoder = vae.CheckedDecoder(
                plain.to(self.device), self.decoder_precision, precision.float32_decoder(self.precision, self.device)
            )
            if self.decoder.refusal:
                print(self.decoder.refusal)
        return self.decoder

    def _load_decoder_beside(self):
        """Start to load the VAE in a thread, and to compile for it: while the GPU denoises, this process has little else to do. The weights wait on the
        CPU, until the network's memory is free."""

        def load():
            interval = sys.getswitchinterval()
            sys.setswitchinterval(
                1e-4
            )  # imports are long stretches of Python; the loop that feeds the GPU must get its turn at once
            try:
                if self.decoder_precision == "fp16":
                    from accel.kernels.group_norm import compile_ahead

                    compile_ahead(self.device)
                return vae.load_vae(self.vae_folder, "cpu")
            finally:
                sys.setswitchinterval(interval)

        if self.decoder is None and self.loading is None:
            self.loading = ThreadPoolExecutor(1).submit(load)

    def decode(self, latents):
        """Latents, finite → pixels (n, 3, H, W), about (-1, 1). Raises UsageError if the GPU's memory does not hold what one picture takes, or if the
        decoder's weights make pixels that are not finite, which would pass for black ones."""
        with self.watch.phase("decode"):
            try:
                pixels = vae.decode(self.load_decoder(), latents)
            except torch.OutOfMemoryError:
                raise UsageError(
                    f"--image-size {self.options.image_size}: decoding a picture does not fit into what is free of the GPU's memory; use "
                    f"{'--output-type latent' if self.decoder and self.decoder.half else '--vae-precision fp16'}, or a smaller size"
                ) from None
            if not pixels.isfinite().all():
                raise UsageError(
                    f"--vae {self.options.vae}: decodes finite latents to pixels that are not finite; check its weights, or take another"
                )
            return pixels

    def save(self, latents, pixels=None):
        """Write the options' output, whole or not at all: the latents, or a picture of `pixels`, decoded here if not given. Raises UsageError if the disk
        does not take it."""
        latent = self.options.output_type == "latent"
        content = latents.float().cpu() if latent else vae.to_grid(self.decode(latents) if pixels is None else pixels)
        try:
            with self.watch.phase("save"), partial_file(self.options.output) as partial, open(partial, "wb") as file:
                if latent:
                    import numpy as np

                    np.save(file, content.numpy())
                else:
                    from PIL import Image

                    Image.fromarray(content.numpy()).save(file, format="PNG")
        except OSError as error:
            raise UsageError(
                f"--output {self.options.output}: cannot be written ({error.strerror or error}); free some space, or choose another path"
            ) from None
