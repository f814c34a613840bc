import json
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import read_csv, write_csv, write_results

from packedconv.config import load_yaml, validate
from packedconv.evidence.samples import Results, layers, load_errors, load_peaks, load_samples
from packedconv.samples_file import ERROR_COLUMNS, SAMPLE_COLUMNS, text_sha256
from packedconv.seal import sealed_text
from packedconv.settings import load_settings, settings_hash

ROOT = Path(__file__).parents[2]
SMALL = {"sparsities": (0.90, 0.98), "rounds": 2, "executions": 2}


@pytest.fixture
def folder(tmp_path):
    return write_results(tmp_path, **SMALL)


def change(path, edit):
    """Rewrite a CSV file after `edit(rows)`."""
    rows = read_csv(path)
    edit(rows)
    columns = SAMPLE_COLUMNS if path.name == "samples.csv" else ERROR_COLUMNS
    write_csv(path, columns, rows)


def test_results_hold_what_was_written(folder):
    results = Results.load(folder)
    assert (results.device, results.family, results.run) == ("cpu", "cpu", "paper")
    assert results.title == "Synthetic cpu"
    assert list(results.layers) == ["oc48", "oc64"]
    assert results.layers["oc64"].weight_shape == (64, 32, 3, 3)
    assert len(results.samples) == 2 * 2 * 2 * 2 * 2
    assert results.samples["seconds"].gt(0).all()
    assert set(results.errors["weights"]) == {"packed", "original"}
    assert results.peaks["peak_flops"] == 200e9
    assert set(results.facts) == {"oc48", "oc64"}


def test_one_layer_file_loads_alone(folder):
    samples = load_samples(folder / "bench" / "oc48.csv", rounds=2, executions=2)
    assert set(samples["layer"]) == {"oc48"}
    assert list(layers(samples)) == ["oc48"]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(folder, seed):
    before = load_samples(folder / "samples.csv")
    change(folder / "samples.csv", seed.shuffle)
    pd.testing.assert_frame_equal(load_samples(folder / "samples.csv"), before)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: rows.pop(), "executions"),
        (lambda rows: rows.append(dict(rows[0])), "one row"),
        (lambda rows: rows[3].update(seconds=""), "seconds in line 5: expected a value"),
        (lambda rows: rows[3].update(seconds="nan"), "seconds in line 5: expected a finite"),
        (lambda rows: rows[3].update(seconds="inf"), "seconds in line 5: expected a finite"),
        (lambda rows: rows[3].update(seconds="fast"), "got 'fast'"),
        (lambda rows: rows[3].update(seconds="-1e-3"), "positive"),
        (lambda rows: rows[3].update(seconds="0"), "positive"),
        (lambda rows: rows[3].update(round="0.5"), "round in line 5: expected an integer"),
        (lambda rows: rows[0].update(device="h200"), "device: expected one value, got cpu, h200"),
        (lambda rows: rows[0].update(run="smoke"), "run: expected one value"),
        (lambda rows: rows[0].update(height="128"), "one shape"),
        (lambda rows: rows[0].update(layout="nchw"), "one value of layout"),
        (lambda rows: rows[0].update(implementation="other"), "dense and sparse"),
        (lambda rows: rows.clear(), "at least one"),
    ],
)
def test_broken_samples_are_named(folder, edit, message):
    path = folder / "samples.csv"
    change(path, edit)
    with pytest.raises(ValueError, match=message) as caught:
        load_samples(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "expected" in text
    assert "got" in text
    assert ";" in text


@pytest.mark.parametrize(
    ("key", "value", "message"), [("rounds", 3, "3 rounds"), ("executions", 5, "5 executions")]
)
def test_settings_say_how_many_samples_there_are(folder, key, value, message):
    path = folder / "settings.json"
    content = json.loads(path.read_text())
    content["protocol"][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Results.load(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content["device"].update(name="h200"), "device: expected .'h200'."),
        (lambda content: content.update(run="seed2"), "run: expected .'seed2'."),
        (lambda content: content["sparsities"].append(0.99), "sparsity: expected"),
        (lambda content: content["layers"].pop(), "layer"),
        (lambda content: content["layers"][0].update(height=128), "layer oc48"),
        (lambda content: content["device"].pop("family"), "family"),
        (lambda content: content["device"].update(family="a100"), "kind cpu: expected cpu"),
        (lambda content: content["device"].update(kind="cuda"), "a family other than cpu"),
    ],
)
def test_samples_of_other_settings_are_refused(folder, edit, message):
    path = folder / "settings.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Results.load(folder)


