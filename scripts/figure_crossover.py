"""Speedup over sparsity and size of the layer, with the line where it reaches 1."""

import argparse
import pathlib

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.crossover import crossover_table, fit_crossover
from packedconv.plots.extended.crossover import crossover_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument(
        "--out",
        required=True,
        help="figure to write, .pdf; beside it the calibration for packedconv.advise, .json",
    )
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = crossover_table(experiments)
    calibration = fit_crossover(experiments)
    save_figure(crossover_figure(experiments, table), table, options.out)
    calibration.save(str(pathlib.Path(options.out).with_suffix(".json")))


if __name__ == "__main__":
    run(main)
