"""packedconv beside MNN and PyTorch's best dense convolution (peers.csv, .md and .tex)."""

import argparse

from packedconv.evidence import peers
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--layers", required=True, nargs="+", help="their names, in order")
    parser.add_argument("--out", required=True, help="table to write, .csv")
    options = parser.parse_args()
    results = peers.load(options.results, options.layers)
    table = peers.table(results)
    write_table(
        table,
        options.out,
        f"packedconv and MNN on {results.title}",
        "tab:peers",
        shown=peers.shown(table),
        preamble=peers.preamble(results, table),
        notes=peers.NOTES,
        column_format={"ms": "p{4cm}", "Settings": "p{10cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
