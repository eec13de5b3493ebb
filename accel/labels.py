"""Classes by name: ImageNet's by torchvision's list, and a user's own. Imports no torch."""

import difflib
import importlib.util
import json
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from accel.errors import UsageError, path_errors, shown
from accel.files import read_small

NEAREST = 5  # names that an error suggests
NULL = "null"  # the label of no class, whose number is that of the classes


@lru_cache(maxsize=1)
def imagenet() -> tuple[str, ...]:
    """Return torchvision's list of ImageNet's classes, read from its file: importing the
    package would bring torch. Return () without torchvision.
    """
    package = importlib.util.find_spec("torchvision")
    file = package and Path(package.origin).parent / "models" / "_meta.py"
    return (
        tuple(runpy.run_path(str(file))["_IMAGENET_CATEGORIES"]) if file and file.exists() else ()
    )


def read_class_names(given: str | Path | Iterable[str] | Mapping) -> tuple[str, ...]:
    """Return class names in the classes' order. given: a file with one name a line or
    JSON, or the names.

    JSON, and a caller in Python, may number the names: {"0": "cat", "1": "dog"}. Raises
    UsageError.
    """
    source = ""
    if isinstance(given, (str, Path)):
        source = f"={shown(str(given))}"
        with path_errors("class_names", shown(str(given)), "give a text file with one name a line"):
            content = read_small(given)
        try:
            text = content.decode("utf-8-sig")
            given = (
                json.loads(text) if text.lstrip()[:1] in ("[", "{") else text.rstrip().splitlines()
            )
        except (ValueError, RecursionError):
            raise UsageError(
                f"`class_names{source}`: is neither UTF-8 text with one name a line nor JSON"
            ) from None
    if isinstance(given, Mapping):
        try:
            given = [
                {str(key): name for key, name in given.items()}[str(number)]
                for number in range(len(given))
            ]
        except KeyError as number:
            raise UsageError(
                f"`class_names{source}`: has no name for class {number}; number them from 0"
            ) from None
    names = list(given) if isinstance(given, Iterable) else [given]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip() or not name.strip().isprintable():
            raise UsageError(
                f"`class_names{source}`: name {number} is {shown(name)}; give printable text for "
                "each"
            )
    return tuple(name.strip() for name in names)


def find_label(label: int | str, names: Sequence[str], num_classes: int) -> int:
    """Return the number of a class. label: its number, its name, or words that one name
    alone contains.

    "null" is the null label, unless a class is called so. names: of all classes, () where
    they are unknown; a name may list several, separated
    by commas. Case and punctuation matter only where two names differ in nothing else.
    Raises UsageError for any other label.
    """
    if not isinstance(label, str) or re.fullmatch(r"\s*[+-]?\d{1,30}\s*", label):
        number = int(label)
        if not 0 <= number < num_classes:
            raise UsageError(
                f"`labels={shown(str(number))}`: the model knows classes 0 to {num_classes - 1}"
            )
        return number
    if label == NULL and label not in names:
        return num_classes
    numbers = f"give a number from 0 to {num_classes - 1}"
    if not names:
        raise UsageError(f"`labels={shown(label)}`: no class names are known here; {numbers}")
    if list(names).count(label) == 1:
        return list(names).index(label)
    words = file_name(label)
    plain = [file_name(name) for name in names]
    found = [
        i for i, name in enumerate(names) if words and words in map(file_name, name.split(","))
    ]
    found = found or [i for i, name in enumerate(plain) if words and f"-{words}-" in f"-{name}-"]
    if len(found) == 1:
        return found[0]
    near = found or [plain.index(name) for name in difflib.get_close_matches(words, plain, NEAREST)]
    listed = ", ".join(f"{names[i]} ({i})" for i in near[:NEAREST]) + ", …" * (len(near) > NEAREST)
    problem = f"{len(found)} classes have that name" if found else "no class has that name"
    remedy = f"give one of {listed}" if near else numbers
    raise UsageError(f"`labels={shown(label)}`: {problem}; {remedy}")


def file_name(name: str) -> str:
    """Return a class's name as part of a file's: golden retriever → golden-retriever.
    Letters of any alphabet stay.
    """
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")
