"""The AD/AE appendix of this artifact, with the measured times (figures/appendix.md and .tex)."""

import argparse

from packedconv.evidence import appendix, published
from packedconv.evidence.samples import Results
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", required=True, help="config/paper.yaml")
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--steps", nargs="*", default=[], metavar="CSV", help="steps.csv of the results"
    )
    parser.add_argument("--claims", required=True, metavar="CSV", help="claims.csv of the results")
    parser.add_argument(
        "--figures", default="figures", help="folder that the run is rendered into, for the text"
    )
    parser.add_argument("--out", required=True, help="appendix to write, .md; .tex lies beside it")
    options = parser.parse_args()
    appendix.write(
        published.load(options.paper),
        Results.load(options.results),
        options.steps,
        options.claims,
        options.out,
        options.figures,
    )


if __name__ == "__main__":
    run(main)
