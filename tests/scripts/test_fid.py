"""scripts/fid.py: torch-fidelity's figures, to the bit, from archives, folders and statistics; and honest about them.

The published Inception weights are not needed: random ones have the same shapes.
"""

import hashlib
import io
import math
import tracemalloc
import zipfile
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
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
            value.copy_(torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5)
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
    """The same pictures as an archive and as a folder, and others as a compressed archive and a folder."""
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
        prc=True,
        feature_extractor="inception-v3-compat",  # of precision and recall, too: ADM's evaluator has no other network
        feature_extractor_weights_path=str(inception),
        save_cpu_ram=True,
        cache=False,
        verbose=False,
    )


def images(path):
    """Every picture of a path, (N, 3, H, W)."""
    return torch.stack(list(torch.utils.data.DataLoader(fid.Pictures(path), batch_size=None)))


def test_the_command_gives_torch_fidelitys_figures_to_the_bit(data, inception, theirs, here, monkeypatch):
    """What makes a figure incomparable is said below it."""
    figures, compare = [], fid.compare
    monkeypatch.setattr(fid, "compare", lambda *how: figures.append(compare(*how)) or figures[0])
    how = "--inception-weights", inception, "--device", "cpu", "--precision-recall"
    done = here("scripts/fid.py", data / "samples.npz", data / "reference", *how)
    assert done.returncode == 0, done.stderr
    sfid = figures[0].pop(fid.SFID)
    assert figures == [theirs] and theirs["frechet_inception_distance"] > 0.01 and theirs["inception_score_mean"] > 1
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[0] in "FPRs")
    assert math.isclose(float(lines["FID"]), theirs["frechet_inception_distance"], rel_tol=1e-3)
    assert math.isclose(float(lines["sFID"]), sfid, rel_tol=1e-5)
    assert float(lines["Precision"]) == round(theirs["precision"], 4)
    assert float(lines["Recall"]) == round(theirs["recall"], 4)
    assert "samples.npz: 20 pictures\n" in done.stdout and "reference: 24 pictures\n" in done.stdout
    assert "note: FID of 20 pictures is larger than of 50000" in done.stdout
    assert "note: these are not the published Inception weights" in done.stdout
    assert "20/20" in done.stderr and "24/24" in done.stderr  # torch-fidelity's bars
    for program in (["scripts/fid.py"], ["-m", "scripts.fid"]):
        assert "VIRTUAL_imagenet256_labeled.npz" in forks.run([*program, "--help"]).stdout


def test_an_archive_and_a_folder_of_the_same_pictures(data):
    for name, pictures in (("samples", draw(20)), ("reference", draw(24, seed=1))):
        for path in (data / name, data / f"{name}.npz"):
            assert np.array_equal(images(path).permute(0, 2, 3, 1), pictures), path


def test_archives_are_streamed(tmp_path):
    np.savez(tmp_path / "many.npz", np.zeros((2000, 64, 64, 3), np.uint8))  # 24.6 MB
    pictures = fid.Pictures(tmp_path / "many.npz")
    tracemalloc.start()
    assert sum(1 for index in range(len(pictures)) if pictures[index].shape == (3, 64, 64)) == 2000
    assert tracemalloc.get_traced_memory()[1] < 3e6
    tracemalloc.stop()


def features(network, pictures):
    """FID's features, and sFID's as ADM's evaluator flattens them: TensorFlow has the channels last. Float64."""
    of_block = []
    hook = network.Mixed_6d.register_forward_hook(lambda module, given, out: of_block.append(out))
    with torch.inference_mode():
        pool, _ = network(torch.from_numpy(pictures).permute(0, 3, 1, 2))
    hook.remove()
    [out] = of_block  # (n, 768, 17, 17): the 1×1 branch comes first
    spatial = np.moveaxis(out.double().numpy(), 1, -1)[..., :7].reshape(len(pictures), -1)
    assert spatial.shape[1] == 2023 and spatial.std() > 0.01
    return pool.double().numpy(), spatial


