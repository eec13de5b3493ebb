"""Compile Triton's split kernels for one GPU architecture, on a machine that need not have a GPU; prints for each how many tensor-core products it
holds and how many of them are TF32's. Usage: python ahead_of_time_split.py CAPABILITY"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accel.kernels import split_attention
from accel.kernels import split_linear as split


def compile_for(capability, function, signature, constants):
    config = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    signature = {**signature, **{name: "constexpr" for name in constants}}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name.endswith("_ptr")}
    ptx = triton.compile(
        ASTSource(function, signature, constants, aligned), target=GPUTarget("cuda", capability, 32), options=config
    ).asm["ptx"]
    return ptx.count("mma.sync") + ptx.count("wgmma.mma_async"), ptx.count("tf32")


if __name__ == "__main__":
    capability = int(sys.argv[1])
    print(
        *compile_for(
            capability,
            split._split_linear,
            dict(
                a_ptr="*fp16",
                b_ptr="*fp16",
                out_ptr="*fp16",
                row_scale_ptr="*fp32",
                scale_ptr="*fp32",
                bias_ptr="*fp32",
                after_ptr="*fp32",
                overflow_ptr="*i32",
                rows="i32",
                columns="i32",
                a_term="i32",
                out_term="i32",
            ),
            dict(depth=1152, SCALED=True, RESULT=2, WATCHED=True, **split.TRITON),
        )
    )
    print(
        *compile_for(
            capability,
            split_attention._split_attention,
            dict(qkv_ptr="*fp16", out_ptr="*fp16", term="i32", out_term="i32", heads="i32", scale="fp32"),
            dict(TOKENS=1024, DIM=72, MAIN=64, REST=16, **split_attention.TRITON),
        )
    )
