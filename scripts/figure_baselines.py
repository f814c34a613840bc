"""Every way to compute a layer on a CPU beside the others, with the memory that each takes."""

import argparse

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.baselines import baselines
from packedconv.plots.extended.baselines import baselines_figure
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
    table = baselines(experiments)
    save_figure(baselines_figure(experiments, table), table, options.out)


if __name__ == "__main__":
    run(main)
