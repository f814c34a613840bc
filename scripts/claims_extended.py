"""Statements that experiments beyond the paper bear on (figures/<device>/claims_extended.csv)."""

import pandas as pd

from packedconv.evidence import claims_report, published
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.extended import claims_extended
from packedconv.script import run


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--gap", required=True, help="figures/<device>/gap.csv")
    parser.add_argument("--utilisation", required=True, help="figures/<device>/utilisation.csv")
    parser.add_argument("--device", required=True, help="device that they are of")
    options = parser.parse_args()
    paper = published.load(options.paper)
    table = claims_extended.claims_extended(
        paper, pd.read_csv(options.gap), pd.read_csv(options.utilisation), options.device
    )
    claims_report.write(
        table,
        options.out,
        claims_extended.CAPTION,
        "tab:claims_extended",
        lambda link: claims_report.statements(table, options.device, link),
        claims_extended.preamble(paper, options.device),
        claims_report.column_formats(options.device),
    )


if __name__ == "__main__":
    run(main)
