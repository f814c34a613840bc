"""Lower bounds of the sparse convolution's time on a GPU: nothing is measured.

For every point of Figure 5: memory, shared-memory and issue floors, and the bounds of the column
kernel and of the paper's, from config/devices and the table of instructions; beside them what
the printed throughputs imply.
"""

import argparse
import pathlib

import pandas as pd
from matplotlib.figure import Figure

from packedconv.evidence import bounds, instructions
from packedconv.evidence import published as paper
from packedconv.plots.bounds import draw_bounds
from packedconv.plots.captions import shapes
from packedconv.plots.save import save_figure
from packedconv.script import run


def draw(
    root: pathlib.Path, family: str, published: paper.Published, counts: pd.DataFrame
) -> tuple[Figure, pd.DataFrame]:
    gpu = bounds.load_gpu(root, family, published)
    layers = instructions.layers_of_device(instructions.gpu_devices(root)[family])
    # With those of Fig. 7, whose throughputs are printed.
    known = family if family in published.workloads else None
    sparsities = published.sparsities(known, (5, 7))
    data = bounds.bounds_table(gpu, layers, sparsities, counts, published)
    lines = [
        f"{shapes(layers)}. {line}" if index == 0 else line
        for index, line in enumerate(bounds.assumptions(gpu, data, counts))
    ]
    return draw_bounds(gpu.title, data, lines + bounds.implied_lines(gpu, published)), data


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--family", required=True, help="of config/devices, such as a100")
    parser.add_argument("--paper", required=True, help="config/paper.yaml")
    parser.add_argument("--instructions", required=True, help="figures/instructions.csv")
    parser.add_argument(
        "--out", required=True, help="figure to write; .pdf, .png and .csv lie beside one another"
    )
    options = parser.parse_args(arguments)
    counts = instructions.read_table(options.instructions)
    figure, data = draw(options.root, options.family, paper.load(options.paper), counts)
    save_figure(figure, data, options.out)


if __name__ == "__main__":
    run(main)
