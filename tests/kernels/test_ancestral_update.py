"""The end of a step against the sampler, its kernel against the reference through Triton's interpreter on a CPU and
compiled on a GPU."""

import pytest
import torch
from kernel_testing import draw, interpreted

from accel.kernels.ancestral_update import ancestral_update
from diffusion import create_diffusion
from models import DiT

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
        for scale in (None, 4.0, 1.5):
            arguments = case(*shape, scale is not None, device)
            exact = [one if one.dtype == torch.int64 else one.double() for one in arguments]
            want = ancestral_update(*exact, scale, "torch")
            got = ancestral_update(*arguments, scale, "triton")
            assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("scale", (None, 4.0))
def test_the_update_is_p_sample(scale):
    """Of a model that gives those tokens, unpatchified and guided as models.DiT does it."""
    diffusion = create_diffusion("25")
    for n, side, patch in CASES:
        tokens, x, noise, t, coefficients = case(n, side, patch, scale is not None)
        model = DiT(input_size=side, patch_size=patch, hidden_size=24, depth=1, num_heads=1)
        out = model.unpatchify(tokens)
        if scale is not None:
            cond, uncond = out[:, :3].chunk(2)
            out = torch.cat([uncond + scale * (cond - uncond), out[:n, 3:]], dim=1)
        want = diffusion.p_sample(lambda *_: out, x, t, clip_denoised=False, noise=noise)["sample"]
        got = ancestral_update(tokens, x, noise, t, coefficients, scale)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_interpreted_kernel():
    interpreted("test_ancestral_update.check('cpu')")


@pytest.mark.gpu
def test_compiled_kernel():
    check("cuda")


def test_wrong_inputs_are_refused():
    tokens, x, noise, t, coefficients = case(1, 16, 2, True)
    with pytest.raises(TypeError, match="contiguous float32"):
        ancestral_update(tokens, x.transpose(2, 3), noise, t, coefficients, 4.0, "triton")
    with pytest.raises(ValueError, match="do not fit"):
        ancestral_update(tokens, x, noise, t, coefficients, None)
    with pytest.raises(ValueError, match="one of auto, triton, torch"):
        ancestral_update(tokens, x, noise, t, coefficients, 4.0, "cudnn")
