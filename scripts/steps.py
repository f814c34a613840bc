#!/usr/bin/env python3
"""Add up what Snakemake timed to the steps of the paper's table 5."""

import argparse
import csv
import json
import pathlib

from packedconv.files import atomic_write
from packedconv.script import run


def benchmark_seconds(paths: list[pathlib.Path]) -> float:
    """Wall seconds that Snakemake's benchmark files record."""
    total = 0.0
    for path in paths:
        with open(path, newline="") as file:
            total += sum(float(row["s"]) for row in csv.DictReader(file, delimiter="\t"))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setup", type=pathlib.Path, nargs="*", help="the launcher's record")
    for step in ("compilation", "benchmark", "analysis"):
        parser.add_argument(f"--{step}", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--facts", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()

    # A set-up made by hand leaves no record: that step has no row.
    rows = [("setup", json.loads(path.read_text())["seconds"]) for path in arguments.setup]
    for step in ("compilation", "benchmark", "analysis"):
        rows.append([step, benchmark_seconds(getattr(arguments, step))])
    # What the layers themselves record: a job that found its layer measured took no time.
    measuring = sum(json.loads(path.read_text())["measuring_seconds"] for path in arguments.facts)
    rows[-2][1] += measuring
    with atomic_write(arguments.out) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "seconds"))
        writer.writerows((step, f"{seconds:.3f}") for step, seconds in rows)


if __name__ == "__main__":
    run(main)
