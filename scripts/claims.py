"""The paper's statements, each with a verdict (figures/claims.csv, .md and .tex)."""

from packedconv.evidence import claims, claims_report, published
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.samples import Results
from packedconv.script import run


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument(
        "--results",
        nargs="*",
        default=[],
        metavar="DIR",
        help="results/<device>/<run>, one run per device",
    )
    parser.add_argument("--device", required=True, help="device whose results give the analogues")
    options = parser.parse_args()
    paper = published.load(options.paper)
    results = [Results.load(folder) for folder in options.results]
    table = claims.claims(paper, results, options.device)
    claims_report.write(
        table,
        options.out,
        claims_report.CAPTION,
        "tab:claims",
        lambda link: claims_report.parts(table, options.device, link),
        claims_report.preamble(paper, table, results, options.device),
        claims_report.column_formats(options.device),
    )


if __name__ == "__main__":
    run(main)
