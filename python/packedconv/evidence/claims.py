"""A verdict for every statement of the paper (`statements` of config/paper.yaml)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from packedconv.bench.settings import layers_of
from packedconv.evidence.published import Published
from packedconv.evidence.quantities import (
    COMPUTED,
    EVERY_CHANNEL,
    MEASURED,
    Measured,
    Measurement,
    NotMeasuredError,
    Part,
)
from packedconv.evidence.samples import Results
from packedconv.layer import Layer

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
    "analogue_device",
    "analogue_obtained",
    "analogue_interval",
    "analogue_verdict",
)

# Widths of the columns in LaTeX, on a landscape page.
COLUMN_FORMAT = (
    "p{2cm}p{1cm}p{1cm}p{3.2cm}p{1.3cm}p{1.6cm}p{2cm}p{2cm}p{1.4cm}p{2.4cm}"
    "p{1.6cm}p{2cm}p{2cm}p{1.8cm}"
)

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
    """A verdict with what it rests on; obtained and interval as text."""

    verdict: str
    reason: str = ""
    obtained: str = ""
    interval: str = ""


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


def judge(statement: Statement, measurement: Measurement) -> Judgement:
    """The verdict on a statement from the quantity that it speaks of.

    replicated: every part's interval lies inside the band; not replicated: one lies wholly
    outside; else inconclusive.
    """
    scale = SCALE.get(statement.get("unit", ""), 1.0)
    parts = [
        Part(part.label, part.value / scale, part.low / scale, part.high / scale)
        for part in measurement.parts
    ]
    verdict, reason = _verdict(statement, parts, measurement.sparsities)
    reasons = [text for text in (reason, measurement.note) if text]
    return Judgement(
        verdict, "; ".join(reasons), _obtained(statement, parts), _interval(statement, parts)
    )


def claims(published: Published, results: Sequence[Results], device: str) -> pd.DataFrame:
    """The table of verdicts, one row per statement, all columns text.

    Results of a statement's own device family decide it. Results of `device`, where that is of
    another family, fill the analogue_ columns: the same quantity on that device, with this
    kernel and that batch; analogue_verdict holds the reason after a colon.
    Raises ValueError when two sets of results are of one device.
    """
    names = [entry.device for entry in results]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"results: expected one run per device, got {names.count(name)} of {name};"
                " give one of them"
            )
    at_hand = next((entry for entry in results if entry.device == device), None)
    own = [(entry, Measured(entry)) for entry in results]
    other = Measured(at_hand, analogue=True) if at_hand else None
    rows = []
    for statement in published.statements:
        judgement = _judge_own(published, statement, own)
        name, analogue = _judge_analogue(statement, other, device)
        rows.append(
            (
                statement["id"],
                ", ".join(statement[key] for key in ("section", "figure") if key in statement),
                statement["kind"],
                statement["statement"],
                printed_text(statement),
                tolerance_text(statement),
                judgement.obtained,
                judgement.interval,
                judgement.verdict,
                judgement.reason,
                name,
                analogue.obtained,
                analogue.interval,
                ": ".join(text for text in (analogue.verdict, analogue.reason) if text),
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
        statement["id"]: _decidable(published, statement, device_family, settings)
        for statement in published.statements
    }


def counts(table: pd.DataFrame) -> dict[str, int]:
    """Number of statements per verdict."""
    return {verdict: int((table["verdict"] == verdict).sum()) for verdict in VERDICTS}


def preamble(published: Published, table: pd.DataFrame, device: str) -> str:
    """What a reader has to know before the table."""
    source = published.source
    summed = ", ".join(f"{number} {verdict}" for verdict, number in counts(table).items())
    judged = table["analogue_verdict"].str.split(":").str[0]
    analogues = ", ".join(f"{(judged == verdict).sum()} {verdict}" for verdict in VERDICTS[:3])
    text = (
        f'The statements are those of "{source["title"]}" by {", ".join(source["authors"])}'
        f" (arXiv {source['arxiv']}). The verdicts come from an independent implementation,"
        " written from the text of the paper; the authors' code was not available to it."
        " What is not replicated here is therefore not refuted.\n\n"
        f"{len(table)} statements: {summed}."
    )
    if judged.isin(VERDICTS).any():
        text += (
            f"\n\nThe analogue columns hold the same quantity on {device}, which is not the"
            " device that the statement is about: another kernel, another batch, no verdict on"
            f" the paper. Of these analogues: {analogues}."
        )
    return text


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the column names that a reader sees."""
    return table.rename(columns=lambda name: name.replace("_", " "))


def printed_text(statement: Statement) -> str:
    """What the paper prints, with its unit."""
    printed = statement["printed"]
    if isinstance(printed, str):
        return printed
    if isinstance(printed, (list, tuple)):
        return " – ".join(_number(statement, value) for value in printed)
    return _number(statement, printed)


def tolerance_text(statement: Statement) -> str:
    """The tolerance in words."""
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
    if "sparsities" in tolerance:
        text += f", {tolerance['sparsities']} sparsities"
    return text


def _decidable(
    published: Published,
    statement: Statement,
    device_family: str,
    settings: Mapping[str, Any] | None,
) -> str:
    if statement["quantity"] is None:
        return "not"
    if statement["quantity"] in COMPUTED:
        return "decidable"
    own = statement["family"] == device_family
    if not own and ("analogue" in statement or not _has_kind(statement, device_family)):
        return "not"
    if settings is not None and not _will_measure(published, statement, own, settings):
        return "not"
    return "decidable" if own else "analogue"


