"""CUDA graphs: the kernels of a step are captured once and launched together.

So the GPU does not wait for the host.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

MAX_GRAPHS = 4  # per network or decoder


def capture(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture `step` on the current GPU. Return its output and the function that replays it.

    A replay gives the same bits unless the step draws random numbers. step: takes no arguments,
    works on tensors at fixed addresses and does not synchronise with the device. It is run once
    before the capture, to compile kernels and choose algorithms.
    """
    from accel.kernels import cuda  # lazy import: only for GPUs

    # torch's default capture stream belongs to the GPU of the first capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # torch keeps a cuBLAS workspace per stream, and a graph records its address. A workspace of an
    # earlier graph is freed with that graph, or by torch.compile, so each graph allocates a new
    # one.
    torch._C._cuda_clearCublasWorkspaces()
    with cuda.recording(graph, stream):
        output = step()
    torch._C._cuda_clearCublasWorkspaces()  # later work must not use this graph's workspace
    return output, graph.replay


class CapturedGraph(NamedTuple):
    """A graph with the tensors that it reads and writes."""

    function: Callable  # keeps tensors alive that the graph reads
    inputs: list[torch.Tensor]  # the graph reads them
    output: Any  # a tensor or a tuple of tensors; the graph writes them
    replay: Callable[[], None]


class GraphedFunction:
    """A function of tensors that is captured by its first call and replayed by later calls.

    It returns a tensor or a tuple of tensors. There is one graph for each key and combination of
    shapes, dtypes and other arguments. key: represents everything else that the function depends
    on; functions with equal keys share graphs. graphs: a dict that several functions may share; it
    contains the MAX_GRAPHS graphs that were used most recently. Call from one thread
    and on one stream at a time.
    """

    def __init__(
        self,
        function: Callable,
        key: Hashable = None,
        graphs: dict[Hashable, CapturedGraph] | None = None,
    ):
        self.function = function
        self.key = key
        self.graphs = {} if graphs is None else graphs  # most recently used last

    def __call__(self, *arguments):
        tensors = [value for value in arguments if torch.is_tensor(value)]
        key = (
            self.key,
            *(
                (value.shape, value.dtype) if torch.is_tensor(value) else value
                for value in arguments
            ),
        )
        with torch.cuda.device_of(tensors[0]):
            graph = self.graphs.pop(key, None)
            if graph is None:
                while len(self.graphs) >= MAX_GRAPHS:  # free its memory first
                    del self.graphs[next(iter(self.graphs))]
                graph = self._capture(arguments)
            self.graphs[key] = graph
            for fixed, tensor in zip(graph.inputs, tensors, strict=True):
                fixed.copy_(tensor)
            graph.replay()
        if isinstance(graph.output, tuple):
            return tuple(tensor.clone() for tensor in graph.output)
        return graph.output.clone()

    @torch.inference_mode(False)  # callers may or may not be in inference mode
    @torch.no_grad()
    def _capture(self, arguments):
        fixed = [value.clone() if torch.is_tensor(value) else value for value in arguments]
        output, replay = capture(partial(self.function, *fixed))
        inputs = [value for value in fixed if torch.is_tensor(value)]
        return CapturedGraph(self.function, inputs, output, replay)
