"""Time one layer beside MNN: packedconv, PyTorch's best dense convolution, and MNN's best."""

from packedconv.bench.peers import peers
from packedconv.script import experiment_parser, run
from packedconv.settings import load_settings


def main() -> None:
    options = experiment_parser(__doc__).parse_args()
    peers(
        load_settings(options.settings),
        options.experiment,
        options.stamp,
        options.out,
        options.facts,
    )


if __name__ == "__main__":
    run(main)
