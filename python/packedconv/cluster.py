"""scripts/artifact cluster: several devices of a Slurm cluster, measured in parallel.

Built once; then one Snakemake for each device, whose measuring jobs all go to one node; then
what the devices share is rendered here. A device that fails does not stop the others.
"""

import argparse
import contextlib
import fcntl
import glob
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
from tabulate import tabulate

from packedconv import announce, slurm
from packedconv import config as configuration
from packedconv.files import atomic_write
from packedconv.launch import is_dry_run, run

LOCK = "build/cluster.lock"
PLUGIN = "snakemake_executor_plugin_slurm"
SNAKEMAKE = (sys.executable, "-m", "snakemake")
# What of a Snakemake's output says why it failed: Slurm's words, then those of our scripts.
REASONS = re.compile(
    r"(sbatch: error: .*|SLURM-job '\d+' failed, SLURM status is: '\w+'|^error: .*)"
)
# A line that has the time alone: the log keeps it.
TIME = re.compile(r"\[\w{3} \w{3} [\d: ]+\]\s*$")
POLL_SECONDS = 30.0
ENDED_BY_SIGNAL = 128  # and more: exit statuses of launch.run for a command that a signal ended
PREFIX_LENGTH = 50  # of a job's name, that the plugin allows


class Job:
    """One device of a call: what is asked for it, and what became of it."""

    def __init__(self, device: str, run: str, request: Mapping[str, Any]) -> None:
        self.device, self.run, self.request = device, run, request
        self.node: str | None = None
        self.outcome = ""
        self.reasons: list[str] = []
        self.seconds = 0.0
        self.process: subprocess.Popen | None = None

    @property
    def prefix(self) -> str:
        """How the names of its Slurm jobs begin."""
        return f"packedconv-{self.device}-{self.run}"[:PREFIX_LENGTH]

    @property
    def log(self) -> str:
        return f"logs/{self.device}/{self.run}/cluster.log"

    def fail(self, outcome: str, reason: str) -> None:
        self.outcome = outcome
        self.reasons.append(reason)
        self.say(f"{outcome}: {reason}")

    def say(self, text: str) -> None:
        """Lines of this device, told apart from those of the others."""
        lines = (f"[{self.device}] {line}" for line in text.splitlines() if line.strip())
        print("\n".join(lines), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure devices of a cluster and render them; 0 when all of them are done."""
    options, passed = _parse(arguments)
    root = pathlib.Path.cwd()
    try:
        jobs = _jobs(options, passed, root)
        with _only_one() as lock:
            return _run(jobs, passed, root, lock)
    except (slurm.SlurmError, ValueError) as error:
        print(f"artifact: error: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/artifact cluster",
        description=__doc__,
        epilog="Further arguments go to every call of Snakemake, such as --configfile few.yaml, "
        "--config seed=2 or -n.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices", nargs="+", metavar="DEVICE", help="devices to measure (default: all of FILE)"
    )
    parser.add_argument(
        "--requests",
        metavar="FILE",
        default=slurm.DEVICES_FILE,
        help="what jobs ask Slurm for, by device (default: %(default)s)",
    )
    return parser.parse_known_args(arguments)


def _jobs(options: argparse.Namespace, passed: Sequence[str], root: pathlib.Path) -> list[Job]:
    """A job for each device. Raises ValueError for a call, or a machine, that cannot do."""
    requests = slurm.load_requests(root / options.requests, root)
    if importlib.util.find_spec(PLUGIN) is None:
        raise ValueError(
            f"Snakemake's executor for Slurm: expected {PLUGIN} in {sys.prefix}, found none; "
            f"{sys.executable} -m pip install -r envs/requirements-slurm.txt"
        )
    slurm.require_commands()
    devices = list(dict.fromkeys(options.devices or requests))
    jobs = []
    for device in devices:
        if device not in requests:
            raise ValueError(
                f"devices: expected some of {', '.join(requests)}, which {options.requests} has, "
                f"got {device}; say there what a job on it asks for"
            )
        config = announce.merged_config([], with_device(device, passed), root)
        settings = configuration.resolve(config, root)
        jobs.append(Job(device, settings["run"], requests[device]))
    return jobs


def with_device(device: str, arguments: Sequence[str]) -> list[str]:
    """Arguments of Snakemake that choose the device too.

    Of two --config Snakemake takes the last one only, so there must be one.
    """
    for index, argument in enumerate(arguments):
        option, joined, first = argument.partition("=")
        if option in ("--config", "-C"):
            named = [first] if joined else []
            return [
                *(*arguments[:index], option, f"device={device}"),
                *(*named, *arguments[index + 1 :]),
            ]
    return [*arguments, "--config", f"device={device}"]


@contextlib.contextmanager
def _only_one() -> Iterator[int]:
    """Keep a second call out of this folder. Raises ValueError where one is at work.

    Yields a descriptor that holds the lock for as long as a process has it open.

    Snakemake's own lock cannot: it is one folder of files, which the first Snakemake to end
    removes with the locks of all others in it. So the parallel ones go without, and make
    nothing that another one makes. The kernel frees this lock also after a kill.
    """
    if glob.glob(".snakemake/locks/*"):
        raise ValueError(
            "the folder is locked, by a Snakemake at work in it or by one that was killed; wait "
            "for the first; after a kill, run: scripts/artifact --unlock"
        )
    os.makedirs(os.path.dirname(LOCK), exist_ok=True)
    with open(LOCK, "a", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holders = " ".join(str(pid) for pid in _holding(LOCK))
            raise ValueError(
                f"{LOCK}: expected no other call of cluster in this folder, found one at work "
                f"(process {holders or 'of another machine'}); wait for it, use another clone, or "
                f"end it and its jobs: kill -INT {holders or 'PROCESS'}"
            ) from None
        yield stream.fileno()


def _holding(path: str) -> list[int]:
    """Processes of this user that have a file open, all but this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            opened = {entry.path for entry in process.open_files()}
            if os.path.abspath(path) in opened and process.pid != os.getpid():
                found.append(process.pid)
    return found


def _run(jobs: Sequence[Job], passed: Sequence[str], root: pathlib.Path, lock: int) -> int:
    build = [*SNAKEMAKE, "build", "--cores", "1", *with_device(jobs[0].device, passed)]
    status = run(build)
    if status:
        return status
    ready = [job for job in jobs if _place(job, root)]
    if is_dry_run(passed):
        for job in ready:
            status = run(_command(job, passed))
            if status >= ENDED_BY_SIGNAL:
                return status
            job.outcome = "failed" if status else "done"
        return 1 if any(job.outcome != "done" for job in jobs) else 0
    ready = [job for job in ready if _note_node(job)]
    stopped = threading.Event()
    with _passing_signals_on(ready, stopped):
        threads = [
            threading.Thread(target=_measure, args=(job, passed, lock, stopped)) for job in ready
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    unrendered = ""
    done = [job for job in jobs if job.outcome == "done"]
    # A Ctrl-C that reached this process alone has stopped nothing.
    if stopped.is_set() and len(done) < len(jobs):
        unrendered = "this call was stopped"
    elif done:
        # Of figures that are not of one device, those of the first that was named.
        command = [*SNAKEMAKE, "all", "--workflow-profile", slurm.PROFILE]
        command += [*with_device(done[0].device, passed), *_requested(done[0])]
        unrendered = "see above" if run(command) else ""
    print(summary(jobs, unrendered))
    return 1 if unrendered or len(done) < len(jobs) else 0


def _place(job: Job, root: pathlib.Path) -> bool:
    """Choose the node of a device, and say so; False where Slurm rejects what it asks for.

    A run stays on the node that it began on: its results are compared with each other.
    """
    asked = job.request.get("node")
    try:
        begun = _begun_on(job)
        if begun and asked and begun != asked:
            raise slurm.SlurmError(
                f"expected node {begun}, on which run {job.run} began, got node {asked}; "
                "name another run (--config run=NAME), or move its results away"
            )
        queued = slurm.jobs_of(job.prefix, root)
        if queued:
            raise slurm.SlurmError(
                f"jobs of an earlier call are still in the queue; wait for them, or: "
                f"scancel {' '.join(queued)}"
            )
        job.node = slurm.node_for(job.request, begun or asked)
        cpus = job.request.get("cpus") or slurm.cpus_of(job.node)
        slurm.node_for(job.request, job.node, cpus)
        job.request = {**job.request, "cpus": cpus}
    except slurm.SlurmError as error:
        job.fail("rejected", str(error))
        return False
    job.say(f"all jobs on node {job.node}, {cpus} CPUs; log: {job.log}")
    return True


def _node_file(job: Job) -> str:
    return f"logs/{job.device}/{job.run}/slurm-node.json"


def _begun_on(job: Job) -> str | None:
    """The node that the results at hand are of; None where nothing was measured yet.

    Raises SlurmError where that cannot be told.
    """
    if not glob.glob(f"results/{job.device}/{job.run}/**/*.csv", recursive=True):
        return None
    try:
        with open(_node_file(job), encoding="utf-8") as stream:
            return json.load(stream)["node"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise slurm.SlurmError(
            f"{_node_file(job)}: expected the node that run {job.run} began on, got {error!r}; "
            "name another run (--config run=NAME), or delete the file"
        ) from None


def _note_node(job: Job) -> bool:
    """Keep which node the results are of, beside the log; False where that cannot be written."""
    try:
        os.makedirs(os.path.dirname(_node_file(job)), exist_ok=True)
        with atomic_write(_node_file(job)) as path, open(path, "w", encoding="utf-8") as stream:
            json.dump({"node": job.node}, stream)
    except OSError as error:
        job.fail("failed", str(error))
        return False
    return True


def _requested(job: Job) -> list[str]:
    wanted = slurm.resources(job.request, str(job.node), job.request["cpus"])
    return [
        *("--slurm-jobname-prefix", job.prefix),
        *("--default-resources", *slurm.resource_arguments(wanted)),
    ]


def _command(job: Job, passed: Sequence[str]) -> list[str]:
    target = ["device", "--workflow-profile", slurm.PROFILE, "--nolock"]
    return [*SNAKEMAKE, *target, *with_device(job.device, passed), *_requested(job)]


def _measure(job: Job, passed: Sequence[str], lock: int, stopped: threading.Event) -> None:
    """Run Snakemake for one device to its end, its output to the terminal and a log."""
    started = time.monotonic()
    found: dict[str, None] = {}
    try:
        with open(job.log, "a", encoding="utf-8") as log:
            if stopped.is_set():
                return
            # It outlives a kill of this process, and the folder stays locked with it.
            job.process = subprocess.Popen(
                _command(job, passed),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[lock],
            )
            if stopped.is_set():  # just now
                job.process.send_signal(signal.SIGINT)
            with job.process, _watching(job):
                for line in job.process.stdout or ():
                    log.write(line)
                    if not TIME.match(line):
                        job.say(line)
                    reason = REASONS.search(line)
                    if reason:
                        found[reason[0].strip().removesuffix("'.")] = None
    except OSError as error:
        job.seconds = time.monotonic() - started
        job.fail("failed", str(error))
        return
    status = job.process.returncode
    job.seconds = time.monotonic() - started
    job.outcome = "failed" if status else "done"
    if status:
        job.reasons += found or [f"{job.log} says why"]


@contextlib.contextmanager
def _watching(job: Job) -> Iterator[None]:
    """Say once why a job waits, in Slurm's words; that it waits for another one is no news."""
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(job, ended))
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(job: Job, ended: threading.Event) -> None:
    told = set()
    while not ended.wait(POLL_SECONDS):
        for waiting in slurm.pending(job.prefix):
            if waiting not in told and waiting.reason not in ("Dependency", "None"):
                job.say(f"Slurm job {waiting.job} ({waiting.comment}) waits: {waiting.reason}")
            told.add(waiting)


@contextlib.contextmanager
def _passing_signals_on(jobs: Sequence[Job], stopped: threading.Event) -> Iterator[None]:
    """Where this process is asked to end, every Snakemake gets a Ctrl-C: it cancels its jobs.

    `stopped` is set then.
    """

    def interrupt(received: int, _: Any) -> None:
        stopped.set()
        for job in jobs:
            if job.process is not None and job.process.poll() is None:
                job.process.send_signal(signal.SIGINT)

    def wait(received: int, _: Any) -> None:
        """Ctrl-C reaches them from the terminal. Not SIG_IGN, which they would inherit."""
        stopped.set()

    handlers = {signal.SIGINT: wait, signal.SIGTERM: interrupt, signal.SIGHUP: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summary(jobs: Sequence[Job], unrendered: str = "") -> str:
    """What became of each device, as a table, with the reasons of those that failed.

    unrendered: why what the devices share was not rendered, where that is so.
    """
    rows = [
        [
            *(job.device, job.run, job.outcome or "not run", job.node or "–"),
            *(f"{job.seconds / 60:.1f}", job.log if job.seconds else "–"),
        ]
        for job in jobs
    ]
    head = ["device", "run", "outcome", "node", "minutes", "log"]
    lines = [tabulate(rows, headers=head, tablefmt="simple", disable_numparse=True)]
    for job in jobs:
        lines += [f"{job.device}: {reason}" for reason in job.reasons[-5:]]
    if unrendered:
        lines.append(f"What the devices share was not rendered: {unrendered}")
    if unrendered or any(job.outcome != "done" for job in jobs):
        lines.append("The same command again repeats what is not finished, and nothing else.")
    return "\n".join(["", *lines])
