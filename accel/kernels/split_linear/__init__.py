"""Float32 products on tensor cores: each operand is split into two float16 terms, three products are summed in float32.

    x = (high + low) · 2^e,    x·w ≈ low·high + high·low + high·high

Two terms hold 22 bits of float32's 24; what is left out, low·low, lies below the last of them (Markidis et al. 2018, arXiv:1803.04014). A tensor core
truncates when it adds to its accumulator, so sums over a long inner dimension drift; as in Ootomo & Yokota 2022 (arXiv:2203.03341) a part of
the sum is therefore added to the rest outside, where float32 rounds to nearest. Here the small products also come first in each part.

The powers of two keep low terms out of float16's subnormals: with a row's largest value between 2¹⁴ and 2¹⁵, elements down to 2⁻¹⁷ of it keep all
their bits, and smaller ones an absolute error of 2⁻³⁹ of it. They scale back exactly, in the float32 epilogue.
"""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROUTES = ("auto", "hopper", "triton", "cublas", "torch")
LARGEST = 65504.0  # of float16
TRITON = dict(ROWS=128, COLUMNS=128, DEPTH=32, num_warps=8, num_stages=3)  # Triton's tile
CUBLAS_PART = 576  # inner dimension that one cuBLAS product sums in its accumulators


class Terms(NamedTuple):
    """A float32 tensor (…, K) as two of float16: (high + low) · scale."""

    pair: torch.Tensor  # (2, …, K) float16, contiguous: high, low
    scale: torch.Tensor  # (…,) float32, a power of two a row; None is 1

    def value(self, dtype=torch.float32):
        value = self.pair[0].to(dtype) + self.pair[1].to(dtype)
        return value if self.scale is None else value * self.scale[..., None].to(dtype)


def split(x, per_row=True):
    """x (…, K) float32 → Terms; `per_row`: with a power of two a row, else as it is: beyond 65504 that gives infinities."""
    scale = None
    if per_row:
        # amax = m·2^e with m in [1/2, 1); the clamp keeps the power of two itself a normal number.
        exponent = torch.frexp(x.abs().amax(-1)).exponent.clamp(min=-111, max=128)  # (…,)
        scale = torch.ldexp(torch.ones_like(x[..., 0]), exponent - 15)
        x = x * torch.ldexp(torch.ones_like(x[..., 0]), 15 - exponent)[..., None]
    high = x.half()
    return Terms(torch.stack([high, (x - high.float()).half()]), scale)


@lru_cache(None)
def choose(device):
    """The route that "auto" takes."""
    if device.type != "cuda":
        return "torch"
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        return "hopper"
    return "triton" if triton and capability >= (8, 0) else "cublas"


def compile_ahead(device):
    """Compile, or load from disk, what Hopper needs: seconds of work with an empty cache, made for a thread beside the loading of weights."""
    if choose(device) == "hopper":
        from accel.kernels import split_hopper

        split_hopper.compile_ahead(device)


class SplitLinear:
    """x ↦ x·Wᵀ + b with split operands: weight (N, K) and bias (N,) float32, on the device to run on.

    after (N,): powers of two that a split result is multiplied by, after GELU; the product that takes it has them in its weights
    (`balance`). name: of the layer, for errors. route: "hopper" (our kernel, capability 9.0, K and N multiples of 8), "triton" (from sm_80 on),
    "cublas" (any GPU with float16 tensor cores), "torch" (the twin, in float64), or "auto".
    Raises ValueError, naming the layer, for weights that are not finite.
    """

    def __init__(self, weight, bias, after=None, name="", route="auto"):
        self.name, self.route = name, choose(weight.device) if route == "auto" else route
        if self.route not in ROUTES:
            raise ValueError(f"split: route {route!r}: one of {', '.join(ROUTES)}")
        if not bool(weight.isfinite().all() & bias.isfinite().all()):
            raise ValueError(f"{name}: holds weights that are not finite")
        self.columns, self.depth = weight.shape
        self.bias, self.after = bias.contiguous(), after
        if self.route == "hopper":
            from accel.kernels.split_linear.hopper import arrange

            self.pair, _ = split(arrange(weight))
            self.scale = split(weight).scale
        else:
            self.pair, self.scale = split(weight)  # (2, N, K), (N,)

    def parameters(self):
        return iter(
            (self.pair, self.scale, self.bias) if self.after is None else (self.pair, self.scale, self.bias, self.after)
        )

    def __call__(self, x, result="float32", overflow=None):
        """x Terms (…, K) → (…, N): float32, or with `result` "terms" or "gelu" (GELU in its tanh form first) Terms without scales. overflow:
        an int32 tensor of one element, set to 1 where a result is too large for float16 terms."""
        return {"hopper": _hopper, "triton": _triton, "cublas": _cublas, "torch": _torch}[self.route](
            self, x, result, overflow
        )


