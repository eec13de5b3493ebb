"""FID, sFID and Inception Score of pictures, without TensorFlow.

    python scripts/fid.py samples.npz VIRTUAL_imagenet256_labeled.npz  # ADM's statistics
    python scripts/fid.py fp16.npz fp32.npz                            # two jobs
    python scripts/fid.py pictures/ classes/                           # folders of pictures

torch-fidelity computes Inception's features (its port of the TensorFlow graph that ADM's evaluator
runs), FID (Heusel et al. 2017, arXiv:1706.08500), Inception Score (Salimans et al. 2016,
arXiv:1606.03498), precision and recall (Kynkäänniemi et al. 2019, arXiv:1904.06991). This program
adds sFID (Nash et al. 2021, arXiv:2103.03841), which is FID of features with their places in the
picture, a reader of archives (arr_0, uint8, N×H×W×3; statistics mu, sigma, mu_s, sigma_s) and of
folders, float32 without TF32, and notes about figures that are not comparable.
"""

if __name__ == "__main__":
    import _start  # noqa: F401

import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from torch_fidelity import metric_fid, metric_isc, metric_prc
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from accel.cli import OneLineParser, positive, user_errors
from accel.config.options import DEFAULT, USER
from accel.errors import UsageError, path_errors, shown
from accel.io.filesystem import open_regular, sha256_of
from accel.io.output import print_result
from accel.io.picture_files import SUFFIXES, read_picture
from accel.io.progress import Stopwatch, progress
from accel.run.opening import choose_device
from accel.runtime.precision import convolutions

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d"  # of the published weights, the first digits, as torch's hub checks them
FULL = 50_000  # pictures of a published figure
POOL = "2048"  # torch-fidelity's names of Inception's outputs
LOGITS = "logits_unbiased"
SPATIAL = "spatial"  # the name of sFID's features
CHANNELS = 7  # of TensorFlow's mixed_6/conv, 17×17 each, as ADM's evaluator takes them
# features → names in an archive of statistics, number of features
STATISTICS = {POOL: ("mu", "sigma", 2048), SPATIAL: ("mu_s", "sigma_s", CHANNELS * 17 * 17)}


class Pictures:
    """Pictures of an .npz or of a folder of any depth, and the statistics of an .npz that has them.
    Raises UsageError for anything else.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files: list[Path] = []
        self.statistics: dict[str, dict[str, np.ndarray]] = {}
        self.shape: tuple[int, ...] = (0,)  # (N, H, W, 3)
        with self.errors():
            if path.is_dir():
                self.files = sorted(
                    path / name
                    for name in glob("**", root_dir=path, recursive=True)  # none that are hidden
                    if Path(name).suffix.lower() in SUFFIXES
                )
                if self.files:
                    self.shape = (len(self.files), *read_picture(self.files[0]).pixels.shape)
            else:
                self.archive = NpzFile(open_regular(path))
                self._read_archive()

    def _read_archive(self):
        for layer, (mu, sigma, size) in STATISTICS.items():
            if mu in self.archive.files:
                self.statistics[layer] = {
                    "mu": self.archive[mu].astype(np.float64),
                    "sigma": self.archive[sigma].astype(np.float64),
                }
                values = self.statistics[layer].values()
                is_finite = all(np.isfinite(value).all() for value in values)
                if [value.shape for value in values] != [(size,), (size, size)] or not is_finite:
                    raise ValueError(
                        f"{mu}, {sigma} are not finite, of Inception's {size} features"
                    )
        if "arr_0" in self.archive.files:
            _, self.shape, fortran_order, dtype = self._open_pixels()
            if dtype != np.uint8 or self.shape[3:] != (3,) or fortran_order:
                raise ValueError(f"arr_0 is {dtype} {self.shape}, not uint8 (N, H, W, 3), C order")

    def _open_pixels(self):
        member = self.archive.zip.open("arr_0.npy")
        np.lib.format.read_magic(member)
        return member, *np.lib.format.read_array_header_1_0(member)

    def __len__(self):
        return self.shape[0]

    def batches(self, size: int, work: str = "") -> Iterator[torch.Tensor]:
        """Yield all pictures in order, (n, 3, H, W) uint8 of at most `size` each, with the
        progress of `work`. Raises UsageError, which names the file, for corrupt pictures.
        """
        with (
            self.errors(),
            progress(
                total=len(self), unit="picture", desc=f"{work}{self.path.name}", leave=False
            ) as bar,
            ThreadPoolExecutor(8) as pool,
        ):
            # zipfile compares the checksum at the member's end.
            member = None if self.files else self._open_pixels()[0]
            for first in range(0, len(self), size):
                if member is None:
                    pixels = np.stack(
                        [*pool.map(self._read_file, self.files[first : first + size])]
                    )
                else:
                    shape = min(size, len(self) - first), *self.shape[1:]
                    content = member.read(int(np.prod(shape)))
                    pixels = np.frombuffer(content, np.uint8).reshape(shape)
                yield torch.tensor(pixels).permute(0, 3, 1, 2)
                bar.update(len(pixels))

    def _read_file(self, file):
        pixels = read_picture(file).pixels
        if pixels.shape != self.shape[1:]:
            raise UsageError(
                f"{file}: is {pixels.shape}, and {self.files[0].name} {self.shape[1:]}; crop and "
                "resize all to one size, by the recipe in docs/fid.md"
            )
        return pixels

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn every error of corrupt bytes into a UsageError."""
        try:
            yield
        except (UsageError, MemoryError):
            raise
        except Exception as error:
            reason = shown(str(getattr(error, "strerror", None) or error), 200)
            raise UsageError(
                f"{self.path}: cannot be read ({reason}); give an .npz or a folder of pictures"
            ) from None


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
                f"download failed ({error})",
                f"fetch {URL} by other means and name the file",
                parameter="inception_weights",
            ) from None
    with path_errors("inception_weights", path), open_regular(path) as file:
        return path, sha256_of(file).startswith(SHA256)


