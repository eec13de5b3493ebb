"""What is called without a header or a stub, held against what is installed beside torch.

cuBLASLt's constants and signatures against its header, the driver's and NVRTC's functions against their bindings. Most
of the lines that are held here run on a GPU alone.
"""

import ast
import ctypes
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel import start
from accel.kernels import FOLDER, cuda
from accel.kernels.linear import cublaslt

SHAPE = (8, 16, 32)
NAMES = {  # ours: the header's
    "_CUDA_R_32F": "CUDA_R_32F",
    "_COMPUTE_32F": "CUBLAS_COMPUTE_32F",
    "_TRANSPOSED": "CUBLAS_OP_T",
    "_DESC_TRANSA": "CUBLASLT_MATMUL_DESC_TRANSA",
    "_DESC_EPILOGUE": "CUBLASLT_MATMUL_DESC_EPILOGUE",
    "_DESC_BIAS_POINTER": "CUBLASLT_MATMUL_DESC_BIAS_POINTER",
    "_DESC_BIAS_TYPE": "CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE",
    "_EPILOGUE_BIAS": "CUBLASLT_EPILOGUE_BIAS",
    "_EPILOGUE_GELU_BIAS": "CUBLASLT_EPILOGUE_GELU_BIAS",
    "_PREFERENCE_WORKSPACE": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
    "_PREFERENCE_REDUCTION": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
    "_REDUCTION_COMPUTE_TYPE": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
}
CONFIGURATION = ("TILE_ID", "STAGES_ID", "CUSTOM_OPTION", "CLUSTER_SHAPE_ID")
FIELDS = dict(words="algo", workspace="workspaceSize", status="state", waves="wavesCount", reserved="reserved")
OURS = {"_WORKSPACE_BYTES", "_SUGGESTIONS"}  # numbers of our own choice
CHECKS = """#include "cublasLt.h"
#define offset(type, field) __INTADDR__(&((type *)0)->field)
template <class F, int... sizes> constexpr bool takes = false;
template <class R, class... A, int... sizes>
constexpr bool takes<R(A...), sizes...> = sizeof...(A) == sizeof...(sizes) && ((sizeof(A) == sizes) && ...);
"""
# What the header includes of a C library; NVRTC has none.
C_LIBRARY = {
    "stdio.h": "struct FILE;",
    "stddef.h": "",
    "stdint.h": "".join(
        f"typedef {sign}{kind} {sign[:1]}int{bits}_t;"
        for bits, kind in {8: "char", 16: "short", 32: "int", 64: "long"}.items()
        for sign in ("", "unsigned ")
    ),
}


def header_refuses(*claims: str) -> str:
    """NVRTC's errors about static assertions on the header of the cuBLASLt that torch has loaded; "" where all hold."""
    wheel = Path(cublaslt._library()._name).parents[1]  # nvidia/cublas, or nvidia/cu13 with CUDA 13
    folders = wheel / "include", wheel.with_name("cuda_runtime") / "include"
    text = CHECKS + "\n".join(f'static_assert({claim}, "");' for claim in claims)
    contents, names = ([one.encode() for one in ones] for ones in (C_LIBRARY.values(), C_LIBRARY))
    nvrtc = cuda._bindings("nvrtc")
    program = cuda.call(nvrtc.nvrtcCreateProgram, text.encode(), b"claims", len(names), contents, names)
    options = [
        b"--std=c++17",
        b"--device-as-default-execution-space",
        *(f"--include-path={folder}".encode() for folder in folders),
    ]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(cuda.call(nvrtc.nvrtcGetProgramLogSize, program))
    cuda.call(nvrtc.nvrtcGetProgramLog, program, log)
    # Headers may use names that this NVRTC's own headers lack: cuBLAS 13.1 beside NVRTC 13.0.
    about = [line for line in log.decode().splitlines() if line.startswith("claims(") or "catastrophic" in line]
    return "\n".join(about)


