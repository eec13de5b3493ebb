"""Multi-head self-attention straight from the packed projection: nothing is transposed, padded or copied in memory.

Each route but "math" keeps softmax's statistics in float32 and never stores the (T, T) weights. To torch's kernels queries, keys and values go
as views with strides, and the result comes back with the heads side by side, so that (N, T, D) is a view of it too; our own reads the packed
tensor as it is.
"""

from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = dict(
    math=SDPBackend.MATH,
    efficient=SDPBackend.EFFICIENT_ATTENTION,
    flash=SDPBackend.FLASH_ATTENTION,
    cudnn=SDPBackend.CUDNN_ATTENTION,
)
ROUTES = ("auto", *BACKENDS, "hopper")
HALF = (torch.float16, torch.bfloat16)


def attention(qkv, num_heads, route="auto"):
    """softmax(q·kᵀ/√d)·v per head (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    qkv (N, T, 3·D): q, k, v side by side, each head-major → (N, T, D), same dtype. `route`: "math" (plain products, any device),
    "efficient" (any GPU), "flash" (half precision from sm_80 on; CPUs), "cudnn" (half precision from sm_80 on), "hopper" (our kernel: half
    precision, head dim 72, capability 9.0, no gradient), or "auto": on Hopper hopper, else cudnn; flash on other GPUs from sm_80 on; efficient
    on older ones and for float32. ValueError if a route cannot run there.
    """
    dim, gradient = qkv.shape[-1] // (3 * num_heads), qkv.requires_grad and torch.is_grad_enabled()
    if route == "auto":
        if torch.compiler.is_compiling():  # the compiler chooses for itself
            return _sdpa(qkv, num_heads)
        route = choose(qkv.device, qkv.dtype, dim, gradient)
    else:
        refuse(route, qkv.device, qkv.dtype, dim, gradient)
    if route == "default":
        return _sdpa(qkv, num_heads)
    if route == "hopper":
        from accel.kernels.attention.hopper import attention_hopper

        return attention_hopper(qkv.contiguous(), num_heads)[0]
    with sdpa_kernel(BACKENDS[route]):
        return _sdpa(qkv, num_heads)


def attention_to(qkv, kv, num_heads, route="auto"):
    """The queries of qkv (N, t, 3·D) attend to other keys and values, kv (N, T, 2·D) side by side → (N, t, D); routes as of `attention`."""
    dim = qkv.shape[-1] // (3 * num_heads)
    if route == "auto":
        route = choose(qkv.device, qkv.dtype, dim)
    else:
        refuse(route, qkv.device, qkv.dtype, dim)
    if route == "hopper":
        from accel.kernels.attention.hopper import attention_hopper

        return attention_hopper(qkv, num_heads, kv=kv)[0]
    q, k, v = _heads(qkv, kv, num_heads)
    with sdpa_kernel(BACKENDS[route]) if route != "default" else nullcontext():
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _heads(qkv, kv, num_heads):
    """The queries of qkv (N, h, t, d) and the keys and values of kv, each (N, h, T, d), as views."""
    q = qkv[..., : qkv.shape[-1] // 3].unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return q, *kv.unflatten(-1, (2, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def attention_lse(qkv, kv, num_heads, route="auto"):
    """As `attention_to`, with the natural log-sum-exp of the scaled scores (N, h, t) float32 (float64 for float64): by it, attention over parts of
    the keys is merged. Every route but "math" gives one."""
    dim = qkv.shape[-1] // (3 * num_heads)
    if route == "auto":
        route = choose(qkv.device, qkv.dtype, dim)
    else:
        refuse(route, qkv.device, qkv.dtype, dim)
    if route == "hopper":
        from accel.kernels.attention.hopper import attention_hopper

        return attention_hopper(qkv, num_heads, kv=kv)
    q, k, v = _heads(qkv, kv, num_heads)
    if route == "default" or route == "flash" and not qkv.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[:2]
    elif route == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    elif route == "cudnn":
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    elif route == "efficient":
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    else:
        raise ValueError(f"attention: route {route!r} gives no log-sum-exp")
    return out.transpose(1, 2).flatten(2), lse.reshape(len(q), num_heads, -1)[
        ..., : q.shape[2]
    ]  # some pad it, some keep a last 1


def _sdpa(qkv, num_heads):
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@lru_cache(None)
def choose(device, dtype, dim, gradient=False):
    """The route that "auto" takes: "default" leaves the choice to torch (CPU, float64)."""
    if device.type != "cuda" or dtype == torch.float64:
        return "default"
    capability = torch.cuda.get_device_capability(device)
    if dtype not in HALF or capability < (8, 0):
        return "efficient"
    if capability != (9, 0) or dim > 128 or dim % 8:
        return "flash"
    return "hopper" if dim == 72 and not gradient else "cudnn"


@lru_cache(None)
def refuse(route, device, dtype, dim, gradient=False):
    """ValueError, in one line, if `route` does not run on this device and dtype."""
    if route not in ROUTES:
        raise ValueError(f"attention: route {route!r}: one of {', '.join(ROUTES)}")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    modern = capability >= (8, 0) and dtype in HALF
    runs, takes = {
        "math": (True, ""),
        "efficient": (
            capability > (0, 0) and dtype in (torch.float32, torch.float16) or modern,
            "float32 or half precision on a GPU",
        ),
        "flash": (device.type == "cpu" or modern, "half precision on a GPU from sm_80 on, or a CPU"),
        "cudnn": (
            modern and dim <= 128 and dim % 8 == 0,
            "half precision on a GPU from sm_80 on, head dim up to 128 in eights",
        ),
        "hopper": (
            modern and capability == (9, 0) and dim == 72 and not gradient,
            "half precision at head dim 72 on a GPU of capability 9.0, without a gradient",
        ),
    }[route]
    if not runs:
        raise ValueError(
            f"attention: route {route!r} takes {takes}, not {str(dtype).removeprefix('torch.')} at head dim {dim} on {device}"
            f"{' with a gradient' if gradient else ''}; take 'auto'"
        )
