"""evaluate.py: its numbers are torchmetrics', and nothing that is not a pass may say PASS."""

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import evaluate

PROGRAM = Path(evaluate.__file__)
DEAD_PROXY = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}


@pytest.fixture(scope="module")
def vgg(tmp_path_factory):
    """A seeded VGG16 checkpoint in a torch hub cache, as torchvision's file is laid out: (TORCH_HOME, file)."""
    home = tmp_path_factory.mktemp("torch_home")
    path = home / "hub" / "checkpoints" / "vgg16-397923af.pth"
    path.parent.mkdir(parents=True)
    g, state, channels, index = torch.Generator().manual_seed(3), {}, 3, 0
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512):
        if not width:
            index += 1
            continue
        state[f"features.{index}.weight"] = (
            torch.randn(width, channels, 3, 3, generator=g) * (2 / (9 * channels)) ** 0.5
        )
        state[f"features.{index}.bias"] = torch.randn(width, generator=g) * 0.1
        channels, index = width, index + 2
    for layer, (out, into) in {0: (4096, 25088), 3: (4096, 4096), 6: (1000, 4096)}.items():
        state[f"classifier.{layer}.weight"] = torch.zeros(1, 1).expand(out, into)  # one number on disk
        state[f"classifier.{layer}.bias"] = torch.zeros(out)
    torch.save(state, path)
    return home, path


@pytest.fixture(scope="module")
def reference(vgg):
    """torchmetrics as the contest's script sets it up, on the same checkpoint; its own loader reads it."""
    from torchmetrics.image import (
        LearnedPerceptualImagePatchSimilarity,
        PeakSignalNoiseRatio,
        StructuralSimilarityIndexMeasure,
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(vgg[0]))
        network = LearnedPerceptualImagePatchSimilarity(net_type="vgg", normalize=True)

    def metrics(a, b, dtype=torch.float32):
        a, b = (torch.from_numpy(x.copy()).permute(2, 0, 1)[None].float().div(255).to(dtype) for x in (a, b))
        values = {
            "psnr": PeakSignalNoiseRatio()(a, b).item(),
            "ssim": StructuralSimilarityIndexMeasure().set_dtype(dtype)(a, b).item(),
        }
        if min(a.shape[2:]) >= 16 and dtype == torch.float32:
            network.reset()
            values["lpips"] = network(a, b).item()
        return values

    return metrics


def scene(height=96, width=128, seed=0):
    """Smooth colours with edges and texture: (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 32
    picture = 120 + 90 * np.stack([np.sin(x + p) * np.cos(y * (1 + p)) for p in rng.uniform(0, 3, 3)], -1)
    picture[(np.hypot(x - width / 64, y - height / 64) < 0.8)] = rng.integers(0, 256, 3)
    return np.clip(picture + rng.normal(0, 6, picture.shape), 0, 255).astype(np.uint8)


def noisy(picture, levels, seed=1):
    change = np.random.default_rng(seed).integers(-levels, levels + 1, picture.shape)
    return np.clip(picture.astype(int) + change, 0, 255).astype(np.uint8)


def one_pixel(picture):
    changed = picture.copy()
    changed[5, 7] = 255 - changed[5, 7]
    return changed


BASE, GREY = scene(), np.repeat(scene(64, 80, 4)[..., :1], 3, 2)
DARK = (scene(64, 64, 5) // 8).astype(np.uint8)
PAIRS = {
    "one level of noise": (BASE, noisy(BASE, 1)),
    "much noise": (BASE, noisy(BASE, 40)),
    "another picture": (BASE, scene(seed=9)),
    "inverted": (BASE, 255 - BASE),
    "one pixel": (BASE, one_pixel(BASE)),
    "grey": (GREY, noisy(GREY, 3)),
    "against a constant": (BASE, np.full_like(BASE, 128)),
    "a constant against": (np.full_like(BASE, 128), BASE),
    "against black": (BASE, np.zeros_like(BASE)),
    "dark, one white pixel": (DARK, one_pixel(DARK)),
    "odd sides": (scene(67, 45, 2), noisy(scene(67, 45, 2), 5)),
    "17 x 16": (scene(17, 16, 3), noisy(scene(17, 16, 3), 9)),
    "11 x 11": (scene(11, 11, 3), noisy(scene(11, 11, 3), 9)),
    "range of 20 levels": (100 + DARK % 20, noisy(100 + DARK % 20, 2)),
    "identical": (BASE, BASE),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_numbers_are_torchmetrics(name, vgg, reference):
    a, b = PAIRS[name]
    theirs, (ours, _) = (
        reference(a, b),
        evaluate.with_lpips(evaluate.measure(a, b), lambda: evaluate.Lpips(vgg[1])(a, b)),
    )
    # Bright pictures of a narrow range: torchmetrics' own float32 is off by more than 1e-4 from its float64.
    exact = reference(a, b, torch.float64)["ssim"]
    assert ours["ssim"] == pytest.approx(exact, abs=1e-8)
    rounding = abs(theirs["ssim"] - exact)
    assert rounding < 5e-5 or np.ptp(np.stack([a, b])) < 32
    for metric, value in theirs.items():
        assert ours[metric] == pytest.approx(value, abs=1e-4 + (rounding if metric == "ssim" else 0)), metric
    assert ours["mae"] == np.abs(a.astype(int) - b.astype(int)).mean()
    if name == "11 x 11":  # VGG16 has nothing left to look at; torchmetrics raises there
        assert math.isnan(ours["lpips"])


@pytest.mark.parametrize("levels", [1, 2, 3, 8])
def test_ssim_of_a_narrow_range_is_the_exact_one(levels, reference):
    """float32 leaves torchmetrics' own value uncertain here; ours is what torchmetrics gives in float64."""
    a = (200 + np.random.default_rng(levels).integers(0, levels + 1, (40, 50, 3))).astype(np.uint8)
    b = a.copy()
    b[10:20, 10:20] = 200
    exact = reference(a, b, torch.float64)["ssim"]
    assert evaluate.ssim(a, b) == pytest.approx(exact, abs=1e-6)


