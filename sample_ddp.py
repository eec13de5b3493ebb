"""Sample pictures from a DiT with many processes, one a GPU.

    torchrun --standalone --nproc_per_node=4 sample_ddp.py                              # one grid, as sample.py makes it
    torchrun --standalone --nproc_per_node=4 sample_ddp.py --labels 207                 # one picture, all GPUs on it
    torchrun --standalone --nproc_per_node=4 sample_ddp.py --num-fid-samples 50000      # a folder and an .npz for FID

Also under srun, one task a GPU. An FID job that was stopped or killed goes on when the same command is given again.
"""

import os
import signal
import time

from accel.options import (
    STOPPED,
    DistributedOptions,
    OneLineParser,
    UsageError,
    add_arguments,
    options_from,
    user_errors,
)

STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # of queues, before they take a job's nodes away
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))


class RankParser(OneLineParser):
    """Says it once: the other ranks leave in silence, and later, since a launcher ends the rest as soon as one is gone."""

    def exit(self, status=0, message=None):
        if RANK:
            time.sleep(2)
            message = None
        super().exit(status, message)


def main():
    parser = RankParser(
        prog="sample_ddp.py",
        description="Sample class-conditional pictures from a diffusion transformer with many GPUs.",
    )
    add_arguments(parser, DistributedOptions)
    args = parser.parse_args()
    with user_errors(parser):
        options = options_from(args, DistributedOptions)
    if options.num_fid_samples is not None:  # until the ranks have met nothing is begun, and there is nothing to record
        for number in STOP_SIGNALS:
            signal.signal(number, stop_at_once)
    from accel.parallel.group import job  # after the cheap checks: torch is slow to import

    with job(parser.prog) as group:
        if options.num_fid_samples is not None:
            group.stop_on_signals(*STOP_SIGNALS)
        options.device = group.device(options.device)
        (sample_grid if options.num_fid_samples is None else sample_for_fid)(options, group)


def stop_at_once(*_):
    if RANK == 0:
        os.write(2, b"sample_ddp.py: stopped before anything was begun; start again with the same command\n")
    os._exit(STOPPED)


def load(options, group, place=None):
    """The engine on this rank's device, its network in `place` if given. What any rank lacks is named before anything is sampled."""
    from accel.engine import Engine, find_checkpoint

    # One download where the file system is shared, one a node where it is not.
    group.together("fetch once", lambda: find_checkpoint(options).fetch(), only=0)
    group.together("fetch a node", lambda: group.local_rank or find_checkpoint(options).fetch())
    engine = group.together("load", lambda: Engine(options, place))
    print(f"{engine.describe()} · {group.world} rank{'s' * (group.world > 1)}")
    return engine


def sample_grid(options, group):
    """The picture of sample.py. Every rank computes its share of the labels from the same random stream or, where there are fewer labels than
    ranks, its share of the rows and tokens of all of them (--parallel)."""
    from accel.engine import network_shape
    from accel.parallel.plan import Planner
    from accel.parallel.rows import agree, gather_rows, share

    n = len(options.labels)
    group.together("output", options.check_output, only=0)
    planner = Planner(
        group, options.device, n, options.latent_size, *group.together("shape", lambda: network_shape(options))
    )
    wanted = group.together("plan", lambda: planner.wanted(options))
    group.open_collectives(options.device)
    engine = load(options, group, "cpu" if wanted and wanted.weights > 1 else None)
    with engine.watch.phase("plan"):
        engine.network, plan = planner.parallel(engine.network, wanted)
    split = plan.ranks > 1
    if (
        options.forecast == "auto" and group.world > 1 and not split
    ):  # ranks that share their pictures see the same errors anyway
        group.together("labels", lambda: check_labels(options, group.world), only=0)
        engine.forecast.agree = group.largest  # the worst picture of the grid decides, wherever it is made
    busy = plan.ranks if split else group.world
    mine = share(n, busy, group.rank) if group.rank < busy else slice(0, 0)  # the pictures that this rank decodes
    latents = engine.sample(mine if not split or group.rank >= busy else slice(None), show=group.rank == 0)
    pixels = None
    engine.release_network()
    if split:
        agree(group, latents, busy)
        latents = latents[mine]
    local = options.output_type == "image" and options.decode == "local"
    if local:
        side = options.image_size
        pixels = engine.decode(latents) if len(latents) else latents.new_zeros(0, 3, side, side)
    with engine.watch.phase("gather"):
        latents, pixels = (
            (None, gather_rows(group, pixels, n, busy)) if local else (gather_rows(group, latents, n, busy), None)
        )
    if group.rank == 0:
        engine.save(latents, pixels)
        print(f"{options.output}: {engine.watch}")


def check_labels(options, world):
    if options.forecast == "auto" and len(options.labels) < world:
        raise UsageError(
            f"--forecast auto: all ranks decide together, and {len(options.labels)} labels leave some of {world} without a picture; "
            "use fewer ranks or --forecast plan"
        )


def sample_for_fid(options, group):
    """The folder of pictures and its .npz."""
    from accel import fid

    group.together("job", lambda: fid.check(options, group.world), only=0)
    fid.run(load(options, group), group)


if __name__ == "__main__":
    main()
