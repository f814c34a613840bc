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


SCHEDULE = {
    "path": "aligned",
    "rows": 4,
    "vectors": 2,
    "block_channels": 8,
    "strip": 4,
    "prefetch": True,
    "stream": True,
}


def experiment(listed: Layer, **changes: Any) -> dict[str, Any]:
    """What is measured of a layer beside the paper's, as `bench.experiment` reads it."""
    return {
        "layer": listed._asdict(),
        "skewed": False,
        "sparsities": [0.9, 0.98],
        "contenders": ["sparse", "dense", "sparse_one_thread"],
        "environment": {},
        "protocol": {"rounds": 5, "executions": 2, "warmup_executions": 0, "trial_executions": 1},
        "repeats": 1,
        "widest_spread": 0.15,
        "set_bytes": None,
        **changes,
    }


def write_experiments(
    folder: Path,
    table: str,
    experiments: Sequence[dict[str, Any]],
    seconds: Callable[[str, float, str, int], float],
    contenders: Sequence[str] | None = None,
    attempts: int = 1,
    changes: dict[str, dict[str, Any]] | None = None,
) -> list[Path]:
    """Write <folder>/<table>/<layer>.csv with facts, and the ceilings; returns the CSV files.

    folder: from `write_results`. seconds(layer, sparsity, contender, round) of the last attempt;
    those before it are ten times as slow; None for what was not timed. contenders: those timed,
    by default the experiment's. changes: further facts by layer; with `skipped` nothing was timed.
    """
    from packedconv.layer import sparsity_key
    from packedconv.samples_file import (
        CEILING_COLUMNS,
        EXPERIMENT_COLUMNS,
        format_csv,
        text_sha256,
    )
    from packedconv.settings import load_settings, settings_hash

    settings = load_settings(str(folder / "settings.json"))
    variables = dict.fromkeys(("PACKEDCONV_ISA", "ONEDNN_MAX_CPU_ISA"))
    comparable = {"cpu": "Synthetic CPU", "isa": "x86_64_v4", "environment": variables}
    identity = {"stamp": {"sha256": "0" * 64}, "comparable": comparable}
    ceilings = [
        {
            "device": settings["device"]["name"],
            "run": settings["run"],
            "quantity": quantity,
            "threads": 2,
            "trial": 0,
            "value": value,
        }
        for quantity, value in (("peak_flops", 200e9), ("bandwidth", 50e9))
    ]
    write_csv(folder / "ceilings.csv", CEILING_COLUMNS, ceilings)
    digest = text_sha256((folder / "ceilings.csv").read_text())
    _write_json(folder / "ceilings.json", {**identity, "ceilings_sha256": digest})
    (folder / table).mkdir(exist_ok=True)
    paths = []
    for wanted in experiments:
        layer = Layer(**wanted["layer"])
        shape = {**layer._asdict(), "layer": layer.name}
        del shape["name"]
        more = (changes or {}).get(layer.name, {})
        rows, plans, positions = [], {}, {}
        for sparsity in wanted["sparsities"]:
            key, nonzeros = sparsity_key(sparsity), nonzero_count(layer.weight_count, sparsity)
            plans[key] = {"schedule": SCHEDULE, "facts": {}, "why": "made up"}
            size = layer.kernel_size
            positions[key] = [[nonzeros // size**2] * size] * size
            for contender in contenders or wanted["contenders"]:
                if seconds(layer.name, sparsity, contender, 0) is None:
                    continue
                for attempt in range(attempts):
                    slow = 10 if attempt < attempts - 1 else 1
                    rows += [
                        {
                            **shape,
                            "device": settings["device"]["name"],
                            "run": settings["run"],
                            "sparsity": sparsity,
                            "nonzeros": nonzeros,
                            "implementation": contender,
                            "layout": "channels_last" if contender == "dense" else "packed",
                            "threads": 1 if contender == "sparse_one_thread" else 2,
                            "attempt": attempt,
                            "round": number,
                            "execution": execution,
                            "seconds": slow * seconds(layer.name, sparsity, contender, number),
                        }
                        for number in range(wanted["protocol"]["rounds"])
                        for execution in range(wanted["protocol"]["executions"])
                    ]
        text = format_csv([] if "skipped" in more else rows, EXPERIMENT_COLUMNS)
        path = folder / table / f"{layer.name}.csv"
        path.write_text(text)
        facts = {
            **identity,
            "settings_hash": settings_hash(settings),
            "samples_sha256": text_sha256(text),
            "experiment": wanted,
            "layer": layer._asdict(),
            "threads": 2,
            "peak_bursts": [200e9],
            "nonzeros_by_kernel_position": positions,
            "plans": plans,
            "dense": {"layout": "channels_last"},
            "rotated": None,
            "machine": {"cpu": "Synthetic CPU"},
            **more,
        }
        _write_json(path.with_suffix(".json"), facts)
        paths.append(path)
    return paths
