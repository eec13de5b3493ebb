"""House rules that a program can check: imports in layers (pyproject.toml) and late, and one fact
a line.
"""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT, tracked
from importlinter.cli import lint_imports

PROGRAM = {
    file: (ROOT / file).read_text() for file in tracked("*.py") if not file.startswith("tests/")
}
COMPREHENSIONS = ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp
MOST_NESTED = 1  # a thousand lines


def test_layers(monkeypatch, capsys):
    """Below the Pipeline nobody sees options."""
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == 0, (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "files, allowed",
    [
        ("models.py", {"torch", "numpy"}),
        ("accel/families/large_dit/network.py", {"torch", "accel"}),
        ("accel/families/sit/network.py", {"torch", "accel"}),
        ("diffusion/", {"torch", "numpy", "tqdm"}),
        ("evaluate.py", {"accel", "lpips", "matplotlib", "numpy", "skimage", "torch"}),
    ],
)
def test_what_is_copied_alone_needs_nothing_of_ours(files, allowed):
    for file, text in PROGRAM.items():
        if file.startswith(files):
            nodes = list(ast.walk(ast.parse(text)))
            names = {
                alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
            }
            names |= {
                node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
            }
            foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
            assert foreign <= allowed, f"{file} imports {foreign - allowed}"


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
    assert not loaded("import sample, sample_ddp, accel.options, accel.rules") & {
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


# Of accel, for a picture of the demo on a CPU: other families' code, layouts and processes, the
# hub, many ranks and the GPU stay out.
MOST_MODULES = 50
SAMPLE = """
import runpy, sys
sys.argv[0] = "sample.py"
runpy.run_path("sample.py", run_name="__main__")
for name in [*sys.modules]:
    if name.split(".")[0] == "accel":
        print(sys.modules[name].__file__)
"""


def test_a_picture_imports_what_it_uses(tmp_path):
    flags = "--model DiT-Demo/2 --device cpu --num-sampling-steps 2 --labels 0 --output"
    words = [sys.executable, "-c", SAMPLE, *flags.split(), str(tmp_path / "x.png")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [line for line in done.stdout.splitlines() if line.endswith(".py")]
    assert 30 < len(files) <= MOST_MODULES, files


def test_code_has_one_fact_a_line():
    """Unrelated values are not assigned in one tuple; no comprehension holds another."""
    lines = sum(bool(line.strip()) for text in PROGRAM.values() for line in text.splitlines())
    tuples = []
    nested = []
    for file, text in PROGRAM.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign):
                sides = (node.targets[0], node.value)
                if all(isinstance(side, ast.Tuple) for side in sides):
                    tuples.append(f"{file}:{node.lineno}")
            if isinstance(node, COMPREHENSIONS):
                inner = any(isinstance(x, COMPREHENSIONS) for x in ast.walk(node) if x is not node)
                if inner or len(node.generators) > 1:
                    nested.append(f"{file}:{node.lineno}")
    assert 1000 * len(tuples) / lines <= 5, tuples
    assert 1000 * len(nested) / lines <= MOST_NESTED, nested
