"""Table 4: the paper's artifacts, the elements they produce, and the files of this repository."""

from packedconv.evidence import published, tables
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    arguments = table_parser(__doc__).parse_args()
    paper = published.load(arguments.paper)
    frame = tables.table4(paper)
    write_table(
        frame,
        arguments.out,
        f"Table 4: {paper.tables['table4']['title']} of the paper, and where this repository "
        "has them",
        "tab:table4",
        shown=frame.rename(
            columns={
                "artifact": "Artifact",
                "contribution": "Contr.",
                "paper_element": "Paper element",
                "files": "Files here",
                "targets": "Targets",
            }
        ),
        notes=["Figures 1, 3 and 4 are drawings: nothing is measured for them"],
        column_format="p{3cm}rp{2.5cm}p{5cm}p{3.5cm}",
    )


if __name__ == "__main__":
    run(main)
