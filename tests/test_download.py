"""What upstream's scripts import, where they import it from, and how published weights
are fetched.
"""

import select
import subprocess
import sys
import threading
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from conftest import ROOT, fill, mistake
from forks import succeeds, until
from hub import Handler, Server
from PIL import Image
from safetensors.torch import load_file
from unprivileged import unprivileged

import download
import pretrained_models.download
from accel.checkpoints import loading
from accel.checkpoints.loading import WeightFiles, published_name
from accel.errors import InputRef, UsageError
from accel.families import DEMO, family_of
from accel.tensors import fetch
from models import DiT

NAME = "DiT-XL-2-512x512.pt"

# In the shape of upstream's sample.py: one process, every import and every name that it
# uses.
SAMPLE = """
import argparse
import torch
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
from torchvision.utils import save_image
from diffusion import create_diffusion
from diffusers.models import AutoencoderKL
from download import find_model
from models import DiT_models

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=list(DiT_models.keys()), default="DiT-XL/2")
parser.add_argument("--vae")
parser.add_argument("--image-size", type=int)
parser.add_argument("--num-classes", type=int)
parser.add_argument("--ckpt")
args = parser.parse_args()

torch.set_grad_enabled(False)
device = "cuda" if torch.cuda.is_available() else "cpu"
side = args.image_size // 8
model = DiT_models[args.model](input_size=side, num_classes=args.num_classes).to(device)
model.load_state_dict(find_model(args.ckpt))
model.eval()
diffusion = create_diffusion(str(4))
vae = AutoencoderKL.from_pretrained(args.vae).to(device)

torch.manual_seed(0)  # here, because on a CPU the model's initialisation draws from the same generator
labels = [0, 3]
z = torch.randn(len(labels), 4, side, side, device=device)
y = torch.tensor(labels, device=device)
z = torch.cat([z, z], 0)
y = torch.cat([y, torch.tensor([args.num_classes] * len(labels), device=device)], 0)
model_kwargs = dict(y=y, cfg_scale=4.0)
samples = diffusion.p_sample_loop(
    model.forward_with_cfg, z.shape, z, clip_denoised=False, model_kwargs=model_kwargs, progress=True, device=device
)
samples, _ = samples.chunk(2, dim=0)
samples = vae.decode(samples / 0.18215).sample
save_image(samples, "sample.png", nrow=4, normalize=True, value_range=(-1, 1))
"""


