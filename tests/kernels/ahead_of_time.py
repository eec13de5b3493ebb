"""Compile Triton kernels for one GPU architecture, on a machine that need not have a GPU: python ahead_of_time.py
CAPABILITY NAME …, names of VARIANTS. Prints what came out, as JSON. A process for each architecture: Triton keeps a
target's state."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accel.kernels import push, qk_norm_rotary, swiglu
from accel.kernels.adaln import triton as adaln
from accel.kernels.attention import triton as attention
from accel.kernels.group_norm import triton as group_norm
from accel.kernels.split_attention import between
from accel.kernels.split_linear import triton as split_linear

SUM = ("i32", "i32*16", "i32", "i32")
JOIN = dict(IN_GROUP=16, ROWS=128, EPS=1e-6, num_warps=4)


def adaln_variant(capability, branch, out, high_low, width=1152, centre=True, stack=False):
    types = ["*fp32", f"*{branch}", f"*{branch}", f"*{out}", "*fp32", "*fp32", "*i64", "i32", "i32*16", *["i32"] * 5]
    constants = dict(WIDTH=width, BRANCHES=2, HIGH_LOW=high_low, STACK=stack, EPS=1e-6, CENTRE=centre)
    return adaln._adaln, types, dict(**constants, **adaln.tile_config(width), START_NEXT=capability >= 90)


def rotary_variant(pointers, width, head, high_low, rms_eps=None):
    constants = dict(HIGH_LOW=high_low, **qk_norm_rotary.config(width, head, True, rms_eps))
    return qk_norm_rotary._qk_norm_rotary, [*pointers, "i32", "i32", "i32"], constants


def group_norm_sum(x, out, forms):
    types = [f"*{x}", "*fp16", "*fp32", f"*{out}", "*fp32", *SUM]
    return group_norm._add, types, dict(zip(("BRANCH", "WRITE", "STATISTICS"), forms), **group_norm.TILE)


# Name → (kernel, types of its arguments that are no constants, constants and launch options). "*16": multiples of 16.
VARIANTS = {
    "adaln": lambda capability: adaln_variant(capability, "fp16", "fp16", False),
    "adaln_split": lambda capability: adaln_variant(capability, "fp32", "fp16", True),
    "adaln_stack": lambda capability: adaln_variant(capability, "fp32", "fp16", True, stack=True),
    "adaln_rms": lambda capability: adaln_variant(capability, "fp16", "fp16", False, 3072, False),
    "push": lambda _: (
        push._push,
        ["*i64", "*i64", "*i64", "i32", "i32*16", "i32", "i32", "i32*16"],
        dict(WIDTH=576, WORLD=4, BLOCK=push.BLOCK, TURNS=5, num_warps=push.WARPS),
    ),
    "adaln_split_rms": lambda capability: adaln_variant(capability, "fp32", "fp16", True, 4096, False, stack=True),
    "swiglu_split": lambda _: (
        swiglu._swiglu_split,
        ["*fp32", "*fp16", "*fp32", "i32"],
        dict(STACK=True, **swiglu.split_config(11008)),
    ),
    "qk_norm_rotary_split": lambda _: rotary_variant(["*fp32", "*fp16", "*fp32", "*fp32", "*i32"], 4096, 128, True),
    "swiglu": lambda capability: (
        swiglu._swiglu,
        ["*fp16", "*fp16"],
        dict(WIDTH=11008, BLOCK=swiglu.BLOCK, START_NEXT=capability >= 90),
    ),
    "qk_norm_rotary": lambda _: rotary_variant(["*fp16", "*fp16", "*fp32", "*fp32", "*i32"], 3072, 96, False),
    "qk_norm_rotary_rms": lambda _: rotary_variant(["*fp16", "*fp16", "*fp32", "*fp32", "*i32"], 1152, 72, False, 1e-6),
    "statistics": lambda _: group_norm_sum("fp16", "fp16", (False, False, True)),
    "residual": lambda _: group_norm_sum("fp32", "fp32", (True, True, True)),
    "join": lambda _: (group_norm._join, ["*fp32"] * 4 + ["i32"] * 5 + ["fp32"], JOIN),
    "normalise": lambda _: (
        group_norm._normalise,
        ["*fp32", "*fp32", "*fp32", "*fp16", "i32", "i32*16", "i32"],
        group_norm.TILE,
    ),
    "attention": lambda _: (
        attention._attention,
        ["*fp16", "*fp16", "*fp16", "i32*16", "i32*16", "i32*16", "i32*16", "fp32"],
        dict(TOKENS=1024, **attention.TILE),
    ),
    "split_finish": lambda _: (
        split_linear._finish,
        ["*fp32", "*fp16"] + ["*fp32"] * 4 + ["*i32", "i32", "i32*16", "i32*16", "i32*16"],
        dict(SCALED=True, RESULT=2, **split_linear.TILE),
    ),
    "split_centre": lambda _: (
        between._attention_centre,
        ["*fp16", "*fp32", "i32*16"],
        dict(TOKENS=1024, **{**between.tile(72), **between.CENTRE}),
    ),
    "split_operands": lambda _: (
        between._attention_operands,
        ["*fp16", "*fp32", "*fp16", "*fp16", "*fp16", "i32*16", "i32*16", "i32", "i32*16"],
        dict(SCALE=0.5, **between.tile(72)),
    ),
    "split_softmax": lambda _: (
        between._attention_softmax,
        ["*fp32", "*fp16", "i32*16", "fp32"],
        dict(LIFT=2.0**15, BLOCK=1024, num_warps=between.warps(1024)),
    ),
    "split_merge": lambda _: (
        between._attention_merge,
        ["*fp32", "*fp32", "*fp16", "i32*16", "i32*16", "i32"],
        dict(SCALE=2.0**-14, **between.tile(72)),
    ),
}


def compile_variant(capability, kernel, types, constants):
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    names = [name for name in kernel.arg_names if name not in constants]
    given = dict(zip(names, types, strict=True))
    signature = {name: given.get(name, "constexpr").removesuffix("*16") for name in kernel.arg_names}
    aligned = [name for name, kind in given.items() if kind.startswith("*") or kind.endswith("*16")]
    divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    capability, reports = int(sys.argv[1]), {}
    for name in sys.argv[2:]:
        compiled = compile_variant(capability, *VARIANTS[name](capability))
        ptx = compiled.asm["ptx"]
        reports[name] = dict(
            target=ptx.split(".target ")[1].split()[0],
            tensor_core=sum(map(ptx.count, ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))),
            tf32=ptx.count("tf32"),
            bf16="bf16" in ptx,
            wide=ptx.count("global.v4") + ptx.count("global.v2"),
            spills=ptx.count(".local"),
            shared=compiled.metadata.shared,
            ptx=ptx if name == "push" else None,
        )
    print(json.dumps(reports))
