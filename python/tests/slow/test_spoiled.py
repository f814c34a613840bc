"""A file of a run is spoiled after it was written: never a wrong figure, and a way on."""

import os
import re

import pytest
from held import TARGETS, copy_of, files

from packedconv.evidence.samples import Results

# Whether it has to be noticed. Weights are read again only by a measurement, which notices; their
# manifest by nobody, but a layer with another one is measured again.
SPOILED = {
    "settings.json": True,
    "weights/oc8.npz": False,
    "weights/oc8.json": False,
    "check/oc8.csv": True,
    "check/oc8.json": True,
    "ceilings.csv": True,
    "ceilings.json": True,
    "bench/oc8.csv": True,
    "bench/oc8.json": True,
    "samples.csv": True,
    "errors.csv": True,
    "peaks.json": True,
}
# What rendering reads.
RENDERED = ("settings.json", "bench/oc8.json", "samples.csv", "errors.csv", "peaks.json")


def change_a_digit(path):
    """The file stays whole, and its values sound."""
    content = path.read_bytes()
    # In the second half, where values are, and not the first digit of a number.
    digits = list(re.finditer(rb"(?<=\d)[1-8](?=\d)", content))
    at = digits[len(digits) * 2 // 3].start() if digits else len(content) // 2
    path.write_bytes(content[:at] + b"9" + content[at + 1 :])


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


@pytest.fixture
def checkout(measured_run, tmp_path):
    return copy_of(measured_run, tmp_path / "packedconv")


def refused(done, name):
    """The failed run names the file and the next step."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if name in line and "expected" in line]
    lines += [line for line in done.stdout.splitlines() if name in line and "not " in line]
    assert any(
        re.search("delete|measure|name another run|make it again", line) for line in lines
    ), done.stdout


@pytest.mark.parametrize("spoil", [change_a_digit, cut])
@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_file_is_noticed_and_made_again(checkout, name, spoil):
    path = checkout.results / name
    before = files(checkout.figures)
    spoil(path)
    done = checkout.run(*TARGETS)
    if SPOILED[name]:
        if name == "settings.json" and spoil is change_a_digit:
            # Settings as sound as those of another run.
            assert done.returncode != 0
            assert "was measured with another" in done.stdout
        else:
            refused(done, name)
        # Nothing was rendered from it.
        after = files(checkout.figures)
        assert {path: before.get(path) for path in after} == after
    else:
        assert done.returncode == 0, done.stdout
        if name == "weights/oc8.npz":
            assert files(checkout.figures) == before
        Results.load(checkout.results)
    # What the message says. Facts and what they ride with belong together.
    path.unlink()
    done = checkout.run(*TARGETS)
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in checkout.run(*TARGETS, "-n").stdout


@pytest.mark.parametrize("name", RENDERED)
def test_a_silent_change_is_noticed_when_rendering(checkout, name):
    """The file's time stays, as when a disk rots: only its content tells."""
    path = checkout.results / name
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    change_a_digit(path)
    os.utime(path, ns=times)
    figure = checkout.folder / TARGETS[0]
    figure.unlink()
    done = checkout.run(TARGETS[0])
    assert done.returncode != 0, done.stdout
    assert not figure.exists()
    assert name in done.stdout or "was measured with another" in done.stdout
