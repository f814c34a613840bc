"""Check one layer's results against float64 PyTorch before anything is timed."""

from packedconv.bench.samples_file import ERROR_COLUMNS, format_csv, write_text
from packedconv.bench.script import layer_parser, run
from packedconv.bench.settings import load_settings
from packedconv.bench.steps import check


def main() -> None:
    parser = layer_parser(__doc__)
    parser.add_argument("--weights", required=True, help="weights file of the layer, .npz")
    parser.add_argument("--out", required=True, help="errors to write, .csv")
    options = parser.parse_args()
    rows = check(load_settings(options.settings), options.layer, options.weights)
    write_text(options.out, format_csv(rows, ERROR_COLUMNS))


if __name__ == "__main__":
    run(main)
