"""Time one layer of an experiment beyond the paper on a CPU."""

import importlib

from packedconv.bench.cpu_steps import write_measured
from packedconv.extended import EXPERIMENTS
from packedconv.script import experiment_parser, run
from packedconv.settings import load_settings


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--name", required=True, choices=EXPERIMENTS, help="of the experiment")
    parser.add_argument("--trained", help="weights of a pruned network, .npz, which masks takes")
    options = parser.parse_args()
    more = {} if options.trained is None else {"trained": options.trained}
    write_measured(
        load_settings(options.settings),
        options.experiment,
        options.stamp,
        options.out,
        options.facts,
        # Imported where it is needed: it imports torch, which must not come before the lock.
        lambda *arguments: importlib.import_module(
            f"packedconv.bench.extended.{options.name}"
        ).measure(*arguments, **more),
    )


if __name__ == "__main__":
    run(main)
