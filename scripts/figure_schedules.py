"""The schedules of a CPU's plans by time, and how far the plan's own choice is from the best."""

import argparse

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.schedules import regret_table, schedule_table, with_regrets
from packedconv.plots.extended.schedules import schedules_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = schedule_table(experiments)
    regrets = regret_table(experiments, table)
    figure = schedules_figure(experiments, table, regrets)
    save_figure(figure, with_regrets(table, regrets), options.out)


if __name__ == "__main__":
    run(main)
