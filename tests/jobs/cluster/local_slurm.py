"""A Slurm of one's own on this machine: munged, slurmctld and several slurmd, each a node on its own port.

Needs Debian's slurm-wlm and munge, and root (slurmd starts jobs as their owner). Nothing of the machine's own Slurm is
touched: configuration, keys, sockets and state lie in one folder, ports are free ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PATIENCE_S = 60.0


def missing() -> str:
    """Why no Slurm can be started here; "" where one can."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        return f"no Slurm: {', '.join(lacking)} not found (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as their owner, which needs root"


@dataclass(frozen=True)
class LocalSlurm:
    """A running Slurm: what commands need in their environment, and its nodes."""

    folder: Path
    environment: dict[str, str]
    nodes: tuple[str, ...]

    def command(self, *words: str) -> str:
        """What a Slurm command prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def states(self, job: str = "") -> dict[str, str]:
        """State of every task of the queue (of one job) by id, as ``17_3``."""
        words = ["squeue", "--noheader", "--array", "--format", "%i %T", *(["--jobs", job] if job else [])]
        lines = self.command(*words).split("\n")
        return dict(line.split() for line in lines if line.strip())

    def wait(self, done: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Until ``done()``; the log of the controller where it does not come."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s\n{self.log()}"
            time.sleep(0.2)

    def log(self) -> str:
        """The end of the controller's and the nodes' logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in files)


@contextlib.contextmanager
def local_slurm(folder: Path, nodes: int = 4, cpus: int = 1) -> Iterator[LocalSlurm]:
    """A Slurm of so many nodes with so many processors each; ended with all its jobs."""
    names = tuple(f"n{i + 1}" for i in range(nodes))
    ports = _free_ports(nodes + 1)
    config = folder / "slurm.conf"
    config.write_text(_configuration(folder, names, ports, cpus))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    for name in list(environment):
        if name.startswith("SLURM_") and name != "SLURM_CONF":
            del environment[name]
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *arguments: str) -> None:
        path = _program(program)
        assert path is not None
        with open(folder / f"{program}{len(started)}.out", "wb") as output:
            started.append(subprocess.Popen([path, *arguments], env=environment, stdout=output, stderr=output))

    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    own = ["pid-file", "log-file", "seed-file"]
    places = [f"--{name}={folder / ('munge.' + name.split('-')[0])}" for name in own]
    try:
        start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.s'}", *places)
        slurm = LocalSlurm(folder, environment, names)
        slurm.wait((folder / "munge.s").exists, "munge")
        start("slurmctld", "-D", "-f", str(config))
        for name in names:
            start("slurmd", "-D", "-N", name, "-f", str(config))
        slurm.wait(lambda: _idle(slurm) == nodes, f"{nodes} idle nodes")
        yield slurm
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["scancel", "--user", "root"], env=environment, capture_output=True, timeout=20, check=False)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _idle(slurm: LocalSlurm) -> int:
    words = ["sinfo", "--noheader", "--Node", "--format", "%N %t"]
    asked = subprocess.run(words, env=slurm.environment, capture_output=True, text=True, check=False)
    return sum(line.split()[-1] == "idle" for line in asked.stdout.splitlines() if line.strip())


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configuration(folder: Path, names: tuple[str, ...], ports: list[int], cpus: int) -> str:
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 State=UNKNOWN"
        for name, port in zip(names, ports[1:], strict=True)
    )
    return f"""\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder / "munge.s"}
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=1,sched_min_interval=100000
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=2
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=20
SwitchType=switch/none
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder / "spool-%n"}
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmdPidFile={folder / "slurmd-%n.pid"}
SlurmctldLogFile={folder / "slurmctld.log"}
SlurmdLogFile={folder / "slurmd-%n.log"}
{nodes}
PartitionName=all Nodes={",".join(names)} Default=YES MaxTime=INFINITE State=UP
"""
