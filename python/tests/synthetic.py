"""Made-up results in the format of results/<device>/<run>/, the same on every call."""

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from packedconv.layer import Layer, nonzero_count
from packedconv.samples_file import ERROR_COLUMNS, SAMPLE_COLUMNS

SPARSITIES = (0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98)
FAMILIES = {"cpu": "cpu", "tegra-x1": "tegra-x1", "h200": "h200"}


def default_speedup(out_channels: int, sparsity: float) -> float:
    """Grows with sparsity, from 2 at .90."""
    return 2 + 30 * (sparsity - 0.90) + out_channels / 1000


def default_error(out_channels: int, sparsity: float) -> float:
    """Falls with sparsity, from 2e-7 at .90."""
    return 2e-7 * (1 - sparsity) / 0.10 * (1 + out_channels / 1000)


def write_results(
    folder: str | Path,
    device: str = "cpu",
    run: str = "paper",
    out_channels: Sequence[int] = (48, 64),
    sparsities: Sequence[float] = SPARSITIES,
    speedup: Callable[[int, float], float] = default_speedup,
    error: Callable[[int, float], float] = default_error,
    dense_seconds: Callable[[int, float], float] | None = None,
    dense_flops: float = 100e9,
    family: str | None = None,
    batch: int = 1,
    in_channels: int = 32,
    size: int = 256,
    rounds: int = 10,
    executions: int = 4,
    noise: float = 0.002,
    peak_flops: float = 200e9,
    bandwidth: float = 50e9,
    threads: int = 2,
) -> Path:
    """Write <folder>/<device>/<run>/ and return its path.

    `speedup(out_channels, sparsity)` sets the sparse times; the dense ones come from
    `dense_seconds(out_channels, sparsity)` or, without it, from `dense_flops` (FLOP/s).
    `error(out_channels, sparsity)` is the error that summation order alone gives; with the
    original weights it is a thousand times as large. `noise` is the relative spread of the
    executions of a round and of the rounds.
    """
    target = Path(folder) / device / run
    (target / "bench").mkdir(parents=True, exist_ok=True)
    if family is None:
        family = "a100" if device.startswith("a100") else FAMILIES.get(device, device)
    layers = [Layer(f"oc{oc}", batch, in_channels, oc, size, size) for oc in out_channels]
    settings: dict[str, Any] = {
        "device": {
            "name": device,
            "title": f"Synthetic {device}",
            "kind": "cpu" if family == "cpu" else "cuda",
            "family": family,
            "peak_flops": None,
            "bandwidth": None,
            "threads": threads,
        },
        "run": run,
        "seed": 1,
        "sparsities": list(sparsities),
        "threads": threads,
        "protocol": {
            "rounds": rounds,
            "executions": executions,
            "warmup_executions": 1,
            "trial_executions": 2,
        },
        "layers": [layer._asdict() for layer in layers],
        "weights": {"distribution": "uniform", "bound": "sqrt(6/(K^2*IC))"},
        "inputs": {"distribution": "uniform", "low": 0.0, "high": 1.0},
    }
    _write_json(target / "settings.json", settings)
    _write_json(
        target / "peaks.json",
        {
            "peak_flops": peak_flops,
            "bandwidth": bandwidth,
            "threads": threads,
            "busy_layers": [],
        },
    )
    samples, errors = [], []
    for layer in layers:
        for sparsity in sparsities:
            nonzeros = nonzero_count(layer.weight_count, sparsity)
            common = {
                "device": device,
                "run": run,
                **{key: value for key, value in layer._asdict().items() if key != "name"},
                "layer": layer.name,
                "sparsity": sparsity,
                "nonzeros": nonzeros,
            }
            if dense_seconds is not None:
                dense = dense_seconds(layer.out_channels, sparsity)
            else:
                pixels = layer.batch * layer.out_height * layer.out_width
                dense = 2 * pixels * layer.weight_count / dense_flops
            seconds = {"dense": dense, "sparse": dense / speedup(layer.out_channels, sparsity)}
            for implementation, layout in (("sparse", "packed"), ("dense", "channels_last")):
                draw = random.Random(f"{layer.name} {sparsity} {implementation}")
                for number in range(rounds):
                    drift = 1 + noise * (draw.random() - 0.5)
                    for execution in range(executions):
                        jitter = 1 + noise * (draw.random() - 0.5)
                        samples.append(
                            {
                                **common,
                                "implementation": implementation,
                                "layout": layout,
                                "threads": threads,
                                "round": number,
                                "execution": execution,
                                "seconds": seconds[implementation] * drift * jitter,
                            }
                        )
            summation = error(layer.out_channels, sparsity)
            for implementation, reference, weights, value, fraction in (
                ("sparse", "float64", "packed", summation, 0.1),
                ("sparse", "dense", "packed", summation * 1.2, ""),
                ("sparse", "dense", "original", summation * 1000, ""),
                ("dense", "float64", "packed", summation * 0.8, 0.08),
            ):
                errors.append(
                    {
                        **{key: common[key] for key in ERROR_COLUMNS if key in common},
                        "implementation": implementation,
                        "reference": reference,
                        "weights": weights,
                        "max_abs_error": value,
                        "bound_fraction": fraction,
                    }
                )
        _write_json(target / "bench" / f"{layer.name}.json", _facts(sparsities, layer, rounds))
    write_csv(target / "samples.csv", SAMPLE_COLUMNS, samples)
    write_csv(target / "errors.csv", ERROR_COLUMNS, errors)
    for layer in layers:
        rows = [row for row in samples if row["layer"] == layer.name]
        write_csv(target / "bench" / f"{layer.name}.csv", SAMPLE_COLUMNS, rows)
    return target


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with exactly these columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _facts(sparsities: Sequence[float], layer: Layer, rounds: int) -> dict[str, Any]:
    return {
        "schema": 1,
        "machine": {"processor": "synthetic", "cores": 2},
        "settings": "0" * 64,
        "extension": "0" * 64,
        "dense_trial_seconds": {"nchw": 0.02, "channels_last": 0.01},
        "packing_seconds": {f"s{round(100 * value):02d}": 0.001 for value in sparsities},
        "peak_bursts": [200e9] * rounds,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
