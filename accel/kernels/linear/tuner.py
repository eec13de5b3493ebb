"""The choice of a GEMM's algorithm: a recorded winner, or measured before, or measured now.

cuBLASLt picks an algorithm from a model of the chip. A DiT needs few GEMMs, all known ahead:
measuring takes a fraction of a second, once for a GPU and library, and gains 4 to 18 % on them.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.io.filesystem import cache_folder
from accel.kernels import cuda, gpu, read_cache, write_cache
from accel.kernels.linear import cublaslt

# `cublaslt.configuration` of the fastest algorithm by GPU and shape, for XL/2's GEMMs: after
# seconds of load, when an H200 at 700 W runs at three quarters of its clock and the least energy
# wins. Measured in log/products*-h200.json and log/h100/winners*.json.
WINNERS = json.loads(Path(__file__).with_name("known.json").read_text())
MARGIN = 0.97  # of the library's own choice's time, which another algorithm must beat
LAUNCHES = 5  # of an algorithm in a graph
REPLAYS = 3  # of the graph, of which the median counts


class Choice(NamedTuple):
    """A GEMM and one of its algorithms."""

    gemm: cublaslt.Gemm
    algorithm: cublaslt.Algorithm

    def run(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """Launch the algorithm on the current stream."""
        self.gemm.run(self.algorithm, x, weight, bias, out)


class Tuner:
    """Chooses algorithms for the GEMMs of a network and keeps the measurements.

    folders: of the files of measurements, the first has precedence; by default the user's cache
    folder. A job that must give the same bits when it is started again puts its own first. Without
    a usable folder every process measures. share(make): returns rank 0's `make()` on every rank.
    """

    def __init__(
        self,
        folders: Sequence[str | Path] | None = None,
        share: Callable[[Callable[[], Any]], Any] = lambda make: make(),
    ):
        self.folders = [cache_folder()] if folders is None else [Path(folder) for folder in folders]
        self.share = share
        self.chosen: dict[tuple, Choice] = {}  # by the arguments of `choose`
        self.seconds: list[float] = []  # of each GEMM measured by this process

    def choose(
        self, m: int, n: int, k: int, gelu: bool, dtype: torch.dtype, device: torch.device
    ) -> Choice:
        """Return the algorithm of a GEMM."""
        problem = (m, n, k, gelu, dtype, _numbered(device))
        if problem not in self.chosen:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "linear: first used inside a CUDA graph; run the step once before capturing it"
                )
            self.chosen[problem] = self._choose(cublaslt.Gemm(*problem))
        return self.chosen[problem]

    def _choose(self, gemm):
        device = gpu.name(gemm.device).replace(" ", "-").replace("/", "-")
        name = f"products-{device}-cublaslt-{cublaslt.version()}.json"
        files = [folder / name for folder in self.folders]
        choice = _winner(gemm) or _measured_before(files, gemm)
        if choice is None:
            start = time.perf_counter()
            fastest = _fastest(gemm)
            self.seconds.append(time.perf_counter() - start)
            # Another process's choice, if that was done first.
            choice = _measured_before(files, gemm) or fastest
        for file in files:
            algorithms = _read(file)
            if gemm.name not in algorithms:
                algorithms = {**algorithms, gemm.name: choice.algorithm}
                write_cache(file, json.dumps(algorithms).encode())
        return choice

    def share_choices(self, problems: list[tuple]) -> None:
        """Take rank 0's choices on all ranks, or two runs of one job could differ.

        problems: of each GEMM `choose`'s arguments.
        """
        algorithms = self.share(lambda: [self.choose(*problem).algorithm for problem in problems])
        for (*gemm, device), algorithm in zip(problems, algorithms, strict=True):
            problem = (*gemm, _numbered(device))
            self.chosen[problem] = _restored(algorithm, cublaslt.Gemm(*problem))


def _numbered(device):
    """Return a device with its number, as tensors name it."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _winner(gemm):
    """Return the recorded choice that won on this kind of GPU under long load, or None."""
    of_gpu = WINNERS.get(gpu.name(gemm.device), {})
    wanted = of_gpu.get(re.sub(" b?float16", "", gemm.name))  # one for both
    if wanted is None:
        return None
    for algorithm in gemm.candidates():
        if cublaslt.configuration(algorithm) == wanted:
            return Choice(gemm, algorithm)
    return None


def _measured_before(files, gemm):
    """Return the choice in the first of `files` that has one, or None."""
    for file in files:
        algorithms = _read(file)
        if gemm.name in algorithms:
            return _restored(algorithms[gemm.name], gemm)
    return None


def _fastest(gemm):
    """Return the choice with the least time on random operands.

    It must beat the library's own, the first, by 3 %: timings jitter, and a short burst says little
    about a GPU at its power limit.
    """
    device = gemm.device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        algorithms = gemm.candidates()
        times = _milliseconds(gemm, algorithms)
    best = int(times.argmin())
    return Choice(gemm, algorithms[best if times[best] < MARGIN * times[0] else 0])


def _milliseconds(gemm, algorithms):
    """Return the median time of LAUNCHES of each algorithm, replayed from graphs in turns."""
    m, n, k = gemm.shape
    device = gemm.device
    # A generator of its own: a run's random stream must not depend on measurements.
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(gemm.dtype)

    x = draw(m, k)
    weight = draw(n, k)
    bias = draw(n)
    out = torch.empty(m, n, dtype=gemm.dtype, device=device)
    graphs = []
    for algorithm in algorithms:
        gemm.run(algorithm, x, weight, bias, out)  # loads the kernel
        graph = torch.cuda.CUDAGraph()
        with cuda.recording(graph, torch.cuda.current_stream()):
            for _ in range(LAUNCHES):
                gemm.run(algorithm, x, weight, bias, out)
        graphs.append(graph)
    spans = []
    for graph in graphs * REPLAYS:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize(device)
    times = torch.tensor([start.elapsed_time(end) for start, end in spans])
    return times.view(REPLAYS, -1).median(0).values


def _restored(algorithm, gemm):
    """Return the choice of an algorithm (words, workspace), also as JSON has it: two lists."""
    words, workspace = algorithm
    return Choice(gemm, cublaslt.Algorithm(tuple(words), workspace))


def _read(file: Path) -> dict[str, Any]:
    """Return a file's algorithms by name; none if one is damaged."""
    algorithms = read_cache(file)
    return algorithms if all(map(_is_algorithm, algorithms.values())) else {}


def _is_algorithm(value):
    match value:  # an Algorithm in JSON
        case [[*words], int(workspace)]:
            return workspace >= 0 and len(words) == 8 and all(type(word) is int for word in words)
    return False