@pytest.fixture
def checkout(tmp_path):
    """This repository's root beside scripts of the user's own, as after replacing
    upstream's checkout by ours.
    """
    for path in ROOT.iterdir():
        if path.name not in ("sample.py", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sample.py").write_text(SAMPLE)
    return tmp_path


def test_upstreams_sample_runs_unmodified(checkout, run, here, tmp_path):
    flags = [
        "--model",
        "DiT-Demo/2",
        "--image-size",
        128,
        "--num-classes",
        8,
        "--vae",
        DEMO / "vae",
    ]
    succeeds(
        run(
            checkout / "sample.py",
            *flags,
            "--ckpt",
            DEMO / "dit.safetensors",
            cwd=checkout,
            PYTHONPATH="",
        )
    )
    ours = [
        "--model",
        "DiT-Demo/2",
        "--labels",
        0,
        3,
        "--num-sampling-steps",
        4,
        "--precision",
        "fp32",
    ]
    succeeds(here("sample.py", *ours, "--output", tmp_path / "ours.png"))
    a, b = (
        np.asarray(Image.open(path)).astype(int)
        for path in (checkout / "sample.png", tmp_path / "ours.png")
    )
    assert a.shape == b.shape and a.std() > 20
    assert abs(a - b).max() <= 1  # the decoder here sees one picture at a time


@pytest.mark.parametrize("module", [download, pretrained_models.download])
def test_names(module, tmp_path):
    assert module.pretrained_models == {"DiT-XL-2-256x256.pt", NAME}
    want = load_file(DEMO / "dit.safetensors")
    got = module.find_model(str(DEMO / "dit.safetensors"))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    with mistake("ckpt", "DiT-S-2.pt"):
        module.download_model("DiT-S-2.pt")
    with mistake("ckpt", "SiT-XL/2", "hf download nyu-visionx/SiT-"):
        published_name(family_of("SiT-XL/2"), "SiT-XL/2", 256, 1000)


# Fetches the published file, opens it, and reads it when it is told to.
FETCH = """
import sys
from pathlib import Path
from accel.errors import InputRef
from accel.checkpoints import loading
from accel.tensors import fetch
fetch.BASE_URL, loading.FOLDER = sys.argv[1], Path(sys.argv[2])
weights = loading.WeightFiles(InputRef(sys.argv[3]))
weights.state
print("opened", flush=True)
sys.stdin.readline()
with weights.reading():
    print("read")
"""


class Published(Server):
    """Serve one file. length: the header, None for none. first and others: events before whose
    time the last bytes of an answer are not sent, of the first request and of others. asked: the
    number of requests.
    """

    def __init__(self, body, length="", first=None, others=None):
        self.asked = 0
        server = self

        class File(Handler):
            def do_GET(self):
                if self.path != f"/{NAME}":
                    return self.answer(404)
                server.asked += 1
                event = first if server.asked == 1 else others
                self.send_response(200)
                if length is not None:
                    self.send_header("Content-Length", length or str(len(body)))
                self.end_headers()
                self.wfile.write(body[:-100])
                if event:
                    event.wait(60)
                self.wfile.write(body[-100:])

        super().__init__(File)

    def fetch(self, folder):
        """Start a process that fetches the file into a folder."""
        command = [sys.executable, "-c", FETCH, f"{self.url}/", folder, NAME]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A small network's weights in the place of the published ones, and the folder that
    they are fetched into.
    """
    state = fill(
        DiT(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=10)
    ).state_dict()
    torch.save(state, tmp_path / "source.pt")
    folder = tmp_path / "cache" / "dit"  # which a first download makes
    monkeypatch.setattr(loading, "FOLDER", folder)
    return (tmp_path / "source.pt").read_bytes(), folder


def test_published_weights_are_fetched_once(published, monkeypatch):
    body, folder = published
    with Published(body) as server:
        monkeypatch.setattr(fetch, "BASE_URL", f"{server.url}/")
        weights = WeightFiles(InputRef(NAME))
        assert weights.path == folder / NAME and not weights.path.exists()
        want = download.download_model(NAME)
    assert (folder / NAME).read_bytes() == body and [path.name for path in folder.iterdir()] == [
        NAME
    ]
    for name in (NAME, f"pretrained_models/{NAME}", folder / NAME):  # the server is gone
        got = download.find_model(name)
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
    assert weights.fetch() == folder / NAME


def test_a_download_is_whole_or_absent(published, monkeypatch):
    body, folder = published
    with Published(body) as server:
        monkeypatch.setattr(fetch, "BASE_URL", f"{server.url}/")
        with mistake("ckpt", "404"):
            download.find_model("DiT-XL-2-256x256.pt")
    page = b"<html>" + b" " * 100 + b"Log in</html>"
    for sent, length, name in (
        (body[:-100], str(len(body)), f"{len(body) - 100} of {len(body)} bytes"),
        (body[:-100], None, ".pt"),
        (page, "", "login page"),
    ):
        with Published(sent, length) as server:
            monkeypatch.setattr(fetch, "BASE_URL", f"{server.url}/")
            with mistake("ckpt", name, str(folder / NAME)):
                download.find_model(NAME)
    with mistake("ckpt", "Connection refused"):
        download.find_model(NAME)  # the server is gone
    assert list(folder.iterdir()) == []


def test_weights_lie_in_the_folder_that_the_user_names(tmp_path, monkeypatch):
    """DIT_WEIGHTS; the demo stays in the checkout. Where an error tells to put a file, one may."""
    code = (
        "from accel.checkpoints.loading import WeightFiles as W; from accel.errors import InputRef"
    )
    code += f"; from accel.families import DEMO; print(W(InputRef({NAME!r})).path, DEMO)"
    printed = succeeds(forks.run(["-c", code], DIT_WEIGHTS=str(tmp_path), PYTHONPATH=str(ROOT)))
    assert printed.split() == [str(tmp_path / NAME), str(DEMO)]
    monkeypatch.setattr(loading, "FOLDER", Path("/usr/share/dit"))
    words = f"put it at FOLDER/{NAME} and set DIT_WEIGHTS=FOLDER"
    with unprivileged(), pytest.raises(UsageError, match=words):
        download.find_model(NAME)


def test_of_downloads_at_the_same_time_the_first_stays(published):
    """It is being read when the others end."""
    body, folder = published
    first, others = threading.Event(), threading.Event()
    with Published(body, first=first, others=others) as server:
        processes = [server.fetch(folder) for _ in range(3)]
        until(lambda: server.asked == 3)
        first.set()
        until(lambda: (folder / NAME).exists())
        (fastest,) = select.select([each.stdout for each in processes], [], [], 60)[0]
        assert fastest.readline() == "opened\n"
        inode = (folder / NAME).stat().st_ino
        others.set()
        waiting = [each for each in processes if each.stdout is not fastest]
        for process in (*waiting, *(each for each in processes if each not in waiting)):
            out, error = process.communicate("\n", timeout=60)
            assert process.returncode == 0 and out.endswith("read\n"), error
    assert (folder / NAME).stat().st_ino == inode and [*folder.iterdir()] == [folder / NAME]


def test_a_download_after_a_killed_one_leaves_nothing_of_it(published):
    body, folder = published
    first = threading.Event()
    with Published(body, first=first) as server:
        killed = server.fetch(folder)
        until(lambda: any(folder.glob(f".{NAME}.*.part")))
        killed.kill()
        killed.communicate()
        assert len([*folder.iterdir()]) == 1
        first.set()
        assert server.fetch(folder).communicate("\n", timeout=60)[0] == "opened\nread\n"
    assert [*folder.iterdir()] == [folder / NAME]


@pytest.mark.parametrize("script", ["download.py", "pretrained_models/download.py"])
def test_both_files_are_commands(script, run):
    """Through a proxy that refuses: nothing is fetched from a test."""
    proxy = dict(PYTHONPATH="", https_proxy="http://127.0.0.1:9", no_proxy="")
    assert "Fetch the published weights" in succeeds(run(script, "--help", **proxy))
    done = run(script, **proxy)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("download.py: --ckpt DiT-XL-2-256x256.pt: download failed")
    assert "try the hub's copy, --ckpt facebook/DiT-XL-2-256, or fetch https://" in done.stderr
