"""pip: what an installed copy brings along, and that it works from any folder."""

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution, version

import pytest
from conftest import ROOT, tracked
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import accel

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]

needs_setuptools = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77,
    reason="needs setuptools 77, as requirements-test.txt has it",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy: pip writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked(
        "*.py", "*.toml", "*.txt", "docs/package.md", "LICENSE", "accel", "pretrained_models"
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@lru_cache
def wheel_of(checkout):
    subprocess.run(
        [*PIP, "wheel", *OFFLINE, "--wheel-dir", checkout / "wheel", checkout], check=True
    )
    (path,) = (checkout / "wheel").glob("*.whl")
    return path


def beside_others(folder, *names):
    """Put foreign modules into `folder`, as a checkout of DiT, SiT or REPA has them, that
    end whoever imports them.
    """
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('this is the other {name}')")
    return folder


def environment(folder):
    """The python of a new, empty environment, which sees the packages of this one but
    none of ours.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages"))
    )
    return folder / "bin" / "python", packages


DIT = (
    "models.py",
    "diffusion/__init__.py",
    "transport/__init__.py",
    "download.py",
    "train_utils.py",
    "train.py",
)
REPA = "models/__init__.py", "models/sit.py", "utils.py", "samplers.py", "loss.py"


@needs_setuptools
@pytest.mark.parametrize(
    "how, files", [("editable", DIT), ("wheel", REPA)], ids=["editable", "wheel"]
)
def test_an_installation_takes_one_name_and_works_beside_any_checkout(
    how, files, checkout, tmp_path
):
    python, packages = environment(tmp_path / "venv")
    before = {path.name for path in packages.iterdir()}
    what = ["--editable", checkout] if how == "editable" else [wheel_of(checkout)]
    subprocess.run([*PIP, "--python", python, "install", *OFFLINE, *what], check=True)
    taken = {path.name for path in packages.iterdir()} - before
    taken = {name for name in taken if "dit_sampling" not in name and name != "__pycache__"}
    assert taken == ({"accel"} if how == "wheel" else set())
    code = """if True:
        import sys
        from accel import Sampler, accelerate
        import accel.families, accel.jobs.fid, accel.jobs.grid, accel.jobs.parallel, accel.sampler
        import torch
        from accel.families.dit.network import DiT
        model = DiT(input_size=16, hidden_size=64, depth=1, num_heads=4, num_classes=8)
        x, t, y = torch.randn(2, 4, 16, 16), torch.tensor([5, 5]), torch.tensor([1, 2])
        assert torch.allclose(accelerate(model, "fp32")(x, t, y), model.eval()(x, t, y), atol=1e-4)
        if accel.families.DEMO.exists():  # beside an editable installation
            with Sampler("DiT-Demo/2", device="cpu") as sampler:
                assert sampler.sample(["planet"], num_sampling_steps=2)[0].size == (128, 128)
        print(*sorted({"models", "diffusion", "download", "sit", "large_dit"} & set(sys.modules)))
    """
    folder = beside_others(tmp_path / "checkout", *files)
    done = subprocess.run([python, "-c", code], cwd=folder, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@needs_setuptools
def test_the_commands_of_a_wheel(checkout, tmp_path):
    """They are sample.py and sample_ddp.py, which --gpus starts. The folder has other modules."""
    python, packages = environment(tmp_path / "venv")
    wheel = wheel_of(checkout)
    subprocess.run([*PIP, "--python", python, "install", *OFFLINE, wheel], check=True)
    folder = beside_others(tmp_path / "checkout", *DIT)
    variables = {"DIT_WEIGHTS": str(ROOT / "pretrained_models"), "OMP_NUM_THREADS": "1"}
    how = dict(cwd=folder, env=variables, capture_output=True, text=True)
    done = subprocess.run([python.parent / "dit-sample-ddp", "--version"], **how)
    assert done.stdout == f"dit-sample-ddp {accel.__version__}\n", done.stderr
    picture = "--model", "DiT-Demo/2", "--labels", "planet", "--num-sampling-steps", "2"
    command = [python.parent / "dit-sample", *picture, "--device", "cpu", "--gpus", "2"]
    done = subprocess.run(command, **how)
    assert done.returncode == 0 and "2 ranks" in done.stdout, done.stdout + done.stderr
    assert (folder / "sample.png").exists()
    done = subprocess.run([python.parent / "dit-sample", "--labls", "3"], **how)
    assert done.stderr.startswith("dit-sample: unrecognized arguments: --labls 3; did you")


def declared(checkout):
    """Return the wheel's metadata, and its requirements by extra; "" has the core ones."""
    with zipfile.ZipFile(wheel_of(checkout)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    by_extra = {"": [one for one in requirements if one.marker is None]}
    for extra in metadata.get_all("Provides-Extra"):
        by_extra[extra] = [
            one for one in requirements if one.marker and one.marker.evaluate({"extra": extra})
        ]
    return metadata, by_extra


@needs_setuptools
def test_a_wheel_holds_what_the_code_reads_and_make_installs_what_it_requires(checkout):
    with zipfile.ZipFile(wheel_of(checkout)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {*tracked("accel")} and "accel/py.typed" in names
    metadata, by_extra = declared(checkout)
    assert metadata["Version"] == accel.__version__ and metadata.get_all("Project-URL")
    assert by_extra.keys() == {"", "eval", "fid", "report", "page"}
    pinned = "".join((ROOT / f"requirements{end}.txt").read_text() for end in ("", "-test"))
    installed = {line.lower() for line in re.findall(r"^[\w-]+(?=[<>=])", pinned, re.M)}
    for one in sum(by_extra.values(), []):
        assert one.name.lower() in installed and version(one.name) in one.specifier, one


def reached(requirements):
    """Return the names of the distributions that these requirements bring along."""
    names = set()
    left = list(requirements)
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            required = distribution(name).requires or ()
        except PackageNotFoundError:  # of another platform's
            continue
        names.add(name)
        left += map(Requirement, required)
    return names


TOY = """if True:
    import torch
    from diffusers import AutoencoderKL
    from accel import Sampler
    from accel.errors import InputRef, UsageError
    from accel.families.toy.network import Toy
    from accel.checkpoints.loading import WeightFiles
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[8, 8, 16],
        norm_num_groups=4,
        latent_channels=3,
    )
    with Sampler(Toy(), device="cpu", vae=vae) as sampler:
        (picture,) = sampler.sample([1], num_sampling_steps=2)
    assert picture.size == (24, 24), picture.size
    print(WeightFiles(InputRef("DiT-XL-2-256x256.pt")).path)
    try:
        Sampler("DiT-Demo/2", device="cpu")
    except UsageError as error:
        print(error)
"""


@needs_setuptools
def test_the_core_dependencies_suffice_to_sample(checkout, tmp_path):
    """The environment has nothing else. Weights are looked for in the user's cache, and nothing is
    written next to the package.
    """
    python, packages = environment(tmp_path / "venv")
    (packages / "shared.pth").unlink()
    for name in reached(declared(checkout)[1][""]):
        files = distribution(name).files
        for entry in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / entry).exists():  # several share a namespace
                (packages / entry).symlink_to(distribution(name).locate_file(entry))
    assert (packages / "torch").exists()
    assert not [one for one in ("lpips", "timm", "torchvision") if (packages / one).exists()]
    subprocess.run([*PIP, "--python", python, "install", *OFFLINE, wheel_of(checkout)], check=True)
    shutil.copytree(ROOT / "tests" / "toy_family", packages / "accel" / "families" / "toy")
    before = sorted(packages.iterdir())
    cache = tmp_path / "cache"
    done = subprocess.run(
        [python, "-c", TOY],
        cwd=tmp_path,
        env={
            "XDG_CACHE_HOME": str(cache),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights, refused = done.stdout.splitlines()[-2:]
    assert weights == str(cache / "dit" / "DiT-XL-2-256x256.pt")
    demo = cache / "dit" / "demo"
    assert refused.startswith(f"ckpt={demo / 'dit.safetensors'}: ships with the repository")
    assert "set DIT_WEIGHTS to its pretrained_models" in refused
    assert sorted(packages.iterdir()) == before
