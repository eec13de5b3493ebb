"""accelerate() where callers expect a module: in their loops, wrapped, refused where it
is another network, renewed.
"""

import copy
import pickle
import re
from functools import partial

import networks
import pytest
import torch
import torch.distributed as dist
from conftest import fill
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
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel

from accel import Sampler, accelerate
from accel.errors import UsageError
from accel.families.large_dit.network import DiT_Llama, rotation_table
from accel.runtime.precision import TIERS, preserve_switches, supports
from diffusion import create_diffusion
from models import DiT

WHOLE = {"final_layer.linear.weight": torch.ones(32, 144, dtype=torch.int64)}
BOUNDS = {"fp16": 3e-3, "bf16": 3e-2, "tf32": 1e-2}  # of relative errors, of other tiers 1e-5
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
    copied = small()
    copied.load_state_dict(fast.state_dict())
    x, t, y = inputs(model, 4)
    with torch.no_grad():  # fp32 is the reference network
        assert torch.equal(copied(x, t, y), want := model(x, t, y)) and torch.equal(
            fast.forward(y=y, x=x, t=t), want
        )
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
            how = dict(
                clip_denoised=False,
                model_kwargs=dict(y=y, cfg_scale=scale),
                progress=False,
                device=device,
            )
            samples.append(
                diffusion.p_sample_loop(network.forward_with_cfg, z.shape, z, **how).double()
            )
        assert samples[0].norm() > 0
        assert error(samples[1], samples[0].cpu()) < BOUNDS.get(tier, 1e-5)


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda fast, x, t, y: fast.to("meta"),
            r"to\('meta'\): the weights are on cpu; use accelerate\(model, dev",
        ),
        (lambda fast, x, t, y: fast.to(torch.float16), "the precision is fp32; use accelerate"),
        (
            lambda fast, x, t, y: fast(x[:, :3], t, y),
            r"x is \(4, 3, 8, 8\), must be \(N, 4, 8, 8\)",
        ),
        (
            lambda fast, x, t, y: fast.forward_with_cfg(x[:3], t, y, 4),
            r"x is \(3, 4, 8, 8\), must be \(2N, 4, 8, 8\)",
        ),
        (lambda fast, x, t, y: fast(x, 9, y), "t is int, must be a tensor"),
        (
            lambda fast, x, t, y: fast(x.long(), t, y),
            "x is torch.int64, must be a tensor of floats",
        ),
        (
            lambda fast, x, t, y: fast(x, t, y, mask=torch.ones(4)),
            "forward: mask must be None, .*; call the model itself",
        ),
        (lambda fast, x, t, y: fast(x, t, y, None, x), "forward: argument 5 must be None"),
        (lambda fast, x, t, y: fast(x, t[:2], y), r"t is \(2,\), must be \(4,\)"),
        (lambda fast, x, t, y: fast(x, t, y + 1), "y is 6 to 9, must be from 0 to 8"),
        (lambda fast, x, t, y: fast(x, t, -y), "y is -8 to -5, must be from 0 to 8"),
        (lambda fast, x, t, y: fast(x, t, y.to("meta")), "y is on meta, the weights are on cpu"),
        (
            lambda fast, x, t, y: accelerate(small(class_dropout_prob=0)).forward_with_cfg(
                x, t, y, 4.0
            ),
            "no null class .label dropout., no guidance; use forward",
        ),
        (
            lambda fast, *_: accelerate(small(), "fp16"),
            "precision=fp16: cpu has no .*; choose fp32",
        ),
        (lambda fast, *_: accelerate(small(), device="nonsense"), "device nonsense"),
        (lambda fast, *_: pickle.dumps(fast), "cannot be pickled; save the model's state dict"),
        (
            lambda fast, *_: accelerate(small(), guidance_channels=3.0),
            "guidance_channels=3.0: must be a whole number",
        ),
        (
            lambda fast, x, t, y: fast.load_state_dict({}),
            "load_state_dict: is not a DiT: no pos_embed .* differ",
        ),
        (lambda fast, x, t, y: fast.load_state_dict({}, strict=False), "all weights are needed"),
        (
            lambda fast, x, t, y: fast.load_state_dict([]),
            "maps names to tensors, and this is a list",
        ),
        (
            lambda fast, x, t, y: fast.load_state_dict(small().state_dict() | WHOLE),
            "final_layer.linear.weight is torch.int64; weights are tensors of floats",
        ),
        (
            lambda fast, x, t, y: accelerate(small(), guidance_channels=0),
            "guidance_channels=0: must be from 1 to",
        ),
        (
            lambda fast, x, t, y: accelerate(small(), guidance_channels=5),
            "guidance_channels=5: must be from 1 to 4",
        ),
        (
            lambda fast, x, t, y: fast.load_state_dict(small(num_classes=9).state_dict()),
            r"embedding_table.weight is \(10, 144\), must be \(9, 144\)",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(call, words):
    """And changes nothing."""
    model = small()
    fast = accelerate(model)
    (x, t, y) = inputs(model, 4)
    with pytest.raises(UsageError, match=words) as caught:
        call(fast, x, t, y)
    assert "\n" not in str(caught.value) and torch.equal(fast(x, t, y), accelerate(model)(x, t, y))


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
    wrapped = [model, parallel, *map(torch.compile, (model, parallel))]
    wrapped += Transparent(model), AveragedModel(model)
    if device == "cuda" or not torch.cuda.is_available():  # it takes GPUs where there are any
        wrapped.append(nn.DataParallel(model))
    for each in wrapped:
        assert torch.allclose(accelerate(each, "fp32")(x, t, y), want, atol=1e-5)


@pytest.mark.gpu
def test_fp32_sets_tf32_for_itself(switches):
    model = small().cuda()
    fast = accelerate(model, "fp32")
    (x, t, y) = inputs(model, 4, "cuda")
    want = fast(x, t, y)
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.equal(fast(x, t, y), want) and switches()[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("DiT-S/8", input_size=32, depth=2, num_classes=10, learn_sigma=False),
        lambda: small(hidden_size=60, num_heads=5, mlp_ratio=3.0, in_channels=8, patch_size=4),
        lambda: build_large(
            qk_norm=True, n_kv_heads=1, ffn_dim_multiplier=1.3, multiple_of=32, learn_sigma=False
        ),
        lambda: small().double(),
        lambda: small().half(),
        lambda: small().bfloat16(),
        lambda: small(class_dropout_prob=0),
    ],
    ids=[
        "S/8 without sigma",
        "custom",
        "Large-DiT",
        "float64",
        "float16",
        "bfloat16",
        "no null class",
    ],
)
def test_shapes_of_the_callers_own(make):
    model = make()
    fast = accelerate(model)
    side = getattr(model, "input_size", None) or model.x_embedder.img_size[0]
    x = torch.randn(4, model.in_channels, side, side)
    t = torch.tensor([0, 5, 500, 999])
    y = torch.tensor([7, 0, 1, 2])
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double(), t, y)
    assert fast(x, t, y).shape == want.shape and error(fast(x, t, y), want) < 1e-5


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
        want = copy.deepcopy(model).double()(x.double(), t, y)
        guided = copy.deepcopy(model).double().forward_with_cfg(x.double(), t, y, 3.0)
        assert fast(x, t, y).dtype == model(x, t, y).dtype == dtype
    bound = max(BOUNDS.get(tier, 1e-5), torch.finfo(dtype).eps)
    assert error(fast(x, t, y), want.cpu()) < bound
    assert error(fast.forward_with_cfg(x, t, y, 3.0), guided.cpu()) < 3 * bound


