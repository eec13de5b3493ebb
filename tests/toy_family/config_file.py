"""Configurations of a Toy: a section `toy` with weights, steps and scale."""

from pathlib import Path

from accel.families.configuration import Configuration


def read(content, given):
    """The options of a configuration, None for another program's."""
    if not isinstance(content, dict) or "toy" not in content:
        return None
    entries = content["toy"]
    path = Path(given.name)
    weights = str(path.parent / entries["weights"])
    options = dict(ckpt=weights, num_sampling_steps=entries["steps"], cfg_scale=entries["scale"])
    refused = {}
    if entries["method"] != "ddim":
        refused["sampler"] = f"specifies method {entries['method']}; give `sampler=ddim`"
    else:
        options["sampler"] = "ddim"
    missing = {} if (path.parent / entries["weights"]).exists() else {"ckpt": weights}
    return Configuration(options, refused, missing, lambda paths: f"fetch {len(paths)}")
