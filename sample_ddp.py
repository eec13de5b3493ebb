"""Sample pictures from a DiT on several GPUs, under torchrun, or srun with one task per GPU.

An FID job that was stopped or killed resumes with the same command.
"""

import re
import signal
from pathlib import Path

from accel import launch

if __name__ == "__main__":
    launch.begin()

from accel.cli import OneLineParser, RankParser, add_arguments, request_from, user_errors
from accel.config.options import FID, GRID
from accel.config.rules import Request
from accel.errors import UsageError
from accel.io.output import require_outputs

# Queues send SIGTERM or SIGUSR1 before preemption; a closed terminal sends SIGHUP.
STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
# Options that may differ between nodes: paths and the device.
NODE_OPTIONS = {
    "config",
    "ckpt",
    "guide",
    "vae",
    "latent_stats",
    "like",
    "output",
    "sample_dir",
    "device",
}

EXAMPLES = """examples:
  torchrun --nproc_per_node=4 sample_ddp.py                          the grid of sample.py
  torchrun --nproc_per_node=4 sample_ddp.py --labels 207             one picture by all GPUs
  torchrun --nproc_per_node=4 sample_ddp.py --num-fid-samples 50000  a folder and .npz for FID
"""


def make_parser() -> RankParser:
    parser = RankParser(
        description="Sample class-conditional pictures from a diffusion transformer by many GPUs.",
        epilog=EXAMPLES,
    )
    add_arguments(parser, GRID, FID, ranks=True)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        request = request_from(args)
    sample(request, parser)


def sample(request: Request, parser: OneLineParser) -> None:
    """Run an FID job if its number of pictures is given, else sample a grid, on this rank."""
    values = request.values
    is_fid_job = request.options.job == FID
    if is_fid_job:
        launch.end_on(STOP_SIGNALS)  # exit at once: no work to save yet
    with user_errors(parser):
        device = values.get("device")
        if device and not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
            raise UsageError(
                "ranks sample on cuda or cpu", "choose one", parameter="device", value=device
            )
        launch.import_torch(device)  # slow, so after the cheap checks
        from accel.distributed.launched import launched_ranks

    with launched_ranks(parser.prog, parser.worded) as ranks:
        if is_fid_job:
            ranks.stop_on_signals(*STOP_SIGNALS)
        compared = sorted({*values} - NODE_OPTIONS)
        ranks.require_equal({f"`{name}`": values[name] for name in compared})
        if is_fid_job:
            from accel.jobs.fid.job import make_folder

            return make_folder(request, ranks)
        from accel.jobs.grid import make_grid

        ranks.run_collectively(lambda: require_outputs(values), only=0)
        make_grid(request, ranks)


def create_npz_from_sample_folder(sample_dir: str | Path, num: int = 50_000) -> str:
    """Write the first `num` pictures of a folder, 000000.png …, to <sample_dir>.npz and return its
    path. Part of upstream's API; an FID job writes its archive itself. Raises UsageError for a
    picture that is missing, corrupt or of another size.
    """
    from accel.jobs.fid.npz import create_npz

    return str(create_npz(Path(sample_dir), num))


if __name__ == "__main__":
    main()
