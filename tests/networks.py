"""Small networks with random weights, and inputs to evaluate them on."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import fill
from safetensors.torch import save_file
from torch import nn

from accel import fast
from accel.checkpoints import Checkpoint, checkpoint_of
from accel.checkpoints.loading import WeightFiles
from accel.checkpoints.module import StateTensors
from accel.config.options import Options
from accel.config.rules import Request
from accel.decoders import LatentSpace
from accel.errors import InputRef
from accel.families import constructor_of, dit, family_of, jit, large_dit, lightning_dit, rae, sit
from accel.families.dit.network import DiT, DiT_models
from accel.families.identify import UserFacts
from accel.families.jit.network import JiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.lightning_dit.network import LightningDiT
from accel.families.rae.network import DiTwDDTHead
from accel.families.sit.network import SiT
from accel.families.spec import ModelSpec
from accel.fast.ops import DirectOps
from accel.pipeline import Pipeline
from accel.run.opening import open_run
from accel.sampling import denoise, upstream_noise
from accel.sampling.guidance import Guidance, Unguided
from accel.tensors.tensor_files import WEIGHTS
from diffusion import create_diffusion

# heads of 72 as in XL; 64 px
SMALL = dict(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=8)
# Derived classes first.
CLASSES = {
    JiT: jit,
    DiTwDDTHead: rae,
    LightningDiT: lightning_dit,
    SiT: sit,
    DiT_Llama: large_dit,
    DiT: dit,
}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def build(name, **arguments):
    """Return a model of the registry with random weights."""
    return fill(DiT_models[name](**arguments))


def small(kind=DiT, **changes):
    """Return a DiT, or another class with its arguments, of the shape SMALL."""
    return fill(kind(**{**SMALL, **changes}))


def with_norms(model, seed=0):
    """Random weights, those of the norms near one, as trained ones are."""
    for name, value in fill(model, seed).named_parameters():
        if "norm" in name and name.endswith("weight"):
            value.data.add_(1)
    return model


def run_of(model="DiT-XL/2", tensors=None, **options):
    """Return the run of options with weights of this model, which are not there, by default on a
    CPU.
    """
    family = family_of(model)
    classes = options.get("num_classes", family.models[model].num_classes)
    spec = ModelSpec(
        family,
        model,
        constructor_of(model),
        arguments={},
        num_heads=6,
        in_channels=4,
        patch_size=int(model.rpartition("/")[2]),
        num_classes=classes,
    )
    checkpoint = Checkpoint(InputRef(model), spec, tensors)
    return run_with(checkpoint, model=model, **options)


def run_with(checkpoint, configuration=None, **options):
    """Return the run of options with these weights, on a CPU by default, of --config's values."""
    given = Options(**options)
    request = Request(given, configuration, given)
    device = torch.device(given.get("device", "cpu"))
    return open_run(request, device, checkpoint, space=LatentSpace())


def opened(options, *given):
    """Open the run of options."""
    return open_run(Request.open(options), *given)


def ready(**options):
    """Return the run of a grid's options, and its pipeline in this process."""
    run = opened(Options(**options))
    return run, Pipeline.load(run, keep_guide=True)


def latents_of(run, pipeline, on_step=None):
    """Return the latents of a grid, sampled by one process."""
    return pipeline.latents(run.settings.labels, run.settings.seed, on_step)


def weights_at(path, entry=None):
    """Return the weights in a file or a folder."""
    return WeightFiles(InputRef(str(path)), entry)


def identify(path, *given):
    """Return the spec of a file's weights. given: a model's name, and a number of classes."""
    return weights_at(path).checkpoint(UserFacts(*given)).spec


def recognised(name, state, facts, *given):
    """Return the checkpoint with a file's entries and facts. given: as for `identify`."""
    return checkpoint_of(InputRef(name), StateTensors(state), facts, UserFacts(*given))


def recognise(name, state, facts, *given):
    """Return the spec of weights with a file's entries and facts. given: as for `identify`."""
    return recognised(name, state, facts, *given).spec


