"""Files of training scripts: which entry is sampled, and what lies beside the weights."""

import argparse
import pathlib
import re
from collections import defaultdict
from types import SimpleNamespace

import forks
import numpy as np
import pytest
import torch
from conftest import mistake
from networks import identify, small, weights_at
from safetensors.torch import save_file
from test_checkpoint import same

RAW = small(num_classes=10).state_dict()
AVERAGE = {name: value + (value.ndim > 1) for name, value in RAW.items()}
PLAIN = dict(num_classes=10, num_heads=2)
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}


def under(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def without_table(state):
    return {name: value for name, value in state.items() if name != "pos_embed"}


@pytest.mark.parametrize(
    "content, chosen, others",
    [
        (RAW, RAW, ""),
        ({"module": RAW, "dp_world_size": 2}, RAW, ""),
        ({"my_network": RAW, "epoch": 3}, RAW, ""),
        ({"state": {"model": RAW}, "rng": torch.ones(5, dtype=torch.uint8)}, RAW, ""),
        ({"ema": AVERAGE, "model": RAW}, AVERAGE, ""),
        ({"ema": {"module": AVERAGE}, "model": RAW}, AVERAGE, ""),
        (
            {"model_state_dict": RAW, "ema_state_dict": AVERAGE},
            AVERAGE,
            '"ema_state_dict", not of model_state_dict;',
        ),
        ({"net": RAW, "netEMA": AVERAGE}, AVERAGE, '"netEMA", not of net;'),
        ({"weights": {"raw": RAW, "Ema": AVERAGE}}, AVERAGE, '"weights.Ema", not of weights.raw;'),
        ({"model": RAW, "schema": AVERAGE}, RAW, '"model", not of schema;'),
        (
            {"model": RAW, "model_ema2": RAW, "model_ema1": AVERAGE},
            AVERAGE,
            '"model_ema1", not of model, model_ema2;',
        ),
        ({"model": RAW, "vae_ema": {"conv.weight": torch.ones(2)}}, RAW, '"model" only'),
        ({"model": RAW, "net_ema": without_table(AVERAGE)}, None, '"net_ema", not of model;'),
        ({"model": RAW, "ema": {}}, RAW, '"model" only'),
        ({**RAW, "num_updates": torch.tensor(7), "step": 3}, RAW, ""),
        ({"ema": {**RAW, "n_averaged": torch.tensor([7])}}, RAW, ""),
        ({**RAW, "decay": torch.tensor(0.999)}, RAW, ""),
    ],
)
def test_the_entry_that_is_sampled(content, chosen, others, tmp_path, capsys):
    """Where it is not the only one, and not upstream's `ema`, a line says which; and that there is
    no average.
    """
    torch.save(content, tmp_path / "x.pt")
    if chosen is None:  # an average of what is trained
        chosen = {**AVERAGE, "pos_embed": RAW["pos_embed"]}
    assert same(weights_at(tmp_path / "x.pt").state, chosen)
    printed = capsys.readouterr().out
    assert others in printed and bool(printed) == bool(others)
    assert ("not of" in others) == ("--weights-entry" in printed)


@pytest.mark.parametrize(
    "entry, want",
    [
        ("model", RAW),
        ("ema", AVERAGE),
        ("ema.average", AVERAGE),
        ("opt", None),
        ("em", None),
    ],
)
def test_the_user_names_the_entry(entry, want, tmp_path, capsys):
    """An average has the fixed table of the weights if it lacks its own."""
    ema = {"average": without_table(AVERAGE), "num_updates": 5}
    torch.save({"model": RAW, "ema": ema, "opt": OPTIMIZER}, tmp_path / "x.pt")
    if want is None:
        with mistake("weights_entry", "model", "ema.average"):
            weights_at(tmp_path / "x.pt", entry=entry).checkpoint()
        return
    weights = weights_at(tmp_path / "x.pt", entry=entry)
    assert (
        same(weights.state, {**want, "pos_embed": RAW["pos_embed"]})
        and capsys.readouterr().out == ""
    )
    other = weights_at(tmp_path / "x.pt", entry="model" if entry != "model" else "ema")
    assert weights.digest() != other.digest()  # of one file


def test_several_entries_of_which_none_is_known(tmp_path):
    torch.save({"teacher": RAW, "student": AVERAGE}, tmp_path / "x.pt")
    with mistake("ckpt", "teacher", "student", "weights_entry"):
        identify(tmp_path / "x.pt")
    assert same(weights_at(tmp_path / "x.pt", entry="student").state, AVERAGE)
    torch.save({"ema_0.99": RAW, "ema_0.9999": AVERAGE, "model": RAW}, tmp_path / "v.pt")
    with mistake("ckpt", "ema_0.99", "ema_0.9999"):
        identify(tmp_path / "v.pt")
    torch.save(RAW, tmp_path / "w.pt")
    with mistake("weights_entry", "w.pt"):
        weights_at(tmp_path / "w.pt", entry="ema").checkpoint()


@pytest.mark.parametrize(
    "wrapped",
    [
        "_orig_mod.module.{}".format,
        lambda name: name.replace("blocks.0.", "blocks.0._orig_mod."),
        lambda name: "module." + name.replace("attn.", "attn._fsdp_wrapped_module."),
        lambda name: (
            "_fsdp_wrapped_module." + name.replace("mlp", "_checkpoint_wrapped_module.mlp")
        ),
    ],
)
def test_wrappers_inside_names(wrapped, tmp_path):
    torch.save({wrapped(name): value for name, value in RAW.items()}, tmp_path / "x.pt")
    assert same(weights_at(tmp_path / "x.pt").state, RAW)


def test_a_part_that_is_there_twice(tmp_path):
    """A tensor under two names counts once if the values are equal."""
    twice = {
        name.replace("blocks.0.", "blocks.0._orig_mod."): value
        for name, value in RAW.items()
        if name.startswith("blocks.0.")
    }
    torch.save({**RAW, **twice}, tmp_path / "x.pt")
    assert same(weights_at(tmp_path / "x.pt").state, RAW)
    other = {name: value + 1 for name, value in twice.items()}
    torch.save({**RAW, **other}, tmp_path / "y.pt")
    with mistake("ckpt", "_orig_mod"):
        identify(tmp_path / "y.pt")


@pytest.mark.parametrize("prefix", ["denoiser.", "dit.", "model.diffusion_model."])
def test_a_network_among_others_is_found_under_its_prefix(prefix, tmp_path, capsys):
    others = {"encoder.conv.weight": torch.ones(3, 3, 1, 1), "loss.logvar": torch.zeros(1)}
    content = {**under(prefix, RAW), **others}
    torch.save({"state_dict": content}, tmp_path / "x.pt")
    save_file(content, tmp_path / "y.safetensors")
    for name in "x.pt", "y.safetensors":
        assert same(weights_at(tmp_path / name).state, RAW)
        line = f'the network is under "{prefix}"; not sampled: encoder, loss\n'
        assert capsys.readouterr().out == f"{tmp_path / name}: {line}"


def test_of_two_networks_in_a_state_dict_the_user_names_one(tmp_path, capsys):
    """The section may stand in front. The default is the average."""
    content = under("online_model.", RAW) | under("ema_model.", AVERAGE)
    torch.save({"state_dict": content}, tmp_path / "x.pt")
    save_file(content, tmp_path / "y.safetensors")
    for name, entries in (
        ("x.pt", ("ema_model", "ema_model.", "state_dict.ema_model")),
        ("y.safetensors", ("ema_model",)),
    ):
        assert same(weights_at(tmp_path / name).state, AVERAGE)
        line = r'the weights are those of "(state_dict\.)?ema_model", not of (\1)?online_model; for'
        assert re.search(line, capsys.readouterr().out)
        for entry in entries:
            assert same(weights_at(tmp_path / name, entry=entry).state, AVERAGE)
        with mistake("weights_entry", "online"):
            weights_at(tmp_path / name, entry="online").checkpoint()


def test_a_second_network_beside_one_without_a_prefix_is_named(tmp_path):
    content = {**RAW, **under("teacher.", AVERAGE)}
    torch.save({"weights": content}, tmp_path / "x.pt")
    save_file(content, tmp_path / "y.safetensors")
    with mistake("ckpt", "teacher", "weights_entry"):
        identify(tmp_path / "y.safetensors")
    assert same(weights_at(tmp_path / "x.pt", entry="teacher").state, AVERAGE)


def test_an_average_without_weights_has_no_fixed_table(tmp_path):
    torch.save({"ema": without_table(AVERAGE), "args": PLAIN}, tmp_path / "y.pt")
    with mistake("ckpt", "DiT", "pos_embed"):
        identify(tmp_path / "y.pt")


def test_plain_data_of_training_is_read(tmp_path):
    """Numbers of numpy, paths and containers run no code."""
    arguments = dict(PLAIN, data=pathlib.Path("/data"), flag=np.bool_(True), half=np.float16(0.5))
    content = {
        "model": RAW,
        "args": argparse.Namespace(**arguments),
        "best": np.float32(0.5),
        "rng": np.random.get_state(),
        "losses": defaultdict(list, {"train": [0.5]}),
        "names": [defaultdict(kind) for kind in (str, bool, set, tuple)],
        "spectrum": np.zeros(2, complex),
        "bytes": np.array([b"a"]),
        "progress": SimpleNamespace(epoch=3, counts=np.arange(3)),
    }
    torch.save(content, tmp_path / "x.pt")
    found = identify(tmp_path / "x.pt")
    assert (found.num_classes, found.num_heads, found.family.name) == (10, 2, "DiT")


@pytest.mark.parametrize("value", [np.array([1, None], dtype=object), print])
def test_what_is_no_plain_data_is_refused(value, tmp_path):
    """Code that would run: test_checkpoint.py."""
    torch.save({"model": RAW, "args": argparse.Namespace(x=value)}, tmp_path / "x.pt")
    with mistake("ckpt", "code"):
        identify(tmp_path / "x.pt")


SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

path, folder = sys.argv[1:]
state = torch.load(path)
dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
parts = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
torch.save({"model": parts}, f"{folder}/parts.pt")
from networks import identify
try:
    identify(f"{folder}/parts.pt")  # where torch can load DTensors
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


def test_parts_of_tensors_are_refused_with_what_joins_them(tmp_path):
    torch.save(RAW, tmp_path / "x.pt")
    path = f"{forks.ROOT}:{forks.ROOT}/tests"
    done = forks.run(["-c", SHARDED, tmp_path / "x.pt", tmp_path], PYTHONPATH=path)
    assert "full_tensor" in done.stdout, done.stderr
    with mistake("ckpt", "DTensors", "full_tensor"):
        identify(tmp_path / "parts.pt")
    for path in (tmp_path / "dcp", tmp_path):  # accelerate puts it into a folder of its own
        with mistake("ckpt", str(path), "dcp_to_torch_"):
            identify(path)


def test_names_that_are_not_utf_8(tmp_path):
    """Such a file is read by torch, which does not map it; safetensors opens none."""
    torch.save(RAW, tmp_path / "x.pt")
    (tmp_path / "x.pt").rename(tmp_path / "x\udcff.pt")
    assert same(weights_at(tmp_path / "x\udcff.pt").state, RAW)
    (tmp_path / "x\udcff.safetensors").touch()
    with mistake("ckpt", "UTF-8"):
        identify(tmp_path / "x\udcff.safetensors")
