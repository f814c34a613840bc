#!/usr/bin/env python3
"""Write the results of a run as one file, which scripts/import_results takes elsewhere."""

import argparse

from packedconv import bundle
from packedconv.script import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument("--out", required=True, help="bundle to write, .tar.gz")
    options = parser.parse_args()
    manifest = bundle.pack(options.results, options.out)
    print(
        "{}: {} files of run {} on device {}".format(
            options.out, len(manifest["files"]), manifest["run"], manifest["device"]
        )
    )


if __name__ == "__main__":
    run(main)
