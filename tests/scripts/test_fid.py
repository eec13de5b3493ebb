"""scripts/fid.py: torch-fidelity's figures, to the bit, from archives, folders and
statistics; and honest about them.

The published Inception weights are not needed: random ones have the same shapes.
"""

import hashlib
import io
import json
import math
import os
import re
import shutil
import tracemalloc
import zipfile
from argparse import Namespace
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from torch_fidelity import calculate_metrics
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from accel.errors import UsageError
from scripts import fid


@pytest.fixture(scope="session")
def inception(tmp_path_factory):
    """Random weights in a file that torch-fidelity reads."""

    class Untrained(FeatureExtractorInceptionV3):
        def load_state_dict(self, *_):
            return None

    path = tmp_path_factory.mktemp("inception") / "random.pth"
    torch.save({}, path)
    state = Untrained("random", ["2048"], feature_extractor_weights_path=str(path)).state_dict()
    generator = torch.Generator().manual_seed(0)
    for value in state.values():
        if value.ndim > 1:  # by He et al. 2015, or nothing of a picture reaches the last layer
            value.copy_(
                torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5
            )
    torch.save(state, path)
    return path


def draw(count, side=24, seed=0):
    """Coloured noise, smooth enough for pictures to differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    return (255 * fine).permute(0, 2, 3, 1).to(torch.uint8).numpy()


def write_folder(folder, pictures):
    folder.mkdir()
    for index, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{index:06d}.png")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The same pictures as an archive and as a folder, and others as a compressed archive
    and a folder.
    """
    folder = tmp_path_factory.mktemp("pictures")
    np.savez(folder / "samples.npz", draw(20))
    np.savez_compressed(folder / "reference.npz", draw(24, seed=1))
    write_folder(folder / "samples", draw(20))
    write_folder(folder / "reference", draw(24, seed=1))
    return folder


@pytest.fixture
def theirs(data, inception, one_thread):
    """torch-fidelity's own figures of the folders."""
    return calculate_metrics(
        input1=str(data / "samples"),
        input2=str(data / "reference"),
        cuda=False,
        isc=True,
        fid=True,
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(inception),
        save_cpu_ram=True,
        cache=False,
        verbose=False,
    )


