"""A layer beside a peer: packedconv, PyTorch's best dense convolution, and MNN's best."""

import math
import typing

import numpy as np
import torch

from packedconv.bench import cpu_experiments, cpu_steps, mnn
from packedconv.bench.contenders import Contender
from packedconv.bench.experiment import Experiment
from packedconv.layer import Layer
from packedconv.settings import Settings

MNN = "mnn"

Facts = typing.Dict[str, typing.Any]


def peers(
    settings: Settings, experiment_text: str, stamp_path: str, out: str, facts_path: str
) -> None:
    """Time one layer beside MNN on a CPU; writes `out` and facts.

    Arguments and errors as in `cpu_steps.layers`, and MissingPeerError without MNN.
    """
    cpu_steps.require_cpu(settings)
    mnn.require()
    cpu_steps.write_measured(settings, experiment_text, stamp_path, out, facts_path, measure_layer)


def measure_layer(
    settings: Settings, experiment: Experiment, threads: int
) -> typing.Tuple[typing.List[typing.Dict[str, typing.Any]], Facts]:
    """Rows of samples and facts of one layer beside MNN, on `threads` threads.

    All sides compute the weights as packed. What is timed: conv2d of the input as it lies (NCHW)
    into an output that is there; PyTorch's conv2d in its fastest layout, into memory that is
    reused; runSession of MNN, whose input and output stay in its own layout. A sparsity at
    which no setting of MNN is right has no rows of it, and the reasons in facts["mnn"].
    Raises CheckError when packedconv computes wrongly.
    """
    protocol = experiment.protocol
    peer = _load_facts()
    with torch.inference_mode():
        prepared = cpu_experiments.Prepared(settings, experiment, threads)
        groups, dense = cpu_experiments.table_contenders(prepared, None)
        for key in prepared.packed:
            if peer["unavailable"] is not None:
                break
            weight = prepared.dense[key]
            setting, session, peer["sparsities"][key] = mnn.choose(
                experiment.layer,
                prepared.array,
                weight.numpy(),
                threads,
                _error(experiment.layer, prepared.image, weight),
                protocol["trial_executions"],
                protocol["warmup_executions"],
            )
            if setting is not None and session is not None:
                peer["chosen"][key] = setting.name
                groups[key].append(Contender(MNN, setting.name, session.run))
        rows, facts = prepared.measure(groups)
    return rows, dict(facts, dense=dense, **{MNN: peer})


def _load_facts() -> Facts:
    """What the facts say of MNN, before it has been given a layer."""
    facts = {"version": None, "unavailable": None, "chosen": {}, "sparsities": {}}  # type: Facts
    try:
        facts["version"] = mnn.load().version()
    except mnn.MnnError as error:
        facts["unavailable"] = str(error)
    return facts


def _error(
    layer: Layer, image: torch.Tensor, weight: torch.Tensor
) -> typing.Callable[[np.ndarray], float]:
    """The error of an output against float64, over what is allowed.

    Allowed is, for every output, what FP32 sums are for the output with the largest sum of
    |w x|: fast algorithms such as Winograd's err by what a whole tile holds.
    """
    convolve, arguments = torch.nn.functional.conv2d, layer.conv2d_arguments
    reference = convolve(image.double(), weight.double(), **arguments)
    largest = float(convolve(image.abs().double(), weight.abs().double(), **arguments).max())
    nonzeros = int((weight != 0).flatten(1).sum(1).max())
    allowed = (4 + nonzeros**0.5) * 2.0**-23 * largest

    def error_fraction(output: np.ndarray) -> float:
        error = (torch.from_numpy(output).double() - reference).abs()
        return math.inf if bool(torch.isnan(error).any()) else float(error.max()) / allowed

    return error_fraction
