"""Formats of a sparse weight on a CPU: bytes, conversion, time, and where each breaks even."""

from packedconv.evidence.cpu_experiments import load_experiments
from packedconv.evidence.extended.formats import break_evens, table, with_break_evens
from packedconv.plots.arguments import samples_parser
from packedconv.plots.extended.formats import formats_figure
from packedconv.plots.save import save_figure
from packedconv.script import run


def main() -> None:
    options = samples_parser(__doc__).parse_args()
    experiments = load_experiments(options.results, options.samples)
    frame = table(experiments)
    found = break_evens(experiments, frame)
    figure = formats_figure(experiments, frame, found)
    save_figure(figure, with_break_evens(frame, found), options.out)


if __name__ == "__main__":
    run(main)
