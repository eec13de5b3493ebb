"""Classes by name: --labels takes them in every command."""

import json

import pytest
from conftest import mistake
from forks import refused, succeeds
from torchvision.models._meta import _IMAGENET_CATEGORIES

from accel import Sampler
from accel.io.labels import file_name, find_label, imagenet
from accel.io.output import picture_names


def test_every_imagenet_name_is_its_number():
    assert imagenet() == tuple(_IMAGENET_CATEGORIES)
    for number, name in enumerate(_IMAGENET_CATEGORIES):
        assert find_label(name, _IMAGENET_CATEGORIES, 1000) == number
        assert file_name(name) and file_name(name).isascii()
    assert picture_names((5,), ()) == ["000-5.png"]  # a class without a name


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
        ("", ("no class", "0 to 999")),
        (-1, ("0 to 999",)),
    ],
)
def test_other_labels_are_refused_with_the_nearest_names(label, words):
    with mistake("labels") as error:
        find_label(label, _IMAGENET_CATEGORIES, 1000)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert ("…" in str(error.value)) == (label == "terrier")  # more than are listed


DEMO = "--model", "DiT-Demo/2", "--device", "cpu", "--num-sampling-steps", 2
NAMES = "rose", "tulip", "日本の桜", "sun flower", "daisy", "iris", "7", "lily, lilium"


@pytest.fixture
def listed(tmp_path):
    """A file with a name a line, as an editor on Windows leaves it."""
    path = tmp_path / "names.txt"
    path.write_text("\ufeff" + "\r\n".join(NAMES) + "\r\n\r\n", encoding="utf-8")
    return path


def test_own_names_are_labels_and_names_of_files(listed, here, tmp_path):
    labels = "--labels", "sun flower", "日本の桜", "7", "lilium"
    succeeds(
        here("sample.py", *DEMO, "--class-names", listed, *labels, "--output", f"{tmp_path}/made/")
    )
    names = ["000-3-sun-flower.png", "001-2-日本の桜.png", "002-7-lily.png", "003-7-lily.png"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == names


def test_own_names_in_python_and_json(listed, tmp_path):
    numbered = dict(reversed([*enumerate(NAMES)]))
    class_to_idx = {name: number for number, name in numbered.items()}
    forms = NAMES, numbered, class_to_idx
    files = [tmp_path / f"{number}.json" for number in range(len(forms))]
    for file, names in zip(files, forms):
        file.write_text(json.dumps(names))
    for given in (*forms, listed, *files):
        with Sampler(
            "DiT-Demo/2", device="cpu", num_sampling_steps=1, class_names=given
        ) as sampler:
            assert sampler.latents("tulip").equal(sampler.latents(1))
            with mistake("labels", "planet"):
                sampler.latents("planet")


@pytest.mark.parametrize(
    "content, words",
    [
        ("\n".join(NAMES[:7]), "are 7 names for 8 classes"),
        ('["a", 3]', "name 1 is 3"),
        ('{"cat": 0, "dog": 2}', "name 1 is None; give text for each class from 0"),
        ('{"1": "a", "2": "b"}', "name 0 is None; give text for each class from 0"),
        (b"\xff\xfe\x00", "is neither UTF-8 text"),
        (None, "No such file"),
    ],
)
def test_wrong_names_are_one_line_before_anything_is_loaded(content, words, tmp_path, here):
    path = tmp_path / "names"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = here("sample.py", *DEMO, "--class-names", path, "--output", tmp_path / "x.png")
    assert words in refused(done) and "--class-names" in done.stderr
    assert done.stdout == "" and not (tmp_path / "x.png").exists()


def test_a_name_is_refused_where_no_class_has_one():
    with mistake("labels", "cat"):
        find_label("cat", (), 3)
