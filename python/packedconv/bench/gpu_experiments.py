"""Experiments on a GPU beside the comparison: the ablation, and what nonzeros do not explain."""

import itertools
import random
import time
import typing

import numpy as np
import torch

from packedconv.bench import events, gpu_state
from packedconv.bench import gpu_contenders as sides
from packedconv.bench.contenders import pack_quietly
from packedconv.bench.gpu_ceilings import Peak
from packedconv.bench.gpu_layer import warn_of_clocks
from packedconv.bench.machine import moment
from packedconv.layer import Layer, sparsity_key
from packedconv.samples_file import MAPPING_FIELDS
from packedconv.settings import Settings
from packedconv.weights import input_seed, make_input

# Sparsities of the ablation, where the run has them.
ABLATION_SPARSITIES = (0.90, 0.98)
# Share of the nonzeros that the experiments keep, down to an empty weight.
KEPT = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0)
# Slices that the paper's kernel is split in, to see what each costs.
FIXED_COST_SLICES = (1, 2, 4, 8)
EMPTY = "empty"

Rows = typing.List[typing.Dict[str, typing.Any]]


class Measurement:
    """One layer on a GPU, for experiments; `facts` tells what was the same for all of them.

    Between experiments the same load runs, during which the clocks are read.
    """

    def __init__(
        self,
        settings: Settings,
        layer: Layer,
        weights: typing.Mapping[str, np.ndarray],
        accelerator: typing.Any,
    ) -> None:
        self._settings, self._layer, self._accelerator = settings, layer, accelerator
        self._weights = weights
        self._pairs = settings["protocol"]["executions"]
        self._image = torch.from_numpy(make_input(layer, settings["seed"], settings["inputs"]))
        self._states = []  # type: typing.List[gpu_state.State]
        self._rotation = {}  # type: sides.Facts
        self._before, self._begin = moment(), time.perf_counter()
        self._peak = Peak(accelerator)

    def ablation(self) -> Rows:
        """Rows of the ablation: every mapping of the paper's kernel at S .90 and .98, or at the
        first and the last sparsity of a run without them; trial_executions executions each."""
        rows = []
        with torch.inference_mode():
            for sparsity in ablation_sparsities(self._settings["sparsities"]):
                key = sparsity_key(sparsity)
                self._note_state()
                data = self._data({key: pack_quietly(torch.from_numpy(self._weights[key]))})
                pairs = self._settings["protocol"]["trial_executions"]
                for trial in sides.try_mappings(data, key, pairs):
                    base = dict(
                        self._base(),
                        sparsity=sparsity,
                        nonzeros=data.packed[key].nnz,
                        executions_per_pair=trial.pace.executions if trial.pace else None,
                        skipped=trial.skipped,
                        **sides.mapping_facts(trial.mapping),
                    )
                    rows += _numbered(base, trial.seconds)
            self._note_state()
        return rows

    def fixed_cost(self, mapping: typing.Mapping[str, int]) -> Rows:
        """Rows of the fixed-cost experiment, each of which leaves one thing out:

        nonzeros: both kernels with ever fewer nonzeros, down to an empty weight, where only
            launch, tile fill and stores are left;
        slices: the paper's kernel split along grid z in 1, 2, 4 and 8, each of which fills its
            tile again, with the weight and with an empty one;
        stores: PyTorch's fill_ of the output, which stores and does nothing else, and copy_
            into it, which loads as much;
        launch: fill_ of one element.

        `mapping`: MAPPING_FIELDS of the paper's kernel. Nothing is a remainder of others.
        """
        weight = self._weights[sparsity_key(min(self._settings["sparsities"]))]
        seed = input_seed(self._settings["seed"], self._layer)
        packed = {
            ("%g" % share if share else EMPTY): pack_quietly(
                torch.from_numpy(thinned(weight, share, seed))
            )
            for share in KEPT
        }
        chosen = tuple(mapping[name] for name in MAPPING_FIELDS)
        rows = []
        with torch.inference_mode():
            data = self._data(packed)
            self._note_state()
            for key in packed:
                rows += self._kernel("nonzeros", "sparse", data, key, "paper", chosen)
                rows += self._kernel("nonzeros", "sparse_column", data, key, "column", None)
            self._note_state()
            for slices, key in itertools.product(FIXED_COST_SLICES, ("1", EMPTY)):
                config = chosen[:-1] + (slices,)
                rows += self._kernel("slices", "sparse", data, key, "paper", config)
            self._note_state()
            rows += self._plain(data)
            self._note_state()
        return rows

    def facts(self) -> sides.Facts:
        """What rides with the rows. Warns when the clocks moved."""
        warn_of_clocks(self._layer.name, self._states)
        return {
            "device": self._settings["device"]["name"],
            "run": self._settings["run"],
            "layer": dict(self._layer._asdict()),
            "rotation": self._rotation,
            "pair_seconds": events.PAIR_SECONDS,
            "gpu_states": self._states,
            "clocks_moved": gpu_state.clocks_moved(self._states),
            "throttled": gpu_state.throttled(self._states),
            "measuring_seconds": time.perf_counter() - self._begin,
            "before": self._before,
            "after": moment(),
        }

    def _data(self, packed: typing.Mapping[str, typing.Any]) -> sides.LayerData:
        data = sides.LayerData(self._accelerator, self._layer, self._image, packed)
        data.inputs()
        self._rotation = data.rotation()
        return data

    def _base(self) -> typing.Dict[str, typing.Any]:
        return {
            "device": self._settings["device"]["name"],
            "run": self._settings["run"],
            "layer": self._layer.name,
            "out_channels": self._layer.out_channels,
        }

    def _kernel(
        self,
        experiment: str,
        implementation: str,
        data: sides.LayerData,
        key: str,
        kernel: str,
        config: typing.Optional[typing.Tuple[int, ...]],
    ) -> Rows:
        base = dict(
            self._base(),
            experiment=experiment,
            implementation=implementation,
            slices=config[-1] if config else None,
            nonzeros=data.packed[key].nnz,
        )
        try:
            sides.plan(data, key, kernel, config)
            return self._timed(base, sides.sparse_execute(data, key, kernel, config))
        except sides.FAILURES as error:
            reason = sides.reason_of(error)
        self._accelerator.empty_cache()
        return [dict(base, skipped=reason)]

    def _plain(self, data: sides.LayerData) -> Rows:
        """PyTorch's own kernels on the output, which are said to move `bytes`."""
        out, size = data.out, data.out.numel() * data.out.element_size()
        one = out.new_zeros(1)
        experiments = [
            ("stores", "fill", size, lambda: out.fill_(1.0)),
            ("launch", "fill", 4, lambda: one.fill_(1.0)),
        ]  # type: typing.List[typing.Tuple[str, str, int, typing.Callable]]
        rows = []
        try:
            other = torch.ones_like(out)
            experiments.insert(1, ("stores", "copy", 2 * size, lambda: out.copy_(other)))
        except sides.FAILURES as error:
            base = dict(self._base(), experiment="stores", implementation="copy")
            rows.append(dict(base, bytes=2 * size, skipped=sides.reason_of(error)))
        for experiment, implementation, moved, execute in experiments:
            base = dict(self._base(), experiment=experiment, implementation=implementation)
            rows += self._timed(dict(base, bytes=moved), execute)
        return rows

    def _timed(self, base: typing.Dict[str, typing.Any], execute: events.Execute) -> Rows:
        pace = events.calibrate(self._accelerator, execute)
        warm = self._settings["protocol"]["warmup_executions"]
        events.warm_up(execute, pace, warm)
        seconds = events.time_pairs(self._accelerator, execute, self._pairs, pace.executions)
        return _numbered(dict(base, executions_per_pair=pace.executions), seconds)

    def _note_state(self) -> None:
        self._peak.burst(self._states)


def ablation_sparsities(sparsities: typing.Sequence[float]) -> typing.List[float]:
    """Those of ABLATION_SPARSITIES that a run has; without any its lowest and its highest."""
    found = [
        value for value in sparsities if any(abs(value - one) < 1e-6 for one in ABLATION_SPARSITIES)
    ]
    return found or sorted({min(sparsities), max(sparsities)})


def thinned(weight: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The weight with only a share of its nonzeros, picked by the seed: of two shares the
    smaller keeps a part of what the larger keeps."""
    nonzeros = np.flatnonzero(weight)
    draw = random.Random(seed).random
    ranks = np.array([draw() for _ in nonzeros])
    kept = nonzeros[np.argsort(ranks, kind="stable")[: round(share * len(nonzeros))]]
    result = np.zeros_like(weight)
    result.flat[kept] = weight.flat[kept]
    return result


def _numbered(base: typing.Dict[str, typing.Any], seconds: typing.Sequence[float]) -> Rows:
    """A row per timed execution; one without seconds where there is none."""
    rows = [
        dict(base, execution=number, seconds="%.9f" % one) for number, one in enumerate(seconds)
    ]
    return rows or [base]
