"""Measure on devices where the workflow cannot go, over ssh (scripts/measure_remote).

The system's ssh runs remote_agent.py on the device and is all that is asked of the network.
Work on the device does not depend on a connection: the runner follows it, comes back after a
drop, and brings the bundle here.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packedconv import config as configuration
from packedconv.announce import merged_config
from packedconv.bundle import import_bundle, load_origin
from packedconv.imports import imported_modules
from packedconv.run_names import DEFAULT_RUN, RESERVED

AGENT = pathlib.Path(__file__).with_name("remote_agent.py")
MEASURING = "scripts/measure_here.sh"
FOLDER = "packedconv-remote"
SSH_STATUS = 255  # of ssh itself, rather than of what it ran
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# Restarts of a device, one after the other, that a run survives.
REBOOTS = 5
QUIET_SECONDS = 60.0

# In the device's shell between single quotes, so without any, and in Python 2 as well.
BOOTSTRAP = (
    "import sys; v=sys.version_info; "
    "v[:2]>=(3,6) or sys.exit(sys.executable+"
    '": expected Python 3.6 or newer, found "+sys.version.split()[0]); '
    "n=int(sys.argv[2]); "
    'exec(compile(sys.stdin.buffer.read(n),"remote_agent.py","exec"),{"__name__":"__main__"})'
)

# What ssh and the tools on a device say, and the step that follows from it. The first that is
# found counts.
SSH_STEPS = (
    (
        r"Host key verification failed|No \S+ host key is known",
        "log in once by hand, compare the key with the device's, and accept it: ssh {host}",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "let a key in without a password (ssh-copy-id {host}; ssh-add for one with a passphrase), "
        "or name it: --ssh-option IdentityFile=PATH",
    ),
    (
        r"Could not resolve hostname",
        "see that the name is right, or give it an address in ~/.ssh/config",
    ),
    (
        r"Bad owner or permissions|[Bb]ad configuration option|Unsupported option",
        "mend ~/.ssh/config, or the --ssh-option",
    ),
    (
        r"Connection refused|timed out|No route to host|unreachable",
        "see that the device is on, reachable and runs an ssh server: ssh {host}",
    ),
)
LASTING = 4  # of SSH_STEPS, those that trying again does not mend
SHELL_STEPS = (
    (
        r"not found|No such file|Permission denied",
        "name the device's Python, 3.6 or newer: --python PATH",
    ),
    (r"expected Python 3\.6", "name a newer one on the device: --python PATH"),
)
WORK_STEPS = (
    (
        r"No space left on device|[Dd]isk quota exceeded",
        "free some space on the device (df -h), or name a folder on another disk: --folder",
    ),
    (
        r"Killed signal terminated program|internal compiler error: Killed|out of memory|"
        r"Cannot allocate memory|killed by SIGKILL",
        "memory may have run out: add swap on the device",
    ),
    (
        r"no working CUDA compiler",
        "see that the device answers: ssh {host} nvcc --version (in PATH, or as CUDACXX, of a "
        "shell that ssh starts)",
    ),
)
AGAIN = "run the same command again, what is finished is kept"


class HostError(Exception):
    """What keeps a host from being measured: words of the tool at fault, and the next step."""

    def __init__(self, words: str, step: str) -> None:
        super().__init__(words)
        self.words, self.step = words, step


class DroppedError(Exception):
    """The connection ended, with the words that ssh had for it."""

    def __init__(self, words: str, step: str = "", lasting: bool = False) -> None:
        super().__init__(words)
        self.words, self.step, self.lasting = words, step, lasting


class Order(NamedTuple):
    """What to measure on each host.

    folder, python: on the device, as its shell and user see them.
    name: of the run in this checkout, None for the run's own.
    patience: seconds without a connection after which the runner gives up.
    batch: whether ssh must not ask for anything.
    """

    root: pathlib.Path
    settings: Mapping[str, Any]
    folder: str
    python: str
    cmake_options: Sequence[str]
    ssh_options: Sequence[str]
    name: str | None
    patience: float
    batch: bool


class Outcome(NamedTuple):
    """What became of a host: a summary, whether it is good, and the next step."""

    host: str
    good: bool
    words: str
    step: str


def settings_of(
    root: pathlib.Path,
    device: str,
    run: str | None,
    config_files: Sequence[str],
    entries: Sequence[str],
) -> dict[str, Any]:
    """The settings of a run, as the workflow's target settings.json has them.

    entries: KEY=VALUE, as Snakemake's --config takes them. Raises ValueError for what the
    workflow would refuse.
    """
    given = [f"device={device}", *([] if run is None else [f"run={run}"]), *entries]
    files = ["--configfile", *config_files] if config_files else []
    return configuration.resolve(merged_config([], ["--config", *given, *files], root), root)


def check_names(order: Order, hosts: Sequence[str]) -> None:
    """Raise ValueError for a name that nothing can be imported under, before work starts."""
    device = order.settings["device"]["name"]
    named: dict[str, str] = {}
    for host, name in names(order, hosts).items():
        if name in named:
            raise ValueError(
                f"hosts: expected a name for each, got {name} for {named[name]} and for {host}; "
                "measure one after the other, each with its own --as NAME"
            )
        named[name] = host
        taken = name in (*RESERVED, *configuration.device_names(order.root))
        if taken or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise ValueError(
                "name: expected a letter, then letters, digits, - and _, and neither a device's "
                f"name nor {', '.join(RESERVED)}, got {name!r}; name it with --as NAME"
            )
        if (device, name) == ("cpu", DEFAULT_RUN):
            raise ValueError(
                f"name: expected another than {DEFAULT_RUN}, the run that measures this machine, "
                f"got {name}; name it otherwise: --as NAME"
            )


def names(order: Order, hosts: Sequence[str]) -> dict[str, str]:
    """Name of the run here by host: of several hosts each has its own, NAME-<host>."""
    name = order.name or order.settings["run"]
    if len(hosts) == 1:
        return {hosts[0]: name}
    return {host: f"{name}-{slug(host)}" for host in hosts}


def device_files(root: pathlib.Path) -> list[str]:
    """Files of the checkout that a device needs, relative to `root`.

    The sources of the extension, the script that measures, what it calls, and what those import.
    """
    called = re.findall(r"scripts/\w+\.py", (root / MEASURING).read_text(encoding="utf-8"))
    scripts = sorted({*called, "scripts/bundle.py"})
    compiled = [
        path.relative_to(root).as_posix()
        for path in (root / "csrc").rglob("*")
        if path.is_file() and "tests" not in path.relative_to(root).parts
    ]
    return sorted([*_modules(root, tuple(scripts)), *compiled, *scripts, MEASURING])


@functools.cache
def _modules(root: pathlib.Path, scripts: tuple[str, ...]) -> list[str]:
    """Files of the package that scripts import, and those that the agent needs."""
    # Under Python 3.6 the package imports all that it exports.
    package = AGENT.with_name("__init__.py")
    modules = {package, AGENT, AGENT.parent / "bench" / "lock.py"}.union(
        *(imported_modules(path) for path in (*(root / name for name in scripts), package))
    )
    modules |= {path.with_name("__init__.py") for path in modules}
    return [f"python/{path.relative_to(AGENT.parents[1]).as_posix()}" for path in modules]


def contents(order: Order) -> dict[str, tuple[bytes, int]]:
    """Content and mode of every file for the device, by path there."""
    files = {}
    for name in device_files(order.root):
        path = order.root / name
        files[name] = (path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)
    files[settings_path(order)] = (
        configuration.settings_text(dict(order.settings)).encode("utf-8"),
        0o644,
    )
    files["build/commit.json"] = (json.dumps(commit(order.root)).encode("utf-8"), 0o644)
    return files


def settings_path(order: Order) -> str:
    return f"results/{order.settings['device']['name']}/{order.settings['run']}/settings.json"


def commit(root: pathlib.Path) -> dict[str, Any] | None:
    """Commit of the checkout, which its copy on the device cannot tell; None without git."""
    answers = []
    for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain")):
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        answers.append(done.stdout.strip())
    return {"id": answers[0], "modified": answers[1] != ""}


def request_of(order: Order, files: Mapping[str, tuple[bytes, int]]) -> dict[str, Any]:
    """What to prepare, for the agent. `id` names these files, settings and options."""
    device = order.settings["device"]
    manifest = {
        path: [hashlib.sha256(content).hexdigest(), mode] for path, (content, mode) in files.items()
    }
    # A commit that changes none of the files is no reason to measure again.
    sources = {path: entry for path, entry in manifest.items() if path != "build/commit.json"}
    spec = {
        "device": device["name"],
        "kind": device["kind"],
        "run": order.settings["run"],
        "settings": manifest[settings_path(order)][0],
        "python": order.python,
        "cmake_options": cmake_options(device["kind"], order.cmake_options),
    }
    text = json.dumps([spec, sources], sort_keys=True)
    return {
        "do": "prepare",
        "folder": order.folder,
        "id": hashlib.sha256(text.encode("utf-8")).hexdigest()[:16],
        "spec": spec,
        "files": manifest,
        "settings_path": settings_path(order),
    }


def cmake_options(kind: str, given: Sequence[str]) -> list[str]:
    """Options of the build: those given, and whether for CUDA, unless they say so."""
    if any(option.startswith("-DPACKEDCONV_CUDA=") for option in given):
        return list(given)
    return [f"-DPACKEDCONV_CUDA={'ON' if kind == 'cuda' else 'OFF'}", *given]


def archive(files: Mapping[str, tuple[bytes, int]], paths: Sequence[str]) -> bytes:
    """A .tar.gz of some of the files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for path in paths:
            content, mode = files[path]
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), mode
            packed.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def ssh_command(host: str, order: Order) -> list[str]:
    """The ssh call that starts a session of the agent; the user's options come first and count."""
    options = [
        *order.ssh_options,
        *(["BatchMode=yes"] if order.batch else []),
        "ConnectTimeout=20",
        # A connection that no longer answers ends within a minute.
        "ServerAliveInterval=15",
        "ServerAliveCountMax=4",
        # What the user's configuration may have for sessions at a terminal.
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
    ]
    python = shlex.quote(order.python)
    if order.python.startswith("~/"):
        python = '"$HOME"/' + shlex.quote(order.python[2:])
    remote = f"exec {python} -u -c '{BOOTSTRAP}' session {AGENT.stat().st_size}"
    ssh = shutil.which("ssh")
    if ssh is None:
        raise HostError("ssh: command not found", "install OpenSSH's client on this machine")
    chosen = [part for option in options for part in ("-o", option)]
    return [ssh, "-T", *chosen, "--", host, remote]


