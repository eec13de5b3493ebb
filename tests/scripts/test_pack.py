"""pack.sh: the contest's hand-in holds the work, and no weights."""

import shutil
import subprocess
import tarfile

from conftest import ROOT


def test_pack(tmp_path):
    def pack(*args):
        return subprocess.run(
            ["bash", str(tmp_path / "scripts" / "pack.sh"), *args], cwd=tmp_path, text=True, capture_output=True
        )

    for name in (
        "scripts/benchmark.py",
        "log/mine/ladder.json",
        "log/job-1.out",
        "models.py",
        ".venv/bin/python",
        "pretrained_models/download.py",
        "pretrained_models/XL.pt",
        "pretrained_models/sd-vae-ft-ema/config.json",
        "pretrained_models/demo/dit.safetensors",
        "results/000-DiT-XL-2/checkpoints/0050000.pt",
        "mine/vgg16.pth",
        "environment/pyvenv.cfg",
        "environment/lib/x.py",
        "samples/000000.png",
        ".git/HEAD",
        "accel/__pycache__/x.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shutil.copy(ROOT / "scripts" / "pack.sh", tmp_path / "scripts")
    for args, word in (((), "TEAM"), (("a b",), "TEAM"), (("../up",), "TEAM"), (("Us",), "sample.png")):
        done = pack(*args)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and word in done.stderr
    shutil.copy(ROOT / "docs" / "heatmap.png", tmp_path / "sample.png")
    done = pack("Us")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "Us_DiT.tar.gz") as archive:
        names = {name for name in archive.getnames() if archive.getmember(name).isfile()}
        assert names == {
            f"Us_DiT/{name}"
            for name in (
                "scripts/benchmark.py",
                "scripts/pack.sh",
                "log/mine/ladder.json",
                "log/job-1.out",
                "models.py",
                "pretrained_models/download.py",
                "sample.png",
                "log/final_result.png",
                "log/FINAL_RESULT.txt",
            )
        }
        assert archive.extractfile("Us_DiT/log/final_result.png").read() == (ROOT / "docs" / "heatmap.png").read_bytes()
    assert pack("Us").returncode == 0  # a second archive does not hold the first
    with tarfile.open(tmp_path / "Us_DiT.tar.gz") as archive:
        assert not [name for name in archive.getnames() if name.endswith(".gz")]
    shutil.rmtree(tmp_path / "log")
    assert "measure.sh" in pack("Us").stderr
