"""Table 6: the software that the paper requires beside what is installed here."""

from packedconv.evidence import published, tables
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument(
        "--facts",
        metavar="JSON",
        help="facts of a layer that was measured elsewhere, instead of the software at hand",
    )
    arguments = parser.parse_args()
    elsewhere = arguments.facts is not None
    found = tables.recorded_versions(arguments.facts) if elsewhere else tables.found_versions()
    frame = tables.table6(published.load(arguments.paper), found)
    where = "there" if elsewhere else "here"
    write_table(
        frame,
        arguments.out,
        "Table 6: software that the paper requires on an A100, and what "
        + ("the measured machine had" if elsewhere else "is installed here"),
        "tab:table6",
        shown=frame.rename(
            columns={
                "software": "Software",
                "required": "Required in the paper",
                "found": f"Found {where}",
                "met": "Met",
                "needed_on_cpu": "Needed here on a CPU",
            }
        ),
        notes=[
            "The CPU path needs none of the paper's versions; an unmet requirement is no fault",
            "A printed version is met by the same major and minor version",
            *(
                ["What the facts of the measurement do not hold was not recorded"]
                if elsewhere
                else []
            ),
        ],
    )


if __name__ == "__main__":
    run(main)
