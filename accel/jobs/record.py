"""The settings in a picture's file, and the check of a run that repeats them (--like)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import accel
from accel.config.options import USER
from accel.config.repeated import FILE_OPTIONS, REPEATED
from accel.decoders.loading import digest
from accel.errors import UsageError, shown, warn
from accel.pipeline import Pipeline
from accel.run import Run


def digests_of(run: Run) -> dict[str, str]:
    """Return the digests of weights, guide and decoder, by option. They are cached. A file that
    was changed since it was opened has none, with a notice.
    """
    compute: dict[str, Callable[[], str]] = {"ckpt": run.checkpoint.digest}
    if run.guide is not None:
        compute["guide"] = run.guide.digest
    if run.space.decoder is not None:
        compute["vae"] = lambda: digest(run.space)
    digests = {}
    for name, digest_of in compute.items():
        try:
            digests[name] = digest_of()
        except UsageError as error:
            warn(f"the picture's settings lack the digest of a file; {error.marked}")
    return digests


def record_of(
    run: Run, tier: str, machine: list[str], digests: Mapping[str, str], number: int
) -> dict[str, Any]:
    """Return the settings that the file of a grid contains, as JSON data. Files appear by name
    only. tier: of the network. machine: by `machine_of`. digests: by `digests_of`. number: of the
    grid in the run.
    """
    given = run.request.values
    listed = run.settings.seed_list
    seed = listed[number] if listed else run.settings.seed
    settings = replace(run.settings, precision=tier, seed=seed).as_json()
    names = REPEATED & settings.keys()
    for name in ("model", "num_classes"):  # follow from the weights
        if settings[name]["origin"] != USER and (name == "num_classes" or "ckpt" in given):
            names.discard(name)
    paths = {name: getattr(run.settings, name) for name in FILE_OPTIONS}
    return {
        "machine": machine,
        "settings": {
            name: {**settings[name], "origin": Path(settings[name]["origin"]).name}
            for name in sorted(names)
        },
        "files": {
            name: {
                "name": path and Path(path).name,
                "given": name in given,
                "digest": digests.get(name),
            }
            for name, path in paths.items()
        },
        "grid": 0 if listed else run.request.repeated.grid + number,
    }


def machine_of(run: Run, pipeline: Pipeline, ranks: int) -> list[str]:
    """Return all that can change a picture's rounding, as text. Print a notice if the repeated
    picture was made by another version, torch, GPU or number of ranks.
    """
    world = f"{ranks} rank{'s' * (ranks > 1)}"
    machine = [f"version {accel.__version__}", *pipeline.machine[1:], world]
    repeated = run.request.repeated
    if repeated.machine not in ((), tuple(machine)):
        made = ", ".join(shown(each) for each in repeated.machine)
        repeated.given.warn(f"was made by {made}; pixels can differ in rounding here")
    return machine


def require_same(run: Run) -> None:
    """Compare the digests of the files with those in the repeated picture. Raises UsageError for
    other weights or another guide, and prints a notice for another decoder.
    """
    repeated = run.request.repeated
    for name, own in {"ckpt": None, **digests_of(run)}.items():
        recorded = repeated.digests.get(name)
        if own == recorded is not None or recorded is None and name != "ckpt":
            continue
        text = f"was made with another `{name}` (digest {shown(str(recorded))}, not {own})"
        if name != "vae":
            raise repeated.given.error(text, "give the same")
        repeated.given.warn(text)
