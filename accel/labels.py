"""Classes by name: ImageNet's, by torchvision's list, and the demo's. Imports no torch."""

import difflib
import importlib.util
import operator
import re
import runpy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from accel.errors import UsageError, shown

DEMO = ("planet", "mountains", "flower", "ball", "block", "sea", "balloon", "mushroom")
NEAREST = 5  # names that an error suggests


def class_names(model: str, num_classes: int) -> tuple[str, ...]:
    """The name of every class of a model; () where they are unknown."""
    if model.endswith("-Demo/2") and num_classes == len(DEMO):
        return DEMO
    return _imagenet() if num_classes == 1000 else ()


@lru_cache(maxsize=1)
def _imagenet():
    """torchvision's list, read from its file: importing the package would bring torch. () without torchvision."""
    package = importlib.util.find_spec("torchvision")
    file = package and Path(package.origin).parent / "models" / "_meta.py"
    return tuple(runpy.run_path(str(file))["_IMAGENET_CATEGORIES"]) if file and file.exists() else ()


def find_label(label: int | str, names: Sequence[str], num_classes: int) -> int:
    """The number of a class, given as a number or a name: the whole name, or words that one name alone contains.

    names: of all classes, or () where they are unknown; a name may list several, separated by commas. Case and
    punctuation matter only where two names differ in nothing else. UsageError for any other label.
    """
    if not isinstance(label, str) or re.fullmatch(r"\s*[+-]?\d{1,30}\s*", label):
        number = int(label) if isinstance(label, str) else operator.index(label)
        if not 0 <= number < num_classes:
            raise UsageError(f"`labels={shown(str(number))}`: the model knows classes 0 to {num_classes - 1}")
        return number
    if not names:
        raise UsageError(
            f"`labels={shown(label)}`: no class names are known here; give a number from 0 to {num_classes - 1}"
        )
    if label in names:
        return list(names).index(label)
    words = file_name(label)
    plain = [file_name(name) for name in names]
    found = [i for i, name in enumerate(names) if words in map(file_name, name.split(","))]
    found = found or [i for i, name in enumerate(plain) if words and f"-{words}-" in f"-{name}-"]
    if len(found) == 1:
        return found[0]
    near = found or [plain.index(name) for name in difflib.get_close_matches(words, plain, NEAREST)]
    listed = ", ".join(f"{names[i]} ({i})" for i in near[:NEAREST]) + ", …" * (len(near) > NEAREST)
    problem = f"{len(found)} classes have that name" if found else "no class has that name"
    remedy = f"give one of {listed}" if near else f"give a number from 0 to {num_classes - 1}"
    raise UsageError(f"`labels={shown(label)}`: {problem}; {remedy}")


def file_name(name: str) -> str:
    """A class's name as part of a file's name: golden retriever → golden-retriever."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
