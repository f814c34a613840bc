"""Figure 6: execution times of the sparse (solid) and the dense convolution (dashed).

Milliseconds against sparsity, one colour per number of output channels; mean over rounds
with its standard error. The CSV of a CPU also has the bound of each sparse point, from the
measured ceilings, and which fraction of it the median time reaches. The paper prints only the
ticks of its time axes, so its panels hold nothing else where no such device was measured.
"""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence import statistics
from packedconv.evidence.samples import Results
from packedconv.plots.arguments import figure_parser
from packedconv.plots.save import save_figure
from packedconv.plots.series import printed_ticks, series_figure
from packedconv.plots.source import Source, load_source, with_printed
from packedconv.plots.style import IMPLEMENTATIONS
from packedconv.script import run

COLUMNS = [
    *("layer", "out_channels", "sparsity", "implementation", "layout"),
    *("milliseconds", "sem", "rounds", "bound_seconds", "bound_fraction"),
]
BOUND = (
    "The CSV has the bound of the sparse convolution, max(FLOP / measured peak, bytes / measured "
    "bandwidth), and its fraction of the median time."
)
KINDS = [
    ("sparse", IMPLEMENTATIONS["sparse"], "-"),
    ("dense", IMPLEMENTATIONS["dense"], "--"),
]


def measure(results: Results) -> pd.DataFrame:
    times = statistics.times(results.samples)
    times = times.assign(milliseconds=1e3 * times["mean"], sem=1e3 * times["sem"])
    if results.settings["device"]["kind"] == "cpu":
        bounds = statistics.bound_fractions(results.samples, results.peaks)
        times = times.merge(bounds, on=["layer", "sparsity", "implementation"], how="left")
    return times.reindex(columns=COLUMNS)


def draw(source: Source) -> tuple[Figure, pd.DataFrame]:
    data = with_printed(source, source.measured(measure), COLUMNS, "milliseconds")
    lines = [BOUND] if data["bound_fraction"].notna().any() else []
    figure, axes = series_figure(
        source, data, "milliseconds", "Execution time (ms)", KINDS, lines=lines
    )
    if data.empty:
        printed_ticks(axes, source, factor=1e3)
    else:
        axes.set_ylim(bottom=0)
    return figure, data


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    figure, data = draw(load_source(options, figure=6))
    save_figure(figure, data, options.out)


if __name__ == "__main__":
    run(main)
