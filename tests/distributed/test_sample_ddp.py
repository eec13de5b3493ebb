"""sample_ddp.py in real processes over gloo: equal to one process, killed, stopped,
misled. FID's folder: tests/jobs/fid.
"""

import re

import numpy as np
import pytest
import torch
from forks import ROOT, Fork, free_port
from jobs import ENVIRONMENT, finish, run_each, start
from PIL import Image
from safetensors.torch import load_file, save_file

from accel.errors import USAGE
from accel.families import DEMO

CUDA = torch.cuda.is_available()
THREE = ["--num-sampling-steps", 4, "--labels", 1, 2, 3]
SHORT = ["--num-sampling-steps", 6, "--output-type", "latent", "--seed", 3]
LAYOUTS = "off", "rows=2", "tokens=2", "tokens=4", "rows=2,tokens=2"
# Its tokens know where they stand in the row, its norm of queries and keys sees all heads.
LARGE = ["--model", "Large-DiT-Demo/2", "--ckpt", DEMO / "large-dit.safetensors", "--labels", 6]
GRIDS = {
    "labels.npy": [*SHORT, "--labels", 1, 2, 3, 4, 5],
    **{f"{layout}.npy": [*SHORT, "--labels", 6, "--parallel", layout] for layout in LAYOUTS},
    **{f"{name}.npy": [*SHORT, "--labels", 6] for name in ("auto", "again")},
    "large.npy": [*SHORT, *LARGE, "--parallel", "rows=2,tokens=2"],
}
FID = ["--num-fid-samples", 12, "--per-proc-batch-size", 3, "--num-sampling-steps", 2]


@pytest.fixture(scope="module")
def grids(demo, tmp_path_factory):
    """(folder of outputs, {name: the text that the command printed}) of four ranks."""
    folder = tmp_path_factory.mktemp("grids")
    commands = {name: [*demo, *flags, "--output", folder / name] for name, flags in GRIDS.items()}
    commands["three"] = [*demo, *THREE, "--output", folder / "three.png"]
    return folder, dict(
        zip(commands, run_each(4, *commands.values(), XDG_CACHE_HOME=str(folder)), strict=True)
    )


def one_process(flags, demo, here, place):
    """The latents of sample.py, and how far float32 rounding takes others: fewer rows
    take another path through the CPU's GEMM, which adds in another order.
    """
    assert here("sample.py", *demo, *flags, "--output", place).returncode == 0
    latents = np.load(place)
    assert np.abs(latents).max() > 0.5
    return latents, 1e-5 * np.abs(latents).max()


def test_a_picture_on_ranks_is_that_of_one_process(grids, demo, here, tmp_path):
    """On one rank, its batch rows or tokens on two or four; of a DiT and a Large-DiT."""
    folder, results = grids
    expected, rounding = one_process([*SHORT, "--labels", 6], demo, here, tmp_path / "one.npy")
    for layout in LAYOUTS:
        mine = np.load(folder / f"{layout}.npy")
        text = results[f"{layout}.npy"]
        assert np.abs(mine - expected).max() <= rounding
        if layout == "off":
            assert np.array_equal(mine, expected)  # the same rows in the same GEMMs
        else:
            ranks = 2 if layout in ("rows=2", "tokens=2") else 4
            assert f"parallel: {layout}, {ranks} of 4 ranks: as requested" in text
    expected, rounding = one_process([*SHORT, *LARGE], demo, here, tmp_path / "one.npy")
    assert np.abs(np.load(folder / "large.npy") - expected).max() <= rounding


def test_a_grid_on_ranks_is_that_of_one_process(grids, demo, here, tmp_path, monkeypatch):
    expected, rounding = one_process(GRIDS["labels.npy"], demo, here, tmp_path / "one.npy")
    assert np.abs(np.load(grids[0] / "labels.npy") - expected).max() <= rounding
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    done = here("sample_ddp.py", *demo, *GRIDS["labels.npy"], "--output", tmp_path / "rank.npy")
    assert done.returncode == 0 and np.array_equal(np.load(tmp_path / "rank.npy"), expected)


def test_two_runs_give_one_picture(grids):
    """One label on four ranks: its batch rows are divided, since no NVLink connects the ranks."""
    folder, results = grids
    for name in ("auto.npy", "again.npy"):
        line = "parallel: rows=2, 2 of 4 ranks: least work for each rank, batch rows before tokens"
        assert line in results[name].splitlines()
    assert (folder / "auto.npy").read_bytes() == (folder / "again.npy").read_bytes()


def test_two_nodes(grids, demo, here, tmp_path):
    """Two agents on one host connect as two nodes would; the picture is sample.py's, on
    two ranks or four.
    """
    launch = [
        "--nnodes=2",
        "--rdzv_backend=c10d",
        "--rdzv_id=test",
        f"--rdzv_endpoint=127.0.0.1:{free_port()}",
    ]
    command = [*demo, *THREE, "--output", tmp_path / "nodes.png"]
    assert "2 ranks" in finish(*(start(1, *command, launch=launch) for _ in range(2)))
    assert here("sample.py", *demo, *THREE, "--output", tmp_path / "one.png").returncode == 0
    places = tmp_path / "one.png", tmp_path / "nodes.png", grids[0] / "three.png"
    one, *others = (np.asarray(Image.open(place)).astype(int) for place in places)
    assert one.std() > 1 and all(np.abs(one - picture).max() <= 1 for picture in others)


@pytest.mark.parametrize(
    "factor, flags, more, words",
    [
        (None, ["--output", "../x.png"], [], "--ckpt w.safetensors: no such file"),
        (
            1,
            ["--output", "../x.png"],
            ["--seed", 5],
            "--global-seed 5: rank 0 has none; start all ranks with the",
        ),
        (
            2,
            ["--sample-dir", "..", *FID],
            [],
            r"--ckpt \(contents\) \w{16}: rank 0 has \w{16}; start all",
        ),
    ],
)
def test_what_one_node_lacks_or_has_otherwise_is_named_before_sampling(
    factor, flags, more, words, demo, tmp_path
):
    """Start two nodes. The second has no weights, or the first's times `factor`, and
    `more` flags.
    """
    for node in ("n0", "n1"):
        (tmp_path / node).mkdir()
    (tmp_path / "n0" / "w.safetensors").symlink_to(demo[3])
    if factor:
        save_file(
            {name: factor * one for name, one in load_file(demo[3]).items()},
            tmp_path / "n1" / "w.safetensors",
        )
    common = [*demo[:3], "w.safetensors", *demo[4:], *flags]
    ranks = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks |= dict(LOCAL_RANK="0", **ENVIRONMENT)
    command = [ROOT / "sample_ddp.py", *common]
    nodes = [Fork([*command, *more * i], tmp_path / f"n{i}", RANK=str(i), **ranks) for i in (0, 1)]
    text = finish(*nodes, status=USAGE)
    assert re.search(rf"^sample_ddp.py: rank 1 on \S+: {words}", text, re.M), text
    assert not [*tmp_path.rglob("*.png")]
