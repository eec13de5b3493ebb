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
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_…


def product(name, columns, half, a_in_registers, accumulate, b_along_columns):
    """A device function around one warpgroup product, 64 × columns × 16; inline assembly must spell out every register.
    `accumulate`: always, or by a last argument; `b_along_columns`: B lies in memory column beside column."""
    count = columns // 2
    inputs = ["unsigned a0", "unsigned a1", "unsigned a2", "unsigned a3"] if a_in_registers else ["unsigned long long a"]
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


def text(file, constants, *functions):
    """The whole CUDA text: constants, functions made for them, what all kernels share, and the kernel's own file."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + "".join(functions) + \
        Path(__file__).with_suffix(".cuh").read_text() + file.read_text()


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
            raise RuntimeError(f"no libnvrtc.so.{major} for the routes 'hopper'; pip install nvidia-cuda-nvrtc, or name other routes")
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
        raise RuntimeError(f"{name}: the kernel was first met inside a CUDA graph; run the step once before capturing it")
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), _cubin(text, name))
        call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    return function


def tensor_map(pointer, dtype, sizes, strides, box, swizzle):
    """How the copy engine sees a tensor: sizes (innermost first), strides in bytes of all dimensions but the innermost, and what one copy takes."""
    room = ctypes.create_string_buffer(192)
    address = (ctypes.addressof(room) + 63) // 64 * 64  # the driver asks for this alignment
    rank = len(sizes)
    call("cuTensorMapEncodeTiled", ctypes.c_void_p(address), _ENCODED[dtype], rank, ctypes.c_void_p(pointer), (ctypes.c_uint64 * rank)(*sizes),
         (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle,
         _L2_PROMOTION_128, 0)
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(address, 128))


def launch(function, blocks, threads, shared_bytes, device, values):
    """Launch on the device's current stream; values: the kernel's arguments as ctypes objects, a tensor for its pointer, None for no pointer."""
    values = [ctypes.c_void_p(None if value is None else value.data_ptr()) if value is None or torch.is_tensor(value) else value for value in values]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(device):
        call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, shared_bytes,
             ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream), arguments, None)
