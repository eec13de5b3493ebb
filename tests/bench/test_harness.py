"""Parts that benchmarks share, and refusals before anything is measured."""

import sys
import time
from argparse import Namespace

import forks
import pytest
import torch
from conftest import ROOT, fill

from accel.families import Defaults, constructor_of, sit
from accel.families.dit.network import DiT_models, constructor
from accel.families.sit.network import SiT, SiT_models
from bench import harness
from bench.harness import Rival

CPU = torch.device("cpu")
DEMO = Namespace(model="DiT-Demo/2", pictures=2, latent_size=16, num_classes=8)


def test_a_file_runs_as_its_module_does():
    done = forks.run([ROOT / "bench/steps.py", "--model", "x"], cwd="/")
    assert done.returncode == 2 and done.stderr.startswith(
        "steps.py: argument --model: invalid choice: 'x'"
    )


NO_GPU = "--device", "cpu"
REFUSED = [
    ("steps", ["--output", "/proc/x.json"], "--output /proc/x.json: No such file"),
    ("steps", ["--only", "graph", *NO_GPU], "--only graph: no rung on cpu"),
    (
        "steps",
        ["--model", "DiT-S/8", "--image-size", "144"],
        "--image-size 144: must be a multiple of 64",
    ),
    ("steps", ["--vs", "compile", *NO_GPU], "--vs: compares float16 on a GPU"),
    ("steps", ["--seen-as", "8"], "--seen-as: invalid compute_capability value: '8'"),
    ("steps", ["--precision", "fp16", *NO_GPU], "--precision fp16: cpu has no "),
    ("steps", ["--pictures", "1", "8", *NO_GPU], "--pictures: one process times one batch"),
    ("jobs", ["--contest", "fp32", "bf16", *NO_GPU], "--contest bf16: cpu has no bfloat16"),
    ("jobs", ["--fid", "4", "--batch", "4", *NO_GPU], "--fid 4: needs a second batch"),
    ("jobs", ["--fid", "4", "--batch", "2", "--gpus", "2", *NO_GPU], "give more than 4"),
    ("jobs", ["--fork", "docs", *NO_GPU], "--fork docs: has no sample.py; name a checkout"),
    ("jobs", [], "one of the arguments --contest --fork --fid is required"),
]


@pytest.mark.parametrize("program, arguments, words", REFUSED)
def test_refused_before_anything_is_measured(program, arguments, words, monkeypatch, here):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = here(f"bench/{program}.py", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr


def test_provenance(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "x.py"), "--flag", "two words"])
    about = harness.provenance(CPU, None)
    assert (
        about["gpu"] is None
        and about["torch"] == torch.__version__
        and about["commit"]
        and about["date"]
    )
    assert about["command"] == "python bench/x.py --flag 'two words'"  # to be typed again
    monkeypatch.setenv("PATH", "")
    assert harness.provenance(CPU, None)["commit"] == ""  # without git
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert harness.provenance(CPU, "abc")["command"].startswith("torchrun --nproc_per_node=4 ")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # all on one node
    words = "torchrun --standalone --nproc_per_node=4 bench/x.py"
    assert harness.provenance(CPU, "abc")["command"].startswith(words)


def test_times_are_of_the_last_steps(monkeypatch):
    """Steps before the load is over do not count, however slow they are."""
    count = iter(range(1000))
    clock = 0.0  # seconds, without the machine's other work
    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    def loop(on_step):
        nonlocal clock
        for index in count:
            clock += 0.2 if index < 3 else 0.05 if 10 < index < 35 else 0.005
            on_step(index, None)

    row = harness.time_steps(loop, CPU, load=0.2, window=0.3)
    assert row.pop("steps") == 60 and next(count) == 6 + 40 + 60 + 1
    assert row == pytest.approx(dict(ms=5, p10=5, p90=5))


def test_any_family_by_its_models_name(monkeypatch, log):
    """A flow of 32 channels at factor 16, one output per channel, that its family adds."""
    monkeypatch.setitem(
        sit.FAMILY.models, "Other/1", Defaults(image_size=256, num_classes=5, factor=16)
    )
    shape = dict(
        input_size=16,
        in_channels=32,
        patch_size=1,
        hidden_size=96,
        depth=1,
        num_heads=2,
        learn_sigma=False,
    )
    monkeypatch.setitem(SiT_models, "Other/1", constructor("Other_1", SiT, **shape))
    assert harness.demo_of("Other/1") == harness.demo_of("REPA-SiT-XL/2") == "SiT-Demo/2"
    assert harness.demo_of("Large-DiT-3B/2") == "Large-DiT-Demo/2"
    assert harness.complete(Namespace(model="Other/1", ckpt=None, image_size=128)).latent_size == 8
    flags = [
        "--model",
        "Other/1",
        "--image-size",
        128,
        "--pictures",
        1,
        "--load",
        0,
        "--window",
        0.1,
    ]
    record, _ = log("steps", *flags, "--device", "cpu", "--commit", "older")
    assert record["commit"] == "older" and 0 < record["rungs"][0]["error"] < 1e-5


def test_random_weights_make_no_zeros():
    """As a freshly initialised DiT does."""
    build = constructor_of("DiT-S/8")
    network, again = (harness.random_network(build, CPU, input_size=8, num_classes=4) for _ in "ab")
    x = torch.randn(2, 4, 8, 8)
    t = torch.tensor([1, 900])
    y = torch.tensor([0, 3])
    assert 0.1 < network(x, t, y).std() < 10 and torch.equal(network(x, t, y), again(x, t, y))


@pytest.mark.parametrize("tier", ["fp16", "exact"])
def test_a_switch_reaches_its_op(tier):
    """Reference implementations run on a CPU; of a backend that there is not, each op says so."""
    model = harness.random_network(constructor_of("DiT-Demo/2"), CPU, input_size=16, num_classes=8)
    want = harness.guided(harness.build(DEMO.model, model, "fp32", CPU), DEMO, CPU)
    switches = harness.PLAIN | dict(attention="torch")
    network = harness.build(DEMO.model, model, tier, CPU, **switches)
    assert (harness.guided(network, DEMO, CPU) - want).norm() / want.norm() < (
        1e-3 if tier == "fp16" else 2e-6
    )
    assert (
        not network.hoists
        and not network.captures
        and harness.build(DEMO.model, model, tier, CPU, gemm="torch").hoists
    )
    for switch in ("adaln", "attention", "gemm"):
        with pytest.raises(ValueError, match="backend"):
            harness.guided(
                harness.build(DEMO.model, model, tier, CPU, **switches | {switch: "none"}),
                DEMO,
                CPU,
            )


def test_eager_computes_the_same():
    """In the loop, which gives the index of an evaluation for its time. The compiler is
    tested on a GPU.
    """
    model = fill(DiT_models["DiT-Demo/2"](num_classes=8))
    found = []
    for network in (
        harness.build(DEMO.model, model, "fp32", CPU),
        Rival("eager", model, torch.float32, CPU),
    ):
        torch.manual_seed(1)
        found.append(harness.sampling(network, DEMO, CPU, steps=3)())
    assert torch.allclose(*found, atol=1e-4)
