"""A run's folder for bundles: made up, small, and whole."""

import hashlib
import json
from pathlib import Path
from typing import Any

from synthetic import write_csv, write_results

from packedconv.samples_file import CEILING_COLUMNS, ERROR_COLUMNS, SAMPLE_COLUMNS, read_rows
from packedconv.seal import sealed_text
from packedconv.settings import settings_hash, validate_settings

MACHINE = {
    "cpu": "Synthetic CPU",
    "architecture": "x86_64",
    "python": "3.11.0",
    "torch": "2.13.0",
    "gpus": [],
    "extension": {"compiler": "GNU 12.2.0", "cuda": None},
    "commit": {"id": "0" * 40, "modified": False},
}


def write_run(folder: Path, **changes: Any) -> Path:
    """`synthetic.write_results` with the files that measuring leaves beside those that figures
    read: <folder>/<device>/<run>/."""
    changes = {"out_channels": (8, 12), "rounds": 2, "executions": 2, **changes}
    target = write_results(folder, **changes)
    settings = json.loads((target / "settings.json").read_text())
    device, run = settings["device"]["name"], settings["run"]
    errors = read_rows(str(target / "errors.csv"), ERROR_COLUMNS)
    ceilings = [
        {"device": device, "run": run, "quantity": name, "threads": 2, "trial": 0, "value": value}
        for name, value in (("peak_flops", 200e9), ("bandwidth", 50e9))
    ]
    write_csv(target / "ceilings.csv", CEILING_COLUMNS, ceilings)
    write_facts(target / "ceilings.json", "ceilings_sha256")
    for name in ("check", "weights", "times"):
        (target / name).mkdir()
    for layer in (record["name"] for record in settings["layers"]):
        rows = [row for row in errors if row["layer"] == layer]
        write_csv(target / "check" / f"{layer}.csv", ERROR_COLUMNS, rows)
        identity = {"device": device, "run": run}
        write_facts(target / "check" / f"{layer}.json", "errors_sha256", **identity)
        moment = {"time": "2026-01-02T03:04:05Z"}
        timed = {**identity, "settings_hash": settings_hash(validate_settings(settings))}
        write_facts(target / "bench" / f"{layer}.json", "samples_sha256", **timed, after=moment)
        (target / "weights" / f"{layer}.npz").write_bytes(b"drawn again from the seed")
        (target / "weights" / f"{layer}.json").write_text('{"seed": 1}\n')
        (target / "times" / f"bench_{layer}.tsv").write_text("s\n1.5\n")
    peaks = target / "peaks.json"
    peaks.write_text(sealed_text(json.loads(peaks.read_text())))
    (target / "steps.csv").write_text("step,seconds\nbenchmark,60.000\n")
    return target


def write_facts(path: Path, key: str, **changes: Any) -> None:
    """Facts of the CSV file beside them, added to those that are there."""
    facts = json.loads(path.read_text()) if path.exists() else {"schema": 1, "stamp": {}}
    digest = hashlib.sha256(path.with_suffix(".csv").read_bytes()).hexdigest()
    facts.update({"machine": MACHINE, key: digest, **changes})
    path.write_text(sealed_text(facts))


def collected_again(target: Path) -> None:
    """samples.csv and errors.csv from the files of the layers, as they are now."""
    for table, step, columns in (
        ("samples.csv", "bench", SAMPLE_COLUMNS),
        ("errors.csv", "check", ERROR_COLUMNS),
    ):
        rows = [
            row
            for path in sorted((target / step).glob("*.csv"))
            for row in read_rows(str(path), columns)
        ]
        write_csv(target / table, columns, rows)
