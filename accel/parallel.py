"""A grid on many ranks: the layout of --parallel, the network evaluations that ranks share, and the
pictures of all. A process by itself needs none.
"""

import logging

from torch import Tensor

from accel.config import Grid
from accel.errors import UsageError
from accel.kernels.linear import Tuner
from accel.latents.decoder import Decoder, NoDecoder
from accel.network import divides_tokens, stages_of
from accel.opening import Opened
from accel.pipeline import Pipeline
from accel.progress import Stopwatch
from accel.ranks import Ranks, planner
from accel.ranks.placement import OFF, Layout, Placement
from accel.sampling import count_copies

log = logging.getLogger(__name__)


def load(grid: Grid, opened: Opened, ranks: Ranks, watch: Stopwatch) -> Pipeline:
    """Load the network on every rank and divide the pictures, or each network evaluation,
    among the ranks. The pipeline's placement is this rank's.
    """
    layout = ranks.run_collectively(lambda: choose_layout(grid, opened, ranks))
    ranks.open_collectives()
    expected = ranks.placement(layout or OFF)
    with watch.phase("load"):
        pipeline = ranks.run_collectively(
            lambda: Pipeline.load(
                opened,
                expected.sizes(grid.count, grid.batch_size),
                placement=expected,
                tuner=Tuner(share=ranks.from_rank_0),
                too_large=grid.too_large,
            )
        )
    log.info(grid.describe(pipeline.machine, ranks.world))
    with watch.phase("plan"):
        return share_evaluations(grid, opened, pipeline, ranks, layout)


def choose_layout(grid: Grid, opened: Opened, ranks: Ranks) -> Layout | None:
    """Return a grid's layout, None to measure it. Raises UsageError if it cannot run."""
    layout = grid.layout
    if layout is None:
        # With a picture for every GPU there is nothing to share.
        return OFF if grid.count >= ranks.world else None
    if layout != OFF:
        planner.check(layout, opened.tokens, opened.fit.num_heads, ranks)
        stages = stages_of(opened.fit.empty(opened.latent_size))
        if layout.tokens > 1 and not divides_tokens(stages):
            raise UsageError(
                f"`parallel={layout}`: tokens are not divided where label tokens stand before "
                "them; take rows=N"
            )
    return layout


def share_evaluations(
    grid: Grid, opened: Opened, pipeline: Pipeline, ranks: Ranks, layout: Layout | None
) -> Pipeline:
    """Share the network evaluations by a layout, None to measure one."""
    work = planner.Work(
        pictures=grid.count,
        at_once=grid.batch_size,
        copies=count_copies(pipeline.process, pipeline.guidance),
        tokens=opened.tokens,
        tier=pipeline.tier,
    )
    network, placement = planner.share_evaluations(pipeline.network, work, ranks, layout)
    return pipeline.with_(network=network, placement=placement)


def gather(
    grid: Grid,
    latents: Tensor,
    ranks: Ranks,
    placement: Placement,
    decoder: Decoder | NoDecoder | None,
    watch: Stopwatch,
) -> Tensor | None:
    """Decode each rank's own pictures of one seed. Return all pictures on rank 0, None elsewhere;
    latents where there is no decoder. latents: of this rank.
    """
    pictures = ranks.own_pictures(latents, grid.count, placement)
    if decoder is not None:
        with watch.phase("decode"):
            pictures = decoder.decode(pictures)
    with watch.phase("gather"):
        return ranks.gather_pictures(pictures, grid.count, placement)
