"""The push kernel: its protocol between real processes through shared memory, and the
order of memory on a GPU.
"""

import os

import torch
from kernel_testing import compiled_for, interpreted

from accel.kernels import push as module


def part_of(rank, turn, n, t, width):
    """A rank's keys and values as they lie in its packed projection: a slice of wider rows."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(n, t, width * 3 // 2, generator=generator).half()[..., width // 2 :]


def interpret(world=3, turns=5, programs=2):
    n = 2
    t = 5
    width = 432
    size = n * world * t * width * 2
    # Mapped before the fork, so that every process sees it at one address, as GPUs see
    # each other's memory.
    memory = torch.zeros(world, 2 * size + 4 * world * programs, dtype=torch.uint8).share_memory_()
    buffers = torch.tensor([one.data_ptr() for one in memory])
    children = []
    for rank in range(world):
        children.append(os.fork())
        if children[-1]:
            continue
        status = 1
        try:
            for turn in range(turns):
                offset = turn % 2 * size
                module.push(
                    part_of(rank, turn, n, t, width),
                    buffers,
                    buffers + 2 * size,
                    rank,
                    offset,
                    programs,
                )
                got = (
                    memory[rank, offset : offset + size].view(torch.half).view(n, world * t, width)
                )
                want = torch.cat([part_of(peer, turn, n, t, width) for peer in range(world)], dim=1)
                assert torch.equal(got, want), f"rank {rank}, turn {turn}"
            status = 0
        finally:
            os._exit(status)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * world
    assert not memory[:, 2 * size :].any()  # flags are down again: the next one finds them so


def test_between_processes():
    """Interpreted, in a fresh process that forks the ranks."""
    interpreted("test_push.interpret()")


def test_flags_order_memory_over_the_system(tmp_path):
    """An interpreter orders all memory: compiled, flags go up with release and down with
    acquire, each peer's.
    """
    [report] = compiled_for(90, ["push"], tmp_path)["push"]
    assert report["releases"] == report["acquires"] == 3
