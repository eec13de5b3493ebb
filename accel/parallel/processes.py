"""The processes of one job: this process's rank, the exchanges between ranks, and the end
of all ranks.

torchrun or srun starts the ranks, one a GPU, and ends them all when one dies. They form one process
group: objects and CPU tensors travel over gloo, CUDA tensors over NCCL. Progress and the
request to stop are kept in its key-value store.
"""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from accel import launch, signals, streams
from accel.errors import (
    STOPPED,
    USAGE,
    Stopped,
    UsageError,
    as_usage_error,
    printable,
    record,
    require_equal,
    shown,
)

START = timedelta(minutes=10)  # limit for all ranks to start and connect
# limit for one rank to wait for another, whose share of an FID job may be larger
WAIT = timedelta(days=1)


class _AgreedError(UsageError):
    """A UsageError that every rank raises."""


class Job:
    """This process among the ranks of its job; `launched_job` makes one. Every rank makes
    the same calls.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, local_rank: int = 0, store: dist.Store | None = None
    ):
        self.rank = rank
        self.world = world
        self.local_rank = local_rank
        self.store = store or dist.HashStore()
        self.host = socket.gethostname()
        self._stop = False
        self._gpu = self._connecting = None

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        if self.world > 1:
            dist.barrier()

    def all_gather_object(self, value: Any) -> list:
        """Return every rank's `value` (anything that pickles), by rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def run_collectively(self, work: Callable[[], Any], only: int | None = None) -> Any:
        """Call `work` on every rank, or on rank `only`, and return its result there.

        A UsageError on any rank is raised on every rank, each different message once with
        its ranks: a mistake on one node ends the job before any work. `work` may itself
        call this method, on every rank.
        """
        result = message = None
        try:
            if only in (None, self.rank):
                result = work()
        except _AgreedError:
            raise
        except UsageError as error:
            message = error.marked
        reports = self.all_gather_object((message, self.host))
        lines = []
        for message in dict.fromkeys(text for text, _ in reports if text is not None):
            ranks = [rank for rank, (text, _) in enumerate(reports) if text == message]
            hosts = dict.fromkeys(reports[rank][1] for rank in ranks)
            source = (
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(hosts)}: "
            )
            lines.append(
                message if len(ranks) == self.world or ranks == [only] else source + message
            )
        if lines:
            raise _AgreedError(*"\n".join(lines).splitlines())
        return result

    def run_in_turns(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0, then on one rank of each other node, then on the others:
        a download happens once where the file system is shared, else once a node.
        Otherwise as `run_collectively`.
        """
        result = self.run_collectively(work, only=0)
        for first in (True, False):
            mine = self.rank > 0 and (self.local_rank == 0) == first
            result = self.run_collectively(lambda: work() if mine else result)
        return result

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Return on every rank the result of `make` on rank 0."""
        return self.all_gather_object(self.run_collectively(make, only=0))[0]

    def require_equal(self, settings: dict, free: Set[str] = frozenset()) -> None:
        """Raise UsageError on every rank if one has other settings than rank 0; free:
        names that may differ.
        """
        first = self.from_rank_0(lambda: settings)
        remedy = "start all ranks with the same flags and files"
        self.run_collectively(lambda: require_equal(settings, first, free, "rank 0 has", remedy))

    def max_over_ranks(self, values: Iterable[float]) -> list[float]:
        """Return the elementwise maximum of `values` over the ranks."""
        return [max(column) for column in zip(*self.all_gather_object(list(values)))]

    def assert_identical(self, tensor: torch.Tensor, ranks: int) -> None:
        """Raise RuntimeError unless the first `ranks` ranks hold the same bits in `tensor`."""
        digest = hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:8]
        digests = self.all_gather_object(digest)[:ranks]
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"ranks ended with different latents (checksums {', '.join(digests)}): are their "
                "GPUs of one kind?"
            )

    def open_collectives(self, device: torch.device) -> None:
        """Start to connect NCCL in a thread: it takes a second, which the loading of
        weights hides.
        """
        if self.world > 1 and device.type == "cuda":
            self._gpu = device
            self._connecting = ThreadPoolExecutor(1).submit(self._connect)

    def _connect(self):
        torch.cuda.set_device(self._gpu)  # a thread begins on the first GPU
        self._gather(torch.zeros(1, device=self._gpu))  # the first collective connects

    def wait_for_collectives(self) -> None:
        """Wait until `open_collectives` is done."""
        if self._connecting is not None:
            self._connecting.result()

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        """Return every rank's `part` on rank 0, None elsewhere. All parts have one shape."""
        self.wait_for_collectives()
        return self._gather(part)

    def _gather(self, part):
        parts = [torch.empty_like(part) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(part.contiguous(), parts)
        return parts

    def stop_on_signals(self, *signals: signal.Signals) -> None:
        """Take each of these signals, on any rank, as a request that the whole job stop
        (`stopping`).
        """
        for number in signals:
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_):
        self._stop = True  # no lock and no store: a second signal may interrupt this very line

    @property
    def stopping(self) -> bool:
        """Return whether any rank was asked to stop; ranks check this between batches."""
        if self._stop:
            self.store.set("stop", "")
        return self._stop or self.store.check(["stop"])

    def leave(self) -> None:
        """Wait for all ranks and close the process group. The process must then end by
        `_exit`: gloo's threads may abort one that ends in the interpreter's own way, and
        NCCL waits for CUDA graphs that hold its kernels.
        """
        if self.world == 1:
            return
        self.wait_for_collectives()
        self.barrier()
        # the launcher's, once the first rank has gone
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        closing = Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(5)

    def _close(self):
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        dist.destroy_process_group()


