"""Fixed cost on a GPU: time against nonzeros down to none, and its parts timed apart."""

import argparse

from packedconv.evidence.experiments import load_fixed_cost
from packedconv.plots.experiments import fixed_cost_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    experiment = load_fixed_cost(options.results)
    save_figure(fixed_cost_figure(experiment), experiment.table, options.out)


if __name__ == "__main__":
    run(main)
