"""Tables of layers on a CPU, warm and cold: speedup, fraction of the bound, plan (.csv, .md, .tex).

Medians over rounds; the layers are those of the samples named, in their order.
"""

import argparse
import json

from packedconv.evidence import layer_table
from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.tabular import write_table
from packedconv.script import run

CAPTIONS = {
    "layers": "Layers with warm caches",
    "layers_cold": "Layers with inputs and outputs out of the caches",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", required=True, choices=CAPTIONS)
    parser.add_argument("--results", required=True, metavar="DIR", help="results/<device>/<run>")
    parser.add_argument(
        "--samples", required=True, nargs="+", metavar="CSV", help="one file per layer"
    )
    parser.add_argument(
        "--titles", required=True, type=json.loads, help="of the layers' parts, by name, in JSON"
    )
    parser.add_argument("--out", required=True, help="table to write, .csv")
    options = parser.parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = layer_table.layer_table(experiments, options.titles)
    write_table(
        table,
        options.out,
        f"{CAPTIONS[options.table]}, {experiments.title}",
        f"tab:{options.table.replace('_', '-')}",
        shown=layer_table.shown(table),
        preamble=layer_table.preamble(experiments),
        notes=[*layer_table.findings(table), *layer_table.notes(experiments)],
        column_format={"Plan": "p{4cm}", "Layer": "p{4cm}"},
        long=True,
    )


if __name__ == "__main__":
    run(main)
