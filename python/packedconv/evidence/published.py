"""What the paper prints: the loader of config/paper.yaml.

Published numbers come from that file only, each with its place in the paper (`where`).
"""

import copy
import os
import typing

import jsonschema
import yaml

from packedconv.layer import Layer
from packedconv.roofline import Device

_UNITS = {"ratio": 1.0, "ms": 1e-3, "GFLOP/s": 1e9, "TFLOP/s": 1e12}


class Published(typing.NamedTuple):
    """The sections of config/paper.yaml, as plain dicts and lists; see the comments there.

    Every entry of `statements` has `printed`: words, or the numbers that `printed_from` names.
    """

    source: dict
    devices: dict
    workloads: dict
    protocol: dict
    model: dict
    cited: dict
    tables: dict
    times_table: dict
    software: dict
    figures: list
    panels: list
    axis_ticks: list
    text: dict
    judging: dict
    statements: list

    def device(self, name: str) -> Device:
        """The roofs printed for a device, FLOP/s and bytes/s. KeyError names the known ones."""
        entry = _lookup(self.devices, "device", name)
        return Device(name, entry["peak_flops"], entry["bandwidth"])

    def device_of_panel(self, panel: str) -> str:
        """The device that panel "a" or "b" of figures 2 and 5 to 8 is about."""
        by_panel = {
            entry["panel"]: name for name, entry in self.devices.items() if "panel" in entry
        }
        return _lookup(by_panel, "panel", panel)

    def layer(self, workload: str, out_channels: int) -> Layer:
        """A layer of section 6, whether its number of output channels is printed or not."""
        fields = _lookup(self.workloads, "workload", workload)["layer"]
        return Layer(name=f"oc{out_channels}", out_channels=out_channels, **fields)

    def sparsities(
        self, workload: typing.Optional[str] = None, figures: typing.Sequence[int] = ()
    ) -> typing.List[float]:
        """The sparsities that the paper gives for a workload in these figures, ascending.

        Without figures those of the text; without a workload those of all workloads and figures.
        """
        if workload is None:
            entries = list(self.workloads.values())
        else:
            entries = [_lookup(self.workloads, "workload", workload)]
        found = set()
        for entry in entries:
            found.update(entry["sparsities"])
            for more in entry["more_sparsities"]:
                if workload is None or more["figure"] in figures:
                    found.update(more["sparsities"])
        return sorted(found)

    def table1_layer(self) -> Layer:
        """The layer of Table 1 and of Figure 2."""
        return Layer(name="table1", **self.tables["table1"]["layer"])

    def points(self, panel: str, figure: int) -> typing.List[dict]:
        """The printed points of a panel, with `value` in base units (FLOP/s, seconds, ratio)."""
        return [
            dict(point, value=point["value"] * _UNITS[point["unit"]])
            for point in self.panels
            if (point["panel"], point["figure"]) == (panel, figure)
        ]

    def ticks(self, panel: str, figure: int) -> typing.List[float]:
        """The labelled ticks of a panel's vertical axis, ascending; empty when none is kept."""
        for entry in self.axis_ticks:
            if (entry["panel"], entry["figure"]) == (panel, figure):
                return sorted(entry["ticks"])
        return []

    def copy(self) -> "Published":
        """A deep copy, for asking what another printed number would change."""
        return copy.deepcopy(self)


def default_schema_path(path: str) -> str:
    """schema/paper.schema.yaml beside a paper.yaml."""
    return os.path.join(os.path.dirname(os.path.abspath(path)), "schema", "paper.schema.yaml")


def load(path: str, schema_path: typing.Optional[str] = None) -> Published:
    """Read and validate config/paper.yaml.

    The schema is schema/paper.schema.yaml beside the file unless `schema_path` names another.
    Raises ValueError that names the key, what was expected and what came; OSError when a file
    cannot be read.
    """
    data = _read_yaml(path)
    schema = _read_yaml(schema_path or default_schema_path(path))
    validator = jsonschema.Draft202012Validator(schema)
    problems = sorted(validator.iter_errors(data), key=lambda error: error.json_path)
    if problems:
        listed = "\n".join("  " + _describe(problem) for problem in problems[:10])
        raise ValueError(f"{path}: {len(problems)} problem(s)\n{listed}")
    _check_shapes(path, data)
    for statement in data["statements"]:
        if "printed_from" in statement:
            statement["printed"] = _printed(path, data, statement)
    return Published(**{field: data[field] for field in Published._fields})


