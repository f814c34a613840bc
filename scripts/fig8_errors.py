"""Figure 8: maximum absolute error of the sparse convolution against dense PyTorch.

Two readings, both drawn: with the packed (FP16) weights on both sides, where only the order
of summation differs (solid), and with the original FP32 weights on the dense side, where
quantisation to FP16 is included (dashed). The paper prints only the ticks of its error axes.
"""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence.samples import Results, against_dense
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
    chosen = against_dense(results.errors)
    if chosen.empty:
        raise ValueError(
            f"{results.folder}/errors.csv: expected rows of implementation sparse against "
            "reference dense, got none; check again"
        )
    return chosen[COLUMNS]


def references(source: Source) -> list[str]:
    """What the dense side is on a GPU, in sentences."""
    lines = []
    for results in source.results:
        if results.settings["device"]["kind"] == "cpu":
            continue
        chosen = against_dense(results.errors)
        default = sorted(set(chosen.loc[chosen["reference"] == "dense", "out_channels"]))
        if default:
            channels = ", ".join(map(str, default))
            lines.append(
                f"{results.device}, OC {channels}: against PyTorch's default, which allows TF32; "
                "its FP32 convolution did not run."
            )
        if len(default) < chosen["out_channels"].nunique():
            lines.append(
                f"{results.device}: the FP32 convolution's algorithm was benchmarked anew, and "
                "may not be the timed one."
            )
    return lines


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
            "TF32 off).",
            *references(source),
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
