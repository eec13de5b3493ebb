"""Pack SiT's weights as DiT's, with a last layer that computes only the velocity."""

from collections.abc import Callable

from torch import Tensor

from accel.families.dit import fast as dit
from accel.families.dit.network import PatchTransformer
from accel.fast.network import Packing
from accel.fast.ops import Block, DirectOps, SplitOps
from accel.fast.reader import Reader


def pack(
    read: Reader,
    model: PatchTransformer,
    ops: DirectOps | SplitOps,
    block: Callable[[Reader, str, DirectOps | SplitOps], Block] = dit.block,
) -> Packing:
    """Pack a SiT's state dict, without the last layer's rows of unused channels."""

    def used(rows: Tensor) -> Tensor:
        """Return the rows of the first C channels: (p·p·C', …) → (p·p·C, …)."""
        channels = rows.unflatten(0, (-1, model.out_channels))
        return channels[:, : model.in_channels].flatten(0, 1)

    packing = dit.pack(read, model, ops, block)
    return packing._replace(
        last_weight=used(packing.last_weight),
        last_bias=used(packing.last_bias),
    )
