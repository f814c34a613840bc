"""The schedules of a CPU's plans by time, and how far the plan's own choice is from the best."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.schedules import regret_table, schedule_table, with_regrets
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.schedules import schedules_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = schedule_table(experiments)
    regrets = regret_table(experiments, table)
    figure = schedules_figure(experiments, table, regrets)
    save_figure(figure, with_regrets(table, regrets), options.out)


if __name__ == "__main__":
    run(main)
