"""The machine behind a run, by the facts beside its measurements (machine.csv, .md, .tex)."""

import argparse

from packedconv.evidence import machine
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="table to write, .csv")
    options = parser.parse_args()
    table = machine.machine(options.results)
    write_table(
        table,
        options.out,
        f"The machine behind run {table['run'][0]} on device {table['device'][0]}",
        "tab:machine",
        shown=machine.shown(table),
        notes=[
            "Before this table was written, every CSV file of the run was compared with the "
            "SHA-256 in the facts beside it, and samples.csv and errors.csv with their layers"
        ],
        column_format={"Fact": "p{4cm}", "Value": "p{9cm}", "File": "p{3cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
