"""Sample pictures from a DiT with many processes, one a GPU: under torchrun, or under srun with one task a GPU.

An FID job that was stopped or killed resumes when the same command is given again.
"""

import signal
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from accel import start

if __name__ == "__main__":
    start.begin()

from accel.command_line import OneLineParser, add_arguments, options_from, refuse_given, user_errors
from accel.errors import STOPPED, record
from accel.options import FidOptions, GridOptions, Options
from accel.output import require_writable

if TYPE_CHECKING:  # torch is slow to import
    from accel.door.opening import Opened
    from accel.parallel.processes import Job
    from accel.progress import Stopwatch

STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # of queues, before they take a job's nodes away

EXAMPLES = """examples:
  torchrun --standalone --nproc_per_node=4 sample_ddp.py                            one grid, as sample.py makes it
  torchrun --standalone --nproc_per_node=4 sample_ddp.py --labels 207               one picture, all GPUs on it
  torchrun --standalone --nproc_per_node=4 sample_ddp.py --num-fid-samples 50000    a folder and an .npz for FID
"""


class RankParser(OneLineParser):
    """Rank 0 alone prints. The others exit later, since a launcher ends all ranks as soon as one exits."""

    def exit(self, status: int = 0, message: str | None = None) -> None:
        if not start.FIRST:
            time.sleep(2)
            message = None
        elif message:
            record(message.rstrip())
        super().exit(status, message)


def make_parser() -> RankParser:
    """The flags of a grid and of an FID job."""
    parser = RankParser(
        prog="sample_ddp.py",
        description="Sample class-conditional pictures from a diffusion transformer with many GPUs.",
        epilog=EXAMPLES,
    )
    add_arguments(parser, GridOptions, FidOptions, ranks=True)
    return parser


def chosen(args: Namespace) -> Options:
    """The options of the job that the flags name: an FID job where its pictures are given, else a grid."""
    if args.num_fid_samples is None:
        why = "is for an FID job, and this makes one grid at `output`; add `num_fid_samples`, or drop it"
        refuse_given(args, FidOptions, GridOptions, why)
        return options_from(args, GridOptions)
    why = "has no meaning with `num_fid_samples`, which draws its labels and fills a folder; drop one of them"
    refuse_given(args, GridOptions, FidOptions, why)
    return options_from(args, FidOptions)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        options = chosen(args)
    sample(options, parser)


def sample(options: Options, parser: OneLineParser) -> None:
    """This process's part of the job, under its launcher."""
    fid = isinstance(options, FidOptions)
    if fid:
        for number in STOP_SIGNALS:
            signal.signal(number, start.on_signal)  # there is nothing to record yet
    start.import_torch(options.device)  # after the cheap checks: it is slow
    from accel.parallel.processes import launched_job, own_device

    with launched_job(parser.prog, parser.worded) as job:
        if fid:
            job.stop_on_signals(*STOP_SIGNALS)
        options.device = own_device(job, options.device)
        (sample_for_fid if fid else sample_grid)(options, job)


def sample_grid(options: GridOptions, job: "Job") -> None:
    """The picture of sample.py. Each rank makes the pictures of some labels or, where there are fewer labels than
    ranks, a part of every network evaluation (--parallel). All ranks draw the same random stream."""
    from accel import door, loading
    from accel.kernels.linear import Tuner
    from accel.parallel.layouts import OFF
    from accel.parallel.placement import Placement

    outputs = [(one.output, one.output_type) for one in options.for_each_seed()]
    job.run_collectively(lambda: [require_writable(*output) for output in outputs], only=0)
    opened, watch = open_weights(options, job)
    groups, layout = job.run_collectively(lambda: door.layout_of(opened, job))
    job.open_collectives(opened.device)
    with watch.phase("load"):
        expected, tuner = Placement(layout or OFF, job.world), Tuner(share=job.from_rank_0)
        part = groups.part(layout)
        run = job.run_collectively(lambda: door.load(opened, expected, tuner=tuner, part=part))
    print(door.describe(opened.options, run, job.world))
    with watch.phase("plan"):
        run, placement = door.place(opened, run, groups, layout)

    grids = opened.options.for_each_seed()
    of_parts, of_all = door.decoders_of(opened, job.rank)
    door.warm_up(grids[0], run, watch, placement)
    if decoder := of_parts or of_all:
        decoder.load_ahead()
    sampled = [door.sample(grid, run, watch, placement, show=job.rank == 0) for grid in grids]
    del run
    loading.free_memory(opened.device)

    if job.rank == 0:  # a file that is being written is removed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    n = len(grids[0].labels)
    for grid, latents in zip(grids, sampled, strict=True):
        part = placement.own(job, latents, n)
        if of_parts:
            part = door.decode_part(of_parts, part, grid.image_size, watch)
        with watch.phase("gather"):
            whole = placement.gather(job, part, n)
        if job.rank == 0:
            door.save(grid, whole, watch, of_all)
    if job.rank == 0:
        print(f"{', '.join(grid.output for grid in grids)}: {watch} · {start.seconds():.2f} s since start")


def sample_for_fid(options: FidOptions, job: "Job") -> None:
    """The folder of pictures and its .npz."""
    from accel import door, fid
    from accel.door import fid as fid_door
    from accel.kernels.linear import Tuner

    job.run_collectively(lambda: fid_door.require_seeds(options, job.world), only=0)
    opened, watch = open_weights(options, job)
    options, order = opened.options, fid_door.order_of(opened.options)
    with fid.locked(order.folder, job):
        with watch.phase("load"):
            tuner = Tuner(fid.tuner_folders(order.folder), job.from_rank_0)
            run = job.run_collectively(lambda: door.load(opened, sizes=order.batch_sizes, tuner=tuner))
        print(door.describe(options, run, job.world))
        decoder = door.decoder_of(opened, captured=True)
        settings = job.run_collectively(lambda: fid_door.settings_of(opened, run, decoder, job.world), only=0)
        fid.run(order, job, settings, fid_door.maker_of(options, run, decoder, watch))


def open_weights(options: Options, job: "Job") -> tuple["Opened", "Stopwatch"]:
    """The weights on every rank. What any rank lacks is named before anything is sampled."""
    from accel import loading
    from accel.door import opening
    from accel.progress import Stopwatch

    device = job.run_collectively(lambda: loading.choose_device(options.device))
    watch = Stopwatch(device)
    with watch.phase("load"):
        weights = job.run_collectively(lambda: opening.checkpoint_of(options, device))
        # One download where the file system is shared, one a node where it is not.
        return job.run_in_turns(lambda: opening.open_weights(options, device, weights)), watch


if __name__ == "__main__":
    main()