def test_strips_change_nothing(vgg, monkeypatch):
    """A picture cut in many strips against lpips' own forward pass, odd sides included."""
    import lpips

    a, b = scene(203, 77, 6), noisy(scene(203, 77, 6), 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(vgg[0]))
        whole = lpips.LPIPS(net="vgg", verbose=False)
    tensors = [torch.from_numpy(x).permute(2, 0, 1)[None].float() / 127.5 - 1 for x in (a, b)]
    with torch.no_grad():
        expected = whole(*tensors).item()
    for strip, tiles in ((1, 1), (2**16, 40), (2**30, 10**6)):
        monkeypatch.setattr(evaluate, "STRIP", strip)
        monkeypatch.setattr(evaluate, "WINOGRAD_TILES", tiles)
        assert evaluate.Lpips(vgg[1])(a, b) == pytest.approx(expected, abs=1e-5)


# ---- the command ---------------------------------------------------------------------------------------------------


def save(path, array, **options):
    Image.fromarray(array).save(path, **options)
    return Path(path)


@pytest.fixture
def command(vgg, tmp_path, monkeypatch, capsys):
    """Run the command in this process, in an empty folder, VGG16 in torch's hub cache and the network dead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(vgg[0]))
    for name, value in DEAD_PROXY.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        try:
            status = evaluate.main([str(w) for w in words])
        except SystemExit as leaving:
            status = leaving.code
        out, err = capsys.readouterr()
        if status != 0:
            assert "VERDICT: PASS" not in out
        return status, out, err

    return run


def test_identical_pictures_print_the_contests_block(command):
    save("a.png", BASE), save("b.png", BASE, compress_level=0)  # other bytes, same pixels
    status, out, err = command("a.png", "b.png")
    assert (status, err) == (0, "")
    assert (
        """=== Image Comparison Metrics ===
