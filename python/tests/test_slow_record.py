"""The record of the slow suite: written for the whole of it only, and true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import slow_record
from slow_record import Outcome

from packedconv import launch

TESTS = Path(__file__).parent
CONFTEST = """
import pathlib
from slow_record import Recorder

def pytest_configure(config):
    root = pathlib.Path(__file__).parent.parent
    config.pluginmanager.register(Recorder(root / "slow", root / "record.md", root))
"""
FIRST = """
import pytest

def test_good():
    pass

@pytest.fixture
def broken():
    raise OSError("no socket in /tmp_of_test | a pipe")

def test_broken(broken):
    pass

@pytest.mark.skip(reason="no slurm: apt-get install slurm-wlm")
def test_left_out():
    pass
"""
SECOND = """
import pathlib

def test_wrong():
    assert not pathlib.Path(__file__), f"{__file__} is there"
"""
THIRD = "import pytest\npytest.skip('no browser', allow_module_level=True)\n"


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        (folder / f"test_{name}.py").write_text(text)
    return tmp_path


def run(suite, *arguments):
    search = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or ("slow",))],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    record = suite / "record.md"
    return done, record.read_text() if record.exists() else None


def test_every_outcome_is_in_the_record(suite):
    done, record = run(suite)
    assert done.returncode == 1, done.stdout
    assert "record.md is written" in done.stdout
    assert "**1 passed, 2 failed, 2 skipped**" in record
    rows = dict(
        re.findall(r"^\| `(\S+)` \| ((?:passed|failed|skipped) \| \d+\.\d .*)$", record, re.M)
    )
    outcomes = {name: re.sub(r"\d+\.\d", "s", row) for name, row in rows.items()}
    assert outcomes == {
        r"test_first.py::test_good": "passed | s |  |",
        r"test_first.py::test_broken": (
            r"failed | s | OSError: no socket in /tmp_of_test \| a pipe |"
        ),
        r"test_first.py::test_left_out": "skipped | s | no slurm: apt-get install slurm-wlm |",
        # No path of this machine.
        r"test_second.py::test_wrong": (
            r"failed | s | AssertionError: ./slow/test_second.py is there |"
        ),
        r"test_third.py": "skipped | s | no browser |",
    }
    assert str(suite) not in record


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("slow", "-k", "good"), "some tests were not asked for"),
        (("slow/test_second.py::test_wrong",), "some tests were not asked for"),
        (("slow/test_first.py",), "no test of test_second.py, test_third.py was run"),
        (("slow", "--collect-only"), "no test of test_first.py, test_second.py was run"),
        (("slow", "-x"), "test_second.py was run"),
    ],
)
def test_a_part_of_the_suite_leaves_the_record_alone(suite, arguments, why):
    (suite / "record.md").write_text("an earlier run\n")
    done, record = run(suite, *arguments)
    assert "record.md is left as it was" in done.stdout
    assert why in done.stdout
    assert record == "an earlier run\n"


def test_tests_that_were_not_reached_are_missed(suite):
    first = suite / "slow" / "test_first.py"
    first.write_text("def test_a(): assert False\n\ndef test_b(): pass\n")
    for name in ("second", "third"):
        (suite / "slow" / f"test_{name}.py").unlink()
    done, record = run(suite, "slow", "-x")
    assert "1 tests did not run" in done.stdout
    assert record is None


def test_a_file_that_cannot_be_collected_is_no_whole_run(suite):
    (suite / "slow" / "test_second.py").write_text("import nothing_of_that_name\n")
    done, record = run(suite)
    assert "record.md is left as it was: the run was cut short" in done.stdout
    assert record is None


def test_the_record_names_what_it_ran_on():
    root = TESTS.parents[1]
    facts = slow_record.facts(slow_record.commit(root))
    assert {"Date", "Commit", "Machine", "System", "Python", *slow_record.TOOLS} <= set(facts)
    head = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode == 0:
        assert facts["Commit"].startswith(head.stdout.strip())
    assert re.search(r"\d+\.\d+", facts["GCC"]) or facts["GCC"] == "none"
    text = slow_record.render([Outcome("test_a.py::test_b[x|y]", "passed", 2.04)], facts, 90)
    assert r"| `test_a.py::test_b[x\|y]` | passed | 2.0 |  |" in text
    assert "**1 passed, 0 failed, 0 skipped** in 1.5 minutes." in text


def test_a_missing_tool_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert slow_record.tool_version(("sinfo", "--version")) == "none"


def test_plain_runs_leave_the_slow_suite_out():
    """Asked for by its folder it is there; a run of all tests does not know it."""

    def collected(*arguments):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
        done = subprocess.run(
            command, cwd=TESTS.parents[1], capture_output=True, text=True, check=False
        )
        return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}

    slow = {path.name for path in (TESTS / "slow").glob("test_*.py")}
    found = collected("python/tests/slow")
    assert {path.rpartition("/")[2] for path in found} == slow
    # Deselecting everything else keeps this one quick.
    ignored = [f"--ignore-glob=*/{pattern}" for pattern in ("test_[a-r]*.py", "test_[t-z]*.py")]
    plain = collected(*ignored)
    assert "python/tests/test_slow_record.py" in plain
    assert not {path for path in plain if "/slow/" in path}


def test_the_verb_runs_the_whole_suite_or_what_is_named(monkeypatch):
    commands = []
    monkeypatch.setattr(launch, "run", lambda command: commands.append(command) or 0)
    launch.main(["slow"])
    launch.main(["slow", "-x", "-k", "kill"])
    launch.main(["slow", "python/tests/slow/test_faults.py"])
    pytest_call = [sys.executable, "-m", "pytest"]
    assert commands[1::2] == [
        [*pytest_call, "python/tests/slow"],
        [*pytest_call, "python/tests/slow", "-x", "-k", "kill"],
        [*pytest_call, "python/tests/slow/test_faults.py"],
    ]
    assert all("build" in command for command in commands[::2])
