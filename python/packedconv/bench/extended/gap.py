"""What keeps the sparse convolution from 1 / (1 - S): experiments that each remove one cause."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from packedconv import PackedWeight, _core, conv, plan
from packedconv.bench import contenders as sides
from packedconv.bench.ceilings import COPY_REPEATS, PEAK_SECONDS, copy_bytes, peak_flops
from packedconv.bench.check import compare_with_float64, require_within_bound
from packedconv.bench.contenders import Contender
from packedconv.bench.cpu_experiments import Prepared
from packedconv.bench.experiment import Experiment
from packedconv.bench.extended import counters
from packedconv.bench.extended.gap_patterns import PATTERNS
from packedconv.layer import Layer, sparsity_key
from packedconv.script import CheckError
from packedconv.settings import Settings
from packedconv.weights import weight_seed

COUNTED_EXECUTIONS = 20

# From an input into an output.
Compute = Callable[[torch.Tensor, torch.Tensor], None]


class Removal(NamedTuple):
    """What an experiment leaves out of the sparse convolution, whose schedule it keeps.

    kind: whether the cause is the pattern of the nonzeros ("pattern") or not ("other"), or
    several at once ("together"); "fixed" is what stays without any nonzero.
    pattern: of `gap_patterns.PATTERNS`, None for the layer's own. one_row: strides with which
    every read of the input falls into one row of one channel. fill, stores: as
    _core.CpuPartialExecution takes them. front_end: through packedconv's Python code.
    whole_tiles: on an image that whole tiles cover. one_thread: on one thread.
    """

    name: str
    kind: str
    pattern: str | None = None
    one_row: bool = False
    fill: bool = True
    stores: bool = True
    front_end: bool = True
    whole_tiles: bool = False
    one_thread: bool = False


# Without whole_tiles: in an image that has no idle lanes, there are pixels beside the tiles to
# compute, which else are in those lanes.
_NO_OTHERS: dict[str, Any] = {
    "fill": False,
    "stores": False,
    "front_end": False,
    "one_thread": True,
}
REMOVALS = (
    Removal("rows_equalised", "pattern", pattern="rows_equalised"),
    Removal("indices_contiguous", "pattern", pattern="indices_contiguous"),
    Removal("few_channels", "pattern", pattern="few_channels"),
    Removal("input_in_cache", "other", one_row=True),
    Removal("no_fill", "other", fill=False),
    Removal("no_stores", "other", stores=False),
    Removal("no_front_end", "other", front_end=False),
    Removal("whole_tiles", "other", whole_tiles=True),
    Removal("one_thread", "other", one_thread=True),
    Removal("regular_pattern", "together", pattern="regular"),
    Removal("only_pattern", "together", **_NO_OTHERS),
    Removal("all_removed", "together", pattern="regular", **_NO_OTHERS),
    Removal("no_nonzeros", "fixed", pattern="empty"),
)


def measure(
    settings: Settings, experiment: Experiment, threads: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and facts of one layer: the sparse convolution, the fastest dense layout, REMOVALS.

    Facts by sparsity key: `removals`, each with `scale`, by which its time is multiplied (one
    over the threads where it ran on one; output pixels of the layer over those of the image that
    it computed); `left_out`, the reasons by name; `counters` of the sparse one on one thread.
    `no_nonzeros_seconds`: of every round, and in no row. `one_thread`: peak_flops (FLOP/s) and
    bandwidth (bytes/s) of one thread.
    Raises CheckError when an output is wrong.
    """
    layer, protocol = experiment.layer, experiment.protocol
    groups: dict[str, list[Contender]] = {}
    found: dict[str, dict[str, Any]] = {
        name: {} for name in ("removals", "left_out", "counters", "plans")
    }
    with torch.inference_mode():
        prepared = Prepared(settings, experiment, threads)
        layout, trials = sides.choose_dense(
            layer,
            prepared.image,
            next(iter(prepared.dense.values())),
            protocol["trial_executions"],
            protocol["warmup_executions"],
        )
        for sparsity in experiment.sparsities:
            key = sparsity_key(sparsity)
            point = _Point(prepared, sparsity, settings["seed"])
            dense = sides.dense_contender(layout, layer, prepared.image, prepared.dense[key])
            groups[key] = [point.sparse(), dense]
            reasons = {removal.name: point.why_not(removal) for removal in REMOVALS}
            found["left_out"][key] = {name: why for name, why in reasons.items() if why}
            left = [removal for removal in REMOVALS if not reasons[removal.name]]
            groups[key] += [point.contender(removal) for removal in left]
            found["removals"][key] = {
                removal.name: {**removal._asdict(), "scale": point.scale(removal)}
                for removal in left
            }
            found["plans"][key] = {"schedule": point.plan.schedule, "facts": point.plan.facts}
            found["counters"][key] = counters.count(point.on_one_thread(), COUNTED_EXECUTIONS)
        one_thread = {
            "peak_flops": peak_flops(1, PEAK_SECONDS),
            "bandwidth": _core.copy_bandwidth(1, copy_bytes(), COPY_REPEATS),
        }
        rows, facts = prepared.measure(groups)
    alone = {removal.name for removal in REMOVALS if removal.one_thread}
    for row in rows:
        if row["implementation"] in alone:
            row["threads"] = 1
    # The samples file is of executions that compute the nonzeros.
    found["no_nonzeros_seconds"] = {
        sparsity_key(sparsity): _round_medians(
            row
            for row in rows
            if (row["implementation"], row["sparsity"]) == ("no_nonzeros", sparsity)
        )
        for sparsity in experiment.sparsities
    }
    rows = [row for row in rows if row["implementation"] != "no_nonzeros"]
    return rows, {**facts, **found, "one_thread": one_thread, "dense": {**trials, "layout": layout}}


