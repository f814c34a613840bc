"""Figure 8: maximum absolute error of the sparse convolution against dense PyTorch.

Two readings, both drawn: with the packed (FP16) weights on both sides, where only the order
of summation differs (solid), and with the original FP32 weights on the dense side, where
quantisation to FP16 is included (dashed). The paper prints only the ticks of its error axes.
"""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence.samples import Results, dense_reference
from packedconv.plots.arguments import figure_parser
from packedconv.plots.save import save_figure
from packedconv.plots.series import printed_ticks, series_figure
from packedconv.plots.source import Source, load_source, with_printed
from packedconv.script import run

COLUMNS = ["layer", "out_channels", "sparsity", "weights", "max_abs_error"]
KINDS = (
    ("original", "original weights:\nFP16 quantisation\nincluded", "--"),
    ("packed", "packed weights on\nboth sides: order of\nsummation alone", "-"),
)


def measure(results: Results) -> pd.DataFrame:
    errors = results.errors
    chosen = (errors["implementation"] == "sparse") & (
        errors["reference"] == dense_reference(errors)
    )
    if not chosen.any():
        raise ValueError(
            f"{results.folder}/errors.csv: expected rows of implementation sparse against "
            "reference dense, got none; check again"
        )
    return errors[chosen][COLUMNS]


def draw(source: Source) -> tuple[Figure, pd.DataFrame]:
    data = with_printed(source, source.measured(measure), COLUMNS, "max_abs_error")
    figure, axes = series_figure(
        source,
        data,
        "max_abs_error",
        "Maximum absolute error",
        KINDS,
        kind_column="weights",
        error_bars=False,
        lines=[
            "Maximum over all outputs of one input, against dense PyTorch in FP32 (on a GPU with "
            "TF32 off)."
        ],
    )
    axes.set_yscale("log")
    if data.empty:
        printed_ticks(axes, source)
    return figure, data


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    figure, data = draw(load_source(options, figure=8))
    save_figure(figure, data, options.out)


if __name__ == "__main__":
    run(main)
