"""One layer with its nonzeros at different places: the same number of them, and dense."""

import functools
import zipfile

import numpy as np
import torch

import packedconv
from packedconv.bench.check import compare_with_float64, require_within_bound
from packedconv.bench.contenders import Contender, pack_quietly
from packedconv.bench.cpu_experiments import Facts, Prepared, Row, table_contenders
from packedconv.bench.experiment import Experiment
from packedconv.layer import sparsity_key
from packedconv.masks import (
    MASKS,
    adjacent_channels,
    adjacent_weights,
    channel_nonzeros,
    make_mask,
)
from packedconv.settings import Settings
from packedconv.weights import make_weight

# The mask that the others are compared with is "sparse", drawn as all weights of the project
# are; "uniform" is another draw of the same.
TRAINED = "trained"


def measure(
    settings: Settings, experiment: Experiment, threads: int, trained: str | None = None
) -> tuple[list[Row], Facts]:
    """Rows and facts of one layer: its weight as everywhere ("sparse"), every mask, and dense.

    trained: weights of a pruned network (.npz, by "<convolution>_<sparsity key>"), of which one
    of the layer's shape is a contender too. What the layer cannot have is in facts["left_out"].
    Raises CheckError when an output is wrong, ValueError for a file that is no such.
    """
    layer = experiment.layer
    network = load_trained(trained)
    masks: Facts = {}
    left_out: Facts = {}
    with torch.inference_mode():
        prepared = Prepared(settings, experiment._replace(contenders=["sparse", "dense"]), threads)
        groups, dense = table_contenders(prepared, None)
        out = torch.full(layer.output_shape, 0.0)
        # Values everywhere: masks differ in their places alone.
        values = make_weight(layer, 0.0, settings["seed"], settings["weights"])
        for sparsity in experiment.sparsities:
            key = sparsity_key(sparsity)
            masks[key] = {"sparse": _described(prepared, prepared.packed[key])}
            left_out[key] = {}
            for name in (*MASKS, TRAINED):
                source = None
                try:
                    if name == TRAINED:
                        source, weight = find_trained(network, layer.weight_shape, key)
                    else:
                        weight = values * make_mask(name, layer, sparsity, settings["seed"])
                except ValueError as reason:
                    left_out[key][name] = str(reason)
                    continue
                packed = pack_quietly(torch.from_numpy(weight))
                masks[key][name] = dict(_described(prepared, packed), source=source)
                groups[key].append(_contender(prepared, sparsity, name, packed, out))
        rows, facts = prepared.measure(groups)
    for row in rows:
        found = masks[sparsity_key(row["sparsity"])].get(row["implementation"])
        if found is not None:
            row["nonzeros"] = sum(found["channel_nonzeros"])
    return rows, dict(facts, dense=dense, masks=masks, left_out=left_out)


def load_trained(path: str | None) -> dict[str, np.ndarray]:
    """Weights of a pruned network by "<convolution>_<sparsity key>"; none without a file.

    Raises ValueError for a file that is not one of weights.
    """
    if path is None:
        return {}
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"trained: {path}: {error}; delete it and make it again") from error


def find_trained(
    network: dict[str, np.ndarray], shape: tuple[int, ...], key: str
) -> tuple[str, np.ndarray]:
    """The convolution of a network whose weight has this shape, and that at a sparsity key.

    Raises ValueError where there is none.
    """
    for name, weight in sorted(network.items()):
        convolution, _, found = name.rpartition("_")
        if found == key and weight.shape == shape:
            return convolution, weight
    sizes = "x".join(str(size) for size in shape)
    raise ValueError(
        f"no trained network has a weight of {sizes} at {key}, among {sorted(network) or 'none'}"
    )


def _described(prepared: Prepared, packed: "packedconv.PackedWeight") -> Facts:
    """Where the nonzeros are, and the plan that this makes."""
    layer = prepared.experiment.layer
    mask = packed.unpack().numpy() != 0
    plan = packed.plan(layer.input_shape, threads=prepared.threads, **layer.conv2d_arguments)
    return {
        "channel_nonzeros": channel_nonzeros(mask).tolist(),
        "adjacent_weights": adjacent_weights(mask),
        "adjacent_channels": adjacent_channels(mask),
        "schedule": plan.schedule,
    }


def _contender(
    prepared: Prepared,
    sparsity: float,
    name: str,
    packed: "packedconv.PackedWeight",
    out: torch.Tensor,
) -> Contender:
    """A mask, checked."""
    layer = prepared.experiment.layer
    execute = functools.partial(packedconv.conv2d, **layer.conv2d_arguments)
    checked = torch.full(layer.output_shape, float("nan"))
    execute(prepared.image, packed, out=checked)
    found = compare_with_float64(checked, layer, prepared.image, packed.unpack())
    require_within_bound(layer, sparsity, found, f"mask {name}")
    return Contender(name, "packed", functools.partial(execute, prepared.image, packed, out=out))
