"""Putting layers together: complete, of one kind, and never faster than the peak."""

import json

import pytest

from packedconv.collect import collect
from packedconv.layer import Layer
from packedconv.roofline import border_exact_flops, dense_flops
from packedconv.samples_file import (
    CEILING_COLUMNS,
    ERROR_COLUMNS,
    IMPLEMENTATIONS,
    SAMPLE_COLUMNS,
    format_csv,
    read_rows,
    text_sha256,
)
from packedconv.script import CheckError
from packedconv.seal import is_intact, sealed_text

LAYERS = [Layer("oc4", 1, 2, 4, 8, 8), Layer("oc6", 1, 2, 6, 8, 8)]
# 7 and 10 nonzeros of 72 and 108 weights, at one kernel position each.
POSITIONS = {"oc4": [[7, 0, 0], [0, 0, 0], [0, 0, 0]], "oc6": [[0, 0, 0], [0, 9, 1], [0, 0, 0]]}
PEAK = 1e9


class Run:
    """The files of two layers, to be spoiled before they are collected."""

    def __init__(self, folder):
        self.folder = folder
        self.samples = {layer.name: self.make_samples(layer) for layer in LAYERS}
        self.facts = {layer.name: self.make_facts(layer) for layer in LAYERS}
        self.errors = {layer.name: [self.make_error(layer)] for layer in LAYERS}
        self.ceilings_facts = {
            "stamp": {"sha256": "b"},
            "comparable": {"cpu": "x", "isa": "y"},
        }
        self.ceilings = [
            self.make_ceiling(quantity, threads, trial, value)
            for quantity, threads, trial, value in (
                ("peak_flops", 2, 0, 0.9 * PEAK),
                ("peak_flops", 2, 1, 0.95 * PEAK),
                ("peak_flops", 1, 0, 5 * PEAK),
                ("bandwidth", 2, 0, 3e9),
                ("bandwidth", 2, 1, 4e9),
                ("bandwidth", 1, 0, 2e9),
            )
        ]

    def make_samples(self, layer):
        shape = dict(layer._asdict())
        shape["layer"] = shape.pop("name")
        return [
            dict(
                shape,
                device="cpu",
                run="test",
                sparsity=0.9,
                nonzeros=sum(map(sum, POSITIONS[layer.name])),
                implementation=implementation,
                layout="x",
                threads=2,
                round=number,
                execution=execution,
                seconds=seconds,
            )
            for implementation, seconds in (("dense", 1e-3), ("sparse", 1e-4))
            for number in range(3)
            for execution in range(2)
        ]

    def make_facts(self, layer):
        return {
            "layer": dict(layer._asdict()),
            "settings_hash": "a",
            "stamp": {"sha256": "b"},
            "threads": 2,
            "comparable": {"cpu": "x", "isa": "y"},
            "peak_bursts": [0.9 * PEAK, PEAK],
            "nonzeros_by_kernel_position": {"s90": POSITIONS[layer.name]},
        }

    def make_error(self, layer):
        return {
            "device": "cpu",
            "run": "test",
            "layer": layer.name,
            "in_channels": layer.in_channels,
            "out_channels": layer.out_channels,
            "sparsity": 0.9,
            "nonzeros": 7,
            "implementation": "sparse",
            "reference": "float64",
            "weights": "packed",
            "max_abs_error": 1e-7,
            "bound_fraction": 0.2,
        }

    def make_ceiling(self, quantity, threads, trial, value):
        return {
            "device": "cpu",
            "run": "test",
            "quantity": quantity,
            "threads": threads,
            "trial": trial,
            "value": value,
        }

    def path(self, name):
        return str(self.folder / name)

    def write(self):
        for name, rows in self.samples.items():
            text = format_csv(rows, SAMPLE_COLUMNS)
            (self.folder / (name + ".csv")).write_text(text)
            facts = dict({"samples_sha256": text_sha256(text)}, **self.facts[name])
            (self.folder / (name + ".json")).write_text(json.dumps(facts))
            (self.folder / (name + "_check.csv")).write_text(
                format_csv(self.errors[name], ERROR_COLUMNS)
            )
        text = format_csv(self.ceilings, CEILING_COLUMNS)
        (self.folder / "ceilings.csv").write_text(text)
        facts = dict({"ceilings_sha256": text_sha256(text)}, **self.ceilings_facts)
        (self.folder / "ceilings.json").write_text(json.dumps(facts))

    def collect(self):
        self.write()
        names = list(self.samples)
        collect(
            [self.path(name + ".csv") for name in names],
            [self.path(name + ".json") for name in names],
            [self.path(name + "_check.csv") for name in names],
            self.path("ceilings.csv"),
            self.path("ceilings.json"),
            self.path("out/samples.csv"),
            self.path("out/errors.csv"),
            self.path("out/peaks.json"),
        )

    def refuses(self, error, match):
        with pytest.raises(error, match=match):
            self.collect()
        assert not (self.folder / "out").exists()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_layers_are_put_together_unchanged(run):
    run.collect()
    parts = [(run.folder / f"{layer.name}.csv").read_text().splitlines() for layer in LAYERS]
    whole = (run.folder / "out" / "samples.csv").read_text().splitlines()
    assert whole == parts[0] + parts[1][1:]
    errors = read_rows(run.path("out/errors.csv"), ERROR_COLUMNS)
    assert [row["layer"] for row in errors] == ["oc4", "oc6"]


