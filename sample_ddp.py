"""Sample pictures from a DiT with many processes, one a GPU: under torchrun, or under
srun with one task a GPU.

An FID job that was stopped or killed resumes when the same command is given again.
"""

import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from accel import start

if __name__ == "__main__":
    start.begin()

from accel.command_line import OneLineParser, add_arguments, refuse_given, request_from, user_errors
from accel.errors import STOPPED, record
from accel.output import require_writable
from accel.request import FidRequest, GridRequest, Request

if TYPE_CHECKING:  # torch is slow to import
    from accel.parallel.processes import Job
    from accel.progress import Stopwatch
    from accel.settings import Settings

STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # of queues, before they take a job's nodes away
# Parameters that may differ between the nodes of a job: paths and devices.
OF_NODE = {"ckpt", "vae", "latent_stats", "forecast_plan", "output", "sample_dir", "device"}

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
        if not start.FIRST:
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
        why = (
            "is for an FID job, and this makes one grid at `output`; add `num_fid_samples`, or "
            "drop it"
        )
        refuse_given(args, FidRequest, GridRequest, why)
        return request_from(args, GridRequest)
    why = (
        "has no meaning with `num_fid_samples`, which draws its labels and fills a folder; drop "
        "one of them"
    )
    refuse_given(args, GridRequest, FidRequest, why)
    return request_from(args, FidRequest)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        request = chosen(args)
    sample(request, parser)


def sample(request: Request, parser: OneLineParser) -> None:
    """Run this rank's part of a job."""
    fid = isinstance(request, FidRequest)
    if fid:
        for number in STOP_SIGNALS:
            signal.signal(number, start.on_signal)  # there is nothing to record yet
    with user_errors(parser):
        start.import_torch(request.device)  # after the cheap checks: it is slow
        from accel.parallel.processes import launched_job

    with launched_job(parser.prog, parser.worded) as job:
        if fid:
            job.stop_on_signals(*STOP_SIGNALS)
        job.require_equal(
            {f"`{name}`": value for name, value in vars(request).items() if name not in OF_NODE}
        )
        (sample_for_fid if fid else sample_grid)(request, job)


def sample_grid(request: GridRequest, job: "Job") -> None:
    """Make the picture of sample.py. Each rank makes the pictures of some labels or, if
    there are fewer labels than ranks, a part of every network evaluation (--parallel).
    All ranks draw the same random stream.
    """
    from accel import door, loading
    from accel.kernels.linear import Tuner
    from accel.parallel.layouts import OFF
    from accel.parallel.placement import Placement

    job.run_collectively(
        lambda: [require_writable(path, request.output_type) for path in request.outputs], only=0
    )
    settings, watch = open_weights(request, job)
    groups, layout = job.run_collectively(lambda: door.layout_of(settings, job))
    job.open_collectives(settings.device)
    with watch.phase("load"):
        expected = Placement(layout or OFF, job.world)
        tuner = Tuner(share=job.from_rank_0)
        part = groups.part(layout)
        run = job.run_collectively(lambda: door.load(settings, expected, tuner=tuner, part=part))
    print(door.describe(settings, run, job.world))
    with watch.phase("plan"):
        run, placement = door.place(settings, run, groups, layout)

    first = job.rank == 0
    n = len(settings.labels)
    decoder = door.decoder_of(settings)
    door.warm_up(settings, run, watch, placement)
    if decoder:
        decoder.load_ahead()
    sampled = door.sample(settings, run, watch, placement, show=first)
    del run
    loading.free_memory(settings.device)

    if first:  # a file that is being written is removed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    for path, latents in zip(settings.outputs, sampled, strict=True):
        own = placement.own(job, latents, n)
        if decoder:
            own = door.decode(decoder, own, watch)
        with watch.phase("gather"):
            whole = placement.gather(job, own, n)
        if first:
            door.save(settings, path, whole, watch)
    if first:
        print(f"{', '.join(settings.outputs)}: {watch} · {start.seconds():.2f} s since start")


def sample_for_fid(request: FidRequest, job: "Job") -> None:
    """Make the folder of pictures and its .npz."""
    from accel import door, fid
    from accel.door import fid as fid_door
    from accel.kernels.linear import Tuner

    job.run_collectively(lambda: fid_door.require_seeds(request, job.world), only=0)
    settings, watch = open_weights(request, job)
    order = fid_door.order_of(settings)
    with fid.locked(order.folder, job):
        with watch.phase("load"):
            tuner = Tuner(fid.tuner_folders(order.folder), job.from_rank_0)
            run = job.run_collectively(
                lambda: door.load(settings, sizes=order.batch_sizes, tuner=tuner)
            )
        print(door.describe(settings, run, job.world))
        decoder = door.decoder_of(settings, captured=True)
        record = job.run_collectively(
            lambda: fid_door.settings_of(settings, run, decoder, job.world)
        )
        maker = fid.Maker(run.denoise, decoder.decode, run.device, watch, run.process.draws)
        fid.run(order, job, record, maker)


def create_npz_from_sample_folder(sample_dir: str | Path, num: int = 50_000) -> str:
    """Write the first `num` pictures of a folder, 000000.png …, as <sample_dir>.npz.

    Return its path. A script of upstream's imports this name; an FID job writes its own
    archive. Raises UsageError for a picture that is missing, damaged or of another size.
    """
    from accel.fid.npz import create_npz

    return str(create_npz(Path(sample_dir), num))


def open_weights(request: Request, job: "Job") -> tuple["Settings", "Stopwatch"]:
    """Open the weights on every rank. Raises UsageError on all ranks if one lacks a file."""
    from accel import loading
    from accel.door import opening
    from accel.parallel.processes import own_device
    from accel.progress import Stopwatch

    name = own_device(job, request.device)
    device = job.run_collectively(lambda: loading.choose_device(name))
    watch = Stopwatch(device)
    with watch.phase("load"):
        weights = job.run_collectively(lambda: opening.checkpoint_of(request, device))
        # One download where the file system is shared, one a node where it is not.
        return job.run_in_turns(lambda: opening.open_weights(request, device, weights)), watch


if __name__ == "__main__":
    main()