def balance(weight, bias, target=4.0):
    """Powers of two (N,) that bring the results of x·Wᵀ + b near `target` in size for inputs of size one. float16 then has room for outliers four
    thousand times as large, at a floor of 2⁻²⁷ of the usual size."""
    size = (weight.double().square().sum(1) + bias.double().square()).sqrt()  # (N,)
    exponent = torch.where(size > 0, torch.log2(target / size.clamp(min=1e-300)), 0).round().clamp(-60, 60)
    return torch.exp2(exponent).float()


def _finish(y, result, after, overflow):
    """float32 (…, N) → what was asked for; the end of the routes that have no epilogue."""
    if result == "float32":
        return y
    if result == "gelu":
        y = F.gelu(y, approximate="tanh") * after
    if overflow is not None:
        overflow |= (y.abs() > LARGEST).any().int()
    return split(y, per_row=False)


def _torch(layer, x, result, overflow):
    (ah, al), (bh, bl) = x.pair.double().unbind(0), layer.pair.double().unbind(0)
    y = al @ bh.t() + ah @ bl.t() + ah @ bh.t()
    if x.scale is not None:
        y = y * x.scale[..., None]
    return _finish((y * layer.scale + layer.bias).float(), result, layer.after, overflow)


#################################################################################
#                                    cuBLAS                                     #
#################################################################################

_16F, _32F, _COMPUTE_32F, _N, _T, _DEFAULT = 2, 0, 68, 0, 1, -1  # library_types.h, cublas_api.h