Pixel-wise Mean Absolute Difference: 0.0000
LPIPS (VGG):                        0.0000
PSNR:                              inf dB
SSIM:                              1.0000
"""
        in out
    )
    assert out.endswith("VERDICT: PASS (gate contest)\n")


def test_identical_pictures_need_no_torch(tmp_path):
    path = save(tmp_path / "a.png", BASE)
    code = (
        f"import sys, evaluate; s = evaluate.main([{str(path)!r}] * 2); assert 'torch' not in sys.modules; sys.exit(s)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROGRAM.parent, capture_output=True).returncode == 0


def test_gates(command):
    save("a.png", BASE), save("b.png", noisy(BASE, 1))
    status, out, _ = command("a.png", "b.png")
    assert status == 0 and "VERDICT: PASS (gate contest; not the published VGG16)" in out
    status, out, _ = command("a.png", "b.png", "--gate", "strict")
    assert status == 1 and "VERDICT: FAIL" in out
    assert [
        line.split()[-1] for line in out.splitlines() if line.startswith("  ") and ("<=" in line or ">" in line)
    ] == ["FAIL", "PASS", "PASS", "PASS"]
    status, out, _ = command("a.png", "b.png", "--gate", "strict", "--max-mae", "0.01")
    assert status == 0 and "own bars for MAE" in out.splitlines()[-1]


@pytest.mark.parametrize(
    "flag, at, beyond",
    [("--max-mae", 0.5, 0.4999), ("--max-lpips", 2.0, 1e-9), ("--min-psnr", 3, 99), ("--min-ssim", -1, 0.99999)],
)
def test_each_bar_alone_decides(command, flag, at, beyond):
    save("a.png", BASE), save("b.png", 255 - BASE)
    loose = {"--max-mae": 1, "--max-lpips": 9, "--min-psnr": -99, "--min-ssim": -1}
    mean = evaluate.mae(BASE, 255 - BASE) / 255
    for value, status in (
        (mean if flag == "--max-mae" else at, 0),
        (mean * 0.999 if flag == "--max-mae" else beyond, 1),
    ):
        bars = {**loose, flag: value}
        assert command("a.png", "b.png", *(f"{f}={v}" for f, v in bars.items()))[0] == status


def test_psnr_has_to_be_above_its_bar():
    values, bars = {"mae": 0.0, "lpips": 0.0, "psnr": 40.0, "ssim": 0.99}, evaluate.GATES["contest"]
    assert evaluate.judge(values, bars) == {"mae": True, "lpips": True, "psnr": False, "ssim": True}
    assert evaluate.judge({**values, "lpips": math.nan}, bars)["lpips"] is None


@pytest.mark.parametrize("bar", ["nan", "inf", "x"])
def test_a_bar_is_a_number(command, bar):
    assert command("a.png", "b.png", "--max-lpips", bar)[0] == 2


def test_a_folder_fails_with_one_file(command, tmp_path):
    save("a.png", BASE), Path("many").mkdir()
    save("many/0.png", BASE), save("many/1.PNG", BASE), save("many/2.png", one_pixel(noisy(BASE, 30)))
    Path("many/notes.txt").write_text("no picture")
    status, out, _ = command("a.png", "many", "--max-lpips", 9, "--min-ssim", -1, "--max-mae", 1)
    assert status == 1 and "inf dB" in out  # the mean PSNR is inf, above every bar
    assert "1 of 3 pictures do not pass" in out and "notes.txt" in out
    Path("many/2.png").unlink()
    assert command("a.png", "many")[0] == 0
    Path("many/3.png").write_text("no picture")
    assert command("a.png", "many")[0] == 2


def test_a_metric_without_value_is_never_a_pass(command):
    save("a.png", np.zeros_like(BASE)), save("b.png", np.full_like(BASE, 9))
    for pair in (("a.png", "a.png"), ("b.png", "b.png"), ("a.png", "b.png")):
        status, out, err = command(*pair, "--min-psnr=-999", "--max-mae=1", "--min-ssim=-1", "--max-lpips=9")
        assert status == 3 and "VERDICT: NONE" in out and "SSIM: undefined" in err


def test_tiny_pictures(command):
    save("a.png", BASE[:12, :12]), save("b.png", noisy(BASE[:12, :12], 1))
    status, _, err = command("a.png", "b.png")
    assert status == 3 and "16x16" in err


# ---- VGG16 ---------------------------------------------------------------------------------------------------------


def test_no_network_and_no_weights(command, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    save("a.png", BASE), save("b.png", noisy(BASE, 1)), Path("many").mkdir()
    save("many/1.png", noisy(BASE, 1)), save("many/2.png", noisy(BASE, 2))
    for candidate in ("b.png", "many"):
        status, out, err = command("a.png", candidate)
        assert status == 3 and "LPIPS (VGG):                        nan" in out
        assert err.count("\n") == 1 and "--vgg-weights" in err
        assert str(tmp_path / "empty" / "hub" / "checkpoints" / "vgg16-397923af.pth") in err
    assert not list((tmp_path / "empty").rglob("*.p*"))  # nor half a file


def test_vgg_weights_from_anywhere(command, vgg, monkeypatch, tmp_path):
    save("a.png", BASE), save("b.png", noisy(BASE, 1))
    cached = command("a.png", "b.png", "--json", "1.json")[0]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    legacy = torch.load(vgg[1], weights_only=True)  # the published file is in the older format
    torch.save(
        {k: v for k, v in legacy.items() if k.startswith("features")}, "old.pth", _use_new_zipfile_serialization=False
    )
    assert cached == command("a.png", "b.png", "--vgg-weights", "old.pth", "--json", "2.json")[0] == 0
    first, second = (json.loads(Path(f).read_text())["mean"]["lpips"] for f in ("1.json", "2.json"))
    assert first == second > 0
    assert command("a.png", "b.png", "--vgg-weights", "none.pth")[0] == 2


@pytest.mark.parametrize("damage", ["zeros", "nan", "missing", "shape", "text", "truncated"])
def test_damaged_weights_give_no_verdict(command, vgg, damage):
    state = {k: v.clone() for k, v in torch.load(vgg[1], weights_only=True).items() if k.startswith("features")}
    key = "features.28.weight"
    if damage == "zeros":
        state = {k: torch.zeros_like(v) for k, v in state.items()}
    elif damage == "nan":
        state[key].fill_(math.nan)
    elif damage == "missing":
        del state[key]
    elif damage == "shape":
        state[key] = state[key][:, :7].clone()
    torch.save(state, "w.pth")
    if damage == "text":
        Path("w.pth").write_text("404 not found")
    elif damage == "truncated":
        Path("w.pth").write_bytes(vgg[1].read_bytes()[: 10**6])
    save("a.png", BASE), save("b.png", noisy(BASE, 1))
    status, _, err = command("a.png", "b.png", "--vgg-weights", "w.pth")
    assert status == 3 and "w.pth" in err and err.count("\n") == 1


def test_a_crash_is_not_a_verdict(command, monkeypatch):
    save("a.png", BASE)
    monkeypatch.setattr(evaluate, "ssim", lambda a, b: 1 / 0)
    status, out, err = command("a.png", "a.png", "--json", "o.json")
    assert status == 3 and "ZeroDivisionError" in err and json.loads(Path("o.json").read_text())["verdict"] == "NONE"


# ---- bad input -----------------------------------------------------------------------------------------------------


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, depth, color, rows):
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def test_unreadable_files(command):
    whole = save("a.png", BASE).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    save("whole.jpg", BASE)
    bad = {
        "none.png": None,
        "text.png": b"not a picture",
        "empty.png": b"",
        "cut.png": whole[: len(whole) // 2],
        "header.png": whole[:20],
        "flipped.png": bytes(flipped),
        "cut.jpg": Path("whole.jpg").read_bytes()[:1500],
        "bomb.png": png(60000, 60000, 8, 2, b"\0" * 100),
        "large.png": png(9000, 9000, 8, 2, b"\0" * 100),
    }
    for name, data in bad.items():
        if data is not None:
            Path(name).write_bytes(data)
        for pair in (("a.png", name), (name, "a.png")):
            status, out, err = command(*pair)
            assert status == 2 and name in err and err.count("\n") == 1 and "VERDICT" not in out, name
        if name in ("bomb.png", "large.png"):
            assert "decompression bomb" in err
    Path("nothing").mkdir()
    assert command("a.png", "nothing")[0] == 2
    assert command("a.png")[0] == 2
    frames = [Image.fromarray(x) for x in (BASE, 255 - BASE)]
    frames[0].save("moving.png", save_all=True, append_images=frames[1:])
    status, _, err = command("a.png", "moving.png")
    assert status == 2 and "2 frames" in err


def test_sizes_and_modes(command):
    save("a.png", BASE), save("small.png", BASE[:48, :64]), save("grey.png", BASE[..., 0])
    status, _, err = command("a.png", "small.png")
    assert status == 2 and "128x96" in err and "64x48" in err and "--resize" in err
    status, out, _ = command("a.png", "small.png", "--resize")
    assert status == 1 and "Lanczos" in out.splitlines()[-1]
    status, _, err = command("a.png", "grey.png")
    assert status == 2 and "RGB, 8 bit" in err and "L, 8 bit" in err
    status, out, _ = command("a.png", "grey.png", "--resize")
    assert status == 1 and "compared as RGB" in out.splitlines()[-1]
    status, out, _ = command("grey.png", "grey.png")
    assert status == 0 and "L converted to RGB" in out


def test_alpha(command):
    opaque = np.dstack([BASE, np.full(BASE.shape[:2], 255, np.uint8)])
    hidden = opaque.copy()
    hidden[..., 3] = 0
    save("a.png", opaque), save("b.png", opaque), save("hidden.png", hidden)
    status, out, _ = command("a.png", "b.png")
    assert status == 0 and "alpha channel dropped" in out
    status, _, err = command("a.png", "hidden.png")
    assert status == 2 and "alpha" in err


def test_16_bit(command):
    """Pillow clips 16-bit grey to white and drops colour's low byte in silence; different pictures would be alike."""
    for name, color, channels in (("grey", 0, 1), ("color", 2, 3)):
        for which, picture in (("a", BASE), ("b", 255 - BASE)):
            rows = b"".join(b"\0" + r.astype(">u2").tobytes() for r in picture[..., :channels].astype(int) * 257)
            Path(f"{name}_{which}.png").write_bytes(png(128, 96, 16, color, rows))
        status, out, _ = command(f"{name}_a.png", f"{name}_b.png")
        assert status == 1 and "16-bit samples reduced" in out
        pixels = np.repeat(BASE[..., :1], 3, 2) if channels == 1 else BASE
        assert (evaluate.read_picture(f"{name}_a.png").pixels == pixels).all()
    save("a8.png", BASE)
    status, _, err = command("a8.png", "color_a.png")
    assert status == 2 and "16 bit" in err
    Image.fromarray(BASE[..., 0].astype(np.float32)).save("float.tiff")
    assert command("float.tiff", "float.tiff")[0] == 2


