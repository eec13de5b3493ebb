"""The end of a step against the sampler, its kernel against the reference through Triton's interpreter on a CPU and
compiled on a GPU."""

import pytest
import torch
from kernel_testing import draw, interpreted

from accel.diffusion import create_diffusion
from accel.families.dit.network import DiT
from accel.kernels.ancestral_update import ancestral_update
from accel.sampling.guidance import Guidance, Unguided

# (pictures, side, patch): batches that fill no tile, every patch size, more pixels than a program computes.
CASES = ((1, 16, 2), (3, 12, 2), (2, 16, 4), (1, 32, 8), (5, 6, 2))


def case(n, side, patch, guided, device="cpu"):
    tokens = draw(2 * n if guided else n, (side // patch) ** 2, 2 * 4 * patch**2)
    x, noise = (draw(n, 4, side, side, seed=seed) for seed in (1, 2))
    t = torch.arange(n) * 7 % 25  # the last step among them, another timestep for every picture
    coefficients = create_diffusion("25").ancestral_coefficients(torch.device("cpu"))
    return [one.to(device) for one in (tokens, x, noise, t, coefficients)]


def check(device):
    for shape in CASES:
        for scale, channels in ((1.0, 0), (4.0, 3), (1.5, 4)):
            arguments = case(*shape, channels, device)
            exact = [one if one.dtype == torch.int64 else one.double() for one in arguments]
            want = ancestral_update(*exact, scale, channels, "torch")
            got = ancestral_update(*arguments, scale, channels, "triton")
            assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("guidance", (Unguided(), Guidance(4.0, 9), Guidance(2.0, 9, channels=4)))
def test_the_update_is_p_sample(guidance):
    """Of a model that gives those tokens, unpatchified and guided as models.DiT does it."""
    diffusion = create_diffusion("25")
    for n, side, patch in CASES:
        tokens, x, noise, t, coefficients = case(n, side, patch, guidance.channels)
        model = DiT(input_size=side, patch_size=patch, hidden_size=24, depth=1, num_heads=1)
        out = guidance.combine(model.unpatchify(tokens))
        want = diffusion.p_sample(lambda *_: out, x, t, clip_denoised=False, noise=noise)["sample"]
        got = ancestral_update(tokens, x, noise, t, coefficients, guidance.scale, guidance.channels)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_interpreted_kernel():
    interpreted("test_ancestral_update.check('cpu')")


@pytest.mark.gpu
def test_compiled_kernel():
    check("cuda")
