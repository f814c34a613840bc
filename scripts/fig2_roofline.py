"""Figure 2: roofline of a device with the sparse convolution at every sparsity.

A model, nothing is timed: points lie on the roofs at the arithmetic intensity of
equations 7 and 8. A panel of the paper takes the printed roofs and the layer of Table 1;
the figure of a device takes its measured ceilings and its own layers.
"""

import pandas as pd
from matplotlib.figure import Figure

from packedconv.plots.arguments import figure_parser
from packedconv.plots.captions import shapes
from packedconv.plots.roofline import measured_device
from packedconv.plots.roofline_model import draw_model, model_table
from packedconv.plots.save import save_figure
from packedconv.plots.source import Source, load_source
from packedconv.script import run


def draw(source: Source) -> tuple[Figure, pd.DataFrame]:
    if source.panel is not None:
        device = source.published.device(source.family)
        layers = [source.published.table1_layer()]
        sparsities = source.published.tables["table1"]["sparsities"]
        caption = "Roofs as printed in the paper (section 4)"
    else:
        results = source.results[0]
        device = measured_device(results)
        layers = list(results.layers.values())
        sparsities = results.settings["sparsities"]
        caption = f"Roofs measured, device {results.device}"
        if "peak_of" in results.peaks:
            caption += f"; peak: {results.peaks['peak_of']}"
        else:
            caption += f", {results.peaks['threads']} threads"
    data = model_table(device, layers, sparsities)
    channels = ", ".join(str(layer.out_channels) for layer in layers)
    lines = [
        f"{caption}. Model: {shapes(layers)}, OC = {channels}; equations\u00a07\u00a0and\u00a08."
    ]
    return draw_model(source.title, device, data, lines), data


def main(arguments: list[str] | None = None) -> None:
    options = figure_parser(__doc__).parse_args(arguments)
    figure, data = draw(load_source(options, figure=2))
    save_figure(figure, data, options.out)


if __name__ == "__main__":
    run(main)
