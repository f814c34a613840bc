"""Figure 3: mapping of an output tile to a warp, from the configuration of the CUDA kernel."""

from packedconv.plots.arguments import drawing_parser
from packedconv.plots.mapping import draw_mapping, mapping_table
from packedconv.plots.save import save_figure
from packedconv.script import run


def main(arguments: list[str] | None = None) -> None:
    options = drawing_parser(__doc__).parse_args(arguments)
    from packedconv import _core

    config = _core.mapping_config()
    save_figure(draw_mapping(config), mapping_table(config), options.out)


if __name__ == "__main__":
    run(main)