def _round_medians(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Median seconds of every round of the last attempt."""
    rounds: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        rounds.setdefault((row["attempt"], row["round"]), []).append(float(row["seconds"]))
    last = max(attempt for attempt, _ in rounds)
    return [float(np.median(values)) for (one, _), values in rounds.items() if one == last]


class _Point:
    """A layer at a sparsity: its own convolution, and those with something removed."""

    def __init__(self, prepared: Prepared, sparsity: float, seed: int) -> None:
        self._prepared, self._sparsity = prepared, sparsity
        self._layer, self._threads = prepared.experiment.layer, prepared.threads
        self._arguments = self._layer.conv2d_arguments
        self._seed = weight_seed(seed, self._layer, sparsity)
        key = sparsity_key(sparsity)
        self._packed: dict[str | None, PackedWeight] = {None: prepared.packed[key]}
        self.plan = prepared.plan(key)
        self._whole = self._whole_tiles()
        self._images = {self._layer: prepared.image}
        if self._whole != self._layer:
            self._images[self._whole] = _enlarged(prepared.image, self._whole)
        self._outputs = {layer: torch.full(layer.output_shape, 0.0) for layer in self._images}

    def sparse(self) -> Contender:
        """The call that users make."""
        contender = sides.sparse_contender(
            self._layer, self._prepared.image, self._packed[None], self._outputs[self._layer]
        )
        self._outputs[self._layer].fill_(float("nan"))
        contender.execute()
        self._require_right(self._layer, self._outputs[self._layer], self._prepared.image)
        return contender

    def on_one_thread(self) -> Callable[[], None]:
        """The plan's execution by the calling thread alone."""
        image, out = self._prepared.image, self._outputs[self._layer]
        return functools.partial(_execute, self.plan.core, 1, image, out)

    def why_not(self, removal: Removal) -> str | None:
        """Why a cause cannot be removed; None where it can."""
        if self.plan.schedule["path"] == "naive" and not (removal.fill and removal.stores):
            return "the plan has no tiles"
        if removal.name == "whole_tiles" and self._whole == self._layer:
            if self.plan.facts["lanes_used"] == 1.0:
                return "tiles cover this image"
            return "whole tiles cover no image of about this size"
        return None

    def scale(self, removal: Removal) -> float:
        """What its time is multiplied by, to be that of the layer's pixels on all threads."""
        _, _, rows, columns = self._layer.output_shape
        _, _, more_rows, more_columns = self._layer_of(removal).output_shape
        pixels = rows * columns / (more_rows * more_columns)
        return pixels / (self._threads if removal.one_thread else 1)

    def contender(self, removal: Removal) -> Contender:
        """Checked as far as its output means something."""
        layer, packed = self._layer_of(removal), self._weight(removal.pattern)
        image, out = self._images[layer], self._outputs[layer]
        source = image[:1, :1, :1].expand(image.shape) if removal.one_row else image
        threads = 1 if removal.one_thread else self._threads
        core = self._plan(packed, layer).core
        if removal.fill and removal.stores:
            compute = functools.partial(_execute, core, threads)
        else:
            compute = functools.partial(
                _execute_partly,
                _core.CpuPartialExecution(core, threads, fill=removal.fill, stores=removal.stores),
            )
        if removal.front_end:
            execute = functools.partial(self._through_front_end, packed, compute, source, image)
        else:
            execute = functools.partial(compute, source)
        out.fill_(float("nan"))
        execute(out)
        self._check(removal, out, source, packed)
        return Contender(removal.name, "packed", functools.partial(execute, out))

    def _through_front_end(
        self,
        packed: PackedWeight,
        compute: Compute,
        source: torch.Tensor,
        image: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As packedconv.conv2d of the image, but for what computes, and what it reads."""

        def launch(
            input: torch.Tensor,
            packed: PackedWeight,
            bias: None,
            stride: Any,
            before: Any,
            dilation: Any,
            groups: int,
            relu: bool,
            out: torch.Tensor,
        ) -> None:
            # Looked for as by packedconv.cpu.launch, which takes its time.
            call = (input.shape, out.shape, stride, before, dilation, groups, self._threads)
            plan.find(packed, (*call, _core.isa()), self._schedule)
            compute(source, out)

        conv.compute(image, packed, out=out, launch=launch, **self._arguments)

    @functools.cached_property
    def _schedule(self) -> tuple:
        return plan.frozen(self.plan.schedule)

    def _check(
        self, removal: Removal, out: torch.Tensor, source: torch.Tensor, packed: PackedWeight
    ) -> None:
        """Raises CheckError where an output that was NaN is wrong, was written though stores are
        left out, or was not."""
        layer = self._layer_of(removal)
        if removal.fill and removal.stores:
            self._require_right(layer, out, source, packed, removal.name)
        elif not bool((out.isfinite() if removal.stores else out.isnan()).all()):
            wanted = "every element written" if removal.stores else "none written"
            raise CheckError(
                f"check of layer {layer.name}, sparsity {self._sparsity}, {removal.name}: output: "
                f"expected {wanted}, got others; nothing is timed; build again, and report this "
                "message if it stays"
            )
        # Finite, so that nothing that is timed computes with NaN.
        out.fill_(0.0)

    def _require_right(
        self,
        layer: Layer,
        out: torch.Tensor,
        source: torch.Tensor,
        packed: PackedWeight | None = None,
        name: str = "",
    ) -> None:
        weight = (packed or self._packed[None]).unpack()
        found = compare_with_float64(out, layer, source, weight)
        require_within_bound(layer, self._sparsity, found, name)

    def _weight(self, pattern: str | None) -> PackedWeight:
        if pattern not in self._packed:
            weight = PATTERNS[pattern](self._packed[None].unpack().numpy(), self._seed)
            self._packed[pattern] = sides.pack_quietly(torch.from_numpy(weight))
        return self._packed[pattern]

    def _plan(self, packed: PackedWeight, layer: Layer) -> "plan.CpuPlan":
        """With the layer's own schedule, for another weight or image."""
        return packed.plan(
            layer.input_shape,
            threads=self._threads,
            schedule=self.plan.schedule,
            **self._arguments,
        )

    def _layer_of(self, removal: Removal) -> Layer:
        return self._whole if removal.whole_tiles else self._layer

    def _whole_tiles(self) -> Layer:
        """The layer on the smallest image, not smaller, whose output is whole tiles; where there
        is none, the layer."""
        schedule, lanes = self.plan.schedule, self.plan.facts["lanes"]
        _, _, rows, columns = self._layer.output_shape
        more_rows = -rows % schedule["rows"]
        more_columns = -columns % (schedule["vectors"] * lanes)
        whole = self._layer._replace(
            height=self._layer.height + more_rows * self._layer.stride,
            width=self._layer.width + more_columns * self._layer.stride,
        )
        covered = self._plan(self._packed[None], whole).facts["lanes_used"] == 1.0
        return whole if covered else self._layer


def _enlarged(image: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The image repeated to the size of the layer's."""
    _, _, height, width = layer.input_shape
    rows, columns = np.arange(height) % image.shape[2], np.arange(width) % image.shape[3]
    return image[:, :, rows][:, :, :, columns].clone()


def _execute(core: Any, threads: int, input: torch.Tensor, out: torch.Tensor) -> None:
    core.execute(input.data_ptr(), input.stride(), 0, False, out.data_ptr(), out.stride(), threads)


def _execute_partly(partial: Any, input: torch.Tensor, out: torch.Tensor) -> None:
    partial.execute(input.data_ptr(), input.stride(), out.data_ptr(), out.stride())
