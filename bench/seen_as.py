"""This GPU seen as one of another generation, for rehearsals and tests.

The code sees another compute capability, and Triton compiles for it: the driver compiles
the PTX for this GPU. cuBLAS and cuDNN see the real GPU: their kernels may be faster than
those they would choose on the older GPU.
"""

from contextlib import ExitStack

import torch

from accel import gpu

PROCESS = ExitStack()  # contexts that last until the process ends


def compute_capability(text: str) -> tuple[int, int]:
    """Convert a compute capability such as 8.0, for argparse."""
    major, minor = text.split(".")
    return int(major), int(minor)


def compile_for(capability: tuple[int, int]) -> None:
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


def see_as(capability: tuple[int, int]) -> None:
    """Make this process take its GPU for one of `capability`."""
    real = torch.cuda.get_device_capability()
    if capability < min((9, 0), real):
        compile_for(capability)
    if capability != real:
        PROCESS.enter_context(gpu.seen_as(capability))
