"""Sample pictures from a DiT with many processes, one a GPU: under torchrun, or under
srun with one task a GPU.

An FID job that was stopped or killed resumes when the same command is given again.
"""

import signal
import time
from argparse import Namespace
from pathlib import Path

from accel import launch, signals

if __name__ == "__main__":
    launch.begin()

from accel.command_line import OneLineParser, add_arguments, refuse_given, request_from, user_errors
from accel.driver import import_torch
from accel.errors import record
from accel.output import require_writable
from accel.ranks import Ranks, require_device
from accel.request import FidRequest, GridRequest, Request

STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # of queues, before they take a job's nodes away
# Parameters that may differ between the nodes of a job: paths and devices.
OF_NODE = {"ckpt", "vae", "latent_stats", "output", "sample_dir", "device"}

EXAMPLES = """examples:
  torchrun --nproc_per_node=4 sample_ddp.py                          the grid of sample.py
  torchrun --nproc_per_node=4 sample_ddp.py --labels 207             one picture by all GPUs
  torchrun --nproc_per_node=4 sample_ddp.py --num-fid-samples 50000  a folder and .npz for FID
"""


class RankParser(OneLineParser):
    """Rank 0 alone prints. The others exit later, since a launcher ends all ranks as soon
    as one exits.
    """

    samples = True

    def exit(self, status: int = 0, message: str | None = None) -> None:
        if not signals.IS_FIRST_RANK:
            time.sleep(2)
            message = None
        elif message:
            record(message.rstrip())
        super().exit(status, message)


def make_parser() -> RankParser:
    parser = RankParser(
        prog="sample_ddp.py",
        description="Sample class-conditional pictures from a diffusion transformer by many GPUs.",
        epilog=EXAMPLES,
    )
    add_arguments(parser, GridRequest, FidRequest, ranks=True)
    return parser


def chosen(args: Namespace) -> Request:
    """Return an FID job's request if --num-fid-samples is given, else a grid's."""
    if args.num_fid_samples is None:
        reason = (
            "is for an FID job, and this makes one grid at `output`; add `num_fid_samples`, or "
            "drop it"
        )
        refuse_given(args, FidRequest, GridRequest, reason)
        return request_from(args, GridRequest)
    reason = (
        "has no meaning with `num_fid_samples`, which draws its labels and fills a folder; drop "
        "one of them"
    )
    refuse_given(args, GridRequest, FidRequest, reason)
    return request_from(args, FidRequest)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        request = chosen(args)
        require_device(request.device)
    sample(request, parser)


def sample(request: Request, parser: OneLineParser) -> None:
    """Run this rank's part of a job."""
    is_fid_job = isinstance(request, FidRequest)
    if is_fid_job:
        for number in STOP_SIGNALS:
            signal.signal(number, signals.on_signal)  # there is nothing to record yet
    with user_errors(parser):
        import_torch(request.device)  # after the cheap checks: it is slow
        from accel.ranks.launched import launched_ranks

    with launched_ranks(parser.prog, parser.worded) as ranks:
        if is_fid_job:
            ranks.stop_on_signals(*STOP_SIGNALS)
        fields = vars(request).items()
        ranks.require_equal({f"`{name}`": value for name, value in fields if name not in OF_NODE})
        if is_fid_job:
            sample_for_fid(request, ranks)
        else:
            sample_grid(request, ranks)


def require_outputs(request: GridRequest) -> None:
    """Raise UsageError unless every output of a grid can be written."""
    for path in request.outputs:
        require_writable(path, request.output_type)


def sample_grid(request: GridRequest, ranks: Ranks) -> None:
    """Make the picture of sample.py."""
    from accel.grid import make_grid

    ranks.run_collectively(lambda: require_outputs(request), only=0)
    make_grid(request, ranks)


def sample_for_fid(request: FidRequest, ranks: Ranks) -> None:
    """Make the folder of pictures and its .npz."""
    from accel import door, fid
    from accel.door import fid as fid_door
    from accel.door.opening import open_on_ranks
    from accel.kernels.linear import Tuner

    ranks.run_collectively(lambda: fid_door.require_seeds(request, ranks.world), only=0)
    settings, watch = open_on_ranks(request, ranks)
    order = fid_door.order_of(settings)
    with fid.locked(order.folder, ranks):
        with watch.phase("load"):
            tuner = Tuner(fid.tuner_folders(order.folder), ranks.from_rank_0)
            run = ranks.run_collectively(
                lambda: door.load(settings, sizes=order.batch_sizes, tuner=tuner)
            )
        print(door.describe(settings, run, ranks.world))
        decoder = door.decoder_of(settings, captured=True)
        record = ranks.run_collectively(
            lambda: fid_door.settings_of(settings, run, decoder, ranks.world)
        )
        maker = fid.Maker(run.denoise, decoder.decode, run.device, watch, run.process.draws)
        fid.run(order, ranks, record, maker)


def create_npz_from_sample_folder(sample_dir: str | Path, num: int = 50_000) -> str:
    """Write the first `num` pictures of a folder, 000000.png …, as <sample_dir>.npz.

    Return its path. A script of upstream's imports this name; an FID job writes its own
    archive. Raises UsageError for a picture that is missing, damaged or of another size.
    """
    from accel.fid.npz import create_npz

    return str(create_npz(Path(sample_dir), num))


if __name__ == "__main__":
    main()
