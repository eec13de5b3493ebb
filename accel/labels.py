"""Classes by name: ImageNet's by torchvision's list, and a user's own. Imports no torch."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from accel.errors import UsageError, path_errors, shown
from accel.files import read_small

NEAREST = 5  # names that an error suggests
NULL = "null"  # the label of no class, whose number is that of the classes


@lru_cache(maxsize=1)
def imagenet() -> tuple[str, ...]:
    """Return the names of ImageNet's 1000 classes, as torchvision lists them."""
    file = Path(__file__).with_name("imagenet_classes.txt")
    return tuple(file.read_text(encoding="utf-8").splitlines())


def read_class_names(given: str | Path | Iterable[str] | Mapping) -> tuple[str, ...]:
    """Return class names in the classes' order. given: a file with one name per line
    or JSON, or the names.

    JSON, and a caller in Python, may number the names: {"0": "cat", "1": "dog"}. Raises
    UsageError.
    """
    source = ""
    if isinstance(given, (str, Path)):
        source = f"={shown(str(given))}"
        given = _read_names(given)
    if isinstance(given, Mapping):
        by_number = {str(key): name for key, name in given.items()}
        try:
            given = [by_number[str(number)] for number in range(len(by_number))]
        except KeyError as missing:
            raise UsageError(
                f"`class_names{source}`: has no name for class {missing}; number them from 0"
            ) from None
    names = list(given) if isinstance(given, Iterable) else [given]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip() or not name.strip().isprintable():
            raise UsageError(
                f"`class_names{source}`: name {number} is {shown(name)}; give printable text for "
                "each"
            )
    return tuple(name.strip() for name in names)


def _read_names(path):
    """Return the names in a file, or the JSON value in it."""
    with path_errors("class_names", shown(str(path)), "give a text file with one name per line"):
        content = read_small(path)
    try:
        text = content.decode("utf-8-sig")
        if text.lstrip()[:1] in ("[", "{"):
            return json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(
            f"`class_names={shown(str(path))}`: is neither UTF-8 text with one name per line "
            "nor JSON"
        ) from None
    return text.rstrip().splitlines()


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
    remedy = f"give a number from 0 to {num_classes - 1}"
    if not names:
        raise UsageError(f"`labels={shown(label)}`: no class names are known here; {remedy}")
    if list(names).count(label) == 1:
        return list(names).index(label)
    words = file_name(label)
    matches = _matches(words, names)
    if len(matches) == 1:
        return matches[0]
    problem = "no class has that name"
    if matches:
        problem = f"{len(matches)} classes have that name"
    suggested = matches or _similar(words, names)
    if suggested:
        listed = ", ".join(f"{names[number]} ({number})" for number in suggested[:NEAREST])
        remedy = f"give one of {listed}" + (", …" if len(suggested) > NEAREST else "")
    raise UsageError(f"`labels={shown(label)}`: {problem}; {remedy}")


def _matches(words, names):
    """Return the numbers of the names that are `words`; if none is, of those that contain
    them.
    """
    if not words:
        return []
    numbered = list(enumerate(names))
    equal = [number for number, name in numbered if words in map(file_name, name.split(","))]
    if equal:
        return equal
    return [number for number, name in numbered if f"-{words}-" in f"-{file_name(name)}-"]


def _similar(words, names):
    """Return the numbers of the names that are spelled like `words`."""
    plain = [file_name(name) for name in names]
    return [plain.index(name) for name in difflib.get_close_matches(words, plain, NEAREST)]


def file_name(name: str) -> str:
    """Return a class's name as part of a file's: golden retriever → golden-retriever.
    Letters of any alphabet stay.
    """
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")
