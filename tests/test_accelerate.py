"""accelerate() where callers expect a module: in their loops, wrapped, refused where it is another
network, renewed.
"""

import copy
import pickle
from functools import partial

import networks
import pytest
import torch
import torch.distributed as dist
from conftest import fill, mistake
from networks import (
    DEVICES,
    SMALL,
    build,
    error,
    inputs,
    large_inside,
    pipeline,
    small,
    transformer,
    upstream,
)
from test_large_dit import build as build_large
from torch import nn
from torch.autograd import forward_ad
from torch.optim.swa_utils import AveragedModel

from accel import Sampler, accelerate
from accel.families.large_dit.network import DiT_Llama, rotation_table
from accel.runtime.precision import TIERS, preserve_switches, supports
from diffusion import create_diffusion
from models import DiT

WHOLE = {"final_layer.linear.weight": torch.ones(32, 144, dtype=torch.int64)}
BOUNDS = {"fp16": 3e-3, "bf16": 3e-2, "tf32": 1e-2}  # of relative errors, of other tiers 1e-5
LATENT = dict(device="cpu", output_type="latent", num_sampling_steps=3)
# A tier that the CPU has, and all that a GPU may have.
ON = pytest.mark.parametrize(
    "tier, device",
    [("fp32", "cpu"), *(pytest.param(tier, "cuda", marks=pytest.mark.gpu) for tier in TIERS)],
)


def test_it_is_used_as_a_module_is():
    model = small()
    fast = accelerate(model).to("cpu").eval()
    assert (fast.precision, fast.in_channels, fast.num_classes) == ("fp32", 4, 8)
    assert fast.state_dict().keys() == model.state_dict().keys()
    x, t, y = inputs(model, 4)
    with torch.no_grad():  # fp32 is the reference network
        assert torch.equal(fast.forward(y=y, x=x, t=t), model(x, t, y))
        want = model.forward_with_cfg(x, t, y, 3.0)
    for scale in (3, torch.tensor(3.0)):
        assert torch.equal(fast.forward_with_cfg(x, t, cfg_scale=scale, y=y), want)


@ON
def test_every_tier_samples_in_upstreams_loop(tier, device):
    """The call that scripts make, keywords and all, twice, with other guidance."""
    if not supports(tier, torch.device(device)):
        pytest.skip(f"this GPU has no {tier}")
    model = small().to(device)
    diffusion = create_diffusion("5")
    fast = accelerate(model, tier)
    for scale in (4.0, 1.5):
        z = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
        z = torch.cat([z, z])
        y = torch.tensor([3, 5, 8, 8], device=device)
        samples = []
        for network in (model, fast):
            torch.manual_seed(0)
            how = dict(clip_denoised=False, model_kwargs=dict(y=y, cfg_scale=scale), device=device)
            out = diffusion.p_sample_loop(network.forward_with_cfg, z.shape, z, **how)
            samples.append(out.double())
        assert samples[0].norm() > 0
        assert error(samples[1], samples[0].cpu()) < BOUNDS.get(tier, 1e-5)


