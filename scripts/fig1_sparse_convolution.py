"""Figure 1: sparse convolution with sparse weights, from a real small layer."""

from packedconv.plots.arguments import drawing_parser
from packedconv.plots.convolution import convolution_table, draw_convolution
from packedconv.plots.example import EXAMPLE, example_image, example_weight
from packedconv.plots.save import save_figure
from packedconv.script import run


def main(arguments: list[str] | None = None) -> None:
    options = drawing_parser(__doc__).parse_args(arguments)
    image, weight = example_image(), example_weight()
    figure = draw_convolution(image, weight, EXAMPLE.padding)
    save_figure(figure, convolution_table(image, weight, EXAMPLE.padding), options.out)


if __name__ == "__main__":
    run(main)
