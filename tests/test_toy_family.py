"""A family is a folder: put into a copy of the program, a new one works by every command,
and nothing else changes.
"""

import shutil

import forks
import numpy as np
import pytest
import torch
from conftest import ROOT, tracked
from PIL import Image
from safetensors.torch import load_file, save_file

ALONE = dict(PYTHONPATH="", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
TOY = ["--model", "Toy/2", "--num-sampling-steps", 8, "--device", "cpu"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the program with the folder of the family, random weights and a decoder
    of three levels in it.
    """
    from diffusers import AutoencoderKL

    tree = tmp_path_factory.mktemp("tree")
    for name in tracked("*.py", "*.cu", "*.cuh", "*.json", "accel/*.txt"):
        if not name.startswith(("tests/", "log/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    family = tree / "accel" / "families" / "toy"
    shutil.copytree(ROOT / "tests" / "toy_family", family)
    torch.manual_seed(0)
    AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[8, 8, 16],
        norm_num_groups=4,
        latent_channels=3,
        scaling_factor=0.5,
    ).save_pretrained(family / "vae")
    code = (
        "import torch; from accel.families.toy.network import Toy; "
        "torch.save(Toy().state_dict(), 'toy.pt')"
    )
    succeeds(tree, "-c", code)
    save_file(torch.load(tree / "toy.pt"), family / "toy.safetensors")
    return tree


def succeeds(tree, *words):
    return forks.succeeds(forks.run(words, tree, **ALONE))


def by_two(tree, *words, status=0):
    """Run sample_ddp.py with two ranks → what they printed as errors."""
    jobs = forks.ranks(2, ["sample_ddp.py", *TOY, *words], tree, **ALONE)
    errors = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [status] * 2, errors
    return "".join(errors)


def test_a_picture_by_one_process_and_by_two(tree):
    assert "Toy/2" in succeeds(tree, "sample.py", "--help")
    for name, more in (("one.png", []), ("two.png", ["--gpus", 2])):
        succeeds(tree, "sample.py", *TOY, "--output", name, *more)
    one, two = (np.asarray(Image.open(tree / name)).astype(int) for name in ("one.png", "two.png"))
    assert one.shape == (2 * 26 + 2, 4 * 26 + 2, 3) and one.std() > 5  # of five classes
    assert np.abs(one - two).max() <= 1


def test_one_picture_whose_evaluations_two_ranks_share(tree):
    found = []
    latent = ["--labels", 3, "--image-size", 32, "--output-type", "latent", "--output"]
    for parallel in ("off", "rows=2", "tokens=2"):
        by_two(tree, "--parallel", parallel, *latent, f"{parallel}.npy")
        found.append(np.load(tree / f"{parallel}.npy"))
        assert found[-1].shape == (1, 3, 8, 8)
        assert np.abs(found[-1] - found[0]).max() < 1e-5 * found[0].std()


def test_a_second_network_guides_it(tree):
    """Itself changes nothing, another does; two ranks make the latents of one."""
    save = "import torch; from accel.families.toy.network import Toy; torch.manual_seed(1); "
    succeeds(tree, "-c", save + "torch.save(Toy(width=16).state_dict(), 'small.pt')")
    command = ["sample.py", *TOY, "--output-type", "latent", "--output"]
    found = {}
    for name, more in {
        "alone": ["--guide", "small.pt", "--cfg-scale", 1],
        "itself": ["--guide", "toy.pt", "--cfg-scale", 3],
        "small": ["--guide", "small.pt", "--cfg-scale", 3],
    }.items():
        succeeds(tree, *command, f"{name}.npy", *more)
        found[name] = np.load(tree / f"{name}.npy")
    latents = "--output-type", "latent", "--output", "two.npy"
    by_two(tree, "--guide", "small.pt", "--cfg-scale", 3, *latents)
    found["two"] = np.load(tree / "two.npy")
    scale = found["alone"].std()
    assert np.abs(found["itself"] - found["alone"]).max() < 1e-5 * scale
    assert np.abs(found["small"] - found["alone"]).max() > 0.1 * scale
    assert np.abs(found["small"] - found["two"]).max() < 1e-5 * found["small"].std()


def test_what_its_folder_lacks_is_refused_in_a_line(tree):
    code = "from accel.families import family_of; family_of('Toy/2').pack"  # as on a GPU
    error = forks.run(["-c", code], tree, **ALONE).stderr
    assert error.endswith("precision: use fp32 or tf32: the family Toy has no fast.py\n")


def test_the_converter_there_and_back(tree):
    for source, target in (("toy.pt", "there.safetensors"), ("there.safetensors", "back.pt")):
        text = succeeds(tree, "scripts/convert_checkpoint.py", "--ckpt", source, "--output", target)
        assert "read back equal" in text
    first = load_file(tree / "there.safetensors")
    back = torch.load(tree / "back.pt")["ema"]
    assert first.keys() == back.keys() and all(
        torch.equal(value, back[name]) for name, value in first.items()
    )


CONFIG = """
toy:
  weights: toy.pt
  steps: 5
  scale: 2.5
  method: {method}
"""
SAYS = (
    ": specifies ckpt toy.pt, num sampling steps 5, cfg scale {}, sampler ddim; flags override it"
)
FROM_FILE = """
import sys
import numpy as np
from accel import Sampler

with Sampler(config="euler.yaml", sampler="ddim", output_type="latent", precision="fp32") as sampler:
    assert (sampler.run.settings.cfg_scale, sampler.run.settings.num_sampling_steps) == (2.5, 5)
    assert np.array_equal(sampler.latents([1, 3], seed=2).numpy(), np.load("flags.npy"))
"""


def test_a_configuration_file(tree):
    """Its values are those of flags, which override it. It is printed once, by many processes
    too, and refused before torch is imported.
    """
    for method in ("ddim", "euler"):
        (tree / f"{method}.yaml").write_text(CONFIG.format(method=method))
    latents = ["--device", "cpu", "--labels", 1, 3, "--seed", 2, "--output-type", "latent"]
    latents += ["--output"]
    flags = ["--ckpt", "toy.pt", "--num-sampling-steps", 5, "--sampler", "ddim"]
    succeeds(tree, "sample.py", *flags, "--cfg-scale", 2.5, *latents, "flags.npy")
    for name, more in (("file.npy", []), ("by_two.npy", ["--gpus", 2])):
        text = succeeds(tree, "sample.py", "--config", "ddim.yaml", *more, *latents, name)
        assert text.count(f"ddim.yaml{SAYS.format(2.5)}") == 1
    want = np.load(tree / "flags.npy")
    assert np.array_equal(np.load(tree / "file.npy"), want)
    assert np.abs(np.load(tree / "by_two.npy") - want).max() < 1e-5 * want.std()
    succeeds(tree, "-c", FROM_FILE)
    refused = forks.refused(forks.run(["sample.py", "--config", "euler.yaml"], tree, **ALONE))
    assert "--config euler.yaml: specifies method euler; give --sampler ddim" in refused
    (tree / "gone.yaml").write_text(CONFIG.format(method="ddim").replace("toy.pt", "gone.pt"))
    refused = forks.refused(forks.run(["sample.py", "--config", "gone.yaml"], tree, **ALONE))
    assert "--config gone.yaml: cannot find gone.pt; fetch 1" in refused


PYTHON = """
import torch
from accel import Sampler, accelerate
from accel.families.toy.network import Toy

model = Toy()
model.load_state_dict(torch.load("toy.pt"))
x, t, y = torch.randn(4, 3, 6, 6), torch.tensor([9, 500, 9, 500]), torch.tensor([0, 4, 5, 5])
fast, out = accelerate(model), model(x, t, y)
torch.testing.assert_close(fast(x, t, y), out)
cond, uncond = model(torch.cat([x[:2]] * 2), t, y).chunk(2)
torch.testing.assert_close(fast.forward_with_cfg(x, t, y, 4.0)[:2], uncond + 4 * (cond - uncond))
latents = []
for given in (dict(model="Toy/2"), dict(model=model, vae="accel/families/toy/vae"), dict(ckpt="toy.pt")):
    with Sampler(**given, num_sampling_steps=8) as sampler:
        (picture,) = sampler.sample(3)
        latents.append(sampler.latents(3))
        assert picture.size == (24, 24) and torch.equal(latents[-1], latents[0])
"""


def test_python(tree):
    succeeds(tree, "-c", PYTHON)
