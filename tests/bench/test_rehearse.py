"""What bench/rehearse.py concludes. The runs themselves need a GPU."""

import json

import pytest

from bench import rehearse

NAMES = [
    "adaln",
    "_adaln",
    "_attention",
    "_split_linear",
    "pytorch_flash::flash_fwd_kernel",
    "fmha_cutlassF_f16_aligned_64x128_rf_sm80",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_TNT",
    "sm80_xmma_gemm_bf16bf16_bf16f32",
]


@pytest.mark.parametrize(
    "capability, newer",
    [
        ((7, 0), {"adaln", "_attention", "_split_linear", "pytorch_flash", "cudnn", "sm80_xmma_gemm_bf16"}),
        ((8, 6), {"adaln", "cudnn"}),
        ((9, 0), set()),
        ((12, 0), {"adaln"}),
    ],
)
def test_what_a_gpu_must_not_launch(capability, newer):
    found = rehearse.of_newer(NAMES, capability)
    assert len(found) == len(newer) and all(any(name.startswith(start) for start in newer) for name in found)


def test_problems():
    worst = dict(mae=0.02, psnr=30.0, ssim=0.9)
    passes, fails = dict(contest=True, strict=False, worst=worst), dict(contest=False, strict=False, worst=worst)
    checked = {
        "fp32": dict(newer=[], kernels=[]),
        "tf32": dict(refused="--precision tf32: …"),
        "fp16": dict(newer=[], kernels=[], judged=passes),
        "bf16": dict(newer=["attention"], kernels=[], judged=fails),
        "exact": dict(newer=[], kernels=[], judged=passes),
    }
    found = rehearse.problems(checked, dict(exact=80.0, fp16=39.0))
    assert [line.partition(":")[0] for line in found] == ["fp16", "bf16", "exact"]
    assert "FID job" in found[0] and "attention" in found[1]
    assert rehearse.problems(dict(failed=["a", "b"]), dict(failed=["c"])) == ["failed: a | b", "failed: c"]


def test_a_process_that_fails_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(rehearse.sys, "argv", ["rehearse.py"])
    [failed] = rehearse.in_a_process("timing", (8, 0), tmp_path)["failed"]
    assert "there is none here" in failed and "failed" in rehearse.line("8.0", dict(failed=[failed]))


@pytest.mark.gpu
def test_an_older_gpu(run, tmp_path):
    small = ("--capability", "7.0", "8.0", "--timed", "8.0", "--batch-rows", 2, "--image-size", 256)
    done = run("bench/rehearse.py", *small, "--load", 0.2, "--window", 0.2, "--output", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert set(record["checked"]) == {"7.0", "8.0"} and record["times"]["8.0"]["fp16"]["2"]["ms"] > 0
    assert record["fid_jobs"]["7.0"]["exact"] > record["fid_jobs"]["7.0"]["fp16"] > 40
    assert "refused" in record["checked"]["7.0"]["bf16"] and "judged" in record["checked"]["8.0"]["bf16"]
