"""run_DiT.ipynb runs from top to bottom, and is committed without outputs."""

import base64
import io
import shutil

import pytest
from conftest import ROOT
from PIL import Image

NOTEBOOK = ROOT / "run_DiT.ipynb"


@pytest.mark.timeout(600)
def test_it_runs_on_a_cpu_with_the_demo(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name in ("accel", "diffusion", "models.py", "pretrained_models"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(NOTEBOOK, tmp_path)
    for name, value in (
        ("CUDA_VISIBLE_DEVICES", ""),
        ("OMP_NUM_THREADS", "1"),
        ("JUPYTER_PLATFORM_DIRS", "1"),
    ):
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("else 50", "else 2")  # steps
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    shown = [
        output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]
    sizes = [Image.open(io.BytesIO(base64.b64decode(picture))).size for picture in shown]
    assert sizes == [(4 * 128, 2 * 128), (4 * 128, 128)]
    assert "no GPU: the demo model" in outputs[0].text and Image.open(
        tmp_path / "sample.png"
    ).size == (128, 128)
