"""The command line that the table scripts share."""

import argparse


def table_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--paper` and `--out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--paper", required=True, help="config/paper.yaml")
    parser.add_argument(
        "--out", required=True, help="table to write; .csv, .md and .tex lie beside one another"
    )
    return parser
