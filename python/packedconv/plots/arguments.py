"""The command line that the figure scripts share."""

import argparse


def drawing_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--out` alone, for drawings that need no results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--out", required=True, help="figure to write; .pdf, .png and .csv lie beside one another"
    )
    return parser


def figure_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser for a panel of the paper (`--panel --paper`) or a device (`--results` alone)."""
    parser = drawing_parser(description)
    parser.add_argument("--panel", choices=("a", "b"), help="panel of the paper: a A100, b Nano")
    parser.add_argument("--paper", help="config/paper.yaml, needed with --panel")
    parser.add_argument(
        "--results",
        nargs="*",
        default=[],
        metavar="DIR",
        help="results/<device>/<run>: with --panel those of its device family, else exactly one",
    )
    return parser


def samples_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser for an experiment on a CPU: `--results --samples --out`."""
    parser = drawing_parser(description)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    return parser
