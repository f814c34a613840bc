"""Figure 7: throughput counted on the nonzeros, under the roofs of the device.

For the largest number of output channels: sparse (circles) and dense (squares), mean over
rounds with its standard error, at the arithmetic intensity of equations 7 and 8. A panel
of the paper has the printed roofs and hollow printed values; the figure of a device has
its measured ceilings.
"""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence import statistics
from packedconv.evidence.samples import Results
from packedconv.plots.arguments import figure_parser
from packedconv.plots.measured_roofline import (
    draw_measured_roofline,
    shown_channels,
    with_intensities,
)
from packedconv.plots.save import save_figure
from packedconv.plots.source import Source, load_source, with_printed
from packedconv.script import run

COLUMNS = [
    *("layer", "out_channels", "sparsity", "implementation", "arithmetic_intensity"),
    *("gflops", "sem", "rounds"),
]


def measure(results: Results) -> pd.DataFrame:
    return statistics.throughputs(results.samples).rename(columns={"mean": "gflops"})[COLUMNS]


def draw(source: Source) -> tuple[Figure, pd.DataFrame]:
    source = source.with_channels(shown_channels(source))
    data = with_printed(source, source.measured(measure), COLUMNS, "gflops")
    data = with_intensities(source, data)
    return draw_measured_roofline(source, data), data


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    figure, data = draw(load_source(options, figure=7))
    save_figure(figure, data, options.out)


if __name__ == "__main__":
    run(main)