def to_diffusers(state):
    """Return diffusers' state dict from that of models.DiT."""
    blocks = {
        "adaLN_modulation.1": "norm1.linear",
        "attn.proj": "attn1.to_out.0",
        "mlp.fc1": "ff.net.0.proj",
        "mlp.fc2": "ff.net.2",
    }
    outer = {
        "x_embedder.proj": "pos_embed.proj",
        "final_layer.adaLN_modulation.1": "proj_out_1",
        "final_layer.linear": "proj_out_2",
    }
    embedders = {
        "t_embedder.mlp.0": "timestep_embedder.linear_1",
        "t_embedder.mlp.2": "timestep_embedder.linear_2",
        "y_embedder.embedding_table": "class_embedder.embedding_table",
    }
    numbers = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    out = {}
    for name, value in state.items():
        layer, _, parameter = name.rpartition(".")
        if layer in outer:
            out[f"{outer[layer]}.{parameter}"] = value
        for number in numbers:
            theirs = f"transformer_blocks.{number}"
            inner = layer.removeprefix(f"blocks.{number}.")
            if layer in embedders:
                out[f"{theirs}.norm1.emb.{embedders[layer]}.{parameter}"] = value
            elif inner == layer:
                continue
            elif inner == "attn.qkv":
                for part, third in zip("qkv", value.chunk(3)):
                    out[f"{theirs}.attn1.to_{part}.{parameter}"] = third
            else:
                out[f"{theirs}.{blocks[inner]}.{parameter}"] = value
    return out


def write_transformer(folder, state, config):
    """Write a DiT's weights in diffusers' layout, and a config.json."""
    save_file(
        {name: tensor.clone() for name, tensor in to_diffusers(state).items()}, folder / WEIGHTS
    )
    (folder / "config.json").write_text(json.dumps(config))


def side_of(model):
    """Return the side of a model's latents."""
    return model.input_size if hasattr(model, "input_size") else model.x_embedder.img_size[0]


