"""CUDA graphs: the kernels of a step are recorded once and launched as one, so that the host never holds the GPU up."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from accel.kernels import cuda


def capture(step: Callable[[], object], runs: int = 1) -> Callable[[], None]:
    """Record `step` on the current GPU and return its replay.

    step: takes no arguments, works on tensors at fixed addresses and never waits for the device. It makes so many
    `runs` before it is recorded (the first compiles kernels and chooses algorithms), so undo what they change. A replay
    launches the same kernels in the same order: the same bits, unless random numbers are drawn. All memory that it
    works in belongs to the caller or to the graph.
    """
    stream = torch.cuda.Stream()  # torch's own capture stream would stay on the GPU of the first capture
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(runs):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # torch keeps a workspace of cuBLAS for each stream, and a graph has its address. What is left of an earlier graph's
    # memory would serve here, and is freed with that graph or by torch.compile: each graph makes its own.
    torch._C._cuda_clearCublasWorkspaces()
    with cuda.recording(graph, stream):
        step()
    torch._C._cuda_clearCublasWorkspaces()  # nobody else works in this graph's memory
    return graph.replay


class Latest(OrderedDict):
    """The entries that were used last, at most `most` of them."""

    def __init__(self, most: int | None = None):
        super().__init__()
        self.most = most

    def obtain(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of `key`. Where there is none it is made, after the one unused for longest has gone."""
        if key not in self:
            while self.most is not None and len(self) >= self.most:
                self.popitem(last=False)
            self[key] = make()
        self.move_to_end(key)
        return self[key]


class Replayed:
    """A function of tensors that returns a tensor or a tuple of them, captured at its first call and replayed after.

    There is one graph for each combination of shapes, dtypes and other arguments. Each holds the memory of its tensors:
    only the `kept` that were used last are kept, by default all. They are one set for all callers: call from one thread
    and on one stream at a time.
    """

    def __init__(self, function: Callable, kept: int | None = None):
        self.function, self.graphs = function, Latest(kept)

    def __call__(self, *arguments):
        tensors = [value for value in arguments if torch.is_tensor(value)]
        key = tuple((value.shape, value.dtype) if torch.is_tensor(value) else value for value in arguments)
        with torch.cuda.device(tensors[0].device):
            inputs, output, replay = self.graphs.obtain(key, lambda: self._capture(arguments))
            for fixed, tensor in zip(inputs, tensors, strict=True):
                fixed.copy_(tensor)
            replay()
        return tuple(one.clone() for one in output) if isinstance(output, tuple) else output.clone()

    @torch.inference_mode(False)  # later callers may be in another mode
    @torch.no_grad()
    def _capture(self, arguments):
        fixed = [value.clone() if torch.is_tensor(value) else value for value in arguments]
        results = []
        replay = capture(lambda: results.append(self.function(*fixed)))
        return [value for value in fixed if torch.is_tensor(value)], results[-1], replay
