"""CUDA kernels without a toolkit.

NVRTC compiles the text, the cubin stays on disk, the driver loads and launches it. Both are called
through cuda.bindings, which torch installs, and imported late: older GPUs need neither. The first
launch on a machine compiles for seconds, later processes load some 50 KB.
"""

import ctypes
import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.io.filesystem import cache_folder, read_small
from accel.kernels import check_backend, write_cache
from accel.kernels.gpu import capability  # noqa: F401 (every choice of a backend asks cuda.capability)

HAS_TRITON = find_spec("triton") is not None  # not on Windows and macOS
BACKENDS = ("auto", "triton", "torch")  # of ops with a Triton kernel; "torch" is the reference
HALF_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}  # as PTX names them
TMA_FORMATS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
NVRTC_OPTIONS = b"--gpu-architecture=sm_90a", b"--std=c++17"


def uses_triton(op: str, backend: str, x: Tensor) -> bool:
    """Return whether `op` uses its Triton kernel for x.

    backend: one of BACKENDS; "auto" takes Triton on a GPU, except for float64.
    """
    check_backend(op, backend, BACKENDS)
    if backend == "auto":
        return HAS_TRITON and x.is_cuda and x.dtype != torch.float64
    return backend == "triton"


def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def writes_to_peer(index: int, peer: int) -> bool:
    """Return whether GPU `index` can write to GPU `peer` and update its words atomically.

    GPUs can over NVLink, rarely over PCIe.
    """
    if not torch.cuda.can_device_access_peer(index, peer):
        return False
    from cuda.bindings import driver

    devices = [call(driver.cuDeviceGet, number) for number in (index, peer)]
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(call(driver.cuDeviceGetP2PAttribute, atomics, *devices))


def call(function: Callable, *arguments: Any) -> Any:
    """Call a function of cuda.bindings, which returns (status, *values).

    Returns its first value, or None. Raises RuntimeError for a status other than success.
    """
    status, *values = function(*arguments)
    if status:
        raise RuntimeError(f"{function.__name__} failed: {status.name}")
    return values[0] if values else None


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture all launches inside the block into `graph` on `stream`.

    Other threads may load and save meanwhile. The garbage collector is off: an old graph that it
    frees on this thread would void the capture.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


def wgmma(name: str, columns: int, half: str, a_in_registers: bool = False) -> str:
    """Return the CUDA text of a function around one warpgroup MMA, 64 × columns × 16.

    Its parameters are (d, a, b, accumulate). Inline assembly must name every register.
    a_in_registers: A is in registers and B lies column by column.
    """
    count = columns // 2  # registers of d, which are the operands %0 and following
    d = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if a_in_registers:
        a = [("unsigned", "r", f"a{i}") for i in range(4)]
        a_operand = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}"
        layouts = "1"
    else:
        a = [("unsigned long long", "l", "a")]
        a_operand = f"%{count}"
        layouts = "0, 0"
    parameters = [*a, ("unsigned long long", "l", "b"), ("int", "r", "accumulate")]
    inputs = ", ".join(f"{type_} {name_}" for type_, _, name_ in parameters)
    operands = ", ".join(f'"{letter}"({name_})' for _, letter, name_ in parameters)
    return f"""__device__ __forceinline__ void {name}(float (&d)[{count}], {inputs}) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + len(a) + 1}, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} "
                 "{{{d}}}, {a_operand}, %{count + len(a)}, p, 1, 1, {layouts}; }}"
                 : {outputs} : {operands});
}}
"""


def registers(consumers: int, blocks: int = 1, producer: int | None = None) -> dict[str, int]:
    """Return a thread's registers in the consumer warpgroups and in the producer's.

    blocks: on a multiprocessor. At the start every warpgroup gets an equal share of the 64 Ki, in
    eights; setmaxnreg then moves them.
    """
    warpgroups = consumers + 1
    pool = 512 // (warpgroups * blocks) // 8 * 8 * warpgroups
    producer = producer or (24 if consumers == 2 and blocks == 1 else 32)
    consumer = (pool - producer) // consumers // 8 * 8
    return {"REGISTERS": min(240, consumer), "PRODUCER_REGISTERS": producer}


def source(
    files: tuple[Path, ...],
    config: NamedTuple,
    functions: str,
    half: str,
    **constants: int,
) -> str:
    """Return a kernel's whole text.

    It has the fields of `config` and the constants as macros, generated functions, hopper.cuh, and
    the kernel's own files. half: the operands' type, as PTX names it.
    """
    macros = {**config._asdict(), **constants}
    defines = [f"#define {name.upper()} {int(value)}\n" for name, value in macros.items()]
    shared = Path(__file__).with_name("hopper.cuh")
    texts = [file.read_text() for file in (shared, *files)]
    return "".join([*defines, f'#define HALF "{half}"\n', functions, *texts])


