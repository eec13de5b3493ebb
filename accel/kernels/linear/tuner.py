"""Choose the algorithm of a GEMM: recorded for this GPU, measured earlier, or measured now.

cuBLASLt's heuristic picks an algorithm from a model of the chip. A DiT needs few GEMMs, all known
in advance. Measuring them takes a fraction of a second, once per GPU model and library version, and
makes them 4 to 18 % faster.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel.io.filesystem import cache_folder, read_json
from accel.kernels import cuda, gpu, write_cache
from accel.kernels.linear import cublaslt

# `cublaslt.configuration` of the fastest algorithm by GPU and shape, for the GEMMs of XL/2. They
# were measured after seconds of load, when an H200 at 700 W runs at three quarters of its clock and
# the algorithm with the least energy wins: log/products*-h200.json, log/h100/winners*.json.
WINNERS = json.loads(Path(__file__).with_name("known.json").read_text())
# An algorithm must be faster than the library's first choice by this factor. Timings jitter, and a
# short burst is not representative of a GPU at its power limit, which half precision reaches.
MARGIN = 0.97
FLOAT32_MARGIN = 0.99
LAUNCHES = 5  # launches of an algorithm per graph
REPLAYS = 3  # replays of each graph; their median counts


class Choice(NamedTuple):
    """A GEMM with the algorithm chosen for it."""

    gemm: cublaslt.Gemm
    algorithm: cublaslt.Algorithm


@dataclass
class Tuner:
    """Chooses algorithms for the GEMMs of a network and caches the measurements.

    folders: contain files of measurements; the first has precedence. By default there is one, the
    user's cache folder. A job that must give the same bits after a restart puts its own folder
    first. Without a writable folder every process measures. share(make): returns rank 0's `make()`
    on every rank.
    """

    folders: Sequence[Path] = field(default_factory=lambda: [cache_folder()])
    share: Callable[[Callable[[], Any]], Any] = lambda make: make()
    # keyed by the arguments of `choose`
    chosen: dict[tuple, Choice] = field(default_factory=dict, init=False)
    # duration of each measurement by this process
    seconds: list[float] = field(default_factory=list, init=False)

    def choose(
        self, m: int, n: int, k: int, gelu: bool, dtype: torch.dtype, device: torch.device
    ) -> Choice:
        """Return the algorithm of a GEMM."""
        problem = (m, n, k, gelu, dtype, _with_index(device))
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
        choice = _recorded(gemm) or _cached(files, gemm)
        if choice is None:
            start = time.perf_counter()
            fastest = _fastest(gemm)
            self.seconds.append(time.perf_counter() - start)
            # Another process may have finished first.
            choice = _cached(files, gemm) or fastest
        for file in files:
            algorithms = _read(file)
            if gemm.name not in algorithms:
                algorithms = {**algorithms, gemm.name: choice.algorithm}
                write_cache(file, json.dumps(algorithms).encode())
        return choice

    def share_choices(self, problems: list[tuple]) -> None:
        """Use rank 0's choices on all ranks, so that repeated runs give the same bits.

        problems: the arguments of `choose` for each GEMM.
        """
        algorithms = self.share(lambda: [self.choose(*problem).algorithm for problem in problems])
        for (*gemm, device), algorithm in zip(problems, algorithms, strict=True):
            problem = (*gemm, _with_index(device))
            self.chosen[problem] = _restored(algorithm, cublaslt.Gemm(*problem))


def _with_index(device):
    """Return a CUDA device with its index, as a tensor's `device` has it."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _recorded(gemm):
    """Return the choice recorded in known.json for this GPU model, or None."""
    winners = WINNERS.get(gpu.name(gemm.device), {})
    wanted = winners.get(re.sub(" b?float16", "", gemm.name))  # both dtypes share an entry
    if wanted is None:
        return None
    matching = (each for each in gemm.candidates() if cublaslt.configuration(each) == wanted)
    return next((Choice(gemm, algorithm) for algorithm in matching), None)


def _cached(files, gemm):
    """Return the choice in the first file that contains one, or None."""
    for file in files:
        algorithms = _read(file)
        if gemm.name in algorithms:
            return _restored(algorithms[gemm.name], gemm)
    return None


def _fastest(gemm):
    """Return the fastest choice on random operands."""
    device = gemm.device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        algorithms = gemm.candidates()
        times = _milliseconds(gemm, algorithms)
    best = int(times.argmin())
    margin = FLOAT32_MARGIN if gemm.dtype == torch.float32 else MARGIN
    return Choice(gemm, algorithms[best if times[best] < margin * times[0] else 0])


def _milliseconds(gemm, algorithms):
    """Return each algorithm's median time for LAUNCHES launches. Graphs are replayed in turns."""
    m, n, k = gemm.shape
    device = gemm.device
    # A separate generator, so that a run's random stream does not depend on measurements.
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
    """Return the choice for an algorithm (words, workspace), which JSON stores as a list."""
    words, workspace = algorithm
    return Choice(gemm, cublaslt.Algorithm(tuple(words), workspace))


def _read(file: Path) -> dict[str, Any]:
    """Return the algorithms in a file by GEMM name, or {} if the file is absent or corrupt."""
    try:
        algorithms = read_json(file)
    except (OSError, ValueError):
        return {}
    return algorithms if all(map(_is_algorithm, algorithms.values())) else {}


def _is_algorithm(value):
    match value:  # an Algorithm in JSON
        case [[*words], int(workspace)]:
            return workspace >= 0 and len(words) == 8 and all(type(word) is int for word in words)
    return False
