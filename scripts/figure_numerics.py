"""Errors by cause, and what figure 8 would show against other dense baselines."""

import argparse

from packedconv.evidence import published
from packedconv.evidence.extended.numerics import load_numerics, numerics_table
from packedconv.plots.extended.numerics import numerics_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", required=True, help="config/paper.yaml")
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    found = load_numerics(options.results, published.load(options.paper))
    table = numerics_table(found)
    save_figure(numerics_figure(found, table), table, options.out)


if __name__ == "__main__":
    run(main)
