"""docs/python.md: every block runs, in order and with two steps, and every value that it shows
is right. README's runs too. Both on a CPU and, marked `gpu`, on a GPU.
"""

import re

import forks
import networks
import pytest
from conftest import ROOT
from pages import code_blocks
from PIL import Image

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = code_blocks(PAGE, "python")
STEPS = re.compile(r"(_steps=|create_diffusion\(\")\d+")
SHOWN = re.compile(r"^(\S.*?)  # → (.*)$", re.MULTILINE)


@pytest.fixture
def checkout(tmp_path):
    """The repository's folder as a reader has it, and the model file that the page tells
    to keep.
    """
    for name in ("accel", "diffusion", "models.py", "download.py", "pretrained_models"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_models.py").write_text((ROOT / "models.py").read_text())
    return tmp_path


@pytest.fixture
def pipeline(tmp_path, tiny_vae):
    """A small pipeline in the place of the hub's."""
    networks.pipeline(tiny_vae).save_pretrained(tmp_path / "pipeline")


# CUDA_VISIBLE_DEVICES: none, or as the machine has it.
DEVICES = pytest.mark.parametrize(
    "visible",
    [
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, id="cpu"),
        pytest.param({}, id="gpu", marks=pytest.mark.gpu),
    ],
)


@DEVICES
def test_every_block_runs_and_shows_what_it_gives(checkout, pipeline, visible):
    assert len(BLOCKS) >= 9 and all(
        word in PAGE for word in ("copy the weights", "Your own checkout", "ValueError")
    )
    code = "\n".join(BLOCKS).replace("facebook/DiT-XL-2-256", "pipeline")
    code = STEPS.sub(r"\g<1>2", code)
    shown = SHOWN.findall(code)
    assert len(shown) >= 7
    code = SHOWN.sub(lambda line: f"assert str({line[1]}) == {line[2]!r}, {line[1]}", code)
    done = forks.run(
        ["-c", code], checkout, timeout=280, OMP_NUM_THREADS="1", PYTHONPATH="", **visible
    )
    forks.succeeds(done)
    assert "2/2" in done.stderr  # the bar of progress=True
    sizes = {
        name: Image.open(checkout / name).size for name in ("planet.png", "sea.png", "grid.png")
    }
    assert sizes == {"planet.png": (128, 128), "sea.png": (128, 128), "grid.png": (262, 132)}
