"""CUDA graphs: a step's kernels are recorded once and launched as one.

So the GPU never waits for the host.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Record `step` on the current GPU and return its replay.

    The replay gives the same bits unless the step draws random numbers. step: takes no arguments,
    works on tensors at fixed addresses and never waits for the device. It is run once before it is
    recorded, to compile kernels and choose algorithms.
    """
    from accel.kernels import cuda  # a CPU needs none

    # torch's capture stream would stay on the GPU of the first capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # torch keeps a workspace of cuBLAS for each stream, whose address a graph records. An earlier
    # graph's is freed with that graph, or by torch.compile: each graph makes a new one.
    torch._C._cuda_clearCublasWorkspaces()
    with cuda.recording(graph, stream):
        step()
    torch._C._cuda_clearCublasWorkspaces()  # later work must not use this graph's workspace
    return graph.replay


def obtain(
    cache: dict[Hashable, Any], key: Hashable, make: Callable[[], Any], most: int | None = None
) -> Any:
    """Return the entry of `key`, made if absent.

    Before another entry is made, the one unused for longest is dropped: at most `most` are kept.
    """
    if key in cache:
        entry = cache.pop(key)
    else:
        while most is not None and len(cache) >= most:
            cache.pop(next(iter(cache)))
        entry = make()
    cache[key] = entry  # the last is the one used last
    return entry


class Captured(NamedTuple):
    """A captured function."""

    inputs: list[torch.Tensor]  # at the addresses that the graph reads
    output: Any  # a tensor or a tuple of them, which the graph writes
    replay: Callable[[], None]


class Replayed:
    """A function of tensors that is captured at its first call and replayed after.

    It returns a tensor or a tuple of them. There is one graph for each combination of shapes,
    dtypes and other arguments, which holds its tensors; the `kept` used last are kept, by default
    all. Call from one thread and on one stream at a time.
    """

    def __init__(self, function: Callable, kept: int | None = None):
        self.function = function
        self.kept = kept
        self.graphs: dict[Hashable, Captured] = {}

    def __call__(self, *arguments):
        tensors = [value for value in arguments if torch.is_tensor(value)]
        key = tuple(
            (value.shape, value.dtype) if torch.is_tensor(value) else value for value in arguments
        )
        with torch.cuda.device(tensors[0].device):
            graph = obtain(self.graphs, key, lambda: self._capture(arguments), self.kept)
            for fixed, tensor in zip(graph.inputs, tensors, strict=True):
                fixed.copy_(tensor)
            graph.replay()
        if isinstance(graph.output, tuple):
            return tuple(tensor.clone() for tensor in graph.output)
        return graph.output.clone()

    @torch.inference_mode(False)  # later callers may be in another mode
    @torch.no_grad()
    def _capture(self, arguments):
        fixed = [value.clone() if torch.is_tensor(value) else value for value in arguments]
        results = []
        replay = capture(lambda: results.append(self.function(*fixed)))
        inputs = [value for value in fixed if torch.is_tensor(value)]
        return Captured(inputs, results[-1], replay)
