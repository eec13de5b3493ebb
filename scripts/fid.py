"""FID and Inception Score of pictures, without TensorFlow.

    python -m scripts.fid samples.npz VIRTUAL_imagenet256_labeled.npz     # against ADM's reference statistics
    python -m scripts.fid fp16.npz fp32.npz                               # two jobs: does the fast tier change FID?
    python -m scripts.fid pictures/ reference/                            # folders of pictures

An .npz holds pictures (arr_0, uint8, N×H×W×3) or statistics (mu, sigma); statistics go first. Network and metrics are
torch-fidelity's: Inception as ported from the TensorFlow graph that ADM's evaluator runs. FID (Heusel et al. 2017,
arXiv:1706.08500) of features with means m, n and covariances S, T: |m - n|² + tr(S + T - 2·(S·T)^½). Inception Score
(Salimans et al. 2016, arXiv:1606.03498): exp of the mean KL divergence of a picture's classes from all pictures', in
ten parts.
"""

if not __package__:
    __import__("_as_module")

import hashlib
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from accel.command_line import OneLineParser, user_errors
from accel.engine import choose_device
from accel.errors import UsageError, path_errors
from accel.flags import positive
from accel.options import SamplingOptions
from accel.precision import convolutions

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d"  # of the published weights: what torch's hub checks, the first digits
PUBLISHED = {"--cfg-scale": 1.5, "--num-sampling-steps": 250}  # DiT-XL/2's FID, Table 2 of the paper; decoder: ema
FULL, LEAST = 50_000, 10  # pictures: of a published figure; one for each part of the Inception Score
FEATURES = ["2048", "logits_unbiased"]
SUFFIXES = (".png", ".jpg", ".jpeg")


#################################################################################
#                                    Pictures                                   #
#################################################################################


class Pictures:
    """Pictures (N, H, W, 3) uint8 of an .npz or a folder, or statistics; read a batch at a time.

    Raises UsageError for a path that holds neither. `count` is 0 where there are statistics only.
    """

    def __init__(self, path: Path):
        self.path, self.files, self.members = path, [], set()
        with self._errors():
            if path.is_dir():
                self.files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
                self.shape = (len(self.files), *self._read(self.files[0]).shape) if self.files else (0,)
            else:
                with zipfile.ZipFile(path) as archive:
                    self.members = {name.removesuffix(".npy") for name in archive.namelist()}
                self.shape = self._header() if "arr_0" in self.members else (0,)
        self.count = self.shape[0]
        if not self.count and not self.has_statistics:
            raise UsageError(f"{path}: holds no pictures: give an .npz with arr_0 or mu and sigma, or a folder of PNGs")

    @contextmanager
    def _errors(self):
        """Whatever damaged bytes raise, as one line."""
        try:
            with path_errors("", self.path, "give an .npz or a folder"):
                yield
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
            if isinstance(error, UsageError):
                raise UsageError(str(error).strip()) from None
            raise UsageError(f"{self.path}: cannot be read ({error}); write it again") from None

    @property
    def has_statistics(self) -> bool:
        return {"mu", "sigma"} <= self.members

    @contextmanager
    def _array(self):
        """arr_0 of the .npz: (file at its first byte, shape)."""
        with zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            if fortran or dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3:
                raise ValueError(f"arr_0 is {dtype} {shape}, not uint8 (N, H, W, 3)")
            yield file, shape

    def _header(self):
        with self._array() as (_, shape):
            return shape

    def _read(self, file):
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))

    def batches(self, size: int) -> Iterator[np.ndarray]:
        """The pictures in order, `size` at a time."""
        with self._errors():
            if self.files:
                for start in range(0, self.count, size):
                    read = [self._read(file) for file in self.files[start : start + size]]
                    if odd := next(
                        (file for file, one in zip(self.files[start:], read) if one.shape != self.shape[1:]), None
                    ):
                        raise ValueError(f"{odd.name} is of another size than {self.files[0].name}")
                    yield np.stack(read)
                return
            with self._array() as (file, shape):
                for start in range(0, self.count, size):
                    n = min(size, self.count - start)
                    yield np.frombuffer(file.read(n * int(np.prod(shape[1:]))), np.uint8).reshape(n, *shape[1:])

    def statistics(self) -> dict[str, np.ndarray]:
        """mu (2048,) and sigma (2048, 2048) of an .npz that has them, float64."""
        with self._errors(), np.load(self.path) as arrays:
            found = {name: arrays[name].astype(np.float64) for name in ("mu", "sigma")}
        if found["mu"].shape != (2048,) or found["sigma"].shape != (2048, 2048):
            raise UsageError(f"{self.path}: mu and sigma are not of Inception's 2048 features; take ADM's file")
        return found

    def settings(self) -> dict:
        """What sample_ddp.py recorded of the job that made them; {} for others."""
        folder = self.path if self.path.is_dir() else self.path.with_name(self.path.name.removesuffix(".npz"))
        try:
            settings = json.loads((folder / ".job" / "settings.json").read_text())
        except (OSError, ValueError):
            return {}
        vae = re.search(r"-vae-(.+)-cfg-", folder.name)
        return {**settings, **({"--vae": vae[1]} if vae else {})}


