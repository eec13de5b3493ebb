"""Read one file, .safetensors or of torch.save: a state dict, or a training checkpoint that
contains one, and metadata. Find the network in it, and strip the prefixes of wrappers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch

from accel.checkpoints import Contents
from accel.checkpoints.facts import METADATA_KEY, TRAINING_STATE, arguments_of, from_header
from accel.errors import InputRef, UsageError, shown
from accel.families import families
from accel.families.spec import StateDict
from accel.tensors.tables import PAIRS
from accel.tensors.tensor_files import floats_of, read_safetensors, read_tensors

# Sections with weights in a training checkpoint, in order of preference. Names with the word "ema"
# come first.
SECTIONS = (
    *("ema", "model_ema1", "model", "state_dict", "model_state_dict", "module", "net", "weights"),
)
NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # in a name such as netEMA or model_ema1
# Of wrappers around parts of a network; can appear anywhere in a name.
WRAPPER_PREFIX = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[.]"
)
# Tables that are not trained: an average of parameters may lack them.
UNTRAINED_TABLES = "pos_embed", "freqs_cos", "freqs_sin"


def matches(path: Path) -> bool:
    """Return whether `path` is a file, not a folder."""
    return not path.is_dir()


def read(path: Path, given: InputRef, entry: str | None = None) -> Contents:
    """Return the tensors of the network, and the metadata. entry: as for `network_in`. Raises
    UsageError.
    """
    if path.suffix == ".safetensors":
        tensors, header = read_safetensors(path, given.option)
        return Contents(network_in(given, tensors, entry), from_header(header))
    content = read_tensors(path, given.option)
    facts = content.get(METADATA_KEY, {})
    if not isinstance(facts, dict) or "family" not in facts:
        facts = arguments_of(content)
    return Contents(network_in(given, content, entry), facts)


def network_in(given: InputRef, content: Mapping[str, Any], entry: str | None) -> StateDict:
    """Return the float tensors of the network in a file, without prefixes of their names. Print a
    notice about weights that are not used.

    content: tensors by name, in sections or not. entry: the section or the prefix of the network,
    such as "ema" or "ema.net"; default: the first by `_rank`. Raises UsageError if two rank first
    or if there is none.
    """
    states = dict(_states(given, content))
    networks = {
        section + prefix: {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        for section, state in states.items()
        for prefix in prefixes_of(state)
    } or {
        section: state
        for section, state in states.items()
        if any(value.ndim and value.is_floating_point() for value in state.values())
    }
    if not networks:
        entries = ", ".join(map(str, list(content)[:5]))
        raise given.error(f"has no state dict of tensors (entries: {entries})")
    chosen = _chosen(given, [*networks], entry)
    network = networks[chosen]
    section = max((name for name in states if chosen.startswith(name)), key=len)
    if entry is None and section == "model." and len(networks) == 1:
        given.warn('has "model" only, without a moving average of the weights')
    prefix = chosen.removeprefix(section)
    if prefix:
        others = (name for name in states[section] if not name.startswith(prefix))
        unused = dict.fromkeys(name.partition(".")[0] for name in others)
        left_out = f"; not sampled: {shown(', '.join(unused))}" if unused else ""
        given.warn(f'the network is under "{prefix}"{left_out}')
    for other in networks.values():
        missing = other.keys() - network.keys()
        if network.keys() <= other.keys() and all(
            name.endswith(UNTRAINED_TABLES) for name in missing
        ):
            network = {**other, **network}
    if section:  # latent statistics can be stored next to the network
        network |= {name: states[""][name] for name in chain(*PAIRS) if name in states[""]}
    return floats_of(network, given)


def _chosen(given: InputRef, networks: list[str], entry: str | None) -> str:
    """Return one of the prefixes `networks`: the user's, or else the first by `_rank`."""
    listed = {name: name.rstrip(".") or "no prefix" for name in networks}
    if entry is not None:
        entry = f"{entry.rstrip('.')}."
        within = [name for name in networks if f".{entry}" in f".{name}"]
        if entry in networks or len(within) == 1:
            return entry if entry in networks else within[0]
        raise UsageError(
            f"{given.name} has weights under {shown(', '.join(listed.values()))}",
            parameter="weights_entry",
            value=shown(entry[:-1]),
        )
    first, *others = sorted(networks, key=_rank)
    if others and _rank(others[0]) == _rank(first):
        raise given.error(
            f"has weights under {', '.join(listed.values())}", given.override_hint("weights_entry")
        )
    if others and "ema" not in first.split("."):
        unused = shown(", ".join(listed[name] for name in networks if name != first))
        given.warn(
            f'the weights are those of "{listed[first]}", not of {unused}; for those: '
            f"{given.override_hint('weights_entry', 'NAME')}"
        )
    return first


def _states(
    given: InputRef, content: Mapping[str, Any], section: str = ""
) -> Iterator[tuple[str, StateDict]]:
    """Yield each section's name and tensors. The top level has the name "", a nested dict "ema.".
    Prefixes of wrappers such as `_orig_mod.` are removed from the tensors' names.
    """
    state: StateDict = {}
    for name, value in content.items():
        if isinstance(value, dict) and name not in TRAINING_STATE:
            yield from _states(given, value, f"{section}{name}.")
        elif isinstance(value, torch.Tensor) and isinstance(name, str):
            short = WRAPPER_PREFIX.sub("", name)
            first = state.setdefault(short, value)
            if first is not value and not torch.equal(first, value):
                raise given.error(
                    f"has {shown(short)} and {shown(name)}, with other values", "save one of them"
                )
    yield section, state


def _rank(name: str) -> tuple[bool, int]:
    """Return the sort key of a prefix: names with the word "ema" first, then by SECTIONS."""
    places = [SECTIONS.index(part) for part in name.split(".") if part in SECTIONS]
    is_raw = "ema" not in map(str.lower, NAME_WORDS.findall(name))
    return is_raw, min(places, default=len(SECTIONS))


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


def without_prefix(state: StateDict) -> StateDict:
    """Strip the prefix of the network from a state dict, if there is exactly one. If the names
    belong to no family, such as diffusers' names, strip the prefix that all of them share.
    """
    shared = commonprefix([*state])
    found = prefixes_of(state) or [shared[: shared.rfind(".") + 1]]
    prefix = found[0] if len(found) == 1 else ""
    return {name.removeprefix(prefix): value for name, value in state.items()}
