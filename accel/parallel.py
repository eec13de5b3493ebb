"""A grid on many ranks: the layout of --parallel, the network evaluations that ranks share, and the
pictures of all. A process by itself needs none.
"""

import logging
from collections.abc import Sequence

from torch import Tensor

from accel.config import Grid
from accel.errors import UsageError
from accel.kernels.linear import Tuner
from accel.latents.decoder import Decoder, NoDecoder
from accel.network import Stage, stages_of
from accel.opening import Opened
from accel.pipeline import Pipeline, opened_guidance
from accel.progress import Stopwatch
from accel.ranks import Ranks, layouts
from accel.ranks.distributed import DistributedRanks
from accel.ranks.placement import OFF, Layout, Placement

log = logging.getLogger(__name__)


def load(grid: Grid, opened: Opened, ranks: DistributedRanks, watch: Stopwatch) -> Pipeline:
    """Load the network on every rank and divide the pictures, or each network evaluation,
    among the ranks. The pipeline's placement is this rank's.
    """
    layout = ranks.run_collectively(lambda: choose_layout(grid, opened, ranks))
    ranks.open_collectives()
    placement = Placement(layout, ranks.world, ranks.rank)
    with watch.phase("load"):
        pipeline = ranks.run_collectively(
            lambda: Pipeline.load(
                opened,
                placement.sizes(grid.count, grid.batch_size),
                placement=placement,
                tuner=Tuner(share=ranks.from_rank_0),
                too_large=grid.too_large,
            )
        )
    log.info(grid.describe(pipeline.machine, ranks.world))
    if layout == OFF:
        return pipeline
    with watch.phase("connect"):
        return pipeline.with_(network=ranks.share(pipeline.network, layout))


def undivided(tier: str | None, stages: Sequence[Stage]) -> str | None:
    """Return why ranks cannot divide the tokens of a network; None if they can."""
    if tier == "exact":
        return "in the tier exact"
    if any(stage.prepended for stage in stages):
        return "where label tokens stand before them"
    return None


def choose_layout(grid: Grid, opened: Opened, ranks: Ranks) -> Layout:
    """Return a grid's layout, on every rank the same. Raises UsageError if it cannot run."""
    layout = grid.layout
    if layout == OFF or layout is None and grid.count >= ranks.world:
        return OFF  # with a picture for every GPU there is nothing to share
    stages = stages_of(opened.fit.empty(opened.latent_size))
    obstacle = undivided(opened.config.precision, stages)
    if layout is None:
        reason = "least work for each GPU, batch rows before tokens"
        by_push = ranks.peers() and not obstacle
        layout = layouts.choose(
            grid.count,
            grid.batch_size,
            opened_guidance(opened).copies,
            ranks.world,
            opened.tokens if by_push else 1,
            stages[0].width,
        )
    else:
        reason = "as it was asked for"
        if layout.tokens > 1 and obstacle:
            raise UsageError(f"`parallel={layout}`: tokens are not divided {obstacle}; take rows=2")
        layouts.check(layout, opened.tokens, ranks.world)
    busy = layout.ranks if layout != OFF else grid.count
    log.info(f"parallel: {layout}, {busy} of {ranks.world} GPUs: {reason}")
    return layout


def gather(
    grid: Grid,
    latents: Tensor,
    ranks: DistributedRanks,
    placement: Placement,
    decoder: Decoder | NoDecoder | None,
    watch: Stopwatch,
) -> Tensor:
    """Decode each rank's own pictures of one seed, and return all of them; latents where there is
    no decoder. latents: of this rank.
    """
    pictures = ranks.own_pictures(latents, grid.count, placement)
    if decoder is not None:
        with watch.phase("decode"):
            pictures = decoder.decode(pictures)
    with watch.phase("gather"):
        return ranks.gather_pictures(pictures, grid.count, placement)
