"""The house rules that a program can check: who may import whom, in layers and without circles; what must not be
imported before it is needed; that state is passed, not global; that nobody asks what kind of network it holds."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, tracked

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
    "accel/gpu.py": set(),
    "accel/graphs.py": {"accel.kernels"},
    "accel/precision.py": {"accel.gpu"},
    "accel/progress.py": set(),
    "accel/start.py": {"accel.errors"},
    "accel/labels.py": {"accel.errors"},
    "accel/flags.py": ERRORS,
    "accel/options.py": ERRORS | {"accel.flags", "accel.labels"},
    "accel/command_line.py": ERRORS | {"accel.flags", "accel.options"},
    "accel/kernels/": {"accel.files", "accel.gpu"},
    "accel/network.py": {"accel.graphs", "large_dit", "models"},
    "accel/weights/": ERRORS | {"accel.network", "large_dit", "models"},
    "accel/fast/": {"accel.kernels", "accel.network", "accel.precision", "large_dit", "models"},
    "accel/accelerated.py": ERRORS
    | {"accel.fast", "accel.graphs", "accel.network", "accel.precision", "accel.weights"},
    "accel/sampler.py": {"accel.kernels", "accel.network", "diffusion"},
    "accel/forecast.py": ERRORS | {"accel.options", "accel.weights", "diffusion"},
    "accel/vae/": ERRORS | {"accel.kernels", "accel.precision", "accel.weights"},
    "accel/parallel/": ERRORS
    | {"accel.graphs", "accel.kernels", "accel.network", "accel.options", "accel.precision"}
    | {"accel.start"},
    "accel/engine.py": ERRORS
    | {
        "accel.weights",
        "accel.fast",
        "accel.forecast",
        "accel.gpu",
        "accel.kernels",
        "accel.labels",
        "accel.network",
        "accel.options",
        "accel.precision",
        "accel.progress",
        "accel.sampler",
        "accel.vae",
        "diffusion",
    },
    "accel/fid/": ERRORS
    | {"accel.engine", "accel.flags", "accel.kernels", "accel.options", "accel.parallel", "accel.vae"},
    "accel/api.py": {
        "accel.accelerated",
        "accel.weights",
        "accel.engine",
        "accel.errors",
        "accel.options",
        "accel.precision",
        "accel.progress",
        "accel.vae",
    },
    "accel/__init__.py": {"accel.accelerated", "accel.api", "accel.options"},
    "sample.py": {"accel.command_line", "accel.engine", "accel.options", "accel.start", "sample_ddp"},
    "sample_ddp.py": {
        "accel.command_line",
        "accel.engine",
        "accel.errors",
        "accel.fid",
        "accel.options",
        "accel.parallel",
        "accel.start",
        "accel.weights",
    },
    "download.py": {"accel.weights"},
    "pretrained_models/download.py": {"download"},
    "pretrained_models/demo/": {"accel", "diffusion", "evaluate", "large_dit", "models"},
    "bench/": {"accel", "diffusion", "evaluate", "large_dit", "models"},
    "scripts/": {"accel", "bench", "diffusion", "evaluate", "large_dit", "models"},
}


def imports(text, package):
    """Full dotted names of ours that a file of `package` imports anywhere, in functions too."""
    for node in ast.walk(ast.parse(text)):
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


def imports_of(file):
    return imports((ROOT / file).read_text(), ".".join(Path(file).parts[:-1]))


def test_every_way_to_write_an_import_is_seen():
    text = "import models\nfrom accel import engine\nfrom . import respace\ndef f():\n    from ..accel import vae\n"
    found = list(imports(text, "diffusion"))
    assert sorted(found) == ["accel.engine", "accel.vae", "diffusion.respace", "models"]


FILES = tracked("*.py")
PROGRAM = [file for file in FILES if not file.startswith("tests/")]


@pytest.mark.parametrize("file", PROGRAM)
def test_imports_follow_the_rules(file):
    rule = next((rule for rule in RULES if file == rule or (rule.endswith("/") and file.startswith(rule))), None)
    assert rule is not None, f"{file}: whom may it import? RULES does not say"
    own = {rule.rstrip("/").replace("/", ".")} if rule.endswith("/") else set()
    allowed = RULES[rule] | own
    for name in imports_of(file):
        assert any(f"{name}.".startswith(f"{other}.") for other in allowed), (
            f"{file} imports {name}; it may import {sorted(allowed) or 'nothing of ours'}"
        )


def test_every_rule_is_of_something():
    for rule in RULES:
        assert any(file == rule or (rule.endswith("/") and file.startswith(rule)) for file in FILES), rule


def test_what_is_copied_alone_needs_torch_and_numpy_only():
    """models.py goes into other projects; diffusion/ draws a bar too, where asked to."""
    for file, allowed in (
        ("models.py", {"torch", "numpy"}),
        *((f, {"torch", "numpy", "tqdm"}) for f in PROGRAM if f.startswith("diffusion/")),
    ):
        nodes = list(ast.walk(ast.parse((ROOT / file).read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
        assert foreign <= allowed, f"{file} imports {foreign - allowed}"


#################################################################################
#                                   No circles                                  #
#################################################################################


def module_of(file):
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def import_graph(files):
    """Module → the modules of `files` that it imports anywhere."""
    modules = {module_of(file): file for file in files}

    def resolve(name):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {module: {resolve(name) for name in imports_of(file)} - {""} for module, file in modules.items()}


def circles(graph):
    """The strongly connected components of more than one node, and nodes with an edge to themselves."""

    def reachable(start):
        found, left = set(), [start]
        while left:
            for following in graph[left.pop()] - found:
                found.add(following)
                left.append(following)
        return found

    reach = {node: reachable(node) for node in graph}
    on_circles = [node for node in graph if node in reach[node]]
    return {frozenset(other for other in reach[node] if node in reach[other]) for node in on_circles}


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == {frozenset("bc"), frozenset("d")}
    graph = import_graph(PROGRAM)
    assert "accel.kernels.linear.tuner" in graph["accel.kernels.linear"]
    assert "accel.kernels.ancestral_update" in graph["accel.sampler"]  # imported in a function
    assert "diffusion.respace" in graph["diffusion.strides"]  # relative
    assert {"sample", "accel.engine", "bench.steps", "scripts.verify"} <= set(graph)


def test_no_circles():
    assert circles(import_graph(PROGRAM)) == set()


#################################################################################
#                     State, and what is asked of a network                     #
#################################################################################

KERNELS = [file for file in PROGRAM if file.startswith("accel/kernels/")]
# What lru_cache may keep: compiled and loaded code, libraries and their handles, a hash of sources.
KEPT = {"_kernel", "_bindings", "_library", "_handle", "version"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


def names_in(target):
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("file", KERNELS)
def test_kernels_have_no_state_but_compiled_code(file):
    """Module-level names are constants: nothing rebinds, fills or empties them, and only what may be is cached."""
    tree = ast.parse((ROOT / file).read_text())
    held = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            held |= set().union(*map(names_in, getattr(node, "targets", None) or [node.target]))
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global), where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            assert ast.unparse(node.func.value) not in held, f"{where} changes {ast.unparse(node.func.value)}"
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            assert ast.unparse(node.value) not in held, f"{where} changes {ast.unparse(node.value)}"
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(one) for one in node.decorator_list):
            assert node.name in KEPT, f"{where}: what does {node.name} keep?"


ASKS = (
    r"hasattr\(\w*network",
    r"getattr\(\w*network\b[^)]*,\s*None\)",
    r"isinstance\(\w*network\b",
)


def test_nobody_asks_what_kind_of_network_it_holds():
    """The protocol says what a network can do."""
    found = [
        f"{file}: {match.group()}"
        for file in PROGRAM
        for ask in ASKS
        for match in re.finditer(ask, (ROOT / file).read_text())
    ]
    assert found == []
    assert all(
        re.search(ask, text)
        for ask, text in zip(
            ASKS,
            (
                "hasattr(network, 'x')",
                'getattr(self_network, "x", None)',
                "isinstance(network, FastDiT)",
            ),
        )
    )


#################################################################################
#                        What must not be imported too early                    #
#################################################################################


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
    assert not loaded("import sample, sample_ddp, accel.options") & {"torch", "numpy", "diffusers", "PIL"}
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
