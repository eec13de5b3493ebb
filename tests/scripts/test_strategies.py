"""A step's work and the designs for several GPUs, against figures that were computed by hand."""

import json

import pytest
import torch
from conftest import ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import DiT
from scripts.report import template
from scripts.report_data import SERIES, design_table
from scripts.strategies import Machine, Shape, bytes_moved, choose, designs, flops

# L = 2, D = 4, h = 4, MLP 16, T = 16, patch 2, 4 channels in, 8 out. The blocks' weights have
# 2·(4·4·4 + 2·4·16) = 384 entries; all parameters: 500.
SMALL = Shape(2, 4, 4, 16, 16, 2, 4, 8, 500)
XL = Shape(28, 1152, 16, 4608, 1024, 2, 4, 8, 676_014_368)  # at 512 px


def of(labels, gpus, value=2):
    return {design.name: design for design in designs(SMALL, labels, gpus, value)}


def test_the_work_of_a_step_by_hand():
    # GEMMs of a token: 2·384 in the blocks, 2·4·(4 + 8)·4 = 384 at both ends; 3 rows of 16 tokens
    assert flops(SMALL, 3)["GEMM"] == 3 * 16 * (768 + 384)
    # attention: q·k and p·v, 2·16·16·4 each, in 2 blocks
    assert flops(SMALL, 3)["attention"] == 3 * 2 * 2 * (2 * 16 * 16 * 4)
    moved = bytes_moved(SMALL, 3, 2)
    # 384 weights, and of each of 3·16·2 tokens: 4 + 12, 4 + 4, 4 + 16, 16 + 4 values
    assert moved["GEMM"] == 2 * (384 + 96 * 64)
    assert moved["attention"] == 2 * 96 * (12 + 4)
    # of each token 4 values: 4 + 2 read and 2 written, then 4 + 2 + 2 read and 4 + 2 written
    assert moved["element-wise"] == 96 * 4 * (8 + 14)


def test_the_work_of_a_step_is_what_torch_counts():
    """The conditioning is 0.8 % here, which torch counts too."""
    model = DiT(input_size=32, depth=2, hidden_size=64, num_heads=4, num_classes=8).eval()
    shape = Shape(2, 64, 4, 256, 256, 2, 4, 8, 0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 4, 32, 32), torch.tensor([1, 2]), torch.tensor([0, 1]))
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert flops(shape, 2)["attention"] == attention
    rest = counter.get_total_flops() - attention
    assert flops(shape, 2)["GEMM"] == pytest.approx(rest, rel=0.01) and rest > 1e8


def test_designs_for_four_labels_on_two_gpus_by_hand():
    found = of(labels=4, gpus=2)
    # W = 1000 bytes; A = 16·4·2 = 128 bytes; a row's tensors: 16·(4·4 + 2·(4 + 16)) = 896
    assert found["data"] == ("data", 0.5, 1000 + 4 * 896, 0, 0, True)
    # half of 1000 bytes, a block's 500; half the weights go to the other GPU
    assert found["zero"] == ("zero", 0.5, 500 + 500 + 4 * 896, 500, 2, True)
    # 4 of 8 rows; outputs of 16·4·8 float32 values
    assert found["rows"] == ("rows", 0.5, 1000 + 4 * 896, 4 * 2048, 1, True)
    # 8 tokens of 8 rows; in 2 blocks k and v of half the tokens go on once: 2·2·8·128/2
    assert found["ring"] == ("ring", 0.5, 1000 + 8 * 448 + 1024, 2048, 2, True)
    assert found["gather"] == ("gather", 0.5, 1000 + 8 * 448 + 2048, 2048, 2, True)
    # q, k, v and the output of 8 rows' half: 2·4·8·128/2 bytes, half of which stay
    assert found["ulysses"] == ("ulysses", 0.5, 1000 + 8 * 448, 2048, 8, True)
    # two all-reduces in 2 blocks: each sends 2·(1/2) of 8·128 bytes
    assert found["tensor"] == ("tensor", 0.5, 500 + 8 * 896, 4 * 1024, 4, True)
    # 8 rows pass 2 stages in 9 turns of 1/16 of the work
    assert found["pipeline"] == ("pipeline", 9 / 16, 500 + 896, 1024, 8, True)
    # keys and values of one block: 2·8·128
    assert found["pipefusion"] == ("pipefusion", 0.5, 500 + 8 * 448 + 2048, 1024, 2, False)
    assert "rows + gather" not in found  # needs four GPUs


