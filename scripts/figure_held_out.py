"""What `packedconv.advise` expects of layers that it has not seen, against measurement."""

import argparse

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.crossover import fit_crossover, sample_paths
from packedconv.evidence.extended.held_out import held_out_table, require_disjoint, score
from packedconv.plots.extended.held_out import held_out_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results",
        required=True,
        metavar="DIR",
        help="results/<device>/<run>, with the crossover's samples, which the model is fitted to",
    )
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    seen = load_experiments(options.results, sample_paths(options.results))
    require_disjoint(experiments, seen)
    calibration = fit_crossover(seen)
    table = held_out_table(experiments, calibration)
    figure = held_out_figure(experiments, calibration, table, score(table))
    save_figure(figure, table, options.out)


if __name__ == "__main__":
    run(main)
