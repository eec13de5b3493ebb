"""Classes by name: --labels takes them in every command."""

import subprocess
import sys

import pytest
from conftest import ROOT
from torchvision.models._meta import _IMAGENET_CATEGORIES

from accel.errors import UsageError
from accel.labels import class_names, file_name, find_label
from accel.output import picture_names


def test_every_imagenet_name_is_its_number():
    assert class_names("DiT-XL/2", 1000) == tuple(_IMAGENET_CATEGORIES)
    for number, name in enumerate(_IMAGENET_CATEGORIES):
        assert find_label(name, _IMAGENET_CATEGORIES, 1000) == number
        assert file_name(name) and file_name(name).isascii()


@pytest.mark.parametrize(
    "label, number",
    [
        (207, 207),
        ("207", 207),
        (" 5 ", 5),
        ("Golden-RETRIEVER", 207),
        ("golden_retriever", 207),
        ("husky", 250),  # Siberian husky: no other name has the word
        ("cardigan", 474),  # a garment
        ("Cardigan", 264),  # a dog
    ],
)
def test_names_are_found_however_they_are_written(label, number):
    assert find_label(label, _IMAGENET_CATEGORIES, 1000) == number


@pytest.mark.parametrize(
    "label, words",
    [
        ("retriever", ("5 classes", "golden retriever (207)", "Labrador retriever (208)")),
        ("CARDIGAN", ("2 classes", "Cardigan (264)", "cardigan (474)")),
        ("terrier", ("classes have that name", "…")),
        ("goldn retriver", ("no class", "golden retriever (207)")),
        ("usky", ("no class",)),  # a part of a word
        ("qqqqzzzz", ("no class", "0 to 999")),
        ("", ("no class", "0 to 999")),
        ("1000", ("0 to 999",)),
        (-1, ("0 to 999",)),
    ],
)
def test_other_labels_are_refused_with_the_nearest_names(label, words):
    with pytest.raises(UsageError, match="labels=") as error:
        find_label(label, _IMAGENET_CATEGORIES, 1000)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert ("…" in str(error.value)) == (label == "terrier")  # more than are listed


def test_a_file_has_the_first_of_a_classs_names():
    """diffusers' pipelines list all that a class is called."""
    names = ("great white shark, man-eater", "tench")
    assert picture_names((1, 0), names) == ["000-1-tench.png", "001-0-great-white-shark.png"]
    assert picture_names((5,), ()) == ["000-5.png"]


def test_names_need_neither_torch_nor_torchvision():
    """Without torchvision numbers still work, and a name is refused in one line."""
    code = (
        "import sys\nfrom accel.labels import class_names, find_label\n"
        "print(find_label('golden retriever', class_names('DiT-XL/2', 1000), 1000))\n"
        "assert not {'torch', 'numpy', 'torchvision'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "207\n"
    bare = code.replace("import sys", "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]")
    done = subprocess.run([sys.executable, "-c", bare], cwd=ROOT, capture_output=True, text=True)
    assert "labels=golden retriever: no class names are known here; give a number" in done.stderr
