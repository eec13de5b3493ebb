"""Who may import whom (the house rules in code.md), and what must not be imported before it is needed."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

OURS = {
    "models",
    "large_dit",
    "diffusion",
    "accel",
    "download",
    "pretrained_models",
    "sample",
    "sample_ddp",
    "evaluate",
    "bench",
    "scripts",
}
ERRORS = {"accel.errors", "accel.files"}
# A file (or folder) → what of ours it may import, beside its own folder. The first match holds. From the bottom up.
RULES = {
    "models.py": set(),
    "large_dit.py": set(),
    "diffusion/": set(),
    "evaluate.py": set(),
    "accel/errors.py": set(),
    "accel/files.py": set(),
    "accel/graphs.py": set(),
    "accel/precision.py": set(),
    "accel/progress.py": set(),
    "accel/options.py": ERRORS,
    "accel/command_line.py": ERRORS | {"accel.options"},
    "accel/kernels/": {"accel.files"},
    "accel/network.py": {"accel.graphs", "large_dit", "models"},
    "accel/tensor_files.py": ERRORS,
    "accel/diffusers_layout.py": ERRORS | {"accel.tensor_files", "models"},
    "accel/consolidated_layout.py": ERRORS | {"accel.network", "accel.tensor_files"},
    "accel/checkpoint.py": ERRORS
    | {"accel.consolidated_layout", "accel.diffusers_layout", "accel.network", "accel.tensor_files"},
    "accel/fast/": {"accel.graphs", "accel.kernels", "accel.network", "accel.precision", "large_dit", "models"},
    "accel/sampler.py": {"accel.kernels", "accel.network", "diffusion"},
    "accel/forecast.py": {"accel.checkpoint", "accel.errors", "accel.options", "diffusion"},
    "accel/vae/": ERRORS
    | {"accel.checkpoint", "accel.diffusers_layout", "accel.kernels", "accel.precision", "accel.tensor_files"},
    "accel/parallel/": ERRORS | {"accel.graphs", "accel.kernels", "accel.network", "accel.options", "accel.precision"},
    "accel/engine.py": ERRORS
    | {
        "accel.checkpoint",
        "accel.fast",
        "accel.forecast",
        "accel.kernels",
        "accel.network",
        "accel.options",
        "accel.precision",
        "accel.progress",
        "accel.sampler",
        "accel.vae",
        "diffusion",
    },
    "accel/fid/": ERRORS | {"accel.engine", "accel.kernels", "accel.options", "accel.parallel", "accel.vae"},
    "accel/__init__.py": {"accel.fast"},
    "sample.py": {"accel.command_line", "accel.engine"},
    "sample_ddp.py": {
        "accel.command_line",
        "accel.engine",
        "accel.errors",
        "accel.fid",
        "accel.options",
        "accel.parallel",
    },
    "download.py": {"accel.checkpoint"},
    "pretrained_models/download.py": {"download"},
    "pretrained_models/demo/": {"accel", "diffusion", "evaluate", "large_dit", "models"},
    "bench/": {"accel", "diffusion", "evaluate", "large_dit", "models"},
    "scripts/": {"accel", "bench", "diffusion", "evaluate", "large_dit", "models"},
}


def imports(path):
    """Full dotted names of ours that a file imports anywhere, in functions too."""
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in OURS)


def tracked(pattern):
    files = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True).stdout.split()
    return [file for file in files if (ROOT / file).is_file()] or [
        str(p.relative_to(ROOT)) for p in ROOT.glob(pattern) if ".venv" not in p.parts
    ]


@pytest.mark.parametrize("file", tracked("*.py"))
def test_imports_follow_the_rules(file):
    rule = next((rule for rule in RULES if file == rule or (rule.endswith("/") and file.startswith(rule))), None)
    if rule is None:
        assert file.startswith(("scripts/", "tests/")), f"{file}: whom may it import? RULES does not say"
        return  # which may import anything
    own = rule.rstrip("/").replace("/", ".") if rule.endswith("/") else None
    for name in imports(ROOT / file):
        allowed = any(
            name == other or name.startswith(other + ".") for other in RULES[rule] | ({own} if own else set())
        )
        assert allowed, f"{file} imports {name}; it may import {sorted(RULES[rule]) or 'nothing of ours'}"


def test_the_rule_reader_sees_what_it_must(tmp_path):
    """Held against a file that breaks the rules in every way an import can be written."""
    broken = ROOT / "diffusion" / "_broken.py"
    broken.write_text(
        "import models\nfrom accel import engine\ndef f():\n    from ..accel.kernels import norm\nfrom . import respace\n"
    )
    try:
        assert {"models", "accel.engine", "diffusion.respace"} <= set(imports(broken))
    finally:
        broken.unlink()


def loaded(code):
    done = subprocess.run(
        [sys.executable, "-c", code + "\nimport sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_cold_start_imports_nothing_heavy():
    """Slow imports stay off the way to the first denoising step."""
    assert not loaded("import sample, accel.options") & {"torch", "numpy", "diffusers", "PIL"}
    assert not loaded("import accel.engine") & {
        "timm",
        "diffusers",
        "torchvision",
        "triton",
        "lpips",
        "skimage",
        "matplotlib",
        "transformers",
    }
