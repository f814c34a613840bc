"""Time one layer beside MNN: packedconv, PyTorch's best dense convolution, and MNN's best."""

from packedconv.bench.peers import peers
from packedconv.script import layer_parser, run
from packedconv.settings import load_settings


def main() -> None:
    parser = layer_parser(__doc__)
    parser.add_argument("--stamp", required=True, help="stamp of the built extension, .json")
    parser.add_argument("--out", required=True, help="samples to write, .csv")
    parser.add_argument("--facts", required=True, help="facts to write, .json")
    options = parser.parse_args()
    peers(
        load_settings(options.settings),
        options.layer,
        options.stamp,
        options.out,
        options.facts,
    )


if __name__ == "__main__":
    run(main)