def test_nothing_is_written_over_an_input(command, vgg):
    picture = save("a.png", BASE).read_bytes()
    Path("many").mkdir(), save("many/1.png", BASE), os.link("a.png", "hard.png"), os.symlink("a.png", "soft.png")
    Path("w.pth").write_bytes(b"weights")
    for target in ("a.png", "hard.png", "soft.png", "./many/../a.png", "many/1.png", "w.pth"):
        for flag in ("--json", "--heatmap"):
            before = Path(target).read_bytes()
            status, _, err = command("a.png", "many", flag, target, "--vgg-weights", "w.pth")
            assert status == 2 and flag in err and Path(target).read_bytes() == before
    assert command("a.png", "a.png", "--json", "x", "--heatmap", "x")[0] == 2
    assert command("a.png", "a.png", "--json", "nowhere/x")[0] == 2
    assert Path("a.png").read_bytes() == picture


def test_no_old_verdict_is_left(command):
    save("a.png", BASE)
    assert command("a.png", "a.png", "--json", "o.json", "--heatmap", "o.png")[0] == 0
    assert json.loads(Path("o.json").read_text())["verdict"] == "PASS"
    assert command("a.png", "none.png", "--json", "o.json", "--heatmap", "o.png")[0] == 2
    report = json.loads(Path("o.json").read_text())
    assert report["verdict"] == "NONE" and report["exit_status"] == 2 and "none.png" in report["error"]
    assert not Path("o.png").exists()


