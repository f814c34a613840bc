"""The digits network: accuracy dense, pruned and through packedconv (digits.csv, .md, .tex)."""

import argparse

from packedconv.evidence.extended import digits
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--facts", required=True, help="facts of the network, .json")
    parser.add_argument("--out", required=True, help="table to write, .csv")
    options = parser.parse_args()
    facts = digits.load_digits_facts(options.results, options.facts)
    table = digits.digits(facts)
    write_table(
        table,
        options.out,
        "A network on scikit-learn's digits, pruned and through packedconv",
        "tab:digits",
        shown=digits.shown(table),
        preamble=digits.preamble(facts),
        notes=digits.notes(table),
    )


if __name__ == "__main__":
    run(main)