def test_gradients_are_refused_and_sampling_goes_on():
    """Reconstruction guidance differentiates p_mean_variance: without the network's part the
    gradient would be wrong in silence.
    """
    model = small()
    fast = accelerate(model)
    x, t, y = inputs(model, 4)
    given = x.clone().requires_grad_()
    scale = torch.tensor(3.0, requires_grad=True)
    calls = [
        lambda: fast(given, t, y),
        lambda: fast.forward_with_cfg(given, t, y, 3.0),
        lambda: fast.forward_with_cfg(x, t, y, scale),
        lambda: create_diffusion("5").p_mean_variance(
            fast, given, t % 5, clip_denoised=False, model_kwargs=dict(y=y)
        ),
        lambda: fast(forward_ad.make_dual(x, x), t, y),
        lambda: accelerate(transformer())(given, t, y),
    ]
    words = "gradients: .* call the model itself for gradients"
    for call in calls:
        with forward_ad.dual_level(), pytest.raises(UsageError, match=words):
            call()
    want = fast(x, t, y)
    with torch.no_grad():
        assert torch.equal(fast(given, t, y), want)
    assert torch.equal(fast(given.detach(), t, y), want)


class Times(nn.DataParallel):
    def forward(self, *inputs):
        return 1.3 * self.module(*inputs)


