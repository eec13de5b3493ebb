"""Choices and refusals on each generation of GPUs, and the switches that a tier sets. The
GPUs are stand-ins: nothing is launched.
"""

import pytest
import torch
from conftest import mistake
from networks import run_of

from accel.errors import UsageError
from accel.kernels import attention, gpu, split_attention, split_linear
from accel.run import opening
from accel.runtime import precision

GPU = torch.device("cuda", 0)
OLD = ((7, 0), (7, 5))
AMPERE = ((8, 0), (8, 6), (8, 9))
HOPPER = ((9, 0),)
BLACKWELL = ((10, 0), (12, 0))
CAPABILITIES = (*OLD, *AMPERE, *HOPPER, *BLACKWELL)
WHEEL_2_10 = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
WHEEL_2_11 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]
WHEEL_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture(params=CAPABILITIES, ids=str)
def seen(request, monkeypatch):
    monkeypatch.setattr(gpu, "emulated", request.param)
    return request.param


def test_backends(seen):
    """Hopper's kernels on Hopper alone; in half precision flash where there is one;
    exact by cuBLAS elsewhere.
    """
    half = {OLD: "efficient", AMPERE: "flash", HOPPER: "hopper", BLACKWELL: "flash"}
    split = "hopper" if seen == (9, 0) else "cublas"
    [generation] = (group for group in half if seen in group)
    for dtype in (torch.float16, torch.bfloat16):
        assert attention.choose_backend(GPU, dtype, 72) == half[generation]
    others = {OLD: "efficient", HOPPER: "cudnn"}
    assert attention.choose_backend(GPU, torch.float16, 64) == others.get(generation, "flash")
    assert attention.choose_backend(GPU, torch.float16, 136) == (
        "efficient" if seen in OLD else "flash"
    )
    assert attention.choose_backend(GPU, torch.float32, 72, 132) == "efficient"
    assert attention.choose_backend(GPU, torch.float32, 96, 512) == "efficient"
    float32 = "simt" if seen in HOPPER else "efficient"
    assert attention.choose_backend(GPU, torch.float32, 72, 256) == float32
    assert attention.choose_backend(GPU, torch.float64, 72) == "torch"
    assert split_attention.choose_backend(GPU, 72) == split_linear.choose_backend(GPU) == split
    assert split_attention.choose_backend(GPU, 64) == "cublas"
    cpu = torch.device("cpu")
    assert split_linear.choose_backend(cpu) == split_attention.choose_backend(cpu, 72) == "torch"


def test_tiers(seen):
    """What a GPU has, it runs; what it lacks is refused in a line, by the flag that asked
    for it.
    """
    lacking = {"bf16", "tf32"} if seen in OLD else set()
    assert {tier for tier in precision.TIERS if not precision.supports(tier, GPU)} == lacking
    assert run_of(device="cuda:0").settings.precision == "fp16"
    for tier in precision.TIERS:
        how = dict(device="cuda:0", precision=tier)
        if tier in lacking:
            with mistake("precision", tier, "fp32"):
                run_of(**how)
        else:
            float32 = "fp32" if tier in precision.IEEE_TIERS or seen in OLD else "tf32"
            half = precision.TIERS[tier].dtype != torch.float32
            settings = run_of(**how).settings
            chosen = settings.precision, settings.vae_precision
            assert chosen == (tier, "fp16" if half else float32)
    assert precision.float32_decoder("fp16", GPU) == ("fp32" if seen in OLD else "tf32")


def test_no_tf32_but_where_it_is_asked_for(switches):
    tiers = dict(
        **dict.fromkeys(precision.IEEE_TIERS, (False, False)),
        tf32=(True, True),
        fp16=(False, True),
        bf16=(False, True),
    )
    before = switches()
    for tier, want in tiers.items():
        with precision.arithmetic(tier):
            assert switches() == want, tier
        assert switches() == before
    with pytest.raises(KeyError), precision.arithmetic("tf32"):
        raise KeyError
    assert switches() == before
    with precision.arithmetic("tf32"):
        with precision.true_float32():
            assert switches() == (False, True)
        assert switches() == (True, True)


@pytest.mark.parametrize(
    "capability, targets, remedy",
    [
        ((7, 0), WHEEL_2_10, None),
        ((8, 9), WHEEL_12_6, None),
        ((13, 0), WHEEL_2_11, None),
        ((9, 0), ["sm_90a"], None),
        ((10, 0), ["sm_100f"], None),
        ((9, 0), ["gfx90a"], None),
        ((6, 1), WHEEL_2_10, "a build for CUDA 12.6"),
        ((7, 0), WHEEL_2_11, "torch 2.10.0 from PyPI, or a build for CUDA 12.6"),
        ((10, 0), WHEEL_12_6, "a build for CUDA 12.8 or later"),
        ((13, 0), WHEEL_2_10, "a build for CUDA 12.8 or later"),
    ],
)
def test_a_torch_without_code_for_the_gpu_is_refused(capability, targets, remedy, monkeypatch):
    """The installed torch was built for `targets`. remedy: None if it has code for the GPU."""
    seen = dict(is_available=True, device_count=1, get_device_name="Tesla", get_arch_list=targets)
    for name, value in dict(seen, get_device_capability=capability).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    if remedy is None:
        assert opening.choose_device(None) == torch.device("cuda")
        return
    with pytest.raises(UsageError) as refusal:
        opening.choose_device(None)
    words = f"device=cuda: torch {torch.__version__} has no code for Tesla; install {remedy}"
    assert str(refusal.value) == words


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


@pytest.mark.parametrize(
    "driver, cuda, words",
    [
        (DRIVER, None, "is built without CUDA, but this machine has an NVIDIA GPU"),
        (
            OPEN_DRIVER,
            "13.0",
            "CUDA 13.0, which needs NVIDIA driver 580 or later; the driver is 570",
        ),
        (DRIVER, "12.8", ""),
        ("", None, ""),
    ],
)
def test_a_gpu_that_the_installed_torch_cannot_use(
    driver, cuda, words, tmp_path, monkeypatch, capsys
):
    """A notice is printed, and --device cuda is refused. There is no notice without a driver, or if
    the GPU is hidden.
    """
    if torch.cuda.is_available():
        pytest.skip("torch uses the GPU here")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(gpu, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if driver:
        gpu.DRIVER_FILE.write_text(driver)
    assert opening.choose_device(None).type == "cpu"
    printed = capsys.readouterr().out
    assert words in printed and bool(words) == bool(printed) == printed.count("\n"), printed
    with pytest.raises(UsageError, match=words or "finds no CUDA GPU"):
        opening.choose_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert opening.choose_device(None).type == "cpu" and not capsys.readouterr().out


def test_amd_gpus_have_float32_only(monkeypatch):
    """On ROCm torch calls AMD GPUs cuda, and reports Hopper's capability for some."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert [tier for tier in precision.TIERS if precision.supports(tier, GPU)] == ["fp32"]
    assert run_of(device="cuda:0").settings.precision == "fp32"
    with pytest.raises(UsageError, match="^precision=exact: cuda:0 is an AMD GPU.*choose fp32$"):
        run_of(device="cuda:0", precision="exact")
