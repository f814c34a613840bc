"""Every contender of a run on a GPU beside the sparse kernel (contenders.csv, .md and .tex)."""

import argparse

from packedconv.evidence import contenders
from packedconv.evidence.samples import Results
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="table to write, .csv")
    options = parser.parse_args()
    results = Results.load(options.results)
    table = contenders.contenders(results)
    write_table(
        table,
        options.out,
        f"Contenders on {results.title}",
        "tab:contenders",
        shown=contenders.shown(table),
        preamble=contenders.preamble(results),
        notes=contenders.NOTES,
        column_format={"ms": "p{4cm}", "Kernels": "p{10cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
