"""Parts that benchmarks share, and refusals before anything is measured."""

import importlib
import json
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, fill

from accel.families import Defaults, constructor_of, sit
from accel.families.dit.network import DiT_models, _constructor
from accel.families.sit.network import SiT, SiT_models
from bench import harness, seen_as
from bench.rival import Rival


def test_a_file_runs_as_its_module_does():
    for command in (["bench/steps.py"], ["-m", "bench.steps"]):
        done = subprocess.run([sys.executable, *command, "--model", "x"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("steps.py: argument --model: invalid choice: 'x'")


NO_GPU = "--device", "cpu"
REFUSED = [
    ("steps", ["--output", "/proc/x.json"], "--output /proc/x.json: No such file"),
    ("steps", ["--only", "graph", *NO_GPU], "--only graph: no rung on cpu"),
    ("steps", ["--model", "DiT-S/8", "--image-size", "144"], "--image-size 144: must be a multiple of 64"),
    ("steps", ["--vs", "compile,diffusers", *NO_GPU], "--vs: compares float16 on a GPU"),
    ("steps", ["--vs", "diffusers,tensorrt"], "--vs: diffusers,tensorrt: choose from eager, compile"),
    ("steps", ["--backends", "exact:gemm=cublas", *NO_GPU], "--backends exact: cpu cannot run that tier"),
    ("steps", ["--backends", "fp32:gemm=torch"], "fp32:gemm=torch: begin with one of fp16, bf16, exact"),
    ("steps", ["--backends", "exact:gemm=cublaslt"], "exact:gemm=cublaslt: exact takes gemm=auto|hopper|cublas|torch"),
    ("steps", ["--backends", "fp16:graph=torch"], "fp16:graph=torch: fp16 takes adaln=…, gemm=…"),
    ("steps", ["--seen-as", "8"], "--seen-as: 8: must be a compute capability, as 8.0"),
    ("profile_step", ["--output", "x.txt"], "--output x.txt: must end in .json"),
    ("profile_step", ["--baseline", "--precision", "fp16", *NO_GPU], "--precision fp16: upstream samples in fp32"),
    ("profile_step", ["--baseline", "none", *NO_GPU], "--baseline none: no models.py and diffusion/ there"),
    ("jobs", ["--gpus", "0"], "--gpus: 0: must be from 1 to 1,000,000"),
    ("jobs", ["--gpus", "1"], "--gpus 1: is compared with one GPU; give 2 or more"),
    ("jobs", ["--contest", "fp32", "bf16", *NO_GPU], "--contest bf16: cpu cannot run it"),
    ("jobs", ["--gpus", "2", "--precision", "exact", *NO_GPU], "--precision exact: cpu cannot run it"),
    ("jobs", [], "one of the arguments --contest --gpus --fid is required"),
    ("many_gpus", [], "torchrun"),
    ("many_gpus", ["--model", "DiT-S/8", "--image-size", "144"], "--image-size 144: must be a multiple of 64"),
    ("many_gpus", ["--plans", "tokens=2,exchange=post"], "--parallel tokens=2,exchange=post"),
    ("many_gpus", ["--plans", "weights=2"], "--plans weights=N: divides a network while it is read"),
    ("sanitize", [], "--device cpu: a GPU's kernels are checked"),
]


@pytest.mark.parametrize("program, arguments, words", REFUSED)
def test_refused_before_anything_is_measured(program, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"bench.{program}").main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and words in error


def test_provenance(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "x.py"), "--flag", "two words"])
    about = harness.provenance(torch.device("cpu"), None)
    assert about["gpu"] is None and about["torch"] == torch.__version__ and about["commit"] and about["date"]
    assert about["command"] == "python bench/x.py --flag 'two words'"  # to be typed again
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert harness.provenance(torch.device("cpu"), "abc")["command"].startswith("torchrun --nproc_per_node=4 ")


def test_times_are_of_the_last_steps():
    """Steps before the load is over do not count, however slow they are."""
    count = iter(range(1000))

    def loop(on_step):
        for index in count:
            time.sleep(0.2 if index < 4 else 0.005)
            on_step(index, None)

    row = harness.time_steps(loop, torch.device("cpu"), load=0.7, window=0.3)
    assert 5 <= row["p10"] <= row["ms"] <= row["p90"] < 190 and row["steps"] > 1


