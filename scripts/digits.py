"""Train and prune a network on scikit-learn's digits, and run it through packedconv."""

from packedconv.bench.extended.digits_step import digits
from packedconv.script import run, settings_parser
from packedconv.settings import load_settings


def main() -> None:
    parser = settings_parser(__doc__)
    parser.add_argument("--training", required=True, help="how to train and prune, in JSON")
    parser.add_argument("--stamp", required=True, help="stamp of the built extension, .json")
    parser.add_argument("--out", required=True, help="pruned weights to write, .npz")
    parser.add_argument("--facts", required=True, help="facts to write, .json")
    options = parser.parse_args()
    digits(
        load_settings(options.settings),
        options.training,
        options.stamp,
        options.out,
        options.facts,
    )


if __name__ == "__main__":
    run(main)
