"""House rules that a program can check: imports in layers (pyproject.toml) and late,
one fact a line, no state in kernels, and no question about what one was handed.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, tracked
from importlinter.cli import lint_imports

PROGRAM = {
    file: (ROOT / file).read_text() for file in tracked("*.py") if not file.startswith("tests/")
}
COMPREHENSIONS = ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp
MOST_NESTED = 1  # a thousand lines
# What lru_cache may keep in kernels: compiled and loaded code, libraries and their
# handles, a hash of sources.
KEPT = {"_kernel", "_bindings", "_library", "_handle", "version"}


def test_layers(monkeypatch, capsys):
    """Below the Pipeline nobody sees a Config."""
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
    assert not loaded("import sample, sample_ddp, accel.config") & {
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
    assert not loaded("import accel.grid") & late
    assert not loaded("import evaluate") & (late | {"torch"})


# Of accel, for a picture of the demo on a CPU: other families, layouts and processes, the hub,
# many ranks and the GPU stay out.
MOST_MODULES = 43
MOST_STATEMENTS = 3176
SAMPLE = """
import runpy, sys
sys.argv[0] = "sample.py"
runpy.run_path("sample.py", run_name="__main__")
for name in [*sys.modules]:
    if name.split(".")[0] == "accel":
        print(sys.modules[name].__file__)
"""


def is_statement(node):
    """Docstrings are none."""
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not docstring


def test_a_picture_imports_what_it_uses(tmp_path):
    flags = "--model DiT-Demo/2 --device cpu --num-sampling-steps 2 --labels 0 --output"
    words = [sys.executable, "-c", SAMPLE, *flags.split(), str(tmp_path / "x.png")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [line for line in done.stdout.splitlines() if line.endswith(".py")]
    statements = 0
    for file in files:
        tree = ast.parse(Path(file).read_text())
        statements += sum(map(is_statement, ast.walk(tree)))
    assert 30 < len(files) <= MOST_MODULES, files
    assert statements <= MOST_STATEMENTS


def test_kernels_keep_compiled_code_only():
    for file, text in PROGRAM.items():
        if file.startswith("accel/kernels/"):
            assert (
                set(re.findall(r"@(?:functools\.)?(?:lru_)?cache\b.*\n(?:@.*\n)*def (\w+)", text))
                <= KEPT
            ), file


# A network, a process and guidance say what they can do.
OF_A_NETWORK = r"hasattr\(\w*network|getattr\(\w*network\b[^)]*,\s*None\)|isinstance\(\w*network\b"
OF_A_PROCESS = r"eta is None|guided="
# where variants are told apart
KNOWN = "accel/sampling/", "diffusion/", "accel/fid/job.py", "sample_ddp.py", "accel/pipeline.py"


def test_nobody_asks_what_it_was_handed():
    asked = [file for file, text in PROGRAM.items() if re.search(OF_A_NETWORK, text)]
    asked += [
        file
        for file, text in PROGRAM.items()
        if re.search(OF_A_PROCESS, text) and not file.startswith(KNOWN)
    ]
    assert asked == []


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