#################################################################################
#                                    Features                                   #
#################################################################################


def find_weights(given: Path | None) -> tuple[Path, bool]:
    """Inception's weights: `given`, or the published ones from torch's hub cache, where they are downloaded to if need
    be. Returns the file and whether they are the published ones. Raises UsageError."""
    path = given or Path(torch.hub.get_dir(), "checkpoints", URL.rpartition("/")[2])
    if given is None and not path.exists():
        print(f"fetching {URL} to {path} (95 MB, once)")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(URL, str(path), hash_prefix=SHA256)
        except (OSError, RuntimeError) as error:  # RuntimeError: another hash
            raise UsageError(
                f"--inception-weights: download failed ({error}); fetch {URL} by other means and name the file"
            ) from None
    digest = hashlib.sha256()
    with path_errors("--inception-weights", path), open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    published = digest.hexdigest().startswith(SHA256)
    if given is None and not published:
        raise UsageError(f"--inception-weights: {path} is damaged: its sha256 is not {SHA256}…; delete it")
    return path, published


def load_inception(path: Path, device: torch.device) -> torch.nn.Module:
    """torch-fidelity's Inception: pictures (n, 3, H, W) uint8 → (features (n, 2048), logits without bias (n, 1008))."""
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError:
        raise UsageError("torch-fidelity is not installed: pip install torch-fidelity") from None
    try:
        torch.load(path, weights_only=True, map_location="cpu")  # torch-fidelity's own loading would execute code
        network = FeatureExtractorInceptionV3("inception-v3-compat", FEATURES, feature_extractor_weights_path=str(path))
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--inception-weights {path}: are not Inception's ({reason}); take {URL}") from None
    return network.to(device)


@torch.inference_mode()
def features(pictures: Pictures, network: torch.nn.Module, device: torch.device, batch_size: int) -> list[torch.Tensor]:
    """Features (N, 2048) and logits (N, 1008) of all pictures, on the CPU."""
    found = []
    with tqdm(total=pictures.count, unit="picture", desc=pictures.path.name) as bar, convolutions("fp32"):
        for batch in pictures.batches(batch_size):
            x = torch.from_numpy(batch.copy()).to(device).permute(0, 3, 1, 2).contiguous()
            found.append([part.cpu() for part in network(x)])
            bar.update(len(batch))
    return [torch.cat(parts) for parts in zip(*found)]


#################################################################################
#                                    Metrics                                    #
#################################################################################


