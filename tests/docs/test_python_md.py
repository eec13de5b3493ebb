"""docs/python.md: every block runs as it stands, in order, and every value that it shows is right."""

import re
import subprocess
import sys

import forks
import pytest
from conftest import ROOT
from PIL import Image

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^(\S.*?)  # → (.*)$", re.MULTILINE)


@pytest.fixture
def checkout(tmp_path):
    """The repository's folder as a reader has it, and the model file that the page tells to keep."""
    for name in ("accel", "diffusion", "models.py", "large_dit.py", "download.py", "pretrained_models"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_models.py").write_text((ROOT / "models.py").read_text())
    return tmp_path


def test_every_block_runs_and_shows_what_it_gives(checkout):
    assert len(BLOCKS) >= 7 and all(word in PAGE for word in ("copy the weights", "Your own checkout", "ValueError"))
    code = "\n".join(BLOCKS)
    shown = SHOWN.findall(code)
    assert len(shown) >= 6
    code = SHOWN.sub(lambda line: f"assert str({line[1]}) == {line[2]!r}, {line[1]}", code)
    done = forks.run(["-c", code], checkout, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert "20/20" in done.stderr  # the bar of progress=True
    sizes = {name: Image.open(checkout / name).size for name in ("planet.png", "sea.png", "grid.png")}
    assert sizes == {"planet.png": (128, 128), "sea.png": (128, 128), "grid.png": (262, 132)}


def test_blocks_are_formatted():
    """As the code is, but for imports, which stand where they are first needed."""
    for block in BLOCKS:
        ruff = [sys.executable, "-m", "ruff", "format", "--check", "--stdin-filename", "block.py", "-"]
        assert subprocess.run(ruff, input=block, text=True, cwd=ROOT, capture_output=True).returncode == 0, block
