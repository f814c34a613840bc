"""The tiny run where there is no network, no root, no home, and no permission to write."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from checkout import ROOT, Checkout
from held import TARGETS

NOBODY = 65534
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, for namespaces"
)


def run_behind(prefix, checkout, *arguments, **environment):
    """The workflow, started by another command."""
    return subprocess.run(
        [*prefix, *checkout.command(*arguments)],
        cwd=checkout.folder,
        env={**checkout.environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_without_a_network(tmp_path):
    checkout = Checkout(tmp_path / "packedconv")
    alone = ["unshare", "--net"]
    seen = subprocess.run(
        [*alone, "cat", "/proc/net/route"], capture_output=True, text=True, check=True
    )
    assert seen.stdout.count("\n") <= 1, "there is a route out"
    done = run_behind(alone, checkout, *TARGETS)
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in checkout.run(*TARGETS, "-n").stdout


@pytest.fixture
def public():
    """A folder that every user reaches; those of pytest are private."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="packedconv-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody():
    """The command that runs another as a user who owns nothing and reaches this Python.

    A Python in a folder that is root's alone is shown at its place without the rest of it.
    """
    setpriv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    hidden = [
        folder
        for folder in pathlib.Path(sys.base_prefix).parents
        if not folder.stat().st_mode & 0o001
    ]
    if not hidden:
        return setpriv
    show = (
        'place=$(mktemp -d) && mount --bind "$1" "$place" && mount -t tmpfs -o mode=755 none "$2"'
        ' && mkdir -p "$1" && mount --bind "$place" "$1" && shift 2 && exec "$@"'
    )
    return [
        *("unshare", "--mount", "bash", "-c", show, "show", sys.base_prefix, str(hidden[-1])),
        *setpriv,
    ]


def owned(folder):
    folder.mkdir(exist_ok=True)
    subprocess.run(["chown", "--recursive", f"{NOBODY}:{NOBODY}", folder], check=True)
    return folder


def left_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_as_an_ordinary_user(public):
    """Nothing is written outside the folder but the lock of the device and Snakemake's cache."""
    if not ROOT.stat().st_mode & 0o001:
        pytest.skip("the environment lies in a folder of root's alone")
    checkout = Checkout(public / "packedconv")
    owned(checkout.folder)
    home, temporary = owned(public / "home"), owned(public / "tmp")
    before = {path.name for path in pathlib.Path("/tmp").iterdir()}
    settings = {
        "HOME": str(home),
        "TMPDIR": str(temporary),
        # The launcher, which may have started this, names one of its own.
        "XDG_CACHE_HOME": str(home / ".cache"),
    }
    done = run_behind(as_nobody(), checkout, *TARGETS, **settings)
    assert done.returncode == 0, done.stdout
    assert all(name.startswith(".cache/snakemake/") for name in left_in(home)), left_in(home)
    assert left_in(temporary) == []
    new = {path for path in pathlib.Path("/tmp").iterdir() if path.name not in before}
    assert not {path.name for path in new if path.stat().st_uid == NOBODY} - {"packedconv-cpu.lock"}
    for path in (checkout.results / "bench").glob("oc*.csv"):
        assert path.stat().st_uid == NOBODY


def test_without_a_home(public):
    """As the launcher calls the workflow: its caches lie in build/."""
    if not ROOT.stat().st_mode & 0o001:
        pytest.skip("the environment lies in a folder of root's alone")
    checkout = Checkout(public / "packedconv")
    cache = checkout.folder / "build" / "cache"
    assert "XDG_CACHE_HOME=$root/build/cache" in (ROOT / "scripts" / "artifact").read_text()
    owned(checkout.folder)
    temporary = owned(public / "tmp")
    settings = {
        "HOME": "/nonexistent",
        "TMPDIR": str(temporary),
        "XDG_CACHE_HOME": str(cache),
    }
    done = run_behind(as_nobody(), checkout, *TARGETS, **settings)
    assert done.returncode == 0, done.stdout
    assert left_in(temporary) == []


def read_only(folder):
    """The command that runs another where a folder cannot be written, by root either."""
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    return ["unshare", "--mount", "bash", "-c", f"cd / && {mount}", "mount", str(folder)]


def test_in_a_folder_that_cannot_be_written(measured_run):
    """One message; what is there can be copied and read."""
    # From within the mount, which a folder entered before is not.
    prefix = [*read_only(measured_run.folder), "env", f"--chdir={measured_run.folder}"]
    done = run_behind(prefix, measured_run, "all")
    assert done.returncode != 0
    assert "Traceback" not in done.stdout, done.stdout
    assert f"expected write permission in {measured_run.folder}, found none" in done.stdout
    assert f"cp -r {measured_run.folder}" in done.stdout


def test_the_launcher_in_a_folder_that_cannot_be_written(measured_run):
    shutil.copy2(ROOT / "scripts" / "artifact", measured_run.folder / "scripts")
    launcher = measured_run.folder / "scripts" / "artifact"
    done = subprocess.run(
        [*read_only(measured_run.folder), launcher, "all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"artifact: error: folder: expected write permission in {measured_run.folder}" in (
        done.stdout
    )
    assert "Mend it with: cp -r" in done.stdout
