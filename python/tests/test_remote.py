"""The runner for other machines, against an ssh that runs the device's side on this machine."""

import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from packedconv import remote, remote_agent
from packedconv.bench import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Stands for ssh: each host is a folder of HOSTS, its home. What `refuses` says is ssh's own words.
FAKE_SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
home=$HOSTS/$2
if [[ -e $home/refuses ]]; then cat "$home/refuses" >&2; exit 255; fi
cd "$home"
echo "Welcome to $2"
echo $$ >>"$home/sessions"
export HOME=$home PATH=$home/bin:$PATH PYTHONPATH=$home/site
if [[ -e $home/breaks ]]; then sh -c "$3" | head -n 1; exit 255; fi
exec sh -c "$3"
"""
FAKE_CMAKE = """#!/bin/bash
if [[ $1 == --version ]]; then echo "cmake version ${CMAKE_VERSION:-3.28.4}"; exit; fi
echo "cmake $*"
[[ $1 != -S ]] || mkdir -p build/extension
"""
# Stands for measure_here.sh: counts, and waits while there is a file `hold`.
FAKE_MEASURE = """#!/bin/bash
echo "begin" >>"$HOME/measured"
for number in $(seq 20); do
    echo "line $number"
    while [[ -e $HOME/hold && $number == 10 ]]; do sleep 0.05; done
done
if [[ -e $HOME/fails ]]; then cat "$HOME/fails"; exit 3; fi
echo measured >"$1/samples.csv"
"""
FAKE_BUNDLE = """
import sys
with open(sys.argv[4], "wb") as file:
    file.write(b"bundle" * 40000)
