"""Every way to compute a layer on a CPU beside the others, with the memory that each takes."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.baselines import baselines
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.baselines import baselines_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = baselines(experiments)
    save_figure(baselines_figure(experiments, table), table, options.out)


if __name__ == "__main__":
    run(main)
