"""A disk fills up while the workflow measures or renders: one message, and nothing is lost."""

import os
import shutil
import subprocess

import pytest
from checkout import RUN
from held import TARGETS, Hold, copy_of, files

MEGABYTE = 2**20


@pytest.fixture
def mount(tmp_path):
    """Returns a function that mounts a small disk on a folder; skips where nothing is mounted."""
    mounted = []

    def mount_disk(folder, megabytes):
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "disk", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs root, to mount a disk: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount_disk
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(autouse=True)
def needs_mount():
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root, to mount a disk")


def fill(folder, left):
    """Fill the disk of a folder but for so many bytes; returns the file that does."""
    ballast = folder / "ballast"
    status = os.statvfs(folder)
    with open(ballast, "wb") as stream:
        for _ in range((status.f_bavail * status.f_frsize - left) // 4096):
            stream.write(b"x" * 4096)
    return ballast


def said_once(output, folder):
    """The disk is named, in one line."""
    lines = [line for line in output.splitlines() if f"the disk of {folder} is full" in line]
    assert len(lines) == 1, output
    assert "free some space and run the same command again" in lines[0]
    assert "Traceback" not in output, output
    assert "Logging error" not in output, output


def fails_when_full(checkout, disk, hold, log):
    """`TARGETS` with a disk that is full from the moment on when a script is held.

    Returns what was printed, and the file that fills the disk.
    """
    process = hold.start(checkout, *TARGETS, log=log)
    ballast = fill(disk, 0)
    hold.let_go()
    assert process.wait(timeout=300) != 0
    return log.read_text(), ballast


def same(before, after):
    """What was there is as it was, but for the times of jobs."""
    return all(after.get(path) == one for path, one in before.items() if "times" not in path.parts)


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "packedconv"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("disk", ["results", "."])
def test_full_from_the_start(measured_run, mount, place, disk):
    """Refused before anything begins, and before anything old is removed."""
    mount(place / disk, 64)
    checkout = copy_of(measured_run, place)
    figure = checkout.figures / "cpu" / "fig5.pdf"
    rendered = figure.read_bytes()
    figure.unlink()
    before = files(checkout.results, checkout.figures)
    ballast = fill(place / disk, 0)
    done = checkout.run(*TARGETS)
    assert done.returncode != 0
    said_once(done.stdout, place / disk)
    assert same(before, files(checkout.results, checkout.figures))
    ballast.unlink()
    done = checkout.run(*TARGETS)
    assert done.returncode == 0, done.stdout
    assert figure.read_bytes() == rendered


def test_full_while_measuring(measured_run, mount, place, tmp_path):
    mount(place / "results", 32)
    checkout = copy_of(measured_run, place)
    for name in ("bench/oc8.csv", "bench/oc8.json", "samples.csv"):
        (checkout.results / name).unlink()
    before = files(checkout.results)
    # Held when the facts are to be named; the samples are yet to be written.
    hold = Hold(tmp_path / "hold", "scripts/bench.py", 1)
    output, ballast = fails_when_full(checkout, place / "results", hold, tmp_path / "run.log")
    said_once(output, place / "results")
    assert "No space left on device: 'results/cpu/tiny/bench/oc8" in output
    assert not (checkout.results / "bench" / "oc8.csv").exists()
    kept = files(checkout.results)
    assert same({path: one for path, one in before.items() if path.parent.name != "tiny"}, kept)

    ballast.unlink()
    done = checkout.run(*TARGETS)
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in checkout.run(*TARGETS, "-n").stdout


@pytest.mark.parametrize("disk", ["figures", "."])
def test_full_while_rendering(measured_run, mount, place, tmp_path, disk):
    """Also where logs and Snakemake's own records find no space."""
    mount(place / disk, 64)
    checkout = copy_of(measured_run, place)
    figure = checkout.figures / "cpu" / "fig5.pdf"
    rendered = figure.read_bytes()
    figure.unlink()
    before = files(checkout.results)
    hold = Hold(tmp_path / "hold", "scripts/fig5_speedup.py", 1)
    output, ballast = fails_when_full(checkout, place / disk, hold, tmp_path / "run.log")
    said_once(output, place / disk)
    if disk == "figures":
        # The script's own message, by its log.
        assert f"No space left on device: 'figures/{RUN}/cpu/fig5." in output
    assert same(before, files(checkout.results))

    ballast.unlink()
    done = checkout.run(*TARGETS)
    if done.returncode:
        assert "unlock" in done.stdout, done.stdout
        assert checkout.run(*TARGETS, "--unlock").returncode == 0
        done = checkout.run(*TARGETS)
    assert done.returncode == 0, done.stdout
    assert figure.read_bytes() == rendered