def test_one_label_on_four_gpus_by_hand():
    found = of(labels=1, gpus=4)
    assert found["data"].share == 1 and found["data"].idle(4) == 0.75
    # two of four GPUs work; they send one output each
    assert found["rows"].share == 0.5 and found["rows"].idle(4) == 0.5
    assert found["rows"].sent == 2048
    # within each half one row's keys and values: 2·2·128/2, then half a row's output
    assert found["rows + gather"][1:] == (0.25, 1000 + 448 + 256, 256 + 1024, 3, True)
    # three of four parts of two rows' keys and values: 2 blocks · 3 · 2·2·128/4
    assert found["gather"].sent == found["ring"].sent == 768 and found["ring"].messages == 6
    # four all-to-alls: 2·4·(3/4)·(2·128/4)
    assert found["ulysses"].sent == 384 and found["ulysses"].messages == 8
    # rows of 2 through 4 stages would need 4 blocks
    assert "pipeline" not in found and "pipefusion" not in found
    assert all(design.idle(4) == 0 for name, design in found.items() if design.share == 0.25)


def test_what_cannot_be_divided_is_left_out():
    assert not {"ring", "gather", "ulysses", "tensor", "rows + gather"} & {*of(4, 3)}


def test_the_estimate_adds_work_bytes_and_messages():
    machine = Machine(gpus=2, ms=10.0, gb_s=2.0, us=50.0)
    # 4096 bytes at 2 GB/s are 0.002048 ms; four messages of 0.05 ms
    assert of(4, 2)["tensor"].ms(machine) == pytest.approx(5 + 0.002048 + 0.2)
    assert of(4, 2)["pipeline"].ms(machine) == pytest.approx(90 / 16 + 0.000512 + 0.4)


def test_the_choice_is_the_fastest_that_keeps_the_picture():
    slow = Machine(4, 10.0, 1e-6, 1000.0)
    assert choose([*of(4, 4).values()], slow).name == "data"
    fast = Machine(4, 1000.0, 1e6, 0.0)
    one = [*of(1, 4).values()]
    assert choose(one, fast).name == "ulysses"  # the fewest bytes of those that divide all work
    deep = [*designs(SMALL._replace(depth=4), 1, 4, 2)]
    fastest = min(deep, key=lambda design: design.ms(fast))
    assert fastest.name == "pipefusion" and choose(deep, fast).name != "pipefusion"


# ---- docs/parallel.md ----


def test_the_page_has_the_table_of_the_report():
    """For DiT-XL/2 on four H200s: steps of a log, and a link whose bandwidth and latency are those
    of a line through its shortest and its longest gather.
    """
    page = (ROOT / "docs/parallel.md").read_text()
    gathers = [
        (row["mib"] * 2**20, row["us"])
        for row in json.loads((ROOT / "log/exchange-h200.json").read_text())["nccl"]
        if row["collective"] == "all_gather"
    ]
    (least, shortest), *_, (most, longest) = gathers
    gb_s = (most - least) / (longest - shortest) / 1e3
    latency = shortest - least / gb_s / 1e3
    measured = json.loads((ROOT / "log/parallel-h200.json").read_text())["plans"]
    for labels in SERIES:
        plans = [
            row | dict(plan=row["plan"].replace(",exchange=kv", ""))
            for row in measured
            if (row["tier"], row["size"], row["labels"]) == ("fp16", 512, labels)
        ]
        machine = Machine(4, plans[0]["ms"], gb_s, latency)
        table = design_table(XL, labels, machine, 2, plans)
        text = template("designs.en.md").module.design_table(table)
        assert f"\n\n{text.strip()}\n\n" in page, text
