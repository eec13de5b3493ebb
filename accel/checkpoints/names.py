"""Strip the prefixes that wrappers add to tensor names, and find a network in a state dict."""

import re
from collections.abc import Iterable
from os.path import commonprefix

import torch

from accel.errors import InputRef, shown
from accel.families import families
from accel.families.spec import StateDict

# Of wrappers around parts of a network; can appear anywhere in a name.
INNER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[.]")


def prefixes_of(names: Iterable[str]) -> list[str]:
    """Return all prefixes under which a state dict contains a network of any family; "" is the top
    level.
    """
    names = set(names)
    found = set()
    for family in families():
        (first, *others) = family.keys
        starts = {name.removesuffix(first) for name in names if name.endswith(first)}
        found |= {start for start in starts if all(start + key in names for key in others)}
    # The prefix of a network may end within the name of another family's key.
    return sorted(prefix for prefix in found if prefix == "" or prefix.endswith("."))


def network_in(given: InputRef, state: StateDict, prefix: str | None = None) -> StateDict:
    """Return the tensors of the network in a state dict, without wrapper prefixes. Print a notice
    about dropped entries. prefix: the user's choice; default: the only prefix with a network.
    Raises UsageError if there are several.
    """
    plain = _without_inner(given, state)
    found = prefixes_of(plain)
    if prefix is None:
        if found in ([], [""]):
            return plain
        if len(found) > 1:
            places = " and ".join(repr(place) if place else "no prefix" for place in found)
            raise given.error(
                f"contains networks under {places}", given.override_hint("weights_entry")
            )
        (prefix,) = found
    beside = dict.fromkeys(name.partition(".")[0] for name in plain if not name.startswith(prefix))
    left_out = f"; not sampled: {shown(', '.join(beside))}" if beside else ""
    given.warn(f'the network is under "{prefix}"{left_out}')
    return {
        name.removeprefix(prefix): value for name, value in plain.items() if name.startswith(prefix)
    }


def without_prefix(state: StateDict) -> StateDict:
    """Strip the prefix of the network from a state dict, if there is exactly one. If the names
    belong to no family, such as diffusers' names, strip the prefix that all of them share.
    """
    shared = commonprefix([*state])
    found = prefixes_of(state) or [shared[: shared.rfind(".") + 1]]
    prefix = found[0] if len(found) == 1 else ""
    return {name.removeprefix(prefix): value for name, value in state.items()}


def _without_inner(given: InputRef, state: StateDict) -> StateDict:
    """Strip wrapper names inside a network from a state dict."""
    plain: StateDict = {}
    for name, value in state.items():
        short = INNER.sub("", name)
        first = plain.setdefault(short, value)
        if first is not value and not torch.equal(first, value):
            raise given.error(
                f"has {shown(short)} and {shown(name)}, with other values", "save one of them"
            )
    wrapped = [name for name in state if name not in plain]
    if wrapped:
        given.warn(f'has "{shown(wrapped[0])}", as a wrapped model is saved; loading without')
    return plain
