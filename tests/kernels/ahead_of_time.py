"""Compile one variant of the row kernel for one GPU architecture, on a machine that need not have a GPU, and print what came out.

A fresh process for each: Triton keeps a target's state. Usage: python ahead_of_time.py CAPABILITY WIDTH DTYPE BRANCHES UPDATE
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accel.kernels import adaln as norm


def compile_norm(capability, width, dtype, branches, update):
    config, terms = norm.tile_config(width), dtype == "terms"  # which takes float32 branches and gives pairs of float16
    branch, out = ("fp32", "fp16") if terms else (dtype, dtype)
    warps = config.pop("num_warps")
    constants = dict(
        WIDTH=width,
        BRANCHES=branches,
        UPDATE=update,
        TERMS=terms,
        EPS=norm.EPS,
        START_NEXT=capability >= 90 and norm.start_next is not None,
        **config,
    )
    signature = dict(
        x_ptr="*fp32",
        first_ptr=f"*{branch}",
        second_ptr=f"*{branch}",
        out_ptr=f"*{out}",
        row_scale_ptr="*fp32" if terms else f"*{out}",
        table_ptr="*fp32",
        entry_ptr="*i64",
        tokens="i32",
        entry_stride="i32",
        term="i32",
        shift="i32",
        scale="i32",
        gate1="i32",
        gate2="i32",
        **{name: "constexpr" for name in constants},
    )
    aligned = [list(signature).index(name) for name in signature if name.endswith("_ptr") or name == "entry_stride"]
    source = ASTSource(norm._norm_modulate, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=warps))


if __name__ == "__main__":
    capability, width, dtype, branches, update = sys.argv[1:]
    kernel = compile_norm(int(capability), int(width), dtype, int(branches), bool(int(update)))
    ptx = kernel.asm["ptx"]
    print(
        json.dumps(
            dict(
                target=ptx.split(".target ")[1].split()[0],
                cubin_bytes=len(kernel.asm["cubin"]),
                tensor_core_products=ptx.count("mma."),
                bf16="bf16" in ptx,
                wide_loads=ptx.count("ld.global.v4"),
                barriers=ptx.count("bar.sync"),
                spills=ptx.count(".local"),
            )
        )
    )
