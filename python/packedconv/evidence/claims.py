"""A verdict for every statement of the paper (`statements` of config/paper.yaml)."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from packedconv.evidence.published import Published
from packedconv.evidence.quantities import (
    COMPUTED,
    MEASURED,
    SWEEPS,
    Measured,
    Measurement,
    NotMeasuredError,
    Part,
)
from packedconv.evidence.samples import Results
from packedconv.layer import Layer
from packedconv.settings import layers_of

REPLICATED = "replicated"
NOT_REPLICATED = "not replicated"
INCONCLUSIVE = "inconclusive"
NOT_TESTABLE = "not testable here"
VERDICTS = (REPLICATED, NOT_REPLICATED, INCONCLUSIVE, NOT_TESTABLE)

COLUMNS = (
    "id",
    "section",
    "kind",
    "statement",
    "printed",
    "tolerance",
    "obtained",
    "interval",
    "verdict",
    "reason",
    "summary",
    "shown_in",
    "analogue_device",
    "analogue_obtained",
    "analogue_interval",
    "analogue_verdict",
    "analogue_summary",
    "analogue_shown_in",
)

# The figures that show a measured quantity, of a panel of the paper and of a device alike.
FIGURES = {
    "speedup": (5,),
    "highest_speedup": (5,),
    "highest_speedup_of": (5,),
    "crossover": (5,),
    "speedup_trend": (5,),
    "one_block_ratio": (5,),
    "time_trend": (6,),
    "time_spread": (6,),
    "sem_share": (5, 6),
    "throughput": (7,),
    "throughput_trend": (7,),
    "roof_fraction": (7,),
    "error_trend": (8,),
    "error_range": (8,),
}

# Quantities come in base units; statements print them in these.
SCALE = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "%": 0.01}

Statement = Mapping[str, Any]


class Band(NamedTuple):
    """Where a value has to lie; an open end is excluded."""

    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False

    def holds(self, part: Part) -> bool:
        """The whole interval lies inside."""
        if self.is_open:
            return self.low < part.low and part.high < self.high
        return self.low <= part.low and part.high <= self.high

    def excludes(self, part: Part) -> bool:
        """The whole interval lies outside, on one side."""
        if self.is_open:
            return part.high <= self.low or part.low >= self.high
        return part.high < self.low or part.low > self.high


class Judgement(NamedTuple):
    """A verdict with what it rests on; obtained and interval as text, and both in short."""

    verdict: str
    reason: str = ""
    obtained: str = ""
    interval: str = ""
    summary: str = ""


def band(statement: Statement) -> Band:
    """Where the statement says that its quantity lies, in the statement's unit."""
    comparator, printed = statement["comparator"], statement["printed"]
    tolerance = statement.get("tolerance", {})
    if comparator == "within":
        margin = tolerance.get("absolute", abs(printed) * tolerance.get("relative", 0))
        # Rounded so that .91 - .01 is .90, as it is printed.
        return Band(round(printed - margin, 9), round(printed + margin, 9))
    if comparator == "between":
        if "factor" in tolerance:
            factor = tolerance["factor"]
            return Band(min(printed) / factor, max(printed) * factor)
        return Band(tolerance["low"], tolerance["high"])
    if comparator == "increasing":
        return Band(tolerance["rho"], math.inf)
    if comparator == "decreasing":
        return Band(-math.inf, -tolerance["rho"])
    if comparator == "flat":
        return Band(-math.inf, tolerance["ratio"])
    bound = tolerance.get("bound", printed)
    if comparator == "below":
        return Band(high=bound, is_open=True)
    if comparator == "above":
        return Band(low=bound, is_open=True)
    if comparator == "at_least":
        return Band(low=bound)
    raise ValueError(
        f"statement {statement['id']}: comparator: expected one that is defined,"
        f" got {comparator!r}; see the comment above statements in config/paper.yaml"
    )


