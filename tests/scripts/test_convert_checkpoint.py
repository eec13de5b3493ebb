import json
import resource
import sys

import pytest
import torch
from conftest import fill
from safetensors.torch import save_file

from models import DiT_models
from pretrained_models.download import find_model
from scripts import convert_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A DiT-S/8 in training layout: small, and a size that the converter knows the head count of."""
    path = tmp_path_factory.mktemp("source") / "s8.pt"
    torch.save({"ema": fill(DiT_models["DiT-S/8"](input_size=16)).state_dict()}, path)
    return path


def test_round_trip_through_all_three(source, tmp_path, run):
    want = find_model(source)
    at = source
    for name in ("a.safetensors", "b", "c.pt", "d", "e.safetensors"):
        done = run("scripts/convert_checkpoint.py", "--ckpt", at, "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert f"{len(want)} tensors" in done.stdout and "read back equal" in done.stdout
        at = tmp_path / name
    got = find_model(at)
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


def test_diffusers_loads_the_folder(source, tmp_path, run):
    from diffusers import DiTTransformer2DModel

    assert run("scripts/convert_checkpoint.py", "--ckpt", source, "--output", tmp_path / "out").returncode == 0
    theirs = DiTTransformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer", low_cpu_mem_usage=False)
    assert theirs.config.num_attention_heads == 6 and theirs.config.sample_size == 16
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    model = DiT_models["DiT-S/8"](input_size=16).eval()
    model.load_state_dict(find_model(source))
    x, t, y = torch.randn(2, 4, 16, 16), torch.tensor([3, 800]), torch.tensor([7, 1000])
    with torch.no_grad():
        a, b = model(x, t, y), theirs.eval()(x, timestep=t, class_labels=y).sample
    assert (a - b).norm() / a.norm() < 1e-3  # LayerNorms before the MLP read eps from the config; the rest is rounding


def test_ambiguous_and_damaged_folders(source, tmp_path, run):
    run("scripts/convert_checkpoint.py", "--ckpt", source, "--output", tmp_path / "out")
    folder = tmp_path / "out" / "transformer"
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.rename(folder / "one.fp16.safetensors")
    (folder / "two.safetensors").write_bytes(b"x")
    done = run("scripts/convert_checkpoint.py", "--ckpt", tmp_path / "out", "--output", tmp_path / "x.pt")
    assert done.returncode == 2 and "conflict" in done.stderr and "two.safetensors" in done.stderr
    (folder / "two.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["sample_size"]
    (folder / "config.json").write_text(json.dumps(config))
    done = run("scripts/convert_checkpoint.py", "--ckpt", tmp_path / "out", "--output", tmp_path / "x.pt")
    assert done.returncode == 2 and "sample_size" in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_a_folder_does_not_hold_is_not_left_there(tmp_path, monkeypatch, capsys):
    """diffusers computes the position table: one that is another would be lost."""
    state = fill(DiT_models["DiT-Demo/2"]()).state_dict()
    save_file({**state, "pos_embed": state["pos_embed"] + 1}, tmp_path / "a.safetensors")
    monkeypatch.setattr(
        sys,
        "argv",
        ["convert_checkpoint.py", "--ckpt", str(tmp_path / "a.safetensors"), "--output", str(tmp_path / "out")],
    )
    with pytest.raises(SystemExit) as stop:
        convert_checkpoint.main()
    assert (
        stop.value.code == 2
        and "other tensors: pos_embed" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
def test_a_disk_that_is_full_is_a_line(source, name, tmp_path, monkeypatch, capsys):
    """Here a limit on the size of files."""
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", "--ckpt", str(source), "--output", str(tmp_path / name)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(SystemExit) as stop:
            convert_checkpoint.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and "cannot write there" in error
        and error.count("\n") == 1
        and list(tmp_path.iterdir()) == []
    )


def test_bad_input(source, tmp_path, run):
    (tmp_path / "there.pt").write_bytes(b"")
    for output, word in (
        (tmp_path / "there.pt", "exists"),
        (tmp_path / "x.bin", "must end in"),
        ("/proc/x.pt", "cannot write"),
    ):
        done = run("scripts/convert_checkpoint.py", "--ckpt", source, "--output", output)
        assert done.returncode == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
