"""--balanced-labels: as many pictures of each class, and nothing else changes."""

import json
from types import SimpleNamespace

import pytest
import torch

from accel.errors import USAGE, UsageError
from accel.fid.folder import Batches
from accel.fid.noise import PictureNoise, UpstreamNoise
from accel.options import DistributedOptions


@pytest.mark.parametrize("kind", [UpstreamNoise, PictureNoise])
@pytest.mark.parametrize("world", [1, 3])
def test_as_many_of_each_class_from_the_same_noise(kind, world):
    options = dict(model="DiT-Demo/2", num_fid_samples=24, per_proc_batch_size=4, seed=3)
    labels, noise = {}, {}
    for balanced in (False, True):
        resolved = DistributedOptions(
            **options, balanced_labels=balanced, world_independent_noise=kind is PictureNoise
        ).resolve()
        network = SimpleNamespace(in_channels=4)
        engine = SimpleNamespace(options=resolved, device=torch.device("cpu"), network=network)  # all that is read
        for rank in range(world):
            batches = Batches(resolved, rank, world)
            source = kind(engine, batches)
            for batch in batches.left(set()):
                z, y, draw = source.batch(batch, None)
                step = draw() if draw else torch.randn(8, 4, 16, 16)
                for row, number in enumerate(batches.pictures(batch)):
                    labels[balanced, number] = int(y[row])
                    noise[balanced, number] = torch.stack([z[row], step[row]])
    assert all(labels[True, number] == number % 8 for number in range(24))
    assert any(labels[False, number] != number % 8 for number in range(24))
    assert all(torch.equal(noise[True, number], noise[False, number]) for number in range(24))


def test_it_is_recorded_with_the_job(here, tmp_path):
    common = ["--model", "DiT-Demo/2", "--device", "cpu", "--num-sampling-steps", 2, "--num-fid-samples", 8]
    common += ["--per-proc-batch-size", 4, "--sample-dir", tmp_path]
    assert here("sample_ddp.py", *common, "--balanced-labels").returncode == 0
    (settings,) = tmp_path.glob("*/.job/settings.json")
    assert json.loads(settings.read_text())["--balanced-labels"] is True
    done = here("sample_ddp.py", *common)
    assert done.returncode == USAGE and "--balanced-labels False" in done.stderr and "begun with True" in done.stderr


def test_a_grid_has_the_labels_that_it_is_given():
    with pytest.raises(UsageError, match="--balanced-labels: is for the folder of an FID job"):
        DistributedOptions(balanced_labels=True).resolve()
