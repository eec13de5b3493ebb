"""FID, sFID and Inception Score of pictures, without TensorFlow.

    python scripts/fid.py samples.npz VIRTUAL_imagenet256_labeled.npz  # ADM's statistics
    python scripts/fid.py fp16.npz fp32.npz                            # two jobs
    python scripts/fid.py pictures/ classes/                           # folders of pictures

Network and metrics are torch-fidelity's: Inception as ported from the TensorFlow graph
that ADM's evaluator runs, FID (Heusel et al. 2017, arXiv:1706.08500), Inception Score
(Salimans et al. 2016, arXiv:1606.03498). Added here: sFID (Nash et al. 2021, arXiv:2103.03841),
the FID of features that keep their place in the picture; precision and recall (Kynkäänniemi et
al. 2019, arXiv:1904.06991) of Inception's features; archives of pictures (arr_0, uint8, N×H×W×3)
and of statistics (mu, sigma, mu_s, sigma_s; they go first), float32 without TF32, weights of a
known hash, and the reasons why a figure may not be compared.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import os
import warnings
import zipfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from accel.cli import OneLineParser, positive, user_errors
from accel.errors import UsageError, path_errors, shown
from accel.files import open_regular, read_json, sha256_of
from accel.opening import choose_device
from accel.picture_files import SUFFIXES, read_picture
from accel.precision import convolutions

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d"  # of the published weights, the first digits, as torch's hub checks them
FULL = 50_000  # pictures of a published figure
LEAST = 10  # pictures: one for each part of the Inception Score
READERS = 8  # threads that read files
POOL = "2048"  # torch-fidelity's names of Inception's outputs
LOGITS = "logits_unbiased"
SPATIAL = "spatial"  # the name of sFID's features
CHANNELS = 7  # of TensorFlow's mixed_6/conv, 17×17 each, as ADM's evaluator takes them
# names in an archive
STATISTICS = {POOL: ("mu", "sigma", 2048), SPATIAL: ("mu_s", "sigma_s", CHANNELS * 17 * 17)}
NEIGHBOURS = 3  # of a feature, up to which its neighbourhood reaches
ROWS = 1000  # features whose distances are computed at a time
FID = "frechet_inception_distance"
SFID = "spatial_frechet_inception_distance"
METRICS = {POOL: FID, SPATIAL: SFID}  # FID's name is torch-fidelity's

# pictures (n, 3, H, W) uint8 → features (n, D) by name
Features = Callable[[torch.Tensor], dict[str, torch.Tensor]]


class Pictures:
    """Pictures of an .npz or a folder, flat or with a folder a class, and the statistics of
    an .npz that has them. Raises UsageError for anything else.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files = []
        self.statistics = {}
        self.shape = (0,)
        with self.errors():
            if path.is_dir():
                self.files = _pictures_below(path)
                if self.files:
                    self.shape = (len(self.files), *read_picture(self.files[0]).pixels.shape)
            else:
                self._open(zipfile.ZipFile(open_regular(path)))

    def _open(self, archive):
        names = archive.namelist()
        for layer, (mu, sigma, size) in STATISTICS.items():
            if f"{mu}.npy" not in names:
                break
            self.statistics[layer] = {
                "mu": _statistics(archive, mu, size),
                "sigma": _statistics(archive, sigma, size, size),
            }
        if "arr_0.npy" not in names:
            return
        _, shape, fortran_order, dtype = _open_array(archive, "arr_0")
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
            raise ValueError(f"arr_0 is {dtype} {shape}, not uint8 (N, H, W, 3)")
        if fortran_order:
            raise ValueError(
                "arr_0 is in Fortran order, whose values are not picture after picture: save "
                "numpy.ascontiguousarray(arr_0)"
            )
        self.archive = archive
        self.shape = shape

    def batches(self, size: int, work: str = "") -> Iterator[torch.Tensor]:
        """Yield all pictures in order, (n, 3, H, W) uint8 of at most `size` each, with a bar for
        `work`. Raises UsageError, which names the file, for damaged pictures.
        """
        label = f"{work}{self.path.name}"
        with (
            self.errors(),
            tqdm(total=len(self), unit="picture", desc=label, leave=False) as bar,
        ):
            read = self._read_files if self.files else self._read_archive
            for pixels in read(size):
                yield torch.tensor(pixels).permute(0, 3, 1, 2)
                bar.update(len(pixels))

    def _read_archive(self, size):
        each = prod(self.shape[1:])
        # zipfile compares the checksum at the member's end.
        member, *_ = _open_array(self.archive, "arr_0")
        with member:
            while block := member.read(size * each):
                yield np.frombuffer(block, np.uint8).reshape(-1, *self.shape[1:])

    def _read_files(self, size):
        with ThreadPoolExecutor(READERS) as pool:
            for first in range(0, len(self), size):
                yield np.stack(list(pool.map(self._read_file, self.files[first : first + size])))

    def check(self) -> None:
        """Read all pictures once, so that damage is found before features are computed.
        Raises UsageError, which names the file.
        """
        for _ in self.batches(64, "checking "):
            pass

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn every error of damaged bytes into a UsageError."""
        try:
            yield
        except (UsageError, MemoryError):
            raise
        except Exception as error:
            reason = shown(str(getattr(error, "strerror", None) or error), 200)
            raise UsageError(
                f"{self.path}: cannot be read ({reason}); give an .npz or a folder of pictures"
            ) from None

    def __len__(self):
        return self.shape[0]

    def _read_file(self, file):
        picture = read_picture(file)
        if picture.pixels.shape != self.shape[1:]:
            _, height, width, _ = self.shape
            raise UsageError(
                f"{file}: has {picture.size} pixels, {self.files[0].name} {width}x{height}; crop "
                "and resize all to one size, by the recipe in docs/fid.md"
            )
        return picture.pixels

    def settings(self) -> dict:
        """Return the settings that sample_ddp.py recorded of the job that made the
        pictures; {} for others.
        """
        folder = self.path
        if not folder.is_dir():
            folder = folder.with_name(folder.name.removesuffix(".npz"))
        try:
            return read_json(folder / ".job" / "settings.json")
        except (OSError, ValueError):
            return {}


def _pictures_below(folder):
    """Return the pictures below a folder at any depth, sorted, without hidden folders."""

    def fail(error):
        raise error

    files = []
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if Path(name).suffix.lower() in SUFFIXES]
    return sorted(files)


def _open_array(archive, name):
    """Return an archive's array, open at its values: file, shape, whether it is in Fortran order,
    dtype. Raises ValueError if its size is not that of the shape.
    """
    info = archive.getinfo(f"{name}.npy")
    member = archive.open(info)
    np.lib.format.read_magic(member)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(member)
    if info.file_size != member.tell() + prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} holds {info.file_size:,} bytes, not those of {dtype} {shape}")
    return member, shape, fortran_order, dtype


def _statistics(archive, name, *expected):
    """Return an array of statistics of the expected shape in float64."""
    _, shape, _, dtype = _open_array(archive, name)
    if shape != expected or dtype.kind != "f":
        raise ValueError(f"{name} is {dtype} {shape}, not of Inception's {expected[0]} features")
    values = np.lib.format.read_array(archive.open(f"{name}.npy")).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds values that are not finite")
    return values


def find_weights(given: Path | None) -> tuple[Path, bool]:
    """Return the file of Inception's weights and whether it is the published one:
    `given`, or the file in torch's hub cache, downloaded if it is missing. Raises
    UsageError.
    """
    path = given or Path(torch.hub.get_dir(), "checkpoints", URL.rpartition("/")[2])
    if given is None and not path.exists():
        print(f"fetching {URL} to {path} (95 MB, once)")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(URL, str(path), hash_prefix=SHA256)
        except (OSError, RuntimeError) as error:  # RuntimeError: another hash
            raise UsageError(
                f"--inception-weights: download failed ({error}); fetch {URL} by other means and "
                "name the file"
            ) from None
    with path_errors("inception_weights", path), open_regular(path) as file:
        return path, sha256_of(file).startswith(SHA256)


def load_inception(path: Path, device: torch.device) -> Features:
    """Load torch-fidelity's Inception: features (n, 2048), logits without bias (n, 1008),
    sFID's features (n, 2023).
    """
    try:
        from torch_fidelity.utils import create_feature_extractor

        # torch-fidelity's own loading executes code
        torch.load(path, weights_only=True, map_location="cpu")
        network = create_feature_extractor(
            "inception-v3-compat",
            [POOL, LOGITS],
            cuda=device.type == "cuda",
            feature_extractor_weights_path=str(path),
            verbose=False,
        )
    except ImportError:
        raise UsageError("torch-fidelity is not installed: pip install torch-fidelity") from None
    except Exception as error:  # whatever other files raise
        reason = shown(str(error).split("\n")[0], 200)
        raise UsageError(
            f"--inception-weights {path}: are not Inception's ({reason}); take {URL}"
        ) from None

    def features(pictures):
        spatial = []  # the output of TensorFlow's mixed_6/conv, (n, 192, 17, 17)
        # torch-fidelity converts its weights to Mixed_6d.branch1x1.
        hook = network.Mixed_6d.branch1x1.register_forward_hook(
            lambda module, inputs, output: spatial.append(output)
        )
        with hook:
            pool, logits = network(pictures)
        # Row, column, channel: TensorFlow's order, and so that of ADM's mu_s and sigma_s.
        spatial = spatial[0][:, :CHANNELS].permute(0, 2, 3, 1).flatten(1)
        return {POOL: pool, LOGITS: logits, SPATIAL: spatial}

    return features


def features_of(
    pictures: Pictures, network: Features, device: torch.device, batch_size: int
) -> dict[str, torch.Tensor]:
    """Return features (N, D) of all pictures, by name, in one pass."""
    batches = defaultdict(list)
    with torch.no_grad(), convolutions("fp32"):
        for batch in pictures.batches(batch_size):
            for name, values in network(batch.to(device)).items():
                batches[name].append(values.cpu())
    return {name: torch.cat(values) for name, values in batches.items()}


def compare(
    samples: Pictures, reference: Pictures, network: Features, device: torch.device, args: Namespace
) -> dict:
    """Return the metrics of `samples` by torch-fidelity's names. There is no sFID where the
    reference's statistics lack its own.
    """
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric

    features = features_of(samples, network, device, args.batch_size)
    of_reference = {}
    if args.precision_recall or not reference.statistics:
        of_reference = features_of(reference, network, device, args.batch_size)
    statistics = reference.statistics
    if not statistics:
        statistics = {layer: fid_features_to_statistics(of_reference[layer]) for layer in METRICS}
    metrics = isc_features_to_metric(features[LOGITS])
    for layer, theirs in statistics.items():
        ours = fid_features_to_statistics(features[layer])
        ours = {name: value.astype(theirs[name].dtype) for name, value in ours.items()}
        metrics[METRICS[layer]] = fid_statistics_to_metric(ours, theirs, verbose=False)[FID]
    if args.precision_recall:
        ours = features[POOL].to(device)
        theirs = of_reference[POOL].to(device)
        metrics["precision"] = share_inside(ours, theirs)
        metrics["recall"] = share_inside(theirs, ours)
    return metrics


def share_inside(points: torch.Tensor, others: torch.Tensor) -> float:
    """Return the share of points (N, D) inside a neighbourhood of `others` (M, D), each of which
    reaches to the third nearest of the others: precision of generated among real features, and
    recall of real among generated ones.
    """
    radii = torch.cat(
        [torch.cdist(part, others).kthvalue(NEIGHBOURS + 1).values for part in others.split(ROWS)]
    )  # the nearest of a point is the point
    inside = [(torch.cdist(part, others) <= radii).any(1) for part in points.split(ROWS)]
    return float(torch.cat(inside).double().mean())


def caveats(samples: Pictures, reference: Pictures, published: bool) -> Iterator[str]:
    """Yield the reasons why a figure may not be compared with others, one line each."""
    ours = samples.settings()
    theirs = reference.settings()
    fewest = len(samples) if reference.statistics else min(len(samples), len(reference))
    if fewest < FULL:
        yield (
            f"FID of {fewest} pictures is larger than of {FULL}: compare it with that of as many "
            "only"
        )
    if not published:
        yield (
            "these are not the published Inception weights: the figures compare with each other "
            "only"
        )
    if len(reference) and samples.shape[1:] != reference.shape[1:]:
        sides = ["×".join(map(str, side.shape[1:3])) for side in (samples, reference)]
        yield f"pictures of {' against '.join(sides)} pixels: FID compares one size"
    if ours and theirs:
        differences = [
            f"{shown(name)} ({shown(ours.get(name))}, {shown(theirs.get(name))})"
            for name in sorted({**ours, **theirs})
            if ours.get(name) != theirs.get(name)
        ]
        likeness = (
            f"that differ in {', '.join(differences)}" if differences else "of the same settings"
        )
        yield f"two jobs {likeness}"


def main() -> None:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    file = URL.rpartition("/")[2]
    add("samples", type=Path, help=".npz (arr_0), or a folder of pictures")
    add(
        "reference",
        type=Path,
        help="the same, or ADM's statistics: an .npz with mu, sigma, mu_s, sigma_s",
    )
    add(
        "--inception-weights",
        type=Path,
        metavar="FILE",
        help=f"weights of torch-fidelity's Inception; default: {file} in torch's hub cache, "
        "fetched once",
    )
    add(
        "--precision-recall",
        action="store_true",
        help="precision and recall, too: minutes for 50,000 pictures",
    )
    add("--batch-size", type=positive, default=64, help="pictures at a time (default: 64)")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="PIL")  # the reader's error is the line
    with user_errors(parser):
        report(args)


def report(args: Namespace) -> None:
    """Print the figures that the command line asks for, and the reasons why they may not
    be compared. Both sides are checked whole before features are computed.
    """
    samples = Pictures(args.samples)
    reference = Pictures(args.reference)
    looked_at = [samples]  # the sides whose pictures are needed
    if args.precision_recall or not reference.statistics:
        looked_at.append(reference)
    for side in looked_at:
        if len(side) < LEAST:
            kind = "a folder" if side.path.is_dir() else "an archive (arr_0)"
            raise UsageError(
                f"{side.path}: is {kind} with {len(side)} pictures; give one of at least {LEAST}, "
                "as sample_ddp.py --num-fid-samples makes"
            )
    device = choose_device(args.device)
    weights, published = find_weights(args.inception_weights)
    network = load_inception(weights, device)
    for side in looked_at:
        side.check()
    metrics = compare(samples, reference, network, device, args)
    contents = "statistics" if reference.statistics else f"{len(reference)} pictures"
    print(f"{samples.path}: {len(samples)} pictures")
    print(f"{reference.path}: {contents}")
    figures = {
        "FID": f"{metrics[FID]:.6g}",
        "sFID": "none: the reference has statistics, but not mu_s, sigma_s",
        "Inception Score": "{inception_score_mean:.6g} ± {inception_score_std:.2g}".format(
            **metrics
        ),
    }
    if SFID in metrics:
        figures["sFID"] = f"{metrics[SFID]:.6g}"
    if args.precision_recall:
        figures["Precision"] = f"{metrics['precision']:.4f}"
        figures["Recall"] = f"{metrics['recall']:.4f}"
    for name, text in figures.items():
        print(f"{name:17}{text}")
    for line in caveats(samples, reference, published):
        print(f"note: {line}")


if __name__ == "__main__":
    main()
