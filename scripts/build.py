#!/usr/bin/env python3
"""Build the extension packedconv._core in place, and write a stamp of the binary.

What is measured depends on the stamp rather than on the binary: it changes when, and only
when, the compiled code does.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterator

import pybind11

from packedconv.files import atomic_write


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


def stamp(target: pathlib.Path) -> dict:
    """SHA-256 of the built module and how it was built."""
    module = target / "packedconv" / ("_core" + sysconfig.get_config_var("EXT_SUFFIX"))
    # In a process of its own: an older module of that name may be loaded in this one.
    code = "import json; from packedconv import _core; print(json.dumps(_core.build_info()))"
    info = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    digest = hashlib.sha256(module.read_bytes()).hexdigest()
    return {"sha256": digest, **json.loads(info)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path("csrc"))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/extension"))
    parser.add_argument("--target", type=pathlib.Path, default=pathlib.Path("python"))
    parser.add_argument("--stamp", required=True)
    arguments = parser.parse_args()
    try:
        with build_lock(arguments.folder):
            build(arguments.source, arguments.folder, arguments.target)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: the extension was not built: {error}")
    with atomic_write(arguments.stamp) as temporary, open(temporary, "w") as file:
        json.dump(stamp(arguments.target), file, indent=2, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main()
