"""The processes of one job: which one this is, what they tell each other, and how they end together.

Ranks share one key-value store (torch.distributed's). Agreement, progress, stop requests and signs of life go through it, so
that a job whose ranks work apart needs no collective at all; `collectives` opens NCCL or gloo for those that do.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from accel.options import STOPPED, UsageError

BEAT = 1.0  # seconds between two signs of life
SILENCE = (
    25  # a rank that gives none in so many of ours is lost: the job ends within 60 s also where no launcher notices
)


class Stopped(Exception):
    """The job was asked to stop, has recorded its work, and ends with status STOPPED; the text goes to the user."""


class _Agreed(UsageError):
    """A user's mistake that every rank knows of: said once."""


def launched():
    """(rank, world size, local rank) by torchrun's or srun's environment, or None if this process was started by neither."""
    env = os.environ
    if "RANK" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    if "SLURM_STEP_NUM_TASKS" in env:  # only srun sets it; a batch script's own environment has no step
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
    return None


def _rendezvous(rank, world):
    """The store that all ranks share. Raises UsageError if srun does not say where to meet."""
    env = os.environ
    if (
        "SLURM_STEP_ID" in env and "MASTER_PORT" not in env
    ):  # srun: meet on the step's first host, at a port that only this step uses
        env["MASTER_PORT"] = str(12000 + (int(env["SLURM_JOB_ID"]) * 16 + int(env["SLURM_STEP_ID"]) % 16) % 20000)
    if "MASTER_ADDR" not in env:
        try:
            nodes = subprocess.run(
                ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        except (OSError, KeyError, subprocess.CalledProcessError) as error:
            raise UsageError(
                f"srun: the step's hosts cannot be asked for ({type(error).__name__}: {error}); export MASTER_ADDR, the first of them"
            ) from None
        env["MASTER_ADDR"] = nodes.split()[0]
    env.update(RANK=str(rank), WORLD_SIZE=str(world))
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))
    return dist.PrefixStore("job", store)


def _connected_again(store):
    """Another connection to the job's store: each serves one thread. A single process' store is its own, and its threads share it."""
    if isinstance(store, dist.HashStore):
        return store
    if hasattr(store, "clone"):
        return store.clone()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # torch 2.7
    return dist.PrefixStore("job", dist.TCPStore(*address, is_master=False, timeout=store.timeout))


