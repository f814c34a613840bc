"""Every way to compute a layer on a CPU beside the others, with the memory that each takes."""

import json
from typing import Any

import torch

import packedconv
from packedconv.bench.contenders import dense_contender
from packedconv.bench.cpu_experiments import Prepared, table_contenders
from packedconv.bench.experiment import Experiment
from packedconv.bench.extended import im2col
from packedconv.bench.extended.baseline_contenders import CONTENDERS, choose_variants
from packedconv.bench.extended.peak_memory import in_child
from packedconv.layer import sparsity_key
from packedconv.settings import Settings

# The lowest sparsity of the paper's A100 workload; memory is measured nearest to it.
MEMORY_SPARSITY = 0.90

NOT_TIMED = {
    "torch.compile": "its frozen convolution is the operator that the prepacked dense layouts "
    "time, after a compilation for each layer"
}


def measure(
    settings: Settings, experiment: Experiment, threads: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of samples and facts of one layer, on `threads` threads.

    facts["dense"]: trials of the dense layouts; facts["im2col"]: by sparsity key and contender
    trials of the variants, see `choose_variants`; facts["memory"]: by contender, at one sparsity,
    see `peak_memory.main`.
    Raises CheckError when packedconv computes wrongly.
    """
    layer = experiment.layer
    two_sides = experiment._replace(contenders=["sparse", "dense"])
    trials = {}
    with torch.inference_mode():
        prepared = Prepared(settings, two_sides, threads)
        groups, dense = table_contenders(prepared, None)
        for key, group in groups.items():
            default = dense_contender("nchw", layer, prepared.image, prepared.dense[key])
            group.append(default._replace(implementation="dense_default"))
            packed = prepared.packed[key]
            # table_contenders has checked this output against float64.
            expected = packedconv.conv2d(prepared.image, packed, **layer.conv2d_arguments)
            chosen, trials[key] = choose_variants(
                layer, prepared.image, packed, expected, experiment.protocol
            )
            group += chosen
        rows, facts = prepared.measure(groups)
    sparsity = min(experiment.sparsities, key=lambda value: abs(value - MEMORY_SPARSITY))
    variants = {
        contender.implementation: contender.layout for contender in groups[sparsity_key(sparsity)]
    }
    memory = _memory(settings, experiment, threads, sparsity, variants)
    return rows, dict(
        facts,
        dense=dense,
        im2col=trials,
        unfolded_bytes=im2col.unfolded_bytes(layer),
        memory={"sparsity": sparsity, "contenders": memory},
        not_timed=NOT_TIMED,
    )


def _memory(
    settings: Settings,
    experiment: Experiment,
    threads: int,
    sparsity: float,
    variants: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """By contender: its variant, with the answer of `peak_memory.in_child`."""
    return {
        name: {
            "variant": variants[name],
            **in_child(
                {
                    "settings": settings,
                    "experiment": json.dumps(experiment.record()),
                    "threads": threads,
                    "sparsity": sparsity,
                    "contender": name,
                    "variant": variants[name],
                }
            ),
        }
        for name in CONTENDERS
        if name in variants
    }
