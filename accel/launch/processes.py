"""Start the processes of --gpus, one per GPU, with torchrun's environment variables."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from accel import launch


def run_ranks(world: int, program: str) -> int:
    """Run this command as `world` ranks and return the exit status. If one fails or a signal
    arrives, terminate all.
    """
    received = []
    for number in launch.ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup or a shell's &
            signal.signal(number, lambda number, _: received.append(number))
    processes = _start(world)
    statuses: list[int | None] = [None] * world
    while not received and not any(statuses) and None in statuses:
        time.sleep(0.01)
        statuses = [process.poll() for process in processes]
    terminate(processes)

    status = next(filter(None, statuses), 0)
    line = None
    if received:
        status, line = launch.ENDINGS[received[0]]
    elif status < 0:
        line = f"rank {statuses.index(status)} of {world}: ended by signal {-status}"
    if line:
        print(f"\n{program}: {line}", file=sys.stderr)  # below a progress bar
    elif status and sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr)  # erase rank 0's progress bar
    return max(status, 1) if status else 0


def _start(world):
    """Start this command once per rank."""
    threads = max(1, (os.cpu_count() or 1) // world)
    common = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world),
        launch.PARENT_VARIABLE: f"{launch.START_TIME:.6f} {os.getpid()}",
    }
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            # A separate session: Ctrl-C reaches only the parent, which terminates the ranks.
            start_new_session=True,
        )
        for rank in map(str, range(world))
    ]


def _free_port():
    """Return a free port below the ephemeral range, so that no outgoing connection takes it before
    rank 0 listens.
    """
    while True:
        port = random.randrange(16000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def terminate(processes: Sequence[subprocess.Popen]) -> None:
    """Terminate the running processes, and kill them after two seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
