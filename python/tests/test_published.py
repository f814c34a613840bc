import pathlib
import shutil

import pytest
import yaml

from packedconv.evidence import published
from packedconv.layer import Layer
from packedconv.roofline import Device

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = ROOT / "config" / "paper.yaml"


@pytest.fixture(scope="module")
def paper():
    return published.load(str(PAPER))


@pytest.fixture
def changed(tmp_path):
    """Write a changed paper.yaml and load it."""

    def load(change):
        data = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
        change(data)
        (tmp_path / "schema").mkdir()
        shutil.copy(ROOT / "config/schema/paper.schema.yaml", tmp_path / "schema")
        path = tmp_path / "paper.yaml"
        path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
        return published.load(str(path))

    return load


def test_devices_and_layers(paper):
    assert paper.device("a100") == Device("a100", 19.5e12, 2.0e12)
    assert paper.device("tegra-x1") == Device("tegra-x1", 0.236e12, 25.6e9)
    assert paper.device_of_panel("a") == "a100"
    assert paper.device_of_panel("b") == "tegra-x1"
    assert paper.layer("a100", 48) == Layer("oc48", 32, 32, 48, 256, 256)
    assert paper.layer("tegra-x1", 40) == Layer("oc40", 8, 16, 40, 128, 128)
    assert paper.table1_layer() == Layer("table1", 32, 32, 64, 256, 256)
    assert paper.protocol["rounds"] == 10
    assert paper.protocol["executions"] == 40


def test_every_ridge_point_follows_from_its_roofs(paper):
    for name, entry in paper.devices.items():
        assert round(paper.device(name).ridge_point, 2) == entry["ridge_point"]


def point(paper, panel, figure, out_channels, sparsity, implementation=None):
    wanted = (out_channels, sparsity, implementation)
    (found,) = (
        entry
        for entry in paper.points(panel, figure)
        if (entry["out_channels"], entry["sparsity"], entry.get("implementation")) == wanted
    )
    return found


def test_points_come_in_base_units(paper):
    assert point(paper, "a", 7, 128, 0.90, "sparse")["value"] == 2.4e12
    assert point(paper, "b", 7, 48, 0.98, "dense")["value"] == pytest.approx(2.3e9)
    assert point(paper, "a", 5, 80, 0.98)["value"] == 1.65
    assert paper.ticks("a", 8) == [6e-8, 1e-7, 2e-7]
    assert paper.ticks("a", 5) == []
    # Fig. 6 has no printed values, and no point of it may appear.
    assert paper.points("a", 6) == paper.points("b", 6) == []


def test_what_is_not_printed_is_an_error(paper):
    with pytest.raises(KeyError, match="device: expected one of"):
        paper.device("h100")
    with pytest.raises(KeyError, match="workload: expected one of"):
        paper.layer("cpu", 48)


def test_every_figure_and_workload_has_its_place(paper):
    assert [figure["figure"] for figure in paper.figures] == list(range(1, 9))
    for point in paper.panels:
        device = paper.device_of_panel(point["panel"])
        workload = paper.workloads[device]
        assert point["out_channels"] in workload["out_channels"]
        assert point["sparsity"] in paper.sparsities(device, [point["figure"]])
        assert point["where"].split(",")[0] in workload["where"]


def test_sparsities_depend_on_the_figure(paper):
    nine = [0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98]
    assert paper.sparsities("a100") == paper.sparsities("a100", [5, 7]) == nine
    assert paper.sparsities("tegra-x1") == paper.sparsities("tegra-x1", [5, 6]) == nine[1:]
    assert paper.sparsities("tegra-x1", [7]) == paper.sparsities("tegra-x1", [5, 8]) == nine
    assert paper.sparsities() == nine
    with pytest.raises(KeyError, match="workload: expected one of"):
        paper.sparsities("cpu")


def statement(data, name):
    (found,) = (entry for entry in data["statements"] if entry["id"] == name)
    return found


