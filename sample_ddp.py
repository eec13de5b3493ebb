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
    from accel.engine import Engine
    from accel.parallel.layouts import Layout
    from accel.parallel.processes import Job
    from accel.weights.checkpoint import Checkpoint

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
    from accel.parallel.processes import launched_job  # after the cheap checks: torch is slow to import

    with launched_job(parser.prog, parser.worded) as job:
        if fid:
            job.stop_on_signals(*STOP_SIGNALS)
        options.device = job.device(options.device)
        (sample_for_fid if fid else sample_grid)(options, job)


def stop_at_once(*_) -> None:
    """A signal before the ranks have connected: there is nothing to record."""
    if FIRST:
        os.write(2, b"sample_ddp.py: stopped before anything was begun; start again with the same command\n")
    os._exit(STOPPED)


def open_weights(options: Options, job: "Job") -> tuple["Checkpoint", Options]:
    """The weights, fetched, and the options with all that follows from them. What any rank lacks is named before
    anything is sampled."""
    from accel.engine import fetch, open_checkpoint

    checkpoint = job.run_collectively(lambda: open_checkpoint(options))
    # One download where the file system is shared, one a node where it is not.
    job.run_collectively(lambda: fetch(options, checkpoint), only=0)
    job.run_collectively(lambda: job.local_rank or fetch(options, checkpoint))
    return checkpoint, job.run_collectively(lambda: fetch(options, checkpoint))


def load(options: Options, job: "Job", batch_rows: int, **how) -> "Engine":
    """The engine on this rank."""
    from accel.engine import Engine

    engine = job.run_collectively(lambda: Engine(options, batch_rows, job.from_rank_0, **how))
    print(f"{engine.describe()} · {job.world} rank{'s' * (job.world > 1)}")
    return engine


def sample_grid(options: GridOptions, job: "Job") -> None:
    """The picture of sample.py. Each rank makes the pictures of some labels or, where there are fewer labels than
    ranks, a part of every network evaluation (--parallel). All ranks draw the same random stream."""
    import torch

    from accel.engine import empty_model
    from accel.network import plain
    from accel.parallel.groups import Groups
    from accel.parallel.planner import OFF, Evaluation, check, share_evaluations
    from accel.parallel.rows import gather_rows, share
    from accel.precision import default_tier

    outputs = [(one.output, one.output_type) for one in options.for_each_seed()]
    job.run_collectively(lambda: [require_writable(*output) for output in outputs], only=0)
    checkpoint, options = open_weights(options, job)
    n, each, device = len(options.labels), options.for_each_seed(), torch.device(options.device)
    model = job.run_collectively(lambda: empty_model(options))
    tokens, tier = (options.latent_size // options.patch_size) ** 2, options.precision or default_tier(device)
    evaluation, groups = Evaluation(n, tokens, plain(model).num_heads, tier), Groups(job, device)
    wanted = wanted_layout(options, job.world)
    if wanted:
        job.run_collectively(lambda: check(wanted, evaluation, groups))
    job.open_collectives(options.device)
    layout = wanted or OFF
    at_once = min(n, (options.batch_size or n) * layout.busy(job.world) // layout.ranks)  # pictures, of all ranks
    rows = layout.batch_rows(at_once, job.world) // (1 if options.guided else 2)
    engine = load(options, job, rows, checkpoint=checkpoint, divided=layout.weights > 1)
    with engine.watch.phase("plan"):
        engine.network, layout = share_evaluations(engine.network, evaluation, groups, wanted)
    if layout.weights > 1:  # each rank has read its part
        checkpoint.close()

    busy = layout.busy(job.world)
    mine = share(n, busy, job.rank)  # the pictures of this rank
    if options.decode == "rank0" and job.rank > 0:
        engine.vae_folder = None  # nothing to load
    shared, sampled = layout.ranks > 1, []
    for one in each:
        engine.reconfigure(one)
        sampled.append(engine.sample(slice(None) if shared and job.rank < busy else mine, show=job.rank == 0))
    engine.release_network()
    into_pictures, side = options.output_type == "image" and options.decode == "each", options.image_size
    if job.rank == 0:  # a file that is being written is removed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    for one, latents in zip(each, sampled, strict=True):
        engine.reconfigure(one)
        if shared:
            job.assert_identical(latents, busy)
            latents = latents[mine]
        part = latents
        if into_pictures:
            part = engine.decode(latents) if len(latents) else latents.new_zeros(0, 3, side, side)
        with engine.watch.phase("gather"):
            whole = gather_rows(job, part, n, busy)
        if job.rank == 0:
            engine.save(pixels=whole) if into_pictures else engine.save(whole)
    if job.rank == 0:
        print(f"{', '.join(one.output for one in each)}: {engine.watch} · {start.seconds():.2f} s since start")


def wanted_layout(options: GridOptions, world: int) -> "Layout | None":
    """The layout that --parallel names or arithmetic leaves; None if it is to be measured."""
    from accel.parallel.layouts import OFF

    if not options.guided or options.parallel == "off":
        return OFF
    if options.layout is None:  # with a picture for every GPU there is nothing to share
        return OFF if len(options.labels) >= world else None
    return options.layout if options.layout.ranks > 1 else OFF


def sample_for_fid(options: FidOptions, job: "Job") -> None:
    """The folder of pictures and its .npz."""
    from accel import fid

    job.run_collectively(lambda: fid.check(options, job.world), only=0)
    checkpoint, options = open_weights(options, job)
    with fid.locked(options, job):
        how = dict(checkpoint=checkpoint, tuner_folders=fid.tuner_folders(options))
        fid.run(load(options, job, fid.batch_rows(options), **how), job)


if __name__ == "__main__":
    main()
