"""Make the fixed-seed sparse weights of one layer, and their manifest."""

from packedconv.script import layer_parser, run
from packedconv.settings import find_layer, load_settings
from packedconv.weights import make_weights, manifest, save_manifest, save_weights


def main() -> None:
    parser = layer_parser(__doc__)
    parser.add_argument("--out", required=True, help="weights file to write, .npz")
    parser.add_argument("--manifest", required=True, help="manifest to write, .json")
    options = parser.parse_args()
    settings = load_settings(options.settings)
    layer = find_layer(settings, options.layer)
    weights = make_weights(settings, layer)
    save_weights(options.out, weights)
    save_manifest(options.manifest, manifest(settings, layer, weights))


if __name__ == "__main__":
    run(main)
