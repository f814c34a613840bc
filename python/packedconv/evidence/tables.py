"""Tables 1 to 6 of the paper: recomputed, or filled in for this repository and machine.

A recomputed cell agrees with a printed one when it equals it after rounding to the printed
number of decimals, half up. The model is evaluated in exact fractions, so that no binary
rounding decides a cell.
"""

import csv
import fractions
import importlib.metadata
import pathlib
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from packedconv.evidence import NOT_MEASURED
from packedconv.evidence.published import Published, load
from packedconv.evidence.samples import load_json
from packedconv.evidence.tabular import write_table
from packedconv.layer import Layer
from packedconv.roofline import (
    Device,
    exact,
    exact_device,
    sparse_arithmetic_intensity,
    winograd_speedup,
)
from packedconv.settings import load_settings

AS_STATED = "as stated"

# What is tried to reconcile Tables 2 and 3 with section 4.2, chosen for the cells that it brings
# out: Winograd's reduction, the A100's ridge point (FLOP/byte), the share of the bandwidth.
TRIED_REDUCTION = fractions.Fraction(2)
TRIED_RIDGE_POINT = fractions.Fraction(13)
TRIED_SHARE = fractions.Fraction(3, 4)
# Bandwidth of the A100 with 40 GB, NVIDIA's data sheet; the paper states 2 TB/s.
A100_40GB_BANDWIDTH = fractions.Fraction("1.555e12")

NOT_FOUND = "not found"
NOT_RECORDED = "not recorded"


class Assumption(NamedTuple):
    """Parameters of the Winograd comparison: how far Winograd reduces the operations of the
    dense side, and the roofs of the device."""

    name: str
    reduction: fractions.Fraction
    device: Device


class Agreement(NamedTuple):
    """How many cells of a table come out as printed."""

    agreeing: int
    cells: int
    note: str


