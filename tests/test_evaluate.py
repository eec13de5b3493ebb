"""evaluate.py: its values are torchmetrics', and nothing that is not a pass may say PASS."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.vgg import cfgs, make_layers
from torchvision.utils import make_grid

import evaluate

PROGRAM = Path(evaluate.__file__)
DEAD_PROXY = {
    "https_proxy": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "no_proxy": "",
}


@pytest.fixture(scope="module")
def vgg(tmp_path_factory):
    """A seeded VGG16 checkpoint in a torch hub cache, as torchvision's file is laid out:
    (TORCH_HOME, file).
    """
    home = tmp_path_factory.mktemp("torch_home")
    path = home / "hub" / "checkpoints" / "vgg16-397923af.pth"
    path.parent.mkdir(parents=True)
    torch.manual_seed(3)
    layers = make_layers(cfgs["D"])
    for layer in layers:
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
            torch.nn.init.normal_(layer.bias, std=0.1)
    state = {f"features.{name}": value for name, value in layers.state_dict().items()}
    for layer, (out, into) in {0: (4096, 25088), 3: (4096, 4096), 6: (1000, 4096)}.items():
        # one number on disk
        state[f"classifier.{layer}.weight"] = torch.zeros(1, 1).expand(out, into)
        state[f"classifier.{layer}.bias"] = torch.zeros(out)
    torch.save(state, path)
    return home, path


@pytest.fixture(scope="module")
def reference(vgg):
    """torchmetrics as the contest's script sets it up, on the same checkpoint; its own
    loader reads it.
    """
    import torchmetrics.image as image

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(vgg[0]))
        network = image.LearnedPerceptualImagePatchSimilarity(net_type="vgg", normalize=True)

    def metrics(a, b, dtype=torch.float32):
        a, b = (
            torch.from_numpy(x.copy()).permute(2, 0, 1)[None].float().div(255).to(dtype)
            for x in (a, b)
        )
        ssim = image.StructuralSimilarityIndexMeasure().set_dtype(dtype)
        values = {"psnr": image.PeakSignalNoiseRatio()(a, b).item(), "ssim": ssim(a, b).item()}
        if min(a.shape[2:]) >= 16 and dtype == torch.float32:
            network.reset()
            values["lpips"] = network(a, b).item()
        return values

    return metrics


def scene(height=96, width=128, seed=0):
    """Smooth colours with edges and texture: (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 32
    picture = 120 + 90 * np.stack(
        [np.sin(x + p) * np.cos(y * (1 + p)) for p in rng.uniform(0, 3, 3)], -1
    )
    picture[(np.hypot(x - width / 64, y - height / 64) < 0.8)] = rng.integers(0, 256, 3)
    return np.clip(picture + rng.normal(0, 6, picture.shape), 0, 255).astype(np.uint8)


def noisy(picture, levels, seed=1):
    change = np.random.default_rng(seed).integers(-levels, levels + 1, picture.shape)
    return np.clip(picture.astype(int) + change, 0, 255).astype(np.uint8)


def one_pixel(picture):
    changed = picture.copy()
    changed[5, 7] = 255 - changed[5, 7]
    return changed


BASE = scene()
GREY = np.repeat(scene(64, 80, 4)[..., :1], 3, 2)
DARK = (scene(64, 64, 5) // 8).astype(np.uint8)
PAIRS = {
    "one level of noise": (BASE, noisy(BASE, 1)),
    "another picture": (BASE, scene(seed=9)),
    "one pixel": (BASE, one_pixel(BASE)),
    "grey": (GREY, noisy(GREY, 3)),
    "against a constant": (BASE, np.full_like(BASE, 128)),
    "a constant against": (np.full_like(BASE, 128), BASE),
    "against black": (BASE, np.zeros_like(BASE)),
    "dark, one white pixel": (DARK, one_pixel(DARK)),
    "odd sides": (scene(203, 77, 2), noisy(scene(203, 77, 2), 5)),
    "17 x 16": (scene(17, 16, 3), noisy(scene(17, 16, 3), 9)),
    "11 x 11": (scene(11, 11, 3), noisy(scene(11, 11, 3), 9)),
    "range of 20 levels": (100 + DARK % 20, noisy(100 + DARK % 20, 2)),
    "identical": (BASE, BASE),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_values_are_torchmetrics(name, vgg, reference):
    a, b = PAIRS[name]
    theirs = reference(a, b)
    (ours, _) = evaluate.measure(a, b, evaluate.Lpips(vgg[1]))
    # Bright pictures of a narrow range: torchmetrics' own float32 is off by more than
    # 1e-4 from its float64.
    exact = reference(a, b, torch.float64)["ssim"]
    assert ours["ssim"] == pytest.approx(exact, abs=1e-8)
    rounding = abs(theirs["ssim"] - exact)
    assert rounding < 5e-5 or np.ptp(np.stack([a, b])) < 32
    for metric, value in theirs.items():
        assert ours[metric] == pytest.approx(
            value, abs=1e-4 + (rounding if metric == "ssim" else 0)
        ), metric
    assert ours["mae"] == np.abs(a.astype(int) - b.astype(int)).mean()
    if name == "11 x 11":  # VGG16 has nothing left to look at; torchmetrics raises there
        assert math.isnan(ours["lpips"])


# ---- the command ----


def save(path, array, **options):
    Image.fromarray(array).save(path, **options)
    return Path(path)


@pytest.fixture
def command(vgg, tmp_path, monkeypatch, capsys):
    """Run the command in this process, in an empty folder, VGG16 in torch's hub cache and
    the network dead.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in {"TORCH_HOME": str(vgg[0]), **DEAD_PROXY}.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        try:
            status = evaluate.main([str(w) for w in words])
        except SystemExit as leaving:
            status = leaving.code
        out, err = capsys.readouterr()
        assert status == 0 or "VERDICT: PASS" not in out
        # bad input is one line
        assert status != 2 or (err.count("\n") == 1 and "VERDICT" not in out)
        return status, out, err

    return run


@pytest.fixture
def loosened(monkeypatch):
    """Thresholds of the default gate that every picture meets, for tests to tighten."""
    monkeypatch.setitem(evaluate.GATES, "close", dict(mae=255, lpips=9, psnr=-999, ssim=-1))
    return evaluate.GATES["close"]


@pytest.fixture
def pair(command):
    """a.png and b.png, one level of noise apart."""
    save("a.png", BASE), save("b.png", noisy(BASE, 1))
    return "a.png", "b.png"


def test_identical_pictures_print_the_contests_block(command):
    save("a.png", BASE), save("b.png", BASE, compress_level=0)  # other bytes, same pixels
    status, out, err = command("a.png", "b.png")
    assert (status, err) == (0, "")
    assert out.startswith(
        """=== Image Comparison Metrics ===
Pixel-wise Mean Absolute Difference: 0.0000
LPIPS (VGG):                        0.0000
PSNR:                              inf dB
SSIM:                              1.0000
"""
    )
    assert out.endswith("VERDICT: PASS (gate close)\n")


@pytest.mark.parametrize(
    "gate, name, status, thresholds",
    [
        ([], "close", 0, [2.55, 0.01, 40, 0.99]),
        (["--gate", "contest"], "close", 0, [2.55, 0.01, 40, 0.99]),
        (["--gate", "contest-2025-06"], "contest-2025-06", 1, [0.01, 0.01, 40, 0.99]),
        (["--gate", "strict"], "contest-2025-06", 1, [0.01, 0.01, 40, 0.99]),
        (["--gate", "contest-2025-07"], "contest-2025-07", 0, [80, 0.7, 5, 0.3]),
    ],
)
def test_gates(gate, name, status, thresholds, command, pair):
    """The organisers' page has the thresholds; former names work, with a notice."""
    found, out, err = command(*pair, *gate, "--json", "o.json")
    report = json.loads(Path("o.json").read_text())
    assert found == report["exit_status"] == status and report["gate"] == name
    assert [*report["thresholds"].values()] == pytest.approx(thresholds)
    assert (f"its name is now {name}" in err) == (gate[1:] in (["contest"], ["strict"]))
    rows = {line.split("  ")[1].strip(): line.split() for line in out.splitlines() if "<=" in line}
    mae = evaluate.mae(BASE, noisy(BASE, 1))
    assert float(rows["MAE of 0-255"][3]) == pytest.approx(mae, 1e-5)
    assert float(rows["MAE of 0-1"][3]) == pytest.approx(mae / 255, 1e-5)
    assert float(rows["MAE of 0-1"][5]) == pytest.approx(thresholds[0] / 255, 1e-5)


MAE, PSNR, SSIM = (
    metric(BASE, 255 - BASE) for metric in (evaluate.mae, evaluate.psnr, evaluate.ssim)
)


@pytest.mark.parametrize(
    "metric, at, beyond",
    [
        ("mae", MAE, 0.999 * MAE),
        ("lpips", 2, 1e-9),
        ("psnr", 0.999 * PSNR, PSNR),
        ("ssim", SSIM, 0.99999),
    ],
)
def test_each_threshold_alone_decides(command, loosened, metric, at, beyond):
    """An equal value meets its threshold, but PSNR has to be above."""
    save("a.png", BASE), save("b.png", 255 - BASE)
    for value, status in ((at, 0), (beyond, 1)):
        loosened[metric] = value
        assert command("a.png", "b.png")[0] == status


def test_metrics_judges_by_those_alone(command, pair, monkeypatch):
    save("far.png", noisy(BASE, 40)), save("black.png", np.zeros_like(BASE))
    three = ("--metrics", "mae", "psnr", "ssim")
    status, out, err = command(*pair, *three)
    assert (status, err) == (0, "") and "LPIPS" not in out
    assert out.endswith("VERDICT: PASS (gate close; judged by MAE, PSNR, SSIM)\n")
    assert command("a.png", "far.png", *three)[0] == 1
    # PSNR and SSIM do not count
    monkeypatch.setitem(evaluate.GATES["close"], "mae", 255)
    assert command("a.png", "far.png", "--metrics", "mae")[0] == 0
    assert command("black.png", "black.png", "--metrics", "mae")[0] == 0
    assert command("black.png", "black.png", "--metrics", "mae", "ssim")[0] == 3


def test_a_folder_fails_with_one_file(command, loosened):
    """The lines show the mean of the files that differ, the criteria the worst file."""
    save("a.png", BASE), Path("many").mkdir(), Path("none").mkdir()
    save("many/0.png", BASE), save("many/1.PNG", BASE)
    save("many/2.webp", one_pixel(noisy(BASE, 30)), lossless=True)
    Path("many/notes.txt").write_text("no picture")
    loosened["psnr"] = 40
    status, out, _ = command("a.png", "many", "--json", "o.json")
    report = json.loads(Path("o.json").read_text())
    psnr = report["files"][2]["values"]["psnr"]
    assert status == 1 and 10 < psnr < 30
    assert report["mean"]["psnr"] == report["worst"]["psnr"] == psnr
    mae = [record["values"]["mae"] for record in report["files"]]
    assert report["mean"]["mae"] == pytest.approx(np.mean(mae)) and report["worst"]["mae"] == mae[2]
    assert f"PSNR:                              {psnr:.2f} dB" in out
    Path("many/2.webp").unlink()
    assert command("a.png", "many")[0] == 0
    Path("many/3.png").write_text("no picture")
    assert command("a.png", "many")[0] == 2


def test_folders_are_compared_by_name(command):
    Path("a").mkdir(), Path("b").mkdir(), Path("none").mkdir()
    scenes = [scene(seed=seed) for seed in range(3)]
    for index, picture in enumerate(scenes):
        save(f"a/{index}.png", picture), save(f"b/{index}.png", noisy(picture, index))
    flags = "--metrics", "mae", "psnr", "--json", "o.json"
    assert command("a", "b", *flags)[0] == 0
    records = json.loads(Path("o.json").read_text())["files"]
    pairs = [(record["baseline"], record["file"]) for record in records]
    assert pairs == [(f"a/{index}.png", f"b/{index}.png") for index in range(3)]
    for index, record in enumerate(records):
        exact = evaluate.mae(scenes[index], noisy(scenes[index], index))
        assert record["values"]["mae"] == exact
    save("b/1.png", scenes[2])
    assert command("a", "b", *flags)[0] == 1
    os.rename("b/1.png", "b/4.png")
    for names, lacking in (
        (("a", "b"), "b: lacks 1.png"),
        (("b", "a"), "b: lacks 1.png"),
        (("a", "none"), "none: "),
        (("none", "a/0.png"), "none: "),
        (("a", "b/0.png"), "a: is a folder"),
    ):
        assert lacking in command(*names)[2]


@pytest.mark.parametrize(
    "words, judged",
    [
        ("a.png b.png --metrics psnr mae", ["mae", "psnr"]),
        ("--metrics psnr mae --gate close a.png b.png", ["mae", "psnr"]),
        ("--metrics mae a.png b.png", None),
        ("a.png b.png --metrics pnsr", None),
        ("a.png b.png --metrics", None),
        ("a.png b.png --json", None),
        ("a.png b.png --gates strict", None),
        ("a.png", None),
    ],
)
def test_flags_and_files(words, judged, command, pair):
    status, out, _ = command(*words.split(), *(["--json", "o.json"] if judged else []))
    assert status == (0 if judged else 2)
    if judged:
        assert [*json.loads(Path("o.json").read_text())["thresholds"]] == judged


def test_a_metric_without_value_is_never_a_pass(command, loosened):
    save("a.png", np.zeros_like(BASE)), save("b.png", np.full_like(BASE, 9))
    for names in (("a.png", "a.png"), ("b.png", "b.png"), ("a.png", "b.png")):
        status, out, err = command(*names)
        assert status == 3 and "VERDICT: NONE" in out and "SSIM: undefined" in err
    save("a.png", BASE[:12, :12]), save("b.png", noisy(BASE[:12, :12], 1))
    status, _, err = command("a.png", "b.png")
    assert status == 3 and "16x16" in err


def test_a_metric_that_fails_is_a_fail_whatever_the_others_say(command, loosened, tmp_path):
    """Without VGG16's weights, and where a second picture cannot be judged."""
    loosened["psnr"] = 40
    (tmp_path / "not-vgg16.pth").write_bytes(b"")
    save("a.png", BASE), save("b.png", noisy(BASE, 90))
    status, out, err = command("a.png", "b.png", "--vgg-weights", tmp_path / "not-vgg16.pth")
    assert status == 1 and "VERDICT: FAIL" in out and "NOT COMPUTED" in out and "no VGG16" in err
    Path("many").mkdir(), save("a.png", np.full_like(BASE, 9))
    save("many/1.png", noisy(BASE, 90)), save("many/2.png", np.full_like(BASE, 9))
    status, out, _ = command("a.png", "many", "--metrics", "psnr", "ssim", "mae")
    assert status == 1 and "VERDICT: FAIL" in out and "   NONE" in out


def test_a_crash_is_not_a_verdict(command, pair, monkeypatch):
    monkeypatch.setattr(evaluate, "ssim", lambda a, b: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # as a program: status 3, as for an import's below
        command(*pair, "--json", "o.json")
    assert not Path("o.json").exists()


INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    "module, status, words",
    [
        (INTERRUPT, 130, "evaluate.py: interrupted\n"),
        ("raise ImportError('numpy')", 3, 'numpy.py", line 1'),
    ],
)
def test_what_ends_in_an_import_is_no_verdict(module, status, words, command, tmp_path):
    (tmp_path / "numpy.py").write_text(module)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, PROGRAM, "a.png", "a.png"], capture_output=True, text=True, env=env
    )
    assert done.returncode == status and words in done.stderr and "VERDICT" not in done.stdout


# ---- VGG16 ----


def test_no_network_and_no_weights(command, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    Path("many").mkdir(), save("many/1.png", noisy(BASE, 1)), save("many/2.png", noisy(BASE, 1, 2))
    for candidate in ("b.png", "many"):
        status, out, err = command("a.png", candidate)
        assert status == 3 and "LPIPS (VGG):                        nan" in out
        assert err.count("\n") == 1 and "--vgg-weights" in err
        assert str(tmp_path / "empty" / "hub" / "checkpoints" / "vgg16-397923af.pth") in err
    assert not list((tmp_path / "empty").rglob("*.p*"))  # nor half a file


def test_vgg_weights_from_anywhere(command, pair, vgg, monkeypatch, tmp_path):
    cached = command(*pair, "--json", "1.json")[0]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    state = {
        k: v for k, v in torch.load(vgg[1], weights_only=True).items() if k.startswith("features")
    }
    # the published file is in the older format
    torch.save(state, "old.pth", _use_new_zipfile_serialization=False)
    assert cached == command(*pair, "--vgg-weights", "old.pth", "--json", "2.json")[0] == 0
    first, second = (json.loads(Path(f).read_text())["mean"]["lpips"] for f in ("1.json", "2.json"))
    assert first == second > 0
    status, _, err = command(*pair, "--vgg-weights", "none.pth")
    assert status == 2 and "--vgg-weights none.pth: no such file; it should be " in err


@pytest.mark.parametrize(
    "write",
    [lambda path: torch.save({}, path), lambda path: path.write_text("404 not found")],
    ids=["empty", "text"],
)
def test_corrupt_weights_give_no_verdict(write, command, pair):
    write(Path("w.pth"))
    status, _, err = command(*pair, "--vgg-weights", "w.pth")
    assert status == 3 and "w.pth" in err and err.count("\n") == 1


# ---- bad input ----


def test_unreadable_files(command, recwarn):
    """One line each: a library's warnings are no second. Every kind of damage:
    tests/io/test_picture_files.py.
    """
    save("a.png", BASE), Path("text.png").write_bytes(b"not a picture")
    cut = save("a.tif", BASE, compression="tiff_lzw").read_bytes()[:-90]
    Path("cut.tif").write_bytes(cut)
    for name in ("text.png", "cut.tif", "none.png", "/dev/zero"):
        for names in (("a.png", name), (name, "a.png")):
            status, _, err = command(*names)
            assert status == 2 and name in err, name
    assert not [warning for warning in recwarn if "PIL" in warning.filename]
    for words in (("a.png",), ("x" * 300, "a.png"), ("a.png", "a.png", "--json", "x" * 300)):
        assert command(*words)[0] == 2


def test_pictures_of_another_size_or_mode_are_not_converted(command):
    save("a.png", BASE), save("small.png", BASE[:48, :64]), save("grey.png", BASE[..., 0])
    for name, words in (("small.png", ("128x96", "64x48")), ("grey.png", ("px, RGB", "px, L"))):
        status, _, err = command("a.png", name)
        assert status == 2 and all(word in err for word in words)


def test_nothing_is_written_over_an_input(command):
    picture = save("a.png", BASE).read_bytes()
    (
        Path("many").mkdir(),
        save("many/1.png", BASE),
        os.symlink("a.png", "soft.png"),
        os.mkfifo("pipe"),
    )
    Path("w.pth").write_bytes(b"weights")
    before = sorted(path.name for path in Path().iterdir())
    inputs = ("a.png", "soft.png", "./many/../a.png", "many/1.png", "w.pth")
    for flag in ("--json", "--heatmap"):
        # refused before any work
        for place in (*inputs, "/proc/x.png", "pipe", "no/where.png", "."):
            status, out, err = command("a.png", "many", flag, place, "--vgg-weights", "w.pth")
            assert status == 2 and f"{flag} {Path(place)}: " in err and out == ""
    assert command("a.png", "a.png", "--json", "x", "--heatmap", "x")[0] == 2
    assert Path("a.png").read_bytes() == picture and Path("w.pth").read_bytes() == b"weights"
    assert sorted(path.name for path in Path().iterdir()) == before


def test_no_old_verdict_is_left(command):
    save("a.png", BASE)
    outputs = ("--json", "o.json", "--heatmap", "o.png")
    assert command("a.png", "a.png", *outputs)[0] == 0
    assert json.loads(Path("o.json").read_text())["verdict"] == "PASS"
    Path("precious").write_bytes(b"precious"), os.remove("o.png"), os.symlink("precious", "o.png")
    assert command("a.png", "none.png", *outputs)[0] == 2
    # nothing goes through a link
    assert (
        not Path("o.json").exists()
        and not Path("o.png").exists()
        and Path("precious").read_bytes() == b"precious"
    )


# ---- tiles, heatmap ----


def sheet(pictures, columns=4):
    stack = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return make_grid(stack, nrow=columns).permute(1, 2, 0).numpy().copy()


def test_tiles(command, loosened):
    pictures = [scene(48, 48, seed) for seed in range(8)]
    damaged = [*pictures[:6], noisy(pictures[6], 12), pictures[7]]
    save("a.png", sheet(pictures)), save("b.png", sheet(damaged))
    # 12 levels: 39 dB over all, 30 in the tile
    loosened.update(mae=2.55, psnr=38, lpips=0.02, ssim=0.9)
    status, out, _ = command("a.png", "b.png", "--json", "o.json")
    tiles = json.loads(Path("o.json").read_text())["files"][0]["tiles"]
    assert status == 0 and out.count("\n  1,") == out.count("\n  2,") == 4 and len(tiles) == 8
    assert tiles[6]["values"]["mae"] == pytest.approx(evaluate.mae(pictures[6], damaged[6]))
    assert tiles[6]["values"]["ssim"] == pytest.approx(evaluate.ssim(pictures[6], damaged[6]))
    assert tiles[0]["values"]["psnr"] == "inf" and "lpips" not in tiles[0]["values"]
    status, out, _ = command("a.png", "b.png", "--every-tile")
    failed = [line.split()[0] for line in out.splitlines() if "FAIL" in line]
    assert status == 1 and failed == ["2,3", "VERDICT:"]
    assert command("a.png", "a.png", "--every-tile")[0] == 0


def test_grids_are_not_imagined(command):
    save("a.png", scene(102, 202, 3))  # the size of 2x4 pictures of 48 px, but no black lines
    assert "\n  1,1" not in command("a.png", "a.png")[1]
    assert command("a.png", "a.png", "--every-tile")[0] == 2
    seven, six, three = (sheet([scene(48, 48, s) for s in range(count)]) for count in (7, 6, 3))
    assert [*evaluate.find_tiles(seven, seven)][-1] == "2,3"
    # a missing picture is no empty place
    assert [*evaluate.find_tiles(seven, six)][-1] == "2,3"
    assert [*evaluate.find_tiles(three, three)] == ["1,1", "1,2", "1,3"]


def test_heatmap(command):
    """Of a folder it shows the worst picture."""
    save("a.png", BASE), Path("many").mkdir()
    for index, levels in enumerate((2, 60, 0)):
        save(f"many/{index}.png", noisy(BASE, levels))
    flags = "--metrics", "mae", "psnr", "--heatmap"
    assert command("a.png", "many", *flags, "heat.png")[0] == 1
    pixels = np.asarray(Image.open("heat.png").convert("RGB"))
    assert pixels.shape[1] > 1000 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000
    assert sorted(p.name for p in Path().iterdir()) == ["a.png", "heat.png", "many"]
    assert command("a.png", "many/1.png", *flags, "worst.png")[0] == 1
    assert np.array_equal(np.asarray(Image.open("worst.png").convert("RGB")), pixels)
