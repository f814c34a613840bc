"""What the places of the nonzeros do to time: uniform, patterned and trained masks."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.masks import masks
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.masks import masks_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    table = masks(experiments)
    save_figure(masks_figure(experiments, table), table, options.out)


if __name__ == "__main__":
    run(main)
