"""Lay out SiT's weights for the accelerated network, as DiT's. The last layer computes
the velocity alone.
"""

from collections.abc import Callable

import torch.nn as nn

from accel.families.dit import fast as dit
from accel.fast.network import Layout
from accel.fast.ops import Block, Half, Split
from accel.fast.reader import Reader


def lay_out(
    read: Reader, model: nn.Module, ops: Half | Split, block: Callable[..., Block] = dit.block
) -> Layout:
    """Lay out a SiT's state dict as a DiT's, without the last layer's rows for the
    channels that SiT drops.
    """
    layout = dit.lay_out(read, model, ops, block)
    # (p·p·C', …); inside a token the order is (p, p, C').
    used = (
        value.unflatten(0, (-1, model.out_channels))[:, : model.in_channels]
        for value in layout.final
    )
    return layout._replace(final=tuple(value.flatten(0, 1) for value in used))
