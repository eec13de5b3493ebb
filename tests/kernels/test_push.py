"""The push kernel: its protocol between real processes through shared memory, its machine code, and on GPUs through NVLink."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel.kernels import push as module

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])


def part_of(rank, turn, n, t, width):
    """A rank's keys and values as they lie in its packed projection: a slice of wider rows."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(n, t, width * 3 // 2, generator=generator).half()[..., width // 2 :]


def test_between_processes():
    """Interpreted, in a fresh process that forks the ranks: the interpreter must be chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_push; test_push.interpret()"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
    )
    assert done.returncode == 0 and "pushed" in done.stdout, done.stdout + done.stderr


def interpret(world=3, turns=5, programs=2):
    n, t, width = 2, 5, 432
    size = n * world * t * width * 2
    # Mapped before the fork, so that every process sees it at one address, as GPUs see each other's memory.
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
                module.push(part_of(rank, turn, n, t, width), buffers, buffers + 2 * size, rank, offset, programs)
                got = memory[rank, offset : offset + size].view(torch.half).view(n, world * t, width)
                want = module.push_twin([part_of(peer, turn, n, t, width) for peer in range(world)])
                assert torch.equal(got, want), f"rank {rank}, turn {turn}"
            status = 0
        finally:
            os._exit(status)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * world
    assert not memory[:, 2 * size :].any()  # flags are down again: the next one finds them so
    print("pushed")


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from accel.kernels import push
capability, world = map(int, sys.argv[1:])
kinds = dict(part="*i64", buffers="*i64", flags="*i64", rank="i32", offset="i32", rows="i32", tokens="i32", stride="i32")
constants = dict(WIDTH=576, WORLD=world, BLOCK=push.BLOCK, TURNS=5)
aligned = {(list(kinds).index(name),): [["tt.divisibility", 16]] for name in ("part", "offset", "stride")}
source = ASTSource(push._push, {**kinds, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
print(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=push.WARPS)).asm["ptx"])
"""


def test_machine_code(tmp_path, capability=90, world=4):
    """16 bytes a store, to every peer; flags with release and acquire over the whole system, each rank's at each peer."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), str(world)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": PATH},
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert f"sm_{capability}" in text
    assert (
        text.count("st.global.v2.b64") == world * module.BLOCK // (2 * 32 * module.WARPS)
        and "st.global.b64" not in text
    )
    assert text.count("release.sys") == text.count("acquire.sys") == world - 1 and ".local" not in text


def test_wrong_inputs_are_refused():
    buffers = torch.zeros(2, dtype=torch.int64)
    for part in (torch.zeros(1, 4, 12).half(), torch.zeros(1, 16, 4).half().mT, torch.zeros(1, 4, 20).half()[..., 4:]):
        with pytest.raises(ValueError, match="16 bytes"):
            module.push(part, buffers, buffers, 0, 0)
