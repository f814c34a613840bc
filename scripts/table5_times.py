"""Table 5: measured minutes of each step beside the printed."""

from packedconv.evidence import published, tables
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument(
        "--steps",
        nargs="*",
        default=[],
        metavar="CSV",
        help="results/<device>/<run>/steps.csv, one or more",
    )
    arguments = parser.parse_args()
    frame = tables.table5(published.load(arguments.paper), arguments.steps)
    write_table(
        frame,
        arguments.out,
        "Table 5: reproduction time, printed for the paper's artifact and measured for this one",
        "tab:table5",
        shown=tables.shown_table5(frame),
        notes=tables.table5_notes(frame),
    )


if __name__ == "__main__":
    run(main)
