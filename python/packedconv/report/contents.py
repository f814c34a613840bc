"""What the report shows and in which order: docs/report/contents.yaml."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

# Subcategory of a category that has no others; Snakemake goes past the only one of a category.
ONLY = "results"
PLACEHOLDER = re.compile(r"<(\w+)>")


class Entry(NamedTuple):
    """A figure or table in the report. `name` is its target below figures/, without a suffix;
    the other fields are those of docs/report/contents.yaml."""

    name: str
    category: str
    subcategory: str
    title: str
    shows: str
    expect: str
    found: Sequence[Mapping[str, Any]] = ()
    needs: Sequence[str] = ()


def load(path: str | os.PathLike[str]) -> list[Entry]:
    """All entries, in order. Raises ValueError for one that is not whole, naming it."""
    with open(path, encoding="utf-8") as file:
        categories = yaml.safe_load(file)
    entries = []
    for category in categories:
        for fields in category["results"]:
            try:
                entry = Entry(**{"category": category["category"], "subcategory": ONLY, **fields})
            except TypeError as error:
                raise ValueError(f"{path}: {fields.get('name', fields)}: {error}") from None
            entries.append(entry)
    return entries


def find(entries: Sequence[Entry], target: str) -> Entry | None:
    """The entry of a target ("fig5a", "cpu/fig5"), with <device> and <family> filled in."""
    for entry in entries:
        pattern = "".join(
            f"(?P<{part}>[^/]+)" if index % 2 else re.escape(part)
            for index, part in enumerate(PLACEHOLDER.split(entry.name))
        )
        found = re.fullmatch(pattern, target)
        if found:
            return _named(entry, target, found.groupdict())
    return None


def _named(entry: Entry, target: str, values: Mapping[str, str]) -> Entry:
    needs = [PLACEHOLDER.sub(lambda match: values[match[1]], need) for need in entry.needs]
    return entry._replace(name=target, title=entry.title.format(**values), needs=needs)
