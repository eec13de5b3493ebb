"""y = x·Wᵀ + b, with GELU in the product's epilogue, by an algorithm of cuBLASLt, or a tile of our own kernel, that was measured on this GPU.

cuBLASLt picks an algorithm from a model of the chip. A DiT needs few products, all known ahead: trying takes a fraction of a second,
once for a GPU and library, and gives 4 to 18 % on them. torch cannot name an algorithm, so the very library it has loaded is called through
ctypes. GELU is the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2), 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
"""

import ctypes
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel.kernels.linear import hopper as linear_hopper
from accel.kernels.linear.hopper import Tile

ROUTES = ("auto", "plain", "epilogue", "cublaslt", "hopper", "tuned")
MEASURED = ROUTES[3:]


def linear(x, weight, bias, gelu=False, route="auto"):
    """x (…, K), weight (N, K), bias (N,), one dtype → (…, N), accumulated in float32 for half inputs.

    `route`: "plain" (product, then GELU as a kernel of its own), "epilogue" (torch's fused call, GPU only), the fastest measured algorithm for
    float16 or bfloat16 on a GPU, be it of cuBLASLt ("cublaslt"), of our own kernel (accel.kernels.linear.hopper: "hopper") or of both
    ("tuned"), or "auto": tuned where it applies, else plain. Weights must not be what the kernel just before has written.
    """
    if route == "auto":
        route = "tuned" if x.is_cuda and x.dtype in _CUDA_TYPE else "plain"
    if route in MEASURED:
        return _measured(x, weight, bias, gelu, route)
    if route not in ROUTES:
        raise ValueError(f"linear: route {route!r}: one of {', '.join(ROUTES)}")
    if route == "plain" or not gelu:
        y = F.linear(x, weight, bias)
        return F.gelu(y, approximate="tanh") if gelu else y
    if not x.is_cuda:  # there torch's fused call is the exact GELU, another function
        raise ValueError("linear: route 'epilogue' runs on a GPU; take 'plain'")
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])


#################################################################################
#                             cuBLASLt, called directly                         #
#################################################################################

# Values of the library's public enumerations (cublasLt.h, library_types.h).
_CUDA_TYPE = {torch.float16: 2, torch.bfloat16: 14}
_CUDA_R_32F, _COMPUTE_32F, _TRANSPOSED = 0, 68, 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 7, 8, 26
_EPILOGUE_BIAS, _EPILOGUE_GELU_BIAS = 4, 36
_PREFERENCE_WORKSPACE, _PREFERENCE_REDUCTION = 1, 3
_REDUCTION_COMPUTE_TYPE = 2

_WORKSPACE_BYTES = 32 << 20  # the most an algorithm may ask for; NVIDIA's advice for Hopper
_SUGGESTIONS = 16  # asked for; the library gives about 8


class Algorithm(NamedTuple):
    """One of cuBLASLt's algorithms, fully configured: the library's opaque 64 bytes, and the workspace it needs."""

    words: tuple
    workspace: int


# Winners after seconds of load, when an H200 at 700 W runs at three quarters of its clock and the least energy wins: GPU → (M, N, K, GELU) →
# a tile of our own kernel, or (tile, stages, custom option, cluster shape) as cuBLASLt numbers them. In XL/2 at 512 px these are
# 16, 4, 2, 1 and half a row. Measured in log/products-h200.json and log/products-few-rows-h200.json.
KNOWN = {
    "NVIDIA H200": {
        (16384, 3456, 1152, False): (20, 35, 1, 3),
        (16384, 1152, 1152, False): (28, 35, 0, 3),
        (16384, 4608, 1152, True): (20, 35, 1, 3),
        (16384, 1152, 4608, False): (209, 35, 4, 3),
        (4096, 3456, 1152, False): (20, 35, 1, 3),
        (4096, 1152, 1152, False): Tile(256, 144, 4, cluster=2),
        (4096, 4608, 1152, True): (20, 35, 1, 3),
        (4096, 1152, 4608, False): Tile(256, 144, 4, cluster=2),
        (2048, 3456, 1152, False): Tile(128, 216, 3),
        (2048, 1152, 1152, False): Tile(128, 144, 6, cluster=2),
        (2048, 4608, 1152, True): Tile(256, 144, 3, cluster=2),
        (2048, 1152, 4608, False): Tile(128, 144, 6, cluster=2),
        (1024, 3456, 1152, False): Tile(256, 112, 4, cluster=2),
        (1024, 1152, 1152, False): Tile(128, 72, 8, cluster=2),
        (1024, 4608, 1152, True): Tile(256, 144, 4, cluster=2),
        (1024, 1152, 4608, False): Tile(128, 72, 8, cluster=2),
        (512, 3456, 1152, False): Tile(128, 112, 7, cluster=2),
        (512, 1152, 1152, False): Tile(64, 72, 8, cluster=2, warpgroups=1),
        (512, 4608, 1152, True): Tile(128, 144, 6, cluster=2),
        (512, 1152, 4608, False): Tile(64, 72, 8, cluster=2, warpgroups=1),
    }
}


