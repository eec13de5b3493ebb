"""Compile the decoder's kernels for one GPU architecture, on a machine that need not have a GPU, and print what came out.

A fresh process for each: Triton keeps a target's state. Usage: python ahead_of_time_group_norm.py CAPABILITY [decode]; with decode, how many variants
of each kernel there are after compile_ahead, and after a decoder of the published kind and the demo's have asked for theirs.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accel.kernels import group_norm as kernels


def compile_one(capability, kernel, types, constants, aligned, warps):
    """kernel: a jit function; types: of its arguments that are no constants, in order; aligned: names that multiples of 16 are passed for."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | {name: "constexpr" for name in constants}
    signature = {name: signature[name] for name in kernel.arg_names}
    divisible = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in kernel.arg_names
        if name.endswith("_ptr") or name in aligned
    }
    source = ASTSource(kernel, signature, constants, divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=warps))


def variants():
    tile = dict(PLACES=kernels.PLACES, CHANNELS=kernels.CHANNELS)
    for name, x, branch, out, forms in (
        ("statistics", "fp16", "fp16", "fp16", (False, False, True)),
        ("residual", "fp32", "fp16", "fp32", (True, True, True)),
    ):
        yield (
            name,
            kernels._add,
            [f"*{x}", f"*{branch}", "*fp32", f"*{out}", "*fp32", "i32", "i32", "i32", "i32"],
            dict(zip(("BRANCH", "WRITE", "STATISTICS"), forms)) | tile,
            {"channels"},
            kernels.WARPS,
        )
    yield (
        "join",
        kernels._join,
        ["*fp32"] * 4 + ["i32"] * 5 + ["fp32"],
        dict(IN_GROUP=16, ROWS=128, EPS=kernels.EPS),
        set(),
        4,
    )
    yield (
        "normalise",
        kernels._normalise,
        ["*fp32", "*fp32", "*fp32", "*fp16", "i32", "i32", "i32"],
        tile,
        {"channels"},
        kernels.WARPS,
    )


class NoGpu:
    """What Triton asks of a driver in order to compile."""

    launcher_cls = staticmethod(lambda source, metadata: None)

    def __init__(self, capability):
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = self.get_current_stream = lambda *_: 0


def variants_of_decoding(capability):
    from contextlib import nullcontext

    import torch

    from accel import vae
    from accel.options import DEMO
    from accel.vae.decoder import SD_VAE_FT, Decoder
    from accel.vae.half import HalfDecoder

    triton.runtime.driver.set_active(NoGpu(capability))
    torch.cuda.device = torch.cuda.device_of = lambda _: nullcontext()
    kernels.compile_ahead(None)

    def count():
        return {
            kernel.fn.__name__: sum(len(cache[0]) for cache in kernel.device_caches.values())
            for kernel in (kernels._add, kernels._join, kernels._normalise)
        }

    yield count()
    type(kernels._add).__getitem__ = lambda kernel, grid: (
        lambda *arguments, **constants: kernel.run(*arguments, grid=(1,), warmup=True, **constants)
    )
    kernels._choose = lambda route, x: "triton"
    small = Decoder({**SD_VAE_FT, "block_out_channels": [32, 64, 128, 128]}).requires_grad_(False)
    for decoder in (small, vae.load_vae(DEMO / "vae", torch.device("cpu"))):
        with torch.inference_mode():
            HalfDecoder(decoder)(torch.randn(1, 4, 4, 4))
        yield count()


if __name__ == "__main__" and sys.argv[2:] == ["decode"]:
    print(json.dumps(list(variants_of_decoding(int(sys.argv[1])))))
elif __name__ == "__main__":
    report = {}
    for name, *variant in variants():
        kernel = compile_one(int(sys.argv[1]), *variant)
        ptx = kernel.asm["ptx"]
        report[name] = dict(
            target=ptx.split(".target ")[1].split()[0],
            cubin_bytes=len(kernel.asm["cubin"]),
            tensor_core_products=ptx.count("mma."),
            bf16="bf16" in ptx,
            wide=ptx.count("global.v4") + ptx.count("global.v2"),
            spills=ptx.count(".local"),
        )
    print(json.dumps(report))
