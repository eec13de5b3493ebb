"""Large-DiT's weights and how they are opened, and the network behind the protocol."""

import argparse
import os

import torch
from conftest import fill, mistake
from networks import opened
from safetensors.torch import save_file

from accel.config.options import Options
from accel.families import constructor_of
from accel.pipeline import Pipeline

DEMO = "Large-DiT-Demo/2"


def load(ckpt, **more):
    options = Options(model=DEMO, ckpt=ckpt, device="cpu", output_type="latent", **more)
    return Pipeline.load(opened(options)).network


def demo(**form):
    return fill(constructor_of(DEMO)(**form))


def weights(folder, model, name="consolidated_ema.00-of-01.pth"):
    torch.save(model.state_dict(), folder / name)


def arguments(folder, **more):
    known = {
        "model": "DiT_Llama_Demo_patch2",
        "image_size": 128,
        "num_classes": 8,
        "vae": "ema",
        **more,
    }
    torch.save(argparse.Namespace(**known), folder / "model_args.pth")


def test_a_file_and_a_folder_give_the_networks_values(tmp_path, capsys):
    model = demo()
    weights(tmp_path, demo(), "consolidated.00-of-01.pth")
    save_file(model.state_dict(), tmp_path / "file.safetensors")
    x = torch.randn(2, 4, 16, 16)
    t = torch.tensor([7, 900])
    y = torch.tensor([3, 8])
    with torch.no_grad():
        want = model(x, t, y)
    for name in (tmp_path, tmp_path / "file.safetensors"):
        assert torch.equal(load(name).forward(x, t, y), want)
    other = fill(constructor_of(DEMO)(), seed=1)
    weights(tmp_path, other)  # the moving average goes before the weights
    arguments(tmp_path, qk_norm=True)
    with torch.no_grad():
        assert torch.equal(load(tmp_path).forward(x, t, y), other(x, t, y))
    assert "trained" not in capsys.readouterr().out  # nothing is said of a run that fits
    load(tmp_path, image_size=256, vae="mse")
    assert "weights trained at 128 px, sampling at 256 px" in capsys.readouterr().out


def test_qk_norm_follows_from_the_keys(tmp_path):
    weights(tmp_path, demo(qk_norm=False))
    assert not load(tmp_path).model.layers[0].attention.q_norm.state_dict()
    arguments(tmp_path, qk_norm=True)
    with mistake("ckpt", "model_args.pth", "qk_norm"):
        load(tmp_path)
    weights(tmp_path, demo())
    assert load(tmp_path).model.layers[0].attention.q_norm.state_dict()
    arguments(tmp_path, qk_norm=False)
    with mistake("ckpt", "model_args.pth", "qk_norm"):
        load(tmp_path)


def test_arguments_are_never_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    weights(tmp_path, demo())
    torch.save(argparse.Namespace(model=Evil()), tmp_path / "model_args.pth")
    with mistake("ckpt", "model_args.pth", "mkdir"):
        load(tmp_path)
    torch.save([1], tmp_path / "model_args.pth")
    with mistake("ckpt", "model_args.pth", "list"):
        load(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_folders_that_cannot_be_used_are_one_line(tmp_path):
    arguments(tmp_path)
    weights(tmp_path, demo(), "consolidated_ema.00-of-02.pth")
    words = "consolidated_ema.00-of-01.pth", "consolidated.00-of-01.pth", "join parts"
    with mistake("ckpt", *words):
        load(tmp_path)