def test_peaks_are_of_the_runs_threads_and_bursts_count(run, capsys):
    run.collect()
    peaks = json.loads((run.folder / "out" / "peaks.json").read_text())
    assert is_intact(peaks)
    del peaks["content_sha256"]
    assert peaks.pop("files_sha256") == {
        name: text_sha256((run.folder / "out" / name).read_text())
        for name in ("samples.csv", "errors.csv")
    }
    assert peaks == {
        "peak_flops": PEAK,
        "bandwidth": 4e9,
        "threads": 2,
        "burst_share": {"oc4": 0.95, "oc6": 0.95},
        "busy_layers": [],
    }
    assert capsys.readouterr().err == ""
    for facts in run.facts.values():
        facts["peak_bursts"] = [0.1 * PEAK]
    run.collect()
    peaks = json.loads((run.folder / "out" / "peaks.json").read_text())
    assert peaks["peak_flops"] == 0.95 * PEAK


def test_a_busy_machine_is_told(run, capsys):
    run.facts["oc6"]["peak_bursts"] = [0.2 * PEAK, 0.3 * PEAK, PEAK]
    run.collect()
    message = capsys.readouterr().err
    assert message.startswith("warning: layer oc6: during its rounds the peak was 30% of")
    assert "oc4" not in message
    peaks = json.loads((run.folder / "out" / "peaks.json").read_text())
    assert peaks["burst_share"]["oc6"] == 0.3
    assert peaks["busy_layers"] == ["oc6"]


def test_bandwidth_of_fewer_threads_counts(run):
    run.ceilings.append(run.make_ceiling("bandwidth", 1, 9, 6e9))
    run.ceilings.append(run.make_ceiling("bandwidth", 4, 9, 9e9))
    run.collect()
    assert json.loads((run.folder / "out" / "peaks.json").read_text())["bandwidth"] == 6e9


@pytest.mark.parametrize(
    ("implementation", "flops"),
    [
        ("dense", border_exact_flops(LAYERS[1])),
        ("sparse", border_exact_flops(LAYERS[1], POSITIONS["oc6"])),
    ],
)
def test_faster_than_the_peak_is_refused(run, implementation, flops):
    assert flops < dense_flops(LAYERS[1])

    def take(seconds):
        for row in run.samples["oc6"]:
            if row["implementation"] == implementation:
                # One slow round of three: the median round is what counts.
                row["seconds"] = 1.0 if row["round"] == 2 else seconds

    take(flops / PEAK * 1.01)
    run.collect()
    for name in ("samples.csv", "errors.csv", "peaks.json"):
        (run.folder / "out" / name).unlink()
    (run.folder / "out").rmdir()
    take(flops / PEAK * 0.99)
    run.refuses(
        CheckError,
        rf"layer oc6, sparsity 0\.9: {implementation} does 1\.0 GFLOP/s .* measure again",
    )


def test_missing_executions_are_refused(run):
    del run.samples["oc6"][3]
    run.refuses(ValueError, r"layer oc6, sparsity 0\.9, dense: expected 6 executions, got 5")


def test_a_missing_side_is_refused(run):
    run.samples["oc4"] = [row for row in run.samples["oc4"] if row["implementation"] == "dense"]
    run.refuses(ValueError, r"layer oc4, sparsity 0\.9, sparse: expected 6 executions, got 0")