def step_for(words: str, steps: Sequence[tuple[str, str]], host: str) -> str | None:
    """The step that follows from what a tool said, None where it is not known."""
    for pattern, step in steps:
        if re.search(pattern, words):
            return step.format(host=host)
    return None


class Session:
    """A conversation with the agent on a device, over one ssh connection.

    Raises DroppedError where there is none, or no longer one.
    """

    def __init__(self, host: str, order: Order, say: Callable[[str], None]) -> None:
        self._host, self._words = host, []
        self._process = subprocess.Popen(
            ssh_command(host, order),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._listener = threading.Thread(target=self._listen, args=(say,), daemon=True)
        self._listener.start()
        self.established = False
        try:
            self._write(AGENT.read_bytes())
            # A shell may greet on its own.
            while "agent" not in self._record(self._line()):
                pass
        except BaseException:
            self.close()
            raise
        self.established = True

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self._end(5)
        if not self._listener.is_alive():
            self._process.stderr.close()

    def _end(self, seconds: float) -> int:
        """Exit status of ssh, which gets some seconds to end by itself."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        # Unless a process that ssh has started, as a proxy, holds the stream open.
        self._listener.join(5)
        return status

    def ask(self, **request: Any) -> None:
        self._write(json.dumps(request).encode("utf-8") + b"\n")

    def give(self, content: bytes) -> None:
        """Send bytes after a line that announces them."""
        self.ask(bytes=len(content))
        self._write(content)

    def answer(self) -> dict[str, Any]:
        """The next record. Raises HostError for a refusal."""
        record = self._record(self._line())
        if record.get("reply") == "refused":
            raise HostError(record["words"], record["step"])
        return record

    def read(self, count: int) -> bytes:
        """Up to `count` bytes, some at least."""
        content = self._process.stdout.read1(count)
        if not content:
            raise self._dropped()
        return content

    def _write(self, content: bytes) -> None:
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except OSError:
            raise self._dropped() from None

    def _line(self) -> bytes:
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._dropped()
        return line

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            return record
        if self.established:
            raise DroppedError(f"not understood: {line[:200]!r}")
        return {}

    def _listen(self, say: Callable[[str], None]) -> None:
        for line in self._process.stderr:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._words.append(text)
                say(text)

    def _dropped(self) -> DroppedError:
        """What ended the connection, once ssh has."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        status = self._end(30)
        words = "\n".join(self._words[-5:])
        if self.established:
            # Of ssh, or of the agent, which has not said why.
            broke_off = status in (0, SSH_STATUS) or status < 0
            return DroppedError(words or "the connection ended", AGAIN, not broke_off)
        if status == SSH_STATUS:
            lasting = step_for(words, SSH_STEPS[:LASTING], self._host) is not None
            step = step_for(words, SSH_STEPS, self._host) or f"see what ssh {self._host} says"
            return DroppedError(words or "ssh ended without a word", step, lasting)
        step = step_for(words, SHELL_STEPS, self._host) or f"see what ssh {self._host} says"
        return DroppedError(words or f"the device's shell ended with status {status}", step, True)


class Runner:
    """Measures on one host."""

    def __init__(self, host: str, name: str, order: Order, say: Callable[[str], None]) -> None:
        self._host, self._name, self._order, self._say = host, name, order, say
        self._files = contents(order)
        self._request = request_of(order, self._files)
        # Of the work that was last seen on the device, and up to where its log was shown.
        self._attempt: str | None = None
        self._offset: int | None = None
        self._reboots = 0
        self._connected = False
        self._fetched = 0  # blocks of a bundle

    def measure(self) -> str:
        """Measure and import; returns what came of it. Raises HostError."""
        return self._persist(self._attend)

    def stop(self) -> str:
        """End the work on the device; returns what came of it. Raises HostError."""
        return self._persist(self._end)

    def _persist(self, work: Callable[[Session], str]) -> str:
        """Do work over connections that may drop, and be refused when there was one before."""
        pause, lost = FIRST_PAUSE, time.monotonic()
        said = ""
        while True:
            before = self._progress()
            try:
                with Session(self._host, self._order, self._words) as session:
                    if self._connected:
                        self._say("connected again")
                    self._connected, said, began = True, "", time.monotonic()
                    try:
                        return work(session)
                    finally:
                        # One that breaks off at once, again and again, is as good as none.
                        held = time.monotonic() - began > QUIET_SECONDS
                        if held or self._progress() != before:
                            pause, lost = FIRST_PAUSE, time.monotonic()
            except DroppedError as dropped:
                if not self._connected or dropped.lasting:
                    raise HostError(dropped.words, dropped.step) from None
                if time.monotonic() - lost > self._order.patience:
                    raise HostError(
                        f"no lasting connection for {self._order.patience / 60:.0f} minutes: "
                        f"{dropped.words}",
                        "the device works on by itself; the same command attaches to it",
                    ) from None
                if dropped.words != said:
                    said = dropped.words
                    self._say(f"no connection ({said.splitlines()[-1]}); trying again")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _progress(self) -> tuple[object, ...]:
        """What a connection that is of use changes."""
        return self._attempt, self._offset, self._fetched

    def _words(self, text: str) -> None:
        """What ssh says: at first as it says it, later once, when it has given up."""
        if not self._connected:
            self._say(text)

    def _attend(self, session: Session) -> str:
        state, follow = self._prepare(session)
        if follow:
            state = self._follow(session)
        if state["status"] != "done":
            raise self._failure(state)
        return self._bring(session, state)

    def _prepare(self, session: Session) -> tuple[dict[str, Any], bool]:
        """See that the work is under way or has ended; its state, and whether to follow it."""
        self._say("comparing files, and looking what the device has")
        history = {"seen": self._attempt, "restart": self._reboots < REBOOTS}
        session.ask(**self._request, **history, **self._permission())
        while True:
            record = session.answer()
            kind = record["reply"]
            if kind == "say":
                self._say(record["text"])
            elif kind == "lacking":
                raise _lacking(record["lacking"])
            elif kind == "need":
                self._say(f"copying {len(record['paths'])} of {len(self._files)} files")
                if record["paths"]:
                    session.give(archive(self._files, record["paths"]))
            elif kind in ("attached", "started", "ended"):
                break
        state = record["state"]
        # Of work that ended while there was no connection, too, which was shown in part.
        follow = kind != "ended" or state["attempt"] == self._attempt
        if kind == "started":
            if self._attempt is not None:
                self._reboots += 1
                self._say("the device was started anew; the work goes on where it stopped")
            self._say(f"started; the log on the device: {record['folder']}/{state['log']}")
            self._offset = state["log_begin"]
        elif state["attempt"] != self._attempt:
            self._offset = None
            if kind == "attached":
                self._say(f"attached to work under way since {state['started']}; its last lines:")
                if not record["same"]:
                    self._say(
                        "note: it was started from other sources or options than asked for; "
                        "its results name their commit"
                    )
            else:
                self._say(f"measured already, in work that was started {state['started']}")
        self._attempt = state["attempt"]
        return state, follow

    def _permission(self) -> dict[str, Any]:
        """Whether new work may start: not where its results have no place here."""
        device = self._order.settings["device"]["name"]
        folder = f"results/{device}/{self._name}"
        taken = os.path.lexists(self._order.root / folder)
        return {"may_start": not taken, "taken": f"{folder} is here already"}

    def _follow(self, session: Session) -> dict[str, Any]:
        """Show what the work prints until it ends; its state then."""
        session.ask(
            do="follow", folder=self._order.folder, attempt=self._attempt, offset=self._offset
        )
        shown = time.monotonic()
        while True:
            record = session.answer()
            if record["reply"] == "log":
                for line in record["text"].splitlines():
                    self._say(line)
                self._offset, shown = record["offset"], time.monotonic()
            elif record["reply"] == "ended":
                return {**record["state"], "tail": record["tail"]}
            elif time.monotonic() - shown > QUIET_SECONDS:
                self._say(f"... still at work ({record['step']})")
                shown = time.monotonic()

    def _failure(self, state: Mapping[str, Any]) -> HostError:
        words = {
            "stopped": "the work was stopped",
            "lost": "the work was killed on the device",
        }.get(state["status"], state.get("why", "the work failed"))
        tail = state.get("tail", "")
        fault = [line for line in tail.splitlines() if re.search(r"\b[Ee]rror\b", line)]
        step = step_for(tail, WORK_STEPS, self._host) or state.get("advice")
        return HostError(
            "\n".join([words, *fault[-1:]]), f"{step}; then {AGAIN}" if step else AGAIN
        )

    def _bring(self, session: Session, state: Mapping[str, Any]) -> str:
        """Fetch the bundle and import it; says where it is."""
        device, run = state["spec"]["device"], state["spec"]["run"]
        folder = self._order.root / "bundles"
        folder.mkdir(exist_ok=True)
        path = folder / f"{slug(self._host)}-{pathlib.PurePosixPath(state['bundle']).name}"
        with _alone(path, self._say):
            if not path.exists():
                self._fetch(session, path, state["attempt"])
            return self._import(path, device, run)

    def _fetch(self, session: Session, path: pathlib.Path, attempt: str) -> None:
        part = path.with_name(path.name + ".part")
        offset = part.stat().st_size if part.exists() else 0
        session.ask(do="fetch", folder=self._order.folder, attempt=attempt, offset=offset)
        announced = session.answer()
        self._say(f"bringing the bundle, {announced['bytes'] / 1e6:.1f} MB")
        with open(part, "r+b" if part.exists() else "w+b") as file:
            file.truncate(announced["offset"])
            file.seek(announced["offset"])
            while file.tell() < announced["bytes"]:
                file.write(session.read(min(2**16, announced["bytes"] - file.tell())))
                file.flush()
                self._fetched += 1
        found = hashlib.sha256(part.read_bytes()).hexdigest()
        if found != announced["sha256"]:
            part.unlink()
            raise DroppedError(f"{part.name}: expected SHA-256 {announced['sha256']}, got {found}")
        os.replace(part, path)

    def _import(self, path: pathlib.Path, device: str, run: str) -> str:
        root = self._order.root
        shown = path.relative_to(root)
        folder = root / "results" / device / self._name
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            origin = load_origin(str(folder)) or {}
            if origin.get("bundle_sha256") == sha256:
                return f"{folder.relative_to(root)} is this bundle already ({shown})"
            import_bundle(str(path), self._name, str(root))
        except ValueError as error:
            raise HostError(
                f"{error}",
                "the bundle is kept; once that is mended: "
                f"scripts/import_results {shown} --as NAME",
            ) from None
        return f"run {run} of {device} is now {folder.relative_to(root)} ({shown})"

    def _end(self, session: Session) -> str:
        session.ask(do="stop", folder=self._order.folder)
        while True:
            record = session.answer()
            if record["reply"] == "say":
                self._say(record["text"])
            elif record["reply"] == "stopped":
                break
        if record["was"] == "running":
            return "stopped; what is measured is kept on the device"
        return "nothing was under way"


def _lacking(lacking: Sequence[Mapping[str, str]]) -> HostError:
    words = [f"{item['what']}: {item['words']}" for item in lacking]
    steps = dict.fromkeys(item["step"] for item in lacking)
    return HostError("the device lacks\n" + "\n".join(words), "\n".join(steps))


@contextlib.contextmanager
def _alone(path: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """One runner at a time fetches and imports a bundle."""
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another runner, which brings this bundle")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def slug(host: str) -> str:
    """A host in names of files and runs: letters, digits and -."""
    return re.sub(r"[^A-Za-z0-9]+", "-", host.rpartition("@")[2]).strip("-")


def run_all(hosts: Sequence[str], order: Order, stop: bool = False) -> list[Outcome]:
    """Measure on all hosts at once, or stop their work; what became of each."""
    outcomes: dict[str, Outcome] = {}
    threads = [
        threading.Thread(target=_run_one, args=(host, name, order, stop, outcomes), daemon=True)
        for host, name in names(order, hosts).items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[host] for host in hosts]


def _run_one(host: str, name: str, order: Order, stop: bool, outcomes: dict[str, Outcome]) -> None:
    try:
        runner = Runner(host, name, order, functools.partial(_print, host))
        words = runner.stop() if stop else runner.measure()
        step = ""
        if not stop:
            device = order.settings["device"]["name"]
            step = f"snakemake --cores 1 all --config device={device} run={name}"
        outcomes[host] = Outcome(host, True, words, step)
    except HostError as error:
        outcomes[host] = Outcome(host, False, error.words, error.step)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = f"free some space on this machine (df -h); then {AGAIN}" if full else AGAIN
        outcomes[host] = Outcome(host, False, str(error), step)
    except Exception as error:  # a fault of one host must not cost the others
        outcomes[host] = Outcome(host, False, f"{type(error).__name__}: {error}", AGAIN)


_PRINTING = threading.Lock()


def _print(host: str, text: str) -> None:
    with _PRINTING:
        print(f"{host}: {text}", flush=True)


def summary(outcomes: Sequence[Outcome]) -> str:
    """What became of each host, and its next step."""
    lines = []
    for outcome in outcomes:
        first, *rest = outcome.words.splitlines() or [""]
        lines.append(f"{outcome.host}: {'' if outcome.good else 'FAILED: '}{first}")
        lines += [f"    {line}" for line in rest]
        label = "render it with" if outcome.good else "next"
        lines += [f"    {label}: {step}" for step in outcome.step.splitlines()]
    return "\n".join(lines)
