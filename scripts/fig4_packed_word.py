"""Figure 4: the packed words and the offsets of a real small weight."""

from packedconv.packed import pack_array
from packedconv.plots.arguments import drawing_parser
from packedconv.plots.example import example_weight
from packedconv.plots.packed_word import draw_packed_word, packed_word_table
from packedconv.plots.save import save_figure
from packedconv.script import run


def main(arguments: list[str] | None = None) -> None:
    options = drawing_parser(__doc__).parse_args(arguments)
    packed = pack_array(example_weight())
    save_figure(draw_packed_word(packed), packed_word_table(packed), options.out)


if __name__ == "__main__":
    run(main)
