"""Timing the sparse convolution beside PyTorch's fastest dense layout, over the sparsities."""

from packedconv.bench.cpu_experiments import Facts, Row, measure_layer
from packedconv.bench.experiment import Experiment
from packedconv.settings import Settings


def measure(settings: Settings, experiment: Experiment, threads: int) -> tuple[list[Row], Facts]:
    """Rows and facts of one layer, as a row of the tables of layers has them.

    Raises CheckError when an output is wrong.
    """
    both = experiment._replace(contenders=["sparse", "dense"])
    return measure_layer(settings, both, threads)
