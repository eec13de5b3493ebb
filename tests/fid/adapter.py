"""sample_ddp.py for FID jobs around the Engine and Group of this branch, with the interface that accel.fid expects.

Once accel.engine.Engine and accel.parallel.processes.Job are here, jobs.py names sample_ddp.py and this file goes.
"""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import accel.errors
import accel.options

accel.options.UsageError = accel.errors.UsageError  # before anyone takes the other one
import accel.parallel.group as processes
import accel.vae
import sample_ddp
from accel import fid
from accel.engine import Engine
from pretrained_models.download import find_model

sample_ddp.UsageError = accel.errors.UsageError
processes.Stopped = accel.errors.Stopped


def hash_of(parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def digest_of_weights(name):
    state = find_model(name)
    return hash_of(
        part for key in sorted(state) if key != "pos_embed" for part in (key.encode(), state[key].numpy().tobytes())
    )


accel.vae.digest = lambda folder: hash_of(path.read_bytes() for path in sorted(folder.iterdir()))


class NewEngine:
    def __init__(self, engine):
        self.engine, self.plan = engine, engine.forecast
        self.checkpoint = SimpleNamespace(digest=lambda: digest_of_weights(engine.options.ckpt))

    def __getattr__(self, name):
        return getattr(self.engine, name)


class Job:
    def __init__(self, group):
        self.group, self.barriers = group, 0

    def __getattr__(self, name):
        return getattr(self.group, name)

    def barrier(self):
        self.barriers += 1
        self.group.barrier(f"barrier {self.barriers}")

    def all_gather_object(self, value):
        return self.group.tell("all_gather_object", value)

    def from_rank_0(self, make):
        return self.all_gather_object(make() if self.rank == 0 else None)[0]

    def run_collectively(self, work, only=None):
        return self.group.together("run_collectively", work, only)

    def counter(self, name, add=0):
        return self.store.add(name, add)


def sample_for_fid(options, group):
    job = Job(group)
    job.run_collectively(lambda: fid.check(options, job.world), only=0)
    with fid.locked(options, job):
        engine = NewEngine(job.run_collectively(lambda: Engine(options)))
        print(engine.describe())
        fid.run(engine, job)


if __name__ == "__main__":
    sample_ddp.sample_for_fid = sample_for_fid
    sample_ddp.main()
