"""FID, sFID and Inception Score of pictures, without TensorFlow.

    python -m scripts.fid samples.npz VIRTUAL_imagenet256_labeled.npz     # against ADM's reference statistics
    python -m scripts.fid fp16.npz fp32.npz                               # two jobs: does the fast tier change FID?
    python -m scripts.fid pictures/ reference/                            # folders of pictures

Network and metrics are torch-fidelity's: Inception as ported from the TensorFlow graph that ADM's evaluator runs, FID
(Heusel et al. 2017, arXiv:1706.08500), Inception Score (Salimans et al. 2016, arXiv:1606.03498), precision and recall
(Kynkäänniemi et al. 2019, arXiv:1904.06991). Added here: sFID (Nash et al. 2021, arXiv:2103.03841), the FID of
features that keep their place in the picture, archives of pictures (arr_0, uint8, N×H×W×3) and of statistics (mu,
sigma, mu_s, sigma_s; they go first), float32 without TF32, weights of a known hash, and what makes a figure
incomparable.
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

from accel.command_line import OneLineParser, user_errors
from accel.errors import UsageError, path_errors
from accel.flags import positive
from accel.precision import convolutions

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d"  # of the published weights: what torch's hub checks, the first digits
PUBLISHED = {"--cfg-scale": 1.5, "--num-sampling-steps": 250, "--vae": "ema"}  # DiT-XL/2's FID, Table 2 of the paper
FULL, LEAST = 50_000, 10  # pictures: of a published figure; one for each part of the Inception Score
POOL, LOGITS = "2048", "logits_unbiased"  # torch-fidelity's names of Inception's outputs
SPATIAL, CHANNELS = "spatial", 7  # of TensorFlow's mixed_6/conv, 17×17 each, as ADM's evaluator takes them
STATISTICS = {POOL: ("mu", "sigma", 2048), SPATIAL: ("mu_s", "sigma_s", CHANNELS * 17 * 17)}  # names in an archive
FID, SFID = "frechet_inception_distance", "spatial_frechet_inception_distance"  # the first is torch-fidelity's
METRICS = {POOL: FID, SPATIAL: SFID}
SUFFIXES = (".png", ".jpg", ".jpeg")


class Pictures(torch.utils.data.Dataset):
    """Pictures (3, H, W) uint8 of an .npz or a folder, and the statistics of an .npz that has them.

    Pictures are read one after the other, and none is kept.
    """

    def __init__(self, path: Path):
        self.path, self.files, self.statistics, self.shape = path, [], {}, (0,)
        with self.errors():
            if path.is_dir():
                self.files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
                if self.files:
                    self.shape = (len(self.files), *_pixels(self.files[0]).shape)
            else:
                self._open(zipfile.ZipFile(path))

    def _open(self, archive):
        for layer, (mu, sigma, size) in STATISTICS.items():
            if f"{mu}.npy" not in archive.namelist():
                break
            with np.load(self.path) as arrays:
                found = {"mu": arrays[mu].astype(np.float64), "sigma": arrays[sigma].astype(np.float64)}
            if found["mu"].shape != (size,) or found["sigma"].shape != (size, size):
                raise ValueError(f"{mu} and {sigma} are not of Inception's {size} features")
            self.statistics[layer] = found
        if "arr_0.npy" in archive.namelist():
            self.member = archive.open("arr_0.npy")
            np.lib.format.read_magic(self.member)
            self.shape, fortran, dtype = np.lib.format.read_array_header_1_0(self.member)
            self.start = self.member.tell()
            if fortran or dtype != np.uint8 or len(self.shape) != 4 or self.shape[-1] != 3:
                raise ValueError(f"arr_0 is {dtype} {self.shape}, not uint8 (N, H, W, 3)")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Whatever damaged bytes raise, as one line."""
        try:
            yield
        except (OSError, zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
            raise UsageError(f"{self.path}: cannot be read ({error}); give an .npz or a folder of pictures") from None

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        if self.files:
            pixels = _pixels(self.files[index])
            if pixels.shape != self.shape[1:]:
                raise ValueError(f"{self.files[index].name} is of another size than {self.files[0].name}")
        else:
            size = int(np.prod(self.shape[1:]))
            self.member.seek(self.start + index * size)
            pixels = np.frombuffer(self.member.read(size), np.uint8).reshape(self.shape[1:])
        return torch.tensor(pixels).permute(2, 0, 1)

    def settings(self) -> dict:
        """What sample_ddp.py recorded of the job that made them; {} for others."""
        folder = self.path if self.path.is_dir() else self.path.with_name(self.path.name.removesuffix(".npz"))
        try:
            settings = json.loads((folder / ".job" / "settings.json").read_text())
        except (OSError, ValueError):
            return {}
        vae = re.search(r"-vae-(.+)-cfg-", folder.name)
        return {**settings, **({"--vae": vae[1]} if vae else {})}


def _pixels(file):
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def find_weights(given: Path | None) -> tuple[Path, bool]:
    """Inception's weights: `given`, or those in torch's hub cache, where the published ones are downloaded to if need
    be. Returns the file and whether it is the published one. Raises UsageError."""
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
    with path_errors("inception_weights", path):
        return path, hashlib.sha256(path.read_bytes()).hexdigest().startswith(SHA256)


def load_inception(path: Path, cuda: bool) -> torch.nn.Module:
    """torch-fidelity's Inception: pictures (n, 3, H, W) uint8 → (features (n, 2048), logits without bias (n, 1008))."""
    try:
        from torch_fidelity.utils import create_feature_extractor
    except ImportError:
        raise UsageError("torch-fidelity is not installed: pip install torch-fidelity") from None
    how = dict(cuda=cuda, feature_extractor_weights_path=str(path), verbose=False)
    try:
        torch.load(path, weights_only=True, map_location="cpu")  # torch-fidelity's own loading would execute code
        return create_feature_extractor("inception-v3-compat", [POOL, LOGITS], **how)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--inception-weights {path}: are not Inception's ({reason}); take {URL}") from None


@contextmanager
def spatial_features(network: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list that fills with sFID's features (n, 2023) of each batch that the network evaluates inside.

    torch-fidelity converts the weights of TensorFlow's mixed_6/conv to Mixed_6d.branch1x1.
    """
    found = []

    def keep(module, given, out):
        # (n, 192, 17, 17) → row, column, channel: TensorFlow's order, and so that of ADM's mu_s and sigma_s.
        found.append(out[:, :CHANNELS].permute(0, 2, 3, 1).flatten(1).cpu())

    with network.Mixed_6d.branch1x1.register_forward_hook(keep):
        yield found


def compare(samples: Pictures, reference: Pictures, network, cuda: bool, batch_size: int, neighbours: bool) -> dict:
    """The metrics of `samples` by torch-fidelity's names. neighbours: precision and recall, too, of the same
    features. No sFID where the reference's statistics lack its own."""
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric
    from torch_fidelity.utils import get_featuresdict_from_dataset

    def features(pictures):
        how = dict(batch_size=batch_size, cuda=cuda, save_cpu_ram=True, verbose=True)
        with pictures.errors(), convolutions("fp32"), spatial_features(network) as spatial:
            return get_featuresdict_from_dataset(pictures, network, **how) | {SPATIAL: torch.cat(spatial)}

    found, of_reference = features(samples), reference.statistics
    if neighbours or not of_reference:
        others = features(reference)
    of_reference = of_reference or {layer: fid_features_to_statistics(others[layer]) for layer in STATISTICS}
    metrics = isc_features_to_metric(found[LOGITS])
    for layer, theirs in of_reference.items():
        ours = fid_features_to_statistics(found[layer])
        ours = {name: value.astype(theirs[name].dtype) for name, value in ours.items()}
        metrics[METRICS[layer]] = fid_statistics_to_metric(ours, theirs, verbose=False)[FID]
    if neighbours:
        metrics |= prc_features_to_metric(found[POOL], others[POOL], save_cpu_ram=True, verbose=False)
    return metrics


def caveats(samples: Pictures, reference: Pictures, published: bool) -> Iterator[str]:
    """Why a figure may not be compared with others, one line each."""
    ours, theirs = samples.settings(), reference.settings()
    fewest = len(samples) if reference.statistics else min(len(samples), len(reference))
    if fewest < FULL:
        yield f"FID of {fewest} pictures is larger than of {FULL}: compare it with that of as many only"
    if not published:
        yield "these are not the published Inception weights: the figures compare with each other only"
    if len(reference) and samples.shape[1:] != reference.shape[1:]:
        of = " against ".join("×".join(map(str, one.shape[1:3])) for one in (samples, reference))
        yield f"pictures of {of} pixels: FID compares one size"
    if ours and theirs:
        names = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        of = ", ".join(f"{name} ({ours.get(name)}, {theirs.get(name)})" for name in names)
        yield f"two jobs that differ in {of}" if names else "two jobs of the same settings"
        return
    for name, value in PUBLISHED.items():
        if ours.get(name, value) != value:
            yield f"{name} {ours[name]}: DiT's published FID is with {value}"


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("samples", type=Path, help=".npz (arr_0), or a folder of pictures")
    parser.add_argument(
        "reference", type=Path, help="the same, or ADM's statistics: an .npz with mu, sigma, mu_s, sigma_s"
    )
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
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    args = parser.parse_args()
    with user_errors(parser):
        samples, reference = Pictures(args.samples), Pictures(args.reference)
        for one in [samples] + [reference] * (args.precision_recall or not reference.statistics):
            if len(one) < LEAST:
                raise UsageError(f"{one.path}: holds {len(one)} pictures (arr_0, or PNGs); at least {LEAST} needed")
        cuda = (args.device or "cuda") == "cuda" and torch.cuda.is_available()
        if args.device == "cuda" and not cuda:
            raise UsageError("--device cuda: torch finds no GPU; use --device cpu")
        weights, published = find_weights(args.inception_weights)
        network = load_inception(weights, cuda)
        found = compare(samples, reference, network, cuda, args.batch_size, args.precision_recall)
        print(f"{samples.path}: {len(samples)} pictures")
        print(f"{reference.path}: {'statistics' if reference.statistics else f'{len(reference)} pictures'}")
        print(f"FID              {found[FID]:.6g}")
        sfid = f"{found[SFID]:.6g}" if SFID in found else "none: the reference has statistics, but not mu_s, sigma_s"
        print(f"sFID             {sfid}")
        print(f"Inception Score  {found['inception_score_mean']:.6g} ± {found['inception_score_std']:.2g}")
        if args.precision_recall:
            print(f"Precision        {found['precision']:.4f}")
            print(f"Recall           {found['recall']:.4f}")
        for line in caveats(samples, reference, published):
            print(f"note: {line}")


if __name__ == "__main__":
    main()