def _will_measure(
    published: Published, statement: Statement, own: bool, settings: Mapping[str, Any]
) -> bool:
    """Whether a run measures the channels and sparsities that a statement needs."""
    layers = layers_of(dict(settings))
    if own and any(_other_workload(published, statement["family"], layer) for layer in layers):
        return False
    parameters = statement.get("parameters", {})
    wanted = parameters.get("out_channels") or []
    if isinstance(wanted, int):
        wanted = [wanted]
    elif not own and statement["quantity"] in EVERY_CHANNEL:
        wanted = []
    if not set(wanted) <= {layer.out_channels for layer in layers}:
        return False
    sparsities = {round(value, 6) for value in settings["sparsities"]}
    if "sparsity" in parameters and round(parameters["sparsity"], 6) not in sparsities:
        return False
    return len(sparsities) >= statement.get("tolerance", {}).get("sparsities", 0)


def _has_kind(statement: Statement, device_family: str) -> bool:
    kind = "cpu" if device_family == "cpu" else "cuda"
    return statement.get("requires", kind) == kind


def _judge_own(
    published: Published, statement: Statement, own: Sequence[tuple[Results, Measured]]
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
    reasons = []
    for entry, data in own:
        if entry.family != family:
            continue
        where = f"{entry.device}, run {entry.run}"
        try:
            _require_workload(published, family, entry)
            judgement = judge(statement, MEASURED[quantity](data, **parameters))
        except NotMeasuredError as missing:
            reasons.append(f"{where}: {missing}")
            continue
        reason = "; ".join(text for text in (f"on {where}", judgement.reason) if text)
        return judgement._replace(reason=reason)
    if not reasons:
        title = published.devices[family]["title"]
        reasons = [f"about the {title}; no results of one are here"]
    return Judgement(NOT_TESTABLE, "; ".join(reasons))


def _judge_analogue(
    statement: Statement, data: Measured | None, device: str
) -> tuple[str, Judgement]:
    quantity = statement["quantity"]
    if quantity in COMPUTED or (data and data.results.family == statement["family"]):
        return "", Judgement("")
    if quantity is None:
        return "", Judgement(NOT_TESTABLE)
    if data is None:
        return device, Judgement(NOT_TESTABLE, "not measured")
    name = f"{device} ({_workload(data.results)})"
    if not _has_kind(statement, data.results.family):
        return name, Judgement(NOT_TESTABLE, "a CPU kernel has no counterpart")
    try:
        measurement = MEASURED[quantity](data, **statement.get("parameters", {}))
    except NotMeasuredError as missing:
        return name, Judgement(NOT_TESTABLE, str(missing))
    judgement = judge(statement, measurement)
    if "analogue" in statement:
        judgement = judgement._replace(verdict=NOT_TESTABLE, reason=statement["analogue"])
    elif statement.get("refutes_only") and judgement.verdict == REPLICATED:
        reason = "agrees, which does not confirm it"
        judgement = judgement._replace(verdict=INCONCLUSIVE, reason=reason)
    return name, judgement


def _require_workload(published: Published, family: str, results: Results) -> None:
    for layer in results.layers.values():
        wanted = _other_workload(published, family, layer)
        if wanted:
            raise NotMeasuredError(
                f"not the paper's workload ({_shape(wanted)}) but {_shape(layer)}"
            )


def _other_workload(published: Published, family: str, layer: Layer) -> Layer | None:
    """The paper's layer where this one is another; None where it is that layer."""
    wanted = published.layer(family, layer.out_channels)
    return None if layer._replace(name=wanted.name) == wanted else wanted


def _shape(layer: Layer) -> str:
    shape = f"N {layer.batch}, IC {layer.in_channels}, {layer.height}×{layer.width}"
    shape += f", K {layer.kernel_size}"
    if (layer.stride, layer.padding) != (1, layer.kernel_size // 2):
        shape += f", stride {layer.stride}, padding {layer.padding}"
    return shape


def _workload(results: Results) -> str:
    shapes = sorted({_shape(layer) for layer in results.layers.values()})
    return shapes[0] if len(shapes) == 1 else "several workloads"


def _verdict(
    statement: Statement, parts: Sequence[Part], sparsities: Sequence[float]
) -> tuple[str, str]:
    limits = band(statement)
    needed = statement.get("tolerance", {}).get("sparsities", 0)
    if len(sparsities) < needed:
        return INCONCLUSIVE, f"{len(sparsities)} of {needed} sparsities measured"
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


def _number(statement: Statement, value: float) -> str:
    if value == -math.inf:
        return "below the measured sparsities"
    if value == math.inf:
        return "above the measured sparsities"
    unit = statement.get("unit", "")
    space = "" if unit in ("", "×") else " "
    return f"{value:.4g}{space}{unit}"


def _obtained(statement: Statement, parts: Sequence[Part]) -> str:
    return "; ".join(f"{part.label} {_number(statement, part.value)}".strip() for part in parts)


def _interval(statement: Statement, parts: Sequence[Part]) -> str:
    return "; ".join(
        f"{part.label} {_number(statement, part.low)} – {_number(statement, part.high)}".strip()
        for part in parts
        if part.low != part.high and not math.isnan(part.low)
    )