# ---- tiles, heatmap, latents ---------------------------------------------------------------------------------------


def sheet(pictures, columns=4):
    from torchvision.utils import make_grid

    stack = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return make_grid(stack, nrow=columns).permute(1, 2, 0).numpy().copy()


def test_tiles(command):
    pictures = [scene(48, 48, seed) for seed in range(8)]
    damaged = list(pictures)
    damaged[6] = noisy(pictures[6], 12)
    save("a.png", sheet(pictures)), save("b.png", sheet(damaged))
    loose = ("--min-psnr", 38, "--max-lpips", 0.02, "--min-ssim", 0.9)  # 12 levels: 39 dB over all, 30 in the tile
    status, out, _ = command("a.png", "b.png", "--json", "o.json", *loose)
    report = json.loads(Path("o.json").read_text())
    tiles = report["files"][0]["tiles"]
    assert status == 0 and "worst tile: 2,3" in out and len(tiles) == 8
    assert tiles[6]["values"]["mae"] == pytest.approx(evaluate.mae(pictures[6], damaged[6]))
    assert tiles[6]["values"]["ssim"] == pytest.approx(evaluate.ssim(pictures[6], damaged[6]))
    assert tiles[0]["values"]["psnr"] == "inf" and "lpips" not in tiles[0]["values"]
    status, out, _ = command("a.png", "b.png", "--every-tile", *loose)
    assert status == 1 and out.count("FAIL") == 2  # the tile and the verdict
    assert command("a.png", "a.png", "--every-tile", "--tiles", "2x4")[0] == 0
    assert command("a.png", "b.png", "--tiles", "3x4")[0] == 2
    assert command("a.png", "b.png", "--tiles", "0x4")[0] == 2


