"""The paper's statements, each with a verdict (figures/claims.csv, .md and .tex)."""

from packedconv.evidence import claims, published
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.samples import Results
from packedconv.evidence.tabular import write_table
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
    write_table(
        table,
        options.out,
        "Statements of the paper and what became of them",
        "tab:claims",
        shown=claims.shown(table, options.device),
        preamble=claims.preamble(paper, table, results, options.device),
        column_format=claims.column_formats(options.device),
        long=True,
    )


if __name__ == "__main__":
    run(main)
