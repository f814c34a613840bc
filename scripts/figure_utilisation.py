"""Bandwidth utilisation of matrix times vector on a CPU, beside what the paper cites."""

import argparse
import pathlib

from packedconv.evidence import published
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.utilisation import table
from packedconv.plots.extended.utilisation import utilisation_figure
from packedconv.plots.save import save_figure
from packedconv.script import run

PAPER = pathlib.Path(__file__).resolve().parents[1] / "config" / "paper.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument("--paper", default=str(PAPER), help="config/paper.yaml")
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    frame = table(experiments, published.load(options.paper))
    save_figure(utilisation_figure(experiments, frame), frame, options.out)


if __name__ == "__main__":
    run(main)
