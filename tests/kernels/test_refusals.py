"""What a kernel cannot take is refused by its op and backend: layouts and dtypes would be read as something else."""

import pytest
import torch

from accel.kernels import push
from accel.kernels.adaln import Modulation, adaln, adaln_split
from accel.kernels.ancestral_update import ancestral_update
from accel.kernels.group_norm import add
from accel.kernels.linear import Linear
from accel.kernels.patch_embed import patch_embed
from accel.kernels.qk_norm_rotary import qk_norm_rotary
from accel.kernels.split_attention import split_attention
from accel.kernels.split_linear import SplitLinear, split
from accel.kernels.swiglu import swiglu

X, TABLE = torch.zeros(2, 9, 256), Modulation(torch.zeros(2, 6, 256), torch.tensor([0, 1]))
QKV, ROTATION = torch.zeros(2, 4, 576), torch.zeros(300, 96)
TOKENS, Z, T, COEFFICIENTS = torch.zeros(2, 64, 32), torch.zeros(1, 4, 16, 16), torch.tensor([3]), torch.zeros(5, 25)
BUFFERS = torch.zeros(2, dtype=torch.int64)
REFUSED = {
    "adaln: half residual": (lambda: adaln(X.half(), TABLE, 0, 1, backend="triton"), "float32 residual"),
    "adaln: strided": (lambda: adaln(X.transpose(0, 1), TABLE, 0, 1, backend="triton"), "contiguous"),
    "adaln_split: no Hopper": (lambda: adaln_split(X, TABLE, 3, 4, backend="hopper"), "one of auto, triton, torch"),
    "ancestral_update: strided": (
        lambda: ancestral_update(TOKENS, Z.transpose(2, 3), Z, T, COEFFICIENTS, 4.0, 3, "triton"),
        "contiguous float32",
    ),
    "ancestral_update: rows": (lambda: ancestral_update(TOKENS, Z, Z, T, COEFFICIENTS), "do not fit"),
    "group_norm: two pictures": (
        lambda: add(torch.zeros(2, 16, 4, 4), torch.zeros(16), backend="triton"),
        "one picture",
    ),
    "linear: float32": (
        lambda: Linear(X[0], X[0, :, 0], backend="tuned"),
        "takes half precision on a GPU.*take 'auto'",
    ),
    "patch_embed: float64": (lambda: patch_embed(Z.double(), X[0], X[0], backend="triton"), "contiguous float32"),
    "push: unaligned": (lambda: push.push(torch.zeros(1, 4, 20).half()[..., 4:], BUFFERS, BUFFERS, 0, 0), "16 bytes"),
    "qk_norm_rotary: float64": (lambda: qk_norm_rotary(QKV.double(), ROTATION, backend="triton"), "takes qkv in"),
    "qk_norm_rotary: strided": (lambda: qk_norm_rotary(QKV.transpose(0, 1), ROTATION, backend="triton"), "contiguous"),
    "split_attention: other heads": (
        lambda: split_attention(split(QKV[..., :192], per_row=False), 1, "hopper"),
        "backend 'hopper' takes head dim 72; take 'cublas'",
    ),
    "split_linear: infinite": (
        lambda: SplitLinear(X[0] / 0, X[0, :, 0], name="fc1"),
        "fc1: has weights that are not finite",
    ),
    "swiglu: strided": (lambda: swiglu(torch.zeros(2, 8, 3).transpose(1, 2), backend="triton"), "contiguous"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=words):
        call()
