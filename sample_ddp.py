"""Sample pictures from a DiT with many processes, one per GPU: under torchrun, or under
srun with one task per GPU.

An FID job that was stopped or killed resumes when the same command is given again.
"""

import signal
from argparse import Namespace
from pathlib import Path

from accel import launch, signals

if __name__ == "__main__":
    launch.begin()

from accel.cli import (
    OneLineParser,
    RankParser,
    add_arguments,
    job_from,
    refuse_given,
    user_errors,
)
from accel.config import FidJob, Grid, Job
from accel.ranks import Ranks, require_device

# Of queues, before they take a job's nodes away; SIGHUP of a terminal that is closed.
STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
# Parameters that may differ between the nodes of a job: paths and devices.
OF_NODE = {"ckpt", "guide", "vae", "latent_stats", "output", "sample_dir", "device"}

EXAMPLES = """examples:
  torchrun --nproc_per_node=4 sample_ddp.py                          the grid of sample.py
  torchrun --nproc_per_node=4 sample_ddp.py --labels 207             one picture by all GPUs
  torchrun --nproc_per_node=4 sample_ddp.py --num-fid-samples 50000  a folder and .npz for FID
"""


def make_parser() -> RankParser:
    parser = RankParser(
        prog="sample_ddp.py",
        description="Sample class-conditional pictures from a diffusion transformer by many GPUs.",
        epilog=EXAMPLES,
    )
    add_arguments(parser, Grid, FidJob, ranks=True)
    return parser


def chosen(args: Namespace) -> Job:
    """Return an FID job if --num-fid-samples is given, else a grid."""
    if args.num_fid_samples is None:
        reason = (
            "is for an FID job, and this makes one grid at `output`; add `num_fid_samples`, or "
            "drop it"
        )
        refuse_given(args, FidJob, Grid, reason)
        return job_from(args, Grid)
    reason = (
        "has no meaning with `num_fid_samples`, which draws its labels and fills a folder; drop "
        "one of them"
    )
    refuse_given(args, Grid, FidJob, reason)
    return job_from(args, FidJob)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        job = chosen(args)
    sample(job, parser)


def sample(job: Job, parser: OneLineParser) -> None:
    """Run this rank's part of a job."""
    is_fid_job = isinstance(job, FidJob)
    if is_fid_job:
        signals.end_on(STOP_SIGNALS)  # there is nothing to record yet
    with user_errors(parser):
        require_device(job.config.device)
        launch.import_torch(job.config.device)  # after the cheap checks: it is slow
        from accel.ranks.launched import launched_ranks

    with launched_ranks(parser.prog, parser.worded) as ranks:
        if is_fid_job:
            ranks.stop_on_signals(*STOP_SIGNALS)
        options = {**vars(job.config), **vars(job)}
        alike = options.keys() - OF_NODE - {"config"}
        ranks.require_equal({f"`{name}`": options[name] for name in sorted(alike)})
        if is_fid_job:
            sample_for_fid(job, ranks)
        else:
            sample_grid(job, ranks)


def sample_grid(grid: Grid, ranks: Ranks) -> None:
    """Make the picture of sample.py."""
    from accel.grid import make_grid

    ranks.run_collectively(grid.require_outputs, only=0)
    make_grid(grid, ranks)


def sample_for_fid(job: FidJob, ranks: Ranks) -> None:
    """Make the folder of pictures and its .npz."""
    from accel import fid
    from accel.fid.job import order_of, record_of, require_seeds
    from accel.kernels.linear import Tuner
    from accel.opening import open_on_ranks
    from accel.pipeline import Pipeline

    ranks.run_collectively(lambda: require_seeds(job, ranks.world), only=0)
    opened, watch = open_on_ranks(job.config, ranks)
    job = job.filled(opened.config, opened.fit)
    order = order_of(job, opened)
    with fid.locked(order.folder, ranks):
        with watch.phase("load"):
            tuner = Tuner(fid.tuner_folders(order.folder), ranks.from_rank_0)
            pipeline = ranks.run_collectively(
                lambda: Pipeline.load(
                    opened,
                    order.batch_sizes,
                    tuner=tuner,
                    many_pictures=True,
                    too_large=job.too_large,
                )
            )
        print(job.describe(pipeline.machine, ranks.world))
        record = ranks.run_collectively(lambda: record_of(job, opened, pipeline, ranks.world))
        fid.run(order, ranks, record, pipeline, watch)


def create_npz_from_sample_folder(sample_dir: str | Path, num: int = 50_000) -> str:
    """Write the first `num` pictures of a folder, 000000.png …, as <sample_dir>.npz.

    Return its path. A script of upstream's imports this name; an FID job writes its own
    archive. Raises UsageError for a picture that is missing, damaged or of another size.
    """
    from accel.fid.npz import create_npz

    return str(create_npz(Path(sample_dir), num))


if __name__ == "__main__":
    main()
