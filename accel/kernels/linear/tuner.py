"""The choice of a GEMM's algorithm: known to win, or measured before, or measured now.

cuBLASLt picks an algorithm from a model of the chip. A DiT needs few GEMMs, all known
ahead: measuring takes a fraction of a second, once for a GPU and library, and gains 4 to
18 % on them.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel import gpu
from accel.files import cache_folder
from accel.kernels import cuda, keep, kept
from accel.kernels.linear import cublaslt

# `cublaslt.configuration` of the fastest algorithm by GPU and shape, for XL/2's GEMMs:
# after seconds of load, when an H200 at 700 W runs at three quarters of its clock and the
# least energy wins. Measured in log/products*-h200.json and log/h100/winners*.json.
KNOWN = json.loads(Path(__file__).with_name("known.json").read_text())


class Choice(NamedTuple):
    """A GEMM and one of its algorithms."""

    gemm: cublaslt.Gemm
    algorithm: cublaslt.Algorithm

    def run(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """Launch the algorithm on the current stream."""
        self.gemm.run(self.algorithm, x, weight, bias, out)


class Tuner:
    """Chooses algorithms for the GEMMs of a network and keeps the measurements.

    folders: of the files of measurements, the first has precedence; by default the user's
    cache folder. A job that must give the same bits when it is started again puts its own
    first. Without a usable folder every process measures. share(make): returns rank 0's
    `make()` on every rank.
    """

    def __init__(
        self,
        folders: list[str | Path] | None = None,
        share: Callable[[Callable[[], Any]], Any] = lambda make: make(),
    ):
        self.folders = [cache_folder()] if folders is None else [Path(folder) for folder in folders]
        self.share = share
        self.chosen = {}  # (m, n, k, gelu, dtype, device) → Choice
        self.seconds = []  # of each GEMM measured by this process

    def choose(
        self, m: int, n: int, k: int, gelu: bool, dtype: torch.dtype, device: torch.device
    ) -> Choice:
        """Return the algorithm of a GEMM."""
        gemm = m, n, k, gelu, dtype, _indexed(device)
        if gemm not in self.chosen:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "linear: first used inside a CUDA graph; run the step once before capturing it"
                )
            self.chosen[gemm] = self._choose(gemm)
        return self.chosen[gemm]

    def _choose(self, gemm):
        m, n, k, gelu, dtype, device = gemm
        name = f"{m}x{n}x{k} {str(dtype).removeprefix('torch.')}{' gelu' * gelu}"
        kind = gpu.name(device).replace(" ", "-").replace("/", "-")
        files = [
            folder / f"products-{kind}-cublaslt-{cublaslt.version()}.json"
            for folder in self.folders
        ]
        choice = _known(gemm) or _kept(files, name, gemm)
        if choice is None:
            begun = time.perf_counter()
            measured = _fastest(gemm)
            self.seconds.append(time.perf_counter() - begun)
            # another process's, if that was done first
            choice = _kept(files, name, gemm) or measured
        for file in files:
            if name not in (found := _read(file)):
                keep(file, json.dumps({**found, name: choice.algorithm}).encode())
        return choice

    def choose_alike(self, gemms: list[tuple]) -> None:
        """Take rank 0's choices on all ranks, or two runs of one job could differ. gemms:
        `choose`'s arguments.
        """
        algorithms = self.share(lambda: [self.choose(*gemm).algorithm for gemm in gemms])
        for (*gemm, device), algorithm in zip(gemms, algorithms, strict=True):
            gemm = *gemm, _indexed(device)
            self.chosen[gemm] = _restored(algorithm, gemm)


def _indexed(device):
    """Return a device with its number, as tensors name it."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _known(gemm):
    """Return the choice that won on this kind of GPU under long load, if measured."""
    m, n, k, gelu, _, device = gemm
    wanted = KNOWN.get(gpu.name(device), {}).get(f"{m}x{n}x{k}{' gelu' * gelu}")
    if wanted is None:
        return None
    one = cublaslt.Gemm(*gemm)
    return next(
        (Choice(one, each) for each in one.candidates() if cublaslt.configuration(each) == wanted),
        None,
    )


def _kept(files, name, gemm):
    """Return the choice in the first of `files` that has one."""
    algorithm = next((found[name] for found in map(_read, files) if name in found), None)
    return None if algorithm is None else _restored(algorithm, gemm)


def _fastest(gemm):
    """Return the choice with the least time on random operands. It must beat the
    library's own, the first, by 3 %: timings jitter, and a short burst says little about
    a GPU at its power limit.
    """
    device = gemm[-1]
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        one = cublaslt.Gemm(*gemm)
        choices = [Choice(one, algorithm) for algorithm in one.candidates()]
        times = _milliseconds(choices, *gemm)
    best = int(times.argmin())
    return choices[best if times[best] < 0.97 * times[0] else 0]


def _milliseconds(choices, m, n, k, gelu, dtype, device):
    """Return the median time of five launches of each choice, replayed from graphs in turns."""
    # its own: a run's random stream must not depend on measurements
    generator = torch.Generator(device).manual_seed(0)
    shapes = (m, k), (n, k), (n,)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes
    )
    out = torch.empty(m, n, dtype=dtype, device=device)
    graphs = []
    times = []
    for choice in choices:
        choice.run(x, weight, bias, out)  # loads the kernel
        graph = torch.cuda.CUDAGraph()
        with cuda.recording(graph, torch.cuda.current_stream()):
            for _ in range(5):
                choice.run(x, weight, bias, out)
        graphs.append(graph)
    for graph in graphs * 3:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize(device)
    return (
        torch.tensor([start.elapsed_time(end) for start, end in times]).view(3, -1).median(0).values
    )


def _restored(algorithm, gemm):
    """Return the choice of an algorithm (words, workspace), also as JSON has it: two lists."""
    words, workspace = algorithm
    return Choice(cublaslt.Gemm(*gemm), cublaslt.Algorithm(tuple(words), workspace))


def _read(file: Path) -> dict[str, Any]:
    """Return a file's algorithms by name; none if one is damaged."""
    found = kept(file)
    return found if all(map(_is_algorithm, found.values())) else {}


def _is_algorithm(value):
    match value:  # an Algorithm in JSON
        case [[*words], int(workspace)]:
            return workspace >= 0 and len(words) == 8 and all(type(word) is int for word in words)
    return False
