"""Table 6: the software that the paper requires beside what is installed here."""

from packedconv.evidence import published, tables
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    arguments = table_parser(__doc__).parse_args()
    frame = tables.table6(published.load(arguments.paper))
    write_table(
        frame,
        arguments.out,
        "Table 6: software that the paper requires on an A100, and what is installed here",
        "tab:table6",
        shown=frame.rename(
            columns={
                "software": "Software",
                "required": "Required in the paper",
                "found": "Found here",
                "met": "Met",
                "needed_on_cpu": "Needed here on a CPU",
            }
        ),
        notes=[
            "The CPU path needs none of the paper's versions; an unmet requirement is no fault",
            "A printed version is met by the same major and minor version",
        ],
    )


if __name__ == "__main__":
    run(main)