def judge(
    statement: Statement,
    measurement: Measurement,
    needed: Sequence[float] = (),
    short: str = "",
) -> Judgement:
    """The verdict on a statement from the quantity that it speaks of.

    replicated: every part's interval lies inside the band; not replicated: one lies wholly
    outside; else inconclusive, and so it is when one of the `needed` sparsities was not
    measured or the measurement falls `short` of what a verdict needs, in words.
    """
    scale = SCALE.get(statement.get("unit", ""), 1.0)
    parts = [
        Part(part.label, part.value / scale, part.low / scale, part.high / scale)
        for part in measurement.parts
    ]
    missing = _shortage(measurement.sparsities, needed)
    if short or missing:
        verdict, reason = INCONCLUSIVE, "; ".join(text for text in (short, missing) if text)
    else:
        verdict, reason = _verdict(statement, parts, measurement.sparsities)
    reasons = [text for text in (reason, measurement.note) if text]
    return Judgement(
        verdict,
        "; ".join(reasons),
        _obtained(statement, parts),
        _interval(statement, parts),
        _summary(statement, parts),
    )


class Prospect(NamedTuple):
    """What a run can say of a statement: "decidable", "analogue" or "not".

    reason: why no more than that; empty when decidable. measured: whether it takes measurements.
    """

    answer: str
    reason: str = ""
    measured: bool = True


def claims(published: Published, results: Sequence[Results], device: str) -> pd.DataFrame:
    """The table of verdicts, one row per statement, all columns text.

    Results of a statement's own device family decide it, all of them together. Results of
    `device`, where that is of another family, fill the analogue_ columns: the same quantity
    for the same layers, batch aside, on that device with this kernel; analogue_verdict holds
    the reason after a colon. shown_in and analogue_shown_in: the figures or tables that show the
    values, "; " between them, relative to the folder that this table is in.
    Raises ValueError when two sets of results are of one device.
    """
    names = [entry.device for entry in results]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"results: expected one run per device, got {names.count(name)} of {name};"
                " give one of them"
            )
    measured = [Measured(entry, published.judging) for entry in results]
    at_hand = next((data for data in measured if data.results.device == device), None)
    rows = []
    for statement in published.statements:
        judgement = _judge_own(published, statement, measured)
        name, analogue = _judge_analogue(published, statement, at_hand, device)
        rows.append(
            (
                statement["id"],
                ", ".join(statement[key] for key in ("section", "figure") if key in statement),
                statement["kind"],
                statement["statement"],
                printed_text(statement),
                tolerance_text(statement, needed_sparsities(published, statement)),
                judgement.obtained,
                judgement.interval,
                judgement.verdict,
                judgement.reason,
                judgement.summary,
                "; ".join(_shown_in(published, statement, judgement)),
                name,
                analogue.obtained,
                analogue.interval,
                joined(": ", analogue.verdict, analogue.reason),
                analogue.summary,
                "; ".join(_analogue_shown_in(published, statement, analogue, at_hand)),
            )
        )
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype="str")


