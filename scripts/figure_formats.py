"""Formats of a sparse weight on a CPU: bytes, conversion, time, and where each breaks even."""

import argparse
import pathlib

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.formats import break_evens, table, with_break_evens
from packedconv.plots.extended.formats import formats_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument("--out", required=True, type=pathlib.Path, help="figure to write, .pdf")
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    frame = table(experiments)
    found = break_evens(experiments, frame)
    figure = formats_figure(experiments, frame, found)
    save_figure(figure, with_break_evens(frame, found), options.out)


if __name__ == "__main__":
    run(main)
