"""A real Slurm for the tests: slurmctld, slurmd and munged with their state, ports and
logs in one temporary folder.

Its nodes, all on this host, offer partition `ssc-gpu`, four fake GPUs each (character
devices that behave like /dev/null) and as many CPUs as the batch files ask for. Jobs see
the repository read-only, where root may mount. Nothing else of the machine is touched.
"""

import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from forks import ROOT, free_port, until

# A mount namespace of its own, in which ROOT is read-only.
READ_ONLY = ["unshare", "--mount", "sh", "-ec"]
READ_ONLY += [f'mount --bind "{ROOT}" "{ROOT}"; mount -o remount,bind,ro "{ROOT}"; exec "$0" "$@"']
PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "scontrol", "scancel")


def missing():
    """Why no cluster can be started here, or "" if one can."""
    if os.geteuid() != 0:
        return "starting slurmd needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return ""


def _search_path():
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Cluster:
    """`with Cluster() as cluster:` — up on entry (nodes idle), down with all its
    processes on exit. With `cluster.env` Slurm's commands go to it.
    """

    def __init__(self, nodes=2):
        # Short: a Unix socket's path has 107 characters at most.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.nodes = [f"127.0.0.{i + 1}" for i in range(nodes)]
        self.env = {
            **os.environ,
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "PATH": _search_path(),
        }
        self.processes = []
        self.read_only = subprocess.run([*READ_ONLY, "true"], capture_output=True).returncode == 0

    def __enter__(self):
        try:
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.processes:
            self.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", check=False)
            self.run("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 5
            while (
                self.run("squeue", "-h", "-t", "RUNNING,COMPLETING", check=False)
                and time.monotonic() < deadline
            ):
                time.sleep(0.2)
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
        shutil.rmtree(self.root, ignore_errors=True)

    def _configure(self):
        root = self.root
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool", "log", "dev"):
            (root / name).mkdir()
        for i in range(4):
            os.mknod(root / f"dev/gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (root / "gres.conf").write_text(f"Name=gpu File={root}/dev/gpu[0-3]\n")
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={free_port()} CPUs=16 "
            f"RealMemory=64000 Gres=gpu:4 State=UNKNOWN"
            for node in self.nodes
        )
        (root / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\n")
        (root / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
KillWait=30
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=ssc-gpu Nodes={",".join(self.nodes)} Default=YES MaxTime=INFINITE State=UP
""")
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={root}/munge.key"], check=True, env=self.env
        )

    def _start(self):
        root = self.root
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "seed-file": "munge.seed",
        }
        flags = [
            f"--{flag}={root / file}" for flag, file in (files | {"log-file": "log/munged"}).items()
        ]
        self._spawn("munged", "--foreground", "--force", "--num-threads=2", *flags)
        self._wait(lambda: (root / "munge.socket").exists(), "munged did not open its socket")
        self._spawn("slurmctld", "-D", "-c", "-i")
        for node in self.nodes:
            self._spawn(*READ_ONLY * self.read_only, "slurmd", "-D", "-c", "-N", node)
        self._wait(
            lambda: (
                self.run("sinfo", "-h", "-o", "%D %T", check=False) == f"{len(self.nodes)} idle"
            ),
            "the nodes did not become idle",
            30,
        )

    def _spawn(self, *command):
        with open(self.root / "log" / f"{len(self.processes)}-{command[0]}.out", "w") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=self.env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait(self, ready, complaint, seconds=60):
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                logs = "\n".join(
                    f"== {f.name}\n{f.read_text(errors='replace')[-2000:]}"
                    for f in (self.root / "log").iterdir()
                )
                raise RuntimeError(f"{complaint}\n{logs}")
            time.sleep(0.1)

    def run(self, *command, check=True, cwd=None, env=None):
        """Output of one Slurm command, stripped."""
        done = subprocess.run(
            command, env={**self.env, **(env or {})}, cwd=cwd, text=True, capture_output=True
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, *arguments, cwd, env=None):
        """sbatch in folder `cwd`, as a user would → job id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).split(";")[0]

    def state(self, job):
        """RUNNING, PENDING, COMPLETED, FAILED, …"""
        return self.fact(job, "JobState")

    def fact(self, job, name):
        """One field of `scontrol show job`."""
        fields = dict(
            f.split("=", 1)
            for f in self.run("scontrol", "show", "job", str(job)).split()
            if "=" in f
        )
        return fields[name]

    def wait_for(self, job, states, seconds):
        return until(
            lambda: {self.state(job)} & states, seconds, lambda: (job, self.state(job)), pause=0.2
        ).pop()