"""
BUNDLE = b"bundle" * 40000


def python_of_device():
    """Python 3.6 where it is at hand, which is the oldest that a device has."""
    for candidate in ("python3.6", os.path.expanduser("~/.pyenv/versions/3.6.15/bin/python3.6")):
        path = shutil.which(candidate)
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return sys.executable


PYTHON = python_of_device()


class Fleet:
    """Hosts, a checkout to measure from, and what was said."""

    def __init__(self, folder: pathlib.Path, monkeypatch) -> None:
        self.hosts, self.root = folder / "hosts", folder / "checkout"
        tools = folder / "tools"
        tools.mkdir()
        write(tools / "ssh", FAKE_SSH, 0o755)
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("HOSTS", str(self.hosts))
        monkeypatch.setattr(remote, "FIRST_PAUSE", 0.05)
        for name in ("config", "python/packedconv/bench", "csrc/cpu", "csrc/tests"):
            (self.root / name).mkdir(parents=True)
        shutil.copytree(ROOT / "config", self.root / "config", dirs_exist_ok=True)
        for name in remote.device_files(ROOT):
            if name.startswith("python/"):
                shutil.copy(ROOT / name, self.root / name)
        # A lock of this test's own.
        lock = self.root / "python/packedconv/bench/lock.py"
        lock.write_text(lock.read_text().replace('FOLDER = "/tmp"', f'FOLDER = "{folder}"'))
        write(self.root / "scripts/measure_here.sh", FAKE_MEASURE, 0o755)
        write(self.root / "scripts/bundle.py", FAKE_BUNDLE)
        write(self.root / "csrc/cpu/kernel.cpp", "// kernel")
        write(self.root / "csrc/tests/test.cpp", "// test")
        self.said, self.imported = [], []
        monkeypatch.setattr(remote, "import_bundle", self._import)
        monkeypatch.setattr(remote, "_print", lambda host, text: self.said.append((host, text)))

    def _import(self, path, name, root):
        folder = pathlib.Path(root) / "results" / "cpu" / name
        folder.mkdir(parents=True)
        content = pathlib.Path(path).read_bytes()
        assert content == BUNDLE
        origin = {"bundle_sha256": hashlib.sha256(content).hexdigest()}
        write(folder / "origin.json", json.dumps({**origin, "device": "cpu", "run": "tiny"}))
        self.imported.append((path, name))

    def host(self, name: str) -> pathlib.Path:
        home = self.hosts / name
        write(home / "bin/cmake", FAKE_CMAKE, 0o755)
        for module in ("numpy", "torch", "pybind11"):
            write(home / f"site/{module}.py", "get_cmake_dir = lambda: 'pybind11'\n")
        return home

    def order(self, **changes) -> remote.Order:
        settings = remote.settings_of(self.root, "cpu", "tiny", [], ["seed=5"])
        order = remote.Order(
            root=self.root,
            settings=settings,
            folder="work",
            python=PYTHON,
            cmake_options=[],
            ssh_options=[],
            name=None,
            patience=20.0,
            batch=True,
        )
        return order._replace(**changes)

    def measure(self, *hosts: str, stop: bool = False, **changes) -> list[remote.Outcome]:
        return remote.run_all(hosts, self.order(**changes), stop)

    def start(self, host: str, **changes) -> threading.Thread:
        """Measure in the background, and return when the device is at work."""
        thread = threading.Thread(target=self.measure, args=(host,), kwargs=changes)
        thread.start()
        wait_for(lambda: (self.hosts / host / "measured").exists() and self.lines(host))
        return thread

    def lines(self, host: str) -> list[str]:
        """What of the measurement was shown."""
        return [text for name, text in self.said if name == host and text.startswith("line ")]

    def heard(self, words: str) -> bool:
        return any(words in text for _, text in self.said)


ALL_LINES = [f"line {number}" for number in range(1, 21)]


def write(path: pathlib.Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def wait_for(condition, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(home: pathlib.Path) -> dict:
    return json.loads((home / "work/.job/state.json").read_text())


def begun(home: pathlib.Path) -> int:
    """How often measuring began."""
    return len((home / "measured").read_text().splitlines())


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    fleet = Fleet(tmp_path, monkeypatch)
    yield fleet
    for home in fleet.hosts.iterdir() if fleet.hosts.exists() else ():
        if (home / "work/.job").exists():
            (home / "hold").unlink(missing_ok=True)
            (home / "refuses").unlink(missing_ok=True)
            (home / "breaks").unlink(missing_ok=True)
            fleet.measure(home.name, stop=True)


def test_only_what_a_device_needs_is_copied():
    found = remote.device_files(ROOT)
    spec = importlib.util.spec_from_file_location("check", ROOT / ".ci/check_device_side.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    python = {name for name in found if name.endswith(".py")}
    assert python <= set(check.device_side_files(str(ROOT)))
    assert {"scripts/bench.py", "scripts/stamp.py", "scripts/collect.py", "scripts/bundle.py"} <= (
        python
    )
    assert "scripts/measure_here.sh" in found
    assert "csrc/CMakeLists.txt" in found
    assert not [name for name in found if "tests" in name or "plots" in name or ".so" in name]
    assert all((ROOT / name).is_file() for name in found)


def test_what_is_asked_for_has_a_name_of_its_own(fleet):
    def identity(**changes):
        order = fleet.order(**changes)
        return remote.request_of(order, remote.contents(order))["id"]

    first = identity()
    assert identity() == first
    assert identity(cmake_options=["-DA=B"]) != first
    assert identity(name="other") == first
    write(fleet.root / "csrc/cpu/kernel.cpp", "// another kernel")
    assert identity() != first


def test_the_commit_goes_along(fleet, tmp_path, monkeypatch):
    """The copy on a device is no checkout of git, and measures as one."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    here = remote.commit(ROOT)
    assert (here["id"] if here else "") == done.stdout.strip()
    assert json.loads(remote.contents(fleet.order())["build/commit.json"][0]) is None

    write(tmp_path / "copy/csrc/CMakeLists.txt", "")
    module = tmp_path / "copy/python/packedconv/bench/machine.py"
    monkeypatch.setattr(machine, "__file__", str(module))
    for stated in ({"id": "abc", "modified": False}, None):
        write(tmp_path / "copy/build/commit.json", json.dumps(stated))
        assert machine._commit() == stated


