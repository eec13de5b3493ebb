"""Class names: ImageNet's and the user's. Imports no torch."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel.errors import UsageError, path_errors, shown
from accel.io.filesystem import read_small

MAX_SUGGESTIONS = 5
NULL = "null"  # the name of the null label, whose number is num_classes


@lru_cache(maxsize=1)
def imagenet() -> tuple[str, ...]:
    """Return torchvision's names of the 1000 ImageNet classes."""
    file = Path(__file__).with_name("imagenet_classes.txt")
    return tuple(file.read_text(encoding="utf-8").splitlines())


def read_class_names(given: str | Path | Iterable[str] | Mapping) -> tuple[str, ...]:
    """Return the class names in order. given: a text file with one name per line, a JSON file, or
    the names.

    JSON files and mappings may be {"0": "cat", "1": "dog"} or, as torchvision's class_to_idx,
    {"cat": 0, "dog": 1}. Raises UsageError.
    """
    source = str(given) if isinstance(given, (str, Path)) else None
    content: Any = _read_names(given) if isinstance(given, (str, Path)) else given
    if isinstance(content, Mapping):
        if all(isinstance(value, int) for value in content.values()):
            content = dict(zip(content.values(), content))
        by_number = {str(key): name for key, name in content.items()}
        content = [by_number.get(str(number)) for number in range(len(by_number))]
    names = list(content) if isinstance(content, Iterable) else [content]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise UsageError(
                f"name {number} is {shown(name)}",
                "give text for each class from 0",
                parameter="class_names",
                value=source,
            )
    return tuple(name.strip() for name in names)


def _read_names(path):
    """Return the lines of a text file, or the value in a JSON file."""
    with path_errors("class_names", shown(str(path)), "give a text file with one name per line"):
        content = read_small(path)
    try:
        text = content.decode("utf-8-sig")
        if text.lstrip()[:1] in ("[", "{"):
            return json.loads(text)
    except ValueError:
        raise UsageError(
            "is neither UTF-8 text with one name per line nor JSON",
            parameter="class_names",
            value=shown(str(path)),
        ) from None
    return text.rstrip().splitlines()


def find_label(label: int | str, names: Sequence[str], num_classes: int) -> int:
    """Return the number of a class. label: its number, its name, or words that only one name
    contains; "null" is the null label unless a class has that name.

    names: of all classes, or () if unknown; a name may list synonyms separated by commas. Case and
    punctuation are ignored unless two names differ only in them. Raises UsageError if no class or
    several classes match.
    """
    if not isinstance(label, str) or re.fullmatch(r"\s*[+-]?\d{1,30}\s*", label):
        number = int(label)
        if not 0 <= number < num_classes:
            raise UsageError(
                f"the model has classes 0 to {num_classes - 1}",
                parameter="labels",
                value=shown(str(number)),
            )
        return number
    if label == NULL and label not in names:
        return num_classes
    remedy = f"give a number from 0 to {num_classes - 1}"
    if not names:
        raise UsageError(
            "no class names are known here", remedy, parameter="labels", value=shown(label)
        )
    words = file_name(label)
    normalized = [file_name(name) for name in names]
    exact = [number for number, name in enumerate(names) if name == label]
    synonyms = [n for n, name in enumerate(names) if words in map(file_name, name.split(","))]
    partial = [number for number, name in enumerate(normalized) if f"-{words}-" in f"-{name}-"]
    matches = exact or synonyms or partial
    if len(matches) == 1:
        return matches[0]
    problem = f"{len(matches)} classes have that name"
    if not matches:
        problem = "no class has that name"
        near = difflib.get_close_matches(words, normalized, MAX_SUGGESTIONS)
        matches = [normalized.index(name) for name in near]
    if matches:
        listed = ", ".join(f"{names[number]} ({number})" for number in matches[:MAX_SUGGESTIONS])
        remedy = f"give one of {listed}" + (", …" if len(matches) > MAX_SUGGESTIONS else "")
    raise UsageError(problem, remedy, parameter="labels", value=shown(label))


def file_name(name: str) -> str:
    """Return a class name for a file name: Golden retriever → golden-retriever. Letters of all
    alphabets are kept.
    """
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")
