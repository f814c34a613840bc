"""Names of stored results, <device>.<run>, which two are put side by side by."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

# A device, and a run as config/schema/config.schema.yaml has it.
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*\.[A-Za-z][A-Za-z0-9_-]*"
FIGURES = ("fig2", "fig5", "fig6", "fig7", "fig8")
FILES = ("settings.json", "samples.csv", "errors.csv", "peaks.json")


def stored(root: pathlib.Path) -> list[str]:
    """Names of the results under results/ that are whole enough to be compared."""
    found = (root / "results").glob("*/*/samples.csv")
    return sorted(f"{path.parent.parent.name}.{path.parent.name}" for path in found)


def results_folder(name: str, root: pathlib.Path) -> pathlib.Path:
    """The folder of stored results. Raises ValueError, naming what is there, without them."""
    if re.fullmatch(NAME, name):
        folder = root / "results" / pathlib.Path(*name.split("."))
        missing = [file for file in FILES if not (folder / file).is_file()]
        if not missing:
            return folder
        got = f"{folder.relative_to(root)}/ without {', '.join(missing)}"
    else:
        got = repr(name)
    there = ", ".join(stored(root)) or "nothing yet"
    raise ValueError(
        f"compare: expected stored results as <device>.<run>, got {got}; under results/ there is "
        f"{there}; measure first, or import a bundle"
    )


def files(name: str, root: pathlib.Path) -> list[str]:
    """The files of stored results that a comparison reads. Raises ValueError as above."""
    folder = results_folder(name, root)
    facts = sorted(str(path) for path in (folder / "bench").glob("*.json"))
    return [*(str(folder / file) for file in FILES), *facts]


def asked(config: Mapping[str, Any], root: pathlib.Path) -> tuple[str, str]:
    """The two results that `left` and `right` name. Raises ValueError where they do not."""
    missing = [key for key in ("left", "right") if not config[key]]
    if missing:
        there = ", ".join(stored(root)) or "nothing yet"
        raise ValueError(
            f"{' and '.join(missing)}: expected stored results as <device>.<run>, got none; say "
            "snakemake --cores 1 compare --config left=cpu.paper right=cpu.seed2; under results/ "
            f"there is {there}"
        )
    left, right = config["left"], config["right"]
    for name in (left, right):
        results_folder(name, root)
    if left == right:
        raise ValueError(f"left and right: expected two results, got {left} twice; name another")
    return left, right
