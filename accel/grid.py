"""A grid of pictures, from the request to its files: by one process, or by the ranks of a
job.

Each rank makes the pictures of some labels or, if there are fewer labels than ranks, a part
of every network evaluation (--parallel). All ranks draw the same random stream.
"""

import signal
import sys
from typing import NamedTuple

from torch import Tensor

from accel import door, launch, loading
from accel.door.opening import open_on_ranks
from accel.errors import STOPPED
from accel.latents.decoder import Decoder
from accel.progress import Stopwatch
from accel.ranks import Ranks
from accel.ranks.layouts import OFF, Layout
from accel.ranks.placement import Placement
from accel.request import GridRequest
from accel.run import Run
from accel.sampling import count_copies
from accel.settings import GridSettings


class PlacedRun(NamedTuple):
    """A run whose network is the one that this rank evaluates, and this rank's placement."""

    run: Run
    placement: Placement


def make_grid(request: GridRequest, ranks: Ranks) -> None:
    """Make the pictures of a request: open, load, place, warm up, sample, decode, gather,
    save. Rank 0 writes and prints.
    """
    settings, watch = open_on_ranks(request, ranks)
    run, placement = load_and_place(settings, ranks, watch)
    decoder = door.decoder_of(settings)

    door.warm_up(settings, run, watch, placement)
    if decoder:
        decoder.load_ahead()
    sampled = door.sample(settings, run, watch, placement, show=ranks.rank == 0)
    del run
    loading.free_memory(settings.device)

    if ranks.rank == 0:
        _exit_by_exception(signal.SIGTERM)
    for path, latents in zip(settings.outputs, sampled, strict=True):  # of each seed
        save(settings, path, latents, ranks, placement, decoder, watch)
    if ranks.rank == 0:
        print(f"{', '.join(settings.outputs)}: {watch} · {launch.seconds():.2f} s since start")


def load_and_place(settings: GridSettings, ranks: Ranks, watch: Stopwatch) -> PlacedRun:
    """Load the network on every rank and divide the pictures, or each network evaluation,
    among the ranks.
    """
    layout = ranks.run_collectively(lambda: choose_layout(settings, ranks))
    ranks.open_collectives()
    tuner = None
    if ranks.world > 1:
        from accel.kernels.linear import Tuner  # a process by itself may need none

        tuner = Tuner(share=ranks.from_rank_0)
    expected = ranks.placement(layout or OFF)
    with watch.phase("load"):
        part = ranks.part(layout)
        run = ranks.run_collectively(lambda: door.load(settings, expected, tuner=tuner, part=part))
    if ranks.world == 1:
        print(door.describe(settings, run))
        return PlacedRun(run, expected)
    print(door.describe(settings, run, ranks.world))
    with watch.phase("plan"):
        return share_evaluations(settings, run, ranks, layout)


def choose_layout(settings: GridSettings, ranks: Ranks) -> Layout | None:
    """Return a grid's layout, None to measure it. Raises UsageError if it cannot run."""
    layout = settings.layout
    if layout is None:
        # With a picture for every GPU there is nothing to share.
        return OFF if len(settings.labels) >= ranks.world else None
    if layout != OFF:
        from accel.ranks import planner  # brings torch.distributed

        planner.check(layout, settings.tokens, settings.fit.num_heads, ranks)
    return layout


def share_evaluations(
    settings: GridSettings, run: Run, ranks: Ranks, layout: Layout | None
) -> PlacedRun:
    """Share the network evaluations of a run by a layout, None to measure one."""
    from accel.ranks import planner  # brings torch.distributed

    work = planner.Work(
        pictures=len(settings.labels),
        at_once=settings.batch_size,
        copies=count_copies(run.process, run.guidance),
        tokens=settings.tokens,
        tier=run.tier,
    )
    network, placement = planner.share_evaluations(run.network, work, ranks, layout)
    return PlacedRun(run._replace(network=network), placement)


def save(
    settings: GridSettings,
    path: str,
    latents: Tensor,
    ranks: Ranks,
    placement: Placement,
    decoder: Decoder | None,
    watch: Stopwatch,
) -> None:
    """Decode the latents of one seed, each rank its own pictures, gather and write them.

    A process by itself decodes one file after the other: a folder of many pictures needs the
    memory of one.
    """
    if ranks.world == 1:
        door.save(settings, path, latents, watch, decoder)
        return
    n = len(settings.labels)
    pictures = ranks.own_pictures(latents, n, placement)
    if decoder:
        pictures = door.decode(decoder, pictures, watch)
    with watch.phase("gather"):
        gathered = ranks.gather_pictures(pictures, n, placement)
    if ranks.rank == 0:
        door.save(settings, path, gathered, watch)


def _exit_by_exception(number):
    """Exit by SystemExit on a signal that would kill: a file that is being written is
    removed.
    """
    if signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, lambda *_: sys.exit(STOPPED))
