"""The archive that FID evaluators read."""

import os
import zipfile

import forks
import numpy as np
import pytest

from accel.errors import Stopped, UsageError
from accel.fid import npz
from accel.fid.folder import picture_name, write_picture


def make(folder, count, size):
    """`count` pictures, eight of them different; returns their pixels and digests."""
    folder.mkdir()
    originals = np.random.default_rng(0).integers(0, 256, (8, size, size, 3), dtype=np.uint8)
    digests = {}
    for number in range(count):
        path = folder / picture_name(number)
        if number < 8:
            digests[number] = {write_picture(path, originals[number])}
        else:
            os.link(folder / picture_name(number % 8), path)
            digests[number] = digests[number % 8]
    return originals, digests


def never():
    return False


def test_it_is_streamed_and_read_by_numpy_and_as_adms_evaluator_does(tmp_path):
    """1200 pictures of 256 px are 236 MB; writing their archive takes a tenth."""
    folder = tmp_path / "pictures"
    originals, digests = make(folder, 1200, 256)
    code = f"""
import resource, pathlib
from accel.fid import npz
folder, digests = pathlib.Path({str(folder)!r}), {digests!r}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
npz.write(folder.parent / "warm.npz", folder, digests, 40, 256, lambda: False)
before = peak()
npz.write(folder.parent / "x.npz", folder, digests, 1200, 256, lambda: False)
print(peak() - before)
"""
    done = forks.run(["-c", code])
    assert int(done.stdout) < 24e6, done.stderr
    array = np.load(tmp_path / "x.npz")["arr_0"]
    assert array.shape == (1200, 256, 256, 3)
    assert all(np.array_equal(array[i], originals[i % 8]) for i in range(0, 1200, 7))
    with zipfile.ZipFile(tmp_path / "x.npz") as archive, archive.open("arr_0.npy") as member:
        assert archive.testzip() is None and np.lib.format.read_magic(member) == (1, 0)
        assert np.lib.format.read_array_header_1_0(member) == ((1200, 256, 256, 3), False, np.dtype(np.uint8))
    assert npz.problem(tmp_path / "x.npz", 1200, 256) is None


def test_a_picture_that_was_changed_is_named_and_nothing_is_left(tmp_path):
    folder, path = tmp_path / "pictures", tmp_path / "x.npz"
    _, digests = make(folder, 8, 16)
    pictures = [folder / picture_name(number) for number in range(8)]
    whole = [picture.read_bytes() for picture in pictures]
    damaged = bytearray(whole[3])
    damaged[len(damaged) // 2] ^= 1
    for content in (whole[4], bytes(damaged), whole[3][:50], b""):
        pictures[3].write_bytes(content)
        with pytest.raises(UsageError, match="000003.png: .*delete it and start again"):
            npz.write(path, folder, digests, 8, 16, never)
    pictures[3].write_bytes(whole[3])
    with pytest.raises(Stopped, match="start again"):
        npz.write(path, folder, digests, 8, 16, lambda: True)
    assert [each.name for each in tmp_path.iterdir()] == ["pictures"]
    npz.write(path, folder, digests, 8, 16, never)
    assert np.load(path)["arr_0"].shape == (8, 16, 16, 3)


def test_an_archive_that_is_not_whole_is_seen(tmp_path):
    folder, path = tmp_path / "pictures", tmp_path / "x.npz"
    _, digests = make(folder, 8, 16)
    npz.write(path, folder, digests, 8, 16, never)
    whole = path.read_bytes()
    assert npz.problem(path, 8, 16) is None
    for content in (b"", whole[:100], whole[:-1], whole[: len(whole) // 2], whole[:500] + whole[600:], b"x" * 6000):
        path.write_bytes(content)
        assert npz.problem(path, 8, 16).startswith("is damaged ("), len(content)
    path.write_bytes(whole)
    assert npz.problem(path, 7, 16) == npz.problem(path, 8, 32) == "holds another array"
    np.savez(path, np.zeros((8, 16, 16, 3), np.float32))
    assert npz.problem(path, 8, 16) == "holds another array"
    np.savez(path, np.zeros((8, 16, 16, 3), np.uint8))
    assert npz.problem(path, 8, 16) is None
    np.savez(path, other=np.zeros((8, 16, 16, 3), np.uint8))
    assert "is damaged" in npz.problem(path, 8, 16)
    with zipfile.ZipFile(path, "w") as archive:  # as if its writer had been killed and the directory written
        archive.writestr("arr_0.npy", whole[whole.index(b"\x93NUMPY") :][:3000])
    assert npz.problem(path, 8, 16) == "holds another array"
