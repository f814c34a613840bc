"""scripts/measure_remote against a real sshd on loopback; this machine's CPU is the device."""

import contextlib
import getpass
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from checkout import Checkout

from packedconv.run_folder import check_results

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
MISSING = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
MISSING += [] if SSHD else ["sshd"]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian: openssh-server, openssh-client)"
)
# Building and measuring, on a machine that is busy with other things as well.
PATIENCE = 3600
# Of a layer, in each of two rounds.
EXECUTIONS = 2000

CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, what, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class Server:
    """An sshd with keys of its own, and a folder that stands for the device."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.port = folder, free_port()
        for name in ("host_key", "user_key", "other_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
                check=True,
            )
        (folder / "sshd_config").write_text(CONFIG.format(port=self.port, folder=folder))
        key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}")
        if os.geteuid() == 0:
            # Where sshd drops its privileges; an ordinary user's sshd has none.
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        self.log = open(folder / "sshd.log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=self.log
        )
        wait_for(self._answers, "sshd does not answer", 60)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
            return True
        return False

    @property
    def device(self) -> pathlib.Path:
        """Where the runner works on the device."""
        return self.folder / "device"

    def state(self) -> dict:
        return json.loads((self.device / ".job/state.json").read_text())

    def drop(self) -> None:
        """Kill what serves each connection, as a network that goes down ends them."""
        served = sessions_of(self.process.pid)
        assert served
        for pid in served:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


def sessions_of(server: int) -> list[int]:
    """Processes of sshd below the one that listens."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text().rpartition(")")
                if "(sshd" in name:
                    parents[int(entry.name)] = int(rest.split()[1])
    found = [server]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


class Run:
    """A call of the runner in the background, and what it printed."""

    def __init__(self, command: list[str], environment: dict) -> None:
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, times: int = 1) -> None:
        def heard():
            assert self.process.poll() is None or self.text.count(words) >= times, self.text
            return self.text.count(words) >= times

        wait_for(heard, words)

    def end(self) -> int:
        status = self.process.wait(PATIENCE)
        self._reader.join(60)
        self.process.stdout.close()
        return status


class Fleet:
    """A checkout, and the calls of its runner."""

    def __init__(self, checkout: Checkout, server: Server) -> None:
        self.checkout, self.server = checkout, server

    def command(self, run: str, name: str, *hosts: str, **ssh) -> list[str]:
        options = {
            "Port": self.server.port,
            "User": getpass.getuser(),
            "IdentityFile": self.server.folder / "user_key",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": self.server.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            **ssh,
        }
        return [
            *(sys.executable, str(self.checkout.folder / "scripts/measure_remote")),
            *(hosts or ("127.0.0.1",)),
            *("--device", "cpu", "--run", run, "--as", name),
            *("--configfile", str(self.checkout.config)),
            *("--folder", str(self.server.device), "--python", sys.executable),
            *(f"--ssh-option={key}={value}" for key, value in options.items()),
        ]

    def start(self, run: str, name: str, *hosts: str, extra: tuple = (), **ssh) -> Run:
        command = [*self.command(run, name, *hosts, **ssh), *extra]
        return Run(command, self.checkout.environment())

    def results(self, name: str) -> pathlib.Path:
        return self.checkout.folder / "results/cpu" / name

    def require_whole(self, name: str) -> None:
        """The results are those of a run that nothing has interrupted."""
        folder = self.results(name)
        check_results(str(folder))
        lines = (folder / "samples.csv").read_text().splitlines()
        assert len(lines) == 1 + 2 * 2 * 2 * 2 * EXECUTIONS
        assert (folder / "origin.json").exists()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sshd")
    server = Server(folder)
    fleet = Fleet(Checkout(folder / "checkout", executions=EXECUTIONS), server)
    try:
        yield fleet
    finally:
        if (server.device / ".job").exists():
            fleet.start("first", "none", extra=("--stop",)).end()
        server.close()


