#!/usr/bin/env python3
"""Write the settings of a run, which every measuring script reads."""

import argparse

from packedconv.files import atomic_write
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True, help="the settings as JSON text")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    with atomic_write(arguments.out) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(arguments.text)


if __name__ == "__main__":
    run(main)
