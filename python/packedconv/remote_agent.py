"""The device's side of scripts/measure_remote: takes files, starts the work, tells of it.

The runner (remote.py) sends this file over ssh to the device's Python and talks to it in
lines of JSON (`session`). The work itself runs apart from any connection (`work`), from the
copy of this file in the folder, and leaves in `<folder>/.job/`:

    files.json    what the runner has copied
    state.json    what the work is, where it stands, how it ended
    stopped.json  which attempt was asked to end
    <id>.log      what it printed
    prepare.lock  held by the session that copies and starts
    running.lock  held by the work, and freed by the kernel when it ends, however it ends
    steps.lock    held by its compilers and measuring scripts as well

Python 3.6 and its standard library only; imports nothing of this package, since it comes first.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.util
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import typing
import uuid

JOB = ".job"
# Folders whose files belong to the runner: what it no longer sends is removed there.
OWNED = ("csrc/", "python/", "scripts/")
POLL_SECONDS = 0.5
# Silence from the runner after which a session ends, and with it its lock.
SILENCE_SECONDS = 120.0
# Bytes that a build and a run need at least, and the rest of one that is built.
NEW_BYTES = 500 * 2**20
REST_BYTES = 50 * 2**20
# Of memory that one C++ compiler may take.
COMPILER_BYTES = 1.5 * 2**30
CMAKE = (3, 20)
GUIDE = "envs/jetson-nano.md says how"

Record = typing.Dict[str, typing.Any]


class RefusalError(Exception):
    """What cannot be done, in words, and the next step."""

    def __init__(self, words: str, step: str) -> None:
        super().__init__(words)
        self.words, self.step = words, step


class Channel:
    """Lines of JSON, and bytes that one of them announces, from and to the runner."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        # Python has read ahead when it took this file from the same stream.
        self._stream = sys.stdin.buffer

    def send(self, **record: typing.Any) -> None:
        sys.stdout.buffer.write(json.dumps(record).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()

    def send_bytes(self, content: bytes) -> None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    def receive(self) -> typing.Optional[Record]:
        """The next request, or None when the runner has gone."""
        with self._deadline():
            line = self._stream.readline()
        return json.loads(line.decode("utf-8")) if line.endswith(b"\n") else None

    def receive_bytes(self, count: int) -> bytes:
        blocks = []
        while count:
            # A slow connection is not a silent one.
            with self._deadline():
                block = self._stream.read1(min(count, 2**16))
            if not block:
                raise EOFError
            blocks.append(block)
            count -= len(block)
        return b"".join(blocks)

    def gone(self) -> bool:
        """Whether the runner has closed its side (it says nothing while it listens)."""
        ready, _, _ = select.select([self._descriptor], [], [], 0)
        return bool(ready)

    @contextlib.contextmanager
    def _deadline(self) -> typing.Iterator[None]:
        # A connection that died without a word must not keep the lock.
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
        signal.setitimer(signal.ITIMER_REAL, SILENCE_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def session() -> None:
    """Answer the runner's requests until it goes."""
    channel = Channel()
    channel.send(agent=1, python=".".join(str(part) for part in sys.version_info[:3]))
    answers = {"prepare": prepare, "follow": follow, "fetch": fetch, "stop": stop}
    while True:
        request = channel.receive()
        if request is None:
            return
        try:
            answers[request["do"]](channel, request)
        except RefusalError as refusal:
            channel.send(reply="refused", words=refusal.words, step=refusal.step)
        except (BrokenPipeError, EOFError):
            return
        except OSError as error:
            channel.send(reply="refused", words=str(error), step=_step_for(error))


def _step_for(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on the device (df -h), or name a folder on another disk: --folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "name a folder of your own on the device: --folder"
    return "see to it on the device"


def prepare(channel: Channel, request: Record) -> None:
    """Bring the folder up to date and start the work, unless it is under way or done.

    Replies "attached" (it is under way), "ended" (it is done, or an attempt that the runner
    has `seen` failed), or "started". Before "started" it asks for the files that it lacks
    ("need"), and lists in "lacking" what the device has not.
    """
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    _require_own(folder)
    os.makedirs(os.path.join(folder, JOB), exist_ok=True)
    with _prepare_lock(channel, folder):
        state = read_state(folder)
        if state is not None:
            if state["status"] == "running":
                _attach(channel, state, request)
                return
            if _is_answer(folder, state, request):
                channel.send(reply="ended", state=state, tail=_tail(folder, state))
                return
        if not request["may_start"]:
            raise RefusalError(request["taken"], "name another: --as NAME")
        _require_same_settings(folder, request)
        needed = NEW_BYTES if not os.path.isdir(f"{folder}/build/extension") else REST_BYTES
        lacking = check_device(folder, request["spec"], needed)
        if lacking:
            channel.send(reply="lacking", lacking=lacking)
            return
        _end_orphans(channel, folder)
        _update_files(channel, folder, request["files"])
        state = _start(folder, request)
        channel.send(reply="started", state=state, folder=folder)


def _is_answer(folder: str, state: Record, request: Record) -> bool:
    """Whether work that has ended is what the runner asks for, so that none has to start."""
    seen = state["attempt"] == request["seen"]
    if state["status"] == "done":
        asked = seen or state["id"] == request["id"]
        return asked and os.path.exists(os.path.join(folder, state["bundle"]))
    # A failure is told once; what a reboot interrupted goes on.
    interrupted = state["status"] == "lost" and state["rebooted"]
    return seen and not (interrupted and request["restart"])


def _require_own(folder: str) -> None:
    """Raise RefusalError for a folder that holds what no runner has put there."""
    used = os.path.isdir(folder) and os.listdir(folder)
    if used and not os.path.isdir(os.path.join(folder, JOB)):
        raise RefusalError(
            f"{folder}: expected a folder that scripts/measure_remote made, or none, "
            "got one with other files, which would be overwritten",
            "name another: --folder",
        )


@contextlib.contextmanager
def _prepare_lock(channel: Channel, folder: str) -> typing.Iterator[None]:
    with open(os.path.join(folder, JOB, "prepare.lock"), "a") as file:
        waited = False
        while not _lock(file.fileno()):
            if not waited:
                channel.send(reply="say", text="waiting for another runner, which is copying")
            waited = True
            time.sleep(POLL_SECONDS)
            channel.send(reply="alive")
        yield


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Whether an flock could be taken."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _attach(channel: Channel, state: Record, request: Record) -> None:
    spec, asked = state["spec"], request["spec"]
    same = all(spec[key] == asked[key] for key in ("device", "run", "settings"))
    if not same:
        raise RefusalError(
            "busy since {} with run {} of {}{}".format(
                state["started"],
                spec["run"],
                spec["device"],
                ""
                if (spec["device"], spec["run"]) != (asked["device"], asked["run"])
                else ", with other settings than asked for",
            ),
            "wait for it (its own command attaches to it), or end it: --stop",
        )
    channel.send(reply="attached", state=state, same=state["id"] == request["id"])


def _require_same_settings(folder: str, request: Record) -> None:
    """Raise RefusalError when the run was measured here with other settings."""
    name = request["settings_path"]
    path = os.path.join(folder, name)
    if not os.path.exists(path) or _sha256(path) == request["files"][name][0]:
        return
    results = os.path.dirname(path)
    measured = [entry for entry in os.listdir(results) if entry != "settings.json"]
    if measured:
        raise RefusalError(
            f"{results} was measured with other settings",
            "name another run (--run NAME), or move that folder away on the device",
        )


def environment() -> typing.Dict[str, str]:
    """Variables for the work: a shell over ssh lacks what a login shell finds."""
    found = dict(os.environ)
    folders = [
        os.path.dirname(sys.executable),
        sysconfig.get_path("scripts"),
        os.path.expanduser("~/.local/bin"),
        *found.get("PATH", os.defpath).split(os.pathsep),
        "/usr/local/cuda/bin",
    ]
    found["PATH"] = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    found["PYTHON"] = sys.executable
    # Lines of a log that is followed.
    found["PYTHONUNBUFFERED"] = "1"
    return found


def check_device(folder: str, spec: Record, needed_bytes: int) -> typing.List[Record]:
    """What the device lacks: {"what", "words" (a tool's own), "step"} each."""
    search = environment()
    lacking = []

    def lacks(what: str, words: str, step: str) -> None:
        lacking.append({"what": what, "words": words, "step": step})

    for module, step in (
        ("numpy", "numpy==1.19.4 on a Jetson Nano, any other elsewhere"),
        ("torch", "PyTorch; for a Jetson, NVIDIA's page has the file"),
        ("pybind11", "pybind11==2.12.1 for Python 3.6, any later elsewhere"),
    ):
        status, words = _said([sys.executable, "-c", f"import {module}"], search)
        if status:
            lacks(module, words, f"install for {sys.executable} with pip: {step} ({GUIDE})")
    include = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(include, "Python.h")):
        lacks("Python's headers", f"no Python.h in {include}", "sudo apt-get install python3-dev")

    status, words = _said(["cmake", "--version"], search)
    version = re.search(r"version (\d+)\.(\d+)", words)
    if status or not version or (int(version.group(1)), int(version.group(2))) < CMAKE:
        lacks(
            "CMake %d.%d or newer" % CMAKE,
            words,
            f"install it for {sys.executable} with pip: cmake==3.28.4 for Python 3.6, "
            "any later elsewhere",
        )
    compiler = search.get("CXX", "c++").split()
    status, words = _said([*compiler, "--version"], search)
    if status:
        lacks("a C++ compiler", words, "sudo apt-get install g++, or set CXX on the device")
    tools = ["bash"] if "CMAKE_GENERATOR" in search else ["bash", "make"]
    for tool in tools:
        if shutil.which(tool, path=search["PATH"]) is None:
            lacks(tool, f"no {tool} in {search['PATH']}", f"sudo apt-get install {tool}")
    if spec["kind"] == "cuda" and "-DPACKEDCONV_CUDA=ON" in spec["cmake_options"]:
        status, words = _said([search.get("CUDACXX", "nvcc"), "--version"], search)
        if status:
            step = "have nvcc in PATH, or as CUDACXX, of a shell that ssh starts"
            lacks("a CUDA compiler", words, f"{step} ({GUIDE})")
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        lacks(
            "disk space",
            f"{free // 2**20} MB free in {folder}, {needed_bytes // 2**20} MB needed",
            "free some (df -h), or name a folder on another disk: --folder",
        )
    return lacking


def _said(command: typing.List[str], variables: typing.Dict[str, str]) -> typing.Tuple[int, str]:
    """Exit status of a command and the last line that it said (the first, where it succeeds)."""
    path = shutil.which(command[0], path=variables["PATH"])
    if path is None:
        return 127, f"{command[0]}: command not found"
    done = subprocess.run(
        [path, *command[1:]],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    if done.returncode < 0:
        lines.append(f"{' '.join(command)}: killed by {signal_name(-done.returncode)}")
    if not lines:
        return done.returncode, f"{' '.join(command)}: exit status {done.returncode}"
    return done.returncode, lines[-1 if done.returncode else 0]


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_orphans(channel: Channel, folder: str) -> None:
    """End compilers and measuring scripts of work that was killed itself."""
    path = os.path.realpath(os.path.join(folder, JOB, "steps.lock"))
    with open(path, "a") as file:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 10
            while not _lock(file.fileno()):
                if time.monotonic() > deadline:
                    break
                orphans = _holding(path)
                channel.send(reply="say", text=f"ending {_joined(orphans)}, left of earlier work")
                for pid in orphans:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(1)
            else:
                return
    raise RefusalError(
        f"processes of earlier work are still there: {_joined(_holding(path))}",
        "end them on the device, or start it anew",
    )


def _holding(path: str) -> typing.List[int]:
    """Process ids, other than this one, that have a file open."""
    found = []
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        pid = int(link.split("/")[2])
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.readlink(link) == path:
                found.append(pid)
    return sorted(set(found))


def _joined(pids: typing.Sequence[int]) -> str:
    return "process " + ", ".join(str(pid) for pid in pids)


def _update_files(
    channel: Channel, folder: str, files: typing.Dict[str, typing.List[typing.Any]]
) -> None:
    """Ask for the files whose SHA-256 is another here, write them, and remove what is stale.

    files: SHA-256 and mode by path relative to the folder.
    """
    lists = os.path.join(folder, JOB, "files.json")
    before = read_json(lists) or {}
    need = [
        path for path, (digest, _) in files.items() if _sha256(os.path.join(folder, path)) != digest
    ]
    channel.send(reply="need", paths=need)
    if need:
        announced = channel.receive()
        if announced is None:
            raise EOFError
        content = channel.receive_bytes(announced["bytes"])
        # So that what is here of a copy that breaks off is known to be the runner's.
        write_json(lists, dict(before, **files))
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for member in archive:
                if member.name not in files or not member.isfile():
                    raise RefusalError(f"{member.name}: not asked for", "report this as a bug")
                stream = archive.extractfile(member)
                assert stream is not None
                write_file(os.path.join(folder, member.name), stream.read(), files[member.name][1])
    for path in set(before) - set(files):
        if path.startswith(OWNED):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, path))
    write_json(lists, files)


def _start(folder: str, request: Record) -> Record:
    """Start the work, apart from this session; returns its state."""
    log = os.path.join(JOB, request["id"] + ".log")
    state = {
        "id": request["id"],
        "spec": request["spec"],
        "attempt": uuid.uuid4().hex,
        "boot": boot_id(),
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "step": "start",
        "log": log,
        "log_begin": _size(os.path.join(folder, log)),
    }
    running = open(os.path.join(folder, JOB, "running.lock"), "a")  # noqa: SIM115
    output = open(os.path.join(folder, log), "ab")  # noqa: SIM115
    with running, output:
        deadline = time.monotonic() + 10
        while not _lock(running.fileno()):  # someone looks at it
            if time.monotonic() > deadline:
                raise RefusalError("work has been started meanwhile", "run the same command again")
            time.sleep(0.05)
        write_json(os.path.join(folder, JOB, "state.json"), state)
        agent = os.path.join(folder, "python", "packedconv", os.path.basename(AGENT_FILE))
        # The open lock goes along, so that it is never free in between.
        process = subprocess.Popen(
            [sys.executable, agent, "work", folder, str(running.fileno())],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[running.fileno()],
        )
    return dict(state, status="running", pid=process.pid, rebooted=False)


def read_state(folder: str) -> typing.Optional[Record]:
    """The state of the work in a folder, None where there never was any.

    status: running, done, failed, stopped, or lost (it ended and could not say how).
    rebooted: whether the device has been started anew since the work was.
    """
    state = read_json(os.path.join(folder, JOB, "state.json"))
    if state is None:
        return None
    with open(os.path.join(folder, JOB, "running.lock"), "a") as file:
        # Shared, so that those who look do not take one another for the work.
        free = _lock(file.fileno(), fcntl.LOCK_SH)
    if not free:
        status = "running"
    else:
        # What it wrote last, between the first look and its end.
        state = read_json(os.path.join(folder, JOB, "state.json")) or state
        stopped = read_json(os.path.join(folder, JOB, "stopped.json"))
        status = state.get("status", "stopped" if stopped == state["attempt"] else "lost")
    return dict(state, status=status, rebooted=state["boot"] != boot_id())


def boot_id() -> str:
    """What tells one start of the device from another."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def follow(channel: Channel, request: Record) -> None:
    """Send what the work prints from `offset` on (None: its last lines), until it ends."""
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    offset = request["offset"]
    while not channel.gone():
        state = read_state(folder)
        if state is None:
            raise RefusalError(f"no work in {folder} any more", "run the same command again")
        _require_attempt(state, request)
        path = os.path.join(folder, state["log"])
        if offset is None:
            offset = _last_lines(path, state["log_begin"])
        ended = state["status"] != "running"
        content = _read_from(path, offset)
        if not ended:
            content = content[: content.rfind(b"\n") + 1]
        offset += len(content)
        if content:
            channel.send(reply="log", text=content.decode("utf-8", "replace"), offset=offset)
        elif ended:
            channel.send(reply="ended", state=state, tail=_tail(folder, state))
            return
        else:
            channel.send(reply="alive", step=state["step"])
            time.sleep(POLL_SECONDS)


def _require_attempt(state: Record, request: Record) -> None:
    """Raise RefusalError where another runner has started other work since the request's."""
    if state["attempt"] != request["attempt"]:
        raise RefusalError(
            "other work was started meanwhile, run {run} of {device}".format(**state["spec"]),
            "run the same command again",
        )


def _last_lines(path: str, begin: int, count: int = 10) -> int:
    """Offset of the last lines of a file, not before `begin`."""
    begin = max(begin, _size(path) - 20000)
    content = _read_from(path, begin)
    lines = content.splitlines(True)[-count:]
    return begin + len(content) - sum(len(line) for line in lines)


def _tail(folder: str, state: Record) -> str:
    """The last lines of this attempt, to find out why it failed."""
    path = os.path.join(folder, state["log"])
    return _read_from(path, _last_lines(path, state["log_begin"], 30)).decode("utf-8", "replace")


def fetch(channel: Channel, request: Record) -> None:
    """Send the bundle of work that is done, from `offset` on."""
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    state = read_state(folder)
    if state is not None:
        _require_attempt(state, request)
    if state is None or state["status"] != "done":
        raise RefusalError(f"no bundle in {folder}", "run the same command again")
    path = os.path.join(folder, state["bundle"])
    size, digest = _size(path), _sha256(path)
    offset = request["offset"] if request["offset"] <= size else 0
    channel.send(reply="bundle", bytes=size, sha256=digest, offset=offset)
    with open(path, "rb") as file:
        file.seek(offset)
        while True:
            content = file.read(2**16)
            if not content:
                return
            channel.send_bytes(content)


def stop(channel: Channel, request: Record) -> None:
    """End work that is under way; what it has measured stays."""
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    state = read_state(folder) if os.path.isdir(os.path.join(folder, JOB)) else None
    if state is None or state["status"] != "running":
        channel.send(reply="stopped", was="not running")
        return
    # First, so that who follows it knows why it ends.
    write_json(os.path.join(folder, JOB, "stopped.json"), state["attempt"])
    for number in (signal.SIGTERM, signal.SIGKILL):
        # While the lock is held, this is the process that holds it.
        pid = state.get("pid")
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.killpg(pid, number)
        for _ in range(20):
            time.sleep(POLL_SECONDS)
            state = read_state(folder) or state
            if state["status"] != "running":
                _end_orphans(channel, folder)
                channel.send(reply="stopped", was="running")
                return
            channel.send(reply="alive")
    raise RefusalError(f"process {pid} does not end", "end it on the device")


class StepError(Exception):
    """A step of the work ended with a failure."""


def work(folder: str, lock: int) -> None:
    """Build, measure and pack; the process that `prepare` starts. Holds `lock`."""
    os.chdir(folder)
    path = os.path.join(JOB, "state.json")
    state = read_json(path)
    assert state is not None
    spec = state["spec"]
    # Of this process alone: its children have a lock of their own.
    os.set_inheritable(lock, False)

    def note(**changes: typing.Any) -> None:
        state.update(changes)
        write_json(path, state)

    note(pid=os.getpid(), step="waiting")
    results = "results/{device}/{run}".format(**spec)
    # Of its own name: a bundle is never replaced by another.
    bundle = "bundles/{device}-{run}-{attempt:.8}.tar.gz".format(attempt=state["attempt"], **spec)
    try:
        with open(os.path.join(JOB, "steps.lock"), "a") as steps, _machine_lock():
            _lock(steps.fileno())

            def step(name: str, *command: str) -> None:
                note(step=name)
                _say(name)
                variables = dict(environment(), PYTHONPATH=os.path.join(folder, "python"))
                status = subprocess.call(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[steps.fileno()],
                )
                if status:
                    how = f"exit status {status}"
                    if status < 0:
                        how = "killed by " + signal_name(-status)
                    raise StepError(f"{name}: {how}")

            for name, command in build_steps(spec["cmake_options"]):
                step(name, *command)
            step("measure", "bash", "scripts/measure_here.sh", results)
            os.makedirs(os.path.dirname(bundle), exist_ok=True)
            step(
                "pack",
                *(sys.executable, "scripts/bundle.py", "--results", results, "--out", bundle),
            )
        _say("done")
        note(status="done", step="done", bundle=bundle)
    except StepError as failure:
        _say(str(failure))
        note(status="failed", why=str(failure))
    except OSError as error:
        _say(f"error: {error}")
        note(status="failed", why=str(error), advice=_step_for(error))
    except Exception as error:
        note(status="failed", why=repr(error))
        raise


def build_steps(
    options: typing.Sequence[str],
) -> typing.Iterator[typing.Tuple[str, typing.List[str]]]:
    """Names and commands that build the extension in place."""
    build = "build/extension"
    noted = os.path.join("build", "cmake_options.json")
    # CMake remembers options that are no longer given, and headers of another Python.
    chosen = [sys.executable, *options]
    if read_json(noted) != chosen:
        shutil.rmtree(build, ignore_errors=True)
    write_json(noted, chosen)
    pybind11 = subprocess.run(
        [sys.executable, "-c", "import pybind11; print(pybind11.get_cmake_dir())"],
        stdout=subprocess.PIPE,
    ).stdout.decode()
    configure = [
        *("cmake", "-S", "csrc", "-B", build, "-DCMAKE_BUILD_TYPE=Release"),
        f"-Dpybind11_DIR={pybind11.strip()}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *options,
    ]
    yield "configure", configure
    yield "build", ["cmake", "--build", build, "--parallel", str(compilers())]
    yield "install", ["cmake", "--install", build, "--prefix", "python"]


def compilers() -> int:
    """Compilers at once: as many as there are CPUs and memory for."""
    available = 0
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", file.read(), re.MULTILINE)
        available = 1024 * int(found.group(1)) if found else 0
    return max(1, min(len(os.sched_getaffinity(0)), int(available // COMPILER_BYTES)))


@contextlib.contextmanager
def _machine_lock() -> typing.Iterator[None]:
    """One work at a time on a device, whichever folders and users."""
    # By its path: the package itself may not import before the extension is built.
    spec = importlib.util.spec_from_file_location("lock", "python/packedconv/bench/lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    with module.measurement_lock("remote-work"):
        yield


def _say(text: str) -> None:
    print("{}  {}".format(time.strftime("%H:%M:%S"), text), flush=True)


def read_json(path: str) -> typing.Any:
    """Content of a JSON file, None where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, ValueError):
        return None


def write_json(path: str, content: typing.Any) -> None:
    """Write a JSON file so that a reader never sees half of it."""
    write_file(path, json.dumps(content, indent=1, sort_keys=True).encode("utf-8"), 0o644)


def write_file(path: str, content: bytes, mode: int) -> None:
    """Write a file under a temporary name and rename it."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _sha256(path: str) -> typing.Optional[str]:
    """SHA-256 of a file, None where there is none."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(2**20), b""):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _read_from(path: str, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(2**20)
    except FileNotFoundError:
        return b""


AGENT_FILE = "remote_agent.py"

if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(sys.argv[2], int(sys.argv[3]))
    else:
        session()
