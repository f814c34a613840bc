"""The launcher: its messages, its set-up, and what it hands to Snakemake and pytest."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packedconv import launch

ROOT = Path(__file__).parents[2]
TOOLS = [
    *("awk", "bash", "cat", "chmod", "cp", "cut", "df", "dirname", "flock", "grep", "head"),
    *("mkdir", "mktemp", "mv", "readlink", "rm", "sed", "sha256sum", "tail"),
]

# Stands for python3.11: makes a venv whose pip only writes down how it was called.
FAKE_PYTHON = """#!{bash}
if [[ "$*" == "-m venv "* ]]; then
    {python} -m venv --without-pip "$3" || exit 1
    site=$("$3/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir "$site/pip"
    cp "{pip}" "$site/pip/__main__.py"
    exit
fi
exec {python} "$@"
"""
FAKE_PIP = """
import os, sys
with open(os.environ["CALLS"], "a") as stream:
    stream.write("pip " + " ".join(sys.argv[1:]) + chr(10))
if "PIP_SAYS" in os.environ:
    with open(sys.argv[sys.argv.index("--log") + 1], "w") as stream:
        stream.write(os.environ["PIP_SAYS"])
    sys.exit(1)
"""
FAKE_LAUNCH = """
import os, sys
with open(os.environ["CALLS"], "a") as stream:
    stream.write("launch " + " ".join(sys.argv[1:]) + " in " + os.getcwd() + chr(10))
"""
FAKE_DOCTOR = """
import os, sys
with open(os.environ["CALLS"], "a") as stream:
    stream.write("doctor " + " ".join(sys.argv[1:]) + chr(10))
"""
# Stands for a compiler: whatever it makes succeeds.
FAKE_COMPILER = """#!{bash}
if [[ $1 == --version ]]; then echo "c++ 1.0"; exit; fi
while [[ $1 != -o ]]; do shift; done
printf '#!{bash}\\n' >"$2"
chmod +x "$2"
"""


class Clone:
    """A copy of the launcher with nothing but fakes around it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        for path in ("scripts", "envs", "python/packedconv"):
            (self.root / path).mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "scripts/artifact", self.root / "scripts")
        (self.root / "envs/requirements.lock").write_text("one==1\n")
        (self.root / "python/packedconv/__init__.py").touch()
        (self.root / "python/packedconv/launch.py").write_text(FAKE_LAUNCH)
        (self.root / "python/packedconv/doctor.py").write_text(FAKE_DOCTOR)
        (folder / "pip.py").write_text(FAKE_PIP)
        for tool in TOOLS:
            os.symlink(shutil.which(tool), self.bin / tool)
        self.bash = shutil.which("bash")
        self.tool(
            "python3.11",
            FAKE_PYTHON.format(bash=self.bash, python=sys.executable, pip=folder / "pip.py"),
        )
        self.tool("c++", FAKE_COMPILER.format(bash=self.bash))

    def tool(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def call(self, *arguments: str, status: int = 0, **environment: str) -> str:
        """Call the launcher from another folder; returns what it printed."""
        settings = {"PATH": str(self.bin), "CALLS": str(self.calls), "HOME": str(self.root)}
        done = subprocess.run(
            [self.root / "scripts/artifact", *arguments],
            env={**settings, **environment},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def called(self) -> list[str]:
        """What pip and the package were called with since the last question."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_help_needs_nothing(clone):
    (clone.bin / "python3.11").unlink()
    text = clone.call("--help")
    for verb in ("doctor", "all", "smoke", "test", "--unlock"):
        assert f"scripts/artifact {verb}" in text
    assert not (clone.root / ".venv").exists()


def test_no_verb(clone):
    assert "--help" in clone.call(status=2)


def test_old_python(clone):
    (clone.bin / "python3.11").unlink()
    clone.tool("python3", f"#!{clone.bash}\n[[ $2 == *exit* ]] && exit 1\necho 3.6.9\n")
    clone.tool("apt-get", f"#!{clone.bash}\n")
    text = clone.call("all", status=2)
    assert "Python: expected 3.11 or newer, found 3.6.9 (python3)" in text
    assert "sudo apt-get install python3.11" in text
    assert text.count("error") == 1


def test_no_python(clone):
    (clone.bin / "python3.11").unlink()
    text = clone.call("all", status=2)
    assert "Python: expected 3.11 or newer, found none" in text
    assert "apt-get install" in text
    assert "dnf install" in text


def test_chosen_python_is_not_replaced_by_another(clone):
    text = clone.call("all", status=2, PYTHON="/nowhere/python3.12")
    assert "/nowhere/python3.12" in text


def test_no_venv_module(clone):
    clone.tool(
        "python3.11",
        f'#!{clone.bash}\n[[ $2 == *ensurepip* ]] && exit 1\nexec {sys.executable} "$@"\n',
    )
    clone.tool("dnf", f"#!{clone.bash}\n")
    text = clone.call("all", status=2)
    assert "venv" in text
    assert "sudo dnf install python3.1" in text


def test_no_headers(clone):
    clone.tool(
        "python3.11",
        f'#!{clone.bash}\n[[ $2 == *Python.h* ]] && exit 1\nexec {sys.executable} "$@"\n',
    )
    clone.tool("apt-get", f"#!{clone.bash}\n")
    text = clone.call("all", status=2)
    assert "Python.h" in text
    assert "-dev" in text


def test_no_compiler(clone):
    (clone.bin / "c++").unlink()
    clone.tool("apt-get", f"#!{clone.bash}\n")
    text = clone.call("all", status=2)
    assert "C++ compiler: expected one that compiles C++14 with OpenMP, found none" in text
    assert "sudo apt-get install g++" in text
    assert text.count("error") == 1
    assert not (clone.root / ".venv").exists()


def test_compiler_without_openmp(clone):
    clone.tool("c++", f'#!{clone.bash}\necho "hello.cpp:1: fatal error: omp.h" >&2\nexit 1\n')
    text = clone.call("all", status=2)
    assert "fatal error: omp.h" in text


def test_real_compiler(clone):
    """The program that the launcher compiles is right, and CXX may hold options."""
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    clone.call("all", CXX=f"{compiler} -O1", PATH=f"{clone.bin}:{os.environ['PATH']}")
    assert clone.called()[-1].startswith("launch all")


def test_compiler_lost_after_set_up(clone):
    clone.call("all")
    (clone.bin / "c++").unlink()
    assert "C++ compiler" in clone.call("all", status=2)
    (clone.root / "build/extension.json").touch()
    clone.call("all")


def test_no_disk(clone):
    text = clone.call("all", status=2, PACKEDCONV_MIN_DISK_MB="999999999999")
    assert "disk space: expected 999999999999 MB free" in text
    assert "df -h" in text
    assert not (clone.root / ".venv").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(clone):
    clone.root.chmod(0o555)
    text = clone.call("all", status=2)
    clone.root.chmod(0o755)
    assert "write permission" in text


def test_first_call_sets_up_and_later_calls_do_not(clone):
    clone.call("all", "--config", "seed=2")
    pip, called = clone.called()
    assert pip.startswith("pip install")
    assert str(clone.root / "envs/requirements.lock") in pip
    assert called == f"launch all --config seed=2 in {clone.root}"
    assert json.loads((clone.root / "build/setup.json").read_text())["seconds"] >= 0
    clone.call("figures/fig5a.pdf", "-n")
    assert clone.called() == [f"launch figures/fig5a.pdf -n in {clone.root}"]


def test_called_through_a_link(clone, tmp_path):
    os.symlink(clone.root / "scripts/artifact", tmp_path / "artifact")
    subprocess.run(
        [tmp_path / "artifact", "smoke"],
        env={"PATH": str(clone.bin), "CALLS": str(clone.calls)},
        check=True,
    )
    assert clone.called()[-1] == f"launch smoke in {clone.root}"


def test_a_failed_check_names_the_doctor(clone):
    (clone.bin / "c++").unlink()
    assert clone.call("all", status=2).endswith("scripts/artifact doctor\n")


def test_doctor_without_any_python(clone):
    """Everything is looked at, though nothing is there."""
    for tool in ("python3.11", "c++"):
        (clone.bin / tool).unlink()
    *lines, last = clone.call(
        "doctor", status=1, PACKEDCONV_MIN_DISK_MB="999999999999"
    ).splitlines()
    states = {text[9:25].strip(): text.split()[0] for text in lines}
    assert states == {
        "folder": "ok",
        "Python": "missing",
        "C++ compiler": "missing",
        "temporary folder": "ok",
        "disk": "missing",
        "all else": "warning",
    }
    assert all(" Mend it with: " in text for text in lines if text.startswith("missing"))
    assert last.startswith("Not ready: 3 missing")


def test_doctor_changes_nothing(clone):
    before = sorted(clone.root.rglob("*"))
    text = clone.call("doctor", "--config", "seed=2")
    assert "ok       C++ compiler     c++ 1.0, C++14 and OpenMP" in text
    assert clone.called() == ["doctor --missing 0 --environment missing --config seed=2"]
    assert sorted(clone.root.rglob("*")) == before


def test_doctor_counts_what_is_missing(clone):
    (clone.bin / "c++").unlink()
    assert "missing  C++ compiler     none; expected one that" in clone.call("doctor")
    assert clone.called() == ["doctor --missing 1 --environment missing"]
    clone.tool(
        "python3.11",
        f"#!{clone.bash}\n[[ $2 == *Python.h* || $2 == *ensurepip* ]] && exit 1\n"
        f'exec {sys.executable} "$@"\n',
    )
    text = clone.call("doctor", "--set-up")
    assert "missing  Python's venv" in text
    assert "missing  Python's headers" in text
    # Nothing is set up where something is missing.
    assert clone.called() == ["doctor --missing 3 --environment missing --set-up"]


def test_doctor_sets_up_when_told_to(clone):
    text = clone.call("doctor", "--set-up")
    assert text.index("ok       disk") < text.index("Setting up .venv")
    pip, called = clone.called()
    assert pip.startswith("pip install")
    assert called == "doctor --missing 0 --environment made --set-up"
    assert "Setting up" not in clone.call("doctor")
    assert clone.called() == ["doctor --missing 0 --environment made"]
    (clone.root / "envs/requirements.lock").write_text("one==2\n")
    clone.call("doctor")
    assert clone.called() == ["doctor --missing 0 --environment outdated"]


def test_doctor_goes_on_when_set_up_fails(clone):
    text = clone.call("doctor", "--set-up", PIP_SAYS="connection refused")
    assert "error: packages" in text
    assert clone.called()[-1] == "doctor --missing 1 --environment outdated --set-up"


def test_no_temporary_folder(clone):
    text = clone.call("all", status=2, TMPDIR="/nowhere")
    assert "temporary folder: expected one to write to, found /nowhere" in text
    assert "missing  temporary folder /nowhere" in clone.call("doctor", TMPDIR="/nowhere")


def test_changed_lock_is_installed(clone):
    clone.call("all")
    clone.called()
    (clone.root / "envs/requirements.lock").write_text("one==2\n")
    clone.call("all")
    assert [line.split()[0] for line in clone.called()] == ["pip", "launch"]
    clone.call("all")
    assert [line.split()[0] for line in clone.called()] == ["launch"]


def test_unfinished_set_up_is_redone(clone):
    message = clone.call("all", status=2, PIP_SAYS="connection refused")
    assert "network" in message
    leftover = clone.root / ".venv/leftover"
    leftover.touch()
    clone.called()
    clone.call("all")
    assert [line.split()[0] for line in clone.called()] == ["pip", "launch"]
    assert not leftover.exists()


def test_disk_fills_up_during_set_up(clone):
    text = clone.call("all", status=2, PIP_SAYS="OSError: [Errno 28] No space left on device")
    assert "disk space" in text
    assert text.count("error:") == 1


def test_moved_clone_is_set_up_anew(clone):
    clone.call("all")
    clone.called()
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    clone.call("all")
    assert [line.split()[0] for line in clone.called()] == ["pip", "launch"]


def test_two_first_calls_set_up_once(clone):
    command = [clone.root / "scripts/artifact", "all"]
    environment = {"PATH": str(clone.bin), "CALLS": str(clone.calls)}
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert sorted(line.split()[0] for line in clone.called()) == ["launch", "launch", "pip"]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["all"], "--cores 1 all"),
        (["all", "--config", "seed=2"], "--cores 1 all --config seed=2"),
        (["smoke"], "--cores 1 all --configfile config/smoke.yaml"),
        (["smoke", "-n"], "--cores 1 all -n --configfile config/smoke.yaml"),
        (
            ["smoke", "--configfile=few.yaml", "-n"],
            "--cores 1 all --configfile config/smoke.yaml few.yaml -n",
        ),
        (["figures/fig5a.pdf"], "--cores 1 figures/fig5a.pdf"),
        (["-n", "all"], "--cores 1 -n all"),
        (["--unlock"], "--cores 1 --unlock"),
        (["all", "--cores", "2"], "all --cores 2"),
        (["all", "-c2"], "all -c2"),
        (["all", "-j", "2"], "all -j 2"),
    ],
)
def test_snakemake_command(arguments, command):
    assert launch.snakemake_command(arguments) == ["snakemake", *command.split()]


@pytest.fixture
def fake_snakemake(tmp_path, monkeypatch):
    """A folder to run in; returns a function that says what snakemake does there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def does(text: str) -> None:
        path = tmp_path / "snakemake"
        path.write_text("#!/usr/bin/env bash\necho snakemake $*\n" + text)
        path.chmod(0o755)

    return does


def test_pass_through(fake_snakemake, capfd):
    fake_snakemake("")
    assert launch.main(["figures/fig1.pdf", "--quiet"]) == 0
    assert capfd.readouterr().out == "snakemake --cores 1 figures/fig1.pdf --quiet\n"


def test_failure_is_passed_on(fake_snakemake, capfd):
    fake_snakemake("exit 3")
    assert launch.main(["figures/fig1.pdf"]) == 3
    said = capfd.readouterr().err
    assert "unlock" not in said
    assert said.endswith("the same command goes on from there.\n")
    assert "logs/" in said


def test_an_unknown_word_ends_with_where_the_known_ones_are(fake_snakemake, capfd):
    fake_snakemake("exit 1")
    assert launch.main(["smok"]) == 1
    assert launch.is_unknown("smoke-test")
    assert "expected a verb or a target, got smok. Verbs: scripts/artifact --help" in (
        capfd.readouterr().err
    )
    for known in ("build", "extended", "all", "figures/fig1.pdf", "--lint", "report", "reported"):
        assert not launch.is_unknown(known), known


def test_locked_folder_ends_with_the_command_that_unlocks(fake_snakemake, capfd):
    fake_snakemake("mkdir -p .snakemake/locks; touch .snakemake/locks/0.input.lock; exit 1")
    assert launch.main(["figures/fig1.pdf"]) == 1
    assert capfd.readouterr().err.endswith("scripts/artifact --unlock\n")


def test_interrupts_stop_what_runs_next(fake_snakemake):
    """A child that inherited an ignored Ctrl-C could not be stopped."""
    before = signal.getsignal(signal.SIGINT)
    fake_snakemake("")
    launch.main(["figures/fig1.pdf"])
    assert signal.getsignal(signal.SIGINT) is before


def test_tests_are_not_run_when_the_build_fails(fake_snakemake, capfd):
    fake_snakemake("exit 1")
    assert launch.main(["test", "-k", "nothing"]) == 1
    assert capfd.readouterr().out == "snakemake --cores 1 build\n"


def test_tests_pass_arguments_on(fake_snakemake, tmp_path, capfd):
    fake_snakemake("")
    (tmp_path / "test_it.py").write_text("def test_a(): pass\n\ndef test_b(): assert False\n")
    assert launch.main(["test", "-n0", "-p", "no:cacheprovider", "-k", "test_a"]) == 0
    assert "1 passed, 1 deselected" in capfd.readouterr().out


def test_termination_reaches_snakemake(tmp_path):
    """A launcher that is terminated leaves no Snakemake behind."""
    fake = tmp_path / "snakemake"
    fake.write_text(
        "#!/usr/bin/env bash\ntrap 'touch ended; exit 9' TERM\ntouch began\n"
        "while true; do sleep 0.05; done\n"
    )
    fake.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "packedconv.launch", "figures/fig1.pdf"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 9
    assert (tmp_path / "ended").exists()


def test_a_verb_reads_its_file_before_the_users():
    command = launch.snakemake_command(["smoke", "--configfile", "few.yaml", "--config", "seed=2"])
    assert command == [
        *("snakemake", "--cores", "1", "all"),
        *("--configfile", "config/smoke.yaml", "few.yaml", "--config", "seed=2"),
    ]


@pytest.mark.parametrize("option", ["--unlock", "--summary", "--rulegraph=dot"])
def test_looking_announces_nothing(monkeypatch, capsys, option):
    monkeypatch.setattr(launch, "run", lambda command: 0)
    assert launch.main(["all", option]) == 0
    assert capsys.readouterr().out == ""


def test_a_dry_run_does_not_say_done(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch, "run", lambda command: 0)
    for option in (
        "-n",
        "-np",
        "-nq",
        "-pn",
        "-nc1",
        "--dry-run",
        "--li",
        "--unlock",
        "--rulegraph",
    ):
        assert launch.main(["all", option]) == 0
        assert "Done." not in capsys.readouterr().out
    assert launch.main(["all"]) == 0
    assert "Done." in capsys.readouterr().out