def inputs(model, n, device="cpu"):
    """Return latents, timesteps and labels of n batch rows; the second half has the null label."""
    generator = torch.Generator().manual_seed(1)
    side = side_of(model)
    classes = model.y_embedder.num_classes
    x = torch.randn(n, model.in_channels, side, side, generator=generator)
    t = torch.randint(0, 1000, (n,), generator=generator)
    y = torch.randint(0, classes, (n,), generator=generator)
    y[n // 2 :] = classes
    return x.to(device), t.to(device), y.to(device)


def guided(out, scale, channels=3):
    """Guidance written out: so many channels of both halves get the same estimate."""
    cond, uncond = out.chunk(2)
    both = uncond + scale * (cond - uncond)
    return torch.cat(
        [torch.cat([both[:, :channels], half[:, channels:]], 1) for half in (cond, uncond)]
    )


class FourChannels(DiT):
    """A DiT that guides all four channels, as upstream's comment proposes."""

    def forward_with_cfg(self, x, t, y, cfg_scale):
        half = x[: len(x) // 2]
        return guided(self.forward(torch.cat([half, half]), t, y), cfg_scale, channels=4)


class Otherwise(DiT):
    def forward(self, x, t, y):
        return super().forward(x, torch.where(t > 300, t - 9, t), y)


def large_inside(model):
    """Scale weights of the model: the same function, with values between fc1 and fc2 that
    float16 does not hold.
    """
    for block in model.blocks:
        block.mlp.fc1.weight.data.mul_(3e5)
        block.mlp.fc2.weight.data.div_(3e5)
    return model


def error(got, want):
    """Return the relative error against a float64 result on the CPU."""
    return float((got.double().cpu() - want).norm() / want.norm())


def pack_of(model):
    """Return the function that packs the weights of a reference network."""
    return next(one.FAMILY.pack for kind, one in CLASSES.items() if isinstance(model, kind))


def network_of(model, tier, device=None, **how):
    """Return the accelerated network of a tier; on a CPU the kernels' reference
    implementations run.
    """
    device = next(model.parameters()).device if device is None else torch.device(device)
    return fast.build(model.state_dict(), model, pack_of(model), tier, device, **how)


def fast_network(model, dtype, device="cpu"):
    """Return the accelerated network with GEMMs in `dtype`, which may be float64."""
    return fast.assemble(
        model.state_dict(), model, pack_of(model), DirectOps(dtype, torch.device(device))
    )


def evaluate(network, x, t, y, scale):
    """Return a network's guided estimate (n, C', H, W) for x (2n, C, H, W), whose first n
    rows are read.
    """
    return Guidance(scale, 0).combine(network.forward(x[: len(x) // 2], t, y), scale)


def sample(
    network, process, z, labels, scale=4.0, null_label=8, rows=slice(None), generator=None, **how
):
    """Return latents of a part of a batch, with upstream's noise. scale: None is no guidance."""
    guidance = Unguided() if scale is None else Guidance(scale, null_label)
    how = {"draw": upstream_noise(z, guidance.noise_rows, rows, generator), **how}
    return denoise(network, process, guidance, z[rows], labels[rows], **how)


def sde(v, x, steps, draw):
    """SiT's sampler: Euler–Maruyama on the linear path from the velocity's score: x_t =
    α·x* + σ·ε, α = t, σ = 1 − t. v(x, t, noise level); draw() → noise like x.
    """

    def drift(x, t):
        alpha = t
        sigma = 1 - t
        slope_alpha = 1.0
        slope_sigma = -1.0
        speed = v(x, t, sigma)
        ratio = alpha / slope_alpha
        score = (ratio * speed - x) / (sigma**2 - ratio * slope_sigma * sigma)
        return speed + sigma * score, sigma

    times = [0.96 * i / (steps - 1) for i in range(steps)]
    for t, end in zip(times, times[1:]):
        noise = draw()
        slope, diffusion = drift(x, t)
        x = x + slope * (end - t) + (2 * diffusion) ** 0.5 * noise * (end - t) ** 0.5
    return x + 0.04 * drift(x, 0.96)[0]


def upstream(model, labels, seed, steps, scale=4.0, eta=None):
    """Return the latents of the usual script on the CPU: seed, z, then its loop."""
    torch.manual_seed(seed)
    return upstreams_loop(
        model,
        torch.randn(len(labels), 4, *[side_of(model)] * 2),
        torch.tensor(labels),
        steps,
        scale,
        eta,
    )


@torch.no_grad()
def upstreams_loop(model, z, y, steps, scale=4.0, eta=None):
    """Return the latents of z and labels y: twice z, the loop over forward_with_cfg, the
    first half; at scale 1 the loop over the model. eta: DDIM's. For a SiT: the loop of
    SiT's script.
    """
    n = len(z)
    evaluate = model
    if scale != 1:
        z = torch.cat([z, z])
        y = torch.cat([y, torch.full_like(y, model.y_embedder.num_classes)])
        evaluate = partial(model.forward_with_cfg, cfg_scale=scale)
    if isinstance(model, SiT):
        v = lambda x, t, level: evaluate(x, torch.full((len(x),), t), y)
        return sde(v, z, steps, lambda: torch.randn(z.shape))[:n]
    diffusion = create_diffusion(str(steps), learn_sigma=model.learn_sigma)
    loop = diffusion.p_sample_loop if eta is None else partial(diffusion.ddim_sample_loop, eta=eta)
    return loop(evaluate, z.shape, z, clip_denoised=False, model_kwargs=dict(y=y))[:n]


def transformer(seed=0, **config):
    """Return a DiTTransformer2DModel with random weights, the blocks' copies of the
    embedders equal.
    """
    from diffusers import DiTTransformer2DModel

    shape = dict(
        num_attention_heads=2, attention_head_dim=24, num_layers=2, sample_size=8, out_channels=8
    )
    model = fill(DiTTransformer2DModel(**{**shape, **config}), seed)
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(first)
    return model


def pipeline(vae=None):
    """Return a DiTPipeline of diffusers around a random transformer. vae: its decoder, or
    the decoder's folder.
    """
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline

    vae = AutoencoderKL.from_pretrained(vae) if isinstance(vae, Path) else vae
    return DiTPipeline(transformer(), vae, DDIMScheduler())


class Original(nn.Module):
    """A class of the caller's with the parts of ours, as upstream's classes are; named as ours."""

    def __init__(self, model):
        super().__init__()
        for name, part in (*model.named_children(), *model.named_parameters(recurse=False)):
            setattr(self, name, part)
        self.num_heads = model.num_heads
        self.model = [model]

    def forward(self, x, t, y):
        return self.model[0](x, t, y)
