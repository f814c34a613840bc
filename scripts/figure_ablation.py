"""Ablation on a GPU: time of every mapping of the paper's kernel, per layer and sparsity."""

import argparse

from packedconv.evidence.experiments import load_ablation
from packedconv.plots.experiments import ablation_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="figure to write, .pdf")
    options = parser.parse_args()
    experiment = load_ablation(options.results)
    save_figure(ablation_figure(experiment), experiment.table, options.out)


if __name__ == "__main__":
    run(main)