class TimesCalled(nn.DataParallel):
    def __call__(self, *inputs):
        return 1.3 * self.module(*inputs)


class Transparent(AveragedModel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def replaced(wrap):
    """Return a wrapped model with a forward that the caller wrote."""
    wrapper = wrap(small())
    forward = wrapper.forward
    wrapper.forward = lambda *inputs: 1.3 * forward(*inputs)
    return wrapper


class NoNull(DiT):
    """Embed the null class as zero, whatever its row of the table holds."""

    def __init__(self, **shape):
        super().__init__(**shape)
        embed = self.y_embedder.forward
        known = shape["num_classes"]
        self.y_embedder.forward = lambda y, train: embed(y, train) * (y < known)[:, None]


class Called(DiT):
    def __call__(self, x, t, y):
        return super().__call__(1.3 * x, t, y)


def hooked(name="", pre=False, wrapped=False):
    """Return a model with a hook on a part of it, or on a wrapper around it."""
    model = small()
    part = AveragedModel(model) if wrapped else model.get_submodule(name)
    if pre:
        part.register_forward_pre_hook(lambda part, inputs: (1.3 * inputs[0], *inputs[1:]))
    else:
        part.register_forward_hook(lambda part, inputs, output: 1.3 * output)
    return part if wrapped else model


def patched(name=""):
    model = small()
    part = model.get_submodule(name)
    forward = part.forward
    part.forward = lambda *inputs: 1.3 * forward(*inputs)
    return model


def halved_weight(register):
    model = small()
    register(model.blocks[0].mlp.fc1)
    return model


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


ALTERED_MODULES = {
    "hook": hooked,
    "pre-hook": lambda: hooked(pre=True),
    "hook of a part": lambda: hooked("blocks.1.attn"),
    "pre-hook of a part": lambda: hooked("x_embedder", pre=True),
    "hook of a wrapper": lambda: hooked(wrapped=True),
    "forward of an average": lambda: replaced(AveragedModel),
    "forward of torch.compile": lambda: replaced(torch.compile),
    "forward of a DataParallel's class": lambda: Times(small()),
    "__call__ of a DataParallel's class": lambda: TimesCalled(small()),
    "the null class": lambda: small(NoNull),
    "activation": lambda: changed(small(), "blocks.0.mlp", "act", nn.ReLU()),
    "eps of norms": lambda: build_large(norm_eps=1e-2),
    "__call__": lambda: small(Called),
    "forward": patched,
    "forward of a part": lambda: patched("blocks.0.mlp"),
}


@pytest.mark.parametrize("make", ALTERED_MODULES.values(), ids=ALTERED_MODULES)
def test_what_a_module_does_of_its_own_is_no_secret(make):
    """Wrappers, hooks, `__call__`, patches: the copy would not run them. A Sampler refuses them
    too, also in `refresh`.
    """
    words = "computes another function than a [^\n]* check=False skips this check$"
    with pytest.raises(UsageError, match=words):
        accelerate(make())
    with Sampler(small(), device="cpu", output_type="latent", num_sampling_steps=2) as sampler:
        before = sampler.latents(1)
        with pytest.raises(UsageError, match=f"{words}|guides in a way of its own|has family"):
            sampler.refresh(make())
        assert torch.equal(sampler.latents(1), before)


def test_a_hook_that_changes_nothing_is_no_hindrance():
    model = small()
    calls = []
    model.register_forward_hook(lambda part, inputs, output: calls.append(output.shape))
    x, t, y = inputs(model, 2)
    assert torch.equal(accelerate(model)(x, t, y), accelerate(small())(x, t, y))
    assert calls


@pytest.mark.parametrize("name", ["", "blocks.1", "wrapped", "decorated"])
def test_a_compiled_part_is_not_compiled_for_the_check(name):
    model = small()
    x, t, y = inputs(model, 2)
    want = accelerate(model)(x, t, y)
    compiled = []

    def backend(graph, examples):
        compiled.append(graph)
        return graph

    if name == "wrapped":
        model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
    elif name == "decorated":
        block = type(model.blocks[1])
        forward = torch.compile(block.forward, backend=backend)
        model.blocks[1].__class__ = type("Decorated", (block,), {"forward": forward})
    else:
        model.get_submodule(name).compile(backend=backend)
    fast = accelerate(model)
    fast.load_state_dict(model.state_dict())
    assert torch.equal(fast(x, t, y), want) and not compiled
    with torch.no_grad():
        assert torch.allclose(model(x, t, y), want, atol=1e-5) and compiled


def test_a_model_of_no_classes_has_its_one_label():
    model = small(num_classes=0)
    x, t, _ = inputs(small(), 2)
    y = torch.zeros(2, dtype=torch.int64)
    fast = accelerate(model)
    with torch.no_grad():
        assert torch.equal(fast(x, t, y), model(x, t, y))
    how = dict(device="cpu", output_type="latent", num_sampling_steps=3)
    with pytest.raises(UsageError, match="cfg_scale=4: guidance needs a null class"):
        Sampler(model, **how)
    with Sampler(model, cfg_scale=1, **how) as sampler:
        assert torch.allclose(sampler.latents(0), upstream(model, (0,), 0, 3, 1), atol=1e-4)


class Halved(DiT):
    """The half of the channels that learned sigma takes is dropped."""

    def forward(self, x, t, y):
        return super().forward(x, t, y).chunk(2, dim=1)[0]


def changed(model, name, attribute, value):
    setattr(model.get_submodule(name), attribute, value)
    return model


OTHERS = {
    "fewer channels": (
        lambda: small(Halved),
        r"returns \(2, 4, 8, 8\), and a DiT with these weights \(2, 8, 8, 8\)",
    ),
    "another function": (
        lambda: small(networks.Otherwise),
        "another function .* relative error .*, 3e-05 is allowed",
    ),
    "untrained": (lambda: networks.Otherwise(**SMALL), "another function .* relative error"),
    "a norm more": (
        lambda: changed(small(), "blocks.1.attn", "q_norm", nn.LayerNorm(72)),
        r"blocks.1.attn.q_norm.weight is not a weight of a DiT.*\(2 entries",
    ),
    "a weight less": (
        lambda: changed(small(), "final_layer.linear", "bias", None),
        "is not a DiT: no final_layer.linear.bias",
    ),
    "a config": (lambda: transformer(norm_eps=0.1), "DiTTransformer2DModel: norm_eps is 0.1"),
    "no biases": (
        lambda: transformer(attention_bias=False),
        "not a DiT in diffusers' layout .*to_q.bias",
    ),
    "no values": (lambda: small().to("meta"), "DiT: holds no values; load the weights first"),
    "parametrisation": (
        lambda: halved_weight(lambda part: register_parametrization(part, "weight", Twice())),
        "no blocks.0.mlp.fc1.weight",
    ),
    "weight norm": (lambda: halved_weight(weight_norm), "no blocks.0.mlp.fc1.weight"),
    "no DiT": (lambda: nn.Linear(2, 2), "Linear: is not a DiT: no blocks.0.attn.qkv.weight"),
    "no module": (lambda: "DiT-XL/2", "str: is not a DiT; give a torch.nn.Module"),
}


@pytest.mark.parametrize("make, words", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore")  # torch's, of weight_norm
def test_another_network_is_refused(make, words):
    with pytest.raises(UsageError, match=words) as caught:
        accelerate(make())
    assert "\n" not in str(caught.value)


def test_the_check_can_be_skipped():
    model = small(networks.Otherwise)
    x, t, y = inputs(model, 2)
    assert torch.equal(accelerate(model, check=False)(x, t, y), accelerate(small())(x, t, y))
    # its output is zero, so noise takes the place of weights that are
    untrained = accelerate(DiT(**SMALL))
    assert not untrained(x, t, y).any()


@DEVICES
def test_the_module_stays_as_it_is(device):
    """Mode of every part, gradients, weights, device, random state."""
    model = small().to(device).train()
    model.blocks[1].eval()
    model.blocks[0].mlp.fc1.weight.grad = torch.ones_like(model.blocks[0].mlp.fc1.weight)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if device == "cuda" else None
    accelerate(model)
    assert model.training and not model.blocks[1].training and model.blocks[0].mlp.training
    assert (
        model.blocks[0].mlp.fc1.weight.grad.min() == 1
        and model.blocks[1].mlp.fc1.weight.grad is None
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        value.requires_grad == (name != "pos_embed") for name, value in model.named_parameters()
    )
    assert torch.equal(torch.get_rng_state(), state) and (
        gpu is None or torch.equal(torch.cuda.get_rng_state(), gpu)
    )


@pytest.mark.gpu
def test_weights_that_overflow_are_refused():
    words = "precision=fp16: overflows on these weights; use precision="
    with pytest.raises(UsageError, match=words):
        accelerate(large_inside(small()), "fp16", "cuda")
    fast = accelerate(small(), "fp16", "cuda")
    other = large_inside(small())
    x, t, y = inputs(other, 2, "cuda")
    want = fast(x, t, y)
    with pytest.raises(UsageError, match=words):
        fast.load_state_dict(other.state_dict())
    assert torch.equal(fast(x, t, y), want)  # the weights that it had


@ON
def test_weights_are_renewed_in_place(tier, device):
    """To the bit as a copy made afresh; what was captured is replayed."""
    if not supports(tier, torch.device(device)):
        pytest.skip(f"this GPU has no {tier}")
    makes = [small, *[lambda **how: build_large(qk_norm=True, **how)] * (tier != "exact")]
    for make in makes:
        model = make().to(device)
        fast = accelerate(model, tier)
        (x, t, y) = inputs(model, 4, device)
        before = fast(x, t, y), fast.forward_with_cfg(x, t, y, 2.0)
        graphs = _graphs(fast)
        ema = fill(copy.deepcopy(model), seed=5)
        fast.load_state_dict(ema.state_dict())
        new = accelerate(ema, tier)
        got = fast(x, t, y), fast.forward_with_cfg(x, t, y, 2.0)
        assert torch.equal(got[0], new(x, t, y)) and torch.equal(
            got[1], new.forward_with_cfg(x, t, y, 2.0)
        )
        assert not torch.equal(got[0], before[0]) and _graphs(fast) == graphs
        assert len(graphs) == 2 * (device == "cuda" and TIERS[tier].accelerated)
        loaded = fast.state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in ema.state_dict().items())
        for value in ema.parameters():
            value.data.zero_()
        assert torch.equal(fast(x, t, y), got[0])  # copied


@ON
def test_a_deep_copy_has_weights_of_its_own(tier, device):
    if not supports(tier, torch.device(device)):
        pytest.skip(f"this GPU has no {tier}")
    for make in (small, transformer):
        model = make().to(device)
        fast = accelerate(model, tier)
        x, t, y = inputs(small(), 4, device)
        want = evaluated(fast, x, t, y)
        other = copy.deepcopy(fast)
        assert torch.equal(evaluated(other, x, t, y), want)
        new = fill(small(), seed=5) if make is small else transformer(seed=5)
        other.load_state_dict(new.state_dict())
        assert torch.equal(evaluated(fast, x, t, y), want)
        assert not torch.equal(evaluated(other, x, t, y), want)


def evaluated(fast, x, t, y):
    """Return the output for a model of this repository or of diffusers."""
    out = fast(x, t, y)
    return out if torch.is_tensor(out) else out.sample


def test_a_state_dict_of_a_model_that_is_gone():
    fast = accelerate(small())
    with pytest.raises(UsageError, match="is gone; keep it, or the state dict"):
        fast.state_dict()
    state = small(num_classes=8).state_dict()
    fast.load_state_dict(state)
    assert fast.state_dict().keys() == state.keys()


def _graphs(fast):
    return [id(graph) for graph in fast.network.graphs.values()]


@DEVICES
def test_the_callers_modes_change_nothing(device):
    model = small().to(device)
    fast = accelerate(model)
    (x, t, y) = inputs(model, 4, device)
    want = fast(x, t, y)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        for mode in (
            lambda: torch.autocast(device, torch.bfloat16),
            torch.inference_mode,
            torch.enable_grad,
        ):
            with mode():
                got = fast(x, t, y), accelerate(model)(x, t, y)
            assert all(torch.equal(one, want) and not one.is_inference() for one in got)
        assert torch.get_default_dtype() == torch.float64 and torch.empty(0).is_meta
    finally:
        torch.set_default_dtype(default)
        torch.set_default_device(None)


def test_device_0_is_the_first_gpu():
    """Not the device of the model, which lies on a CPU."""
    for make in (accelerate, partial(Sampler, output_type="latent")):
        try:
            made = make(small(), device=0)
        except UsageError as error:
            assert not torch.cuda.is_available() and re.match("device.*GPU", str(error))
        else:
            assert getattr(made, "run", made).device == torch.device("cuda:0")


class Rescaled(DiT):
    def forward_with_cfg(self, x, t, y, cfg_scale):
        return super().forward_with_cfg(x, t, y, 1 + (cfg_scale - 1) * (1 - t[0] / 1000))


def test_guidance_on_four_channels_is_recognised():
    model = small(networks.FourChannels)
    x, t, y = inputs(model, 4)
    with torch.no_grad():
        want = model.forward_with_cfg(x, t, y, 4.0)
        three = DiT.forward_with_cfg(model, x, t, y, 4.0)
    assert torch.allclose(accelerate(model).forward_with_cfg(x, t, y, 4.0), want, atol=1e-5)
    assert torch.allclose(
        accelerate(model, guidance_channels=3).forward_with_cfg(x, t, y, 4.0), three, atol=1e-5
    )
    # left open
    how = dict(
        device="cpu", output_type="latent", num_sampling_steps=4, ckpt=None, guidance_channels=None
    )
    with Sampler(model, **how) as sampler:
        assert sampler.run.settings.guidance_channels == 4
        assert torch.allclose(
            sampler.latents([1, 5]), upstream(model, (1, 5), 0, 4, 4.0), atol=1e-4
        )
    assert accelerate(model, guidance_channels=4).guidance_channels == 4
    untrained = networks.FourChannels(**SMALL)
    assert accelerate(untrained).guidance_channels == 4  # its own output is zero


def test_another_guidance_is_refused_and_forward_is_not():
    model = small(Rescaled)
    x, t, y = inputs(model, 4)
    fast = accelerate(model)
    with torch.no_grad():
        assert torch.allclose(fast(x, t, y), model(x, t, y), atol=1e-5)
    with pytest.raises(
        UsageError, match="that of Rescaled guides in a way of its own; call forward"
    ):
        fast.forward_with_cfg(x, t, y, 4.0)
    with pytest.raises(
        UsageError,
        match="Rescaled: its forward_with_cfg guides in a way of its own; call accelerate",
    ):
        Sampler(model, device="cpu", output_type="latent")
    with Sampler(model, device="cpu", output_type="latent", guidance_channels=3) as sampler:
        assert sampler.run.settings.guidance_channels == 3


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
