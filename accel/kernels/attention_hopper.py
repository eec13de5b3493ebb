"""Attention at head dim 72 on Hopper: attention_hopper.cu, compiled by the NVRTC that torch brings, kept on disk, launched through the driver.

No nvcc and no build: the first call on a machine compiles for a second, later processes load 50 KB. An exact product needs no padding here
(72 is 80 in q·kᵀ and 72 in p·v), where libraries compute 96 or 128 columns.
"""

import ctypes
import hashlib
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

SOURCE = Path(__file__).with_suffix(".cu")
HEAD_DIM = 72


class Config(NamedTuple):
    """Compile-time shape of the kernel; attention_hopper.cu says what each means."""
    warpgroups: int
    keys: int
    stages: int
    blocks: int

    @property
    def threads(self):
        return 128 * (self.warpgroups + 1)

    @property
    def registers(self):
        """Of a computing and of a copying thread: a multiprocessor has 64 Ki, given out per warpgroup in eights at the start, then moved."""
        groups = self.warpgroups + 1
        pool = 512 // (groups * self.blocks) // 8 * 8 * groups
        copying = 24 if self.warpgroups == 2 and self.blocks == 1 else 32
        return min(240, (pool - copying) // self.warpgroups // 8 * 8), copying

    @property
    def shared_bytes(self):
        """Barriers, two tiles of queries, and the stages of keys and values."""
        return 1024 + 2 * 64 * self.warpgroups * 160 + self.stages * self.keys * (160 + 256)


# Measured on an H200 (log/attention-h200.json): blocks of 256 queries read keys and values half as often as blocks of 128, but leave warpgroups
# idle, or multiprocessors, where a sample has few tokens.
LONG, SHORT = Config(warpgroups=4, keys=96, stages=3, blocks=1), Config(warpgroups=2, keys=64, stages=2, blocks=2)
SHORT_TOKENS = 256


def _wgmma(name, columns, half, a_in_registers, accumulate, b_along_columns):
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


def source(config, dtype):
    """The whole CUDA text for one configuration and dtype."""
    half = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    constants = dict(HEAD=HEAD_DIM, KEYS=config.keys, WARPGROUPS=config.warpgroups, STAGES=config.stages, BLOCKS=config.blocks,
                     REGISTERS=config.registers[0], COPY_REGISTERS=config.registers[1])
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + \
        _wgmma("multiply_qk", config.keys, half, False, False, False) + _wgmma("multiply_pv", HEAD_DIM, half, True, True, True) + \
        f"""__device__ __forceinline__ unsigned round_pair(float low, float high) {{
    unsigned pair;
    asm("cvt.rn.{half}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}}
""" + SOURCE.read_text()


def compile_cubin(config, dtype):
    """Machine code for sm_90a, by NVRTC; needs no GPU."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source(config, dtype).encode(), SOURCE.name.encode(), 0, None, None))
    try:
        options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            size = ctypes.c_size_t()
            _check_nvrtc(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check_nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{log.value.decode()}")
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
            raise RuntimeError(f"attention: no libnvrtc.so.{major} for route 'hopper'; pip install nvidia-cuda-nvrtc, or take route 'cudnn'")
        return ctypes.CDLL(str(found[0]))


def _cubin(config, dtype):
    """Compiled code, kept on disk under a name that changes with the text and the compiler."""
    text = source(config, dtype) + str(torch.version.cuda)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit"
    file = folder / f"attention-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        cubin = compile_cubin(config, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_bytes(cubin)
        os.replace(partial, file)
    except OSError:  # a read-only home: every process compiles for itself
        pass
    return cubin


def _call(name, *arguments):
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


@lru_cache(None)
def _driver():
    return ctypes.CDLL("libcuda.so.1")


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_…


@lru_cache(None)
def _kernel(config, dtype, device):
    """The kernel loaded on a device, and how many blocks fill that."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention: the kernel was first met inside a CUDA graph; run the step once before capturing it")
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), _cubin(config, dtype))
        _call("cuModuleGetFunction", ctypes.byref(function), module, b"attention")
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, config.shared_bytes)
    return function, torch.cuda.get_device_properties(device).multi_processor_count * config.blocks


_ENCODED = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_…
_SWIZZLE_32, _SWIZZLE_128, _L2_PROMOTION_128 = 1, 3, 2
_BOX_ROWS = 32


def _tensor_map(pointer, dtype, n, tokens, parts, columns, swizzle):
    """How the copy engine sees the packed tensor: (N, T, 3·H, d), of which one copy takes (1, 32, 1, columns)."""
    room = ctypes.create_string_buffer(192)
    address = (ctypes.addressof(room) + 63) // 64 * 64  # the driver asks for this alignment
    row = HEAD_DIM * 2
    sizes = (ctypes.c_uint64 * 4)(HEAD_DIM, parts, tokens, n)
    strides = (ctypes.c_uint64 * 3)(row, parts * row, tokens * parts * row)  # bytes
    box, steps = (ctypes.c_uint32 * 4)(columns, 1, _BOX_ROWS, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    _call("cuTensorMapEncodeTiled", ctypes.c_void_p(address), _ENCODED[dtype], 4, ctypes.c_void_p(pointer), sizes, strides, box, steps, 0, swizzle,
          _L2_PROMOTION_128, 0)
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(address, 128))


def attention_hopper(qkv, num_heads, config=None, kv=None):
    """softmax(q·kᵀ/√72)·v per head; softmax in float32, p in half (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    qkv (N, T, 3·H·72) float16 or bfloat16, contiguous, on a GPU of capability 9.0 → out (N, T, H·72) and the natural log-sum-exp of the scaled
    scores (N, H, T) float32. `kv` (N, T', 2·H·72): attend to these keys and values in place of the packed ones. `config`: LONG or SHORT, by T if
    not given. Not differentiable. Meet a shape once before capturing it in a graph.
    """
    n, queries, width = qkv.shape
    keys = qkv if kv is None else kv
    if any(not tensor.is_contiguous() or tensor.data_ptr() % 16 for tensor in (qkv, keys)):
        raise ValueError("attention: route 'hopper' takes contiguous tensors, aligned to 16 bytes")
    tokens = keys.shape[1]
    config = config or (SHORT if queries <= SHORT_TOKENS else LONG)
    out = torch.empty(n, queries, width // 3, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(n, num_heads, queries, device=qkv.device)
    if out.numel() == 0:
        return out, lse
    function, most = _kernel(config, qkv.dtype, qkv.device)
    items = n * num_heads * -(-queries // (64 * config.warpgroups))
    maps = [_tensor_map(tensor.data_ptr(), qkv.dtype, n, tensor.shape[1], tensor.shape[2] // HEAD_DIM, columns, swizzle)
            for tensor in (qkv, keys) for columns, swizzle in ((64, _SWIZZLE_128), (16, _SWIZZLE_32))]
    scale = 1 / (math.sqrt(HEAD_DIM) * math.log(2))  # of a score in powers of two
    numbers = (queries, tokens, num_heads, num_heads if kv is None else 0, items)  # the fourth: at which of its parts the keys begin
    values = (*maps, ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(lse.data_ptr()), *map(ctypes.c_int, numbers), ctypes.c_float(scale))
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(qkv.device):
        _call("cuLaunchKernel", function, min(items, most), 1, 1, config.threads, 1, 1, config.shared_bytes,
              ctypes.c_void_p(torch.cuda.current_stream(qkv.device).cuda_stream), arguments, None)
    return out, lse