def test_statements_take_their_numbers_from_where_they_are_printed(paper, changed):
    printed = {entry["id"]: entry["printed"] for entry in paper.statements}
    assert printed["theory.ridge.a100"] == 9.75
    assert printed["theory.winograd.assumed"] == 1.5
    assert printed["theory.im2col.k5"] == 25
    assert printed["cited.csrmv.dense"] == [67.79, 73.67]
    assert printed["a100.crossover.oc128"] == 0.92
    assert printed["a100.throughput.dense.s98"] == 0.5
    assert printed["a100.speedup.maximum"] == 1.65
    assert printed["nano.error.range.packed"] == [3e-8, 4e-8, 6e-8, 1e-7]
    other = changed(lambda data: data["devices"]["a100"].update(ridge_point=9.8))
    assert statement(other._asdict(), "theory.ridge.a100")["printed"] == 9.8


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("theory.ridge.a100", "devices.h100.ridge_point", "expected one of .* got 'h100'"),
        ("theory.ridge.a100", "devices.a100.title", "expected a number, got 'NVIDIA A100'"),
        ("theory.ridge.a100", "cited.gemv", r"expected a number, got \[67\.79, 73\.67\]"),
        ("cited.csrmv.dense", "devices.a100.ridge_point", "expected several numbers, got 9.75"),
        (
            "a100.speedup.oc48.s90",
            {"panels": {"panel": "a", "figure": 5}},
            "expected one entry .* got 4",
        ),
        (
            "a100.speedup.oc48.s90",
            {"panels": {"panel": "a", "figure": 5, "out_channels": 64}},
            "expected one entry of panels with .* got 0",
        ),
    ],
)
def test_a_number_that_is_not_there_is_named(changed, name, source, message):
    def change(data):
        statement(data, name)["printed_from"] = source

    with pytest.raises(ValueError, match=rf"statements: {name}: printed_from: {message}"):
        changed(change)


def test_every_number_is_spoken_of(paper):
    """Sections 2 to 4 outside the tables: each number belongs to a statement or to the audit."""
    named = " ".join(
        entry["printed_from"]
        for entry in paper.statements
        if isinstance(entry.get("printed_from"), str)
    )
    audit = (ROOT / "python/packedconv/evidence/audit.py").read_text()
    for section in ("model", "cited"):
        for key in getattr(paper, section):
            assert f"{section}.{key}" in named or f'"{key}"' in audit, key


def test_copies_are_deep(paper):
    copy = paper.copy()
    copy.tables["table2"]["cells"][0][0] = 9.0
    assert paper.tables["table2"]["cells"][0][0] == 1.0


def replace(keys, value):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


def remove(keys):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace(["extra"], 1), r"the whole file: expected keys among .*got \['extra'\]"),
        (
            replace(["devices", "a100", "peak"], 1),
            r"devices\.a100: expected keys among .*got \['peak'\]",
        ),
        (remove(["devices", "a100", "bandwidth"]), r"devices\.a100: expected keys \['bandwidth'\]"),
        (
            replace(["devices", "a100", "bandwidth"], "2 TB/s"),
            r"devices\.a100\.bandwidth: expected type number, got '2 TB/s'",
        ),
        (
            replace(["panels", 0, "value"], "1.07x"),
            r"panels\[0\]\.value: expected type number, got '1\.07x'",
        ),
        (replace(["panels", 0, "figure"], 2), r"panels\[0\]\.figure: expected enum"),
        (
            replace(["workloads", "a100", "sparsities", 0], 90),
            r"workloads\.a100\.sparsities\[0\]: expected maximum 1, got 90",
        ),
        (
            replace(["workloads", "a100", "layer", "depth"], 1),
            r"workloads\.a100\.layer: expected keys among .*'depth'",
        ),
        (
            replace(["tables", "table2", "cells", 1], [1.0]),
            r"tables\.table2\.cells\[1\]: expected 5 entries, one per out_channels, got 1",
        ),
        (
            replace(["tables", "table3", "device"], "h100"),
            r"tables\.table3\.device: expected one of .*got 'h100'",
        ),
        (
            replace(["software", "requirements", 0, "version"], 12.2),
            r"software\.requirements\[0\]\.version",
        ),
    ],
)
def test_errors_name_key_expected_and_got(changed, change, message):
    with pytest.raises(ValueError, match=message):
        changed(change)


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    path = tmp_path / "paper.yaml"
    text = PAPER.read_text(encoding="utf-8")
    path.write_text(text.replace("  year: 2026\n", "  year: 2026\n  year: 2025\n"))
    with pytest.raises(ValueError, match="key 'year' stands twice"):
        published.load(str(path), str(ROOT / "config/schema/paper.schema.yaml"))


def test_the_schema_is_strict_and_valid():
    import jsonschema

    schema = yaml.safe_load((ROOT / "config/schema/paper.schema.yaml").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)

    def open_objects(node, path):
        if isinstance(node, dict):
            closed = node.get("additionalProperties") is False
            if "properties" in node and node.get("type") == "object" and not closed:
                yield path
            for key, value in node.items():
                yield from open_objects(value, f"{path}/{key}")

    assert list(open_objects(schema, "")) == []
