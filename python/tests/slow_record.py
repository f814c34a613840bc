"""The record of the slow suite, docs/slow-suite.md: a plugin of pytest that writes it.

Nothing is written unless every test of the suite has run: a part would pass for the whole.
"""

import datetime
import importlib.metadata
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
import time
import typing

import psutil
import pytest

from packedconv.device import cpu_title, usable_cores
from packedconv.files import atomic_write

# What prints a version, by the name that the record gives it.
TOOLS = {
    "Slurm": ("slurmd", "-V"),
    "OpenSSH": ("ssh", "-V"),
    "Chromium": ("chromium", "--version"),
    "GCC": ("gcc", "--version"),
    "QEMU": ("qemu-x86_64", "--version"),
}
PACKAGES = ("torch", "snakemake", "pytest")
_MOST_TEXT = 160


class Outcome(typing.NamedTuple):
    """One test: "passed", "failed" or "skipped", seconds with its fixtures, and why not passed."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


class Recorder:
    """Collects the outcome of every test in `folder` and writes `out` at the end.

    root: of the repository, which texts leave out. Register it with pytest's plugin manager.
    """

    def __init__(self, folder: pathlib.Path, out: pathlib.Path, root: pathlib.Path) -> None:
        self.folder, self.out, self.root = folder, out, root
        self.outcomes: dict[str, Outcome] = {}
        self.deselected = 0
        self.message = ""
        self.started = time.monotonic()
        # Meanwhile another one may be checked out.
        self.commit = commit(root)

    def pytest_deselected(self, items: typing.Sequence[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid, Outcome(report.nodeid, "passed", 0.0))
        seconds = before.seconds + report.duration
        if report.outcome == "passed" or before.outcome == "failed":
            self.outcomes[report.nodeid] = before._replace(seconds=seconds)
        else:
            self.outcomes[report.nodeid] = Outcome(
                report.nodeid, report.outcome, seconds, self._plain(reason(report))
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A file that skips all of itself has no tests.
        if report.outcome == "skipped":
            self.outcomes[report.nodeid] = Outcome(
                report.nodeid, "skipped", 0.0, self._plain(reason(report))
            )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        left_out = self.left_out(session)
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            left_out = "the run was cut short"
        if left_out:
            self.message = f"{self.out.name} is left as it was: {left_out}"
            return
        outcomes = [
            outcome._replace(name=name.split(f"{self.folder.name}/")[-1])
            for name, outcome in self.outcomes.items()
        ]
        text = render(outcomes, facts(self.commit), time.monotonic() - self.started)
        with atomic_write(str(self.out)) as temporary:
            pathlib.Path(temporary).write_text(text, encoding="utf-8")
        self.message = f"{self.out.name} is written"

    def pytest_terminal_summary(self, terminalreporter: typing.Any) -> None:
        terminalreporter.write_line(self.message)

    def left_out(self, session: pytest.Session) -> str:
        """What keeps this from being a run of the whole suite; empty where nothing does."""
        if self.deselected or any("::" in argument for argument in session.config.args):
            return "some tests were not asked for"
        files = {name.partition("::")[0].rpartition("/")[2] for name in self.outcomes}
        missing = sorted({path.name for path in self.folder.glob("test_*.py")} - files)
        if missing:
            return f"no test of {', '.join(missing)} was run"
        unfinished = {item.nodeid for item in session.items} - set(self.outcomes)
        return f"{len(unfinished)} tests did not run" if unfinished else ""

    def _plain(self, text: str) -> str:
        """One line without a path of this machine."""
        for path, name in ((self.root, "."), (pathlib.Path(tempfile.gettempdir()), "TMPDIR")):
            text = re.sub(re.escape(str(path)) + r"(?![\w-])", name, text)
        text = " ".join(text.split())
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test did not pass."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).partition("\n")[0]


def facts(commit: str) -> dict[str, str]:
    """What the suite ran on, by name: machine, system, software, and the commit that it is of."""
    gigabytes = psutil.virtual_memory().total / 1e9
    user = "root" if psutil.Process().uids().effective == 0 else "an ordinary user"
    versions = {name: tool_version(command) for name, command in TOOLS.items()}
    return {
        "Date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "Commit": commit,
        "Machine": f"{cpu_title()}, {usable_cores()} cores, {gigabytes:.1f} GB memory",
        "System": f"{system_name()}, Linux {platform.release()}, as {user}",
        "Python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        **versions,
    }


def tool_version(command: typing.Sequence[str]) -> str:
    """The first line with a version that a command prints; "none" where it is not there."""
    if shutil.which(command[0]) is None:
        return "none"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    for line in (done.stdout + done.stderr).splitlines():
        if re.search(r"\d+\.\d+", line):
            return line.strip()
    return "of unknown version"


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def system_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unknown distribution"


def commit(root: pathlib.Path) -> str:
    """The commit that is checked out, and whether files differ from it."""
    command = ["git", "-C", str(root)]
    head = subprocess.run(
        [*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        return "unknown: not a git checkout"
    changed = subprocess.run(
        [*command, "status", "--porcelain", "--", ".", ":!docs/slow-suite.md"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    return head.stdout.strip() + (f", with {len(changed)} files changed" if changed else "")


def render(
    outcomes: typing.Sequence[Outcome], where: typing.Mapping[str, str], seconds: float
) -> str:
    """The record in Markdown."""
    counts = {
        kind: sum(outcome.outcome == kind for outcome in outcomes)
        for kind in ("passed", "failed", "skipped")
    }
    lines = [
        "# Last run of the slow suite",
        "",
        "Written by `scripts/artifact slow`, which runs the tests in `python/tests/slow/`: those",
        "that need daemons, root, a browser or many minutes. A test whose tool is missing is",
        "skipped, and says so.",
        "",
        f"**{', '.join(f'{count} {kind}' for kind, count in counts.items())}**"
        f" in {seconds / 60:.1f} minutes.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {cell(value)} |" for name, value in where.items()),
        "",
        "| test | outcome | seconds | why |",
        "|---|---|---|---|",
        *(
            f"| `{cell(outcome.name)}` | {outcome.outcome} | {outcome.seconds:.1f} |"
            f" {cell(outcome.reason)} |"
            for outcome in outcomes
        ),
    ]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text as a cell of a table in Markdown."""
    return re.sub(r"([|<*`])", r"\\\1", text)
