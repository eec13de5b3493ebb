"""What callers do with the reference network of every family: guide it, train it, give it
what does not fit.
"""

import copy

import pytest
import test_jit
import test_lightning_dit
import test_rae
import torch
from conftest import fill
from networks import inputs

from accel.families.blocks import RotaryTransformer
from accel.families.dit.network import DiT
from accel.families.large_dit.network import DiT_Llama
from accel.families.sit.network import SiT
from diffusion import create_diffusion

SMALL = {
    DiT: dict(input_size=8, hidden_size=144, depth=1, num_heads=2, num_classes=10),
    SiT: dict(input_size=8, hidden_size=144, depth=1, num_heads=2, num_classes=10),
    DiT_Llama: dict(input_size=8, dim=144, n_layers=1, n_heads=3, num_classes=10, qk_norm=True),
}
FAMILIES = pytest.mark.parametrize("family", SMALL)


@FAMILIES
def test_guidance_reads_one_half_and_guides_three_channels(family):
    model = fill(family(**SMALL[family]))
    x = torch.randn(6, 4, 8, 8)
    t = torch.tensor([0, 1, 1] * 2)
    y = torch.tensor([1, 2, 3, 10, 10, 10])
    out = model.forward_with_cfg(x, t, y, 4.0)
    plain = model(torch.cat([x[:3], x[:3]]), t, y)
    cond = plain[:3]
    uncond = plain[3:]
    want = uncond[:, :3] + 4.0 * (cond[:, :3] - uncond[:, :3])
    assert torch.equal(out[:3, :3], want) and torch.equal(out[3:, :3], want)
    assert torch.equal(out[:, 3:], plain[:, 3:])
    x[3:] = float("nan")
    assert torch.equal(model.forward_with_cfg(x, t, y, 4.0), out)


def replica_of(model):
    """Return a module as nn.DataParallel copies it to each GPU: weights as attributes alone."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, child and replicas[child])
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            setattr(replica, name, value if value is None else value.detach())
    return replicas[model]


ALL = pytest.mark.parametrize(
    "model, given",
    [
        *((fill(family(**arguments)), None) for family, arguments in SMALL.items()),
        (test_lightning_dit.build(), None),
        (test_jit.build(), test_jit.inputs()),
        (test_rae.build(), test_rae.inputs()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)


@ALL
def test_a_replica_of_data_parallel(model, given):
    replica = replica_of(model)
    assert not list(replica.parameters())
    given = given or inputs(model, 4)
    with torch.no_grad():
        assert torch.equal(replica(*given), model(*given))


@ALL
@torch.no_grad()
def test_replaced_parts_get_the_originals_arguments(model, given):
    """No attention equals a projection of zeros, an identity one block less."""
    given = given or inputs(model, 4)
    changed = copy.deepcopy(model)
    model = copy.deepcopy(model)
    rotary = isinstance(model, RotaryTransformer)
    name, last = ("attention", "wo") if isinstance(model, DiT_Llama) else ("attn", "proj")
    attention = changed.blocks[-1].get_submodule(name)
    attention.forward = (lambda x, rotation: 0 * x) if rotary else lambda x: 0 * x
    for value in model.blocks[-1].get_submodule(f"{name}.{last}").parameters():
        value.zero_()
    assert torch.equal(changed(*given), model(*given))
    block = changed.blocks[-1]
    block.forward = (lambda x, c, rotation: x) if rotary else lambda x, c: x
    del model.blocks[-1]
    assert torch.equal(changed(*given), model(*given))


@FAMILIES
def test_learns(family):
    """A few steps of the usual training loop, of a flow on pairs of noise and data, lower
    the loss: gradients pass the initial zeros, which make the network blind.
    """
    torch.manual_seed(0)
    model = family(**SMALL[family]).train()
    diffusion = create_diffusion("")
    x, noise, y = *torch.randn(2, 8, 4, 8, 8), torch.arange(8)
    assert not model(x, y, y).any()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        if family is SiT:
            t = torch.rand(8, 1, 1, 1)
            loss = (model(t * x + (1 - t) * noise, t.flatten(), y) - (x - noise)).square().mean()
        else:
            loss = diffusion.training_losses(model, x, torch.randint(0, 1000, (8,)), dict(y=y))[
                "loss"
            ].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@FAMILIES
def test_wrong_input_size_is_named(family):
    with pytest.raises(ValueError, match=r"\(6, 8\).*\(8, 8\)"):
        family(**SMALL[family])(
            torch.randn(1, 4, 6, 8), torch.zeros(1), torch.zeros(1, dtype=torch.long)
        )


@FAMILIES
def test_label_dropout_and_gradients(family):
    model = fill(family(**SMALL[family])).train()
    embed = model.y_embedder
    table = model.y_embedder.embedding_table.weight
    torch.manual_seed(0)
    assert (
        0.08 < (embed(torch.full((4000,), 3), train=True) == table[10]).all(1).float().mean() < 0.12
    )
    assert torch.equal(embed(torch.arange(4), train=False), table[:4])
    if family is not DiT_Llama:  # whose original has no such argument
        forced = embed.token_drop(torch.arange(4), force_drop_ids=torch.tensor([0, 1, 0, 1]))
        assert forced.tolist() == [0, 10, 2, 10]
    assert (
        len(family(**SMALL[family], class_dropout_prob=0.0).y_embedder.embedding_table.weight) == 10
    )
    model(
        torch.randn(4, 4, 8, 8), torch.tensor([3, 90, 400, 999]), torch.arange(4)
    ).square().mean().backward()
    without = [
        name for name, one in model.named_parameters() if one.requires_grad and not one.grad.any()
    ]
    assert without == []
