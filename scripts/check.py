"""Check one layer's results against float64 PyTorch before anything is timed."""

from packedconv.bench.steps import check
from packedconv.script import layer_parser, run
from packedconv.settings import load_settings


def main() -> None:
    parser = layer_parser(__doc__)
    parser.add_argument("--weights", required=True, help="weights file of the layer, .npz")
    parser.add_argument("--stamp", required=True, help="stamp of the built extension, .json")
    parser.add_argument("--out", required=True, help="errors to write, .csv")
    parser.add_argument("--facts", required=True, help="facts to write, .json")
    options = parser.parse_args()
    check(
        load_settings(options.settings),
        options.layer,
        options.weights,
        options.stamp,
        options.out,
        options.facts,
    )


if __name__ == "__main__":
    run(main)
