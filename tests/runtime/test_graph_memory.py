"""The memory that a captured graph works in lives as long as the graph, and on the graph's GPU."""

import gc

import pytest
import torch
from conftest import ROOT

from accel.runtime.graphs import GraphedFunction, capture

pytestmark = pytest.mark.gpu

# Few rows and columns and a long sum: cuBLAS divides the sum and keeps the parts in its
# workspace.
PROGRAM = """
import gc
import torch
from accel.runtime.graphs import GraphedFunction

sides = ((64, 32, 32768), (2048, 32, 1152), (2, 4608, 1152))
operands = [(torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")) for m, n, k in sides]
evaluate = lambda *tensors: tuple(x @ w.t() for x, w in zip(tensors[::2], tensors[1::2]))
flat = [tensor for pair in operands for tensor in pair]
earlier, later = GraphedFunction(evaluate), GraphedFunction(evaluate)
earlier(*flat)
want = later(*flat)
earlier.graphs.clear()
gc.collect()
torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does where it captures graphs
torch.cuda.empty_cache()
mine = torch.full((1 << 28,), 7, dtype=torch.uint8, device="cuda")  # where the earlier graph's memory was
for _ in range(10):
    assert all(torch.equal(*pair) for pair in zip(later(*flat), want))
    assert (mine == 7).all()
print("replayed")
"""


def test_an_earlier_graphs_memory_is_not_used(run, tmp_path):
    """A separate process runs it, because a failure corrupts the GPU's context."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path / "program.py", cwd=ROOT)
    assert done.stdout == "replayed\n", done.stderr


def test_garbage_graphs_do_not_void_a_capture():
    """A graph in a cycle of references is freed by the garbage collector, which may run
    at any allocation.
    """
    x = torch.zeros(4, device="cuda")
    cycle = []
    cycle += [cycle, GraphedFunction(torch.sin)]
    cycle[1](x)
    del cycle
    thresholds = gc.get_threshold()

    def step():
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1, 1, 1)
        kept = [[] for _ in range(100)]  # each would start a collection
        return kept, x.add_(1)

    try:
        capture(step)[1]()
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled() and x.tolist() == [2.0] * 4  # once before the capture, once by the replay
