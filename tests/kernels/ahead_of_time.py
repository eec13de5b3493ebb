"""Compile the Triton kernels that ops launch for one GPU architecture, on a machine that
need not have a GPU: python ahead_of_time.py CAPABILITY NAME …, names of CALLS. Prints a
report of each kernel, as JSON. A process for each architecture: Triton keeps a target's
state.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from torch import float16, float32, int32, int64, zeros
from triton.backends.compiler import GPUTarget

from accel.kernels import gpu, push
from accel.kernels.adaln import Modulation, adaln, adaln_split
from accel.kernels.group_norm import add, group_norm
from accel.kernels.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_split
from accel.kernels.rows import row_squares, silu_sum
from accel.kernels.split_attention import cublas as split_attention_gemms
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import SplitLinear, split, split_rows
from accel.kernels.split_linear import cublas as split_linear_gemms
from accel.kernels.swiglu import swiglu, swiglu_split


def norm(op, width, branch, entry=(1,), table=float32, **options):
    x = zeros(1, 2048, width)
    modulation = Modulation(zeros(1, 6, width, dtype=table), zeros(entry, dtype=int64))
    op(x, modulation, 0, ((x.to(branch), 2),) * 2, backend="triton", **options)


def rotate(op, width, head, dtype, *overflow, rms_eps=None):
    qkv = zeros(1, 16, 3 * width, dtype=dtype)
    rotation = zeros(16, head // 2, 2)
    norms = zeros(2, 2, width)
    op(qkv, rotation, *overflow, norms=norms, rms_eps=rms_eps, backend="triton")


def decode():
    """The sums and norms of a residual block in float16."""
    x = zeros(1, 128, 64, 64).to(memory_format=torch.channels_last)
    bias = zeros(128)
    for total in (
        add(x.half(), bias, backend="triton"),
        add(x, bias, x.half(), float32, backend="triton"),
    ):
        group_norm(total, bias, bias, 32, backend="triton")
    add(x, bias, x.half(), float16, statistics=False, backend="triton")


def rows():
    x = zeros(1, 16, 1152)
    modulation = Modulation(zeros(1, 6, 1152), zeros(1, dtype=int64))
    silu_sum(x, modulation, 5, ((x.half(), 1), (x.half(), 2)), float16, "triton")
    row_squares(zeros(16, 2048), "triton")


def split_layers():
    """A float32 result, a high/low split, and GELU's."""
    flag = zeros(1, dtype=int32)
    one = torch.ones(4608)
    for options in ({}, dict(overflow=flag), dict(overflow=flag, gelu_scale=one)):
        SplitLinear(torch.ones(4608, 1152), one, backend="cublas", **options)(
            split(torch.ones(16, 1152))
        )


CALLS = {
    "adaln": lambda: norm(adaln, 1152, float16, dtype=float16),
    "adaln_rms": lambda: norm(adaln, 3072, float16, dtype=float16, rms_eps=1e-5),
    "adaln_split": lambda: norm(adaln_split, 1152, float32),
    "adaln_token": lambda: norm(
        adaln, 2048, float16, (1, 2048), float16, dtype=float16, rms_eps=1e-6
    ),
    "adaln_stack": lambda: norm(adaln_split, 4096, float32, rms_eps=1e-5, stack=True),
    "qk_norm_rotary": lambda: rotate(qk_norm_rotary, 3072, 96, float16),
    "qk_norm_rotary_rms": lambda: rotate(qk_norm_rotary, 1152, 72, float16, rms_eps=1e-6),
    "qk_norm_rotary_split": lambda: rotate(
        qk_norm_rotary_split, 4096, 128, float32, zeros(1, dtype=int32)
    ),
    "swiglu": lambda: swiglu(zeros(1, 16, 2 * 11008, dtype=float16), "triton"),
    "swiglu_split": lambda: swiglu_split(zeros(1, 16, 2 * 11008), "triton", stack=True),
    "group_norm": decode,
    "rows": rows,
    "split_linear": split_layers,
    "split_rows": lambda: [
        split_rows(x, stack, "triton")
        for x in (zeros(16, 768), zeros(1, 768, 16).mT)
        for stack in (False, True)
    ],
    "split_attention": lambda: split_attention(
        split(zeros(1, 1024, 3 * 1152), per_row=False), 16, "cublas"
    ),
    "push": lambda: push.push(
        zeros(2, 256, 2304, dtype=float16), *zeros(2, 4, dtype=int64), rank=0, offset=0
    ),
}


def kernels_of(name):
    """Return the kernels that a call launches, compiled and not launched."""
    compiled = []

    def compile_only(kernel, grid):
        return lambda *args, **options: compiled.append(
            kernel.run(*args, grid=grid, warmup=True, **options)
        )

    triton.runtime.JITFunction.__getitem__ = compile_only
    CALLS[name]()
    return compiled


def report(kernel):
    ptx = kernel.asm["ptx"]
    return dict(
        name=kernel.name,
        target=ptx.split(".target ")[1].split()[0],
        tensor_core=sum(map(ptx.count, ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))),
        tf32=ptx.count("tf32"),
        spills=ptx.count(".local"),
        shared=kernel.metadata.shared,
        releases=ptx.count("release.sys"),
        acquires=ptx.count("acquire.sys"),
    )


if __name__ == "__main__":
    capability = int(sys.argv[1])
    no_gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(no_gpu)
    gpu.capability = lambda device: divmod(capability, 10)
    split_linear_gemms.multiply_add = split_attention_gemms.multiply_add = (
        lambda *operands, **options: None
    )
    print(
        json.dumps({name: [report(kernel) for kernel in kernels_of(name)] for name in sys.argv[2:]})
    )