def load_inception(
    path: Path, device: torch.device
) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    """Return torch-fidelity's Inception as a function: pictures (n, 3, H, W) uint8 → features
    (n, 2048), logits without bias (n, 1008), sFID's features (n, 2023), by name, on the CPU.
    """
    try:
        # torch-fidelity's own loading executes code
        torch.load(path, weights_only=True, map_location="cpu")
        network = FeatureExtractorInceptionV3("inception-v3-compat", [POOL, LOGITS], str(path))
    except Exception as error:  # other files can raise any exception
        reason = shown(str(error).split("\n")[0], 200)
        raise UsageError(
            f"is not Inception ({reason})", f"take {URL}", parameter="inception_weights", value=path
        ) from None

    network.to(device)
    spatial = []  # the output of TensorFlow's mixed_6/conv, (n, 192, 17, 17)
    # torch-fidelity converts its weights to Mixed_6d.branch1x1.
    network.Mixed_6d.branch1x1.register_forward_hook(lambda _, __, out: spatial.append(out))

    def features(pictures):
        pool, logits = network(pictures)
        return {
            POOL: pool.cpu(),
            LOGITS: logits.cpu(),
            # Row, column, channel: TensorFlow's order, and so that of ADM's mu_s and sigma_s.
            SPATIAL: spatial.pop()[:, :CHANNELS].permute(0, 2, 3, 1).flatten(1).cpu(),
        }

    return features


def features_of(
    pictures: Pictures, network: Callable, device: torch.device, batch_size: int
) -> dict[str, torch.Tensor]:
    """Return features (N, D) of all pictures, by name, in one pass."""
    with torch.no_grad(), convolutions("fp32"):
        batches = [network(batch.to(device)) for batch in pictures.batches(batch_size)]
    return {name: torch.cat([batch.pop(name) for batch in batches]) for name in [*batches[0]]}


def fid_of(features: torch.Tensor, reference: dict[str, np.ndarray]) -> float:
    """Return the Fréchet distance of features (N, D) to statistics."""
    own = {
        name: value.astype(reference[name].dtype)
        for name, value in metric_fid.fid_features_to_statistics(features).items()
    }
    distance = metric_fid.fid_statistics_to_metric(own, reference, verbose=False)
    return distance[metric_fid.KEY_METRIC_FID]


def compare(
    samples: Pictures,
    reference: Pictures,
    network: Callable,
    device: torch.device,
    args: Namespace,
) -> dict[str, float]:
    """Return the metrics of `samples`. There is no sFID where the reference's statistics lack its
    own. FID ±: half the width of its 95 % interval, from resampled features of `samples`.
    """
    features = features_of(samples, network, device, args.batch_size)
    statistics = reference.statistics
    if args.precision_recall or not statistics:
        of_reference = features_of(reference, network, device, args.batch_size)
        statistics = statistics or {
            layer: metric_fid.fid_features_to_statistics(of_reference[layer])
            for layer in STATISTICS
        }
    pool = features[POOL]
    metrics = {"FID": fid_of(pool, statistics[POOL])}
    if args.bootstrap:
        draw = np.random.default_rng(0).integers
        drawn = [
            fid_of(pool[draw(len(pool), size=len(pool))], statistics[POOL])
            for _ in range(args.bootstrap)
        ]
        metrics["FID ±"] = 1.96 * float(np.std(drawn, ddof=1))
    if SPATIAL in statistics:
        metrics["sFID"] = fid_of(features[SPATIAL], statistics[SPATIAL])
    metrics["Inception Score"], metrics["Inception Score ±"] = metric_isc.isc_features_to_metric(
        features[LOGITS]
    ).values()
    if args.precision_recall:
        metrics["Precision"], metrics["Recall"] = metric_prc.calculate_precision_recall_part(
            pool.to(device), of_reference[POOL].to(device), batch_size=1000
        )
    return metrics


