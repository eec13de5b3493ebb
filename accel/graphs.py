"""CUDA graphs: a step's kernels recorded once and launched as one, so that the host has nothing to do between steps."""

import ctypes
import inspect

import torch

from accel.kernels.cuda import call
from accel.kernels.linear import COUNTER_BYTES, separate_counters

_EDITABLE = "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters


def capture(step, reset_once=True):
    """Record `step`, a function without arguments that works on tensors at fixed addresses and never waits for the device, and return its
    `replay`. It is run once before, for what the first run alone does (compiling, choosing algorithms); so reset what it changes.

    Replays give the very bits of direct runs: the same kernels in the same order. Random draws belong outside.
    reset_once: cuBLASLt resets a counter of four bytes before nearly every product, a hundred small nodes in the way of the large ones;
    reset them all by one node at the start instead (torch 2.8 and later: 2.7 gives no access to a graph).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    if not (reset_once and _EDITABLE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on loading and saving
            step()
        return graph.replay

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with (
        separate_counters(torch.cuda.current_device()) as counters,
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        counters.zero_()
        step()
    _drop_resets(graph.raw_cuda_graph(), counters)
    graph.instantiate()

    def replay(counters=counters):  # which must live as long as the graph
        graph.replay()

    return replay


#################################################################################
#                        Editing a graph, by the CUDA driver                    #
#################################################################################


class _MemsetParameters(ctypes.Structure):  # CUDA_MEMSET_NODE_PARAMS of cuda.h
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


_MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET


def _nodes(query, handle):
    """The nodes that a query about a graph or a node lists."""
    count = ctypes.c_size_t()
    call(query, ctypes.c_void_p(handle), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        call(query, ctypes.c_void_p(handle), nodes, ctypes.byref(count))
    return list(nodes)


def _drop_resets(graph, counters):
    """Remove from a graph the nodes that zero a single one of `counters`, tying what waited for them to what they waited for. Returns how many."""
    first, last = counters.data_ptr(), counters.data_ptr() + counters.numel()
    dropped = 0
    for node in _nodes("cuGraphGetNodes", graph):
        kind, memset = ctypes.c_int(), _MemsetParameters()
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _MEMSET:
            continue
        call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(memset))
        size = memset.width * memset.element_bytes * memset.height
        if not (first <= memset.address < last and size <= COUNTER_BYTES and memset.value == 0):
            continue
        before, after = _nodes("cuGraphNodeGetDependencies", node), _nodes("cuGraphNodeGetDependentNodes", node)
        call("cuGraphDestroyNode", ctypes.c_void_p(node))
        for source in before:
            for target in after:
                call(
                    "cuGraphAddDependencies",
                    ctypes.c_void_p(graph),
                    ctypes.byref(ctypes.c_void_p(source)),
                    ctypes.byref(ctypes.c_void_p(target)),
                    ctypes.c_size_t(1),
                )
        dropped += 1
    return dropped


class Replayed:
    """A function of tensors, giving one or a tuple of them, that is captured at its first call for a combination of shapes, dtypes and other
    arguments, then replayed. Each combination holds memory for its tensors as long as this object lives."""

    def __init__(self, function, reset_once=True):
        self.function, self.reset_once, self.captured = function, reset_once, {}

    def __call__(self, *arguments):
        tensors = [value for value in arguments if torch.is_tensor(value)]
        key = tuple((value.shape, value.dtype) if torch.is_tensor(value) else value for value in arguments)
        if key not in self.captured:
            # Usable whatever the mode of the first caller, on the tensors' GPU.
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(tensors[0].device):
                self.captured[key] = self._capture(arguments)
        inputs, output, replay = self.captured[key]
        for fixed, tensor in zip(inputs, tensors):
            fixed.copy_(tensor)
        with torch.cuda.device(tensors[0].device):
            replay()
        return tuple(one.clone() for one in output) if isinstance(output, tuple) else output.clone()

    def _capture(self, arguments):
        fixed = [value.clone() if torch.is_tensor(value) else value for value in arguments]
        result = []
        replay = capture(lambda: result.append(self.function(*fixed)), self.reset_once)
        return [value for value in fixed if torch.is_tensor(value)], result[-1], replay
