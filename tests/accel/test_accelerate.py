"""accelerate() where callers expect a module: wrapped models, .eval(), .to(), .parameters(), .state_dict()."""

import pytest
import torch
import torch.distributed as dist
from conftest import fill
from torch import nn

from accel import accelerate
from accel.precision import TIERS
from diffusion import create_diffusion
from models import DiT

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def small():
    return fill(DiT(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=8))


def inputs(n=4, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(n, 4, 8, 8, generator=generator), torch.randint(0, 1000, (n,), generator=generator)
    return x.to(device), t.to(device), (torch.arange(n) % 8).to(device)


def test_it_is_used_as_a_module_is():
    model = small()
    fast = accelerate(model).to("cpu").eval()
    first = next(fast.parameters())
    assert first.device == torch.device("cpu") and first.dtype == torch.float32 and fast.in_channels == 4
    # What it computes with is what it was made from, but for the positions, which take the patches' bias in.
    count = sum(value.numel() for value in model.parameters()) - model.x_embedder.proj.bias.numel()
    assert sum(value.numel() for value in fast.parameters()) == count
    assert fast.state_dict().keys() == model.state_dict().keys()
    copied = small()
    copied.load_state_dict(fast.state_dict())
    x, t, y = inputs()
    with torch.no_grad():
        assert torch.equal(copied(x, t, y), model(x, t, y))


def test_what_it_cannot_do_is_one_line():
    fast = accelerate(small())
    with pytest.raises(
        ValueError, match=r"to\('meta'\): the weights are on cpu; use accelerate\(model, device='meta'\)"
    ):
        fast.to("meta")
    with pytest.raises(ValueError, match="the model that was accelerated is gone; keep it"):
        fast.state_dict()


@pytest.mark.parametrize("precision", ["fp16", "exact"])
def test_parameters_of_the_half_tiers(precision):
    assert all(value.numel() for value in accelerate(small(), precision).parameters())


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapped_models_are_unwrapped(group):
    model, (x, t, y) = small(), inputs()
    with torch.no_grad():
        want = model(x, t, y)
    parallel = nn.parallel.DistributedDataParallel(model)
    for wrapped in (model, nn.DataParallel(model), parallel, torch.compile(model), torch.compile(parallel)):
        assert torch.allclose(accelerate(wrapped, "fp32")(x, t, y), want, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_float32_tiers_set_tf32_for_themselves(device):
    """Whatever the caller's switch is, and it stays as it is. On a CPU TF32 is a permission without effect."""
    model = small().to(device)
    x, t, y = inputs(device=device)
    outputs = {}
    for switch in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = switch
        try:
            for tier in ("fp32", "tf32"):
                fast = accelerate(model, tier)
                outputs[tier, switch] = fast(x, t, y), fast.forward_with_cfg(x, t, y, 4.0)
                assert torch.backends.cuda.matmul.allow_tf32 == switch
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    for tier in ("fp32", "tf32"):
        assert all(map(torch.equal, outputs[tier, False], outputs[tier, True]))
    changes = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    assert torch.equal(outputs["fp32", False][0], outputs["tf32", False][0]) is not changes


@pytest.mark.parametrize("precision", TIERS)
def test_every_tier_samples_in_the_callers_loop(precision):
    model, diffusion = small(), create_diffusion("5")
    z, y = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 8])
    how = dict(clip_denoised=False, model_kwargs=dict(y=y, cfg_scale=4.0))
    samples = []
    for network in (model, accelerate(model, precision)):
        torch.manual_seed(0)
        with torch.no_grad():
            samples.append(diffusion.p_sample_loop(network.forward_with_cfg, z.shape, torch.cat([z[:1], z[:1]]), **how))
    want, got = samples
    assert want.norm() > 0 and (got - want).norm() / want.norm() < {"fp16": 3e-3, "bf16": 3e-2}.get(precision, 1e-5)
