"""Sample pictures from a DiT with many processes, one per GPU: under torchrun, or under
srun with one task per GPU.

An FID job that was stopped or killed resumes when the same command is given again.
"""

import signal
from pathlib import Path

from accel import launch
from accel.config import rules
from accel.launch import signals

if __name__ == "__main__":
    launch.begin()

from accel.cli import OneLineParser, RankParser, add_arguments, options_from, user_errors
from accel.config.options import FID, GRID, Options
from accel.distributed import require_device
from accel.io.output import require_outputs

# Of queues, before they take a job's nodes away; SIGHUP of a terminal that is closed.
STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
# Parameters that may differ between the nodes of a job: paths and devices.
NODE_OPTIONS = {"config", "ckpt", "guide", "vae", "latent_stats", "output", "sample_dir", "device"}

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
    add_arguments(parser, GRID, FID, ranks=True)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        options = options_from(args)
    sample(options, parser)


def sample(options: Options, parser: OneLineParser) -> None:
    """Run this rank's part of a job: an FID job if a number of pictures is given, else a grid."""
    is_fid_job = options.job == FID
    if is_fid_job:
        signals.end_on(STOP_SIGNALS)  # there is nothing to record yet
    with user_errors(parser):
        require_device(options.get("device"))
        launch.import_torch(options.get("device"))  # after the cheap checks: it is slow
        from accel.distributed.launched import launched_ranks

    with launched_ranks(parser.prog, parser.worded) as ranks:
        if is_fid_job:
            ranks.stop_on_signals(*STOP_SIGNALS)
        values = rules.merged(options, rules.read_configuration(options))
        compared = sorted({*values} - NODE_OPTIONS)
        ranks.require_equal({f"`{name}`": values[name] for name in compared})
        if is_fid_job:
            from accel.jobs.fid.job import make_folder

            return make_folder(options, ranks)
        from accel.jobs.grid import make_grid

        ranks.run_collectively(lambda: require_outputs(options), only=0)
        make_grid(options, ranks)


def create_npz_from_sample_folder(sample_dir: str | Path, num: int = 50_000) -> str:
    """Write the first `num` pictures of a folder, 000000.png …, as <sample_dir>.npz.

    Return its path. A script of upstream's imports this name; an FID job writes its own
    archive. Raises UsageError for a picture that is missing, damaged or of another size.
    """
    from accel.jobs.fid.npz import create_npz

    return str(create_npz(Path(sample_dir), num))


if __name__ == "__main__":
    main()
