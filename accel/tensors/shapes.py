"""Shapes of a state dict, their differences from a module's, and modules without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt

import torch
from torch.overrides import TorchFunctionMode

from accel.errors import Mistake

Shapes = dict[str, tuple]
# Problem and remedy of tensors of FSDP2.
SHARD_ERROR = (
    "holds DTensors, parts of tensors on many processes",
    "save full tensors by full_tensor(), or join a distributed checkpoint by "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
)


class _NoInitialisation(TorchFunctionMode):
    """Skip initialisation: on the meta device there is nothing to draw, but trying makes
    torch import its compiler, which takes up to three seconds.
    """

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        draws = function in (torch.Tensor.uniform_, torch.Tensor.normal_)
        if draws or getattr(function, "__module__", None) == "torch.nn.init":
            return arguments[0] if arguments else keywords["tensor"]
        return function(*arguments, **keywords or {})


@contextmanager
def shapes_only() -> Iterator[None]:
    """Give modules made inside shapes and no values: parameters on the meta device,
    nothing is initialised.
    """
    with torch.device("meta"), _NoInitialisation():
        yield


def shapes_of(state: dict[str, torch.Tensor]) -> Shapes:
    """Return the shape of every entry. Position tables of all square grids get the same
    one, (1, "T", D).
    """
    shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    table = shapes.get("pos_embed", ())
    if len(table) == 3 and table[0] == 1 and table[1] == isqrt(table[1]) ** 2 > 0:
        shapes["pos_embed"] = (1, "T", table[2])
    return shapes


def require_fit(error: Mistake, state: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Raise `error` unless `state` has the entries of `model`, of their shapes, and no others."""
    have = shapes_of(state)
    want = shapes_of(model.state_dict())
    # In the module's order: the first difference is then the nearest to the input.
    wrong = [entry for entry in {**want, **have} if have.get(entry) != want.get(entry)]
    if not wrong:
        return
    # an entry of the caller's is named first
    first = next((entry for entry in wrong if entry in have), wrong[0])
    count = f" ({len(wrong)} entries differ)" if len(wrong) > 1 else ""
    name = type(model).__name__
    if first not in want:
        raise error(f"{first} is no weight of a {name}, and would be ignored{count}")
    if first not in have:
        raise error(f"is not a {name}: no {first}{count}")
    raise error(f"{first} is {have[first]}, must be {want[first]}{count}")
