"""The archive that FID evaluators read."""

import os
import zipfile

import forks
import numpy as np
import pytest

from accel.errors import Stopped, UsageError
from accel.fid.folder import picture_name, write_picture
from accel.fid.npz import Archive


def make(folder, count, size):
    """`count` pictures, eight of them different; returns their pixels and digests."""
    (folder / ".job").mkdir(parents=True)
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
from accel.fid.npz import Archive
folder, digests = pathlib.Path({str(folder)!r}), {digests!r}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
Archive(folder.parent / "warm.npz", folder, digests, 40, 256).write(lambda: False)
before = peak()
archive = Archive(folder.parent / "x.npz", folder, digests, 1200, 256)
archive.write(lambda: False)
assert archive.problem() is None
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
    assert Archive(tmp_path / "x.npz", folder, digests, 1200, 256).problem() is None


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
            Archive(path, folder, digests, 8, 16).write(never)
    pictures[3].write_bytes(whole[3])
    with pytest.raises(Stopped, match="start again"):
        Archive(path, folder, digests, 8, 16).write(lambda: True)
    assert [each.name for each in tmp_path.iterdir()] == ["pictures"]
    Archive(path, folder, digests, 8, 16).write(never)
    assert np.load(path)["arr_0"].shape == (8, 16, 16, 3)


def test_an_archive_that_is_not_as_it_was_written_is_seen(tmp_path):
    folder, path = tmp_path / "pictures", tmp_path / "x.npz"
    originals, digests = make(folder, 19, 16)  # no multiple of what is hashed at a time
    archive = Archive(path, folder, digests, 19, 16)
    archive.write(never)
    whole = path.read_bytes()
    assert archive.problem() is None

    def overwritten(start, length=64):
        return whole[:start] + bytes(byte ^ 0x55 for byte in whole[start : start + length]) + whole[start + length :]

    places = [overwritten(start, 1) for start in (0, 60, 200, len(whole) // 2, len(whole) - 300, len(whole) - 1)]
    cuts = [b"", whole[:100], whole[:-1], whole[:500] + whole[600:], whole + b"x"]
    for content in (*places, *cuts):
        path.write_bytes(content)
        assert archive.problem() == "is not as it was written, or of other pictures", len(content)
    for others in (dict(arr_0=np.zeros((19, 16, 16, 3), np.uint8)), dict(other=np.stack([originals[0]] * 19))):
        np.savez(path, **others)
        assert archive.problem() == "is not as it was written, or of other pictures"
    path.write_bytes(whole)
    os.utime(path, (1, 1))
    assert archive.problem() is None  # what it holds counts, not when it was written
    path.unlink()
    os.mkfifo(path)
    assert "is a folder, a pipe" in archive.problem()


def test_an_archive_of_other_pictures_is_seen(tmp_path):
    """A picture that was made again, by kernels that round otherwise, has another digest."""
    folder, path = tmp_path / "pictures", tmp_path / "x.npz"
    originals, digests = make(folder, 8, 16)
    Archive(path, folder, digests, 8, 16).write(never)
    digests[3] = digests[3] | {write_picture(folder / picture_name(3), 255 - originals[3])}
    again = Archive(path, folder, digests, 8, 16)
    assert again.problem() == "is not as it was written, or of other pictures"
    again.write(never)
    assert again.problem() is None and np.array_equal(np.load(path)["arr_0"][3], 255 - originals[3])
    assert "other pictures" in Archive(path, folder, digests, 7, 16).problem()


@pytest.mark.parametrize(
    "content",
    [None, b"{", b"[]", b"{}", b"\xff\xfe", b'{"start": "0"}', b'{"start": -1}', b'{"start": 1e9}',
     b'{"start": 99999999999999999999}', b'{"start": 1099511627776}', "fifo"],
)  # fmt: skip
def test_a_record_that_is_not_one_makes_it_written_again(tmp_path, content):
    folder, path = tmp_path / "pictures", tmp_path / "x.npz"
    _, digests = make(folder, 8, 16)
    archive = Archive(path, folder, digests, 8, 16)
    archive.write(never)
    archive.record.unlink()
    if content == "fifo":
        os.mkfifo(archive.record)
    elif content is not None:
        archive.record.write_bytes(content)
    assert archive.problem() and "\n" not in archive.problem()
    if content == "fifo":
        archive.record.unlink()
    archive.write(never)
    assert archive.problem() is None and archive.record.is_file()
