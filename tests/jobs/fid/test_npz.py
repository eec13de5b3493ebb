"""The archive that FID evaluators read."""

import io
import os
import zipfile

import forks
import numpy as np
import pytest
from conftest import mistake
from PIL import Image

from accel.errors import Stopped
from accel.jobs.fid import npz
from accel.jobs.fid.folder import picture_name, write_pictures


def make(folder, count, size):
    """`count` pictures, eight of them different; returns their pixels."""
    (folder / ".job").mkdir(parents=True)
    originals = np.random.default_rng(0).integers(0, 256, (8, size, size, 3), dtype=np.uint8)
    write_pictures(folder, range(8), originals)
    for number in range(8, count):
        os.link(folder / picture_name(number % 8), folder / picture_name(number))
    return originals


def never():
    return False


def test_it_is_streamed_and_read_by_numpy_and_as_adms_evaluator_does(tmp_path):
    """1200 pictures of 256 px are 236 MB; writing their archive takes a tenth."""
    folder = tmp_path / "pictures"
    originals = make(folder, 1200, 256)
    code = f"""
import resource, pathlib
from accel.jobs.fid import npz
folder = pathlib.Path({str(folder)!r})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
npz.write(folder, 40, 256, lambda: False)
before = peak()
(folder / npz.RECORD).unlink()
npz.write(folder, 1200, 256, lambda: False)
assert npz.problem(folder) is None
print(peak() - before)
"""
    done = forks.run(["-c", code])
    assert int(done.stdout) < 24e6, done.stderr
    array = np.load(tmp_path / "pictures.npz")["arr_0"]
    assert array.shape == (1200, 256, 256, 3)
    assert all(np.array_equal(array[i], originals[i % 8]) for i in range(0, 1200, 7))
    with zipfile.ZipFile(tmp_path / "pictures.npz") as archive, archive.open("arr_0.npy") as member:
        assert archive.testzip() is None and np.lib.format.read_magic(member) == (1, 0)
        assert np.lib.format.read_array_header_1_0(member) == (
            (1200, 256, 256, 3),
            False,
            np.dtype(np.uint8),
        )
    assert npz.problem(folder) is None


def test_a_file_that_is_not_a_whole_picture_is_named_and_nothing_is_left(tmp_path):
    folder = tmp_path / "pictures"
    path = tmp_path / "pictures.npz"
    originals = make(folder, 8, 16)
    third = folder / picture_name(3)
    whole = third.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # in the compressed pixels: their checksum alone tells
    write_pictures(folder, range(90, 91), originals[:1, :8, :8])
    other_size = (folder / picture_name(90)).read_bytes()
    jpeg = io.BytesIO()
    Image.fromarray(originals[3]).save(jpeg, format="JPEG")
    damaged = (
        bytes(flipped),
        whole[:50],
        whole[:-12],
        b"",
        b"no picture",
        other_size,
        jpeg.getvalue(),
    )
    for content in (*damaged, None):
        third.unlink(missing_ok=True)
        third.write_bytes(content) if content is not None else os.mkfifo(third)
        with mistake("", "000003.png", "16"):
            npz.write(folder, 8, 16, never)
    third.unlink()
    third.write_bytes(whole)
    with pytest.raises(Stopped):
        npz.write(folder, 8, 16, lambda: True)
    assert [each.name for each in tmp_path.iterdir()] == ["pictures"]
    npz.write(folder, 8, 16, never)
    assert np.array_equal(np.load(path)["arr_0"], originals)


def test_an_archive_that_is_not_as_it_was_written_is_seen(tmp_path):
    folder = tmp_path / "pictures"
    path = tmp_path / "pictures.npz"
    make(folder, 19, 16)
    npz.write(folder, 19, 16, never)
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"x", whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:]):
        path.write_bytes(content)
        assert npz.problem(folder) == "was changed since it was written", len(content)
    path.write_bytes(whole)
    assert npz.problem(folder) is None  # its content counts, not its time
    (folder / npz.RECORD).write_bytes(b"{")
    assert "has no record of its contents" in npz.problem(folder)
    npz.write(folder, 19, 16, never)
    path.unlink()
    os.mkfifo(path)
    assert "has no record of its contents" in npz.problem(folder)


def test_upstreams_function_makes_the_archive_of_any_folder(tmp_path, monkeypatch):
    """Its name, arguments, result and errors; scripts import it from sample_ddp."""
    from sample_ddp import create_npz_from_sample_folder

    folder = tmp_path / "pictures"
    originals = make(folder, 20, 8)
    monkeypatch.chdir(tmp_path)
    assert create_npz_from_sample_folder("pictures", num=17) == "pictures.npz"
    array = np.load("pictures.npz")["arr_0"]
    assert array.shape == (17, 8, 8, 3) and array.dtype == np.uint8
    assert all(np.array_equal(array[number], originals[number % 8]) for number in range(17))
    with mistake("", "000020.png"):
        create_npz_from_sample_folder("pictures", 21)
    Image.new("RGB", (8, 9)).save(folder / "000003.png")
    with mistake("", "000003.png"):
        create_npz_from_sample_folder("pictures", 20)
    assert np.array_equal(np.load("pictures.npz")["arr_0"], array)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures", "pictures.npz"]
    (tmp_path / "empty").mkdir()
    for folder in ("nosuch", "empty"):
        with mistake("", f"{folder}/000000.png"):
            create_npz_from_sample_folder(folder)