def notes(samples: Pictures, reference: Pictures, published: bool) -> Iterator[str]:
    """Yield the reasons why the figures are not comparable with other figures."""
    fewest = len(samples) if reference.statistics else min(len(samples), len(reference))
    if fewest < FULL:
        yield f"FID of {fewest} pictures is larger than of {FULL}: compare equal numbers only"
    if not published:
        yield "these are not the published Inception weights: compare with the same weights only"
    if len(reference) and samples.shape[1:] != reference.shape[1:]:
        sides = ["×".join(map(str, side.shape[1:3])) for side in (samples, reference)]
        yield f"pictures of {' against '.join(sides)} pixels: FID compares one size"
    if reference.statistics.keys() == {POOL}:
        yield "no sFID: the reference has no mu_s, sigma_s"


def report(args: Namespace, settings: dict) -> None:
    """Print the figures, and notes about them. Both sides are read whole before features are
    computed. settings: value and origin of each argument.
    """
    if args.bootstrap == 1:
        raise UsageError("one value has no spread", "give more", parameter="bootstrap", value=1)
    samples = Pictures(args.samples)
    reference = Pictures(args.reference)
    needed = (  # the sides whose pictures are read
        [samples, reference] if args.precision_recall or not reference.statistics else [samples]
    )
    for side in needed:
        if len(side) < 10:  # the Inception Score has ten parts
            raise UsageError(
                f"{side.path}: has {len(side)} pictures; give a folder or an archive (arr_0) of at "
                "least 10, as sample_ddp.py --num-fid-samples makes"
            )
    device = choose_device(args.device)
    watch = Stopwatch(device)
    with watch.phase("load"):
        weights, published = find_weights(args.inception_weights)
        network = load_inception(weights, device)
    lines = [*notes(samples, reference, published)]
    # measured: features in float32, and of the larger side float64 copies for the covariance
    *other, most = sorted(map(len, needed))
    print(f"memory needed: about {1 + 47e-6 * most + 29e-6 * sum(other):.0f} GB", flush=True)
    with watch.phase("check"):
        for side in needed:
            for _ in side.batches(64, "checking "):
                pass
    with watch.phase("compare"):
        metrics = compare(samples, reference, network, device, args)
    sides = [
        f"{side.path}: {'statistics' if side.statistics else f'{len(side)} pictures'}"
        for side in (samples, reference)
    ]
    print(*sides, *(f"{name:19}{value:.6g}" for name, value in metrics.items()), sep="\n")
    for line in lines:
        print(f"note: {line}")
    if args.json:
        print_result(
            [args.samples, args.reference],
            watch.phases,
            settings,
            pictures=len(samples),
            metrics=metrics,
            notes=lines,
        )


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("samples", type=Path, help=".npz (arr_0), or a folder of pictures")
    parser.add_argument(
        "reference",
        type=Path,
        help="the same, or ADM's statistics: an .npz with mu, sigma, mu_s, sigma_s",
    )
    parser.add_argument(
        "--inception-weights",
        type=Path,
        metavar="FILE",
        help=f"weights of torch-fidelity's Inception; default: {URL.rpartition('/')[2]} in torch's "
        "hub cache, fetched once",
    )
    parser.add_argument(
        "--precision-recall",
        action="store_true",
        help="precision and recall, too: minutes for 50,000 pictures",
    )
    parser.add_argument(
        "--bootstrap",
        type=positive,
        metavar="N",
        help="FID's 95 %% interval, from N resamplings of the samples' features, some seconds each",
    )
    parser.add_argument(
        "--json", action="store_true", help="the last line of the output is one JSON object"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="pictures at a time (default: 64)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="PIL")  # the reader's error is the line
    with user_errors(parser):
        settings = {
            name: {"value": value, "origin": DEFAULT if value == parser.get_default(name) else USER}
            for name, value in vars(args).items()
            if value is not None
        }
        report(args, settings)


if __name__ == "__main__":
    main()
