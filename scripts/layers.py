"""Time one layer of the tables layers and layers_cold on a CPU."""

from packedconv.bench.cpu_steps import layers
from packedconv.script import experiment_parser, run
from packedconv.settings import load_settings


def main() -> None:
    options = experiment_parser(__doc__).parse_args()
    layers(
        load_settings(options.settings),
        options.experiment,
        options.stamp,
        options.out,
        options.facts,
    )


if __name__ == "__main__":
    run(main)
