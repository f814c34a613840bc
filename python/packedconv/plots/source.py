"""What a figure is drawn from: a panel of the paper with its measurements, or one device."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from packedconv.evidence import NOT_MEASURED
from packedconv.evidence import published as paper
from packedconv.evidence.published import Published
from packedconv.evidence.samples import Results

# Columns that every table of plotted data starts with. `origin` keeps measured and
# printed values apart; `device` and `run` are empty where a value is printed.
ORIGIN = ["origin", "device", "run"]


class Source(NamedTuple):
    """A panel of the paper (`panel` and `published` set) or a device (`results` has one)."""

    figure: int
    panel: str | None
    published: Published | None
    results: tuple[Results, ...]
    # Why results that were given are not drawn, for the note in the figure.
    left_out: str = ""

    @property
    def title(self) -> str:
        """The device that the figure is about."""
        if self.panel is None:
            return device_title(self.results[0])
        return self.published.devices[self.family]["title"]

    @property
    def family(self) -> str:
        """The device family that the figure is about."""
        if self.panel is None:
            return self.results[0].family
        return self.published.device_of_panel(self.panel)

    @property
    def note(self) -> str:
        """What to say in a panel without a measurement; empty where there is one."""
        if self.results:
            return ""
        return f"{NOT_MEASURED}\n{self.left_out or 'no results of this device'}"

    def printed(self) -> list[dict[str, Any]]:
        """The printed points of this panel in base units; none for a device."""
        if self.panel is None:
            return []
        return self.published.points(self.panel, self.figure)

    def with_channels(self, out_channels: int) -> "Source":
        """The same source with only the layers of that many output channels."""
        kept = [_with_layers(results, {"out_channels": out_channels}) for results in self.results]
        drawn = tuple(results for results in kept if results is not None)
        left_out = self.left_out
        if self.results and not drawn:
            left_out = f"no results of OC = {out_channels}"
        return self._replace(results=drawn, left_out=left_out)

    def measured(self, measure: Callable[[Results], pd.DataFrame]) -> pd.DataFrame:
        """`measure` of every set of results, with `ORIGIN` in front."""
        tables = []
        for results in self.results:
            table = measure(results)
            table = table.assign(origin="measured", device=results.device, run=results.run)
            rest = [column for column in table if column not in ORIGIN]
            tables.append(table[[*ORIGIN, *rest]])
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=ORIGIN)


def device_title(results: Results) -> str:
    """What was measured: the processor's model name for a CPU, else the device's title."""
    if results.settings["device"].get("kind") == "cpu":
        for facts in results.facts.values():
            if facts.get("machine", {}).get("cpu"):
                return str(facts["machine"]["cpu"])
    return results.title


def load_source(options: argparse.Namespace, figure: int) -> Source:
    """The source that the options of `arguments.figure_parser` name.

    Raises ValueError for results of another device family than the panel's, or options
    that do not go together.
    """
    if options.panel is None:
        if len(options.results) != 1:
            raise ValueError(
                "--results: expected one folder for the figure of a device, got "
                f"{len(options.results)}; add --panel and --paper for a panel of the paper"
            )
        return Source(figure, None, None, (Results.load(options.results[0]),))
    if options.paper is None:
        raise ValueError("--paper: expected config/paper.yaml with --panel, got nothing")
    published = paper.load(options.paper)
    results = [Results.load(folder) for folder in options.results]
    return panel_source(figure, options.panel, published, results)


def panel_source(figure: int, panel: str, published: Published, results: list[Results]) -> Source:
    """A panel of the paper with those layers of `results` that have the paper's shape.

    Raises ValueError for results of another device family: nothing measured on one
    device is shown as another.
    """
    family = published.device_of_panel(panel)
    for given in results:
        if given.family != family:
            raise ValueError(
                f"--results {given.folder}: expected a device of family {family} for panel "
                f"{panel}, got {given.device} of family {given.family}; draw it with "
                "--results alone"
            )
    shape = published.workloads[family]["layer"]
    kept = [_with_layers(given, shape) for given in results]
    drawn = tuple(given for given in kept if given is not None)
    left_out = "results of other layer shapes are not drawn" if results and not drawn else ""
    return Source(figure, panel, published, drawn, left_out)


def _with_layers(results: Results, fields: dict[str, int]) -> Results | None:
    """The results of those layers whose fields have these values; None without any."""
    names = [
        name
        for name, layer in results.layers.items()
        if all(getattr(layer, field) == size for field, size in fields.items())
    ]
    if not names:
        return None
    return dataclasses.replace(
        results,
        samples=results.samples[results.samples["layer"].isin(names)].reset_index(drop=True),
        errors=results.errors[results.errors["layer"].isin(names)].reset_index(drop=True),
    )


def with_printed(
    source: Source, measured: pd.DataFrame, columns: list[str], value: str
) -> pd.DataFrame:
    """Measured rows, then the printed points of the panel with `value` in base units.

    Columns are ORIGIN, `columns` and `where`, the place in the paper of a printed value.
    """
    printed = pd.DataFrame(
        [dict(point, origin="printed", **{value: point["value"]}) for point in source.printed()],
        columns=[*ORIGIN, *columns, "where"],
    )
    if printed.empty:
        return measured.reindex(columns=printed.columns)
    if measured.empty:
        return printed
    return pd.concat([measured, printed], ignore_index=True)[printed.columns]
