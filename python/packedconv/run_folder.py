"""A results folder, results/<device>/<run>/, as files: whether it is whole, and what is in it.

Python 3.6 and its standard library are enough.
"""

import hashlib
import json
import os
import re
import typing

from packedconv.seal import is_intact
from packedconv.settings import settings_hash, validate_settings

# Of machine_facts(), what tells a reader which machine it was.
MACHINE_KEYS = (
    *("cpu", "architecture", "logical_cpus", "memory_bytes", "gpus", "system", "kernel"),
    *("python", "torch", "isa", "extension"),
)
# What facts may hold of the CSV file beside them.
DIGEST_KEYS = ("samples_sha256", "errors_sha256", "ceilings_sha256", "rows_sha256")
# What every figure reads, beside the files of each layer.
REQUIRED = (
    *("settings.json", "samples.csv", "errors.csv", "peaks.json"),
    *("ceilings.csv", "ceilings.json"),
)

# Names of devices, runs and layers, which are parts of paths.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_BLOCK = 2**20


class BundleError(ValueError):
    """A bundle, or what is to become one, is refused; nothing was written."""


class ResultsError(BundleError):
    """A results folder is not whole: the reason, and the next step of who measured it."""

    def __init__(self, reason: str, step: str) -> None:
        super().__init__(f"{reason}; {step}")
        self.reason = reason


def check_results(folder: str) -> typing.Dict[str, typing.Any]:
    """Check that a results folder is whole, and return its settings.

    Raises ResultsError where a file that figures read is missing or was changed since, settings
    are of no run or not those that it was measured with, facts are of other samples than the CSV
    file beside them holds, or the tables of the run hold other rows than its layers.
    """
    settings_path = os.path.join(folder, "settings.json")
    settings = load_object(settings_path)
    try:
        filled = validate_settings(settings)
        layers = [layer["name"] for layer in settings["layers"]]
        identity = (settings["device"]["name"], settings["run"])
    # Of a number that is no size of anything.
    except (ValueError, OverflowError) as error:
        raise ResultsError(f"{settings_path}: {error}", "make them again") from None
    for name in (*identity, *layers):
        if not _NAME.fullmatch(name):
            raise ResultsError(
                f"{settings_path}: expected names that can be parts of paths, got {name!r}",
                "make them again",
            )
    required = list(REQUIRED)
    for layer in layers:
        required += [f"bench/{layer}.csv", f"bench/{layer}.json"]
        required.append(f"check/{layer}.csv")
    missing = [path for path in required if not os.path.isfile(os.path.join(folder, path))]
    if missing:
        raise ResultsError(
            "{}: expected a finished run, {} missing: {}".format(
                folder, "is" if len(missing) == 1 else "are", ", ".join(missing)
            ),
            "measure it to the end (samples.csv, errors.csv and peaks.json are made by "
            "scripts/collect.py)",
        )
    for layer in layers:
        facts = load_object(os.path.join(folder, "bench", layer + ".json"))
        if facts.get("settings_hash", settings_hash(filled)) != settings_hash(filled):
            raise ResultsError(
                f"{settings_path}: expected the settings that layer {layer} was measured with, "
                "got others",
                "delete it and make it again",
            )
    for path in walk(folder):
        if path.endswith(".csv"):
            _check_facts(folder, path, identity)
        elif path.endswith(".json"):
            load_object(os.path.join(folder, path))
    for table, step in (("samples.csv", "bench"), ("errors.csv", "check")):
        parts = [f"{step}/{layer}.csv" for layer in layers]
        _check_collected(folder, table, parts)
    return settings


def machine_summary(machine: typing.Dict[str, typing.Any]) -> typing.Dict[str, typing.Any]:
    """What tells a reader which machine it was, of the facts of a machine."""
    return {key: machine.get(key) for key in MACHINE_KEYS}


def walk(folder: str) -> typing.List[str]:
    """Relative paths of the files in a folder, sorted, without hidden ones: those are
    temporary."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # A link to a folder is not walked into; it is named, and refused.
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in [*names, *links]:
            if not name.startswith("."):
                path = os.path.relpath(os.path.join(parent, name), folder)
                found.append(path.replace(os.sep, "/"))
    return sorted(found)


def _check_facts(folder: str, path: str, identity: typing.Tuple[str, str]) -> None:
    """Raise ResultsError where the facts beside a CSV file are of other rows, or of another run."""
    facts_path = os.path.join(folder, path[: -len(".csv")] + ".json")
    if not os.path.isfile(facts_path):
        return
    facts = load_object(facts_path)
    sha256, _ = digest(os.path.join(folder, path))
    timed = path == "ceilings.csv" or path.startswith("bench/")
    stated = {str(facts[key]) for key in DIGEST_KEYS if key in facts}
    if stated != {sha256} and (stated or timed):
        raise ResultsError(
            f"{os.path.join(folder, path)}: expected the rows that the facts beside it belong "
            "to, got others",
            "delete both and measure again",
        )
    for key, expected in zip(("device", "run"), identity):
        if key in facts and facts[key] != expected:
            raise ResultsError(
                f"{facts_path}: {key}: expected {expected!r} as in settings.json, got "
                f"{facts[key]!r}",
                f"keep the files of each {key} in a folder of its own",
            )


def _check_collected(folder: str, table: str, parts: typing.Sequence[str]) -> None:
    """Raise ResultsError unless a table holds the rows of its parts, and no others."""
    lines = _lines(os.path.join(folder, table))
    expected = [_lines(os.path.join(folder, part)) for part in parts]
    headers = {tuple(found[:1]) for found in [lines, *expected]}
    rows = sorted(row for found in expected for row in found[1:])
    if len(headers) != 1 or sorted(lines[1:]) != rows:
        raise ResultsError(
            "{}: expected the rows of {}, got others".format(
                os.path.join(folder, table), ", ".join(parts)
            ),
            "delete it and collect again",
        )


def _lines(path: str) -> typing.List[bytes]:
    with open(path, "rb") as stream:
        return stream.read().splitlines()


def load_object(path: str) -> typing.Dict[str, typing.Any]:
    """An object in a JSON file. Raises ResultsError where there is none, or one that was changed
    since it was written."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        intact = is_intact(content)
    except FileNotFoundError:
        raise ResultsError(f"{path}: not found", "measure first, or name another folder") from None
    # So deep that reading it ends the recursion: no file of ours.
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: expected JSON, got {error}", "make it again") from None
    if not isinstance(content, dict):
        raise ResultsError(f"{path}: expected an object of JSON", "make it again")
    if not intact:
        raise ResultsError(
            f"{path}: expected what was written, got a file changed since",
            "delete it and make it again",
        )
    return content


def digest(path: str) -> typing.Tuple[str, int]:
    """SHA-256 and size in bytes of a file."""
    with open(path, "rb") as stream:
        return stream_digest(stream)


def stream_digest(stream: typing.BinaryIO) -> typing.Tuple[str, int]:
    """SHA-256 and number of the bytes that a stream still holds."""
    hashed, size = hashlib.sha256(), 0
    for block in iter(lambda: stream.read(_BLOCK), b""):
        hashed.update(block)
        size += len(block)
    return hashed.hexdigest(), size