def _read_yaml(path: str) -> typing.Any:
    with open(path, encoding="utf-8") as file:
        try:
            return yaml.load(file, Loader=_UniqueKeyLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not valid YAML: {error}") from error


# The parser in C where PyYAML was built with it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_Loader):
    """YAML keeps the last of two equal keys silently; a doubled number has to be an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _describe(problem: jsonschema.ValidationError) -> str:
    key = problem.json_path.lstrip("$").lstrip(".") or "the whole file"
    if problem.validator == "additionalProperties":
        known = sorted(problem.schema.get("properties", {}))
        unknown = sorted(set(problem.instance) - set(known))
        return f"{key}: expected keys among {known}, got {unknown}"
    if problem.validator == "required":
        missing = [name for name in problem.validator_value if name not in problem.instance]
        return f"{key}: expected keys {missing}, got {sorted(problem.instance)}"
    expected = f"{problem.validator} {problem.validator_value}"
    return f"{key}: expected {expected}, got {problem.instance!r}"


def _check_shapes(path: str, data: dict) -> None:
    """What a schema cannot say: grids as large as their axes, and names that exist."""
    tables = data["tables"]
    _check_length(
        path,
        "tables.table1.cells",
        tables["table1"]["cells"],
        "sparsities",
        tables["table1"]["sparsities"],
    )
    for name in ("table2", "table3"):
        table = tables[name]
        _check_length(
            path,
            f"tables.{name}.cells",
            table["cells"],
            "in_channels",
            table["in_channels"],
        )
        for index, row in enumerate(table["cells"]):
            _check_length(
                path,
                f"tables.{name}.cells[{index}]",
                row,
                "out_channels",
                table["out_channels"],
            )
    named = [("workloads", name) for name in data["workloads"]]
    named += [(f"tables.{t}.device", tables[t]["device"]) for t in ("table2", "table3")]
    for key in ("memory_bound_at_every_sparsity", "at_or_below_ridge_point"):
        named += [(f"text.{key}.devices", name) for name in data["text"][key]["devices"]]
    for key, name in named:
        if name not in data["devices"]:
            raise ValueError(
                "{}: {}: expected one of {}, got {!r}".format(
                    path, key, sorted(data["devices"]), name
                )
            )


def _printed(path: str, data: dict, statement: dict) -> typing.Any:
    """The number, or ascending numbers, that a statement's `printed_from` names."""
    source = statement["printed_from"]
    name, fields = (source, {}) if isinstance(source, str) else next(iter(source.items()))
    where = f"{path}: statements: {statement['id']}: printed_from"
    found: typing.Any = data
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            known = sorted(found) if isinstance(found, dict) else "nothing further"
            raise ValueError(f"{where}: expected one of {known}, got {key!r} in {name!r}")
        found = found[key]
    if fields:
        entries = [entry for entry in found if _has_fields(entry, fields)]
        if len(entries) != 1:
            raise ValueError(
                f"{where}: expected one entry of {name} with {fields}, got {len(entries)}"
            )
        (found,) = entries
    if isinstance(found, dict):
        keys = [key for key in _NUMBERS if key in found] or ["sparsity"]
        found = [found.get(key) for key in keys]
        found = found[0] if len(found) == 1 else found
    found = sorted(found) if isinstance(found, list) else found
    several = "factor" in statement.get("tolerance", {}) or statement["quantity"] is None
    if several != isinstance(found, list) or not isinstance(found, (int, float, list)):
        expected = "several numbers" if several else "a number"
        raise ValueError(f"{where}: expected {expected}, got {found!r}")
    return found


# Keys of the printed number in an entry of a list, or in a section.
_NUMBERS = ("value", "low", "high", "ticks")


def _has_fields(entry: dict, fields: dict) -> bool:
    return all(
        value in entry[key] if isinstance(entry.get(key), list) else entry.get(key) == value
        for key, value in fields.items()
    )


def _check_length(path: str, key: str, cells: list, axis: str, wanted: list) -> None:
    if len(cells) != len(wanted):
        raise ValueError(
            f"{path}: {key}: expected {len(wanted)} entries, one per {axis}, got {len(cells)}"
        )


def _lookup(mapping: dict, kind: str, name: str) -> typing.Any:
    if name not in mapping:
        raise KeyError(f"{kind}: expected one of {sorted(mapping)}, got {name!r}")
    return mapping[name]
