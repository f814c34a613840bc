"""The machine behind a run: what the facts beside its measurements say, in one table."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from packedconv.evidence.samples import load_json
from packedconv.evidence.tabular import Group
from packedconv.run_folder import DIGEST_KEYS, check_results

COLUMNS = ["device", "run", "fact", "value", "of"]
ALL = "all"

# Long, and of little use to a reader; the CSV has them.
_HIDDEN = {"torch_config", "cpu_flags", "caches"}


def machine(folder: str | Path) -> pd.DataFrame:
    """One row per fact with `COLUMNS`, all text. of: the file that it is about, ALL where the
    facts of every layer, its check and the ceilings agree.

    Raises ValueError for a run that is not whole, or where a CSV file is not the one that the
    facts beside it belong to, so that what is listed here holds for every sample.
    """
    folder = Path(folder)
    settings = check_results(str(folder))
    names = [
        f"{step}/{layer['name']}.json"
        for layer in settings["layers"]
        for step in ("check", "bench")
    ]
    # Runs that were measured before checks had facts have none of them.
    paths = [name for name in (*names, "ceilings.json") if (folder / name).exists()]
    facts = {path: _flat(load_json(folder / path)) for path in paths}
    rows: list[tuple[str, str, str]] = []
    for fact in dict.fromkeys(fact for found in facts.values() for fact in found):
        values = {path: found[fact] for path, found in facts.items() if fact in found}
        if len(set(values.values())) == 1 and len(values) > 1:
            rows.append((fact, next(iter(values.values())), ALL))
        else:
            rows += [(fact, value, path) for path, value in values.items()]
    frame = pd.DataFrame(rows, columns=["fact", "value", "of"])
    frame = frame.assign(device=settings["device"]["name"], run=settings["run"])
    return frame[COLUMNS]


def shown(frame: pd.DataFrame) -> list[Group]:
    """The table for readers: what holds for all files, then what differs."""
    kept = frame[~frame["fact"].isin(_HIDDEN)]
    titles = {"fact": "Fact", "value": "Value", "of": "File"}
    common = kept.loc[kept["of"] == ALL, ["fact", "value"]].rename(columns=titles)
    single = kept.loc[kept["of"] != ALL, ["of", "fact", "value"]].rename(columns=titles)
    groups = [
        Group("Of every measurement", "", common.reset_index(drop=True)),
        Group("Of single files", "", single.sort_values("File", kind="stable", ignore_index=True)),
    ]
    return [group for group in groups if not group.frame.empty]


def _flat(content: dict[str, Any]) -> dict[str, str]:
    """Facts by name, as text: those of the machine, of the moment, and of what was built."""
    found = dict(content.get("machine") or {})
    found.update(_prefixed(content.get("comparable") or {}, ""))
    found.update(_prefixed(content.get("stamp") or {}, "extension "))
    found.pop("extension", None)
    for key in ("threads", "settings_hash"):
        if key in content:
            found[key] = content[key]
    for moment in ("before", "after"):
        found.update(_prefixed(content.get(moment) or {}, f"{moment}: "))
    for key in DIGEST_KEYS:
        if key in content:
            found["SHA-256 of the CSV file"] = content[key]
    return {name: _text(value) for name, value in found.items()}


def _prefixed(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in values.items()}


def _text(value: Any) -> str:
    """A fact as text: lists of words with spaces between, what is nested as JSON."""
    if value is None:
        return "unknown"
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return " ".join(" ".join(value).split())
    if isinstance(value, (list, dict)):
        return json.dumps(value, sort_keys=True) if value else "none"
    return str(value)