def test_adms_statistics_against_a_direct_computation(data, inception, tmp_path):
    """With statistics in the file its pictures are not looked at, but for precision and recall."""
    random, of_reference = np.random.default_rng(0), []
    for size in (2048, 2023):
        root = random.normal(size=(size, size)) / size**0.5
        of_reference.append((random.normal(size=size), root @ root.T + np.eye(size)))
    (mu, sigma), (mu_s, sigma_s) = of_reference
    np.savez(tmp_path / "adm.npz", arr_0=draw(12, seed=2), mu=mu, sigma=sigma, mu_s=mu_s, sigma_s=sigma_s)
    samples, reference = fid.Pictures(data / "samples.npz"), fid.Pictures(tmp_path / "adm.npz")
    network = fid.load_inception(inception, cuda=False)
    mine = fid.compare(samples, reference, network, False, 7, False)
    for name, found, (mu, sigma) in zip((fid.FID, fid.SFID), features(network, draw(20)), of_reference, strict=True):
        # S = XᵀX for X's 20 centred rows, so S·T has the nonzero eigenvalues of the 20×20 matrix X·T·Xᵀ.
        x = (found - found.mean(0)) / 19**0.5
        cross = np.linalg.eigvalsh(x @ sigma @ x.T).clip(0) ** 0.5
        direct = np.sum((found.mean(0) - mu) ** 2) + np.sum(x**2) + np.trace(sigma) - 2 * cross.sum()
        assert math.isclose(mine[name], direct, rel_tol=1e-5), name


