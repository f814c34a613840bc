"""The ladder of a CPU: what each idea bought, from Algorithm 1 as it stands to the plan."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.ladder import ladder
from packedconv.plots.arguments import samples_parser
from packedconv.plots.ladder import ladder_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = ladder(experiments)
    save_figure(ladder_figure(experiments, table), table, options.out)


if __name__ == "__main__":
    run(main)
