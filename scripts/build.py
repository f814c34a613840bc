#!/usr/bin/env python3
"""Build the extension packedconv._core in place, and write a stamp of the binary (stamp.py)."""

import argparse
import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pybind11

from packedconv.script import run


@contextlib.contextmanager
def build_lock(folder: pathlib.Path) -> Iterator[None]:
    """Keep two builds out of one folder; the kernel frees the lock of a killed one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(source: pathlib.Path, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Configure, compile and install the module to `target`/packedconv."""
    configure = [
        *("cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    install = ["cmake", "--install", str(folder), "--prefix", str(target)]
    # The environment's own cmake and ninja come first, whether or not it is activated.
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    for command in (configure, ["cmake", "--build", str(folder)], install):
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path("csrc"))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/extension"))
    parser.add_argument("--target", type=pathlib.Path, default=pathlib.Path("python"))
    parser.add_argument("--stamp", required=True)
    arguments = parser.parse_args()
    # In a process of its own: an older module of that name may be loaded in this one.
    stamp = [sys.executable, str(pathlib.Path(__file__).with_name("stamp.py"))]
    try:
        with build_lock(arguments.folder):
            build(arguments.source, arguments.folder, arguments.target)
            subprocess.run([*stamp, "--out", arguments.stamp], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: the extension was not built: {error}")


if __name__ == "__main__":
    run(main)
