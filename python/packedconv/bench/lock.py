"""One measurement at a time: a lock per machine and device."""

import contextlib
import errno
import fcntl
import os
import sys
import typing

# Fixed, not tempfile.gettempdir(): every clone and every user must meet at one name.
FOLDER = "/tmp"


@contextlib.contextmanager
def measurement_lock(device: str, folder: typing.Optional[str] = None) -> typing.Iterator[None]:
    """Hold the lock of a device while the block runs; its file lies in `folder` (FOLDER).

    When another process holds it, says so once on stderr and waits without limit.
    The kernel frees the lock when its holder ends, also by SIGKILL. The file stays,
    and what it holds means nothing. Libraries that keep lock files private refuse a
    file of another user in /tmp, so this uses flock itself; it needs read access only.
    Processes that do not share /tmp (containers) do not see each other's lock.
    """
    path = os.path.join(folder or FOLDER, f"packedconv-{device}.lock")
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # Closing releases the lock.
        os.close(descriptor)


def lock_holder(path: str) -> typing.Optional[int]:
    """Process id that holds the flock of a file, or None when it is not known."""
    try:
        inode = os.stat(path).st_ino
        with open("/proc/locks", encoding="ascii", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return None
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; waiters have "->".
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].split(":")[-1] == str(inode):
            pid = int(fields[4])
            return pid if pid > 0 else None
    return None


def _acquire(path: str) -> int:
    waited = False
    while True:
        descriptor = _open(path)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if not waited:
                    _say_waiting(path)
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_current(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The file was removed while this process waited: others lock a new one.
        os.close(descriptor)


def _open(path: str) -> int:
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
        # Not O_CREAT on an existing file: the kernel may forbid it for another user's.
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            continue
        os.fchmod(descriptor, 0o666)
        return descriptor


def _is_current(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _say_waiting(path: str) -> None:
    pid = lock_holder(path)
    holder = "another process" if pid is None else f"process {pid}"
    print(f"waiting for {holder}, which is using the device ({path})", file=sys.stderr, flush=True)
