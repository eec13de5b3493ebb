"""CUDA for Hopper without a toolkit: text is compiled by the NVRTC that torch brings, kept on disk, launched through the driver.

The first call on a machine compiles for seconds, later processes load some 50 KB.
"""

import ctypes
import hashlib
import os
from functools import lru_cache
from pathlib import Path

import torch

HALF = {torch.float16: "f16", torch.bfloat16: "bf16"}
SWIZZLE_32, SWIZZLE_64, SWIZZLE_128 = 1, 2, 3
_ENCODED = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_…
_L2_PROMOTION_128 = 2
_MAX_DYNAMIC_SHARED_SIZE_BYTES, _PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9  # CU_FUNC_ATTRIBUTE_…


def product(name, columns, half, a_in_registers, accumulate, b_along_columns):
    """A device function around one warpgroup product, 64 × columns × 16; inline assembly must spell out every register.
    `accumulate`: always, or by a last argument; `b_along_columns`: B lies in memory column beside column."""
    count = columns // 2
    inputs = (
        ["unsigned a0", "unsigned a1", "unsigned a2", "unsigned a3"] if a_in_registers else ["unsigned long long a"]
    )
    inputs += ["unsigned long long b"] + ([] if accumulate else ["int accumulate"])
    number = iter(range(count, count + 6))
    a = "{" + ", ".join(f"%{next(number)}" for _ in range(4)) + "}" if a_in_registers else f"%{next(number)}"
    b = f"%{next(number)}"
    setup, predicate = ("", "1") if accumulate else (f".reg .pred p; setp.ne.b32 p, %{next(number)}, 0; ", "p")
    layouts = f"{int(b_along_columns)}" if a_in_registers else f"0, {int(b_along_columns)}"
    d, outputs = ", ".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(d[{i}])' for i in range(count))
    operands = ", ".join(f'"{"l" if "long" in kind else "r"}"({kind.split()[-1]})' for kind in inputs)
    return f"""__device__ __forceinline__ void {name}(float (&d)[{count}], {", ".join(inputs)}) {{
    asm volatile("{{ {setup}wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} {{{d}}}, {a}, {b}, {predicate}, 1, 1, {layouts}; }}"
                 : {outputs} : {operands});
}}
"""


def conversions(half):
    """Device functions round_pair (two floats → two halves in a register) and widen (back)."""
    to_float = "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;" if half == "f16" else "mov.b32 %0, {z, a}; mov.b32 %1, {z, b};"
    return f"""__device__ __forceinline__ unsigned round_pair(float low, float high) {{
    unsigned pair;
    asm("cvt.rn.{half}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}}
__device__ __forceinline__ void widen(unsigned pair, float &low, float &high) {{
    asm("{{ .reg .b16 a, b, z; mov.b16 z, 0; mov.b32 {{a, b}}, %2; {to_float} }}" : "=f"(low), "=f"(high) : "r"(pair));
}}
"""


