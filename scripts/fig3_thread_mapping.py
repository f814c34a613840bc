"""Figure 3: mapping of an output tile to a warp, from the configuration of the CUDA kernel."""

from packedconv.plots.arguments import drawing_parser, run
from packedconv.plots.mapping import draw_mapping, mapping_table
from packedconv.plots.save import save_figure


def main(arguments: list[str] | None = None) -> None:
    options = drawing_parser(__doc__).parse_args(arguments)
    try:
        from packedconv import _core
    except ImportError as error:
        raise ImportError(f"{error}; build the extension: snakemake --cores 1 build") from None
    config = _core.mapping_config()
    save_figure(draw_mapping(config), mapping_table(config), options.out)


if __name__ == "__main__":
    run(main)
