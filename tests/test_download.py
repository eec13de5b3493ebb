import argparse
import http.server
import os
import pickle
import threading

import pytest
import torch
from conftest import fill
from safetensors.torch import save_file

from accel.options import UsageError
from models import DiT
from pretrained_models import download
from pretrained_models.download import download_model, find_model

SMALL = dict(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=10)


@pytest.fixture(scope="module")
def state():
    return fill(DiT(**SMALL)).state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def error(path):
    with pytest.raises(UsageError) as caught:
        find_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_training_checkpoint_gives_its_ema_and_loads_strictly(tmp_path, state):
    """The layout that DiT's train.py writes: model, ema, opt, args (an argparse.Namespace)."""
    path = tmp_path / "0050000.pt"
    other = {key: value + 1 for key, value in state.items()}
    torch.save(
        {
            "model": other,
            "ema": state,
            "opt": {"state": {}, "param_groups": []},
            "args": argparse.Namespace(model="x", lr=1e-4),
        },
        path,
    )
    found = find_model(str(path))
    assert same(found, state)
    assert DiT(**SMALL).load_state_dict(found, strict=True)
    torch.save({"model": other, "opt": {}}, path)
    assert same(find_model(path), other)


def test_plain_legacy_and_safetensors(tmp_path, state):
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt", _use_new_zipfile_serialization=False)  # as written before torch 1.6
    save_file(state, tmp_path / "c.safetensors")
    for name in ("a.pt", "b.pt", "c.safetensors"):
        assert same(find_model(tmp_path / name), state), name


def test_pt_is_memory_mapped(tmp_path):
    """Asking for 512 MB of weights must not read them."""
    path = tmp_path / "large.pt"
    torch.save({"w": torch.ones(128 << 20)}, path)
    before = rss()
    found = find_model(path)
    assert rss() - before < 100
    assert found["w"][:: 1 << 20].sum() == 128


def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_missing(tmp_path):
    message = error(tmp_path / "none.pt")
    assert "no such file" in message and "DiT-XL-2-512x512.pt" in message


@pytest.mark.parametrize("name", ["a.pt", "legacy.pt", "c.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 0.999])
def test_truncated(tmp_path, state, name, share):
    path = tmp_path / name
    if name.endswith("pt"):
        torch.save(state, path, _use_new_zipfile_serialization=name == "a.pt")
    else:
        save_file(state, path)
    os.truncate(path, int(path.stat().st_size * share))
    message = error(path)
    assert "truncated" in message and name in message


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle"])
def test_code_is_never_run(tmp_path, how, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps({"ema": Bomb()}, protocol=2))
    else:
        torch.save({"ema": Bomb()}, path, _use_new_zipfile_serialization=how == "zip")
    message = error(path)
    assert "would run code" in message and "system" in message
    assert not (tmp_path / "exploded").exists()


def test_no_state_dict(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds a list" in error(tmp_path / "list.pt")
    torch.save({"step": 7, "name": "x"}, tmp_path / "numbers.pt")
    assert "no state dict" in error(tmp_path / "numbers.pt")
    for text in ("hello", "junk"):  # which an unpickler takes for something begun
        (tmp_path / "text.pt").write_text(text)
        assert "not a checkpoint" in error(tmp_path / "text.pt")
    (tmp_path / "empty").mkdir()
    assert "transformer/config.json" in error(tmp_path / "empty")


class Server:
    """A local web server that can promise more bytes than it sends."""

    def __init__(self, body, promised=None, path="/weights.pt"):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path != path:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Length", str(promised or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{path}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.url

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_download_is_whole_or_absent(tmp_path, state):
    torch.save(state, tmp_path / "source.pt")
    body = (tmp_path / "source.pt").read_bytes()
    folder = tmp_path / "to"
    folder.mkdir()
    with Server(body) as url:
        path = download_model("DiT-XL-2-512x512.pt", url, folder)
        assert same(find_model(path), state)
        path.unlink()
        with pytest.raises(UsageError, match="404"):
            download_model("DiT-XL-2-512x512.pt", url + "x", folder)
    with (
        Server(body[:-100], promised=len(body)) as url,
        pytest.raises(UsageError, match=f"{len(body) - 100} of {len(body)}.*put it at"),
    ):
        download_model("DiT-XL-2-512x512.pt", url, folder)
    with pytest.raises(UsageError, match="download failed"):
        download_model("DiT-XL-2-512x512.pt", url, folder)  # the server is gone
    assert list(folder.iterdir()) == []


def test_published_name_is_fetched_once(tmp_path, state, monkeypatch):
    torch.save(state, tmp_path / "source.pt")
    monkeypatch.setattr(download, "FOLDER", tmp_path)
    with Server((tmp_path / "source.pt").read_bytes(), path="/DiT-XL-2-256x256.pt") as url:
        monkeypatch.setattr(download, "BASE_URL", url.rsplit("/", 1)[0] + "/")
        assert same(find_model("DiT-XL-2-256x256.pt"), state)
    assert same(find_model("DiT-XL-2-256x256.pt"), state)  # now from the file: the server is gone
    assert same(find_model("pretrained_models/DiT-XL-2-256x256.pt"), state)
