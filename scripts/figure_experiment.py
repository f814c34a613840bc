"""Figure of an experiment on a GPU: the ablation over mappings, or the fixed cost."""

import argparse

from packedconv.evidence.experiments import load_ablation, load_fixed_cost
from packedconv.plots.experiments import ablation_figure, fixed_cost_figure
from packedconv.plots.save import save_figure
from packedconv.script import run

EXPERIMENTS = {
    "ablation": (load_ablation, ablation_figure),
    "fixed_cost": (load_fixed_cost, fixed_cost_figure),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", required=True, choices=EXPERIMENTS)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    load, draw = EXPERIMENTS[options.experiment]
    experiment = load(options.results)
    save_figure(draw(experiment), experiment.table, options.out)


if __name__ == "__main__":
    run(main)
