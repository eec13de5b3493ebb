"""Pictures and batches of an FID job."""

import numpy as np
import pytest
from orders import order

from accel import fid
from accel.errors import UsageError
from accel.fid.folder import Batches, picture_name, read_picture, write_picture


@pytest.mark.parametrize(
    "wanted, n, world, independent",
    [(7, 3, 2, False), (50, 4, 3, False), (1, 8, 4, False), (7, 3, 2, True), (22, 2, 5, True), (3, 8, 4, True)],
)
def test_batches_cover_every_picture_once(wanted, n, world, independent):
    chosen = order(count=wanted, batch_size=n, independent=independent)
    ranks = [Batches(chosen, rank, world) for rank in range(world)]
    made = sorted(number for rank in ranks for batch in rank.left(set()) for number in rank.pictures(batch))
    assert made == list(range(ranks[0].total))
    assert ranks[0].total == (wanted if independent else -(-wanted // (n * world)) * n * world)
    assert chosen.batch_sizes == {len(rank.pictures(batch)) for rank in ranks for batch in rank.left(set())}
    done = {0, 2}
    assert {batch for rank in ranks for batch in rank.left(done)} == set(range(ranks[0].count)) - done


def test_a_picture_is_read_as_it_was_written_or_not_at_all(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    paths = [tmp_path / picture_name(number) for number in (0, 1)]
    own, other = (write_picture(path, pixels // (number + 1)) for number, path in enumerate(paths))
    assert own != other and np.array_equal(read_picture(paths[0], {own}), pixels)
    assert np.array_equal(read_picture(paths[0], {other, own}), pixels)
    whole = paths[0].read_bytes()
    for content in (paths[1].read_bytes(), whole[:-20], b"", whole + b"\0"):
        paths[0].write_bytes(content)
        with pytest.raises(UsageError, match="000000.png: is unreadable or was changed; delete it and start again"):
            read_picture(paths[0], {own})
    paths[0].unlink()
    with pytest.raises(UsageError, match="000000.png: is unreadable or was changed"):
        read_picture(paths[0], {own})


def test_the_autotuner_goes_by_the_jobs_own_choices_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fid.tuner_folders(tmp_path / "job") == [tmp_path / "job" / ".job", tmp_path / "dit"]