def test_settings_are_those_of_the_workflow(tmp_path):
    few = tmp_path / "few.yaml"
    few.write_text("run: few\nsparsities: [0.9]\n")
    settings = remote.settings_of(ROOT, "tegra-x1", None, [str(few)], ["seed=3"])
    assert (settings["run"], settings["seed"], settings["sparsities"]) == ("few", 3, [0.9])
    assert settings["device"]["name"] == "tegra-x1"
    assert remote.settings_of(ROOT, "tegra-x1", None, [], [])["run"] == "paper"
    with pytest.raises(ValueError, match="device: expected one of"):
        remote.settings_of(ROOT, "nano", None, [], [])


@pytest.mark.parametrize("name", ["h200", "compare", "a/b", "", "paper"])
def test_a_name_that_cannot_be_imported_is_refused_before_work_starts(fleet, name):
    order = fleet.order(name=name)
    if name == "":
        order = order._replace(settings={**order.settings, "run": "../up"})
    with pytest.raises(ValueError, match="--as NAME"):
        remote.check_names(order, ["nano"])
    remote.check_names(fleet.order(name="theirs"), ["nano"])


def test_several_hosts_have_several_names(fleet):
    assert remote.names(fleet.order(), ["nano"]) == {"nano": "tiny"}
    hosts = ["me@nano.lab", "10.0.0.2"]
    assert remote.names(fleet.order(name="lab"), hosts) == {
        "me@nano.lab": "lab-nano-lab",
        "10.0.0.2": "lab-10-0-0-2",
    }


def test_hosts_of_one_name_are_refused_before_work_starts(fleet):
    with pytest.raises(ValueError, match="got lab-nano for alice@nano and for bob@nano"):
        remote.check_names(fleet.order(name="lab"), ["alice@nano", "bob@nano"])


def test_the_call_of_ssh(fleet):
    order = fleet.order(ssh_options=["Port=2222"], batch=False, python="~/a venv/bin/python")
    command = remote.ssh_command("me@nano", order)
    # Of an option given twice ssh takes the first.
    assert command[1:4] == ["-T", "-o", "Port=2222"]
    assert not any("BatchMode" in part for part in command)
    assert command[-3:-1] == ["--", "me@nano"]
    assert command[-1].startswith("""exec "$HOME"/'a venv/bin/python' -u -c '""")
    assert "BatchMode=yes" in remote.ssh_command("nano", order._replace(batch=True))
    # The device's shell sees it between single quotes, and csh expands ! within them.
    assert "'" not in remote.BOOTSTRAP
    assert "!" not in remote.BOOTSTRAP


def test_the_whole_path_and_again(fleet):
    home = fleet.host("nano")
    (outcome,) = fleet.measure("nano")
    assert outcome.good, outcome
    assert outcome.step == "snakemake --cores 1 all --config device=cpu run=tiny"
    assert fleet.lines("nano") == ALL_LINES
    assert [name for _, name in fleet.imported] == ["tiny"]
    settings = json.loads((home / "work/results/cpu/tiny/settings.json").read_text())
    assert (settings["run"], settings["seed"]) == ("tiny", 5)
    assert os.access(home / "work/scripts/measure_here.sh", os.X_OK)
    assert not (home / "work/csrc/tests").exists()
    assert fleet.heard("-DPACKEDCONV_CUDA=OFF")
    assert state_of(home)["status"] == "done"

    (outcome,) = fleet.measure("nano")
    assert outcome.good
    assert "is this bundle already" in outcome.words
    assert begun(home) == 1
    assert len(fleet.imported) == 1

    # Under another name it comes without measuring again.
    (outcome,) = fleet.measure("nano", name="theirs")
    assert outcome.good
    assert begun(home) == 1