def test_connections_drop_while_it_builds_and_measures(fleet):
    """Nothing starts anew, and the results come as if nothing had happened."""
    run = fleet.start("first", "first")
    run.wait_for("Building CXX object")
    assert fleet.server.state()["step"] == "build"
    attempt = fleet.server.state()["attempt"]
    fleet.server.drop()
    run.wait_for("connected again")
    run.wait_for("timing oc8")
    fleet.server.drop()
    run.wait_for("connected again", 2)
    assert run.end() == 0, run.text
    assert fleet.server.state()["attempt"] == attempt
    assert run.text.count("started; the log") == 1
    assert run.text.count("timing oc8") == 1
    assert run.text.count("timing oc12") == 1
    assert "run first of cpu is now results/cpu/first" in run.text
    fleet.require_whole("first")


def test_the_runner_is_killed_and_run_again(fleet):
    run = fleet.start("killed", "killed")
    run.wait_for("timing oc12")
    attempt = fleet.server.state()["attempt"]
    run.process.send_signal(signal.SIGKILL)
    run.end()
    again = fleet.start("killed", "killed")
    assert again.end() == 0, again.text
    assert fleet.server.state()["attempt"] == attempt
    assert "started; the log" not in again.text
    fleet.require_whole("killed")

    third = fleet.start("killed", "killed")
    assert third.end() == 0, third.text
    assert "is this bundle already" in third.text


def test_the_work_is_killed_and_run_again(fleet):
    """As by a lack of memory: the layer that was measured is kept, the rest follows."""
    run = fleet.start("lost", "lost")
    run.wait_for("timing oc12")
    kept = fleet.server.device / "results/cpu/lost/bench/oc8.csv"
    before = kept.stat().st_mtime_ns
    os.killpg(fleet.server.state()["pid"], signal.SIGKILL)
    assert run.end() == 1
    assert "the work was killed on the device" in run.text
    again = fleet.start("lost", "lost")
    assert again.end() == 0, again.text
    assert kept.stat().st_mtime_ns == before
    fleet.require_whole("lost")


def test_two_runners_at_once(fleet):
    runs = [fleet.start("both", "both") for _ in range(2)]
    assert [run.end() for run in runs] == [0, 0], "\n\n".join(run.text for run in runs)
    assert sum(run.text.count("started; the log") for run in runs) == 1
    fleet.require_whole("both")


def test_two_folders_on_one_device_take_turns(fleet):
    """The second waits until the first has measured, and says so."""
    other = fleet.server.folder / "second"
    first = fleet.start("turns", "turns")
    first.wait_for("started; the log")
    second = fleet.start("turns", "turns2", extra=("--folder", str(other)))
    second.wait_for("which is using the device")
    assert first.end() == 0, first.text
    stop = fleet.start("turns", "turns2", extra=("--folder", str(other), "--stop"))
    assert stop.end() == 0, stop.text
    assert second.end() == 1
    assert "the work was stopped" in second.text


@pytest.mark.parametrize(
    ("ssh", "words", "step"),
    [
        ({"Port": None}, "Connection refused", "runs an ssh server: ssh 127.0.0.1"),
        ({"IdentityFile": "other_key"}, "Permission denied (publickey", "ssh-copy-id 127.0.0.1"),
        ({"UserKnownHostsFile": "empty"}, "Host key verification failed", "accept it: ssh 127"),
    ],
    ids=["closed port", "wrong key", "unknown host key"],
)
def test_a_host_that_refuses(fleet, ssh, words, step):
    folder = fleet.server.folder
    given = {key: free_port() if key == "Port" else folder / value for key, value in ssh.items()}
    (folder / "empty").touch()
    run = fleet.start("refused", "refused", **given)
    assert run.end() == 1, run.text
    assert words in run.text
    assert step in run.text
    assert "Traceback" not in run.text
    assert not fleet.results("refused").exists()


def test_one_host_refuses_and_the_rest_goes_on(fleet):
    # Its key is known under the other name only.
    run = fleet.start("rest", "rest", "localhost", "127.0.0.1")
    assert run.end() == 1, run.text
    assert "localhost: FAILED: " in run.text
    assert "127.0.0.1: run rest of cpu is now results/cpu/rest-127-0-0-1" in run.text
    fleet.require_whole("rest-127-0-0-1")


def test_what_was_brought_renders_here(fleet):
    """From the results of the first test."""
    target = "figures/first/cpu/fig5.pdf"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "snakemake", "--cores", "1", target),
            *("--config", "device=cpu", "run=first"),
        ],
        cwd=fleet.checkout.folder,
        env=fleet.checkout.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "Timing" not in done.stdout
    assert (fleet.checkout.folder / target).stat().st_size > 0
