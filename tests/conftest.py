import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

# Before imports that read it: the shell that starts the tests does not decide them. The
# hub's client, its mirrors and caches.
for variable in list(os.environ):
    if re.match("HF_|HUGGINGFACE_|TRANSFORMERS_|DIFFUSERS_|SLURM_|TORCHELASTIC_|DIT_", variable):
        del os.environ[variable]

import forks
import pytest
import torch
from safetensors.torch import save_file

from accel.errors import UsageError

ROOT = forks.ROOT
# Folders and modules that run for minutes.
LONG = {"fid", "slurm", "distributed", "demo", "scripts"}
LONG |= {"test_toy_family", "test_readme", "test_install", "test_endings", "test_doors"}


def pytest_configure(config):
    """Drop the ranks of the shell. A rank that a test starts imports this module, and keeps its."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)


def pytest_collection_modifyitems(items):
    # begun first, so that no process ends long after
    items.sort(key=lambda item: LONG.isdisjoint((item.path.parent.name, item.path.stem)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(
            reason="needs a CUDA GPU (pytest -m gpu on one); its reference runs on the CPU"
        )
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def tracked(*patterns):
    """Files of the repository, as git's patterns name them: not what a user keeps beside them."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    # a copy without git
    files = done.stdout.splitlines() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    wanted = [one for pattern in patterns for one in (pattern, f"{pattern}/*")]
    return [
        f
        for f in files
        if not f.startswith(".venv")
        and any(fnmatch(f, one) for one in wanted)
        and (ROOT / f).is_file()
    ]


@contextmanager
def mistake(parameter, *names):
    """Expect a UsageError about this parameter in one line, which has these names. Important
    messages as a whole: tests/test_cli.py.
    """
    with pytest.raises(UsageError) as caught:
        yield caught
    line = str(caught.value)
    assert caught.value.parameter == parameter and "\n" not in line, line
    assert all(name in line for name in names), line


def fill(model, seed=0):
    """Random non-zero weights of sensible size: a default-initialised DiT outputs zeros,
    and zero equals zero.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if name == "pos_embed":
            continue
        scale = 1.0 / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.1
        value.data = torch.randn(value.shape, generator=generator).mul_(scale).to(value)
    return model.eval()


@pytest.fixture(autouse=True)
def notices():
    """Notices go to standard output, as in a command, where tests look for them. A library
    that configures logging, as import-linter does, disables the loggers that are there.
    """
    from accel.cli import print_notices

    print_notices()
    for name in logging.root.manager.loggerDict:
        if name.startswith("accel"):
            logging.getLogger(name).disabled = False


@pytest.fixture(autouse=True)
def opener_of_its_own(monkeypatch):
    """urllib keeps the proxies of the environment in which it was first used."""
    monkeypatch.setattr(urllib.request, "_opener", None)


@pytest.fixture
def run():
    """Run a command of the repository in its own process: run("sample.py", "--seed", 1) →
    CompletedProcess.
    """

    def run(script, *args, cwd=ROOT, timeout=240, **environment):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return forks.run(
            [ROOT / script, *args], cwd, timeout, **{"PYTHONPATH": path, **environment}
        )

    return run


@pytest.fixture
def one_thread():
    """For what has to equal another process's bits: other sums round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def switches():
    """(GEMMs, convolutions) that may take TF32; put back afterwards."""
    from accel.runtime.precision import preserve_switches

    with preserve_switches():
        yield lambda: tuple(
            switch.fp32_precision == "tf32"
            for switch in (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
        )


@pytest.fixture
def here(monkeypatch, capsys, one_thread):
    """As `run`, on one thread of this process, which has torch already."""
    from accel.distributed import launched
    from accel.runtime.precision import preserve_switches
    from sample_ddp import STOP_SIGNALS

    def here(script, *args):
        words = [Path(script).name, *map(str, args)]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(launched, "_exit", sys.exit)  # a rank ends by os._exit
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        status = 0
        try:
            with preserve_switches():  # a command leaves those of its tier
                importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()
        except SystemExit as leaving:
            status = leaving.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return here


@pytest.fixture
def log(here, tmp_path):
    """Run bench/measure.py: log("jobs", "--labels", 0) → the record that it writes, the rows
    that it prints.
    """

    def log(*args):
        output = tmp_path / "log.json"
        printed = forks.succeeds(here("bench/measure.py", *args, "--output", output))
        return json.loads(output.read_text()), printed

    return log


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A file of random weights of the demo model."""
    from models import DiT_models

    path = tmp_path_factory.mktemp("weights") / "demo.safetensors"
    save_file(fill(DiT_models["DiT-Demo/2"]()).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def demo(weights, tiny_vae):
    """Flags: the demo model with random weights and the tiny decoder, on a CPU."""
    return [
        "--model",
        "DiT-Demo/2",
        "--ckpt",
        str(weights),
        "--vae",
        str(tiny_vae),
        "--device",
        "cpu",
    ]


@pytest.fixture(scope="session")
def tiny_vae(tmp_path_factory):
    """A random AutoencoderKL with sd-vae-ft-*'s structure (factor 8, four latent
    channels), saved in diffusers' layout.
    """
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=1,
        block_out_channels=[8, 8, 16, 16],
        norm_num_groups=4,
        latent_channels=4,
    ).save_pretrained(folder)
    return folder
