"""packedconv beside MNN and PyTorch's best dense convolution (peers.csv, .md and .tex)."""

import argparse

from packedconv.evidence import peers
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument("--out", required=True, help="table to write, .csv")
    options = parser.parse_args()
    results = load_experiments(options.results, options.samples)
    table = peers.table(results)
    write_table(
        table,
        options.out,
        f"packedconv and MNN on {results.title}",
        "tab:peers",
        shown=peers.shown(table),
        preamble=peers.preamble(results, table),
        notes=peers.notes(results),
        column_format={"ms": "p{4cm}", "Settings": "p{10cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
