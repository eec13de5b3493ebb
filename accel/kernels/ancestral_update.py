"""The end of a denoising step in one pass: guidance, posterior of x_{t-1} and its draw, from the network's last tokens.

    ε = ε_u + s·(ε_c − ε_u) on the first three channels, ε_c on the others   (Ho & Salimans 2022, arXiv:2207.12598)
    x₀ = r·x − m·ε                       r = √(1/ᾱ), m = √(1/ᾱ − 1)          (Ho et al. 2020, arXiv:2006.11239, eq. 4)
    log σ² = v·log β + (1 − v)·log β̃     v = (value + 1)/2, learned          (Nichol & Dhariwal 2021, arXiv:2102.09672)
    x_{t-1} = c₁·x₀ + c₂·x + [t ≠ 0]·σ·noise                                 (Ho, eq. 7 and algorithm 2)

As tensor operations these are forty kernels, each shorter than its launch.
"""

import torch
from torch import Tensor

from accel.kernels import check_backend

try:
    import triton
    import triton.language as tl
except ImportError:  # on Windows and macOS: the reference is then the only backend
    triton = None

BACKENDS = ("auto", "triton", "torch")
BLOCK = 256


def ancestral_update(
    tokens: Tensor,
    x: Tensor,
    noise: Tensor,
    t: Tensor,
    coefficients: Tensor,
    scale: float = 1.0,
    guided_channels: int = 0,
    backend: str = "auto",
) -> Tensor:
    """x_{t-1} from x_t (n, C, H, W).

    tokens (n, T, p·p·2C): the network's output before unpatchify, ε's C channels before the variance's. scale: s, on
    the first `guided_channels`; with any there are 2n batch rows, those with the null label last. noise: like x. t (n,)
    int64: rows of `coefficients` (S, 6), which has r, m, c₁, c₂, log β̃, log β (diffusion's `ancestral_coefficients`).
    backend: "triton" (all float32, contiguous), "torch" (the reference, any dtype), or "auto": triton on a GPU.
    """
    check_backend("ancestral_update", backend, BACKENDS)
    if backend == "auto":
        backend = "triton" if triton and x.is_cuda else "torch"
    n, channels, height, width = x.shape
    patch = round((tokens.shape[-1] / (2 * channels)) ** 0.5)
    if tokens.shape != (2 * n if guided_channels else n, height * width // patch**2, patch * patch * 2 * channels):
        raise ValueError(f"ancestral_update: tokens {tuple(tokens.shape)} do not fit x {tuple(x.shape)}")
    run = _triton if backend == "triton" else _torch
    return run(tokens, x, noise, t, coefficients, scale, guided_channels, patch)


def _torch(tokens, x, noise, t, coefficients, scale, guided, patch):
    n, channels, height, width = x.shape
    out = tokens.unflatten(-1, (patch, patch, 2 * channels))
    out = out.unflatten(1, (height // patch, width // patch))  # (N, h, w, p, p, 2C)
    out = out.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), 2 * channels, height, width)
    eps, value = out[:n].split(channels, dim=1)
    if guided:
        other = out[n:, :guided]
        eps = torch.cat([other + scale * (eps[:, :guided] - other), eps[:, guided:]], dim=1)
    recip, recipm1, coef1, coef2, low, high = coefficients[t].view(n, 6, 1, 1, 1).unbind(1)
    share = (value + 1) / 2
    sigma = torch.exp(0.5 * (share * high + (1 - share) * low)) * (t != 0).view(n, 1, 1, 1)
    return coef1 * (recip * x - recipm1 * eps) + coef2 * x + sigma * noise


def _triton(tokens, x, noise, t, coefficients, scale, guided, patch):
    tensors = tokens, x, noise, coefficients
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in tensors) or t.dtype != torch.int64:
        raise TypeError("ancestral_update: backend 'triton' takes contiguous float32 tensors and int64 timesteps")
    n, channels, height, width = x.shape
    out = torch.empty_like(x)
    arguments = tokens, x, noise, t, t.stride(0), coefficients, out, n, scale
    shape = dict(CHANNELS=channels, HEIGHT=height, WIDTH=width, PATCH=patch)
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        grid = triton.cdiv(channels * height * width, BLOCK), n
        _ancestral_update[grid](*arguments, **shape, GUIDANCE=guided, BLOCK=BLOCK)
    return out


if triton:

    @triton.jit(do_not_specialize=["t_stride", "n"])
    def _ancestral_update(
        tokens_ptr,
        x_ptr,
        noise_ptr,
        t_ptr,
        t_stride,
        coefficients_ptr,
        out_ptr,
        n,
        cfg_scale,
        CHANNELS: tl.constexpr,
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
        PATCH: tl.constexpr,
        GUIDANCE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        picture = tl.program_id(1).to(tl.int64)
        t = tl.load(t_ptr + picture * t_stride)
        row = coefficients_ptr + t * 6
        recip, recipm1, coef1, coef2 = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        low, high = tl.load(row + 4), tl.load(row + 5)
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = element < CHANNELS * HEIGHT * WIDTH
        channel, i, j = element // (HEIGHT * WIDTH), element // WIDTH % HEIGHT, element % WIDTH
        token = i // PATCH * (WIDTH // PATCH) + j // PATCH
        place = (token * PATCH * PATCH + i % PATCH * PATCH + j % PATCH) * (2 * CHANNELS) + channel
        own = tokens_ptr + picture * (2 * CHANNELS * HEIGHT * WIDTH) + place
        eps = tl.load(own, inside, 0.0)
        share = (tl.load(own + CHANNELS, inside, 0.0) + 1) * 0.5
        if GUIDANCE:
            other = tl.load(own + n * (2 * CHANNELS * HEIGHT * WIDTH), inside, 0.0)
            eps = tl.where(channel < GUIDANCE, other + cfg_scale * (eps - other), eps)
        at = picture * (CHANNELS * HEIGHT * WIDTH) + element
        x = tl.load(x_ptr + at, inside, 0.0)
        sigma = tl.where(t != 0, tl.exp(0.5 * (share * high + (1 - share) * low)), 0.0)
        out = coef1 * (recip * x - recipm1 * eps) + coef2 * x + sigma * tl.load(noise_ptr + at, inside, 0.0)
        tl.store(out_ptr + at, out, inside)
