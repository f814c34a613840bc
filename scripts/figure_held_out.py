"""What `packedconv.advise` expects of layers that it has not seen, against measurement."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.crossover import fit_crossover, sample_paths
from packedconv.evidence.extended.held_out import held_out_table, require_disjoint, score
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.held_out import held_out_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    seen = load_experiments(options.results, sample_paths(options.results))
    require_disjoint(experiments, seen)
    calibration = fit_crossover(seen)
    table = held_out_table(experiments, calibration)
    figure = held_out_figure(experiments, calibration, table, score(table))
    save_figure(figure, table, options.out)


if __name__ == "__main__":
    run(main)
