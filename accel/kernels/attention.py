"""Multi-head self-attention straight from the packed projection: nothing is transposed, padded or copied in memory.

Each route but "math" keeps softmax's statistics in float32 and never stores the (T, T) weights. Queries, keys and values go in as views with
strides, and the result comes back with the heads side by side, so that (N, T, D) is a view of it too.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = dict(math=SDPBackend.MATH, efficient=SDPBackend.EFFICIENT_ATTENTION, flash=SDPBackend.FLASH_ATTENTION,
                cudnn=SDPBackend.CUDNN_ATTENTION)
ROUTES = ("auto", *BACKENDS)
HALF = (torch.float16, torch.bfloat16)


def attention(qkv, num_heads, route="auto"):
    """softmax(q·kᵀ/√d)·v per head (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    qkv (N, T, 3·D): q, k, v side by side, each head-major → (N, T, D), same dtype, differentiable. `route`: "math" (plain products, any
    device), "efficient" (any GPU), "flash" (half precision from sm_80 on; CPUs), "cudnn" (half precision from sm_80 on), or "auto": cudnn on
    Hopper, flash on other GPUs from sm_80 on, efficient on older ones and for float32. ValueError if the route cannot run there.
    """
    if torch.compiler.is_compiling() and route == "auto":  # the compiler chooses for itself
        return _sdpa(qkv, num_heads)
    if route == "auto":
        route = choose(qkv.device, qkv.dtype)
    else:
        refuse(route, qkv.device, qkv.dtype)
    if route == "default":
        return _sdpa(qkv, num_heads)
    with sdpa_kernel(BACKENDS[route]):
        return _sdpa(qkv, num_heads)


def _sdpa(qkv, num_heads):
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # each (N, h, T, d)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@lru_cache(None)
def choose(device, dtype):
    """The route that "auto" takes: "default" leaves the choice to torch (CPU, float64)."""
    if device.type != "cuda" or dtype == torch.float64:
        return "default"
    capability = torch.cuda.get_device_capability(device)
    if dtype not in HALF or capability < (8, 0):
        return "efficient"
    return "cudnn" if capability[0] == 9 and torch.backends.cudnn.is_available() else "flash"


@lru_cache(None)
def refuse(route, device, dtype):
    """ValueError, in one line, if `route` does not run on this device and dtype."""
    if route not in ROUTES:
        raise ValueError(f"attention: route {route!r}: one of {', '.join(ROUTES)}")
    gpu = device.type == "cuda"
    modern = gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    needs = {
        "math": None,
        "efficient": None if gpu and (dtype in (torch.float32, torch.float16) or modern and dtype in HALF) else "a GPU and float32 or half",
        "flash": None if device.type == "cpu" or modern and dtype in HALF else "half precision on a GPU from sm_80 on, or a CPU",
        "cudnn": None if modern and dtype in HALF else "half precision on a GPU from sm_80 on",
    }[route]
    if needs:
        raise ValueError(f"attention: route {route!r} takes {needs}, not {str(dtype).removeprefix('torch.')} on {device}; take 'auto'")
