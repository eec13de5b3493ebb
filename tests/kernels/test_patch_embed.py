"""The patch embedding against a convolution, its kernel against the reference through Triton's interpreter on a CPU and
compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_testing import draw, interpreted

from accel.kernels.patch_embed import patch_embed

# (pictures, channels, side, patch, width): widths and batches that fill no tile, every patch size, more pixels than a
# program computes.
CASES = ((1, 4, 16, 2, 216), (3, 4, 12, 2, 100), (2, 4, 16, 4, 384), (1, 4, 32, 8, 128), (5, 4, 6, 2, 72))


def case(n, channels, side, patch, width, device="cpu"):
    shapes = (n, channels, side, side), (width, channels * patch**2), ((side // patch) ** 2, width)
    return [draw(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes)]


def check(device, cases=CASES):
    for shape in cases:
        x, weight, position = case(*shape, device)
        for copies in (1, 2):
            for first, last in ((0, len(position)), (len(position) // 2, len(position))):
                part = position[first:last]
                want = patch_embed(x.double(), weight.double(), part.double(), first, copies, "torch")
                got = patch_embed(x, weight, part, first, copies, "triton")
                assert got.shape == want.shape and (got - want).norm() <= 1e-6 * want.norm()


def test_tokens_are_a_convolution_and_its_position():
    for shape in CASES:
        _, channels, _, patch, width = shape
        x, weight, position = (one.double() for one in case(*shape))
        convolved = F.conv2d(x, weight.view(width, channels, patch, patch), stride=patch)
        want = convolved.flatten(2).transpose(1, 2) + position
        torch.testing.assert_close(patch_embed(x, weight, position), want, rtol=1e-12, atol=1e-12)
        twice = patch_embed(x, weight, position[2:4], first=2, copies=2)
        torch.testing.assert_close(twice, torch.cat([want[:, 2:4]] * 2), rtol=1e-12, atol=1e-12)


def test_interpreted_kernel():
    interpreted("test_patch_embed.check('cpu', test_patch_embed.CASES[1::2])")


@pytest.mark.gpu
def test_compiled_kernel():
    check("cuda")
