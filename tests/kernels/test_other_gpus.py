"""Triton's kernels on every generation of GPUs: compiled for each, and those for older
ones run. The driver makes this GPU's machine code of their PTX, and they give the
reference's numbers. Each generation in a process of its own, since Triton keeps a
target's state.
"""

import ahead_of_time
import pytest
import torch
from kernel_testing import compiled_for, fresh_process

RUN = """
import torch
from accel.kernels import gpu
from kernel_testing import compile_for

capability = {capability}
compile_for(capability)
import {tests} as tests
import accel.kernels.{kernels} as kernels

gpu.emulated = capability
{call}
gpu.emulated = None
jitted = [one for one in vars(kernels).values() if hasattr(one, "device_caches")]
caches = [cache[0] for one in jitted for cache in one.device_caches.values()]
ran = [kernel for cache in caches for kernel in cache.values()]
assert ran and all(".target sm_%d%d" % capability in kernel.asm["cubin"].decode() for kernel in ran)
print(len(ran), "ran")
"""
# Test file, module of the kernels, call.
ANY_GPU = [
    ("test_adaln", "adaln.triton", "check(1152, 16, 1024, 2, torch.float16, 'cuda', 3e-4)"),
    ("test_adaln", "adaln.triton", "check(216, 5, 17, 1, torch.float32, 'cuda', 1e-6)"),
    ("test_adaln", "adaln.triton", "check_split('triton', 'cuda')"),
    (
        "test_group_norm",
        "group_norm.triton",
        "check(256, 32, 255, 130, *tests.FORMS[0], 'cuda', 'triton')",
    ),
    (
        "test_group_norm",
        "group_norm.triton",
        "check(80, 16, 9, 8, *tests.FORMS[3], 'cuda', 'triton')",
    ),
    (
        "test_split_linear",
        "split_linear.triton",
        "check_linear(2048, 3456, 1152, 'cublas', 'cuda')",
    ),
    ("test_split_linear", "split_linear.triton", "check_linear(33, 200, 72, 'cublas', 'cuda')"),
    ("test_split_linear", "split_linear.triton", "check_split_rows('cuda')"),
    ("test_split_attention", "split_attention.triton", "check(2, 1024, 16, 72, 'cublas', 'cuda')"),
    ("test_split_attention", "split_attention.triton", "check(3, 17, 2, 72, 'cublas', 'cuda')"),
]
# KiB of a block; an A100 has 163, Ada 99
SHARED = {70: 96, 75: 64, 80: 99, 90: 227, 100: 227, 120: 99}
CASES = [(capability, *case) for capability in ((7, 0), (8, 0)) for case in ANY_GPU]


@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles(capability, tmp_path):
    """For V100, T4, Ampere and Ada, H100, B200 and the smaller Blackwells: none needs tensor
    cores or computes in TF32.
    """
    for name, reports in compiled_for(capability, list(ahead_of_time.CALLS), tmp_path).items():
        assert reports, name
        for report in reports:
            assert report["shared"] <= SHARED[capability] << 10 and report["tf32"] == 0, (
                name,
                report,
            )
            assert report["tensor_core"] == 0, (name, report)


@pytest.mark.gpu
@pytest.mark.parametrize("capability, tests, kernels, call", CASES, ids=str)
def test_older_ptx_runs(capability, tests, kernels, call, tmp_path):
    if torch.cuda.get_device_capability() <= capability:
        pytest.skip("the PTX is for an older GPU than this one")
    program = RUN.format(capability=capability, tests=tests, kernels=kernels, call=f"tests.{call}")
    assert "ran" in fresh_process("-c", program, TRITON_CACHE_DIR=str(tmp_path))
