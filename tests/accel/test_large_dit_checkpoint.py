"""Large-DiT's weights and how they are opened, and the network behind the protocol."""

import argparse
import os

import pytest
import torch
from conftest import fill
from safetensors.torch import save_file

from accel import door
from accel.door import opening
from accel.errors import UsageError
from accel.families import constructor_of
from accel.families.large_dit.network import DiT_Llama
from accel.request import GridRequest

CPU = torch.device("cpu")
DEMO = "Large-DiT-Demo/2"


def options(ckpt, **more):
    given = dict(model=DEMO, ckpt=str(ckpt), vae="ema", labels=(1, 2), num_sampling_steps=2, device="cpu")
    return GridRequest(**{**given, **more})


def load(ckpt, **more):
    opened = opening.open_weights(options(ckpt, output_type="latent", **more), CPU)
    return door.load(opened).network


def demo(**form):
    return fill(constructor_of(DEMO)(**form))


@pytest.fixture
def folder(tmp_path):
    """A folder of a training run; `arguments` and `weights` fill it."""
    return tmp_path


def weights(folder, model, name="consolidated_ema.00-of-01.pth"):
    torch.save(model.state_dict(), folder / name)


def arguments(folder, **said):
    said = {"model": "DiT_Llama_Demo_patch2", "image_size": 128, "num_classes": 8, "vae": "ema", **said}
    torch.save(argparse.Namespace(**said), folder / "model_args.pth")


def test_a_file_and_a_folder_give_the_networks_values(folder, capsys):
    model = demo()
    weights(folder, demo(), "consolidated.00-of-01.pth")
    (folder / "again").mkdir()
    save_file(model.state_dict(), folder / "file.safetensors")
    x, t, y = torch.randn(2, 4, 16, 16), torch.tensor([7, 900]), torch.tensor([3, 8])
    with torch.no_grad():
        want = model(x, t, y)
    for name in (folder, folder / "file.safetensors"):
        assert torch.equal(load(name).forward(x, t, y), want)
    other = fill(constructor_of(DEMO)(), seed=1)
    weights(folder, other)  # the moving average goes before the weights
    arguments(folder, qk_norm=True)
    with torch.no_grad():
        assert torch.equal(load(folder).forward(x, t, y), other(x, t, y))
    assert "trained" not in capsys.readouterr().out  # nothing is said of a run that fits
    load(folder, image_size=256, vae="mse")
    said = capsys.readouterr().out
    assert "weights trained at 128 px, sampling at 256 px" in said


def test_qk_norm_follows_from_the_keys(folder):
    weights(folder, demo(qk_norm=False))
    assert not load(folder).model.layers[0].attention.q_norm.state_dict()
    arguments(folder, qk_norm=True)
    with pytest.raises(UsageError, match="ckpt=.*: model_args.pth says qk_norm, and the weights have none; .*remove"):
        load(folder)
    weights(folder, demo())
    assert load(folder).model.layers[0].attention.q_norm.state_dict()
    arguments(folder, qk_norm=False)
    with pytest.raises(UsageError, match="says no qk_norm, and the weights have it"):
        load(folder)


def test_arguments_are_never_executed(folder):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "owned"),)

    weights(folder, demo())
    torch.save(argparse.Namespace(model=Evil()), folder / "model_args.pth")
    with pytest.raises(UsageError, match="ckpt=.*model_args.pth: refused, loading it would run code"):
        load(folder)
    torch.save([1], folder / "model_args.pth")
    with pytest.raises(UsageError, match="holds a list, not the arguments of a training run"):
        load(folder)
    assert not (folder / "owned").exists()


def test_folders_that_cannot_be_used_are_one_line(folder):
    arguments(folder)
    with pytest.raises(UsageError, match="holds neither consolidated_ema.00-of-01.pth nor consolidated.00-of-01.pth"):
        load(folder)
    for rank in (0, 1):
        weights(folder, demo(), f"consolidated_ema.{rank:02d}-of-02.pth")
    with pytest.raises(UsageError, match=r"consolidated_ema.00-of-02.pth holds a part of each tensor, for 2 processes"):
        load(folder)


def test_an_unknown_number_of_heads_is_named(folder):
    weights(folder, fill(DiT_Llama(input_size=16, dim=96, n_layers=2, n_heads=2, num_classes=8)))
    with pytest.raises(UsageError, match="is a Large-DiT of 2 blocks of width 96, and no tensor says how many heads"):
        load(folder)
