"""Where pictures and latents go: names of files, and pixels → PNG, grid, folder; latents → .npy. Imports no torch."""

from pathlib import Path

from accel.flags import check_writable
from accel.labels import file_name


def is_folder(output: str, kind: str) -> bool:
    """Whether every picture becomes a file of its own in the folder `output`; kind: image or latent."""
    return kind == "image" and (output.endswith("/") or Path(output).is_dir())


def picture_names(labels: tuple[int, ...], class_names: tuple[str, ...]) -> list[str]:
    """The file names of pictures in a folder; class_names: of all classes, or () where they are unknown."""
    words = [f"-{file_name(class_names[label].split(',')[0])}" if class_names else "" for label in labels]
    return [f"{index:03d}-{label}{word}.png" for index, (label, word) in enumerate(zip(labels, words))]


def of_seed(output: str, kind: str, seed: int) -> str:
    """A seed's own file or folder: OUTPUT-seed-0.png or OUTPUT/seed-0/."""
    path = Path(output)
    return f"{path}/seed-{seed}/" if is_folder(output, kind) else f"{path.with_suffix('')}-seed-{seed}{path.suffix}"


def require_writable(output: str, kind: str) -> None:
    """Make the output's folder and prove that a file can be written there, before any work is done: else UsageError."""
    check_writable(Path(output, "000.png") if is_folder(output, kind) else output)
