"""GEMMs with a chosen cuBLASLt algorithm.

torch does not let the caller choose an algorithm, so this module calls the library that torch has
loaded, through ctypes. nvmath.bindings also wraps it, but takes 0.43 to 0.69 s to import and 39 MB
on disk.
"""

import ctypes
import weakref
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Values of the library's public enums (cublasLt.h, library_types.h).
_CUDA_TYPE = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_TRANSPOSED = 1
_DESCRIPTION = {"transposed a": 3, "epilogue": 7, "bias pointer": 8, "bias type": 26}
_EPILOGUE = {"bias": 4, "bias and gelu": 36}
_PREFERENCE = {"workspace": 1, "reduction": 3}
_REDUCTION_COMPUTE_TYPE = 2
# Attributes of an algorithm: tile, stages, custom option, cluster shape.
_CONFIGURATION = {1: ctypes.c_uint32, 6: ctypes.c_uint32, 5: ctypes.c_uint32, 8: ctypes.c_uint16}

_WORKSPACE_BYTES = 32 << 20  # maximum for an algorithm; NVIDIA recommends this for Hopper
_SUGGESTIONS = 16  # requested; the library returns about 8


class Algorithm(NamedTuple):
    """A GEMM algorithm of cuBLASLt with all its settings."""

    words: tuple[int, ...]  # 64 opaque bytes of the library
    workspace: int  # bytes


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("words", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@lru_cache(None)
def _library():
    """Return the cuBLASLt that torch has loaded into this process.

    Another copy on disk could have a different version.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split()[-1] for line in lines if "libcublasLt.so" in line}
    if not paths:
        raise RuntimeError("linear: this process has no cuBLASLt; use backend 'epilogue'")
    library = ctypes.CDLL(min(paths))
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def version() -> int:
    """Return the library's version. An algorithm's words are valid for one version only."""
    return _library().cublasLtGetVersion()


def _call(name, *arguments):
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


def _set(setter, target, attribute, value):
    _call(setter, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@lru_cache(None)
def _handle(device):
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _matrix(dtype, rows, columns):
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout),
        _CUDA_TYPE[dtype],
        ctypes.c_uint64(rows),
        ctypes.c_uint64(columns),
        ctypes.c_int64(rows),  # from one column to the next
    )
    return layout


def _destroy(description, layouts):
    _call("cublasLtMatmulDescDestroy", description)
    for layout in layouts:
        _call("cublasLtMatrixLayoutDestroy", layout)


class Gemm:
    """y = x·Wᵀ + b, optionally followed by GELU, for one shape on one GPU.

    The library is column-major and computes yᵀ (N, M) = (Wᵀ)ᵀ · xᵀ. So nothing is transposed in
    memory, and the bias is added along the rows of yᵀ, as the epilogue requires.
    """

    def __init__(
        self, m: int, n: int, k: int, gelu: bool, dtype: torch.dtype, device: torch.device
    ):
        self.shape = (m, n, k)
        self.gelu = gelu
        self.dtype = dtype
        self.device = device
        dtype_name = str(dtype).removeprefix("torch.")
        self.name = f"{m}x{n}x{k} {dtype_name}{' gelu' if gelu else ''}"  # key in files
        self.description = ctypes.c_void_p()
        _call(
            "cublasLtMatmulDescCreate",
            ctypes.byref(self.description),
            _COMPUTE_32F,
            _CUDA_TYPE[torch.float32],
        )
        epilogue = _EPILOGUE["bias and gelu" if gelu else "bias"]
        self._describe("transposed a", ctypes.c_int32(_TRANSPOSED))
        self._describe("epilogue", ctypes.c_int32(epilogue))
        self._describe("bias type", ctypes.c_int32(_CUDA_TYPE[dtype]))
        layouts = (
            _matrix(dtype, k, n),  # Wᵀ
            _matrix(dtype, k, m),  # xᵀ
            _matrix(dtype, n, m),  # the matrix that beta would multiply
            _matrix(dtype, n, m),  # yᵀ
        )
        self.problem = (_handle(device), self.description, *layouts)
        # Not at exit: the library may already be unloaded.
        weakref.finalize(self, _destroy, self.description, layouts).atexit = False

    def _describe(self, attribute, value):
        _set("cublasLtMatmulDescSetAttribute", self.description, _DESCRIPTION[attribute], value)

    def suggestions(self) -> list[Algorithm]:
        """Return the algorithms that the library suggests for this shape.

        They are sorted by the library's estimate, best first.
        """
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        preferred = {
            "workspace": ctypes.c_size_t(_WORKSPACE_BYTES),
            # With split K, partial sums are float32 and are added in a fixed order, so that every
            # run gives the same bits.
            "reduction": ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE),
        }
        for name, value in preferred.items():
            attribute = _PREFERENCE[name]
            _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)
        results = (_Heuristic * _SUGGESTIONS)()
        count = ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            *self.problem,
            preference,
            _SUGGESTIONS,
            results,
            ctypes.byref(count),
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return [
            Algorithm(tuple(result.words), result.workspace)
            for result in results[: count.value]
            if result.status == 0
        ]

    def candidates(self) -> list[Algorithm]:
        """Return the library's suggestions, then its suggestions for neighbouring shapes.

        Suggestions for neighbouring shapes also run on this one, and are often faster.
        """
        algorithms = self.suggestions()
        seen = [configuration(algorithm) for algorithm in algorithms]
        for m, n, k in self._neighbours():
            neighbour = Gemm(m, n, k, self.gelu, self.dtype, self.device)
            for algorithm in neighbour.suggestions():
                adapted = self._adapted(algorithm)
                # Skip duplicates: each kernel takes time to load and to measure.
                if adapted is not None and configuration(algorithm) not in seen:
                    algorithms.append(adapted)
                    seen.append(configuration(algorithm))
        return [algorithm for algorithm in algorithms if algorithm.workspace <= _WORKSPACE_BYTES]

    def _neighbours(self) -> list[tuple[int, int, int]]:
        """Return neighbouring shapes: with fewer rows, and with N and K exchanged."""
        m, n, k = self.shape
        shapes = [(m, k, n)]
        for divisor in (2, 4, 8):
            rows = max(1, m // divisor)
            shapes += [(rows, n, k), (rows, k, n)]
        return shapes

    def _adapted(self, algorithm):
        """Return a neighbour's algorithm with this shape's workspace, or None if unsupported."""
        result = _Heuristic()
        fails = _library().cublasLtMatmulAlgoCheck(
            *self.problem, _words(algorithm), ctypes.byref(result)
        )
        return None if fails else Algorithm(algorithm.words, result.workspace)

    def run(
        self, algorithm: Algorithm, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        """Launch one of the candidates on the current stream.

        The operands must be contiguous and have the shape, dtype and device of this GEMM.
        """
        workspace = torch.empty(max(1, algorithm.workspace), dtype=torch.uint8, device=self.device)
        self._describe("bias pointer", _address(bias))
        handle, description, weight_t, x_t, source_t, y_t = self.problem
        _call(
            "cublasLtMatmul",
            handle,
            description,
            ctypes.byref(ctypes.c_float(1)),  # alpha
            _address(weight),
            weight_t,
            _address(x),
            x_t,
            ctypes.byref(ctypes.c_float(0)),  # beta
            _address(out),
            source_t,
            _address(out),
            y_t,
            _words(algorithm),
            _address(workspace),
            ctypes.c_size_t(algorithm.workspace),
            ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )


def configuration(algorithm: Algorithm) -> list[int]:
    """Return an algorithm's tile, stages, custom option and cluster shape.

    Unlike `words`, they identify an algorithm in every version of the library.
    """
    written = ctypes.c_size_t()
    values = []
    for attribute, number_type in _CONFIGURATION.items():
        value = number_type()
        _call(
            "cublasLtMatmulAlgoConfigGetAttribute",
            _words(algorithm),
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
            ctypes.byref(written),
        )
        values.append(value.value)
    return values


def _words(algorithm):
    """Return an algorithm's words as a ctypes array."""
    return (ctypes.c_uint64 * 8)(*algorithm.words)


def _address(tensor):
    """Return a tensor's address as a ctypes pointer."""
    return ctypes.c_void_p(tensor.data_ptr())
