"""Compare the shapes of state dicts and modules; build modules without memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt

import torch
from torch.overrides import TorchFunctionMode

from accel.errors import InputRef

Shapes = dict[str, tuple]
# Problem and remedy for FSDP2's sharded tensors.
SHARD_ERROR = (
    "contains DTensors, shards of tensors on several processes",
    "save full tensors by full_tensor(), or join a distributed checkpoint by "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
)


class _NoInitialisation(TorchFunctionMode):
    """Skip initialisation: on the meta device it has no effect, but makes torch import its
    compiler, which takes up to three seconds.
    """

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        draws = function in (torch.Tensor.uniform_, torch.Tensor.normal_)
        if draws or getattr(function, "__module__", None) == "torch.nn.init":
            return arguments[0] if arguments else keywords["tensor"]
        return function(*arguments, **keywords or {})


@contextmanager
def shapes_only() -> Iterator[None]:
    """Create modules on the meta device and skip their initialisation."""
    with torch.device("meta"), _NoInitialisation():
        yield


def shapes_of(state: dict[str, torch.Tensor]) -> Shapes:
    """Return the shape of each entry."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def require_fit(given: InputRef, state: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Raise UsageError unless the names and shapes of `state` are exactly the ones of `model`. The
    position table may be of any square grid.
    """
    have = shapes_of(state)
    want = shapes_of(model.state_dict())
    if "pos_embed" in want:
        _, tokens, *_ = (*have.get("pos_embed", ()), 0, 0)
        is_square = isqrt(tokens) ** 2 == tokens > 0
        want["pos_embed"] = (1, tokens if is_square else "T", want["pos_embed"][2])
    # In the module's order, so that the first difference is near the input.
    wrong = [entry for entry in {**want, **have} if have.get(entry) != want.get(entry)]
    if not wrong:
        return
    # prefer an entry of `state`
    first = next((entry for entry in wrong if entry in have), wrong[0])
    count = f" ({len(wrong)} entries differ)" if len(wrong) > 1 else ""
    name = type(model).__name__
    if first not in want:
        raise given.error(f"{first} is not a weight of a {name} and would be ignored{count}")
    if first not in have:
        raise given.error(f"is not a {name}: no {first}{count}")
    raise given.error(f"{first} is {have[first]}, must be {want[first]}{count}")
