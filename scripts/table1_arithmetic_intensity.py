"""Table 1: arithmetic intensity of sparse direct convolution, recomputed beside the printed."""

from packedconv.evidence import published, tables
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    arguments = table_parser(__doc__).parse_args()
    paper = published.load(arguments.paper)
    write_table(
        tables.table1(paper),
        arguments.out,
        f"Table 1: {paper.tables['table1']['title']}, printed and recomputed",
        "tab:table1",
        shown=tables.shown_table1(paper),
        notes=tables.agreement_notes(paper, "table1"),
    )


if __name__ == "__main__":
    run(main)
