"""A Slurm cluster of a few virtual nodes on this machine, in a temporary folder.

Its own munge key, munged, slurmctld and one slurmd for each node. Needs root; touches nothing of a
Slurm that is installed for real, and nothing outlives stop().
"""

import ctypes
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
# Of each node; fewer than most machines have, and two nodes at work at once need no more.
CPUS = min(2, os.cpu_count() or 1)
MEMORY_MB = 4000
# What the last node is said to have.
GPU = "virtual"
CONFIG = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=5
# Jobs that ended are told of until the tests have asked.
MinJobAge=7200
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=120 State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
"""


def missing() -> str:
    """Why there can be no such cluster here; empty where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmctld and slurmd start jobs as root only"
    return ""


class VirtualSlurm:
    """Started when made; stop() ends every daemon that it started, and all jobs."""

    def __init__(self, folder: pathlib.Path, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self.folder = folder
        self.nodes = nodes
        self.daemons: list[subprocess.Popen] = []
        for name in ("munge", "state", "spool", "bin"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        self.config = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        port, *ports = _free_ports(1 + len(nodes))
        described = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={number} CPUs={CPUS}"
            f" RealMemory={MEMORY_MB}" + f" Gres=gpu:{GPU}:1" * (name == nodes[-1])
            for name, number in zip(nodes, ports, strict=True)
        )
        self.config.write_text(
            CONFIG.format(host=host, port=port, folder=folder, nodes=described).lstrip()
        )
        (folder / "gres.conf").write_text(
            f"NodeName={nodes[-1]} Name=gpu Type={GPU} File=/dev/null\n"
        )
        # The executor's job steps drop SLURM_CONF, as if all clusters had theirs in /etc/slurm.
        srun = folder / "bin" / "srun"
        srun.write_text(
            f'#!/bin/sh\nexport SLURM_CONF={self.config}\nexec {shutil.which("srun")} "$@"\n'
        )
        srun.chmod(0o755)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = self.folder / "munge"
        self._daemon(
            *("munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}"),
            *(f"--socket={munge}/socket", f"--pid-file={munge}/pid"),
            *(f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        _wait(lambda: (munge / "socket").exists(), 30, "munged makes its socket")
        self._daemon("slurmctld", "-D", "-f", str(self.config))
        for name in self.nodes:
            self._daemon("slurmd", "-D", "-f", str(self.config), "-N", name)
        _wait(self._is_idle, 60, f"all nodes are idle ({self.folder}/*.log)")

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "a") as stream:
            process = subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.daemons.append(process)

    def _is_idle(self) -> bool:
        done = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        states = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
        return [states.get(name) for name in self.nodes] == ["idle"] * len(self.nodes)

    def stop(self) -> None:
        """End all jobs and daemons, the last started first."""
        if self.daemons:
            self.ask("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 20
            while self.ask("squeue", "--noheader", check=False).stdout.strip():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.5)
        for process in reversed(self.daemons):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self.daemons):
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemons.clear()

    def environment(self) -> dict[str, str]:
        """What a process that uses this cluster has in its environment."""
        search = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return {**os.environ, "SLURM_CONF": str(self.config), "PATH": search}

    def ask(self, *command: str, check: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=check,
        )

    def jobs(self) -> list[dict[str, str]]:
        """Every job so far, by the keys of scontrol."""
        said = self.ask("scontrol", "--oneliner", "show", "jobs").stdout
        lines = [line for line in said.splitlines() if line.startswith("JobId=")]
        return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]


def _end_with_parent() -> None:
    """A daemon gets SIGTERM when the process that started it dies, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"expected within {seconds:.0f} s: {what}"
        time.sleep(0.2)