def decidable(
    published: Published, device_family: str, settings: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """What a device of this family can say of each statement, before anything is measured.

    "decidable"; "analogue": only the same statement about this device; "not". By statement id.
    `settings`, those of a run (settings.json), tell also what that run will not measure;
    without them the run is taken to measure all that a statement needs.
    """
    return {
        identity: prospect.answer
        for identity, prospect in prospects(published, device_family, settings).items()
    }


def prospects(
    published: Published, device_family: str, settings: Mapping[str, Any] | None = None
) -> dict[str, Prospect]:
    """As `decidable`, with what each answer rests on."""
    return {
        statement["id"]: _prospect(published, statement, device_family, settings)
        for statement in published.statements
    }


def places(published: Published) -> dict[str, list[str]]:
    """The figures and tables of the paper that show a statement, as `fig5a`; by statement id."""
    return {
        statement["id"]: [path.rpartition(".")[0] for path in _places(published, statement)]
        for statement in published.statements
    }


def counts(table: pd.DataFrame) -> dict[str, int]:
    """Number of statements per verdict."""
    return {verdict: int((table["verdict"] == verdict).sum()) for verdict in VERDICTS}


def needed_sparsities(published: Published, statement: Statement) -> list[float]:
    """The sparsities of the paper that a statement about a sweep is about; else none."""
    if statement["quantity"] not in SWEEPS:
        return []
    figures = [int(number) for number in re.findall(r"(\d+)[ab]", statement.get("figure", ""))]
    return published.sparsities(statement["family"], figures)


def shortfall(published: Published, protocol: Mapping[str, int]) -> str:
    """How a run's protocol falls short of the paper's, in words; empty when it does not."""
    keys = ("rounds", "executions")
    if all(protocol[key] >= published.protocol[key] for key in keys):
        return ""
    return " of ".join(f"{protocol[key]} of {published.protocol[key]} {key}" for key in keys)


def printed_text(statement: Statement) -> str:
    """What the paper prints, with its unit."""
    printed = statement["printed"]
    if isinstance(printed, str):
        return printed
    if isinstance(printed, (list, tuple)):
        return f"{_number(statement, min(printed))} – {_number(statement, max(printed))}"
    return _number(statement, printed)


def tolerance_text(statement: Statement, needed: Sequence[float] = ()) -> str:
    """The tolerance in words, with the sparsities that the statement is about."""
    if "comparator" not in statement:
        return ""
    comparator, tolerance = statement["comparator"], statement.get("tolerance", {})
    limits = band(statement)
    if comparator == "within":
        if "relative" in tolerance:
            text = f"± {100 * tolerance['relative']:g} %"
        else:
            text = f"± {tolerance['absolute']:g}" if tolerance["absolute"] else "exact"
    elif comparator == "between":
        text = f"{_number(statement, limits.low)} to {_number(statement, limits.high)}"
    elif comparator in ("increasing", "decreasing"):
        sign = "≥ " if comparator == "increasing" else "≤ -"
        text = f"rank correlation {sign}{tolerance['rho']:g}"
    elif comparator == "flat":
        text = f"longest / shortest ≤ {tolerance['ratio']:g}"
    else:
        words = {"below": "interval below", "above": "interval above", "at_least": "at least"}
        bound = limits.high if comparator == "below" else limits.low
        text = f"{words[comparator]} {_number(statement, bound)}"
    if needed:
        text += f", S {needed[0]:.2f} to {needed[-1]:.2f}"
    return text


def _prospect(
    published: Published,
    statement: Statement,
    device_family: str,
    settings: Mapping[str, Any] | None,
) -> Prospect:
    if statement["quantity"] is None:
        return Prospect("not", statement["open"], measured=False)
    if statement["quantity"] in COMPUTED:
        return Prospect("decidable", measured=False)
    family = statement["family"]
    own = family == device_family
    about = statement.get("open") or _about(published, family)
    if not own and "analogue" in statement:
        return Prospect("not", f"{about}: {statement['analogue']}")
    if not own and not _has_kind(statement, device_family):
        return Prospect("not", f"{about}: a CPU kernel has no counterpart")
    if settings is not None:
        lacking = _not_measured(published, statement, own, settings)
        if lacking:
            return Prospect("not", lacking if own else f"{about}: {lacking}")
    return Prospect("decidable") if own else Prospect("analogue", about)


def _about(published: Published, family: str | None) -> str:
    return (
        "about any device" if family is None else f"about the {published.devices[family]['title']}"
    )


def _not_measured(
    published: Published, statement: Statement, own: bool, settings: Mapping[str, Any]
) -> str:
    """What a run leaves out of the layers, sparsities and executions that a statement needs, in
    words; empty when nothing."""
    short = shortfall(published, settings["protocol"])
    if short:
        return f"{short} measured"
    family = statement["family"]
    try:
        layers = fitting(published, family, layers_of(dict(settings)), any_batch=not own)
    except NotMeasuredError as missing:
        return str(missing)
    parameters = statement.get("parameters", {})
    wanted = parameters.get("out_channels") or []
    wanted = [wanted] if isinstance(wanted, int) else wanted
    absent = sorted(set(wanted) - {layer.out_channels for layer in layers.values()})
    if absent:
        return "not measured in this run: OC " + ", ".join(str(count) for count in absent)
    needed = needed_sparsities(published, statement)
    if "sparsity" in parameters:
        needed = [parameters["sparsity"]]
    return _shortage(settings["sparsities"], needed)


def _shortage(measured: Sequence[float], needed: Sequence[float]) -> str:
    """Which of the needed sparsities were not measured, in words; empty when all were."""
    present = {round(value, 6) for value in measured}
    missing = [value for value in needed if round(value, 6) not in present]
    if not missing:
        return ""
    listed = ", ".join(f"{value:.2f}" for value in missing)
    return f"{len(needed) - len(missing)} of {len(needed)} sparsities measured, not S {listed}"


def _has_kind(statement: Statement, device_family: str) -> bool:
    kind = "cpu" if device_family == "cpu" else "cuda"
    return statement.get("requires", kind) == kind


def _judge_own(
    published: Published, statement: Statement, measured: Sequence[Measured]
) -> Judgement:
    quantity, parameters = statement["quantity"], statement.get("parameters", {})
    if quantity in COMPUTED:
        return judge(statement, COMPUTED[quantity](published, **parameters))
    if quantity is not None and quantity not in MEASURED:
        raise ValueError(
            f"statement {statement['id']}: quantity: expected one of"
            f" {sorted([*COMPUTED, *MEASURED])}, got {quantity!r}"
        )
    family = statement["family"]
    if "open" in statement:
        return Judgement(NOT_TESTABLE, statement["open"])
    judged, reasons = {}, []
    for data in measured:
        if data.results.family != family:
            continue
        try:
            judged[data.results.device] = _judge_measured(published, statement, data)
        except NotMeasuredError as missing:
            reasons.append(f"{data.results.device}, run {data.results.run}: {missing}")
    if judged:
        runs = {data.results.device: data.results.run for data in measured}
        return _together(judged, runs)
    if not reasons:
        reasons = [f"{_about(published, family)}; no results of one are here"]
    return Judgement(NOT_TESTABLE, "; ".join(reasons))


def _together(judged: Mapping[str, Judgement], runs: Mapping[str, str]) -> Judgement:
    """One verdict from those of several devices of a family, by device name: theirs where they
    agree, else inconclusive."""
    if len(judged) == 1:
        ((name, judgement),) = judged.items()
        reason = joined("; ", f"on {name}, run {runs[name]}", judgement.reason)
        return judgement._replace(reason=reason)
    verdicts = {judgement.verdict for judgement in judged.values()}
    reasons = [
        joined(": ", f"on {name}, run {runs[name]}", judgement.verdict, judgement.reason)
        for name, judgement in judged.items()
    ]
    if len(verdicts) > 1:
        reasons.insert(0, "the devices disagree")
    texts = {
        field: "; ".join(
            f"{name}: {getattr(judgement, field)}"
            for name, judgement in judged.items()
            if getattr(judgement, field)
        )
        for field in ("obtained", "interval", "summary")
    }
    verdict = verdicts.pop() if len(verdicts) == 1 else INCONCLUSIVE
    return Judgement(verdict, "; ".join(reasons), **texts)


def _judge_analogue(
    published: Published, statement: Statement, data: Measured | None, device: str
) -> tuple[str, Judgement]:
    quantity = statement["quantity"]
    if quantity in COMPUTED or (data and data.results.family == statement["family"]):
        return "", Judgement("")
    if quantity is None:
        return "", Judgement(NOT_TESTABLE)
    if data is None:
        return device, Judgement(NOT_TESTABLE, "not measured")
    name = f"{device} ({shapes(_at_hand(published, statement, data))})"
    if not _has_kind(statement, data.results.family):
        return name, Judgement(NOT_TESTABLE, "a CPU kernel has no counterpart")
    try:
        judgement = _judge_measured(published, statement, data, analogue=True)
    except NotMeasuredError as missing:
        return name, Judgement(NOT_TESTABLE, str(missing))
    if "analogue" in statement:
        judgement = judgement._replace(verdict=NOT_TESTABLE, reason=statement["analogue"])
    elif statement.get("refutes_only") and judgement.verdict == REPLICATED:
        reason = "agrees, which does not confirm it"
        judgement = judgement._replace(verdict=INCONCLUSIVE, reason=reason)
    return name, judgement


def _judge_measured(
    published: Published, statement: Statement, data: Measured, analogue: bool = False
) -> Judgement:
    """Judge by those layers and sparsities that the statement is about.

    Raises NotMeasuredError.
    """
    layers = fitting(
        published, statement["family"], data.results.layers.values(), any_batch=analogue
    )
    needed = needed_sparsities(published, statement)
    part = data.narrowed(layers, needed or None)
    measurement = MEASURED[statement["quantity"]](part, **statement.get("parameters", {}))
    short = shortfall(published, data.results.settings["protocol"])
    return judge(statement, measurement, needed, short or _disturbance(statement, part))


def _disturbance(statement: Statement, data: Measured) -> str:
    """Why times of the layers that a statement is about cannot be trusted; empty if they can."""
    wanted = statement.get("parameters", {}).get("out_channels")
    wanted = [wanted] if isinstance(wanted, int) else wanted
    busy = [
        name
        for name in data.results.peaks["busy_layers"]
        if name in data.layers and (not wanted or data.layers[name].out_channels in wanted)
    ]
    return f"the machine was busy while {', '.join(busy)} was timed" if busy else ""


def fitting(
    published: Published, family: str | None, layers: Iterable[Layer], any_batch: bool
) -> dict[str, Layer]:
    """The layers that the paper measured on a device family, or also those that differ from
    them in the batch alone; all of them for no family. Raises NotMeasuredError for none."""
    layers = list(layers)
    if family is None:
        return {layer.name: layer for layer in layers}
    fitting = {}
    for layer in layers:
        wanted = published.layer(family, layer.out_channels)._replace(name=layer.name)
        if layer == (wanted._replace(batch=layer.batch) if any_batch else wanted):
            fitting[layer.name] = layer
    if not fitting:
        paper = published.layer(family, layers[0].out_channels)
        raise NotMeasuredError(
            f"this device's run has {shapes(layers, with_batch=not any_batch)};"
            f" the statement is about {shapes([paper], with_batch=not any_batch)}"
        )
    return fitting


def _at_hand(published: Published, statement: Statement, data: Measured) -> Iterable[Layer]:
    """The layers that an analogue is about; all of a run where none fits."""
    layers = data.results.layers.values()
    try:
        return fitting(published, statement["family"], layers, any_batch=True).values()
    except NotMeasuredError:
        return layers


def shapes(layers: Iterable[Layer], with_batch: bool = True) -> str:
    """What all layers share but for the output channels; several shapes joined."""
    return " and ".join(sorted({_shape(layer, with_batch) for layer in layers}))


def _shape(layer: Layer, with_batch: bool) -> str:
    shape = f"N {layer.batch}, " if with_batch else ""
    shape += f"IC {layer.in_channels}, {layer.height}×{layer.width}, K {layer.kernel_size}"
    if (layer.stride, layer.padding) != (1, layer.kernel_size // 2):
        shape += f", stride {layer.stride}, padding {layer.padding}"
    if (layer.dilation, layer.groups) != (1, 1):
        shape += f", dilation {layer.dilation}, groups {layer.groups}"
    return shape


def _verdict(
    statement: Statement, parts: Sequence[Part], sparsities: Sequence[float]
) -> tuple[str, str]:
    limits = band(statement)
    undefined = [part for part in parts if math.isnan(part.low) or math.isnan(part.high)]
    if undefined:
        return INCONCLUSIVE, _named("not defined", undefined, parts)
    # A value beyond the measured sparsities is known only to lie beyond them.
    for part in parts:
        if sparsities and (
            (part.low == -math.inf and limits.low < sparsities[0])
            or (part.high == math.inf and limits.high > sparsities[-1])
        ):
            return INCONCLUSIVE, "the measured sparsities do not reach far enough"
    outside = [part for part in parts if limits.excludes(part)]
    if outside:
        return NOT_REPLICATED, _named("outside", outside, parts)
    open_parts = [part for part in parts if not limits.holds(part)]
    if open_parts:
        return INCONCLUSIVE, _named("the interval crosses the limit", open_parts, parts)
    return REPLICATED, ""


def _named(text: str, chosen: Sequence[Part], parts: Sequence[Part]) -> str:
    labels = ", ".join(part.label for part in chosen if part.label)
    if len(parts) > 1 and labels:
        return f"{text}: {labels}"
    return "" if text == "outside" else text


def _number(statement: Statement, value: float, digits: int = 4) -> str:
    if value == -math.inf:
        return "below the measured sparsities"
    if value == math.inf:
        return "above the measured sparsities"
    if math.isnan(value):
        return "not defined"
    unit = statement.get("unit", "")
    space = "" if unit in ("", "×") else " "
    return f"{value:.{digits}g}{space}{unit}"


def _obtained(statement: Statement, parts: Sequence[Part]) -> str:
    return "; ".join(f"{part.label} {_number(statement, part.value)}".strip() for part in parts)


def _interval(statement: Statement, parts: Sequence[Part]) -> str:
    return "; ".join(
        f"{part.label} {_number(statement, part.low)} – {_number(statement, part.high)}".strip()
        for part in parts
        if part.low != part.high and not math.isnan(part.low)
    )


def _summary(statement: Statement, parts: Sequence[Part]) -> str:
    """Value and interval on one line; of several parts the range of each."""
    if any(math.isnan(part.value) for part in parts):
        return "not defined"
    values, lows, highs = zip(*((part.value, part.low, part.high) for part in parts), strict=True)
    has_interval = (min(lows), max(highs)) != (min(values), max(values))
    # What has no interval is exact.
    digits = 3 if has_interval else 4
    found = [_number(statement, value, digits) for value in (min(values), max(values))]
    text = " to ".join(dict.fromkeys(found))
    if has_interval:
        text += " [" + " – ".join(_number({}, value, 3) for value in (min(lows), max(highs))) + "]"
    return text + (f", {len(parts)} values" if len(parts) > 1 else "")


def _shown_in(published: Published, statement: Statement, judgement: Judgement) -> list[str]:
    """Where the paper's panel or table shows what a statement was judged by."""
    if statement["quantity"] in FIGURES and statement["family"] and not judgement.obtained:
        return []
    return _places(published, statement)


def _places(published: Published, statement: Statement) -> list[str]:
    """Where the paper's panel or table would show it, whether or not it was measured."""
    if statement["quantity"] in FIGURES and statement["family"]:
        panel = published.devices[statement["family"]]["panel"]
        return [f"fig{number}{panel}.png" for number in FIGURES[statement["quantity"]]]
    place = statement.get("figure", "")
    return [
        *(f"table{number}.md" for number in re.findall(r"Table (\d+)", place)),
        *(f"fig{panel}.png" for panel in re.findall(r"Fig\. (\d+[ab])", place)),
        *statement.get("see", []),
    ]


def _analogue_shown_in(
    published: Published, statement: Statement, analogue: Judgement, data: Measured | None
) -> list[str]:
    """Figures of the device; those of a workload whose layers are named <workload>_oc<count>
    have its name."""
    if not analogue.obtained or data is None:
        return []
    names = {layer.name.rpartition("_oc")[0] for layer in _at_hand(published, statement, data)}
    return [
        f"{data.results.device}/fig{number}{'_' * bool(name)}{name}.png"
        for number in FIGURES[statement["quantity"]]
        for name in sorted(names)
    ]


def joined(separator: str, *texts: str) -> str:
    return separator.join(text for text in texts if text)