def test_any_family_by_its_models_name(monkeypatch, tmp_path):
    """A flow of 32 channels at factor 16, one output per channel, that its family adds."""
    monkeypatch.setitem(sit.FAMILY.models, "Other/1", Defaults(image_size=256, num_classes=5, factor=16))
    shape = dict(input_size=16, in_channels=32, patch_size=1, hidden_size=96, depth=1, num_heads=2, learn_sigma=False)
    monkeypatch.setitem(SiT_models, "Other/1", _constructor("Other_1", SiT, **shape))
    assert harness.space_of("Other/1")[:2] == (32, 16) and harness.space_of("DiT-XL/2")[:2] == (4, 8)
    assert harness.demo_of("Other/1") == harness.demo_of("REPA-SiT-XL/2") == "SiT-Demo/2"
    flags = ["--model", "Other/1", "--image-size", 128, "--pictures", 1, "--load", 0, "--window", 0.1]
    flags += ["--device", "cpu", "--commit", "older", "--output", tmp_path / "log.json"]
    monkeypatch.setattr(sys, "argv", ["steps.py", *map(str, flags)])
    importlib.import_module("bench.steps").main()
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["commit"] == "older" and 0 < log["rungs"][0]["error"] < 1e-5


def test_random_weights_make_no_zeros():
    """As a freshly initialised DiT does."""
    build = constructor_of("DiT-S/8")
    network, again = (harness.random_network(build, "cpu", input_size=8, num_classes=4) for _ in "ab")
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([1, 900]), torch.tensor([0, 3])
    assert 0.1 < network(x, t, y).std() < 10 and torch.equal(network(x, t, y), again(x, t, y))


@pytest.mark.parametrize("tier", ["fp16", "exact"])
def test_a_switch_reaches_its_op(tier):
    """Reference implementations run on a CPU; of a backend that there is not, each op says so."""
    model, cpu = (
        harness.random_network(constructor_of("DiT-Demo/2"), "cpu", input_size=16, num_classes=8),
        torch.device("cpu"),
    )
    run = torch.randn(2, 4, 16, 16), torch.tensor([1, 5]), 4.0, 8
    want, switches = harness.guided(harness.build(model, "fp32", cpu), *run), harness.PLAIN | dict(attention="torch")
    network = harness.build(model, tier, cpu, **switches)
    assert (harness.guided(network, *run) - want).norm() / want.norm() < (1e-3 if tier == "fp16" else 2e-6)
    assert not network.hoists and not network.captures and harness.build(model, tier, cpu, gemm="torch").hoists
    for switch in ("adaln", "attention", "gemm"):
        with pytest.raises(ValueError, match="backend"):
            harness.guided(harness.build(model, tier, cpu, **switches | {switch: "none"}), *run)


@pytest.mark.parametrize("what", ["eager", "diffusers"])
def test_rivals_compute_the_same(what):
    """diffusers but for its frequencies. The compiler is tested on a GPU."""
    model = fill(DiT_models["DiT-Demo/2"](num_classes=8))
    x, y, scale = torch.randn(2, 4, 16, 16), torch.tensor([1, 5]), 4.0
    plain = harness.build(model, "fp32", torch.device("cpu"))
    want = harness.guided(plain, x, y, scale, 8)
    rival = Rival(what, model, torch.float32, torch.device("cpu"))
    if what == "diffusers":
        assert 1e-3 < (harness.guided(rival, x, y, scale, 8) - want).norm() / want.norm() < 0.5
        for block in rival.transformer.transformer_blocks:
            block.norm1.emb.time_proj.downscale_freq_shift = 0
    assert torch.allclose(harness.guided(rival, x, y, scale, 8), want, atol=1e-4)
    if what == "eager":  # in the loop, which gives the index of an evaluation for its time
        noise = [torch.Generator().manual_seed(1) for _ in "ab"]
        process = harness.process_of("DiT-Demo/2", 3)
        loops = [harness.sampling(one, process, x, y, scale, 8, generator=g) for one, g in zip((plain, rival), noise)]
        assert torch.allclose(*(loop() for loop in loops), atol=1e-4)


NAMES = [
    "attention",
    "_adaln",
    "_attention",
    "pytorch_flash::flash_fwd_kernel",
    "fmha_cutlassF_f16_aligned_64x128_rf_sm80",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_TNT",
    "sm80_xmma_gemm_bf16bf16_bf16f32",
]


@pytest.mark.parametrize(
    "capability, newer",
    [
        ((7, 0), {"attention", "_attention", "pytorch_flash", "cudnn", "sm80_xmma_gemm_bf16"}),
        ((8, 6), {"attention", "cudnn"}),
        ((9, 0), set()),
        ((12, 0), {"attention"}),
    ],
)
def test_what_a_gpu_must_not_launch(capability, newer):
    found = seen_as.newer(NAMES, capability)
    assert len(found) == len(newer) and all(any(name.startswith(start) for start in newer) for name in found)