def compare(samples: Pictures, reference: Pictures, network, device, batch_size: int, neighbours: bool) -> dict:
    """The metrics of `samples` by torch-fidelity's names. neighbours: precision and recall, too, of the same features
    (Kynkäänniemi et al. 2019, arXiv:1904.06991)."""
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    pool, logits = features(samples, network, device, batch_size)
    of_samples, others = fid_features_to_statistics(pool), None
    if neighbours or not reference.has_statistics:
        others, _ = features(reference, network, device, batch_size)
    if reference.has_statistics:
        of_samples = {name: value.astype(np.float64) for name, value in of_samples.items()}
        of_reference = reference.statistics()
    else:
        of_reference = fid_features_to_statistics(others)
    found = fid_statistics_to_metric(of_samples, of_reference, verbose=False) | isc_features_to_metric(logits)
    if neighbours:
        found |= prc_features_to_metric(pool, others, save_cpu_ram=True, verbose=False)
    return found


def caveats(samples: Pictures, reference: Pictures, published: bool) -> Iterator[str]:
    """Why a figure may not be compared with others, one line each."""
    ours, theirs = samples.settings(), reference.settings()
    counts = [one.count for one in (samples, reference) if one.count and not one.has_statistics]
    if min(counts) < FULL:
        yield f"FID of {min(counts)} pictures is larger than of {FULL}: compare it with that of as many only"
    if not published:
        yield "these are not the published Inception weights: the figures compare with each other only"
    if reference.count and samples.shape[1:] != reference.shape[1:]:
        of = " against ".join("×".join(map(str, one.shape[1:3])) for one in (samples, reference))
        yield f"pictures of {of} pixels: FID compares one size"
    if ours and theirs:
        names = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        of = ", ".join(f"{name} ({ours.get(name)}, {theirs.get(name)})" for name in names)
        yield f"two jobs that differ in {of}" if names else "two jobs of the same settings"
        return
    for name, value in {**PUBLISHED, "--vae": "ema"}.items():
        if ours.get(name, value) != value:
            yield f"{name} {ours[name]}: DiT's published FID is with {value}"


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("samples", type=Path, help=".npz (arr_0), or a folder of pictures")
    parser.add_argument("reference", type=Path, help="the same, or ADM's statistics: an .npz with mu and sigma")
    parser.add_argument(
        "--inception-weights",
        type=Path,
        metavar="FILE",
        help=f"weights of torch-fidelity's Inception; default: {URL.rpartition('/')[2]} in torch's hub cache, "
        "fetched once",
    )
    parser.add_argument(
        "--precision-recall", action="store_true", help="precision and recall, too: minutes for 50,000 pictures"
    )
    parser.add_argument("--batch-size", type=positive, default=64, help="pictures at a time (default: 64)")
    parser.add_argument("--device", help="such as cuda or cpu; default: a GPU if there is one")
    args = parser.parse_args()
    with user_errors(parser):
        samples, reference = Pictures(args.samples), Pictures(args.reference)
        if not samples.count:
            raise UsageError(f"{samples.path}: holds statistics only; the samples must be pictures")
        if args.precision_recall and not reference.count:
            raise UsageError(f"--precision-recall: {reference.path} holds statistics only; give pictures")
        for one in (samples, reference):
            if one.count < LEAST and not (one is reference and one.has_statistics):
                raise UsageError(f"{one.path}: holds {one.count} pictures; at least {LEAST} are needed")
        device = choose_device(SamplingOptions(device=args.device))
        weights, published = find_weights(args.inception_weights)
        network = load_inception(weights, device)
        found = compare(samples, reference, network, device, args.batch_size, args.precision_recall)
        print(f"{samples.path}: {samples.count} pictures")
        print(f"{reference.path}: {'statistics' if reference.has_statistics else f'{reference.count} pictures'}")
        print(f"FID              {found['frechet_inception_distance']:.6g}")
        print(f"Inception Score  {found['inception_score_mean']:.6g} ± {found['inception_score_std']:.2g}")
        if args.precision_recall:
            print(f"Precision        {found['precision']:.4f}")
            print(f"Recall           {found['recall']:.4f}")
        for line in caveats(samples, reference, published):
            print(f"note: {line}")


if __name__ == "__main__":
    main()