@lru_cache(None)
def _library():
    """The cuBLAS that torch has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libcublas.so" in line}
    if not paths:
        raise RuntimeError("split: no cuBLAS in this process for route 'cublas'")
    return ctypes.CDLL(min(paths))


def multiply_add(a, b, out, add):
    """out (…, M, N) float32 = a·bᵀ, or out + a·bᵀ with `add`, accumulated in float32: a (…, M, K), b (…, N, K) or its transpose's view, float16,
    rows or columns contiguous; one batch dimension at most. (torch adds float16 products to float32 only from 2.8 on.)"""
    *batch, m, k = a.shape
    n = b.shape[-2]
    operands = []
    for matrix in (b, a):  # column-major, the library sees outᵀ = b·aᵀ
        transposed = matrix.stride(-1) == 1
        operands.append((transposed, matrix.stride(-2) if transposed else matrix.stride(-1)))
    (tb, ldb), (ta, lda) = operands
    one, beta = ctypes.c_float(1), ctypes.c_float(add)
    stride = lambda tensor: ctypes.c_longlong(tensor.stride(0) if batch else 0)
    with torch.cuda.device(a.device):
        status = _library().cublasGemmStridedBatchedEx(
            ctypes.c_void_p(torch.cuda.current_blas_handle()),
            _T if tb else _N,
            _N if ta else _T,
            n,
            m,
            k,
            ctypes.byref(one),
            ctypes.c_void_p(b.data_ptr()),
            _16F,
            ldb,
            stride(b),
            ctypes.c_void_p(a.data_ptr()),
            _16F,
            lda,
            stride(a),
            ctypes.byref(beta),
            ctypes.c_void_p(out.data_ptr()),
            _32F,
            out.stride(-2),
            stride(out),
            batch[0] if batch else 1,
            _COMPUTE_32F,
            _DEFAULT,
        )
    if status:
        raise RuntimeError(f"cublasGemmStridedBatchedEx failed with status {status}")


def split_multiply(a, b, out, part=CUBLAS_PART):
    """out (…, M, N) float32 = a·bᵀ from pairs of terms, the small products first, the large one in parts that are added outside the tensor cores."""
    (ah, al), (bh, bl) = a, b
    multiply_add(al, bh, out, False)
    multiply_add(ah, bl, out, True)
    for start in range(0, ah.shape[-1], part):
        multiply_add(ah[..., start : start + part], bh[..., start : start + part], out, True)


def _cublas(layer, x, result, overflow):
    a = x.pair.flatten(1, -2)
    y = torch.empty(a.shape[1], layer.columns, device=a.device)
    split_multiply(a, layer.pair, y)
    y = y.unflatten(0, x.pair.shape[1:-1])
    y = torch.addcmul(layer.bias, y, layer.scale if x.scale is None else layer.scale * x.scale[..., None])
    return _finish(y, result, layer.after, overflow)


#################################################################################
#                          Our kernels: Hopper's and Triton's                   #
#################################################################################

_RESULTS = {"float32": 0, "terms": 1, "gelu": 2}


def _result(layer, x, result):
    """Where a kernel writes, and what the caller gets."""
    shape = (*x.pair.shape[1:-1], layer.columns)
    if result == "float32":
        out = torch.empty(shape, device=x.pair.device)
        return out, out
    pair = torch.empty(2, *shape, dtype=torch.float16, device=x.pair.device)
    return pair, Terms(pair, None)


def _hopper(layer, x, result, overflow):
    from accel.kernels.split_linear.hopper import linear_hopper

    out, answer = _result(layer, x, result)
    linear_hopper(x.pair, x.scale, layer.pair, layer.scale, layer.bias, layer.after, overflow, out, _RESULTS[result])
    return answer


def stages(tensor, unmasked):
    """From Hopper on, a loop with masked loads goes without asynchronous copies: with them a network of 64 tokens was off by 6 % on an H200 (Triton
    3.6), without them it is right. A likely cause: no fence stands between the zeros that such a copy fills in and the product that reads them."""
    return (
        {}
        if unmasked or not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) < (9, 0)
        else dict(num_stages=1)
    )


def _triton(layer, x, result, overflow, config=None):
    if triton is None:
        raise RuntimeError("split: route 'triton' needs Triton: pip install triton, or take route 'cublas'")
    out, answer = _result(layer, x, result)
    m = x.pair[0].numel() // layer.depth
    config = config or {**TRITON, **stages(x.pair, layer.depth % TRITON["DEPTH"] == 0)}
    with torch.cuda.device_of(x.pair):
        _split_linear[(triton.cdiv(m, config["ROWS"]) * triton.cdiv(layer.columns, config["COLUMNS"]),)](
            x.pair,
            layer.pair,
            out,
            layer.scale if x.scale is None else x.scale,
            layer.scale,
            layer.bias,
            layer.bias if layer.after is None else layer.after,
            overflow if overflow is not None else layer.scale,
            m,
            layer.columns,
            m * layer.depth,
            m * layer.columns,
            layer.depth,
            SCALED=x.scale is not None,
            RESULT=_RESULTS[result],
            WATCHED=overflow is not None,
            **config,
        )
    return answer


if triton:

    @triton.jit
    def _split_linear(
        a_ptr,
        b_ptr,
        out_ptr,
        row_scale_ptr,
        scale_ptr,
        bias_ptr,
        after_ptr,
        overflow_ptr,
        rows,
        columns,
        a_term,
        out_term,
        depth: tl.constexpr,
        SCALED: tl.constexpr,
        RESULT: tl.constexpr,
        WATCHED: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
    ):
        across = tl.cdiv(columns, COLUMNS)
        row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, DEPTH)
        in_row, in_column = row < rows, column < columns
        a_ptr += row.to(tl.int64)[:, None] * depth + inner[None, :]
        b_ptr += column[None, :] * depth + inner[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            a_inside = in_row[:, None] & (start + inner < depth)[None, :]
            b_inside = in_column[None, :] & (start + inner < depth)[:, None]
            a_high = tl.load(a_ptr + start, a_inside, 0.0)
            a_low = tl.load(a_ptr + a_term + start, a_inside, 0.0)
            b_high = tl.load(b_ptr + start, b_inside, 0.0)
            b_low = tl.load(b_ptr + columns * depth + start, b_inside, 0.0)
            part = tl.dot(a_low, b_high)
            part = tl.dot(a_high, b_low, part)
            part = tl.dot(a_high, b_high, part)
            total += part
        scale = tl.load(scale_ptr + column, in_column, 0.0)[None, :]
        if SCALED:
            scale = scale * tl.load(row_scale_ptr + row, in_row, 0.0)[:, None]
        y = total * scale + tl.load(bias_ptr + column, in_column, 0.0)[None, :]
        inside = in_row[:, None] & in_column[None, :]
        out_ptr += row.to(tl.int64)[:, None] * columns + column[None, :]
        if RESULT == 2:
            y = y / (1 + tl.exp(tl.minimum(-1.5957691216 * (y + 0.044715 * y * y * y), 87.0)))
            y = y * tl.load(after_ptr + column, in_column, 0.0)[None, :]
        if RESULT == 0:
            tl.store(out_ptr, y, inside)
        else:
            high = y.to(tl.float16)
            tl.store(out_ptr, high, inside)
            tl.store(out_ptr + out_term, (y - high.to(tl.float32)).to(tl.float16), inside)
            if WATCHED:
                beyond = tl.max(tl.max((inside & (tl.abs(y) > 65504.0)).to(tl.int32), 1), 0)
                tl.store(overflow_ptr, 1, beyond > 0)
