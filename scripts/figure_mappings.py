"""Every mapping of the paper's kernel by counts; no GPU is needed, and nothing is timed.

Instructions, bank conflicts, imbalance, shared memory and occupancy, from config/devices and the
table of instructions.
"""

import argparse
import pathlib

from packedconv.evidence import instructions
from packedconv.evidence.extended.mappings import devices, mapping_table
from packedconv.plots.extended.mappings import mappings_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--instructions", required=True, help="figures/instructions.csv")
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    counts = instructions.read_table(options.instructions)
    table = mapping_table(options.root, counts)
    save_figure(mappings_figure(table, counts, devices(options.root)), table, options.out)


if __name__ == "__main__":
    run(main)
