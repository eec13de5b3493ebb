"""pip: what an installed copy brings along, and that it works from any folder."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version

import pytest
from conftest import ROOT, tracked

import accel

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]

needs_setuptools = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="needs setuptools 77, as requirements-test.txt has it"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy: pip writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked("*.py", "*.toml", "*.txt", "README.md", "LICENSE", "accel", "pretrained_models"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@needs_setuptools
def test_an_editable_copy_works_from_any_folder(checkout, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    subprocess.run([*PIP, "--python", python, "install", *OFFLINE, "--editable", checkout], check=True)

    def run(code):
        done = subprocess.run([python, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run("""if True:
        import importlib.util
        from accel import Sampler, __version__
        from diffusion import create_diffusion
        from download import find_model
        import large_dit, models
        with Sampler("DiT-Demo/2", device="cpu") as sampler:
            (picture,) = sampler.sample(["planet"], num_sampling_steps=2)
        private = [name for name in ("evaluate", "sample", "bench", "scripts") if importlib.util.find_spec(name)]
        print(models.__file__, __version__, *picture.size, *private)
    """) == [str(checkout / "models.py"), accel.__version__, "128", "128"]


@needs_setuptools
def test_a_wheel_holds_what_the_code_reads_and_requires_what_make_installs(checkout, tmp_path):
    subprocess.run([*PIP, "wheel", *OFFLINE, "--wheel-dir", tmp_path, checkout], check=True)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    commands = {"evaluate.py", "sample.py", "sample_ddp.py"}
    assert names == {*tracked("accel", "diffusion"), *(name for name in tracked("*.py") if "/" not in name)} - commands

    def same(requirement):  # torch-fidelity <0.5,>=0.4 is torch-fidelity>=0.4,<0.5
        return tuple(sorted(re.findall(r"[\w.-]+|[<>=]=?[\w.]+", requirement)))

    required = {same(line) for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)}
    pinned = re.findall(r"^[\w-]+[<>=].*$", (ROOT / "requirements.txt").read_text(), re.M)
    assert required == {same(line) for line in pinned} and len(pinned) > 10
    assert f"\nVersion: {accel.__version__}\n" in metadata


def test_the_version_is_stated_once_and_the_changelog_begins_with_it():
    stated = [
        path for path in tracked("*.py", "*.toml", "*.cff", "*.md") if accel.__version__ in (ROOT / path).read_text()
    ]
    assert stated == ["CHANGELOG.md", "pyproject.toml"]
    assert re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == accel.__version__


@pytest.mark.parametrize("python", re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/ci.yml").read_text()))
def test_what_make_installs_is_there_for_the_oldest_and_the_newest_python(python, tmp_path):
    """A package that drops a Python leaves `make` without it. torch's wheels are looked up, not fetched."""
    if subprocess.run([*PIP, "index", "versions", "pytest"], capture_output=True).returncode:
        pytest.skip("no package registry in reach; the workflow's matrix installs on both")
    lines = [line for name in ("", "-test") for line in (ROOT / f"requirements{name}.txt").read_text().splitlines()]
    wanted = [line for line in lines if re.match("[A-Za-z]", line)]
    pinned = [line for line in wanted if re.match("torch(vision)?==", line)]
    there = ["--python-version", python, "--only-binary=:all:"]
    for name, _, number in (line.partition("==") for line in pinned):
        done = subprocess.run([*PIP, "index", "versions", name, *there], capture_output=True, text=True)
        assert f"{number}," in done.stdout or f"({number})" in done.stdout, done.stdout + done.stderr
    how = ["--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--target", tmp_path]
    done = subprocess.run(
        [*PIP, "install", *how, *there, *set(wanted).difference(pinned)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
