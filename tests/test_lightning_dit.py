"""LightningDiT: its equations in float64, its tiers, which files and modules are its own,
shifted times.
"""

import networks
import pytest
import torch
from conftest import mistake
from networks import error, fast_network, inputs, recognise, with_norms
from reference_networks import lightning_dit
from torch import nn

from accel import Sampler, accelerate
from accel.families.blocks import grid_rotation_table
from accel.families.lightning_dit.network import LightningDiT

SMALL = dict(input_size=4, in_channels=32, hidden_size=144, depth=2, num_heads=2, num_classes=8)
FORMS = (
    {},
    {"qk_norm": True},
    {"patch_size": 2, "input_size": 8, "in_channels": 3, "learn_sigma": True, "mlp_ratio": 2.0},
)


def build(**form):
    model = with_norms(LightningDiT(**{**SMALL, **form}))
    model.final_layer.linear.weight.data.mul_(0.3)
    return model


def as_file(model):
    """The entries of a published file: those of the network, and its table of rotations."""
    head = model.blocks[0].attn.qkv.in_features // model.num_heads
    table = grid_rotation_table(
        head, model.x_embedder.grid_size[0], torch.float32, "cpu"
    ).repeat_interleave(2, 1)
    return {
        **model.state_dict(),
        **dict(zip(("feat_rope.freqs_cos", "feat_rope.freqs_sin"), table.unbind(-1))),
    }


def without_shifts(state):
    """The entries of a file whose modulation has four vectors."""
    for name in [name for name in state if name.startswith("blocks.") and "adaLN" in name]:
        state[name] = state[name].unflatten(0, (2, 3, -1))[:, 1:].flatten(0, 2)
    return state


def batch(model):
    x, t, y = inputs(model, 4)
    return x, t / 1000, y


@pytest.mark.parametrize("change", (lambda state: state, without_shifts))
def test_a_file_gives_the_network(change):
    model = build()
    state = change(as_file(model))
    x, t, y = batch(model)
    spec = recognise("x.pt", state, {})
    own = spec.empty()
    own.load_state_dict(spec.family.weights.convert(state), strict=True, assign=True)
    assert own.num_heads == 2 and type(own) is LightningDiT
    assert error(own.eval()(x, t, y).detach(), lightning_dit(state, x, t, y)) < 4e-6


def test_every_norm_has_the_originals_epsilon():
    """Which shows on activations not much larger than its root."""
    model = build()
    for value in (model.x_embedder.proj.weight, model.x_embedder.proj.bias, model.pos_embed):
        value.data.mul_(1e-3)
    x, t, y = batch(model)
    want = lightning_dit(as_file(model), x, t, y)
    assert error(model(x, t, y).detach(), want) < 4e-6
    assert error(fast_network(model, torch.float64).forward(x.double(), t, y), want) < 1e-6


def test_what_is_not_computed_is_named():
    state = as_file(build())
    for gone, lacking in (
        ("feat_rope", "feat_rope.freqs_cos"),
        ("norm1", "blocks.0.norm1.weight"),
        ("w12", "blocks.0.mlp.fc1.weight"),
    ):
        left = {name: value for name, value in state.items() if gone not in name}
        with mistake("ckpt", f"no {lacking}"):
            recognise("x.pt", left, {})
    with mistake("ckpt", "freqs_cos"):
        recognise(
            "x.pt", state | {"feat_rope.freqs_cos": state["feat_rope.freqs_cos"].roll(1, 0)}, {}
        )
    with mistake("ckpt", "q_norm.bias"):
        recognise(
            "x.pt",
            as_file(build(qk_norm=True)) | {"blocks.0.attn.q_norm.bias": torch.zeros(72)},
            {},
        )
    with mistake("ckpt", "SiT", "LightningDiT"):
        recognise("x.pt", state, {}, "SiT-XL/2")


class Original(networks.Original):
    """The original class as callers hold it: its own table of rotations and guidance."""

    def __init__(self, model):
        super().__init__(model)
        self.feat_rope = nn.Module()
        for name, value in as_file(model).items():
            if name.startswith("feat_rope."):
                self.feat_rope.register_buffer(name.removeprefix("feat_rope."), value)

    def forward(self, x, t=None, y=None):
        return lightning_dit(self.state_dict(), x, t, y).float()

    def forward_with_cfg(self, x, t, y, cfg_scale, cfg_interval=None, cfg_interval_start=None):
        cond, uncond = self(torch.cat([x[: len(x) // 2]] * 2), t, y).chunk(2)
        guides = not (cfg_interval is True and t[0] < cfg_interval_start)
        first = uncond + (cfg_scale if guides else 1) * (cond - uncond)
        return torch.cat([torch.cat([first[:, :3], one[:, 3:]], 1) for one in (cond, uncond)])


def test_the_class_here_and_the_original_class_are_accelerated():
    """The class here computes its rotations, the original keeps them."""
    ours = build(qk_norm=True)
    theirs = Original(ours)
    (x, t, y) = batch(ours)
    fast = accelerate(theirs, "fp32")
    assert torch.equal(accelerate(ours, "fp32")(x, t, y), fast(x, t, y))
    assert error(fast(x, t=t, y=y), theirs(x, t, y).double()) < 1e-5
    for start in (0.1, 0.5, 0.9):
        t = torch.full((4,), 0.5)
        got = fast.forward_with_cfg(
            x, t, y=y, cfg_scale=3.0, cfg_interval=True, cfg_interval_start=start
        )
        assert error(got, theirs.forward_with_cfg(x, t, y, 3.0, True, start).double()) < 1e-5
    with Sampler(theirs, device="cpu", output_type="latent", num_sampling_steps=2) as sampler:
        assert sampler.latents(3).shape == (1, 32, 4, 4) and sampler.run.settings.sampler == "euler"
