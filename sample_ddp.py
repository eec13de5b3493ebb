"""Sample pictures from a DiT with many processes, one a GPU: under torchrun, or under srun with one task a GPU.

An FID job that was stopped or killed resumes when the same command is given again.
"""

import os
import signal
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from accel import start
from accel.command_line import OneLineParser, add_arguments, options_from, refuse_given, user_errors
from accel.errors import STOPPED, say_last
from accel.options import FidOptions, GridOptions, Options
from accel.output import require_writable

if TYPE_CHECKING:  # torch is slow to import
    from accel.door import Opened
    from accel.parallel.processes import Job
    from accel.progress import Stopwatch

STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # of queues, before they take a job's nodes away
RANK = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
FIRST = not RANK.lstrip("0").isdecimal()  # rank 0, the only process, or one whose number will be refused

EXAMPLES = """examples:
  torchrun --standalone --nproc_per_node=4 sample_ddp.py                            one grid, as sample.py makes it
  torchrun --standalone --nproc_per_node=4 sample_ddp.py --labels 207               one picture, all GPUs on it
  torchrun --standalone --nproc_per_node=4 sample_ddp.py --num-fid-samples 50000    a folder and an .npz for FID
"""


class RankParser(OneLineParser):
    """Rank 0 alone prints. The others exit later, since a launcher ends all ranks as soon as one exits."""

    def exit(self, status: int = 0, message: str | None = None) -> None:
        if not FIRST:
            time.sleep(2)
            message = None
        say_last((message or "").rstrip())
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
            signal.signal(number, stop_at_once)
    start.import_torch(options.device)  # after the cheap checks: it is slow
    from accel.parallel.processes import launched_job, own_device

    with launched_job(parser.prog, parser.worded) as job:
        if fid:
            job.stop_on_signals(*STOP_SIGNALS)
        options.device = own_device(job, options.device)
        (sample_for_fid if fid else sample_grid)(options, job)


def stop_at_once(*_) -> None:
    """A signal before the ranks have connected: there is nothing to record."""
    if FIRST:
        os.write(2, b"sample_ddp.py: stopped before anything was begun; start again with the same command\n")
    os._exit(STOPPED)


def sample_grid(options: GridOptions, job: "Job") -> None:
    """The picture of sample.py. Each rank makes the pictures of some labels or, where there are fewer labels than
    ranks, a part of every network evaluation (--parallel). All ranks draw the same random stream."""
    from accel import door, loading
    from accel.parallel.planner import share_evaluations
    from accel.parallel.rows import gather_rows, share

    outputs = [(one.output, one.output_type) for one in options.for_each_seed()]
    job.run_collectively(lambda: [require_writable(*output) for output in outputs], only=0)
    opened, watch = open_weights(options, job)
    options, n = opened.options, len(opened.options.labels)
    evaluation, groups, layout = job.run_collectively(lambda: door.layout_of(opened, job))
    job.open_collectives(options.device)
    with watch.phase("load"):
        batch, part = door.share_of(options, job.world, layout), groups.part(layout)
        run = job.run_collectively(lambda: door.load(opened, batch, (None, job.from_rank_0), part))
    print(door.describe(options, run, job.world))
    with watch.phase("plan"):
        network, layout = share_evaluations(run.network, evaluation, groups, layout)
        run = run._replace(network=network)
        del network

    busy, shared = layout.busy(job.world), layout.ranks > 1
    mine = share(n, busy, job.rank)  # the pictures of this rank
    rows = slice(None) if shared and job.rank < busy else mine
    decoder = door.decoder_of(opened) if options.decode == "each" or job.rank == 0 else None
    each = options.for_each_seed()
    door.warm_up(each[0], run, watch, rows)
    if decoder:
        decoder.load_ahead()
    sampled = [door.sample(one, run, watch, rows, show=job.rank == 0) for one in each]
    del run
    loading.free_memory(opened.device)

    into_pictures, side = options.into_pictures and options.decode == "each", options.image_size
    if job.rank == 0:  # a file that is being written is removed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    for one, part in zip(each, sampled, strict=True):
        if shared:
            job.assert_identical(part, busy)
            part = part[mine]
        if into_pictures:
            part = door.decode(decoder, part, watch) if len(part) else part.new_zeros(0, 3, side, side)
        with watch.phase("gather"):
            whole = gather_rows(job, part, n, busy)
        if job.rank == 0:
            door.save(one, whole, watch, None if into_pictures else decoder)
    if job.rank == 0:
        print(f"{', '.join(one.output for one in each)}: {watch} · {start.seconds():.2f} s since start")


def sample_for_fid(options: FidOptions, job: "Job") -> None:
    """The folder of pictures and its .npz."""
    from accel import door, fid
    from accel.door import fid as fid_door

    job.run_collectively(lambda: fid_door.require_seeds(options, job.world), only=0)
    opened, watch = open_weights(options, job)
    options, order = opened.options, fid_door.order_of(opened.options)
    with fid.locked(order.folder, job):
        with watch.phase("load"):
            batch, tuning = (order.largest_batch, order.copies), (fid.tuner_folders(order.folder), job.from_rank_0)
            run = job.run_collectively(lambda: door.load(opened, batch, tuning))
        print(door.describe(options, run, job.world))
        decoder = door.decoder_of(opened, captured=True)
        settings = job.run_collectively(lambda: fid_door.settings_of(opened, run, decoder, job.world), only=0)
        fid.run(order, job, settings, fid_door.maker_of(options, run, decoder, watch))


def open_weights(options: Options, job: "Job") -> tuple["Opened", "Stopwatch"]:
    """The weights on every rank. What any rank lacks is named before anything is sampled."""
    from accel import door, loading
    from accel.progress import Stopwatch

    device = job.run_collectively(lambda: loading.choose_device(options.device))
    watch = Stopwatch(device)
    with watch.phase("load"):
        weights = job.run_collectively(lambda: door.checkpoint_of(options, device))
        # One download where the file system is shared, one a node where it is not.
        return job.run_in_turns(lambda: door.open_weights(options, device, weights)), watch


if __name__ == "__main__":
    main()
