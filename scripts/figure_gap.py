"""The sparse efficiency gap of a CPU: what each cause of it takes, removed by itself."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.gap import gap
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.gap import gap_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = gap(experiments)
    save_figure(gap_figure(experiments, table), table, options.out)


if __name__ == "__main__":
    run(main)