@pytest.fixture
def tree(tmp_path):
    """The reference's pictures as torchvision's ImageFolder has them: a folder a class,
    deeper below, JPEG's suffix.
    """
    pictures = draw(24, seed=1)
    places = [(tmp_path / "tree" / ("cat", "dog", "dog/puppy")[index // 8]) for index in range(24)]
    for index, (place, picture) in enumerate(zip(places, pictures)):
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{index:02d}.PNG")
    (tmp_path / "tree" / "dog" / "notes.txt").touch()
    write_folder(tmp_path / "tree" / ".thumbnails", pictures[:2, ::2, ::2])
    return tmp_path / "tree"


def test_the_pages_own_recipe_makes_a_reference(tree, tmp_path, monkeypatch):
    """docs/fid.md: pictures of any size, cropped and resized, in an archive."""
    page = (ROOT / "docs" / "fid.md").read_text()
    [recipe] = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "reference.npz" in block
    ]
    Image.fromarray(draw(1, side=50)[0][:, :40]).save(tree / "cat" / "wide.jpg")
    shutil.rmtree(tree / ".thumbnails")
    monkeypatch.chdir(tmp_path)
    assert "imagenet/val" in recipe
    exec(recipe.replace("imagenet/val", str(tree)), {})
    made = fid.Pictures(tmp_path / "reference.npz")
    assert made.shape == (25, 256, 256, 3) and not made.statistics


def test_the_command_gives_torch_fidelitys_figures_to_the_bit(data, tree, inception, theirs, here):
    """Notes about figures that are not comparable follow."""
    flags = "--inception-weights", inception, "--device", "cpu", "--precision-recall", "--json"
    text = forks.succeeds(here("scripts/fid.py", data / "samples.npz", tree, *flags))
    *_, last = text.splitlines()
    record = json.loads(last)
    metrics = record["metrics"]
    assert metrics["FID"] == theirs["frechet_inception_distance"] > 0.01
    assert metrics["Inception Score"] == theirs["inception_score_mean"] > 1
    assert record["files"] == [str(data / "samples.npz"), str(tree)]
    assert {*record["seconds"]} == {"load", "check", "compare", "total"}
    assert record["settings"]["precision_recall"] == {"value": True, "origin": "options"}
    assert record["settings"]["batch_size"] == {"value": 64, "origin": "default"}
    assert record["pictures"] == 20 and len(record["notes"]) == 2
    rows = [line.rsplit(maxsplit=1) for line in text.splitlines() if line[0] in "FIPRs"]
    lines = {name.strip(): value for name, value in rows}
    for name, value in metrics.items():
        assert math.isclose(float(lines[name]), value, rel_tol=1e-5)
    assert "samples.npz: 20 pictures\n" in text and "tree: 24 pictures\n" in text
    assert text.count("\nnote: ") == 2 and "fetching" not in text


def compared(tmp_path, network, generated, real, **statistics):
    """Compare pictures of one value each, with `network` in Inception's place."""
    sides = []
    for name, values in (("generated", generated), ("real", real)):
        pictures = np.full((len(values), 4, 4, 3), np.reshape(values, (-1, 1, 1, 1)), np.uint8)
        np.savez(tmp_path / f"{name}.npz", arr_0=pictures)
        sides.append(fid.Pictures(tmp_path / f"{name}.npz"))
    sides[1].statistics = statistics
    how = Namespace(batch_size=7, precision_recall=not statistics, bootstrap=200)

    def features(batch):
        return dict.fromkeys((fid.POOL, fid.LOGITS, fid.SPATIAL), network(batch))

    return fid.compare(*sides, features, torch.device("cpu"), how)


def test_precision_and_recall_of_known_features(tmp_path):
    """Generated features are 10 of 30 places: all are real, and they reach 13 real ones, up to
    their third neighbours.
    """
    metrics = compared(tmp_path, lambda x: x[:, :2, 0, 0].float(), range(10), range(30))
    assert metrics["Precision"] == 1
    assert metrics["Recall"] == pytest.approx(13 / 30)


def test_the_interval_of_fid(tmp_path):
    """Of two normal features at a distance of 3, FID is 9 and its deviation 6/√N."""
    generator = torch.Generator().manual_seed(0)
    statistics = {fid.POOL: {"mu": np.array([3.0, 0.0]), "sigma": np.eye(2)}}
    metrics = compared(
        tmp_path,
        lambda x: torch.randn(len(x), 2, generator=generator),
        [0] * 400,
        [0],
        **statistics,
    )
    assert metrics["FID"] == pytest.approx(9, abs=1.5)
    assert metrics["FID ±"] == pytest.approx(1.96 * 6 / 20, rel=0.25)
    assert "sFID" not in metrics  # without its statistics


def test_archives_are_streamed(tmp_path):
    np.savez(tmp_path / "many.npz", np.zeros((2000, 64, 64, 3), np.uint8))  # 24.6 MB
    pictures = fid.Pictures(tmp_path / "many.npz")
    tracemalloc.start()
    assert [len(batch) for batch in pictures.batches(50)] == [50] * 40
    assert tracemalloc.get_traced_memory()[1] < 3e6
    tracemalloc.stop()


def features(weights, pictures):
    """FID's features, and sFID's as ADM's evaluator flattens them: TensorFlow has the
    channels last. Float64.
    """
    network = FeatureExtractorInceptionV3("x", ["2048", "logits_unbiased"], str(weights))
    of_block = []
    hook = network.Mixed_6d.register_forward_hook(lambda module, given, out: of_block.append(out))
    with torch.inference_mode():
        pool, _ = network(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    hook.remove()
    [out] = of_block  # (n, 768, 17, 17): the 1×1 branch comes first
    spatial = np.moveaxis(out.double().numpy(), 1, -1)[..., :7].reshape(len(pictures), -1)
    assert spatial.shape[1] == 2023 and spatial.std() > 0.01
    return pool.double().numpy(), spatial


def exact_distance(found, mu, sigma):
    """Return the Fréchet distance of features to statistics: XᵀX of X's centred rows,
    times T, has the nonzero eigenvalues of the small matrix X·T·Xᵀ.
    """
    x = (found - found.mean(0)) / (len(found) - 1) ** 0.5
    cross = np.linalg.eigvalsh(x @ sigma @ x.T).clip(0) ** 0.5
    return np.sum((found.mean(0) - mu) ** 2) + np.sum(x**2) + np.trace(sigma) - 2 * cross.sum()


def test_adms_statistics_against_a_direct_computation(data, inception, tmp_path):
    """A file's pictures are ignored if it has statistics, but for precision and recall."""
    random = np.random.default_rng(0)
    of_reference = []
    for size in (2048, 2023):
        root = random.normal(size=(size, size)) / size**0.5
        of_reference.append((random.normal(size=size), root @ root.T + np.eye(size)))
    (mu, sigma), (mu_s, sigma_s) = of_reference
    np.savez(
        tmp_path / "adm.npz", arr_0=draw(12, seed=2), mu=mu, sigma=sigma, mu_s=mu_s, sigma_s=sigma_s
    )
    samples = fid.Pictures(data / "samples.npz")
    reference = fid.Pictures(tmp_path / "adm.npz")
    cpu = torch.device("cpu")
    network = fid.load_inception(inception, cpu)
    how = Namespace(batch_size=7, precision_recall=False, bootstrap=0)
    mine = fid.compare(samples, reference, network, cpu, how)
    for name, found, (mu, sigma) in zip(
        ("FID", "sFID"), features(inception, draw(20)), of_reference, strict=True
    ):
        assert math.isclose(mine[name], exact_distance(found, mu, sigma), rel_tol=1e-5), name


def test_figures_that_statistics_do_not_give(data, inception, tmp_path, here):
    """There is no precision without pictures, and no spread of one value."""
    np.savez(tmp_path / "fid.npz", mu=MU, sigma=SIGMA)
    files = data / "samples.npz", tmp_path / "fid.npz"
    command = "scripts/fid.py", *files, "--inception-weights", inception, "--device", "cpu"
    assert "fid.npz: has 0 pictures" in forks.refused(here(*command, "--precision-recall"))
    assert "--bootstrap 1: " in forks.refused(here(*command, "--bootstrap", 1))


def archive(**arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def cut(content):
    """An archive whose pictures end early, as if the disk had been full, in a whole zip."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(result, "w") as target:
        target.writestr("arr_0.npy", source.read("arr_0.npy")[:-1000])
    return result.getvalue()


def corrupt(content):
    """Return an archive with a changed value amid its pictures."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


SMALL = np.zeros((12, 8, 8, 3), np.uint8)
MU = np.zeros(2048)
SIGMA = np.eye(2048)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "fifo",
        b"PK\x03\x04 nonsense",
        archive(arr_0=SMALL.astype(np.float32)),
        archive(arr_0=SMALL[..., 0]),
        archive(arr_0=np.asfortranarray(SMALL)),
        corrupt(archive(arr_0=SMALL)),
        archive(other=np.zeros(3)),
        archive(arr_0=SMALL[:3]),
        archive(mu=np.zeros(64), sigma=np.eye(64)),
        archive(mu=MU, sigma=SIGMA, mu_s=np.zeros(7), sigma_s=np.eye(7)),
        archive(mu=MU * np.nan, sigma=SIGMA),
        archive(mu=MU),
        cut(archive(arr_0=SMALL)),
    ],
    ids=range(14),  # an archive names the second in which it was made
)
def test_bad_samples_are_one_line(content, data, inception, tmp_path, here):
    path = tmp_path / "x.npz"
    if content == "fifo":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    how = ("--inception-weights", inception, "--device", "cpu")
    assert str(path) in forks.refused(here("scripts/fid.py", path, data / "reference.npz", *how))


def encoded(picture, file_format="PNG", **options):
    content = io.BytesIO()
    Image.fromarray(picture).save(content, file_format, **options)
    return content.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


PICTURE = draw(1)[0]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("000011.png", b"nothing", "is not PNG"),
        ("000011.png", encoded(PICTURE)[:-12], "truncated PNG file"),
        ("000011.png", corrupt(encoded(PICTURE)), "checksum in b'IDAT'"),
        ("000011.png", None, "a pipe"),
        ("000011.png", encoded(PICTURE[:16, :16]), "is (16, 16, 3), and 000000.png (24, 24, 3)"),
        ("photo.jpg", encoded(PICTURE, "JPEG", exif=exif(6)), "EXIF orientation, 6"),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("side", ["samples", "reference"])
def test_a_bad_file_is_named_before_features_are_computed(
    side, name, content, words, data, inception, tmp_path, here
):
    folder = write_folder(tmp_path / "f", draw(12))
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content) if content else os.mkfifo(folder / name)
    sides = {"samples": data / "samples.npz", "reference": data / "samples.npz", side: folder}
    flags = "--inception-weights", inception, "--device", "cpu"
    done = here("scripts/fid.py", sides["samples"], sides["reference"], *flags)
    *bars, error = re.split(r"[\r\n]+", done.stderr.strip())
    assert done.returncode == 2 and "FID" not in done.stdout
    assert f"fid.py: {folder / name}: " in error and words in error
    assert all("checking" in bar or not bar.strip() for bar in bars)


# ---- Inception's weights ----


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A file that is published on this machine, and an empty cache."""
    published = tmp_path / "published.pth"
    published.write_bytes(b"weights")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    monkeypatch.setattr(fid, "URL", published.as_uri())
    monkeypatch.setattr(fid, "SHA256", hashlib.sha256(b"weights").hexdigest()[:8])
    return published


def test_published_weights_are_fetched_aloud_and_kept(hub, tmp_path, capsys):
    path, published = fid.find_weights(None)
    assert published and path.read_bytes() == b"weights" and hub.as_uri() in capsys.readouterr().out
    assert fid.find_weights(hub) == (hub, True)
    hub.unlink()
    assert fid.find_weights(None) == (path, True) and capsys.readouterr().out == ""
    path.write_bytes(b"others, or damaged")
    assert fid.find_weights(None) == fid.find_weights(path) == (path, False)
    with pytest.raises(UsageError) as error:
        fid.find_weights(tmp_path / "none.pth")
    assert error.value.parameter == "inception_weights"


@pytest.mark.parametrize("how", ["another file", "no network", "no folder"])
def test_nothing_else_is_fetched(how, hub):
    hub.write_bytes(b"other") if how == "another file" else hub.unlink()
    if how == "no folder":
        Path(torch.hub.get_dir()).touch()
    with pytest.raises(UsageError) as error:
        fid.find_weights(None)
    assert error.value.parameter == "inception_weights"
    assert not list(Path(torch.hub.get_dir()).glob("checkpoints/*"))


def test_other_weights_are_one_line_and_code_is_not_run(inception, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    for content in ({"x": torch.ones(2)}, Evil(), [torch.ones(2)], {"x": 3}):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(UsageError) as error:
            fid.load_inception(tmp_path / "w.pth", torch.device("cpu"))
        assert error.value.parameter == "inception_weights" and "\n" not in str(error.value)
    assert not (tmp_path / "touched").exists()
    with pytest.raises(UsageError):
        fid.find_weights(Path("/dev/zero"))
