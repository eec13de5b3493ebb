"""`from accel import Sampler`: the pictures of sample.py, from Python."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from conftest import fill
from PIL import Image
from torch import nn

from accel import Sampler
from accel.errors import UsageError
from accel.network import KEPT
from accel.options import DEMO
from models import DiT, DiT_models

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])


def demo(device="cpu", **options):
    return Sampler("DiT-Demo/2", device=device, **{"num_sampling_steps": 4, **options})


def tiles(path, n, side=128):
    """The pictures of a grid, four a row."""
    grid = np.asarray(Image.open(path))
    if n == 1:
        return [grid]
    return [grid[(k := side + 2) * (i // 4) + 2 :, k * (i % 4) + 2 :][:side, :side] for i in range(n)]


@DEVICES
def test_pictures_are_those_of_the_command(device, here, tmp_path):
    """To the bit, again and again, with other labels, seeds, steps and guidance in between."""
    cases = [
        ((1, 5, 7, 0, 2), dict(seed=3, num_sampling_steps=6, cfg_scale=2.5)),
        ((4,), dict(seed=0, num_sampling_steps=3, cfg_scale=4.0)),
    ]
    with demo(device) as sampler:
        for labels, how in [*cases, cases[0]]:
            pictures, latents = sampler.sample(labels, **how), sampler.latents(labels, **how)
            flags = [part for name, value in how.items() for part in ("--" + name.replace("_", "-"), value)]
            common = ["sample.py", "--model", "DiT-Demo/2", "--device", device, "--labels", *labels, *flags]
            for output in (
                ["--output", tmp_path / "p.png"],
                ["--output-type", "latent", "--output", tmp_path / "l.npy"],
            ):
                done = here(*common, *output)
                assert done.returncode == 0, done.stderr
            assert np.array_equal(latents.cpu().numpy(), np.load(tmp_path / "l.npy"))
            assert all(picture.mode == "RGB" and picture.size == (128, 128) for picture in pictures)
            for picture, tile in zip(pictures, tiles(tmp_path / "p.png", len(labels)), strict=True):
                assert np.array_equal(np.asarray(picture), tile) and tile.std() > 1


def test_labels_by_name_number_or_alone_and_defaults_of_the_constructor():
    with demo(seed=5, cfg_scale=3.0) as sampler:
        both = sampler.latents(["planet", 3])
        assert torch.equal(both, sampler.latents((0, "ball"), seed=5, num_sampling_steps=4, cfg_scale=3.0))
        assert torch.equal(sampler.latents("sea"), sampler.latents(np.int64(5))) and len(sampler.latents(5)) == 1
        for other in (dict(seed=0), dict(num_sampling_steps=5), dict(cfg_scale=4.0)):
            assert not torch.equal(both, sampler.latents([0, 3], **other))
        assert torch.equal(both, sampler.latents([0, 3]))


@DEVICES
def test_a_module_that_the_caller_holds(device):
    """The demo's weights in models.DiT, wrapped, compiled, and in half: the same as by name. They are copied."""
    from accel.weights.checkpoint import find_model

    model = DiT_models["DiT-Demo/2"]()
    model.load_state_dict(find_model(DEMO / "dit.safetensors"))
    with demo(device) as sampler:
        want = sampler.latents([1, 2])
    vae = str(DEMO / "vae")
    for module in (model.to(device), nn.DataParallel(model), torch.compile(model)):
        with Sampler(module, vae=vae, device=device, num_sampling_steps=4) as sampler:
            for value in model.parameters():
                value.data.add_(1)
            got = sampler.latents([1, 2])
            assert torch.equal(got, want) and not got.is_inference()
            assert np.asarray(sampler.sample([1])[0]).std() > 1
            for value in model.parameters():
                value.data.sub_(1)
        model.load_state_dict(find_model(DEMO / "dit.safetensors"))


