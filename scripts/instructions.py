"""Instructions per FMA of every kernel, counted in its machine code. No GPU is needed.

Where there is no CUDA compiler or disassembler, the table says what is missing and how to get it.
"""

import argparse
import pathlib

from packedconv.evidence import instructions
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument(
        "--out", required=True, help="table to write; .csv, .md and .tex lie beside one another"
    )
    arguments = parser.parse_args()
    frame = instructions.table(arguments.root, instructions.tile_choices(arguments.root))
    write_table(
        frame,
        arguments.out,
        "Instructions of the CUDA kernels' loop over nonzeros",
        "tab:instructions",
        shown=instructions.shown(frame),
        notes=instructions.notes(frame),
        column_format={"Others in the loop": "p{5cm}", "Picked for": "p{3cm}", "Reason": "p{12cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
