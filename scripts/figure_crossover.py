"""Speedup over sparsity and layer, the line where it reaches 1, and the calibration (.json)."""

import pathlib

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.crossover import crossover_table, fit_crossover
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.crossover import crossover_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = crossover_table(experiments)
    calibration = fit_crossover(experiments)
    save_figure(crossover_figure(experiments, table), table, options.out)
    calibration.save(str(pathlib.Path(options.out).with_suffix(".json")))


if __name__ == "__main__":
    run(main)
