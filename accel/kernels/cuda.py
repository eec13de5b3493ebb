"""CUDA kernels without a toolkit.

NVRTC compiles the source, the cubin is cached on disk, and the driver loads and launches it. Both
libraries are called through cuda.bindings, which torch installs. The import is late, because older
GPUs do not need it. The first launch on a machine compiles for seconds; later processes load about
50 KB.
"""

import ctypes
import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.io.filesystem import cache_folder, read_small
from accel.kernels import write_cache

HALF_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}  # dtype → PTX name
TMA_FORMATS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
HOPPER = "sm_90a"  # the target of kernels for Hopper alone


def uses_triton(backend: str, x: Tensor) -> bool:
    """Return whether an op runs its Triton kernel on x.

    backend: "triton", "torch" for the reference, or "auto": Triton on a GPU, except for float64.
    """
    if backend == "auto":
        return x.is_cuda and x.dtype != torch.float64
    return backend == "triton"


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def writes_to_peer(index: int, peer: int) -> bool:
    """Return whether GPU `index` can write to memory of GPU `peer`, with atomic updates.

    NVLink supports it, PCIe rarely does.
    """
    if not torch.cuda.can_device_access_peer(index, peer):
        return False
    from cuda.bindings import driver

    devices = [call(driver.cuDeviceGet, number) for number in (index, peer)]
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(call(driver.cuDeviceGetP2PAttribute, atomics, *devices))


def call(function: Callable, *arguments: Any) -> Any:
    """Call a function of cuda.bindings, which returns (status, *values).

    Return the first value, or None. Raise RuntimeError if the call fails.
    """
    status, *values = function(*arguments)
    if status:
        raise RuntimeError(f"{function.__name__} failed: {status.name}")
    return values[0] if values else None


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture all launches in the with-block into `graph` on `stream`.

    Other threads may copy tensors during the capture. The garbage collector is disabled, because
    freeing an old graph on this thread would invalidate the capture.
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
    """Return the CUDA source of a function for one warpgroup MMA, 64 × columns × 16.

    Its parameters are (d, a, b, accumulate). It is generated because inline assembly must name
    every register. a_in_registers: A is in registers, and B is column-major.
    """
    count = columns // 2  # registers of d, which are the operands %0, %1, …
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
    """Return the registers per thread of the consumer warpgroups and of the producer warpgroup.

    blocks: number of blocks per multiprocessor. At launch the 64 Ki registers are divided equally
    among the warpgroups, in multiples of eight; setmaxnreg then redistributes them.
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
    """Return the complete CUDA source of a kernel.

    It consists of macros for the fields of `config` and the constants, generated functions,
    hopper.cuh, and the kernel's files. half: PTX name of the operands' type.
    """
    macros = {**config._asdict(), **constants}
    defines = [f"#define {name.upper()} {int(value)}\n" for name, value in macros.items()]
    shared = Path(__file__).with_name("hopper.cuh")
    texts = [file.read_text() for file in (shared, *files)]
    return "".join([*defines, f'#define HALF "{half}"\n', functions, *texts])


def compile_cubin(text: str, name: str, target: str = HOPPER) -> bytes:
    """Compile CUDA source to machine code with NVRTC. No GPU is needed.

    Raises RuntimeError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    options = f"--gpu-architecture={target}".encode(), b"--std=c++17"
    program = call(nvrtc.nvrtcCreateProgram, text.encode(), name.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status:
            log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise RuntimeError(f"{name} does not compile:\n{log.decode()}")
        cubin = bytes(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(text: str, name: str, target: str = HOPPER) -> bytes:
    """Return the result of `compile_cubin`, cached on disk.

    The file's name contains a hash of source and compiler. The file starts with the SHA-256 of the
    code; if they do not match, the source is compiled again.
    """
    parts = text, str(torch.version.cuda), target
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    file = cache_folder() / f"{name}-{key}.cubin"
    try:
        kept = read_small(file)
    except OSError:
        kept = b""
    if kept[:32] == hashlib.sha256(kept[32:]).digest():
        return kept[32:]
    cubin = compile_cubin(text, name, target)
    write_cache(file, hashlib.sha256(cubin).digest() + cubin)
    return cubin


class Kernel:
    """The kernel `name` of a CUDA source, loaded on a device.

    Raises RuntimeError during graph capture. shared_bytes: dynamic shared memory per block.
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

        major, minor = torch.cuda.get_device_capability(device)
        target = HOPPER if (major, minor) == (9, 0) else f"sm_{major}{minor}"
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # creates the device's context
            module = call(driver.cuModuleLoadData, cached_cubin(text, name, target))
            self.function = call(driver.cuModuleGetFunction, module, name.encode())
            # All kernels use the same carve-out. If it differed, a kernel could not be set up
            # while its predecessor runs.
            settings = {
                "MAX_DYNAMIC_SHARED_SIZE_BYTES": shared_bytes,
                "PREFERRED_SHARED_MEMORY_CARVEOUT": 100,
            }
            for setting, value in settings.items():
                attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{setting}")
                call(driver.cuFuncSetAttribute, self.function, attribute, value)

    def launch(self, blocks: int, *arguments: Any, overlap: bool = False) -> None:
        """Launch the kernel on the device's current stream.

        arguments: tensors (passed as pointers), None (a null pointer), int and float (32 bits),
        tensor maps. overlap: programmatic dependent launch, for kernels that wait for their
        predecessor themselves.
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
    """Convert a kernel argument for cuda.bindings: (value, ctypes type).

    The type of a tensor map is None.
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
    """Return a TMA descriptor of a tensor's memory.

    sizes: in elements, innermost first. strides: in bytes, without the innermost dimension. box:
    the size of one copy. swizzle: width in bytes of the swizzle pattern. gaps: whether there may be
    gaps between rows. Raises ValueError for unsupported dtypes, unexpected gaps, and rows that are
    not aligned to 16 bytes.
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