CANNOT = {  # a name in the error → call
    "to('meta')": lambda fast, x, t, y: fast.to("meta"),
    "to(torch.float16)": lambda fast, x, t, y: fast.to(torch.float16),
    "(4, 3, 8, 8)": lambda fast, x, t, y: fast(x[:, :3], t, y),
    "(2N, 4, 8, 8)": lambda fast, x, t, y: fast.forward_with_cfg(x[:3], t, y, 4),
    "t is int": lambda fast, x, t, y: fast(x, 9, y),
    "x is torch.int64": lambda fast, x, t, y: fast(x.long(), t, y),
    "mask": lambda fast, x, t, y: fast(x, t, y, mask=torch.ones(4)),
    "t is (2,)": lambda fast, x, t, y: fast(x, t[:2], y),
    "y is 6 to 9": lambda fast, x, t, y: fast(x, t, y + 1),
    "y is on meta": lambda fast, x, t, y: fast(x, t, y.to("meta")),
    "null": lambda fast, *given: accelerate(small(class_dropout_prob=0)).forward_with_cfg(
        *given, 4.0
    ),
    "device nonsense": lambda *_: accelerate(small(), device="nonsense"),
    "pickled": lambda fast, *_: pickle.dumps(fast),
    "pos_embed": lambda fast, *_: fast.load_state_dict({}),
    "strict=False": lambda fast, *_: fast.load_state_dict({}, strict=False),
    "weight is torch.int64": lambda fast, *_: fast.load_state_dict(small().state_dict() | WHOLE),
    "(10, 144)": lambda fast, *_: fast.load_state_dict(small(num_classes=9).state_dict()),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_it_cannot_do_is_one_line(name):
    """And changes nothing."""
    model = small()
    fast = accelerate(model)
    x, t, y = inputs(model, 4)
    with mistake("", name):
        CANNOT[name](fast, x, t, y)
    with torch.no_grad():
        assert torch.equal(fast(x, t, y), model(x, t, y))


@pytest.mark.parametrize(
    "how", [dict(precision="fp16"), dict(guidance_channels=3.0), dict(guidance_channels=5)]
)
def test_an_argument_that_it_cannot_take_is_named(how):
    with mistake(*how, str(*how.values())):
        accelerate(small(), **how)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@DEVICES
def test_wrapped_models_are_unwrapped(device, group):
    model = small().to(device)
    x, t, y = inputs(model, 4, device)
    with torch.no_grad():
        want = model(x, t, y)
    parallel = nn.parallel.DistributedDataParallel(model)
    wrapped = [parallel, *map(torch.compile, (model, parallel)), AveragedModel(model)]
    if device == "cuda" or not torch.cuda.is_available():  # it takes GPUs where there are any
        wrapped.append(nn.DataParallel(model))
    for each in wrapped:
        assert torch.allclose(accelerate(each, "fp32")(x, t, y), want, atol=1e-5)


MULTI_QUERY = dict(qk_norm=True, n_kv_heads=1, ffn_dim_multiplier=1.3, multiple_of=32)
SHAPES = {
    "S/8": lambda: build("DiT-S/8", input_size=32, depth=2, num_classes=10, learn_sigma=False),
    "custom": lambda: small(
        hidden_size=60, num_heads=5, mlp_ratio=3.0, in_channels=8, patch_size=4
    ),
    "Large-DiT": lambda: build_large(learn_sigma=False, **MULTI_QUERY),
    "no null class": lambda: small(class_dropout_prob=0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_the_callers_own(name):
    model = SHAPES[name]()
    side = getattr(model, "input_size", None) or model.x_embedder.img_size[0]
    x = torch.randn(4, model.in_channels, side, side)
    t = torch.tensor([0, 5, 500, 999])
    y = torch.tensor([7, 0, 1, 2])
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double(), t, y)
    assert error(accelerate(model)(x, t, y), want) < 1e-5


@ON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_module_takes_inputs_of_its_own_dtype(dtype, tier, device):
    model = small().to(device, dtype)
    if not supports(tier, torch.device(device)):
        pytest.skip(f"this GPU has no {tier}")
    fast = accelerate(model, tier)
    x, t, y = inputs(model, 4, device)
    x = x.to(dtype)
    with torch.no_grad():
        guided = copy.deepcopy(model).double().forward_with_cfg(x.double(), t, y, 3.0)
    bound = max(BOUNDS.get(tier, 1e-5), torch.finfo(dtype).eps)
    got = fast.forward_with_cfg(x, t, y, 3.0)
    assert got.dtype == fast(x, t, y).dtype == dtype
    assert error(got, guided.cpu()) < 3 * bound


def test_gradients_are_refused_and_sampling_goes_on():
    """Reconstruction guidance differentiates p_mean_variance: without the network's part the
    gradient would be wrong in silence.
    """
    model = small()
    fast = accelerate(model)
    x, t, y = inputs(model, 4)
    given = x.clone().requires_grad_()
    scale = torch.tensor(3.0, requires_grad=True)
    mean = partial(create_diffusion("5").p_mean_variance, fast, clip_denoised=False)
    calls = [
        lambda: fast.forward_with_cfg(x, t, y, scale),
        lambda: mean(given, t % 5, model_kwargs=dict(y=y)),
        lambda: fast(forward_ad.make_dual(x, x), t, y),
        lambda: accelerate(transformer())(given, t, y),
    ]
    for call in calls:
        with forward_ad.dual_level(), mistake("", "gradients"):
            call()
    with torch.no_grad():
        assert torch.equal(fast(given, t, y), fast(given.detach(), t, y))


# ---- modules that compute another function ----


class NoNull(DiT):
    """Embed the null class as zero, whatever its row of the table holds."""

    def __init__(self, **shape):
        super().__init__(**shape)
        embed = self.y_embedder.forward
        known = shape["num_classes"]
        self.y_embedder.forward = lambda y, train: embed(y, train) * (y < known)[:, None]


class Halved(DiT):
    """The half of the channels that learned sigma takes is dropped."""

    def forward(self, x, t, y):
        return super().forward(x, t, y).chunk(2, dim=1)[0]


class Raises(DiT):
    def forward(self, x, t, y):
        raise RuntimeError("of the caller")


def hooked(model):
    model.register_forward_hook(lambda part, inputs, output: 1.3 * output)
    return model


OTHER_FUNCTIONS = {
    "hook of a wrapper": lambda: hooked(AveragedModel(small())),
    "hook": lambda: hooked(small()),
    "the null class": lambda: small(NoNull),
    "eps of norms": lambda: build_large(norm_eps=1e-2),
}


@pytest.mark.parametrize("make", OTHER_FUNCTIONS.values(), ids=OTHER_FUNCTIONS)
def test_a_module_of_another_function_is_refused(make):
    """Wrappers, hooks: the copy would not run them. A Sampler's: test_api.py."""
    with mistake("", "check=False"):
        accelerate(make())


def test_a_model_of_no_classes_has_its_one_label():
    model = small(num_classes=0)
    x, t, _ = inputs(small(), 2)
    y = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(accelerate(model)(x, t, y), model(x, t, y))
    with mistake("cfg_scale", "null"):
        Sampler(model, **LATENT)
    with Sampler(model, cfg_scale=1, **LATENT) as sampler:
        assert torch.allclose(sampler.latents(0), upstream(model, (0,), 0, 3, 1), atol=1e-4)


def without_labels():
    model = small()
    model.y_embedder = nn.Identity()
    return model


OTHERS = {  # a name in the error → module
    "(2, 4, 8, 8)": lambda: small(Halved),
    "RuntimeError: of the caller": lambda: small(Raises),
    "norm_eps": lambda: transformer(norm_eps=0.1),
    "to_q.bias": lambda: transformer(attention_bias=False),
    "no y_embedder.embedding_table.weight": without_labels,
    "no values": lambda: small().to("meta"),
    "blocks.0.attn.qkv.weight": lambda: nn.Linear(2, 2),
    "torch.nn.Module": lambda: "DiT-XL/2",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_network_is_refused(name):
    with mistake("", name):
        accelerate(OTHERS[name]())


def test_of_a_module_that_returns_zeros_nothing_is_compared(capsys):
    x, t, y = inputs(small(), 2)
    assert not accelerate(networks.Otherwise(**SMALL))(x, t, y).any()
    assert "Otherwise: returns zeros" in capsys.readouterr().out


@DEVICES
def test_the_module_stays_as_it_is(device):
    """Mode of every part, gradients, weights, random state."""
    model = small().to(device).train()
    model.blocks[1].eval()
    model.blocks[0].mlp.fc1.weight.grad = torch.ones_like(model.blocks[0].mlp.fc1.weight)
    before = copy.deepcopy(model.state_dict())
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() * (device == "cuda"))]
    accelerate(model)
    assert model.training and not model.blocks[1].training and model.blocks[0].mlp.training
    assert model.blocks[0].mlp.fc1.weight.grad.min() == 1
    assert model.blocks[1].mlp.fc1.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        value.requires_grad == (name != "pos_embed") for name, value in model.named_parameters()
    )
    after = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() * (device == "cuda"))]
    assert all(map(torch.equal, after, states))


