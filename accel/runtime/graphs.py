"""CUDA graphs: a step's kernels are recorded once and launched as one.

So the GPU never waits for the host.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

MAX_GRAPHS = 4  # graphs of an owner, such as a network


def capture(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record `step` on the current GPU. Return its result, and the function that computes it anew.

    A replay gives the same bits unless the step draws random numbers. step: takes no arguments,
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
        output = step()
    torch._C._cuda_clearCublasWorkspaces()  # later work must not use this graph's workspace
    return output, graph.replay


class CapturedGraph(NamedTuple):
    """A captured function."""

    function: Callable  # the graph reads tensors that it holds
    inputs: list[torch.Tensor]  # at the addresses that the graph reads
    output: Any  # a tensor or a tuple of them, which the graph writes
    replay: Callable[[], None]


class GraphedFunction:
    """A function of tensors that is captured at its first call and replayed after.

    It returns a tensor or a tuple of them. There is one graph for each key and combination of
    shapes, dtypes and other arguments. key: all that the function depends on apart from its
    arguments; the first function of a key serves all later ones. graphs: a dict that
    several functions may share; it keeps the MAX_GRAPHS that were used last. Call from one thread
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
        self.graphs = {} if graphs is None else graphs  # the one used last at the end

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

    @torch.inference_mode(False)  # later callers may be in another mode
    @torch.no_grad()
    def _capture(self, arguments):
        fixed = [value.clone() if torch.is_tensor(value) else value for value in arguments]
        output, replay = capture(partial(self.function, *fixed))
        inputs = [value for value in fixed if torch.is_tensor(value)]
        return CapturedGraph(self.function, inputs, output, replay)
