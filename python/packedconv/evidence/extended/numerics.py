"""Errors by cause, and which dense baselines the printed ticks of figure 8 leave.

What was computed for this (results/<device>/<run>/numerics.csv) is read here; the emulations
themselves are in evidence.numerics.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from packedconv.bench.extended.numerics_rows import (
    BASELINES,
    COLUMNS,
    COMPARISONS,
    TEXT,
    WHOLE,
)
from packedconv.evidence.audit import CLEARLY
from packedconv.evidence.published import Published
from packedconv.evidence.samples import distribution, file_error, load_json, require_same
from packedconv.layer import Layer
from packedconv.samples_file import read_text, text_sha256
from packedconv.settings import load_settings, settings_hash

# Bytes of a nonzero, value and 16-bit index together.
BYTES = {"fp16": "4", "bf16": "4", "fp32": "6 or 8"}

FITS, OPEN, EXCLUDED = "on the ticks", "open", "excluded"

# The figure's table: the rows, and what follows from them. relative_error: of the largest output.
# over_largest_tick: the largest error over the sparsities, in units of the largest printed tick.
DERIVED = ("relative_error", "bytes_per_nonzero", "over_largest_tick", "verdict")

POINT = ["layer", "sparsity", "input_distribution", "weight_distribution"]
COMPARISON = ["implementation", "stored", "reference", "reference_weights"]
# A curve of figure 8.
CURVE = [column for column in [*POINT, *COMPARISON] if column != "sparsity"]

_AGAIN = "compute it again"


class Numerics(NamedTuple):
    """Errors by cause of a few layers.

    settings: settings.json; rows: numerics_rows.COLUMNS; facts: those beside the rows; published:
    the paper's numbers.
    """

    settings: dict[str, Any]
    rows: pd.DataFrame
    facts: dict[str, Any]
    published: Published

    @property
    def panels(self) -> dict[str, str]:
        """The panel of figure 8 that has such a layer, by name of the layer."""
        return {record["name"]: record["panel"] for record in self.facts["experiment"]["layers"]}

    def paper_layer(self, name: str) -> Layer:
        """The layer as the paper has it, which may be larger."""
        count = int(self.rows.loc[self.rows["layer"] == name, "out_channels"].iloc[0])
        family = self.published.device_of_panel(self.panels[name])
        return self.published.layer(family, count)

    def ticks(self, name: str) -> list[float]:
        """The ticks printed on figure 8's axis of errors in a layer's panel, ascending."""
        return self.published.ticks(self.panels[name], 8)

    def distributions(self, kind: str) -> dict[str, str]:
        """In words, by name; kind: "inputs" or "weights". The first is that of figure 8."""
        words = self.facts["distributions"][kind]
        return {
            name: words[name] or distribution(self.settings[kind])
            for name in self.facts["experiment"][kind]
        }


def load_numerics(folder: str | Path, published: Published) -> Numerics:
    """Load numerics.csv and .json of results/<device>/<run>/.

    Raises FileNotFoundError or ValueError when a file is missing, cut, or of other settings.
    """
    folder = Path(folder)
    settings = load_settings(str(folder / "settings.json"))
    path = folder / "numerics.csv"
    facts = load_json(
        path.with_suffix(".json"),
        ("rows_sha256", "settings_hash", "experiment", "distributions", "comparable", "threads"),
    )
    if facts["settings_hash"] != settings_hash(settings):
        raise file_error(
            path.with_suffix(".json"), "settings_hash", "that of settings.json", "another", _AGAIN
        )
    if facts["rows_sha256"] != text_sha256(read_text(str(path)) or ""):
        raise file_error(
            path, "content", "the rows that numerics.json belongs to", "others", _AGAIN
        )
    rows = pd.read_csv(path, dtype=dict.fromkeys(TEXT, "str"), keep_default_na=False)
    require_same(path, "columns", set(rows.columns), set(COLUMNS))
    require_same(path, "device", set(rows["device"]), {settings["device"]["name"]})
    require_same(path, "run", set(rows["run"]), {settings["run"]})
    rows["sparsity"] = rows["sparsity"].round(6)
    _require_complete(path, rows, facts["experiment"])
    return Numerics(settings, rows, facts, published)


def numerics_table(found: Numerics) -> pd.DataFrame:
    """The rows with `DERIVED`; a verdict where the reference is a baseline of figure 8."""
    table = found.rows.copy()
    table["relative_error"] = table["max_abs_error"] / table["largest_output"]
    keys = table[COMPARISON].apply(tuple, axis=1)
    whole = keys.isin(WHOLE)
    table["bytes_per_nonzero"] = table["stored"].map(BYTES).where(whole)
    judged = table["reference"].isin(BASELINES)
    table["over_largest_tick"], table["verdict"] = np.nan, None
    for curve, part in table[judged].groupby(CURVE, sort=False):
        name = str(curve[0])
        ticks = found.ticks(name)
        largest = part["max_abs_error"].max()
        factor = tick_factor(found.published, found.panels[name])
        table.loc[part.index, "over_largest_tick"] = largest / ticks[-1]
        table.loc[part.index, "verdict"] = verdict(largest, ticks, factor)
    return table[[*COLUMNS, *DERIVED]]


def verdict(largest: float, ticks: list[float], factor: float) -> str:
    """Whether a curve whose largest error is `largest` would have axis ticks like those printed.

    On the ticks: within `factor` of their range. Excluded: above the range by more than CLEARLY.
    Between the two it is open, since the paper does not state what it drew values from. Nothing is
    excluded for small errors: two sums in the same order differ by none.
    """
    if largest > CLEARLY * ticks[-1]:
        return EXCLUDED
    if ticks[0] / factor <= largest <= factor * ticks[-1]:
        return FITS
    return OPEN


def tick_factor(published: Published, panel: str) -> float:
    """The tolerance of the statement on the size of figure 8's errors, a factor.

    Raises ValueError where the statements of a panel have none or several.
    """
    factors = {
        statement["tolerance"]["factor"]
        for statement in published.statements
        if (statement["quantity"], statement.get("figure")) == ("error_range", f"Fig. 8{panel}")
    }
    if len(factors) != 1:
        raise ValueError(
            f"config/paper.yaml: statements: expected one tolerance of error_range in Fig. "
            f"8{panel}, got {sorted(factors)}"
        )
    return float(factors.pop())


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """One row per curve of figure 8: smallest and largest error over the sparsities, verdict."""
    judged = table[table["verdict"].notna()]
    return judged.groupby(CURVE, sort=False, as_index=False).agg(
        smallest=("max_abs_error", "min"),
        largest=("max_abs_error", "max"),
        over_largest_tick=("over_largest_tick", "first"),
        verdict=("verdict", "first"),
    )


def _require_complete(path: Path, rows: pd.DataFrame, experiment: dict[str, Any]) -> None:
    """Raise ValueError unless every point has every comparison once, with finite errors."""
    expected = {
        (record["name"], round(sparsity, 6), input_name, weight_name, *comparison)
        for record in experiment["layers"]
        for sparsity in experiment["sparsities"]
        for input_name in experiment["inputs"]
        for weight_name in experiment["weights"]
        for comparison in COMPARISONS
    }
    keys = list(rows[[*POINT, *COMPARISON]].itertuples(index=False, name=None))
    if len(keys) != len(expected) or set(keys) != expected:
        raise file_error(
            path, "rows", f"{len(expected)}, one per point and comparison", f"{len(keys)}", _AGAIN
        )
    for column in ("max_abs_error", "largest_output"):
        if not (np.isfinite(rows[column]) & (rows[column] >= 0)).all():
            raise file_error(path, column, "finite values", "others", _AGAIN)