def test_a_repeated_execution_is_refused(run):
    run.samples["oc4"][1] = dict(run.samples["oc4"][0])
    run.refuses(ValueError, "layer oc4")


def test_missing_checks_are_refused(run):
    run.errors["oc6"] = []
    run.refuses(ValueError, r"checks: .* differ in \[\('oc6', '0\.9'\)\]")


@pytest.mark.parametrize("column", ["device", "run"])
def test_files_of_another_run_are_refused(run, column):
    run.errors["oc6"][0][column] = "other"
    run.refuses(ValueError, f"{column}: expected one for all files")


@pytest.mark.parametrize("key", ["settings_hash", "stamp", "threads", "comparable"])
def test_layers_measured_otherwise_are_refused(run, key):
    run.facts["oc6"][key] = 7
    run.refuses(ValueError, f"expected one {key} for all layers")


def test_facts_of_other_samples_are_refused(run):
    run.facts["oc6"]["samples_sha256"] = "0"
    run.refuses(ValueError, "expected the samples that .* belongs to")


@pytest.mark.parametrize("key", ["stamp", "comparable"])
def test_ceilings_of_another_machine_or_extension_are_refused(run, key):
    run.ceilings_facts[key] = "other"
    run.refuses(ValueError, f"ceilings.json: {key}: expected .* got other")


def test_facts_of_other_ceilings_are_refused(run):
    run.ceilings_facts["ceilings_sha256"] = "0"
    run.refuses(ValueError, "expected the ceilings that .* belongs to")


def test_ceilings_without_the_runs_threads_are_refused(run):
    for row in run.ceilings:
        row["threads"] = 3
    run.refuses(ValueError, "no peak_flops on 2 threads")


@pytest.mark.parametrize("value", ["0", "nan", "-1", "x"])
def test_impossible_seconds_are_refused(run, value):
    run.samples["oc4"][0]["seconds"] = value
    run.refuses(ValueError, "seconds: expected a positive number")


def test_a_cut_file_is_refused(run):
    run.write()
    text = (run.folder / "oc6.csv").read_text()[:-30]
    run.write = lambda: None
    (run.folder / "oc6.csv").write_text(text)
    run.refuses(ValueError, r"oc6\.csv, line 13: expected 21 fields")


