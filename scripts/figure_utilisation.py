"""Bandwidth utilisation of matrix times vector on a CPU, beside what the paper cites."""

import pathlib

from packedconv.evidence import published
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.utilisation import table
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.utilisation import utilisation_figure
from packedconv.plots.save import save_figure
from packedconv.script import run

PAPER = pathlib.Path(__file__).resolve().parents[1] / "config" / "paper.yaml"


def main() -> None:
    parser = samples_parser(__doc__)
    parser.add_argument("--paper", default=str(PAPER), help="config/paper.yaml")
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    frame = table(experiments, published.load(options.paper))
    save_figure(utilisation_figure(experiments, frame), frame, options.out)


if __name__ == "__main__":
    run(main)
