"""Measure the ceilings of the device: FP32 FMA peak and memory bandwidth."""

from packedconv.bench.samples_file import CEILING_COLUMNS, format_csv, write_text
from packedconv.bench.script import run, settings_parser
from packedconv.bench.settings import load_settings
from packedconv.bench.steps import ceilings


def main() -> None:
    parser = settings_parser(__doc__)
    parser.add_argument("--out", required=True, help="ceilings to write, .csv")
    options = parser.parse_args()
    rows = ceilings(load_settings(options.settings))
    write_text(options.out, format_csv(rows, CEILING_COLUMNS))


if __name__ == "__main__":
    run(main)