def test_changed_files_only(fleet):
    home = fleet.host("nano")
    assert fleet.measure("nano")[0].good
    kept = home / "work/python/packedconv/layer.py"
    stamp = kept.stat()
    stale = home / "work/csrc/cpu/kernel.cpp"
    (fleet.root / "csrc/cpu/kernel.cpp").unlink()
    write(fleet.root / "csrc/cpu/new.cpp", "// new")
    fleet.said.clear()
    (outcome,) = fleet.measure("nano", name="second")
    assert outcome.good, outcome
    assert fleet.heard("copying 1 of ")
    assert not stale.exists()
    assert (home / "work/csrc/cpu/new.cpp").read_text() == "// new"
    assert kept.stat().st_ino == stamp.st_ino
    assert begun(home) == 2


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("ssh: connect to host nano port 22: Connection refused", "runs an ssh server: ssh nano"),
        ("Host key verification failed.", "accept it: ssh nano"),
        ("me@nano: Permission denied (publickey).", "ssh-copy-id nano"),
        ("ssh: Could not resolve hostname nano: Name or service not known", "name is right"),
    ],
)
def test_a_host_that_refuses_and_the_rest_goes_on(fleet, words, step):
    write(fleet.host("nano") / "refuses", words + "\n")
    fleet.host("other")
    refused, good = fleet.measure("nano", "other")
    assert not refused.good
    assert refused.words == words
    assert step in refused.step
    assert good.good, good
    assert [name for _, name in fleet.imported] == ["tiny-other"]
    text = remote.summary([refused, good])
    assert f"nano: FAILED: {words}\n    next: " in text
    assert "other: run tiny of cpu is now results/cpu/tiny-other" in text


def test_no_python_there(fleet):
    fleet.host("nano")
    (outcome,) = fleet.measure("nano", python="/opt/none/bin/python3")
    assert not outcome.good
    assert "/opt/none/bin/python3" in outcome.words
    assert "not found" in outcome.words
    assert "--python PATH" in outcome.step


def test_a_python_that_is_too_old(fleet):
    home = fleet.host("nano")
    write(home / "old", f"#!/bin/sh\nshift 2\nexec {sys.executable} -c "
          "\"import sys; sys.version_info = (2, 7); sys.version = '2.7.18 x'; exec(sys.argv[1])\" "
          '"$@"\n', 0o755)  # fmt: skip
    (outcome,) = fleet.measure("nano", python=str(home / "old"))
    assert "expected Python 3.6 or newer, found 2.7.18" in outcome.words
    assert "--python PATH" in outcome.step