# ---- guidance ----


class Rescaled(DiT):
    def forward_with_cfg(self, x, t, y, cfg_scale):
        return super().forward_with_cfg(x, t, y, 1 + (cfg_scale - 1) * (1 - t[0] / 1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_guides_all_channels(dtype):
    """Refused with the remedy, which works."""
    model = small(networks.FourChannels).to(dtype)
    for call in (accelerate, partial(Sampler, **LATENT)):
        with mistake("", "guidance_channels=4"):
            call(model)
    x, t, y = inputs(model, 4)
    fast = accelerate(model, guidance_channels=4)
    with torch.no_grad():
        want = copy.deepcopy(model).double().forward_with_cfg(x.double(), t, y, 4.0)
    assert error(fast.forward_with_cfg(x, t, y, 4.0), want) < 1e-5
    with Sampler(model, guidance_channels=4, **LATENT) as sampler:
        got = sampler.latents([1, 5])
    assert torch.allclose(got, upstream(copy.deepcopy(model).float(), (1, 5), 0, 3), atol=1e-4)


def test_a_module_that_guides_otherwise_is_refused():
    model = small(Rescaled)
    for given in ({}, dict(guidance_channels=4)):
        with mistake("", "check=False"):
            accelerate(model, **given)
    x, t, y = inputs(model, 4)
    with torch.no_grad():
        want = DiT.forward_with_cfg(model, x, t, y, 4.0)
    got = accelerate(model, check=False).forward_with_cfg(x, t, y, 4.0)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.gpu
def test_weights_that_overflow_are_refused():
    with mistake("precision", "fp16"):
        accelerate(large_inside(small()), "fp16", "cuda")
    fast = accelerate(small(), "fp16", "cuda")
    other = large_inside(small())
    x, t, y = inputs(other, 2, "cuda")
    want = fast(x, t, y)
    with mistake("precision", "fp16"):
        fast.load_state_dict(other.state_dict())
    assert torch.equal(fast(x, t, y), want)  # the weights that it had


@ON
def test_weights_are_renewed_in_place(tier, device):
    """To the bit as a copy made afresh."""
    if not supports(tier, torch.device(device)):
        pytest.skip(f"this GPU has no {tier}")
    model = build_large(qk_norm=True).to(device) if tier != "exact" else small().to(device)
    fast = accelerate(model, tier)
    x, t, y = inputs(model, 4, device)
    before = fast(x, t, y)
    fast.forward_with_cfg(x, t, y, 2.0)
    ema = fill(copy.deepcopy(model), seed=5)
    fast.load_state_dict(ema.state_dict())
    new = accelerate(ema, tier)
    got = fast(x, t, y)
    assert torch.equal(got, new(x, t, y)) and not torch.equal(got, before)
    guided = fast.forward_with_cfg(x, t, y, 2.0)
    assert torch.equal(guided, new.forward_with_cfg(x, t, y, 2.0))
    loaded = fast.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in ema.state_dict().items())
    for value in ema.parameters():
        value.data.zero_()
    assert torch.equal(fast(x, t, y), got)  # copied


@ON
def test_a_deep_copy_has_weights_of_its_own(tier, device):
    if not supports(tier, torch.device(device)):
        pytest.skip(f"this GPU has no {tier}")
    model = small().to(device)
    fast = accelerate(model, tier)
    x, t, y = inputs(model, 4, device)
    want = fast(x, t, y)
    other = copy.deepcopy(fast)
    assert torch.equal(other(x, t, y), want)
    other.load_state_dict(fill(small(), seed=5).state_dict())
    assert torch.equal(fast(x, t, y), want) and not torch.equal(other(x, t, y), want)


def test_a_state_dict_of_a_model_that_is_gone():
    fast = accelerate(small())
    with mistake("", "state dict"):
        fast.state_dict()
    state = small(num_classes=8).state_dict()
    fast.load_state_dict(state)
    assert fast.state_dict().keys() == state.keys()


@DEVICES
def test_the_callers_modes_change_nothing(device):
    """The default dtype: test_api.py."""
    model = small().to(device)
    x, t, y = inputs(model, 4, device)
    fast = accelerate(model)
    want = fast(x, t, y)
    with torch.autocast(device, torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        for each in (fast, accelerate(model)):
            got = each(x, t, y)
            assert torch.equal(got, want) and not got.is_inference()


@pytest.mark.gpu
def test_device_0_is_the_first_gpu():
    """Not the device of the model, which lies on a CPU."""
    assert accelerate(small(), device=0).device == torch.device("cuda:0")
    with Sampler(small(), output_type="latent", device=0) as sampler:
        assert sampler.run.device == torch.device("cuda:0")


class AsPublished(DiT_Llama):
    """Large-DiT's original class has no n_heads: its attention has head_dim."""

    def __init__(self, **shape):
        super().__init__(**shape)
        del self.n_heads

    def rotation(self, x, tokens):
        length = (self.input_size // self.patch_size) ** 2
        head_dim = self.layers[0].attention.head_dim
        return rotation_table(head_dim, length, x.dtype, x.device)[tokens]


def test_a_large_dit_as_published():
    model = fill(
        AsPublished(input_size=8, dim=96, n_layers=2, n_heads=3, num_classes=8, qk_norm=True)
    )
    x, t, y = inputs(model, 4)
    with torch.no_grad():
        assert torch.allclose(accelerate(model)(x, t, y), model(x, t, y), atol=1e-5)


@DEVICES
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_in_the_pipeline_of_diffusers(device, guidance, tiny_vae):
    """The pipeline's own pictures, but for rounding: another embedding of t and guidance
    on four channels are its.
    """
    pipe = pipeline(tiny_vae).to(device)
    pipe.set_progress_bar_config(disable=True)

    def pictures():
        how = dict(guidance_scale=guidance, num_inference_steps=5, output_type="np")
        return pipe(class_labels=[3, 7], generator=torch.Generator().manual_seed(0), **how).images

    with preserve_switches():
        # torch's default, which moves the pipeline's own pictures by 6e-4
        torch.backends.cudnn.allow_tf32 = False
        want = pictures()
        pipe.transformer = accelerate(pipe.transformer, "fp32")
        got = pictures()
    assert want.std() > 1e-3 and abs(got - want).max() < 1e-3
    pipe.transformer.load_state_dict(transformer(seed=1).state_dict())
    assert abs(pictures() - want).max() > 1e-3