def round_half_up(value: fractions.Fraction, digits: int) -> fractions.Fraction:
    """Round a non-negative exact value to `digits` decimals, ties upwards."""
    scale = 10**digits
    return fractions.Fraction((value * scale + fractions.Fraction(1, 2)) // 1, scale)


def decimals(value: fractions.Fraction, digits: int) -> str:
    """`value` rounded half up, written with `digits` decimals."""
    whole = str(int(round_half_up(value, digits) * 10**digits)).rjust(digits + 1, "0")
    return f"{whole[:-digits]}.{whole[-digits:]}" if digits else whole


def flops_text(value: float | fractions.Fraction) -> str:
    """FLOP/s in a unit of a reader's size."""
    value = float(value)
    return f"{value / 1e12:g} TFLOP/s" if value >= 1e11 else f"{value / 1e9:g} GFLOP/s"


def bandwidth_text(value: float | fractions.Fraction) -> str:
    """Bytes/s in a unit of a reader's size."""
    value = float(value)
    return f"{value / 1e12:g} TB/s" if value >= 1e12 else f"{value / 1e9:g} GB/s"


def assumptions(published: Published, table: str) -> list[Assumption]:
    """What section 4.2 states for Table 2 or 3, then what reconciles it with the cells.

    Raises ValueError for another table.
    """
    if table not in ("table2", "table3"):
        raise ValueError(f"table: expected table2 or table3, got {table!r}")
    entry = published.tables[table]
    device = exact_device(published.device(entry["device"]))
    stated = Assumption(AS_STATED, exact(entry["reduction"]), device)
    reduction = f"reduction {decimals(TRIED_REDUCTION, 1)}"
    if table == "table2":
        slower = device.peak_flops / TRIED_RIDGE_POINT
        return [
            stated,
            Assumption(
                f"{reduction}, ridge point {TRIED_RIDGE_POINT} ({bandwidth_text(slower)})",
                TRIED_REDUCTION,
                device._replace(bandwidth=slower),
            ),
            Assumption(
                f"{reduction}, A100-40GB ({bandwidth_text(A100_40GB_BANDWIDTH)})",
                TRIED_REDUCTION,
                device._replace(bandwidth=A100_40GB_BANDWIDTH),
            ),
        ]
    slower = device.bandwidth * TRIED_SHARE
    return [
        stated,
        Assumption(f"{reduction} ({bandwidth_text(device.bandwidth)})", TRIED_REDUCTION, device),
        Assumption(
            f"reduction {decimals(stated.reduction, 1)}, {float(100 * TRIED_SHARE):g} % of the "
            f"bandwidth ({bandwidth_text(slower)})",
            stated.reduction,
            device._replace(bandwidth=slower),
        ),
    ]


def table1(published: Published) -> pd.DataFrame:
    """Table 1, one row per sparsity: printed, recomputed (equations 4, 7 and 8), agrees."""
    entry, layer = published.tables["table1"], published.table1_layer()
    rows = []
    for sparsity, printed in zip(entry["sparsities"], entry["cells"], strict=True):
        value = sparse_arithmetic_intensity(layer, exact(sparsity))
        rows.append(
            {
                "table": "table1",
                "sparsity": f"{sparsity:.2f}",
                "assumption": AS_STATED,
                **_compared(value, printed, entry["digits"]),
            }
        )
    return pd.DataFrame(rows)


def winograd_table(published: Published, table: str) -> pd.DataFrame:
    """Table 2 or 3, one row per cell and assumption: printed, recomputed, agrees."""
    entry = published.tables[table]
    rows = []
    for assumption in assumptions(published, table):
        for layer, printed in winograd_cells(published, table):
            value = winograd_speedup(
                layer, exact(entry["sparsity"]), assumption.device, assumption.reduction
            )
            rows.append(
                {
                    "table": table,
                    "in_channels": layer.in_channels,
                    "out_channels": layer.out_channels,
                    "assumption": assumption.name,
                    "reduction": f"{float(assumption.reduction):g}",
                    "ridge_point": f"{float(assumption.device.ridge_point):.4f}",
                    **_compared(value, printed, entry["digits"]),
                }
            )
    return pd.DataFrame(rows)


def winograd_cells(published: Published, table: str) -> Iterator[tuple[Layer, float]]:
    """The layers of Table 2 or 3 with their printed speedups, row by row."""
    entry = published.tables[table]
    for in_channels, row in zip(entry["in_channels"], entry["cells"], strict=True):
        for out_channels, printed in zip(entry["out_channels"], row, strict=True):
            name = f"ic{in_channels}_oc{out_channels}"
            yield (
                Layer(
                    name=name, in_channels=in_channels, out_channels=out_channels, **entry["layer"]
                ),
                printed,
            )


def recomputed(published: Published, table: str) -> pd.DataFrame:
    """Tidy cells of table1, table2 or table3."""
    return table1(published) if table == "table1" else winograd_table(published, table)


def agreement(published: Published, table: str, assumption: str = AS_STATED) -> Agreement:
    """Cells of table1, table2 or table3 that come out as printed under an assumption.

    The note says, for the assumption as stated, what the others give.
    Raises ValueError when the table knows no such assumption.
    """
    frame = recomputed(published, table)
    agreeing = frame.groupby("assumption", sort=False)["agrees"].sum()
    if assumption not in agreeing.index:
        raise ValueError(f"assumption: expected one of {list(agreeing.index)}, got {assumption!r}")
    cells = len(frame) // len(agreeing)
    others = agreeing.drop(assumption) if assumption == AS_STATED else {}
    note = "; ".join(f"{count} of {cells} with {name}" for name, count in others.items())
    return Agreement(int(agreeing[assumption]), cells, note)


def shown_table1(published: Published) -> pd.DataFrame:
    """Table 1 as the paper lays it out: one column per sparsity."""
    frame = table1(published)
    shown = {"": ["printed", "recomputed", "agrees"]}
    for row in frame.itertuples():
        shown[f"S {row.sparsity}"] = [row.printed, row.rounded, "yes" if row.agrees else "no"]
    return pd.DataFrame(shown)


def shown_winograd_table(published: Published, table: str) -> pd.DataFrame:
    """Table 2 or 3: per row of the paper one line printed and one per assumption.

    A recomputed cell that differs from the printed one carries an asterisk.
    """
    entry, frame = published.tables[table], winograd_table(published, table)
    names = list(dict.fromkeys(frame["assumption"]))
    rows = []
    for in_channels in entry["in_channels"]:
        for name in ["printed", *names]:
            chosen = name if name in names else names[0]
            cells = frame[(frame["in_channels"] == in_channels) & (frame["assumption"] == chosen)]
            row = {"IC": str(in_channels), "": name}
            for cell in cells.itertuples():
                text = cell.printed if name == "printed" else cell.rounded
                mark = "" if name == "printed" or cell.agrees else "*"
                row[f"OC {cell.out_channels}"] = text + mark
            rows.append(row)
    return pd.DataFrame(rows)


def agreement_notes(published: Published, table: str) -> list[str]:
    """One line per assumption: how many cells agree."""
    frame = recomputed(published, table)
    lines = []
    for name, cells in frame.groupby("assumption", sort=False):
        lines.append(f"{name}: {cells['agrees'].sum()} of {len(cells)} cells agree")
    lines.append("Cells agree when they are equal after rounding half up to the printed decimals")
    return lines


def write_winograd_table(paper: str, table: str, out: str) -> None:
    """Write Table 2 or 3 (.csv, .md, .tex) from config/paper.yaml."""
    published = load(paper)
    entry = published.tables[table]
    write_table(
        winograd_table(published, table),
        out,
        f"{entry['where']}: {entry['title']}, printed and recomputed",
        f"tab:{table}",
        shown=shown_winograd_table(published, table),
        notes=[
            *agreement_notes(published, table),
            f"As stated: operations of the dense side divided by {entry['reduction']:g}, roofs of "
            "section 4. An asterisk marks a cell that differs from the printed one",
        ],
    )


# Where this repository has what Table 4 lists, by kind and number of the paper's element.
_SOURCES = {
    ("Algorithm", 1): "csrc/cuda/paper_kernel.cuh, csrc/cpu/naive.cpp, csrc/cpu/kernel.cpp",
    ("Figure", 2): "scripts/fig2_roofline.py, python/packedconv/roofline.py",
    ("Figure", 3): "scripts/fig3_thread_mapping.py, csrc/cuda/mapping_config.h",
    ("Figure", 4): "scripts/fig4_packed_word.py, csrc/packed_word.h, csrc/FORMAT.md",
    ("Figure", 5): "scripts/fig5_speedup.py",
    ("Figure", 6): "scripts/fig6_times.py",
    ("Figure", 7): "scripts/fig7_measured_roofline.py",
    ("Figure", 8): "scripts/fig8_errors.py",
    ("Table", 1): "scripts/table1_arithmetic_intensity.py",
    ("Table", 2): "scripts/table2_winograd_a100.py",
    ("Table", 3): "scripts/table3_winograd_jetson_nano.py",
}
# What produces the measurements behind figures 5 to 8.
_MEASURING = {
    5: "scripts/bench.py, ",
    6: "scripts/bench.py, ",
    7: "scripts/bench.py, scripts/ceilings.py, ",
    8: "scripts/check.py, ",
}
_PLOTTING = "python/packedconv/plots/, python/packedconv/evidence/"


def table4(published: Published) -> pd.DataFrame:
    """Table 4, one row per artifact and paper element, with the files of this repository."""
    panels = {figure["figure"]: figure["panels"] for figure in published.figures}
    measured = {figure["figure"] for figure in published.figures if figure["measured"]}
    rows = []
    for row in published.tables["table4"]["rows"]:
        elements = [("Algorithm", number) for number in row["algorithms"]]
        elements += [("Figure", number) for number in row["figures"]]
        elements += [("Table", number) for number in row["tables"]]
        for kind, number in elements:
            files = _SOURCES[kind, number]
            if kind == "Figure" and number in measured:
                files = _MEASURING[number] + files
            rows.append((row, f"{kind} {number}", files, _targets(kind, number, panels)))
        if "elements" in row:
            rows.append((row, row["elements"], _PLOTTING, "all of the above"))
    return pd.DataFrame(
        [
            {
                "artifact": row["artifact"],
                "contribution": row["contribution"],
                "paper_element": element,
                "files": files,
                "targets": targets,
            }
            for row, element, files, targets in rows
        ]
    )


def table5(published: Published, steps: Sequence[str]) -> pd.DataFrame:
    """Table 5 beside measured minutes, one row per step and results folder.

    steps: results/<device>/<run>/steps.csv files (columns step, seconds); a step without a row
    was not measured. Raises ValueError for a file of another form.
    """
    entry = published.times_table
    measured = {_folder(path): _read_steps(path) for path in steps} or {("", ""): {}}
    rows = []
    for (device, run), seconds in measured.items():
        for step in entry["steps"]:
            rows.append(
                _time_row(step["title"], step["minutes"], device, run, seconds.get(step["step"]))
            )
        missing = [step["step"] for step in entry["steps"] if step["step"] not in seconds]
        total = sum(seconds.values()) if seconds and not missing else None
        rows.append(_time_row("Total", entry["total"], device, run, total))
    return pd.DataFrame(rows)


def shown_table5(frame: pd.DataFrame) -> pd.DataFrame:
    """Table 5 with one column of measured minutes per results folder."""
    shown = {}
    for (device, run), rows in frame.groupby(["device", "run"], sort=False):
        shown.setdefault("Step", list(rows["step"]))
        ranges = zip(rows["printed_low"], rows["printed_high"], strict=True)
        shown.setdefault("Printed (minutes)", [f"{low:g}–{high:g}" for low, high in ranges])
        title = f"Measured on {device}, run {run} (minutes)" if device else "Measured (minutes)"
        shown[title] = [text or NOT_MEASURED for text in rows["minutes"]]
    return pd.DataFrame(shown)


def table5_notes(frame: pd.DataFrame) -> list[str]:
    """Sum of the printed steps, and what was left out of a measured total."""
    first = frame[(frame["device"] == frame["device"][0]) & (frame["run"] == frame["run"][0])]
    steps = first[first["step"] != "Total"]
    notes = [
        f"The printed steps add up to {steps['printed_low'].sum():g}–"
        f"{steps['printed_high'].sum():g} minutes"
    ]
    if (frame["minutes"] == "").any():
        notes.append(f"{NOT_MEASURED}: no such step was timed, or a total lacks a step")
    return notes


# What each requirement is to this project on a machine without a GPU.
_ON_CPU = {
    "CUDA Toolkit": "not needed",
    "Python": "3.11 or later",
    "PyTorch": "the version of envs/requirements.lock",
    "pybind11": "the version of envs/requirements.lock",
    "CMake": "3.20 or later",
    "GCC": "any C++14 compiler with OpenMP",
}


def table6(published: Published, found: dict[str, str | None] | None = None) -> pd.DataFrame:
    """Table 6: what the paper requires beside what is installed here.

    found: version per software, None where there is none, NOT_RECORDED where nothing says; by
    default looked up here. "met" is empty where it cannot be decided ("latest").
    """
    found = found_versions() if found is None else found
    rows = []
    for requirement in published.software["requirements"]:
        name, comparator, version = (requirement[key] for key in ("name", "comparator", "version"))
        here = found.get(name)
        met = version_meets(here, comparator, version)
        rows.append(
            {
                "software": name,
                "required": "latest" if comparator == "latest" else _required(comparator, version),
                "found": here or NOT_FOUND,
                "met": "not checked" if met is None else ("yes" if met else "no"),
                "needed_on_cpu": _ON_CPU[name],
            }
        )
    return pd.DataFrame(rows)


def version_meets(found: str | None, comparator: str, version: str | None) -> bool | None:
    """Whether a version satisfies "==" (in the parts that are printed), ">=" or "latest".

    None when it cannot be told: "latest" needs a package index, NOT_RECORDED was not kept.
    """
    if found is None:
        return False
    if comparator == "latest" or found == NOT_RECORDED:
        return None
    parts = [int(part) for part in version.split(".")]
    here = [int(part) for part in re.findall(r"\d+", found.split("+")[0])]
    here += [0] * (len(parts) - len(here))
    return here[: len(parts)] == parts if comparator == "==" else here >= parts


def found_versions() -> dict[str, str | None]:
    """Versions on this machine of what Table 6 requires; None where there is none.

    Packages are asked for their metadata, so that nothing heavy is imported.
    """
    return {
        "CUDA Toolkit": _program_version(["nvcc", "--version"], r"release (\d+\.\d+)"),
        "Python": platform.python_version(),
        "PyTorch": _package_version("torch"),
        "pybind11": _package_version("pybind11"),
        "CMake": _program_version(["cmake", "--version"], r"version (\d+\.\d+(?:\.\d+)?)"),
        "GCC": _program_version(["g++", "-dumpfullversion"], r"^(\d+(?:\.\d+)*)"),
    }


def recorded_versions(path: str) -> dict[str, str | None]:
    """`found_versions` of a machine that was measured elsewhere, by the facts of a layer.

    Raises ValueError for a file of another form.
    """
    machine = load_json(pathlib.Path(path), ("machine",))["machine"]
    extension = machine.get("extension") or {}
    compiler = re.fullmatch(r"GNU (\S+)", extension.get("compiler") or "")
    return {
        "CUDA Toolkit": extension.get("cuda"),
        "Python": machine.get("python") or NOT_RECORDED,
        "PyTorch": machine.get("torch") or NOT_RECORDED,
        "pybind11": NOT_RECORDED,
        "CMake": NOT_RECORDED,
        "GCC": compiler[1] if compiler else NOT_RECORDED,
    }


def _compared(value: fractions.Fraction, printed: float, digits: int) -> dict:
    return {
        "printed": decimals(exact(printed), digits),
        "computed": f"{float(value):.6f}",
        "rounded": decimals(value, digits),
        "agrees": round_half_up(value, digits) == exact(printed),
    }


def _targets(kind: str, number: int, panels: dict[int, list[str]]) -> str:
    if kind == "Algorithm":
        return "build"
    if kind == "Table":
        return f"figures/table{number}.csv"
    return ", ".join(f"figures/fig{number}{panel}.pdf" for panel in panels[number] or [""])


def _time_row(
    title: str, printed: Sequence[float], device: str, run: str, seconds: float | None
) -> dict:
    return {
        "step": title,
        "printed_low": printed[0],
        "printed_high": printed[1],
        "device": device,
        "run": run,
        "minutes": "" if seconds is None else f"{seconds / 60:.1f}",
    }


def _folder(path: str) -> tuple[str, str]:
    """Device and run of a results folder: of its settings, which keep their name where the
    folder has another (an imported run), else of the path."""
    settings = pathlib.Path(path).with_name("settings.json")
    if settings.exists():
        found = load_settings(str(settings))
        return found["device"]["name"], found["run"]
    parts = pathlib.Path(path).resolve().parts
    if len(parts) < 3:
        raise ValueError(f"steps: expected results/<device>/<run>/steps.csv, got {path}")
    return parts[-3], parts[-2]


def _read_steps(path: str) -> dict[str, float]:
    known = ("setup", "compilation", "benchmark", "analysis")
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != ["step", "seconds"]:
            raise ValueError(
                f"{path}: expected columns step,seconds, got {reader.fieldnames}; "
                "delete it and run the workflow again"
            )
        seconds = {}
        for row in reader:
            if row["step"] not in known or row["step"] in seconds:
                raise ValueError(
                    f"{path}: step: expected each of {known} once, got {row['step']!r}"
                )
            try:
                seconds[row["step"]] = float(row["seconds"])
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}: seconds of {row['step']}: expected a number, got {row['seconds']!r}"
                ) from None
    return seconds


def _required(comparator: str, version: str) -> str:
    return version if comparator == "==" else f"{comparator} {version}".replace(">=", "≥")


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _program_version(command: Sequence[str], pattern: str) -> str | None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(pattern, answer)
    return match.group(1) if match else None