def test_all_that_the_device_lacks_is_said_at_once(fleet, monkeypatch):
    home = fleet.host("nano")
    write(home / "site/torch.py", "raise ImportError(\"No module named 'torch'\")\n")
    write(home / "site/numpy.py", "import os\nos.kill(os.getpid(), 4)\n")
    monkeypatch.setenv("CMAKE_VERSION", "3.10.2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    (outcome,) = fleet.measure("nano")
    assert not outcome.good
    for words in (
        "torch: ImportError: No module named 'torch'",
        "killed by SIGILL",
        "CMake 3.20 or newer: cmake version 3.10.2",
        "a C++ compiler: no-such-compiler: command not found",
    ):
        assert words in outcome.words
    assert "envs/jetson-nano.md" in outcome.step
    assert sorted(path.name for path in (home / "work").iterdir()) == [".job"]


@pytest.mark.parametrize(
    ("kind", "given", "options"),
    [
        ("cpu", ["-DA=B"], ["-DPACKEDCONV_CUDA=OFF", "-DA=B"]),
        ("cuda", [], ["-DPACKEDCONV_CUDA=ON"]),
        ("cuda", ["-DPACKEDCONV_CUDA=OFF"], ["-DPACKEDCONV_CUDA=OFF"]),
    ],
)
def test_a_gpu_is_built_for_with_cuda(kind, given, options):
    assert remote.cmake_options(kind, given) == options


def test_a_full_disk_is_said_before_anything_is_copied(fleet, monkeypatch):
    home = fleet.host("nano")
    monkeypatch.setattr(remote_agent, "NEW_BYTES", 2**60)
    changed = fleet.root / "agent.py"
    text = remote.AGENT.read_text().replace("NEW_BYTES = 500 * 2**20", "NEW_BYTES = 2**60")
    changed.write_text(text)
    monkeypatch.setattr(
        remote, "AGENT", pathlib.Path(shutil.copy(changed, fleet.root / "remote_agent.py"))
    )
    files = {"csrc/a": (b"", 0o644)}
    monkeypatch.setattr(remote, "contents", lambda order: {**files, **settings_file(order)})
    (outcome,) = fleet.measure("nano")
    assert "MB free in" in outcome.words
    assert "df -h" in outcome.step
    assert not (home / "work/csrc").exists()


def settings_file(order):
    return {remote.settings_path(order): (b"{}", 0o644)}


def test_a_connection_that_drops_loses_no_line(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    thread = fleet.start("nano")
    wait_for(lambda: len(fleet.lines("nano")) == 10)
    session = int((home / "sessions").read_text().splitlines()[-1])
    write(home / "refuses", "ssh: connect to host nano port 22: No route to host\n")
    os.kill(session, signal.SIGKILL)
    wait_for(lambda: fleet.heard("No route to host"))
    # Meanwhile the device works on.
    (home / "hold").unlink()
    wait_for(lambda: state_of(home).get("status") == "done")
    (home / "refuses").unlink()
    thread.join()
    assert fleet.lines("nano") == ALL_LINES
    assert fleet.heard("connected again")
    assert [name for _, name in fleet.imported] == ["tiny"]
    assert begun(home) == 1


def test_patience_ends_and_the_work_goes_on(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano", patience=0.3)))
    thread.start()
    wait_for(lambda: fleet.lines("nano"))
    write(home / "refuses", "ssh: connect to host nano port 22: Connection timed out\n")
    os.kill(int((home / "sessions").read_text().splitlines()[-1]), signal.SIGKILL)
    thread.join()
    assert not outcomes[0].good
    assert "Connection timed out" in outcomes[0].words
    assert "the same command attaches" in outcomes[0].step
    (home / "refuses").unlink()
    (home / "hold").unlink()
    assert fleet.measure("nano")[0].good
    assert begun(home) == 1


def test_connections_that_break_off_at_once_are_as_good_as_none(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano", patience=2.0)))
    thread.start()
    wait_for(lambda: len(fleet.lines("nano")) == 10)
    (home / "breaks").touch()
    os.kill(int((home / "sessions").read_text().splitlines()[-1]), signal.SIGKILL)
    wait_for(lambda: not thread.is_alive(), seconds=120)
    assert not outcomes[0].good
    assert "no lasting connection for" in outcomes[0].words
    assert fleet.heard("connected again")


def test_two_runners_at_once_start_one_work(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    outcomes = []
    threads = [
        threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: fleet.heard("attached to work under way"))
    (home / "hold").unlink()
    for thread in threads:
        thread.join()
    assert [outcome.good for outcome in outcomes] == [True, True], outcomes
    assert begun(home) == 1
    assert len(fleet.imported) == 1


def test_work_of_another_run_or_other_settings_is_left_alone(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    thread = fleet.start("nano")
    for settings, words in (
        (remote.settings_of(fleet.root, "cpu", "other", [], ["seed=5"]), "with run tiny of cpu"),
        (remote.settings_of(fleet.root, "cpu", "tiny", [], ["seed=6"]), "with other settings"),
    ):
        (outcome,) = fleet.measure("nano", settings=settings)
        assert not outcome.good
        assert outcome.words.startswith("busy since ")
        assert words in outcome.words
        assert "--stop" in outcome.step
    (home / "hold").unlink()
    thread.join()
    assert [name for _, name in fleet.imported] == ["tiny"]

    # Nor is what was measured with other settings overwritten later.
    before = (home / "work/results/cpu/tiny/settings.json").read_text()
    other = remote.settings_of(fleet.root, "cpu", "tiny", [], ["seed=6"])
    (outcome,) = fleet.measure("nano", settings=other, name="third")
    assert "was measured with other settings" in outcome.words
    assert "--run NAME" in outcome.step
    assert (home / "work/results/cpu/tiny/settings.json").read_text() == before


def test_a_folder_with_other_files_is_refused(fleet):
    home = fleet.host("nano")
    write(home / "work/csrc/mine.cpp", "// mine")
    (outcome,) = fleet.measure("nano")
    assert "would be overwritten" in outcome.words
    assert "--folder" in outcome.step
    assert [path.name for path in (home / "work").iterdir()] == ["csrc"]
    shutil.rmtree(home / "work")


def test_a_name_that_is_taken_is_refused_before_work_starts(fleet):
    home = fleet.host("nano")
    (fleet.root / "results/cpu/tiny").mkdir(parents=True)
    (outcome,) = fleet.measure("nano")
    assert outcome.words == "results/cpu/tiny is here already"
    assert "--as NAME" in outcome.step
    assert not (home / "measured").exists()


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("OSError: error: [Errno 28] No space left on device", "df -h"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "add swap"),
        ("error: device: expected tegra-x1", "run the same command again"),
    ],
)
def test_a_step_that_fails_is_told_in_its_own_words(fleet, said, step):
    home = fleet.host("nano")
    write(home / "fails", said + "\n")
    (outcome,) = fleet.measure("nano")
    assert not outcome.good
    assert outcome.words == f"measure: exit status 3\n{said}"
    assert step in outcome.step
    (home / "fails").unlink()
    (outcome,) = fleet.measure("nano")
    assert outcome.good, outcome
    assert begun(home) == 2


def test_work_that_is_killed_leaves_nothing_behind_and_goes_on_when_asked(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano")))
    thread.start()
    wait_for(lambda: len(fleet.lines("nano")) == 10)
    os.kill(state_of(home)["pid"], signal.SIGKILL)
    thread.join()
    assert "the work was killed on the device" in outcomes[0].words
    # Its script is still there, and would disturb what comes next.
    steps = str(home / "work/.job/steps.lock")
    assert remote_agent._holding(steps)
    (home / "hold").unlink()
    (home / "hold").touch()
    thread = threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano")))
    thread.start()
    wait_for(lambda: begun(home) == 2)
    assert fleet.heard("left of earlier work")
    (home / "hold").unlink()
    thread.join()
    assert outcomes[1].good, outcomes


def test_after_a_reboot_the_work_goes_on_by_itself(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano")))
    thread.start()
    wait_for(lambda: len(fleet.lines("nano")) == 10)
    # As a power cut leaves it: nothing runs, and the kernel is another.
    session = int((home / "sessions").read_text().splitlines()[-1])
    write(home / "refuses", "ssh: connect to host nano port 22: No route to host\n")
    os.kill(session, signal.SIGKILL)
    state = state_of(home)
    os.killpg(state["pid"], signal.SIGKILL)
    write(home / "work/.job/state.json", json.dumps({**state, "boot": "another"}))
    (home / "hold").unlink()
    (home / "refuses").unlink()
    thread.join()
    assert outcomes[0].good, outcomes
    assert fleet.heard("the device was started anew")
    assert begun(home) == 2
    assert fleet.lines("nano") == [*ALL_LINES[:10], *ALL_LINES]


def test_stop(fleet):
    home = fleet.host("nano")
    (home / "hold").touch()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(fleet.measure("nano")))
    thread.start()
    wait_for(lambda: fleet.lines("nano"))
    (outcome,) = fleet.measure("nano", stop=True)
    assert outcome.good
    assert outcome.words == "stopped; what is measured is kept on the device"
    thread.join()
    assert "the work was stopped" in outcomes[0].words
    assert remote_agent._holding(str(home / "work/.job/steps.lock")) == []
    (outcome,) = fleet.measure("nano", stop=True)
    assert outcome.words == "nothing was under way"


@pytest.mark.parametrize("part", [BUNDLE[:1000], b"x" * 1000, BUNDLE + b"more"])
def test_a_bundle_that_came_in_part_is_completed(fleet, part):
    home = fleet.host("nano")
    assert fleet.measure("nano")[0].good
    (bundle,) = (fleet.root / "bundles").glob("nano-*.tar.gz")
    bundle.unlink()
    shutil.rmtree(fleet.root / "results")
    bundle.with_name(bundle.name + ".part").write_bytes(part)
    (outcome,) = fleet.measure("nano")
    assert outcome.good, outcome
    assert bundle.read_bytes() == BUNDLE
    assert begun(home) == 1


def test_a_silent_runner_does_not_keep_the_lock(fleet, monkeypatch):
    """A connection that died without a word, while files were to come."""
    home = fleet.host("nano")
    agent = fleet.root / "python/packedconv/remote_agent.py"
    agent.write_text(agent.read_text().replace("SILENCE_SECONDS = 120.0", "SILENCE_SECONDS = 1.0"))
    order = fleet.order()
    request = remote.request_of(order, remote.contents(order))
    monkeypatch.setattr(remote, "AGENT", agent)
    with remote.Session("nano", order, lambda text: None) as session:
        session.ask(**request, seen=None, restart=True, may_start=True, taken="")
        while session.answer()["reply"] != "need":
            pass
        with pytest.raises(remote.DroppedError):
            session.answer()
    assert not (home / "work/scripts").exists()


def test_a_slow_upload_is_not_silence(fleet, monkeypatch):
    """Longer as a whole than a runner may be silent."""
    fleet.host("nano")
    agent = fleet.root / "python/packedconv/remote_agent.py"
    agent.write_text(agent.read_text().replace("SILENCE_SECONDS = 120.0", "SILENCE_SECONDS = 2.0"))
    remote.device_files(fleet.root)  # by the package's own, which is kept
    monkeypatch.setattr(remote, "AGENT", agent)
    write = remote.Session._write

    def slowly(self, content):
        for begin in range(0, len(content), -(-len(content) // 10)):
            time.sleep(0.3 if len(content) > 10_000 and self.established else 0)
            write(self, content[begin : begin + -(-len(content) // 10)])

    monkeypatch.setattr(remote.Session, "_write", slowly)
    (outcome,) = fleet.measure("nano")
    assert outcome.good, outcome


@pytest.mark.parametrize("asked", ["follow", "fetch"])
def test_work_that_another_runner_started_is_not_taken_for_ones_own(fleet, asked):
    home = fleet.host("nano")
    assert fleet.measure("nano")[0].good
    with remote.Session("nano", fleet.order(), lambda text: None) as session:
        session.ask(do=asked, folder="work", attempt=state_of(home)["attempt"], offset=0)
        assert session.answer()["reply"] in ("log", "bundle")
    with remote.Session("nano", fleet.order(), lambda text: None) as session:
        session.ask(do=asked, folder="work", attempt="of before", offset=0)
        with pytest.raises(remote.HostError, match="other work was started meanwhile, run tiny"):
            session.answer()


def test_a_fault_of_one_host_does_not_cost_the_others(fleet, monkeypatch):
    fleet.host("nano")
    fleet.host("other")
    measure = remote.Runner.measure

    def faulty(self):
        if self._host == "nano":
            raise RuntimeError("unforeseen")
        return measure(self)

    monkeypatch.setattr(remote.Runner, "measure", faulty)
    broken, good = fleet.measure("nano", "other")
    assert (broken.good, good.good) == (False, True)
    assert "unforeseen" in broken.words


def script(*arguments, **changes):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **changes}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/measure_remote"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
    )


def test_the_command_sums_up_and_fails_where_a_host_does(fleet):
    write(fleet.host("nano") / "refuses", "Host key verification failed.\n")
    write(fleet.host("other") / "refuses", "me@other: Permission denied (publickey).\n")
    done = script("nano", "other", "--device", "tegra-x1", "--as", "lab")
    assert done.returncode == 1
    assert "nano: FAILED: Host key verification failed." in done.stdout
    assert "other: FAILED: me@other: Permission denied (publickey)." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nano", "--device", "nano"], "device: expected one of"),
        (["nano", "--device", "tegra-x1", "--config", "sed=2"], "'sed' was unexpected"),
        (["nano", "--device", "cpu"], "--as NAME"),
        (["nano", "--device", "cpu", "--cmake-option", "ON"], "expected NAME=VALUE, got 'ON'"),
        (["--device", "cpu", "--", "-oProxyCommand=x"], "expected a host"),
    ],
)
def test_wrong_arguments_are_one_message(arguments, words):
    done = script(*arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
