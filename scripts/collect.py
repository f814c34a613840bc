"""Put the layers of a run together and reduce the device's peaks."""

import argparse

from packedconv.collect import collect
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    several = {"nargs": "+", "required": True}
    parser.add_argument("--bench", metavar="CSV", help="samples, one file per layer", **several)
    parser.add_argument("--facts", metavar="JSON", help="facts, in the same order", **several)
    parser.add_argument("--checks", metavar="CSV", help="errors, one file per layer", **several)
    parser.add_argument("--ceilings", metavar="CSV", required=True)
    parser.add_argument("--ceilings-facts", metavar="JSON", required=True)
    parser.add_argument("--out", required=True, help="samples of the run to write, .csv")
    parser.add_argument("--errors", required=True, help="errors of the run to write, .csv")
    parser.add_argument("--peaks", required=True, help="peaks of the device to write, .json")
    options = parser.parse_args()
    collect(
        options.bench,
        options.facts,
        options.checks,
        options.ceilings,
        options.ceilings_facts,
        options.out,
        options.errors,
        options.peaks,
    )


if __name__ == "__main__":
    run(main)