class Group:
    """This process among those of its job. `join` makes one; `job` is the usual way in."""

    def __init__(self, rank, world, local_rank, store):
        self.rank, self.world, self.local_rank, self.store = rank, world, local_rank, store
        self.host = socket.gethostname()
        self.told = {}  # how often, by name
        self.meshes, self.exchanges = {}, {}  # of accel/parallel/plan.py
        self.on_beat = None  # called with its store once a second by the watching thread
        self._stop, self._leaving = False, threading.Event()
        self._opening = None
        self._say_alive(self.store, 0)
        self.barrier("join")
        self._watcher = threading.Thread(target=self._watch, args=(_connected_again(store),), daemon=True)
        self._watcher.start()

    # Agreement

    def barrier(self, name):
        """Wait until every rank has come to the barrier of this name, each name once a job. However long it takes: a rank that
        dies meanwhile is noticed by the watching thread."""
        if self.store.add(f"barrier/{name}", 1) == self.world:
            self.store.set(f"barrier/{name}/open", "")
        while not self.store.check([f"barrier/{name}/open"]):
            time.sleep(0.02)

    def tell(self, name, value):
        """Every rank's `value` (JSON), by rank. Told again under the same name, by all ranks, it is told anew."""
        self.told[name] = self.told.get(name, 0) + 1
        name = f"{name}/{self.told[name]}"
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        self.barrier(name)
        return [json.loads(text) for text in self.store.multi_get([f"{name}/{rank}" for rank in range(self.world)])]

    def together(self, name, work, only=None):
        """`work()` on every rank, or on rank `only`. If it raises UsageError anywhere, every rank does, with one line for each
        different complaint that names its ranks: a mistake on one node ends the job before any work."""
        result, complaint = None, ""
        try:
            result = work() if only in (None, self.rank) else None
        except UsageError as error:
            complaint = str(error)
        said = self.tell(name, [complaint, self.host])
        lines = {}
        for rank, (text, host) in enumerate(said):
            if text:
                lines.setdefault(text, []).append((rank, host))
        if lines:
            raise _Agreed(
                "\n".join(
                    text if only is not None or len(ranks) == self.world else f"{_names(ranks)}: {text}"
                    for text, ranks in lines.items()
                )
            )
        return result

    def device(self, wanted):
        """This rank's device: the CPU, or one GPU each. Raises UsageError for a rank without a GPU, for two ranks on one, and for what is no device."""
        name = str(wanted or "")
        try:
            kind = torch.device(name or "cuda")
        except RuntimeError:
            kind = torch.device("meta")
        if kind.type not in ("cuda", "cpu"):
            raise _Agreed(f"--device {name}: ranks sample on cuda or cpu; choose one")
        if kind.type == "cpu":
            return name
        index = visible = 0
        if torch.cuda.is_available():
            visible = torch.cuda.device_count()
            index = self.local_rank % visible  # srun may show each task its own GPU only, as number 0
        identity = str(torch.cuda.get_device_properties(index).uuid) if visible else None
        ranks = self.tell("device", [self.host, identity, visible])
        if not name and not any(gpu for _, gpu, _ in ranks):
            return "cpu"
        if kind.index is not None and self.world > 1:
            raise _Agreed(
                f"--device {name}: every rank takes the GPU of its own number; choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        without = [(rank, host) for rank, (host, gpu, _) in enumerate(ranks) if not gpu]
        if without:
            raise _Agreed(
                f"{_names(without)}: no GPU there; start as many processes as there are GPUs, or use --device cpu"
            )
        owners = {}
        for rank, (host, gpu, seen) in enumerate(ranks):
            owners.setdefault((host, gpu), []).append((rank, host, seen))
        for shared in owners.values():
            if len(shared) > 1:
                raise _Agreed(
                    f"{_names([owner[:2] for owner in shared])}: share one GPU ({shared[0][2]} visible to them); start one process "
                    "a GPU, --nproc_per_node or --ntasks-per-node at most that many"
                )
        if kind.index is None:
            name = f"cuda:{index}"
        elif kind.index >= visible:
            raise _Agreed(f"--device {name}: this machine has {visible} GPU(s), counted from 0")
        torch.cuda.set_device(torch.device(name))
        return name

    # Collectives

    def open_collectives(self, device):
        """Begin to set up NCCL (GPU) or gloo (CPU) beside whatever comes next; communicators cost a second that loading weights hides."""
        if self.world == 1:
            return
        self._opening = SimpleNamespace(error=None, device=torch.device(device))
        self._opening.thread = threading.Thread(target=self._open, daemon=True)
        self._opening.thread.start()

    def _open(self):
        try:
            device = self._opening.device
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("collectives", _connected_again(self.store)),
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(minutes=30),
            )
            self.gather(torch.zeros(1, device=device))  # connections are made at the first use
        except Exception as error:
            self._opening.error = error

    def _close(self):
        if self._opening.device.type == "cuda":
            torch.cuda.set_device(self._opening.device)  # a thread begins on the first GPU
        dist.destroy_process_group()

    def opened(self):
        """Wait until `open_collectives` is done."""
        if threading.current_thread() is not self._opening.thread:
            self._opening.thread.join()
            if self._opening.error:
                raise self._opening.error

    def gather(self, part):
        """Every rank's `part`, all of one shape → their list on rank 0, None elsewhere."""
        self.opened()
        parts = [torch.empty_like(part) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(part.contiguous(), parts)
        return parts

    def largest(self, value):
        """Replace `value` (a tensor) by its maximum over all ranks, in place; on a GPU without waiting for it."""
        self.opened()
        dist.all_reduce(value, dist.ReduceOp.MAX)

    # Stopping

    def stop_on_signals(self, *signals):
        """From now on these signals ask the whole job to stop at its next good moment (`stopping`), on whichever rank they arrive."""
        for number in signals:
            signal.signal(number, self._asked_to_stop)

    def _asked_to_stop(self, *_):
        self._stop = (
            True  # no Event: a second signal may come inside this very call, and its lock would wait for itself
        )

    @property
    def stopping(self):
        return self._stop or self.store.check(["stop"])

    # Life and death

    def _say_alive(self, store, beat):
        store.set(f"alive/{self.rank}", str(beat))

    def _watch(self, store):
        """Signs of life, out and in: rank 0 looks after all, the others after rank 0. Counted in our own beats, not in seconds, so that
        a suspended job does not take its sleep for a death."""
        peers = [rank for rank in range(self.world) if (rank > 0) == (self.rank == 0)]
        keys = [f"alive/{rank}" for rank in peers]
        last, silent, beat = {}, dict.fromkeys(peers, 0), 0
        while not self._leaving.wait(BEAT):
            beat += 1
            try:
                self._say_alive(store, beat)
                if store.check(["failed"]):
                    self._follow(json.loads(store.get("failed")))
                if self._stop:
                    store.set("stop", "")
                elif store.check(["stop"]):
                    self._stop = True
                for peer, sign in zip(peers, store.multi_get(keys) if keys else ()):
                    silent[peer] = 0 if sign != last.get(peer) or sign == b"left" else silent[peer] + 1
                    last[peer] = sign
                    if silent[peer] > SILENCE:
                        text = f"rank {peer} has given no sign of life for {silent[peer] * BEAT:.0f} s"
                        self._follow(self._fail(text, 1, store))
                        self._die(text, 1)
            except RuntimeError as error:  # what a store raises when its host is gone
                if not self._leaving.is_set():
                    self._die(
                        f"the job's store is gone, and with it rank 0 or its launcher ({str(error).splitlines()[0]})", 1
                    )
            call = self.on_beat  # once: the main thread may take it away at any moment
            try:
                if call is not None:
                    call(store)
            except (
                Exception
            ) as error:  # left to end this thread alone, it would make a living rank look dead to the others
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                with suppress(RuntimeError):  # the store may be what failed
                    self._fail(text, 1, store)
                self._die(
                    text, 1, pause=3 * BEAT * (self.world > 1)
                )  # this process may keep the store: the others are to read the cause first

    def _fail(self, text, code, store):
        """Make this the job's cause of failure unless there is one already; returns the cause."""
        mine = json.dumps([self.rank, self.host, text, code])
        return json.loads(store.compare_set("failed", "", mine))

    def _follow(self, cause):
        rank, host, text, code = cause
        if rank == self.rank:
            return  # the main thread is telling it
        self._die(
            f"rank {rank} on {host} ended the job: {text}", code, pause=2 * BEAT
        )  # a launcher is to see that rank go first

    def _die(self, text, code, pause=0.0):
        print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        time.sleep(pause)
        os._exit(code)  # not sys.exit: the main thread may sit in a collective that never returns

    def leave(self, status=0):
        """The good end, with that exit status to follow. Rank 0 may host the store, so it goes last."""
        closing = None
        self._leaving.set()
        self._watcher.join()
        if self._opening is not None:
            self.opened()
            self.meshes, self.exchanges = {}, {}
            closing = threading.Thread(target=self._close, daemon=True)
            closing.start()
            closing.join(5)
        self.store.set(f"alive/{self.rank}", "left")
        gone, deadline = self.store.add("left", 1), time.monotonic() + 10
        while self.rank == 0 and gone < self.world and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = self.store.add("left", 0)
        if (
            closing is not None and closing.is_alive()
        ):  # NCCL waits for captured graphs that use it; where one is left, the work is done all the same
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _names(ranks):
    """[(2, "n1"), (3, "n1")] → "ranks 2, 3 on n1"."""
    hosts = {}
    for rank, host in ranks:
        hosts.setdefault(host, []).append(str(rank))
    return " and ".join(f"rank{'s' * (len(those) > 1)} {', '.join(those)} on {host}" for host, those in hosts.items())


def join():
    """The group that torchrun or srun started this process in; a group of one if neither did."""
    rank, world, local_rank = launched() or (0, 1, 0)
    return Group(rank, world, local_rank, _rendezvous(rank, world) if world > 1 else dist.HashStore())


@contextmanager
def job(program):
    """Run a block as one rank of a job. However it ends, on whichever rank, all ranks end, and the cause is told once: a user's mistake
    in one line and status 2, a stop with STOPPED, a failure with its own traceback and status 1."""
    try:
        group = join()
    except UsageError as error:  # before the ranks have met: each finds the same
        if launched()[0] == 0:
            print(f"{program}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    if group.rank:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (open to the end of the process)
    try:
        yield group
        group.leave()
    except _Agreed as error:
        if group.rank == 0:
            for line in str(error).splitlines():
                print(f"{program}: {line}", file=sys.stderr, flush=True)
        group.barrier("told")  # a launcher ends the others as soon as one has gone: not before this was said
        group.leave(2)
        sys.exit(2)
    except Stopped as stopped:
        if group.rank == 0:
            print(f"{program}: {stopped}", file=sys.stderr, flush=True)
        # Launchers end the other ranks as soon as one leaves with a status: no signal of theirs may change what this one leaves with.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        group.leave(STOPPED)
        sys.stdout.flush()
        os._exit(STOPPED)
    except BaseException as error:
        _end(group, program, error)


def _end(group, program, error):
    """A failure of this rank: tell the user, then the others, and go without waiting for anything."""
    code, text = 1, f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        code, text = 130, "interrupted"
    if isinstance(error, SystemExit):
        code, text = error.code if isinstance(error.code, int) else 1, f"left with status {error.code}"
    if isinstance(error, UsageError):
        code, text = 2, str(error)
    try:
        cause = group._fail(text, code, group.store)
    except dist.DistError:  # the store is gone, which may be all that happened here
        if isinstance(error, dist.DistError):
            group._die("the job's store is gone, and with it rank 0 or its launcher", 1)
        cause = [group.rank]
    if cause[0] != group.rank:
        if text == cause[2]:  # the same mistake, told already
            os._exit(code)
        group._follow(cause)
    if isinstance(error, (UsageError, KeyboardInterrupt, SystemExit)):
        print(f"{program}: {text}", file=sys.stderr)
    else:
        print(f"rank {group.rank} of {group.world} on {group.host}:\n{traceback.format_exc()}", file=sys.stderr)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's summary then shows it as the root cause
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
    sys.stderr.flush()
    if group.rank == 0 and group.world > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        time.sleep(3 * BEAT)  # no launcher keeps the store, this process does: the others are to read the cause first
    os._exit(code)