def _configuration(algorithm):
    """What tells an algorithm from another in any version of the library: tile, stages, custom option, cluster shape."""
    words, value, size = (ctypes.c_uint64 * 8)(*algorithm.words), [], ctypes.c_size_t()
    for attribute, kind in ((1, ctypes.c_uint32), (6, ctypes.c_uint32), (5, ctypes.c_uint32), (8, ctypes.c_uint16)):
        value.append(kind())
        _call(
            "cublasLtMatmulAlgoConfigGetAttribute",
            words,
            attribute,
            ctypes.byref(value[-1]),
            ctypes.c_size_t(ctypes.sizeof(kind)),
            ctypes.byref(size),
        )
    return tuple(one.value for one in value)


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
    """The cuBLASLt that torch has mapped into this process: any other copy could be another version."""
    maps = Path("/proc/self/maps")
    paths = (
        {line.split()[-1] for line in maps.read_text().splitlines() if "libcublasLt.so" in line}
        if maps.exists()
        else ()
    )
    if not paths:
        raise RuntimeError("linear: no cuBLASLt in this process for route 'tuned'; take 'epilogue'")
    library = ctypes.CDLL(min(paths))
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def _call(name, *arguments):
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


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
        ctypes.c_int64(rows),
    )
    return layout


class Product:
    """y = x·Wᵀ + b for one shape on one GPU.

    The library is column-major: it sees yᵀ (N, M) = (Wᵀ)ᵀ · xᵀ, so nothing is transposed in memory and the bias runs along the rows of yᵀ,
    where the epilogue wants it.
    """

    def __init__(self, m, n, k, dtype, gelu, device, route="tuned"):
        self.shape, self.dtype, self.gelu, self.device, self.route = (m, n, k), dtype, gelu, device, route
        self.operands = (
            _matrix(dtype, k, n),
            _matrix(dtype, k, m),
            _matrix(dtype, n, m),
            _matrix(dtype, n, m),
        )  # Wᵀ, xᵀ, C, yᵀ
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _COMPUTE_32F, _CUDA_R_32F)
        self._set(_DESC_TRANSA, ctypes.c_int32(_TRANSPOSED))
        self._set(_DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_GELU_BIAS if gelu else _EPILOGUE_BIAS))
        self._set(_DESC_BIAS_TYPE, ctypes.c_int32(_CUDA_TYPE[dtype]))

    def _set(self, attribute, value):
        _call(
            "cublasLtMatmulDescSetAttribute",
            self.description,
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )

    def suggestions(self):
        """Algorithms that the library proposes, best by its own estimate first."""
        preference, found, count = ctypes.c_void_p(), (_Heuristic * _SUGGESTIONS)(), ctypes.c_int()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        # Partial sums of a split K stay float32 and are added in a fixed order: the same bits on every run.
        for attribute, value in (
            (_PREFERENCE_WORKSPACE, ctypes.c_size_t(_WORKSPACE_BYTES)),
            (_PREFERENCE_REDUCTION, ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE)),
        ):
            _call(
                "cublasLtMatmulPreferenceSetAttribute",
                preference,
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
            )
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(self.device),
            self.description,
            *self.operands,
            preference,
            _SUGGESTIONS,
            found,
            ctypes.byref(count),
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return [Algorithm(tuple(one.words), one.workspace) for one in found[: count.value] if one.status == 0]

    def candidates(self):
        """What the route may take: the library's suggestions, then those for neighbouring shapes that run here too (they bring other tiles, and
        are often faster), then tiles of our own kernel."""
        found = [] if self.route == "hopper" else self._of_the_library()
        if self.route != "cublaslt":
            found += linear_hopper.tiles(*self.shape, self.device)
        if not found:
            raise ValueError("linear: route 'hopper' takes sides in eights on a GPU of capability 9.0; take 'tuned'")
        return found

    def _of_the_library(self):
        m, n, k = self.shape
        found = self.suggestions()
        for shape in (
            (m, k, n),
            *((max(1, m // divisor), *sides) for divisor in (2, 4, 8) for sides in ((n, k), (k, n))),
        ):
            for algorithm in Product(*shape, self.dtype, self.gelu, self.device).suggestions():
                result = _Heuristic()
                if not _library().cublasLtMatmulAlgoCheck(
                    _handle(self.device),
                    self.description,
                    *self.operands,
                    (ctypes.c_uint64 * 8)(*algorithm.words),
                    ctypes.byref(result),
                ):
                    found.append(Algorithm(algorithm.words, result.workspace))
        return [algorithm for algorithm in dict.fromkeys(found) if algorithm.workspace <= _WORKSPACE_BYTES]

    def run(self, x, weight, bias, out, algorithm):
        """Launch on the current stream. Operands: contiguous, of this product's shape, dtype and device; algorithm: one of `candidates`."""
        if isinstance(algorithm, Tile):
            return linear_hopper.linear_hopper(x, weight, bias, out, self.gelu, algorithm)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        a, b, c, d = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, out, out))
        workspace = torch.empty(max(1, algorithm.workspace), dtype=torch.uint8, device=self.device)  # the stream's own
        self._set(_DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        wt, xt, ct, yt = self.operands
        _call(
            "cublasLtMatmul",
            _handle(self.device),
            self.description,
            ctypes.byref(one),
            a,
            wt,
            b,
            xt,
            ctypes.byref(zero),
            c,
            ct,
            d,
            yt,
            (ctypes.c_uint64 * 8)(*algorithm.words),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(algorithm.workspace),
            ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )

    def fastest(self):
        """The candidate with the least time on random operands. Another than the library's first must win by 3 %: timings jitter, and a short
        burst says little about a GPU at its power limit."""
        m, n, k = self.shape
        generator = torch.Generator(self.device).manual_seed(
            0
        )  # its own: a run's random stream must not notice a measurement
        x, weight, bias = (
            torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
            for shape in ((m, k), (n, k), (n,))
        )
        out = torch.empty(m, n, dtype=self.dtype, device=self.device)
        candidates = self.candidates()
        with ThreadPoolExecutor() as pool:  # compilers' seconds side by side
            list(
                pool.map(
                    lambda tile: linear_hopper.kernel_for(tile, m, n, self.dtype, self.gelu, self.device),
                    (one for one in candidates if isinstance(one, Tile)),
                )
            )
        graphs = []
        for algorithm in candidates:
            self.run(x, weight, bias, out, algorithm)  # loads the kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(5):
                    self.run(x, weight, bias, out, algorithm)
            graphs.append(graph)
        times = []
        for _ in range(3):
            for graph in graphs:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                times.append((start, end))
        torch.cuda.synchronize(self.device)
        times = torch.tensor([start.elapsed_time(end) for start, end in times]).view(3, -1).median(0).values
        best = int(times.argmin())
        return candidates[best if times[best] < 0.97 * times[0] else 0]

    def known(self):
        """The candidate that won on this kind of GPU under long load, if that was measured."""
        wanted = KNOWN.get(torch.cuda.get_device_name(self.device), {}).get((*self.shape, self.gelu))
        if wanted is None or self.route == ("cublaslt" if isinstance(wanted, Tile) else "hopper"):
            return None
        return (
            wanted
            if isinstance(wanted, Tile)
            else next((algorithm for algorithm in self._of_the_library() if _configuration(algorithm) == wanted), None)
        )


_chosen = {}  # (shape, dtype, gelu, device, route) → (Product, Algorithm or Tile)


def _measured(x, weight, bias, gelu, route):
    if not x.is_cuda or x.dtype not in _CUDA_TYPE:
        raise ValueError(f"linear: route {route!r} takes float16 or bfloat16 on a GPU, got {x.dtype} on {x.device}")
    if any(not tensor.is_contiguous() or tensor.data_ptr() % 16 for tensor in (x, weight, bias)):
        raise ValueError(f"linear: route {route!r} takes contiguous tensors that start at a multiple of 16 bytes")
    (n, k), m = weight.shape, x.numel() // x.shape[-1]
    product, algorithm = _choose(m, n, k, x.dtype, gelu, x.device, route)
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        product.run(x, weight, bias, out, algorithm)
    return out


def _choose(*key):
    """A product and its algorithm: met before, or known for this GPU, or in the file of earlier measurements, or measured now and added to it."""
    if key in _chosen:
        return _chosen[key]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("linear: a product was first met inside a CUDA graph; run the step once before capturing it")
    product = Product(*key)
    algorithm = product.known()
    if not algorithm:
        m, n, k, dtype, gelu, device, route = key
        name = (
            f"{m}x{n}x{k} {str(dtype).removeprefix('torch.')}{' gelu' * gelu}{'' if route == 'tuned' else f' {route}'}"
        )
        files = _measurements(device)
        algorithm = next((known[name] for known in map(_read, files) if name in known), None)
        if not algorithm:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                algorithm = product.fastest()
        for file in files:
            if name not in (known := _read(file)):
                _write(file, {**known, name: algorithm})
    _chosen[key] = product, algorithm
    return product, algorithm


def _plain(algorithm):
    return list(algorithm) if isinstance(algorithm, Tile) else [list(algorithm.words), algorithm.workspace]


def _restored(plain):
    first, *rest = plain
    return Tile(*plain) if isinstance(first, int) else Algorithm(tuple(first), *rest)


def compile_ahead(m, n, k, gelu, dtype, device):
    """Load our own kernel for a product for which it is known to win on this GPU, compiled if it is not on disk yet."""
    tile = KNOWN.get(torch.cuda.get_device_name(device), {}).get((m, n, k, gelu))
    if isinstance(tile, Tile):
        linear_hopper.kernel_for(
            tile, m, n, dtype, gelu, torch.empty(0, device=device).device
        )  # with its number, as tensors name it


def choice(m, n, k, gelu, dtype, device):
    """The algorithm of "tuned" for a product, measured now if need be, as plain numbers that another process can `adopt`."""
    return _plain(_choose(m, n, k, dtype, gelu, device, "tuned")[1])


def adopt(m, n, k, gelu, dtype, device, chosen):
    """Take another process's `choice`, on the same kind of GPU and library, for this process's product."""
    key = m, n, k, dtype, gelu, device, "tuned"
    _chosen[key] = Product(*key), _restored(chosen)


_kept_in = None


def keep_measurements(folder):
    """From now on keep what is chosen in `folder` too, and go by what is there first: a job that has to give the same bits when it is started again,
    perhaps elsewhere, needs the same algorithms. Another job begins with those of the user's cache, so that its pictures are the same as well."""
    global _kept_in
    _kept_in = Path(folder)
    _chosen.clear()  # such as what the check of the weights has met


def _measurements(device):
    """The files that hold what was measured for a GPU and the versions of the library and of our kernel, the first to go by first: an algorithm's bytes
    mean nothing to another version, and its time nothing beside another's."""
    folders = [
        folder
        for folder in (_kept_in, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dit")
        if folder
    ]
    gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    name = f"products-{gpu}-cublaslt-{_library().cublasLtGetVersion()}-own-{linear_hopper.version()}.json"
    return [folder / name for folder in folders]


def _read(file):
    try:
        return {name: _restored(plain) for name, plain in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent or damaged: measured again
        return {}


def _write(file, known):
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(json.dumps({name: _plain(algorithm) for name, algorithm in known.items()}))
        os.replace(partial, file)
    except OSError:  # a read-only home: every process measures for itself
        pass
