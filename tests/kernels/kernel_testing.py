"""Helpers of the kernels' tests."""

import json
import os
import shutil
import subprocess
import tempfile
from itertools import chain
from pathlib import Path

import forks
import pytest
import torch

HERE = Path(__file__).parent


def draw(*shape, seed=0, device="cpu"):
    """Return normally distributed numbers, equal on all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def error(got, want):
    """Return the relative error against a float64 result."""
    return float((got.double() - want).norm() / want.norm())


def formula(qkv, heads, kv=None, dtype=torch.float64):
    """Return attention to the keys and values of `kv` or its own, in `dtype`."""
    width = qkv.shape[-1] // 3
    kv = qkv[..., width:] if kv is None else kv
    q, k, v = (
        x.to(dtype).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x in (qkv[..., :width], *kv.chunk(2, -1))
    )
    # q, k, v (N, H, T, d)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("our kernel needs a GPU of capability 9.0")


def fresh_process(*arguments, **environment):
    """Return the output of Python in a separate process, which can import the tests."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = forks.run(arguments, **{"PYTHONPATH": path, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compile_for(capability):
    """Make Triton compile for an older GPU of `capability`, and the driver compile its
    PTX for this GPU. Call this once in a process, before a kernel is launched.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def keep_ptx(backend, stages, *_):
        stages["cubin"] = lambda ptx, metadata: ptx.encode() + b"\0"

    CudaDriver.get_current_target = lambda driver: target
    knobs.runtime.add_stages_inspection_hook = keep_ptx


def interpreted(call):
    """Make `call`, "module.function(…)" of a test file, with Triton's interpreter, which
    must be chosen before Triton is imported.
    """
    code = f"import {call.split('.')[0]}; {call}; print('interpreted')"
    assert "interpreted" in fresh_process("-c", code, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def compiled_for(capability, names, tmp_path):
    """Return the reports of ahead_of_time.py: by call, of each kernel. Checks the target,
    and that nothing spills.
    """
    script = str(HERE / "ahead_of_time.py")
    reports = json.loads(
        fresh_process(script, str(capability), *names, TRITON_CACHE_DIR=str(tmp_path))
    )
    for report in chain(*reports.values()):
        assert report["target"].startswith(f"sm_{capability}") and report["spills"] == 0
    return reports


def disassemble(cubin):
    """Return the SASS of a cubin (bytes)."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip(
            "triton", reason="needs cuobjdump, which CUDA's toolkit and Triton bring"
        )
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
