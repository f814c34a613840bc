"""Measurements of one device never overlap, whoever starts them."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from packedconv.bench.lock import lock_holder, measurement_lock

# Holds the lock for some seconds; prints when it got it and when it let go.
HOLD = """
import sys, time
from packedconv.bench.lock import measurement_lock
with measurement_lock("cpu", sys.argv[1]):
    begin = time.monotonic()
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
    end = time.monotonic()
print(begin, end, flush=True)
"""


def start(folder, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )


def interval(process):
    """(begin, end) of holding the lock, and what went to stderr."""
    output, messages = process.communicate(timeout=30)
    assert process.returncode == 0, messages
    begin, end = output.splitlines()[-1].split()
    return (float(begin), float(end)), messages


def assert_apart(intervals):
    ordered = sorted(intervals)
    for (_, end), (begin, _) in zip(ordered, ordered[1:]):
        assert end <= begin


def test_intervals_never_overlap_and_waiting_is_said_once(tmp_path):
    first = start(tmp_path, 0.5)
    assert first.stdout.readline() == "holds\n"
    others = [start(tmp_path, 0.2), start(tmp_path, 0.2)]
    intervals, messages = zip(*(interval(process) for process in [first, *others]))
    assert_apart(intervals)
    assert messages[0] == ""
    for message in messages[1:]:
        assert message.count("\n") == 1
        assert message.startswith(f"waiting for process {first.pid}, which is using the device")


def test_killing_the_holder_frees_the_lock(tmp_path):
    holder = start(tmp_path, 60)
    assert holder.stdout.readline() == "holds\n"
    waiter = start(tmp_path, 0.0)
    assert waiter.stderr.readline().startswith("waiting")
    killed = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    (begin, _), _ = interval(waiter)
    assert killed <= begin < killed + 5
    holder.communicate()


def test_a_removed_lock_file_lets_nobody_overlap(tmp_path):
    holder = start(tmp_path, 0.6)
    assert holder.stdout.readline() == "holds\n"
    waiter = start(tmp_path, 0.4)
    assert waiter.stderr.readline().startswith("waiting")
    (tmp_path / "packedconv-cpu.lock").unlink()
    late = start(tmp_path, 0.8)
    assert late.stdout.readline() == "holds\n"
    (_, end), _ = interval(late)
    (begin, _), _ = interval(waiter)
    # The waiter notices that its file is gone and queues for the new one.
    assert end <= begin
    interval(holder)


def test_every_user_may_lock(tmp_path):
    mask = os.umask(0o077)
    try:
        with measurement_lock("cpu", str(tmp_path)):
            pass
    finally:
        os.umask(mask)
    path = tmp_path / "packedconv-cpu.lock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    # As for another user's file that may only be read.
    path.chmod(0o444)
    with measurement_lock("cpu", str(tmp_path)):
        assert lock_holder(str(path)) == os.getpid()
    assert lock_holder(str(path)) is None


def test_devices_do_not_wait_for_one_another(tmp_path, capsys):
    with measurement_lock("cpu", str(tmp_path)), measurement_lock("h200", str(tmp_path)):
        pass
    assert capsys.readouterr().err == ""


def test_an_error_inside_frees_the_lock(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), measurement_lock("cpu", str(tmp_path)):
        raise ZeroDivisionError
    with measurement_lock("cpu", str(tmp_path)):
        pass
    assert capsys.readouterr().err == ""


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "packedconv-cpu.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError), measurement_lock("cpu", str(tmp_path)):  # noqa: PT011
        pass
    assert not (tmp_path / "elsewhere").exists()
