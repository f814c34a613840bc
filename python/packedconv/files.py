"""Writing files so that a reader never sees half of one."""

import contextlib
import os
import tempfile
import typing


@contextlib.contextmanager
def atomic_write(path: str) -> typing.Iterator[str]:
    """Yield a temporary name beside `path`, renamed to `path` when the block succeeds.

    The temporary name keeps the suffix, which some writers read the format from.
    When the block raises, the temporary file is removed and `path` is left as it was; an OSError
    that names no file then names `path`.
    """
    path = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    stem, suffix = os.path.splitext(os.path.basename(path))
    descriptor, temporary = tempfile.mkstemp(prefix="." + stem + ".", suffix=suffix, dir=folder)
    os.close(descriptor)
    # mkstemp makes the file private; results are as readable as the umask allows.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(temporary, 0o666 & ~mask)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        # A failed write does not say of which file: on a full disk, the one thing to know.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = path
        raise