def test_grids_are_not_imagined(command):
    save("a.png", scene(102, 202, 3))  # the size of 2x4 pictures of 48 px, but no black lines
    assert "Tiles" not in command("a.png", "a.png")[1]
    assert command("a.png", "a.png", "--every-tile")[0] == 2
    seven, six = sheet([scene(48, 48, s) for s in range(7)]), sheet([scene(48, 48, s) for s in range(6)])
    assert [c[0] for c in evaluate.find_tiles(seven, seven, None)][-1] == "2,3"
    assert [c[0] for c in evaluate.find_tiles(seven, six, None)][-1] == "2,3"  # a missing picture is no empty place
    assert [c[0] for c in evaluate.find_tiles(*[sheet([scene(48, 48, 1)] * 3)] * 2, None)] == ["1,1", "1,2", "1,3"]


def test_heatmap(command):
    save("a.png", BASE), Path("many").mkdir()
    save("many/1.png", noisy(BASE, 2)), save("many/2.png", noisy(BASE, 60)), save("many/3.png", BASE)
    status, out, _ = command("a.png", "many", "--heatmap", "heat.png")
    assert status == 1 and "2.png, the worst" in out
    with Image.open("heat.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[1] > 1000 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000
    assert sorted(p.name for p in Path().iterdir()) == ["a.png", "heat.png", "many"]


def test_outputs_that_cannot_be_written_are_refused_before_any_work(command):
    save("a.png", BASE), save("b.png", noisy(BASE, 2)), os.mkfifo("pipe")
    for flag in ("--heatmap", "--json"):
        for place in ("/proc/x.png", "pipe", "no/where.png", "."):
            status, out, err = command("a.png", "b.png", flag, place)
            assert status == 2 and f"{flag} {place}: " in err and err.count("\n") == 1 and out == ""
    assert sorted(p.name for p in Path().iterdir()) == ["a.png", "b.png", "pipe"]


def test_latents(command):
    a = np.random.default_rng(0).normal(size=(8, 4, 16, 16)).astype(np.float32)
    b = a.copy()
    b[3, 1, 4, 5] += 0.5
    np.save("a.npy", a), np.save("b.npy", b)
    status, out, _ = command("--latents", "a.npy", "b.npy", "--json", "o.json")
    latents = json.loads(Path("o.json").read_text())["latents"]
    assert status == 0 and "VERDICT: NONE" in out
    assert latents["max"] == pytest.approx(0.5, rel=1e-6)
    assert latents["relative_error"] == pytest.approx(0.5 / np.linalg.norm(a.astype(float)), rel=1e-6)
    assert latents["cosine"] == pytest.approx(
        a.ravel().astype(float) @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b), 1e-6
    )
    np.save("nan.npy", np.where(b > 3, np.nan, b)), np.save("inf.npy", np.where(b > 3, np.inf, b))
    np.save("short.npy", a[:4]), np.save("zero.npy", a * 0), np.save("int.npy", np.arange(4))
    np.save("object.npy", np.array([{}, 1], object), allow_pickle=True)
    Path("cut.npy").write_bytes(Path("a.npy").read_bytes()[:1000]), np.savez("two.npz", a=a)
    save("picture.png", BASE)
    for bad in (
        "nan.npy",
        "inf.npy",
        "short.npy",
        "int.npy",
        "object.npy",
        "cut.npy",
        "two.npz",
        "none.npy",
        "picture.png",
    ):
        status, _, err = command("--latents", "a.npy", bad)
        assert status == 2 and bad in err and err.count("\n") == 1 and "pickle" not in err, bad
    assert command("--latents", "zero.npy", "a.npy")[0] == 3
    save("a.png", BASE), save("b.png", noisy(BASE, 60))
    assert command("a.png", "a.png", "--latents", "a.npy", "b.npy")[0] == 0
    assert command("a.png", "b.png", "--latents", "a.npy", "a.npy")[0] == 1
    assert command("a.png", "a.png", "--latents", "zero.npy", "a.npy")[0] == 3