def test_cublaslts_constants_and_structures_are_the_headers():
    numbers = {name for name, value in vars(cublaslt).items() if name.isupper() and isinstance(value, int)}
    assert numbers == {*NAMES, *OURS}, "each number needs its name in the header here"
    claims = [f"{name} == {getattr(cublaslt, ours)}" for ours, name in NAMES.items()]
    types = {"CUDA_R_16F": torch.float16, "CUDA_R_16BF": torch.bfloat16}
    claims += [f"{name} == {cublaslt._CUDA_TYPE[dtype]}" for name, dtype in types.items()]
    attributes = zip(CONFIGURATION, cublaslt._CONFIGURATION, strict=True)
    claims += [f"CUBLASLT_ALGO_CONFIG_{name} == {number}" for name, number in attributes]
    claims += [f"sizeof(cublasLtMatmulAlgo_t) == {8 * 8}", "CUBLAS_STATUS_SUCCESS == 0"]
    result, found = "cublasLtMatmulHeuristicResult_t", cublaslt._Heuristic
    claims.append(f"sizeof({result}) == {ctypes.sizeof(found)}")
    for ours, _ in found._fields_:
        field = getattr(found, ours)
        claims.append(f"offset({result}, {FIELDS[ours]}) == {field.offset}")
        claims.append(f"sizeof({result}::{FIELDS[ours]}) == {field.size}")
    assert header_refuses(*claims) == ""


@pytest.mark.parametrize("claim", ["CUBLASLT_EPILOGUE_BIAS == 5", "takes<decltype(cublasLtCreate), 4>", "NO_SUCH == 1"])
def test_the_header_is_read(claim):
    assert "error" in header_refuses(claim)