@pytest.mark.parametrize(
    ("kind", "family", "fits"),
    [("cpu", "cpu", True), ("cuda", "a100", True), ("cpu", "a100", False), ("cuda", "cpu", False)],
)
def test_a_device_file_keeps_kind_and_family_together(kind, family, fits):
    schema = ROOT / "config" / "schema" / "device.schema.yaml"
    name = {"cpu": "cpu", "cuda": "a100-sxm4-40gb"}[kind]
    device = load_yaml(ROOT / "config" / "devices" / f"{name}.yaml")
    device["family"] = family
    if fits:
        validate(device, schema, "cpu.yaml")
        return
    with pytest.raises(ValueError, match=r"cpu\.yaml: family"):
        validate(device, schema, "cpu.yaml")


def test_columns_are_exact(folder):
    path = folder / "samples.csv"
    text = path.read_text()
    path.write_text(text.replace("seconds", "milliseconds", 1))
    with pytest.raises(ValueError, match=r"columns: expected device,.*seconds, got"):
        load_samples(path)
    path.write_text("")
    with pytest.raises(ValueError, match="got none"):
        load_samples(path)


def test_a_cut_file_is_refused(folder):
    path = folder / "samples.csv"
    path.write_text(path.read_text()[:-60])
    with pytest.raises(ValueError, match=str(path)):
        load_samples(path)


@pytest.mark.parametrize(
    "name", ["settings.json", "samples.csv", "errors.csv", "peaks.json", "bench/oc48.json"]
)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Results.load(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: rows[0].update(max_abs_error=""), "max_abs_error in line 2"),
        (lambda rows: rows[0].update(max_abs_error="-1"), "no negative"),
        (lambda rows: rows.append(dict(rows[0])), "once"),
        (lambda rows: rows[0].update(device="h200"), "one value"),
    ],
)
def test_broken_errors_are_named(folder, edit, message):
    path = folder / "errors.csv"
    change(path, edit)
    with pytest.raises(ValueError, match=message):
        load_errors(path)


def test_only_the_bound_fraction_may_be_empty(folder):
    errors = load_errors(folder / "errors.csv")
    assert errors["bound_fraction"].isna().any()
    assert errors.drop(columns="bound_fraction").notna().all(axis=None)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"peak_flops": 0, "bandwidth": 1}'])
def test_broken_peaks_are_named(tmp_path, text):
    path = tmp_path / "peaks.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"peaks\.json"):
        load_peaks(path)


# Files that changed after they were collected.


@pytest.fixture
def collected(folder):
    """Results that know what was collected, as collect.py writes them."""
    peaks = json.loads((folder / "peaks.json").read_text())
    peaks["files_sha256"] = {
        name: text_sha256((folder / name).read_text()) for name in ("samples.csv", "errors.csv")
    }
    (folder / "peaks.json").write_text(sealed_text(peaks))
    digest = settings_hash(load_settings(str(folder / "settings.json")))
    for path in (folder / "bench").glob("*.json"):
        facts = json.loads(path.read_text())
        path.write_text(sealed_text({**facts, "settings_hash": digest}))
    Results.load(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        # Still a whole file with sound values.
        ("samples.csv", r"(\.\d*?)[1-8](\d*\n)", r"\g<1>9\2"),
        ("errors.csv", r"(\.\d*?)[1-8](\d*e-)", r"\g<1>9\2"),
        ("peaks.json", "200000000000", "300000000000"),
        ("bench/oc48.json", "200000000000", "300000000000"),
        ("bench/oc48.json", '"cores": 2', '"cores": 4'),
        ("settings.json", '"seed": 1', '"seed": 2'),
    ],
)
def test_a_changed_digit_is_never_rendered(collected, name, old, new):
    path = collected / name
    text = path.read_text()
    changed = re.sub(old, new, text, count=1)
    assert len(changed) == len(text)
    assert changed != text
    path.write_text(changed)
    with pytest.raises(ValueError, match=re.escape(name) + ".*delete it and run again"):
        Results.load(collected)
    path.write_text(text)
    Results.load(collected)
