"""The kernels before the first block and after the last (embed, ancestral): twins against the equations and the sampler, kernels against the twins,
through Triton's interpreter on a CPU and compiled on a GPU; and compiled ahead of time for three GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accel.kernels import ancestral_update as ancestral
from accel.kernels import patch_embed as embed
from accel.kernels.ancestral_update import ancestral_update
from accel.kernels.patch_embed import patch_embed
from diffusion import create_diffusion

HERE = Path(__file__)
# (pictures, channels, side, patch, width): widths and batches that fill no tile, every patch size, more pixels than a program takes.
CASES = ((1, 4, 16, 2, 216), (3, 4, 12, 2, 100), (2, 4, 16, 4, 384), (1, 4, 32, 8, 128), (5, 4, 6, 2, 72))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def embedding(n, channels, side, patch, width, device):
    count = channels * patch**2
    return (
        draw(n, channels, side, side).to(device),
        draw(width, count, seed=1).to(device),
        draw((side // patch) ** 2, width, seed=2).to(device),
    )


def ending(n, channels, side, patch, guided, device):
    tokens = draw(2 * n if guided else n, (side // patch) ** 2, 2 * channels * patch**2)
    t = torch.arange(n) * 7 % 25  # the last step among them, another timestep for every picture
    coefficients = create_diffusion("25").ancestral_coefficients(torch.device("cpu"))
    return [
        one.to(device)
        for one in (
            tokens,
            draw(n, channels, side, side, seed=1),
            draw(n, channels, side, side, seed=2),
            t,
            coefficients,
        )
    ]


def check(device):
    for n, channels, side, patch, width in CASES:
        x, weight, position = embedding(n, channels, side, patch, width, device)
        for copies in (1, 2):
            for first, last in ((0, len(position)), (len(position) // 2, len(position))):
                part = position[first:last]
                want = patch_embed(x.double(), weight.double(), part.double(), first, copies, route="torch")
                got = patch_embed(x, weight, part, first, copies, route="triton")
                assert got.shape == want.shape and (got - want).norm() <= 1e-6 * want.norm()
        for scale in (None, 4.0, 1.5):
            tokens, x, noise, t, coefficients = ending(n, channels, side, patch, scale is not None, device)
            want = ancestral_update(
                tokens.double(), x.double(), noise.double(), t, coefficients.double(), scale, route="torch"
            )
            got = ancestral_update(tokens, x, noise, t, coefficients, scale, route="triton")
            assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.gpu
def test_compiled_kernels():
    check("cuda")


def test_interpreted_kernels():
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    run(
        "import test_patch_embed; test_patch_embed.check('cpu'); print('interpreted')",
        "interpreted",
        TRITON_INTERPRET="1",
    )


def run(code, printed, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), **environment},
    )
    assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_tokens_are_a_convolution_and_its_position():
    for n, channels, side, patch, width in CASES:
        x, weight, position = (one.double() for one in embedding(n, channels, side, patch, width, "cpu"))
        want = (
            F.conv2d(x, weight.view(width, channels, patch, patch), stride=patch).flatten(2).transpose(1, 2) + position
        )
        torch.testing.assert_close(patch_embed(x, weight, position), want, rtol=1e-12, atol=1e-12)
        twice = patch_embed(x, weight, position[2:4], first=2, copies=2)
        torch.testing.assert_close(twice, torch.cat([want[:, 2:4]] * 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", (None, 4.0))
def test_the_update_is_p_sample(scale):
    """Of a model that gives those tokens, put together and guided as models.DiT does it."""
    from models import DiT

    diffusion = create_diffusion("25")
    for n, _, side, patch, _ in CASES:
        tokens, x, noise, t, coefficients = ending(n, 4, side, patch, scale is not None, "cpu")
        model = DiT(input_size=side, patch_size=patch, hidden_size=24, depth=1, num_heads=1)
        out = model.unpatchify(tokens)
        if scale is not None:
            cond, uncond = out[:, :3].chunk(2)
            out = torch.cat([uncond + scale * (cond - uncond), out[:n, 3:]], dim=1)
        want = diffusion.p_sample(lambda *_: out, x, t, clip_denoised=False, noise=noise)["sample"]
        torch.testing.assert_close(
            ancestral_update(tokens, x, noise, t, coefficients, scale), want, rtol=1e-5, atol=1e-5
        )


AHEAD = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from accel.kernels import ancestral_update as ancestral
from accel.kernels import patch_embed as embed
shape = dict(CHANNELS=4, HEIGHT=64, WIDTH=64, PATCH=2)
kernels = dict(
    embed=(embed._patch_embed, dict(n="i32", first="i32", tokens="i32"), dict(shape, D=1152, COPIES=2, TOKENS=embed.TOKENS, COLUMNS=embed.COLUMNS)),
    ancestral=(ancestral._ancestral, dict(t_stride="i32", n="i32", cfg_scale="fp32"), dict(shape, GUIDANCE=3, BLOCK=ancestral.BLOCK)))
kernel, scalars, constants = kernels[sys.argv[2]]
signature = {name: "constexpr" if name in constants else scalars.get(name) or ("*i64" if name == "t_ptr" else "*fp32") for name in kernel.arg_names}
source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name.endswith("_ptr")})
ptx = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"]
print(json.dumps(dict(target=ptx.split(".target ")[1].split()[0], products=ptx.count("mma."), spills=ptx.count(".local"))))
"""


@pytest.mark.parametrize("name", ("embed", "ancestral"))
@pytest.mark.parametrize("capability", (70, 80, 90))
def test_compiles_ahead_of_time(capability, name, tmp_path):
    """On any machine, for V100, A100 and H100: no tensor-core products, which would be TF32, and no spills."""
    done = subprocess.run(
        [sys.executable, "-c", AHEAD, str(capability), name],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[2])},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["target"].startswith(f"sm_{capability}") and report["products"] == report["spills"] == 0


def test_wrong_inputs_are_refused():
    x, weight, position = embedding(1, 4, 16, 2, 72, "cpu")
    with pytest.raises(TypeError, match="contiguous float32"):
        patch_embed(x.double(), weight, position, route="triton")
    tokens, x, noise, t, coefficients = ending(1, 4, 16, 2, True, "cpu")
    with pytest.raises(TypeError, match="contiguous float32"):
        ancestral_update(tokens, x.transpose(2, 3), noise, t, coefficients, 4.0, route="triton")
    with pytest.raises(ValueError, match="do not fit"):
        ancestral_update(tokens, x, noise, t, coefficients, None)
    assert embed.triton and ancestral.triton
