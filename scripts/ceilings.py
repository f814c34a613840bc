"""Measure the ceilings of the device: FP32 FMA peak and memory bandwidth."""

from packedconv.bench.steps import ceilings
from packedconv.script import run, settings_parser
from packedconv.settings import load_settings


def main() -> None:
    parser = settings_parser(__doc__)
    parser.add_argument("--stamp", required=True, help="stamp of the built extension, .json")
    parser.add_argument("--out", required=True, help="ceilings to write, .csv")
    parser.add_argument("--facts", required=True, help="facts to write, .json")
    options = parser.parse_args()
    ceilings(load_settings(options.settings), options.stamp, options.out, options.facts)


if __name__ == "__main__":
    run(main)
