"""Sample a grid on several ranks: choose the layout of --parallel, load, gather the pictures."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from accel.decoders.decoder import Decoder
from accel.distributed import OFF, Layout, Placement, Ranks, layouts
from accel.errors import UsageError
from accel.io.progress import Stopwatch
from accel.kernels.linear import Tuner
from accel.pipeline import Pipeline
from accel.run import Run
from accel.runtime.precision import TIERS
from accel.runtime.stages import Stage, stages_of

log = logging.getLogger(__name__)


def load(run: Run, ranks: Ranks, watch: Stopwatch) -> Pipeline:
    """Load the network on every rank, and divide the pictures or each network evaluation."""
    layout = ranks.run_collectively(lambda: choose_layout(run, ranks))
    ranks.connect_collectives()
    placement = Placement(layout, ranks.world, ranks.rank)
    with watch.phase("load"):
        pipeline = ranks.run_collectively(
            lambda: Pipeline.load(run, placement=placement, tuner=Tuner(share=ranks.from_rank_0))
        )
    log.info(run.describe(pipeline.machine, ranks.world))
    if layout == OFF:
        return pipeline
    with watch.phase("connect"):
        return replace(pipeline, network=ranks.share(pipeline.network, layout))


def token_split_obstacle(tier: str, stages: Sequence[Stage]) -> str | None:
    """Return the reason why ranks cannot split the tokens of a network, or None."""
    if not TIERS[tier].splits_tokens:
        return f"in the tier {tier}"
    if any(stage.prepended for stage in stages):
        return "where label tokens stand before them"
    return None


def choose_layout(run: Run, ranks: Ranks) -> Layout:
    """Return the grid's layout, the same on every rank. Raises UsageError if it cannot run."""
    layout = run.layout
    is_shareable = run.guide is None and run.spec.null_class
    if layout == OFF or layout is None and (run.count >= ranks.world or not is_shareable):
        return OFF  # data parallel
    if not is_shareable:
        raise UsageError(
            "ranks share evaluations only with guidance by the null class, not by a `guide`",
            "use off",
            parameter="parallel",
            value=run.settings.parallel,
        )
    stages = stages_of(run.spec.empty(run.latent_size))
    obstacle = token_split_obstacle(run.settings.precision, stages)
    if layout is None:
        reason = "least work for each rank, batch rows before tokens"
        by_push = ranks.has_peer_access() and not obstacle
        layout = layouts.choose(
            run.count,
            run.settings.batch_size,
            run.guidance.copies,
            ranks.world,
            run.tokens if by_push else 1,
            stages[0].width,
        )
    else:
        reason = "as requested"
        if layout.tokens > 1 and obstacle:
            raise UsageError(
                f"tokens are not divided {obstacle}",
                "take rows=2",
                parameter="parallel",
                value=layout,
            )
        layouts.check(layout, run.tokens, ranks.world)
    busy = layout.ranks if layout != OFF else run.count
    log.info(f"parallel: {layout}, {busy} of {ranks.world} ranks: {reason}")
    return layout


def gather(
    run: Run,
    latents: Tensor,
    ranks: Ranks,
    placement: Placement,
    decoder: Decoder | None,
    watch: Stopwatch,
) -> Tensor:
    """Decode this rank's share of the latents of one seed and gather the pictures of all ranks;
    gather latents if `decoder` is None.
    """
    pictures = ranks.local_shard(latents, run.count, placement)
    if decoder is not None:
        with watch.phase("decode"):
            _agree_on_precision(decoder, ranks, busy=len(pictures) > 0)
            pictures = decoder.decode(pictures)
    with watch.phase("gather"):
        return ranks.gather_pictures(pictures, run.count, placement)


def _agree_on_precision(decoder: Decoder, ranks: Ranks, busy: bool) -> None:
    """Decode in float32 on all ranks if float16 failed on one. busy: whether this rank decodes;
    an idle rank loads no decoder.
    """
    chosen = ranks.all_gather_object(decoder.load().precision if busy else None)
    precision = next((each for each in ("fp32", "tf32") if each in chosen), "fp16")
    if precision != decoder.precision:
        log.warning(f"the decoder fails in float16 on a rank: all ranks decode in {precision}")
        decoder.use_float32(precision)
