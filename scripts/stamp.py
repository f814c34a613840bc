#!/usr/bin/env python3
"""Write a stamp of the built extension: its SHA-256, and how it was built.

What is measured depends on the stamp rather than on the binary: it changes when, and only
when, the compiled code does.
"""

import argparse
import hashlib
import json
import typing

from packedconv.files import atomic_write
from packedconv.script import run


def stamp() -> typing.Dict[str, typing.Any]:
    """The stamp of the extension that this Python imports."""
    from packedconv import _core

    with open(_core.__file__, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return dict(_core.build_info(), sha256=digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="stamp to write, .json")
    options = parser.parse_args()
    content = stamp()
    with atomic_write(options.out) as temporary, open(temporary, "w") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    run(main)
