"""Imports: in layers (pyproject.toml), and late."""

import shutil
import subprocess
import sys

import forks
from conftest import ROOT
from importlinter.cli import lint_imports


def test_layers(monkeypatch, capsys):
    """Below the Pipeline nobody sees options."""
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == 0, (
        capsys.readouterr().out
    )


def test_models_py_works_on_its_own(tmp_path):
    """Copied into another project, which has nothing else of ours."""
    shutil.copy(ROOT / "models.py", tmp_path)
    code = "import sys, models; models.DiT_S_8(); sys.exit('accel' in sys.modules)"
    forks.succeeds(forks.run(["-c", code], tmp_path, PYTHONPATH=""))


SHAPES = """
import sys
from accel.families import constructor_of, families
from accel.tensors.shapes import shapes_only

for family in families():
    with shapes_only():
        constructor_of([*family.models][-1])()
    assert "torch._dynamo" not in sys.modules, family.name
"""


def test_the_shapes_of_a_network_need_no_compiler():
    """Random numbers on the meta device make torch import it, which takes three seconds."""
    forks.succeeds(forks.run(["-c", SHAPES], PYTHONPATH=str(ROOT)))


def loaded(code):
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_cold_start_imports_nothing_heavy():
    """Slow imports stay off the way to the first denoising step, torch off that to a
    refused flag.
    """
    assert not loaded("import sample, sample_ddp, accel.config.options, accel.config.rules") & {
        "torch",
        "numpy",
        "diffusers",
        "PIL",
    }
    late = {
        "timm",
        "diffusers",
        "torchvision",
        "triton",
        "lpips",
        "skimage",
        "matplotlib",
        "transformers",
    }
    assert not loaded("import accel.jobs.grid") & late
    assert not loaded("import evaluate") & (late | {"torch"})
