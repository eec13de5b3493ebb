"""A GEMM by any of cuBLASLt's algorithms. torch cannot name one, so the library that it
has loaded is called directly.

By ctypes: nvmath.bindings, which wraps the library, takes 0.43 to 0.69 s to import and 39
MB more on disk.
"""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Values of the library's public enumerations (cublasLt.h, library_types.h).
_CUDA_TYPE = {torch.float16: 2, torch.bfloat16: 14}
_CUDA_R_32F = 0
_COMPUTE_32F = 68
_TRANSPOSED = 1
_DESC_TRANSA = 3
_DESC_EPILOGUE = 7
_DESC_BIAS_POINTER = 8
_DESC_BIAS_TYPE = 26
_EPILOGUE_BIAS = 4
_EPILOGUE_GELU_BIAS = 36
_PREFERENCE_WORKSPACE = 1
_PREFERENCE_REDUCTION = 3
_REDUCTION_COMPUTE_TYPE = 2
# Tile, stages, custom option, cluster shape.
_CONFIGURATION = {1: ctypes.c_uint32, 6: ctypes.c_uint32, 5: ctypes.c_uint32, 8: ctypes.c_uint16}

_WORKSPACE_BYTES = 32 << 20  # the most an algorithm may ask for; NVIDIA's advice for Hopper
_SUGGESTIONS = 16  # asked for; the library gives about 8


class Algorithm(NamedTuple):
    """One algorithm, fully configured: the library's opaque 64 bytes, and the workspace
    it needs.
    """

    words: tuple[int, ...]
    workspace: int


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
    """Return the cuBLASLt that torch has mapped into this process: any other copy could
    be another version.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split()[-1] for line in lines if "libcublasLt.so" in line}
    if not paths:
        raise RuntimeError("linear: this process has no cuBLASLt; take backend 'epilogue'")
    library = ctypes.CDLL(min(paths))
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def version() -> int:
    """Return the library's version: an algorithm's words mean nothing to another one."""
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
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _CUDA_TYPE[dtype], *sizes)
    return layout


class Gemm:
    """y = x·Wᵀ + b, and GELU if asked for, for one shape on one GPU.

    The library is column-major: it sees yᵀ (N, M) = (Wᵀ)ᵀ · xᵀ. So nothing is transposed
    in memory, and the bias runs along the rows of yᵀ, where the epilogue wants it.
    """

    def __init__(
        self, m: int, n: int, k: int, gelu: bool, dtype: torch.dtype, device: torch.device
    ):
        self.shape = (m, n, k)
        self.gelu = gelu
        self.dtype = dtype
        self.device = device
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _COMPUTE_32F, _CUDA_R_32F)
        self._describe(_DESC_TRANSA, ctypes.c_int32(_TRANSPOSED))
        self._describe(
            _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_GELU_BIAS if gelu else _EPILOGUE_BIAS)
        )
        self._describe(_DESC_BIAS_TYPE, ctypes.c_int32(_CUDA_TYPE[dtype]))
        sides = (k, n), (k, m), (n, m), (n, m)  # Wᵀ, xᵀ, C, yᵀ
        self.operands = [_matrix(dtype, *side) for side in sides]
        self.problem = _handle(device), self.description, *self.operands

    def _describe(self, attribute, value):
        _set("cublasLtMatmulDescSetAttribute", self.description, attribute, value)

    def suggestions(self) -> list[Algorithm]:
        """Return the algorithms that the library proposes for this shape, best by its own
        estimate first.
        """
        preference = ctypes.c_void_p()
        found = (_Heuristic * _SUGGESTIONS)()
        count = ctypes.c_int()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        # Partial sums of a split K stay float32 and are added in a fixed order: the same
        # bits on every run.
        for attribute, value in (
            (_PREFERENCE_WORKSPACE, ctypes.c_size_t(_WORKSPACE_BYTES)),
            (_PREFERENCE_REDUCTION, ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE)),
        ):
            _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)
        results = _SUGGESTIONS, found, ctypes.byref(count)
        _call("cublasLtMatmulAlgoGetHeuristic", *self.problem, preference, *results)
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return [
            Algorithm(tuple(one.words), one.workspace)
            for one in found[: count.value]
            if one.status == 0
        ]

    def candidates(self) -> list[Algorithm]:
        """Return the library's suggestions, then its suggestions for neighbouring shapes
        that run for this one too: they have other configurations and are often faster.
        """
        m, n, k = self.shape
        shapes = [(m, k, n)]
        shapes += [
            (max(1, m // divisor), *sides) for divisor in (2, 4, 8) for sides in ((n, k), (k, n))
        ]
        found = self.suggestions()
        seen = [configuration(algorithm) for algorithm in found]
        for shape in shapes:
            for algorithm in Gemm(*shape, self.gelu, self.dtype, self.device).suggestions():
                words = (ctypes.c_uint64 * 8)(*algorithm.words)
                result = _Heuristic()
                fails = _library().cublasLtMatmulAlgoCheck(
                    *self.problem, words, ctypes.byref(result)
                )
                # each kernel takes time to load and to measure
                if not fails and configuration(algorithm) not in seen:
                    found.append(Algorithm(algorithm.words, result.workspace))
                    seen.append(configuration(algorithm))
        return [algorithm for algorithm in found if algorithm.workspace <= _WORKSPACE_BYTES]

    def run(
        self, algorithm: Algorithm, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor
    ) -> None:
        """Launch one of the candidates on the current stream. Operands: contiguous, of
        this shape, dtype and device.
        """
        one = ctypes.c_float(1)
        zero = ctypes.c_float(0)
        weight_at, x_at, out_at = (
            ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, out)
        )
        workspace = torch.empty(max(1, algorithm.workspace), dtype=torch.uint8, device=self.device)
        self._describe(_DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        wt, xt, ct, yt = self.operands
        source = ctypes.byref(one), weight_at, wt, x_at, xt
        target = ctypes.byref(zero), out_at, ct, out_at, yt
        how = (ctypes.c_uint64 * 8)(*algorithm.words), ctypes.c_void_p(workspace.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        size = ctypes.c_size_t(algorithm.workspace)
        _call(
            "cublasLtMatmul",
            _handle(self.device),
            self.description,
            *source,
            *target,
            *how,
            size,
            stream,
        )


def configuration(algorithm: Algorithm) -> list[int]:
    """Return tile, stages, custom option and cluster shape, which distinguish algorithms
    in any library version.
    """
    words = (ctypes.c_uint64 * 8)(*algorithm.words)
    size = ctypes.c_size_t()
    values = []
    for attribute, kind in _CONFIGURATION.items():
        value = kind()
        target = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(kind)), ctypes.byref(size)
        _call("cublasLtMatmulAlgoConfigGetAttribute", words, attribute, *target)
        values.append(value.value)
    return values