def own_device(job: Job, wanted: str | None) -> str:
    """Return the name of this rank's device: the CPU, or a GPU that no other rank has.
    Raises UsageError for a rank without a GPU, for ranks that share one, and for other
    kinds of devices.
    """
    kind, _, number = (wanted or "cuda").partition(":")
    if kind not in ("cuda", "cpu") or number and not number.isdecimal():
        raise UsageError(f"`device={wanted}`: ranks sample on cuda or cpu; choose one")
    if kind == "cpu":
        return "cpu"
    if number and job.world > 1:
        raise UsageError(
            f"`device={wanted}`: every rank takes its own GPU; choose them with "
            "CUDA_VISIBLE_DEVICES"
        )
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # srun may show a task its own GPU only, as number 0
    index = int(number or job.local_rank % max(visible, 1))
    if number and index >= visible:
        raise UsageError(f"`device={wanted}`: this machine has {visible} GPU(s), counted from 0")
    gpu = str(torch.cuda.get_device_properties(index).uuid) if visible else None
    gpus = job.all_gather_object((job.host, gpu))
    if not wanted and not any(gpu for _, gpu in gpus):
        return "cpu"

    def own():
        if not visible:
            raise UsageError(
                "no GPU; start as many processes as there are GPUs, or use `device=cpu`"
            )
        if gpus.count(gpus[job.rank]) > 1:
            raise UsageError(
                "several ranks on one GPU; start one a GPU (--gpus, --nproc_per_node, "
                "--ntasks-per-node)"
            )
        torch.cuda.set_device(index)
        return f"cuda:{index}"

    return job.run_collectively(own)