def test_sfid_of_pictures_is_that_of_their_statistics(data, inception, tmp_path, here):
    """And an archive without those of sFID gives none."""
    network = fid.load_inception(inception, cuda=False)
    pool, spatial = features(network, draw(24, seed=1))
    known = dict(mu=pool.mean(0), sigma=np.cov(pool, rowvar=False))
    np.savez(tmp_path / "fid.npz", **known)
    np.savez(tmp_path / "both.npz", **known, mu_s=spatial.mean(0), sigma_s=np.cov(spatial, rowvar=False))
    samples, references = fid.Pictures(data / "samples.npz"), (data / "reference.npz", tmp_path / "both.npz")
    pictures, both = (fid.compare(samples, fid.Pictures(one), network, False, 8, False) for one in references)
    assert math.isclose(pictures[fid.SFID], both[fid.SFID], rel_tol=1e-4) and pictures[fid.SFID] > 0.01
    how = "--inception-weights", inception, "--device", "cpu"
    done = here("scripts/fid.py", data / "samples.npz", tmp_path / "fid.npz", *how)
    assert done.returncode == 0 and "\nsFID             none: the reference has statistics, but not mu_s" in done.stdout
    assert math.isclose(float(done.stdout.split("\nFID")[1].split()[0]), pictures[fid.FID], rel_tol=1e-4)


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Two small jobs of sample_ddp.py that differ in one setting."""
    folder = tmp_path_factory.mktemp("jobs")
    common = ["--model", "DiT-Demo/2", "--device", "cpu", "--num-fid-samples", "10", "--per-proc-batch-size", "10"]
    for steps in "23":
        command = [*common, "--num-sampling-steps", steps, "--sample-dir", folder / steps]
        assert forks.run(["sample_ddp.py", *command]).returncode == 0
    return [next((folder / steps).glob("*.npz")) for steps in "23"]


def notes(samples, reference, published=True):
    return list(fid.caveats(fid.Pictures(samples), fid.Pictures(reference), published))


def test_two_jobs_are_compared_by_what_they_record(jobs):
    few, other = notes(*jobs)
    assert few.startswith("FID of 10 pictures") and other == "two jobs that differ in --num-sampling-steps (2, 3)"
    assert notes(jobs[0], jobs[0].with_suffix(""))[-1] == "two jobs of the same settings"


def test_statistics_compare_with_statistics(tmp_path):
    """ADM's own pictures against ADM's statistics, which have no number of pictures."""
    np.savez(tmp_path / "adm.npz", arr_0=draw(10), mu=np.zeros(2048), sigma=np.eye(2048))
    [note] = notes(tmp_path / "adm.npz", tmp_path / "adm.npz")
    assert note.startswith("FID of 10 pictures")


def test_what_is_unlike_the_published_figure(jobs, tmp_path):
    np.savez(tmp_path / "adm.npz", arr_0=draw(10), mu=np.zeros(2048), sigma=np.eye(2048))
    found = notes(jobs[0], tmp_path / "adm.npz", published=False)
    assert found[1:] == [
        "these are not the published Inception weights: the figures compare with each other only",
        "pictures of 128×128 against 24×24 pixels: FID compares one size",
        "--cfg-scale 4.0: DiT's published FID is with 1.5",
        "--num-sampling-steps 2: DiT's published FID is with 250",
        "--vae pretrained: DiT's published FID is with ema",
    ]


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


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file"),
        (b"PK\x03\x04 nonsense", "cannot be read"),
        (archive(arr_0=np.zeros((12, 8, 8, 3), np.float32)), "arr_0 is float32"),
        (archive(arr_0=np.zeros((12, 8, 8), np.uint8)), "not uint8 (N, H, W, 3)"),
        (archive(other=np.zeros(3)), "holds 0 pictures"),
        (archive(arr_0=np.zeros((3, 8, 8, 3), np.uint8)), "holds 3 pictures (arr_0, or PNGs); at least 10 needed"),
        (archive(mu=np.zeros(2048), sigma=np.eye(2048)), "holds 0 pictures"),
        (archive(mu=np.zeros(64), sigma=np.eye(64)), "not of Inception's 2048 features"),
        (archive(mu=np.zeros(2048), sigma=np.eye(2048), mu_s=np.zeros(7), sigma_s=np.eye(7)), "Inception's 2023"),
        (cut(archive(arr_0=np.zeros((12, 8, 8, 3), np.uint8))), "cannot be read"),
    ],
)
def test_bad_samples_are_one_line(content, words, data, inception, tmp_path, here):
    if content is not None:
        (tmp_path / "x.npz").write_bytes(content)
    how = "--inception-weights", inception, "--device", "cpu"
    done = here("scripts/fid.py", tmp_path / "x.npz", data / "reference.npz", *how)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    line = done.stderr.strip().splitlines()[-1].rpartition("\r")[2]
    assert str(tmp_path / "x.npz") in line and "Traceback" not in done.stderr


def test_precision_needs_pictures(data, tmp_path, here):
    np.savez(tmp_path / "s.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    done = here("scripts/fid.py", data / "samples.npz", tmp_path / "s.npz", "--precision-recall")
    assert done.returncode == 2 and "s.npz: holds 0 pictures" in done.stderr


def test_bad_folders_are_one_line(tmp_path):
    folder = write_folder(tmp_path / "f", draw(3))
    Image.fromarray(draw(1, side=16)[0]).save(folder / "000001.png")
    pictures = fid.Pictures(folder)
    with pytest.raises(UsageError, match="000001.png is of another size than 000000.png"), pictures.errors():
        list(pictures)
    (folder / "000000.png").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="cannot identify image"):
        fid.Pictures(folder)


#################################################################################
#                              Inception's weights                              #
#################################################################################


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
    with pytest.raises(UsageError, match="inception_weights=.*: No such file"):
        fid.find_weights(tmp_path / "none.pth")


@pytest.mark.parametrize("how", ["another file", "no network"])
def test_nothing_else_is_fetched(how, hub):
    hub.write_bytes(b"other") if how == "another file" else hub.unlink()
    with pytest.raises(UsageError, match="--inception-weights: download failed .* name the file"):
        fid.find_weights(None)
    assert not list(Path(torch.hub.get_dir(), "checkpoints").iterdir())


def test_other_weights_are_one_line_and_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    for content in ({"x": torch.ones(2)}, Evil()):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(UsageError, match="--inception-weights .*: are not Inception's") as error:
            fid.load_inception(tmp_path / "w.pth", cuda=False)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "touched").exists()


def test_without_torch_fidelity(tmp_path):
    """One line that says what to install."""
    code = (
        "import sys; sys.modules['torch_fidelity'] = None\n"
        "from scripts import fid; fid.load_inception('x.pth', cuda=False)"
    )
    done = forks.run(["-c", code])
    assert done.stderr.strip().splitlines()[-1].endswith("torch-fidelity is not installed: pip install torch-fidelity")
