"""Two sets of results side by side: a figure of both (.pdf, .png, .csv), or the table of ratios
(.csv, .md, .tex)."""

import argparse

from packedconv.evidence import published
from packedconv.evidence.compare import ratios, side, speedups
from packedconv.evidence.tabular import write_table
from packedconv.plots.compare import rooflines, series
from packedconv.plots.save import save_figure
from packedconv.script import run

FIGURES = {
    "fig2": rooflines.draw_models,
    "fig5": series.draw_speedups,
    "fig6": series.draw_times,
    "fig7": rooflines.draw_measured_rooflines,
    "fig8": series.draw_errors,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--left", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--right", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--paper", required=True, help="config/paper.yaml, which says how far runs lie apart"
    )
    parser.add_argument("--figure", choices=FIGURES, help="without it, the table of ratios")
    parser.add_argument("--out", required=True, help="figure (.pdf) or table (.csv) to write")
    options = parser.parse_args()
    between_runs = published.load(options.paper).judging["between_runs"]
    sides = (side.load_side(options.left), side.load_side(options.right))
    comparison = ratios.compare(*sides, between_runs)
    if options.figure:
        save_figure(*FIGURES[options.figure](comparison), options.out)
        return
    write_table(
        comparison.table,
        options.out,
        speedups.caption(comparison),
        "tab:compare",
        shown=speedups.shown(comparison),
        preamble=speedups.preamble(comparison),
        notes=speedups.NOTES,
        column_format={"Left": "p{5cm}", "Right": "p{5cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
