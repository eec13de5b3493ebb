"""The decoder's kernels against float64, through Triton's interpreter on a CPU and compiled on a GPU; and compiled ahead of time for three GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel.kernels import group_norm as kernels
from accel.kernels.group_norm import add, group_norm

# (C, groups, H, W): a stretch that ends inside a tile, one place, a width of the demo's that is no power of two, more channels than a tile.
SHAPES = ((32, 32, 7, 5), (16, 4, 1, 1), (80, 16, 9, 8), (256, 32, 6, 6), (130, 13, 5, 6))


def case(channels, height, width, dtype, branch, device, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def picture(dtype, mean):
        x = (
            torch.randn(1, channels, height, width, generator=generator) * 3 + mean
        )  # a mean that a one-pass variance would lose
        return x.to(device, dtype).contiguous(memory_format=torch.channels_last)

    vectors = [torch.randn(channels, generator=generator).to(device) for _ in range(3)]
    return picture(dtype, 40.0), picture(torch.float16, 0.0) if branch else None, *vectors


def reference(x, bias, branch, weight, shift, groups, silu):
    """Float64, written out."""
    total = x.double() + bias.double()[:, None, None] + (0 if branch is None else branch.double())
    grouped = total.reshape(1, groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    y = (centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).view_as(total) * weight.double()[
        :, None, None
    ] + shift.double()[:, None, None]
    return total, y * torch.sigmoid(y) if silu else y


def check(channels, groups, height, width, dtype, branch, written, silu, out, tolerance, device, route):
    x, branch, bias, weight, shift = case(channels, height, width, dtype, branch, device)
    before = x.clone()
    total = add(x, bias, branch, written, route=route)
    got = group_norm(total, weight, shift, groups, silu, out, route=route)
    # What was rounded on the way out was rounded after its statistics were taken; the reference starts from the same.
    want_sum, want = reference(x, bias, branch, weight, shift, groups, silu)
    assert (
        got.dtype == out
        and got.isfinite().all()
        and got.is_contiguous(memory_format=torch.channels_last)
        and torch.equal(x, before)
    )
    assert (got.double() - want).norm() <= tolerance * want.norm() + 1e-30
    if written is None:
        assert total.value is x
    else:
        assert total.value.dtype == written
        assert (total.value.double() - want_sum).norm() <= (
            3e-4 if written == torch.float16 else 1e-6
        ) * want_sum.norm()
        last = add(x, bias, branch, written, statistics=False, route=route)
        assert torch.equal(last.value, total.value) and last.partial is None


# (dtype of x, branch, dtype of the sum, SiLU, dtype out, tolerance): the sums that the decoder makes, and one in float32 to hold to float32's bound.
FORMS = (
    (torch.float16, False, None, True, torch.float16, 4e-4),
    (torch.float32, True, torch.float32, True, torch.float16, 4e-4),
    (torch.float16, True, torch.float32, False, torch.float16, 4e-4),
    (torch.float32, True, torch.float32, True, torch.float32, 1e-6),
)


@pytest.mark.parametrize("form", FORMS)
def test_the_twins_are_the_formulas(form):
    for shape in SHAPES:
        # torch's own float32 statistics lose a digit to a mean of 40.
        check(*shape, *form[:-1], max(form[-1], 2e-5), "cpu", "torch")


def test_interpreted_kernels():
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_group_norm; test_group_norm.interpret()"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": _path()},
    )
    assert done.returncode == 0 and "interpreted" in done.stdout, done.stdout + done.stderr


def interpret():
    for shape in SHAPES:
        for form in FORMS:
            check(*shape, *form, "cpu", "triton")
    kernels.PROGRAMS = 2  # stretches of several tiles, of which the last is cut
    check(80, 16, 9, 8, *FORMS[1], "cpu", "triton")
    check(32, 32, 13, 17, *FORMS[3], "cpu", "triton")
    print("interpreted")


def _path():
    return str(Path(__file__).parents[2])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_compiled_kernels(form):
    for shape in (*SHAPES, (128, 32, 512, 512), (512, 32, 64, 64), (256, 32, 255, 130)):
        check(*shape, *form, "cuda", "triton")


@pytest.mark.gpu
def test_the_same_bits_again():
    x, branch, bias, weight, shift = case(256, 200, 200, torch.float32, True, "cuda")
    first, second = (group_norm(add(x, bias, branch, torch.float32), weight, shift, 32) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("capability", (70, 80, 90))
def test_compiles_ahead_of_time(capability, tmp_path):
    """On any machine, for V100, A100 and H100: no bfloat16 where a V100 has none, no spills, wide loads and stores."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ahead_of_time_group_norm.py")), str(capability)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": _path()},
    )
    assert done.returncode == 0, done.stderr
    for name, report in json.loads(done.stdout).items():
        assert report["target"].startswith(f"sm_{capability}") and report["cubin_bytes"] > 1000
        assert report["tensor_core_products"] == 0 and not report["bf16"] and report["spills"] == 0
        assert report["wide"] >= 4 or name == "join"


def test_all_that_decoding_launches_is_compiled_ahead(tmp_path):
    """On any machine, by Triton's own records: a decoder of the published kind, and the demo's, add no variant to those that were compiled for an H100."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ahead_of_time_group_norm.py")), "90", "decode"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": _path()},
    )
    assert done.returncode == 0, done.stderr
    ahead, published, demo = json.loads(done.stdout)
    assert ahead == published == demo == {"_add": 4, "_join": 1, "_normalise": 2}


def test_wrong_inputs_are_refused():
    x = torch.randn(2, 16, 4, 4)
    for wrong in (x, x[:1]):  # two pictures; channels outermost
        with pytest.raises(ValueError, match="one picture, its channels innermost"):
            add(wrong, torch.zeros(16), route="triton")


def test_no_gpu_rounds_otherwise_for_its_size():
    """Stretches cover every picture, by its size alone."""
    for places in (1, 31, 32, 4096, 65536, 512 * 512, 2048 * 2048, 999999):
        parts, turns = kernels._stretch(places, 128)
        assert (
            parts <= kernels.PROGRAMS / 2
            and (parts - 1) * turns * kernels.PLACES < places <= parts * turns * kernels.PLACES
        )
