"""Table 2: model speedup over Winograd, recomputed beside the printed."""

from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tables import write_winograd_table
from packedconv.script import run


def main() -> None:
    arguments = table_parser(__doc__).parse_args()
    write_winograd_table(arguments.paper, "table2", arguments.out)


if __name__ == "__main__":
    run(main)