def compile_cubin(text: str, name: str) -> bytes:
    """Compile to machine code for sm_90a, by NVRTC; needs no GPU.

    Raises RuntimeError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    program = call(nvrtc.nvrtcCreateProgram, text.encode(), name.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(NVRTC_OPTIONS), NVRTC_OPTIONS)
        if status:
            log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise RuntimeError(f"{name} does not compile:\n{log.decode()}")
        cubin = bytes(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(text: str, name: str) -> bytes:
    """Return `compile_cubin`'s code, kept on disk behind its SHA-256.

    The file's name changes with text and compiler. A file that does not match its digest is
    compiled again.
    """
    parts = (text.encode(), str(torch.version.cuda).encode(), *NVRTC_OPTIONS)
    key = hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]
    file = cache_folder() / f"{name}-{key}.cubin"
    try:
        kept = read_small(file)
    except OSError:
        kept = b""
    if kept[:32] == hashlib.sha256(kept[32:]).digest():
        return kept[32:]
    cubin = compile_cubin(text, name)
    write_cache(file, hashlib.sha256(cubin).digest() + cubin)
    return cubin


class Kernel:
    """The kernel `name` of a CUDA text, loaded on a device.

    It must not be made while a graph is being captured. shared_bytes: dynamic shared memory of a
    block.
    """

    def __init__(self, text: str, name: str, threads: int, shared_bytes: int, device: torch.device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: first used inside a CUDA graph; run the step once before capturing it"
            )
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.device = device
        from cuda.bindings import driver

        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the device's context
            module = call(driver.cuModuleLoadData, cached_cubin(text, name))
            self.function = call(driver.cuModuleGetFunction, module, name.encode())
            # All kernels have one carve-out: with another, a kernel could not be set up while
            # its predecessor runs.
            settings = {
                "MAX_DYNAMIC_SHARED_SIZE_BYTES": shared_bytes,
                "PREFERRED_SHARED_MEMORY_CARVEOUT": 100,
            }
            for setting, value in settings.items():
                attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{setting}")
                call(driver.cuFuncSetAttribute, self.function, attribute, value)

    def launch(self, blocks: int, *arguments: Any, overlap: bool = False) -> None:
        """Launch on the device's current stream.

        arguments: tensors (their pointers), None (no pointer), int and float (32 bits), tensor
        maps. overlap: programmatic dependent launch, for a kernel that itself awaits the one
        before.
        """
        from cuda.bindings import driver

        values, types = zip(*map(_argument, arguments))
        configuration = driver.CUlaunchConfig()
        configuration.gridDimX = blocks
        configuration.gridDimY = configuration.gridDimZ = 1
        configuration.blockDimX = self.threads
        configuration.blockDimY = configuration.blockDimZ = 1
        configuration.sharedMemBytes = self.shared_bytes
        attributes = [_overlapping()] if overlap else []
        configuration.attrs = attributes
        configuration.numAttrs = len(attributes)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            configuration.hStream = driver.CUstream(stream)
            call(driver.cuLaunchKernelEx, configuration, self.function, (values, types), 0)


def _overlapping():
    """Return the launch attribute of programmatic dependent launch."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


_C_TYPES = {int: ctypes.c_int, float: ctypes.c_float}


def _argument(value):
    """Return a kernel's argument as cuda.bindings takes it: (value, ctypes type).

    A tensor map's type is None.
    """
    if value is None:
        return 0, ctypes.c_void_p
    if torch.is_tensor(value):
        return value.data_ptr(), ctypes.c_void_p
    return value, _C_TYPES.get(type(value))


def tensor_map(
    tensor: Tensor,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    gaps: bool = False,
) -> Any:
    """Describe a tensor's memory to TMA.

    sizes: in elements, innermost first. strides: in bytes, of all dimensions but the innermost.
    box: the size of one copy. swizzle: bytes that the box's lines are swizzled over. gaps: whether
    the tensor's lines may lie apart. Raises ValueError for another dtype, for unexpected gaps, or
    for lines that are not aligned to 16 bytes.
    """
    from cuda.bindings import driver

    misaligned = any(number % 16 for number in (tensor.data_ptr(), *strides))
    dense = tensor.is_contiguous() or (gaps and tensor.stride(-1) == 1)
    if tensor.dtype not in TMA_FORMATS or misaligned or not dense:
        raise ValueError(
            "backend 'hopper' takes contiguous tensors in half precision or float32, aligned to 16 "
            "bytes"
        )
    number_format = TMA_FORMATS[tensor.dtype]
    return call(
        driver.cuTensorMapEncodeTiled,
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{number_format}"),
        len(sizes),
        tensor.data_ptr(),
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(side) for side in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
