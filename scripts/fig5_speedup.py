"""Figure 5: speedup of the sparse convolution over PyTorch's dense one, against sparsity.

One line per number of output channels; error bars are the standard error of the mean over
rounds of the ratio dense time / sparse time. Values printed in the paper are hollow.
"""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence import statistics
from packedconv.evidence.samples import Results
from packedconv.plots.arguments import figure_parser
from packedconv.plots.save import save_figure
from packedconv.plots.series import series_figure
from packedconv.plots.source import Source, load_source, with_printed
from packedconv.script import run

COLUMNS = ["layer", "out_channels", "sparsity", "speedup", "sem", "rounds"]


def measure(results: Results) -> pd.DataFrame:
    return statistics.speedups(results.samples).rename(columns={"mean": "speedup"})[COLUMNS]


def draw(source: Source) -> tuple[Figure, pd.DataFrame]:
    data = with_printed(source, source.measured(measure), COLUMNS, "speedup")
    figure, axes = series_figure(source, data, "speedup", "Speedup over PyTorch")
    axes.axhline(1, color="#222222", linewidth=0.8, linestyle=":", zorder=1)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.95), max(high, 1.05))
    return figure, data


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    figure, data = draw(load_source(options, figure=5))
    save_figure(figure, data, options.out)


if __name__ == "__main__":
    run(main)
