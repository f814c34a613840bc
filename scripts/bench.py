"""Time one layer, sparse and dense, with the paper's protocol."""

from packedconv.bench.steps import bench
from packedconv.script import layer_parser, log_messages, run
from packedconv.settings import load_settings


def main() -> None:
    parser = layer_parser(__doc__)
    parser.add_argument("--weights", required=True, help="weights file of the layer, .npz")
    parser.add_argument("--stamp", required=True, help="stamp of the built extension, .json")
    parser.add_argument("--out", required=True, help="samples to write, .csv")
    parser.add_argument("--facts", required=True, help="facts to write, .json")
    parser.add_argument("--force", action="store_true", help="measure again what has been measured")
    parser.add_argument("--log", help="file that messages are written to as well")
    options = parser.parse_args()
    if options.log:
        log_messages(options.log)
    bench(
        load_settings(options.settings),
        options.layer,
        options.weights,
        options.stamp,
        options.out,
        options.facts,
        options.force,
    )


if __name__ == "__main__":
    run(main)