@pytest.fixture
def cpu_as_a_gpu(monkeypatch):
    """What torch.cuda is asked for between the calls."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Recorded:
    """The library, with the names of its functions that were called and the bytes of each argument. Those that need a
    handle, and so a GPU, return success without being run."""

    def __init__(self, library):
        self.library, self.calls = library, {}

    def __getattr__(self, name):
        function = getattr(self.library, name)  # AttributeError where the library has none
        if not name.startswith("cublasLt"):
            return function

        def recorded(*arguments):
            self.calls[name] = [str(_bytes(one)) for one in arguments]
            return 0 if name in NEED_A_GPU else function(*arguments)

        return recorded


NEED_A_GPU = {"cublasLtCreate", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck", "cublasLtMatmul"}


def _bytes(argument):
    if isinstance(argument, int):
        return 4  # ctypes passes a C int
    pointers = ctypes.Array, type(ctypes.byref(ctypes.c_int()))
    return 8 if isinstance(argument, pointers) else ctypes.sizeof(argument)


def test_cublaslts_functions_take_what_they_are_given(cpu_as_a_gpu, monkeypatch):
    """Each is in the library, with as many parameters, of these sizes; what needs no GPU also runs."""
    library = Recorded(cublaslt._library())
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    cublaslt._handle.cache_clear()
    gemm = cublaslt.Gemm(*SHAPE, True, torch.float16, torch.device("cpu"))
    words = cublaslt.Algorithm((0,) * 8, 0)
    assert gemm.suggestions() == [] and cublaslt.configuration(words) == [0, 0, 0, 0]
    monkeypatch.setattr(cublaslt.Gemm, "suggestions", lambda self: [words])
    gemm.candidates()
    m, n, k = SHAPE
    x, weight, bias, out = (torch.zeros(shape, dtype=torch.half) for shape in ((m, k), (n, k), (n,), (m, n)))
    gemm.run(words, x, weight, bias, out)
    cublaslt.version()
    cublaslt._handle.cache_clear()
    source = Path(cublaslt.__file__).read_text()
    assert set(library.calls) == set(re.findall(r"cublasLt[A-Z]\w+", source))
    claims = [f"takes<{', '.join([f'decltype({name})', *sizes])}>" for name, sizes in library.calls.items()]
    assert header_refuses(*claims) == ""


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cublaslt_keeps_a_gemms_description(gelu, dtype, monkeypatch):
    """Read back from the library, which refuses an attribute of another size."""
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    gemm = cublaslt.Gemm(*SHAPE, gelu, dtype, torch.device("cpu"))
    kept = []
    for name in ("_DESC_TRANSA", "_DESC_EPILOGUE", "_DESC_BIAS_TYPE"):
        value, written = ctypes.c_int32(), ctypes.c_size_t()
        target = ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)
        cublaslt._call("cublasLtMatmulDescGetAttribute", gemm.description, getattr(cublaslt, name), *target)
        kept.append(value.value)
    epilogue = cublaslt._EPILOGUE_GELU_BIAS if gelu else cublaslt._EPILOGUE_BIAS
    assert kept == [cublaslt._TRANSPOSED, epilogue, cublaslt._CUDA_TYPE[dtype]]
    with pytest.raises(RuntimeError, match="cublasLtMatmulDescSetAttribute failed with status 7"):
        gemm._describe(cublaslt._DESC_EPILOGUE, ctypes.c_int64(4))


class NoDriver:
    """cuda.bindings' driver on a machine without one: each function converts its arguments, then finds no library, and
    returns success and a number instead."""

    def __init__(self, driver):
        self.driver, self.called = driver, set()

    def __getattr__(self, name):
        real = getattr(self.driver, name)
        if not re.match("cu[A-Z]", name):
            return real

        def reaches_the_driver(*arguments):
            with pytest.raises(RuntimeError, match="libcuda"):  # TypeError where the bindings take other arguments
                real(*arguments)
            self.called.add(name)
            return self.driver.CUresult.CUDA_SUCCESS, 7

        return reaches_the_driver


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver the kernels' tests call it")
def test_the_drivers_bindings_take_what_they_are_given(cpu_as_a_gpu, monkeypatch):
    real, nvrtc = map(cuda._bindings, ("driver", "nvrtc"))
    driver = NoDriver(real)
    monkeypatch.setattr(cuda, "_bindings", dict(driver=driver, nvrtc=nvrtc).get)
    text = 'extern "C" __global__ void fill(int *to) {}'
    kernel = cuda.Kernel(text, "fill", 128, 1 << 16, torch.device("cpu"))
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    for swizzle in (0, 32, 64, 128):
        cuda.tensor_map(weight, (64, 64), (128,), (64, 64), swizzle)
    kernel.launch(4, weight, None, 3, 0.5, real.CUtensorMap())
    assert cuda.writes_to_peer(0, 1)
    monkeypatch.setattr("cuda.bindings.driver", driver)
    start._make_context("1")
    sources = "".join(path.read_text() for path in FOLDER.parent.rglob("*.py"))
    assert driver.called == set(re.findall(r"driver\.(cu[A-Z]\w+)", sources))


def test_nvrtc_has_every_function_that_is_called():
    """In the bindings, and in the library that they have loaded."""
    nvrtc = cuda._bindings("nvrtc")
    cuda.compile_cubin('extern "C" __global__ void fill() {}', "fill")
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnvrtc.so" in line}
    called = set(re.findall(r"nvrtc\.(nvrtc\w+)", Path(cuda.__file__).read_text()))
    assert len(called) == 7 and paths
    for name in called:
        assert callable(getattr(nvrtc, name)) and all(hasattr(ctypes.CDLL(path), name) for path in paths)


def torch_names(path: Path):
    """What a file names of torch: (object's path, a call of it or None)."""
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _of_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and _of_torch(node.module or ""):
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    yield from ((name, None) for name in modules.values())
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        root, *rest = name.split(".")
        if root in modules and all(part.isidentifier() for part in rest):
            yield ".".join([modules[root], *rest]), calls.get(id(node))


def _of_torch(module):
    return module.split(".")[0] == "torch"


SOURCES = [*FOLDER.parent.rglob("*.py"), *(path for path in FOLDER.parents[1].glob("*.py"))]


def test_the_installed_torch_has_all_that_is_used():
    """Names, parameters and symmetric memory's attributes: torch on the machines with a GPU may be newer."""
    seen = 0
    for path in SOURCES:
        for name, used in torch_names(path):
            if name.startswith("torch.distributed.group.WORLD."):
                continue  # None without a group
            value = torch
            for part in name.split(".")[1:]:
                if not hasattr(value, part):  # a module that torch does not import, or nothing
                    importlib.import_module(f"{value.__name__}.{part}")
                value = getattr(value, part)
            if used and not any(isinstance(one, ast.Starred) for one in used.args) and _has_a_signature(value):
                named = {keyword.arg: None for keyword in used.keywords if keyword.arg}
                inspect.signature(value).bind_partial(*used.args, **named)
                seen += 1
    assert seen > 100
    exchange = (FOLDER.parent / "parallel/exchanges.py").read_text()
    import torch.distributed._symmetric_memory as symmetric

    for owner, pattern in ((symmetric, r"self\.symmetric\.(\w+)"), (symmetric._SymmetricMemory, r"handle\.(\w+)")):
        names = re.findall(pattern, exchange)
        assert names and all(hasattr(owner, name) for name in names)


def _has_a_signature(value):
    try:
        return bool(inspect.signature(value))
    except ValueError:  # of C++
        return False