def registers(warpgroups, copying=None, blocks=1):
    """Of a computing and of a copying thread, where a multiprocessor holds `blocks`: its 64 Ki are given out per warpgroup in eights at the start, then
    moved."""
    pool = 512 // ((warpgroups + 1) * blocks) // 8 * 8 * (warpgroups + 1)
    copying = copying or (24 if warpgroups == 2 and blocks == 1 else 32)
    return dict(REGISTERS=min(240, (pool - copying) // warpgroups // 8 * 8), COPY_REGISTERS=copying)


def text(file, constants, *functions):
    """The whole CUDA text: constants, functions made for them, what all kernels share, and the kernel's own file."""
    return (
        "".join(f"#define {name} {value}\n" for name, value in constants.items())
        + "".join(functions)
        + Path(__file__).with_name("hopper.cuh").read_text()
        + file.read_text()
    )


def compile_cubin(text, name):
    """Machine code for sm_90a, by NVRTC; needs no GPU."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            size = ctypes.c_size_t()
            _check_nvrtc(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check_nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{name} does not compile:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check_nvrtc(status):
    if status:
        raise RuntimeError(f"NVRTC failed with status {status}")


@lru_cache(None)
def _nvrtc():
    major = torch.version.cuda.split(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:  # not on the loader's path: beside torch, in its own wheel
        folder = Path(torch.__file__).parents[1] / "nvidia"
        found = sorted(folder.glob(f"*/lib/libnvrtc.so.{major}"))
        if not found:
            raise RuntimeError(
                f"no libnvrtc.so.{major} for the routes 'hopper'; pip install nvidia-cuda-nvrtc, or name other routes"
            ) from None
        return ctypes.CDLL(str(found[0]))


def _cubin(text, name):
    """Compiled code, kept on disk under a name that changes with the text and the compiler."""
    key = hashlib.sha256((text + str(torch.version.cuda)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit"
    file = folder / f"{name.removesuffix('.cu')}-{key}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        cubin = compile_cubin(text, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_bytes(cubin)
        os.replace(partial, file)
    except OSError:  # a read-only home: every process compiles for itself
        pass
    return cubin


def call(name, *arguments):
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


@lru_cache(None)
def _driver():
    return ctypes.CDLL("libcuda.so.1")


def load(text, name, entry, shared_bytes, device):
    """The kernel `entry` of a text, on a device. Not while a graph is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: the kernel was first met inside a CUDA graph; run the step once before capturing it"
        )
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), _cubin(text, name))
        call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        call(
            "cuFuncSetAttribute", function, _PREFERRED_SHARED_MEMORY_CARVEOUT, 100
        )  # all alike: one can be set up beside another
    return function


def tensor_map(pointer, dtype, sizes, strides, box, swizzle):
    """How the copy engine sees a tensor: sizes (innermost first), strides in bytes of all dimensions but the innermost, and what one copy takes."""
    room = ctypes.create_string_buffer(192)
    address = (ctypes.addressof(room) + 63) // 64 * 64  # the driver asks for this alignment
    rank = len(sizes)
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(address),
        _ENCODED[dtype],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        swizzle,
        _L2_PROMOTION_128,
        0,
    )
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(address, 128))


class _Attribute(ctypes.Structure):  # CUlaunchAttribute of cuda.h
    _fields_ = [("kind", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Launch(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_…


def _configuration(blocks, threads, shared_bytes, stream, cluster, overlap):
    attributes = (_Attribute * 2)()
    chosen = [(_CLUSTER_DIMENSION, (cluster, 1, 1))] * (cluster > 1) + [
        (_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))
    ] * overlap
    for attribute, (kind, value) in zip(attributes, chosen):
        attribute.kind = kind
        attribute.value[: len(value)] = value
    return _Launch((blocks, 1, 1), (threads, 1, 1), shared_bytes, stream, attributes, len(chosen))


def clusters(function, cluster, threads, shared_bytes, device):
    """How many clusters of so many blocks a device works on at a time, where a multiprocessor takes one block."""
    count = ctypes.c_int(torch.cuda.get_device_properties(device).multi_processor_count)
    if cluster > 1:
        with torch.cuda.device(device):
            call(
                "cuOccupancyMaxActiveClusters",
                ctypes.byref(count),
                function,
                ctypes.byref(_configuration(cluster, threads, shared_bytes, None, cluster, False)),
            )
    return count.value


def launch(function, blocks, threads, shared_bytes, device, values, cluster=1, overlap=False):
    """Launch on the device's current stream; values: the kernel's arguments as ctypes objects, a tensor for its pointer, None for no pointer.
    `cluster`: how many blocks make one; `overlap`: programmatic dependent launch, for a kernel that awaits what it depends on itself."""
    values = [
        ctypes.c_void_p(None if value is None else value.data_ptr())
        if value is None or torch.is_tensor(value)
        else value
        for value in values
    ]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        call(
            "cuLaunchKernelEx",
            ctypes.byref(_configuration(blocks, threads, shared_bytes, stream, cluster, overlap)),
            function,
            arguments,
            None,
        )