def test_a_class_of_the_callers_own():
    """What upstream's class has in common with ours: the state dict and num_heads. Any size of it works."""

    class Other(nn.Module):
        def __init__(self, model):
            super().__init__()
            for name, child in model.named_children():
                setattr(self, name, child)
            self.pos_embed, self.num_heads = model.pos_embed, model.num_heads

    model = fill(DiT(input_size=8, patch_size=4, hidden_size=48, depth=2, num_heads=3, mlp_ratio=8 / 3, num_classes=5))
    how = dict(output_type="latent", device="cpu", num_sampling_steps=3)
    with Sampler(model, **how) as ours, Sampler(Other(copy.deepcopy(model)), **how) as other:
        assert ours.latents([4]).shape == (1, 4, 8, 8) and torch.equal(ours.latents([4]), other.latents([4]))
    with Sampler(model, image_size=128, **how) as larger:
        assert larger.latents(range(5)).shape == (5, 4, 16, 16)


def test_it_leaves_no_trace_in_the_process():
    """Global generators and backend switches are the caller's."""
    before = torch.get_rng_state(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with demo(precision="fp32") as sampler:
        sampler.sample(0)
    after = torch.get_rng_state(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_close_frees_the_network():
    sampler = demo()
    sampler.sample(0)
    network = weakref.ref(sampler._engine.network)
    sampler.close()
    sampler.close()
    gc.collect()
    assert network() is None
    for call in (sampler.sample, sampler.latents):
        with pytest.raises(ValueError, match="closed; make another"):
            call(0)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Sampler("DiT-XXL/2"), "--model DiT-XXL/2: unknown"),
        (lambda: demo(precision="fp16"), "--precision fp16: cpu has no float16 tensor cores"),
        (lambda: demo("gpu7"), "--device gpu7"),
        (lambda: demo(ckpt="no/such.pt"), "--ckpt no/such.pt: no such file"),
        (lambda: demo(vae="no/vae"), "--vae no/vae"),
        (lambda: demo(vae=nn.Linear(2, 2)), "--vae Linear: give ema, mse or a folder"),
        (lambda: demo().sample(["plnet"]), r"--labels plnet: .* planet \(0\)"),
        (lambda: demo().sample([8]), "--labels 8: the model knows classes 0 to 7"),
        (lambda: demo().sample([]), "--labels: give at least one"),
        (lambda: demo().latents(0, num_sampling_steps=0), "--num-sampling-steps 0"),
        (lambda: demo().latents(0, cfg_scale=0.5), "--cfg-scale 0.5"),
        (lambda: demo(output_type="latent").sample(0), "--output-type latent: loads no decoder"),
        (lambda: Sampler(nn.Linear(2, 2)), "Linear: is not a DiT, it has no 'x_embedder.proj.weight'"),
        (lambda: Sampler(DiT(hidden_size=48, depth=1, num_heads=2), ckpt="x.pt"), "ckpt: is for weights on disk"),
    ],
)
def test_errors_are_value_errors_of_one_line(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert isinstance(error.value, UsageError) and "\n" not in str(error.value)


def test_a_plan_for_other_steps_is_refused_every_time():
    """And leaves the sampler as it was."""
    with Sampler("DiT-Demo/2", device="cpu", forecast="plan") as sampler:
        for _ in range(2):
            with pytest.raises(UsageError, match="was made for --num-sampling-steps 250, not 5"):
                sampler.latents(0, num_sampling_steps=5)


@pytest.mark.gpu
def test_a_step_is_captured_once_and_replayed():
    """A new number of pictures, steps or guidance is another graph; a new seed or label is not. Few are kept."""
    with demo("cuda", precision="fp16", output_type="latent") as sampler:
        network = sampler._engine.network

        def graphs():
            return [graph for replayed in network._replayed.values() for graph in replayed.graphs.values()]

        sampler.latents([1, 2], seed=0)
        first = graphs()
        sampler.latents([3, 4], seed=1)
        assert len(first) == 1 and graphs() == first
        for scale in range(1, 3 + KEPT):
            sampler.latents([1, 2], cfg_scale=scale)
        assert len(graphs()) == KEPT
