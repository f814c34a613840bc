"""Whether a run can write where it has to, and the one sentence that says why not."""

import os
import sys
import tempfile

# Less than the files of one step may need: a step that ran out of space has removed its own.
LEAST_MB = 10
# Where a run writes, in the checkout; any of them may be a disk of its own.
FOLDERS = (".", ".snakemake", "results", "figures", "logs", "build")


def full_disks(root: str | os.PathLike[str]) -> list[str]:
    """A sentence for each disk of the checkout `root`, and of temporary files, that is full."""
    sentences, seen = [], set()
    for folder in (*(os.path.join(root, name) for name in FOLDERS), tempfile.gettempdir()):
        if not os.path.isdir(folder):
            continue
        device = os.stat(folder).st_dev
        if device not in seen:
            seen.add(device)
            missing = _missing(folder)
            if missing:
                sentences.append(
                    f"the disk of {os.path.abspath(folder)} is full ({missing}); free some space "
                    "and run the same command again: what is finished is kept"
                )
    return sentences


def hindrance(root: str | os.PathLike[str]) -> str:
    """Why nothing can be written to the checkout `root`, and the next step; empty where it can."""
    if not os.access(root, os.W_OK):
        return (
            f"folder: expected write permission in {root}, found none; copy it and run there: "
            f"cp -r {root} ~/packedconv"
        )
    return next(iter(full_disks(root)), "")


def _missing(folder: str) -> str:
    """What a disk lacks; empty where it has room."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize / 1e6
    if free < LEAST_MB:
        return f"{free:.1f} MB free"
    # Some file systems count no files.
    if status.f_files and status.f_favail == 0:
        return "no further file fits, though there is space"
    return ""


def say_full_disks(root: str | os.PathLike[str]) -> None:
    """Print a line on stderr for each disk that is full."""
    for sentence in full_disks(root):
        print(f"error: {sentence}", file=sys.stderr, flush=True)