class TestGpu:
    """Further implementations, and the peak that a GPU's device file states."""

    PEAK = 1e12

    @pytest.fixture
    def run(self, tmp_path):
        run = Run(tmp_path)
        for name, facts in run.facts.items():
            facts["stated"] = {"peak_flops": self.PEAK, "bandwidth": None}
            facts["peak_of"] = "a lower bound"
            for implementation in IMPLEMENTATIONS:
                if implementation not in ("sparse", "dense"):
                    self.add(run, name, implementation)
        return run

    def add(self, run, name, implementation):
        dense = [row for row in run.samples[name] if row["implementation"] == "dense"]
        run.samples[name] += [dict(row, implementation=implementation) for row in dense]

    def take(self, run, implementation, seconds):
        for row in run.samples["oc6"]:
            if row["implementation"] == implementation:
                row["seconds"] = seconds

    def test_all_are_kept(self, run):
        run.collect()
        rows = read_rows(run.path("out/samples.csv"), SAMPLE_COLUMNS)
        assert {row["implementation"] for row in rows} == set(IMPLEMENTATIONS)
        peaks = json.loads((run.folder / "out" / "peaks.json").read_text())
        assert peaks["peak_of"] == "a lower bound"
        # What was measured stays what was measured.
        assert peaks["peak_flops"] == PEAK

    def test_one_may_be_missing_from_a_layer(self, run):
        kept = [row for row in run.samples["oc4"] if row["implementation"] != "dense_fp16"]
        run.samples["oc4"] = kept
        run.collect()

    @pytest.mark.parametrize("implementation", ["sparse_column", "dense_tf32"])
    def test_each_is_complete_in_itself(self, run, implementation):
        rows = run.samples["oc6"]
        rows.remove(next(row for row in rows if row["implementation"] == implementation))
        run.refuses(
            ValueError, rf"oc6, sparsity 0\.9, {implementation}: expected 6 executions, got 5"
        )

    def test_at_all_sparsities_of_a_layer(self, run):
        more = [
            dict(row, sparsity=0.95)
            for row in run.samples["oc6"]
            if row["implementation"] != "dense_fp16"
        ]
        run.samples["oc6"] += more
        run.refuses(ValueError, r"oc6, sparsity 0\.95, dense_fp16: expected 6 executions, got 0")

    @pytest.mark.parametrize("implementation", ["sparse", "dense"])
    def test_the_two_sides_are_required(self, run, implementation):
        kept = [row for row in run.samples["oc4"] if row["implementation"] != implementation]
        run.samples["oc4"] = kept
        run.refuses(ValueError, rf"oc4, sparsity 0\.9, {implementation}: expected 6 .* got 0")

    def test_an_unknown_one_is_refused(self, run):
        self.add(run, "oc6", "dense_bf16")
        run.refuses(ValueError, "implementation 'dense_bf16' is not known")

    @pytest.mark.parametrize("implementation", ["sparse", "sparse_column"])
    def test_sparse_kernels_are_held_to_the_stated_peak(self, run, implementation):
        flops = border_exact_flops(LAYERS[1], POSITIONS["oc6"])
        # Above what was measured, which for a GPU is a lower bound of its peak.
        self.take(run, implementation, flops / self.PEAK * 1.01)
        run.collect()
        for path in (run.folder / "out").iterdir():
            path.unlink()
        (run.folder / "out").rmdir()
        self.take(run, implementation, flops / self.PEAK * 0.99)
        run.refuses(CheckError, rf"{implementation} does .* the FP32 peak of 1000\.0 GFLOP/s")

    @pytest.mark.parametrize("implementation", ["dense_fp32", "dense_channels_last"])
    def test_a_transform_may_save_multiplications(self, run, implementation):
        flops = border_exact_flops(LAYERS[1])
        self.take(run, implementation, flops / 9 / self.PEAK * 1.01)
        run.collect()
        for path in (run.folder / "out").iterdir():
            path.unlink()
        (run.folder / "out").rmdir()
        self.take(run, implementation, flops / 9 / self.PEAK * 0.99)
        run.refuses(CheckError, f"{implementation} does")

    @pytest.mark.parametrize("implementation", ["dense", "dense_tf32", "dense_fp16"])
    def test_tensor_cores_are_beyond_the_fp32_peak(self, run, implementation):
        self.take(run, implementation, border_exact_flops(LAYERS[1]) / self.PEAK / 100)
        run.collect()

    def test_without_a_stated_peak_there_is_none(self, run):
        for facts in run.facts.values():
            facts["stated"]["peak_flops"] = None
        self.take(run, "sparse", 1e-9)
        run.collect()


# Files that changed after they were written.


def seal(run, name, content):
    (run.folder / name).write_text(sealed_text(content))


def collect_written(run):
    run.write, written = (lambda: None), run.write
    try:
        run.collect()
    finally:
        run.write = written


def test_facts_that_changed_since_are_refused(run):
    run.write()
    path = run.folder / "oc6.json"
    seal(run, "oc6.json", json.loads(path.read_text()))
    collect_written(run)
    text = path.read_text()
    path.write_text(text.replace("900000000.0", "800000000.0"))
    assert path.read_text() != text
    with pytest.raises(
        ValueError, match=r"oc6\.json: expected what was written.*measure the layer"
    ):
        collect_written(run)


def test_facts_of_ceilings_that_changed_since_are_refused(run):
    run.write()
    path = run.folder / "ceilings.json"
    seal(run, "ceilings.json", json.loads(path.read_text()))
    collect_written(run)
    path.write_text(path.read_text().replace('"x"', '"z"'))
    with pytest.raises(
        ValueError, match=r"ceilings\.json: expected what was written.*ceilings again"
    ):
        collect_written(run)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"ceilings\.json: not JSON .*measure the ceilings again"):
        collect_written(run)


def test_errors_that_changed_since_are_refused(run):
    run.write()
    path = run.folder / "oc4_check.csv"
    seal(run, "oc4_check.json", {"errors_sha256": text_sha256(path.read_text())})
    collect_written(run)
    path.write_text(path.read_text().replace("1e-07", "1e-08"))
    again = "delete it and check the layer again"
    with pytest.raises(ValueError, match=rf"oc4_check\.csv: expected the errors that .*; {again}"):
        collect_written(run)
    for text in ("[]", '{"errors_sha'):
        (run.folder / "oc4_check.json").write_text(text)
        with pytest.raises(ValueError, match=rf"oc4_check\.json: not a facts file .*; {again}"):
            collect_written(run)
