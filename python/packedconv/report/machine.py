"""The machine that a run was measured on, in words, from the facts that ride with its samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packedconv.layer import Layer
from packedconv.plots.captions import shapes
from packedconv.run_folder import load_object
from packedconv.settings import layers_of, validate_settings


def facts(folder: Path) -> list[tuple[str, str]]:
    """Names and values, in the order in which they are to be read.

    folder: results/<device>/<run>; what it does not have is left out. Raises ValueError for a
    file that was changed since it was written.
    """
    settings = _object(folder / "settings.json")
    measured = next(iter(sorted((folder / "bench").glob("*.json"))), None)
    layer = _object(measured) if measured else {}
    rows = [("device, run", f"{folder.parent.name}, {folder.name}"), *_origin(folder)]
    if layer:
        rows += _machine(layer["machine"], layer)
    else:
        rows.append(("measured", "nothing yet"))
    if settings:
        settings = validate_settings(settings)
        protocol = settings["protocol"]
        layers: list[Layer] = list(layers_of(settings))
        channels = ", ".join(str(one.out_channels) for one in layers)
        rows += [
            ("protocol", f"{protocol['rounds']} rounds of {protocol['executions']} executions"),
            ("layers", f"{shapes(layers)}; OC {channels}"),
            ("sparsities", ", ".join(f"{value:.2f}" for value in settings["sparsities"])),
            ("seed", str(settings["seed"])),
        ]
    peaks = _object(folder / "peaks.json")
    if peaks:
        rows.append(
            (
                "measured roofs",
                f"{peaks['peak_flops'] / 1e9:.3g} GFLOP/s, {peaks['bandwidth'] / 1e9:.3g} GB/s",
            )
        )
    return rows


def _machine(machine: Mapping[str, Any], layer: Mapping[str, Any]) -> list[tuple[str, str]]:
    gpus = [str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or []]
    extension, commit = machine.get("extension") or {}, machine.get("commit") or {}
    memory = machine.get("memory_bytes")
    named = {
        "processor": machine.get("cpu"),
        "cores": machine.get("usable_cores"),
        "threads": layer.get("threads"),
        "instruction set": machine.get("isa"),
        "GPU": ", ".join(gpus),
        "memory": f"{memory / 2**30:.1f} GiB" if memory else None,
        "system": machine.get("system"),
        "kernel": machine.get("kernel"),
        "Python": machine.get("python"),
        "PyTorch": machine.get("torch"),
        "compiler": extension.get("compiler"),
        "commit": (commit.get("id") or "")[:12] + (", modified" if commit.get("modified") else ""),
        "measured at": (layer.get("before") or {}).get("time"),
    }
    return [(name, str(value)) for name, value in named.items() if value not in (None, "")]


def _origin(folder: Path) -> list[tuple[str, str]]:
    """Of results that were measured elsewhere and brought here."""
    origin = _object(folder / "origin.json")
    return [
        (f"brought here: {name}", str(value))
        for name, value in origin.items()
        if isinstance(value, str)
    ]


def _object(path: Path) -> dict[str, Any]:
    return load_object(str(path)) if path.exists() else {}