def launched() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) from the environment of torchrun or srun; (0,
    1, 0) without either.

    Raises UsageError for values that no launcher sets.
    """
    if "RANK" in os.environ:
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK" if "LOCAL_RANK" in os.environ else None
    # only srun sets it; a batch script's own environment has no step
    elif "SLURM_STEP_NUM_TASKS" in os.environ:
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    else:
        return 0, 1, 0
    world = _variable(names[1], 1, 2**31)
    return _variable(names[0], 0, world), world, _variable(names[2], 0, world) if names[2] else 0


def _variable(name, least, end):
    """Return an integer variable of the environment, least <= value < end."""
    value = os.environ.get(name)
    if value is None or not re.fullmatch("[0-9]{1,18}", value) or not least <= int(value) < end:
        given = "is not set" if value is None else f"is {value[:40]!r}"
        raise UsageError(
            f"the environment's {name} {given}, a launcher sets it to {least} … {end - 1}: start "
            "the ranks with torchrun or srun, or unset RANK for one process"
        )
    return int(value)


def _set_address(env):
    """Set the address under srun: the step's first host, and a port that no step of a
    neighbouring job uses.
    """
    if "SLURM_STEP_ID" in env and "MASTER_PORT" not in env:
        job, step = (_variable(name, 0, 2**32) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        env["MASTER_PORT"] = str(12000 + (job * 16 + step % 16) % 20000)
    _variable("MASTER_PORT", 1, 2**16)
    if "MASTER_ADDR" not in env:
        command = ["scontrol", "show", "hostnames", env.get("SLURM_STEP_NODELIST", "")]
        try:
            env["MASTER_ADDR"] = subprocess.check_output(
                command, text=True, stderr=subprocess.DEVNULL
            ).split()[0]
        except (OSError, subprocess.CalledProcessError) as error:
            raise UsageError(
                f"srun: scontrol names no hosts ({error}); export MASTER_ADDR, the first of them"
            ) from None
    try:
        socket.getaddrinfo(env["MASTER_ADDR"], int(env["MASTER_PORT"]), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # torch would ask again for a minute
        raise UsageError(
            f"the environment's MASTER_ADDR {shown(env['MASTER_ADDR'])} is not the name of a host "
            f"({error}): start the ranks with torchrun or srun, or export the first host's"
        ) from None


def _join():
    """Join the job that this process was started in. Raises UsageError if its ranks do
    not connect.
    """
    rank, world, local_rank = launched()
    if world == 1:
        return Job()
    _set_address(os.environ)
    launch.end_with_parent()
    # gloo prints a line a rank and group: hide it, and all output of other ranks than 0.
    printed = os.dup(1) if rank == 0 else os.open(os.devnull, os.O_WRONLY)
    sys.stdout = streams.lasting(printed, sys.stdout)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=START))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # nodes count attempts differently
            # torchrun --max-restarts may keep its store, with the addresses and the failure of the
            # ranks that ended.
            store = dist.PrefixStore(
                f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store
            )
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=START)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"rank {rank} of {world}: cannot connect at {address}; start all ranks ({reason})"
        ) from None
    store.set_timeout(WAIT)
    dist.group.WORLD.set_timeout(WAIT)
    # a connection serves one thread
    return Job(rank, world, local_rank, dist.PrefixStore("job", store.clone()))


@contextmanager
def launched_job(program: str, worded: Callable[[UsageError], str] = str) -> Iterator[Job]:
    """Run the block as one rank of its job. When it ends on one rank, all ranks end, and
    the cause is printed once. worded: gives the text of a user's error.

    A UsageError is one line and status USAGE, a Stopped one line and STOPPED, anything
    else a traceback and 1.
    """
    try:
        job = _join()
    except UsageError as error:
        # Under srun every rank has the same line: print it on rank 0, or where the number
        # itself is wrong.
        if (
            "SLURM_STEP_ID" not in os.environ
            or not os.environ.get("SLURM_PROCID", "").lstrip("0").isdecimal()
        ):
            print(f"{program}: {worded(error)}", file=sys.stderr)
            record(f"{program}: {worded(error)}")
        _exit(USAGE)
    status = 0
    try:
        try:
            yield job
        except Stopped as stopped:
            status = STOPPED
            line = printable(f"{program}: {stopped}")
            record(line)  # on every rank: torchrun may see another end first
            if job.rank == 0:
                print(line, file=sys.stderr)
        job.leave()
    except BaseException as error:
        _fail(job, program, error, worded)
    if status or job.world > 1:
        _exit(status)


def _fail(job, program, error, worded):
    """End this rank after `error`. The first rank that fails prints the cause and exits
    first, which makes it the launcher's root cause; the others exit with its status.
    """
    if isinstance(error, SystemExit):
        _exit(error.code)
    # if a killed rank is the cause, the parent says so, and ends this one before it
    # complains
    if launch.STARTED_HERE:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(0.2)
        if sys.stderr.isatty():
            print(end="\r\033[K", file=sys.stderr)  # rank 0's bar
    else:
        # the launcher's, once the first rank has gone
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cause = printable(f"{type(error).__name__}: {error}".splitlines()[0])
    status = 1
    text = f"rank {job.rank} of {job.world} on {job.host}:\n{traceback.format_exc()}"
    if mistake := as_usage_error(error):
        status = USAGE
        text = "\n".join(f"{program}: {line}" for line in worded(mistake).splitlines())
    try:
        first, status = map(
            int, job.store.compare_set("failed", "", f"{job.rank} {status}").split()
        )
    # rank 0 or its launcher held the store; this rank's own status is no worse than
    # theirs
    except dist.DistError:
        first = 0
    if first != job.rank:
        text = f"rank {job.rank}: {cause} (after rank {first} failed)" if status == 1 else ""
    print(text, file=sys.stderr, end="\n" * bool(text), flush=True)
    if first != job.rank:
        time.sleep(2)
    elif job.world > 1 and (job.rank == 0 or status == 1):
        time.sleep(1)  # rank 0 may hold the store; a rank that was killed has been noticed by then
    if first == job.rank:
        # late: torchrun's summary goes by whole seconds, and a killed rank that is the
        # cause was earlier
        record(text)
    _exit(status)


def _exit(status):
    """Exit without waiting for threads, one of which may be in a collective that never returns."""
    signals.finish()
    os._exit(status)
