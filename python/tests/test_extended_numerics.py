"""Errors by cause: draws, rounding, emulated baselines, verdicts, figure."""

import json
import pathlib
import runpy
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import synthetic
import torch

from packedconv import config
from packedconv.bench.extended import distributions, numerics
from packedconv.bench.extended.numerics_rows import COLUMNS, COMPARISONS
from packedconv.evidence import published
from packedconv.evidence.extended import numerics as evidence
from packedconv.evidence.numerics import to_tf32, winograd
from packedconv.layer import Layer
from packedconv.samples_file import format_csv, text_sha256
from packedconv.settings import (
    UNIFORM_INPUTS,
    UNIFORM_WEIGHTS,
    load_settings,
    settings_hash,
)
from packedconv.weights import make_input, make_weight

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYER = Layer("drawn", batch=1, in_channels=16, out_channels=24, height=32, width=32)
SMALL = Layer("small", batch=1, in_channels=2, out_channels=3, height=8, width=12)
INPUTS = ("uniform", "normal", "relu_normal", "log_uniform")


def drawn_input(distribution, seed=1, layer=LAYER):
    return distributions.draw_input(layer, seed, distribution, UNIFORM_INPUTS)


def drawn_weight(distribution, sparsity=0.5, seed=1):
    return distributions.draw_weight(LAYER, sparsity, seed, distribution, UNIFORM_WEIGHTS)


@pytest.mark.parametrize("distribution", INPUTS)
def test_inputs_depend_on_the_seed_alone(distribution):
    first = drawn_input(distribution)
    assert first.dtype == np.float32
    assert first.shape == LAYER.input_shape
    assert np.array_equal(first, drawn_input(distribution))
    assert not np.array_equal(first, drawn_input(distribution, seed=2))


@pytest.mark.parametrize("distribution", ["uniform", "he_normal"])
def test_weights_depend_on_the_seed_alone(distribution):
    first = drawn_weight(distribution)
    assert first.dtype == np.float32
    assert np.array_equal(first, drawn_weight(distribution))
    assert not np.array_equal(first, drawn_weight(distribution, seed=2))


def test_uniform_is_the_run_s_own():
    low = {"distribution": "uniform", "low": -3.0, "high": 2.0}
    drawn = distributions.draw_input(LAYER, 1, "uniform", low)
    assert np.array_equal(drawn, make_input(LAYER, 1, low))
    assert np.array_equal(drawn_weight("uniform"), make_weight(LAYER, 0.5, 1))


def test_inputs_have_their_distributions():
    normal = drawn_input("normal")
    # Standard errors of 16 384 draws: 0.008 and 0.006.
    assert abs(normal.mean()) < 0.04
    assert abs(normal.std() - 1) < 0.03
    rectified = drawn_input("relu_normal")
    assert rectified.min() == 0
    assert abs((rectified == 0).mean() - 0.5) < 0.02
    assert abs((rectified**2).mean() - 0.5) < 0.04
    wide = drawn_input("log_uniform")
    assert 1e-3 <= np.abs(wide).min() < 2e-3
    assert 500 < np.abs(wide).max() <= 1e3
    assert abs((wide > 0).mean() - 0.5) < 0.02
    assert abs(np.log10(np.abs(wide)).mean()) < 0.1
    # The exponent does not know the sign.
    assert abs(np.log10(np.abs(wide[wide > 0])).mean()) < 0.15


def test_he_normal_keeps_the_positions():
    weight, uniform = drawn_weight("he_normal"), drawn_weight("uniform")
    assert np.array_equal(weight != 0, uniform != 0)
    assert np.all(weight[weight != 0].astype(np.float16) != 0)
    assert abs(weight[weight != 0].std() / np.sqrt(2 / (9 * 16)) - 1) < 0.07


def test_unknown_distributions():
    with pytest.raises(ValueError, match=r"inputs: expected some of uniform, .*, got 'cauchy'"):
        drawn_input("cauchy")
    with pytest.raises(ValueError, match="weights: expected some of uniform, he_normal, got 'x'"):
        drawn_weight("x")


def test_bf16_keeps_seven_bits_and_rounds_ties_to_even():
    ulp = 2.0**-7
    values = [1, 1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.6 * ulp, -1 - 0.4 * ulp, 3.0e38, 65504]
    expected = [1, 1, 1 + 2 * ulp, 1 + ulp, -1, 226 * 2.0**120, 65536]
    rounded = numerics.to_bf16(np.array(values, np.float32))
    assert rounded.tolist() == expected


def test_tf32_holds_every_fp16_number():
    bits = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = bits[np.isfinite(bits)].astype(np.float32)
    assert np.array_equal(to_tf32(values), values)


def test_tf32_rounds_as_fp16_does_in_its_normal_range():
    weight = make_weight(LAYER, 0.0, 1)
    normal = weight[np.abs(weight) >= 2.0**-14]
    assert np.array_equal(to_tf32(normal), normal.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(("output_tile", "unit"), [(2, 4), (4, 24**2)])
def test_winograd_is_exact_on_small_integers(output_tile, unit):
    # The kernel's transforms divide by 2 twice, or by up to 24 twice.
    draw = np.random.RandomState(0)
    image = draw.randint(-3, 4, (2, 8, 12)).astype(np.float32)
    weight = (unit * draw.randint(-2, 3, (3, 2, 3, 3))).astype(np.float32)
    exact = torch.nn.functional.conv2d(
        torch.from_numpy(image[None]).double(), torch.from_numpy(weight).double(), padding=1
    )[0].numpy()
    assert np.abs(exact).max() > 0
    assert np.array_equal(winograd(image, weight, output_tile), exact)


def errors_by_comparison(image, weight):
    rows = numerics.compare(SMALL, 0.5, image, weight)
    keys = [tuple(row[key] for key in evidence.COMPARISON) for row in rows]
    assert keys == COMPARISONS
    return {key: row["max_abs_error"] for key, row in zip(keys, rows, strict=True)}


def test_exact_values_have_no_error(one_thread):
    draw = np.random.RandomState(0)
    image = draw.randint(0, 2, SMALL.input_shape).astype(np.float32)
    weight = (24**2 * draw.randint(-1, 2, SMALL.weight_shape)).astype(np.float32)
    assert set(errors_by_comparison(image, weight).values()) == {0.0}


def test_one_pixel_shows_the_rounding_of_the_weights_alone(one_thread):
    image = np.zeros(SMALL.input_shape, np.float32)
    image[0, :, 4, 4] = [1, 0]
    weight = make_weight(SMALL, 0.0, 1)
    found = errors_by_comparison(image, weight)
    seen = weight[:, 0]
    halved, shortened = seen.astype(np.float16), torch.from_numpy(seen).bfloat16().float().numpy()
    to_half = float(np.abs(seen.astype(np.float64) - halved).max())
    to_bf16 = float(np.abs(seen.astype(np.float64) - shortened).max())
    assert 0 < to_half < to_bf16
    for implementation in ("float64", "sparse", "word_order"):
        assert found[implementation, "fp16", "float64", "original"] == to_half
    assert found["word_order", "bf16", "float64", "original"] == to_bf16
    assert found["word_order", "fp32", "float64", "original"] == 0
    assert found["sparse", "fp16", "float64", "stored"] == 0
    assert found["sparse", "fp16", "dense", "stored"] == 0
    assert found["sparse", "fp16", "dense", "original"] == to_half
    # The image is exact in TF32, and weights are rounded as in FP16.
    assert found["sparse", "fp16", "tf32", "original"] == 0
    assert found["tf32", "fp32", "float64", "original"] == to_half


def test_a_wrong_sparse_output_is_an_error(monkeypatch, one_thread):
    from packedconv.script import CheckError

    right = numerics.packedconv.conv2d
    monkeypatch.setattr(
        numerics.packedconv, "conv2d", lambda *args, **kwargs: right(*args, **kwargs) + 0.01
    )
    with pytest.raises(CheckError, match=r"sparsity 0\.5"):
        numerics.compare(SMALL, 0.5, make_input(SMALL, 1), make_weight(SMALL, 0.5, 1))


EXPERIMENT = {
    "sparsities": [0.9, 0.98],
    "inputs": ["uniform", "log_uniform"],
    "weights": ["uniform", "he_normal"],
    "layers": [
        {"name": "as_a", "panel": "a", "in_channels": 4, "out_channels": 8, "height": 8}
        | {"width": 12},
        {"name": "as_b", "panel": "b", "in_channels": 3, "out_channels": 40, "height": 128}
        | {"width": 128},
    ],
}


@pytest.fixture(scope="module")
def paper():
    return published.load(str(ROOT / "config" / "paper.yaml"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return synthetic.write_results(tmp_path_factory.mktemp("settings")) / "settings.json"


def test_measured_rows(settings, one_thread):
    experiment = {**EXPERIMENT, "layers": EXPERIMENT["layers"][:1]}
    rows, facts = numerics.measure(load_settings(str(settings)), experiment)
    assert len(rows) == 2 * 2 * 2 * len(COMPARISONS)
    assert set(rows[0]) == set(COLUMNS)
    assert rows[0]["nonzeros"] == 29
    assert facts["distributions"]["weights"]["uniform"] is None
    assert facts["versions"]["torch"] == torch.__version__
    again, _ = numerics.measure(load_settings(str(settings)), experiment)
    assert rows == again


def test_height_that_winograd_cannot_tile(settings):
    record = {**EXPERIMENT["layers"][0], "height": 10}
    with pytest.raises(ValueError, match=r"as_a: height: expected a multiple of 4, .*, got 10"):
        numerics.measure(load_settings(str(settings)), {**EXPERIMENT, "layers": [record]})


# Of the baselines of figure 8; everything else is 1e-5.
BASELINE_ERRORS = {"dense": 1e-7, "winograd2": 1.5e-6, "winograd4": 3e-6, "tf32": 2e-4}


def write_numerics(folder, settings, errors=BASELINE_ERRORS, change=lambda rows: rows):
    """Made-up numerics.csv and .json beside settings.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(settings, folder / "settings.json")
    rows = [
        {
            **dict.fromkeys(("device", "run"), ""),
            "device": "cpu",
            "run": "paper",
            "layer": record["name"],
            **{key: record[key] for key in ("in_channels", "out_channels", "height", "width")},
            "sparsity": sparsity,
            "nonzeros": 5,
            "input_distribution": input_name,
            "weight_distribution": weight_name,
            **dict(zip(evidence.COMPARISON, comparison, strict=True)),
            # Falls with sparsity; unrounded weights are a hundred times as far away.
            "max_abs_error": errors.get(comparison[2], 1e-5)
            * (1 if sparsity == 0.9 else 0.5)
            * (100 if comparison[2:] == ("dense", "original") else 1),
            "largest_output": 2.0,
        }
        for record in EXPERIMENT["layers"]
        for input_name in EXPERIMENT["inputs"]
        for weight_name in EXPERIMENT["weights"]
        for sparsity in EXPERIMENT["sparsities"]
        for comparison in COMPARISONS
    ]
    text = format_csv(change(rows), COLUMNS)
    facts = {
        "settings_hash": settings_hash(load_settings(str(settings))),
        "experiment": EXPERIMENT,
        "comparable": {"cpu": "Made-up CPU"},
        "threads": 2,
        "distributions": {
            "inputs": {"uniform": None, "log_uniform": "wide"},
            "weights": {"uniform": None, "he_normal": "He"},
        },
        "rows_sha256": text_sha256(text),
    }
    (folder / "numerics.csv").write_text(text, encoding="utf-8")
    (folder / "numerics.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def test_verdicts_follow_the_errors(tmp_path, settings, paper):
    found = evidence.load_numerics(write_numerics(tmp_path, settings), paper)
    table = evidence.numerics_table(found)
    assert set(table.loc[table["verdict"].isna(), "reference"]) == {"float64"}
    judged = evidence.verdicts(table)
    assert len(judged) == 2 * 2 * 2 * 8
    at_a = judged[(judged["layer"] == "as_a") & (judged["input_distribution"] == "uniform")]
    at_a = at_a[(at_a["weight_distribution"] == "uniform")]
    verdicts = {(row.reference, row.reference_weights): row.verdict for row in at_a.itertuples()}
    assert verdicts["dense", "stored"] == evidence.FITS
    assert verdicts["dense", "original"] == evidence.EXCLUDED
    assert verdicts["winograd2", "stored"] == evidence.OPEN
    assert verdicts["winograd4", "stored"] == evidence.EXCLUDED
    assert verdicts["tf32", "stored"] == evidence.EXCLUDED
    largest = at_a.set_index(["reference", "reference_weights"]).loc[("winograd4", "stored")]
    assert largest["largest"] == 3e-6
    assert largest["smallest"] == 1.5e-6
    assert largest["over_largest_tick"] == pytest.approx(15)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (0.0, evidence.OPEN),
        (2.9e-8, evidence.OPEN),
        (3.1e-8, evidence.FITS),
        (4e-7, evidence.FITS),
        (4.1e-7, evidence.OPEN),
        (2e-6, evidence.OPEN),
        (2.1e-6, evidence.EXCLUDED),
    ],
)
def test_verdict_at_its_borders(largest, expected):
    assert evidence.verdict(largest, [6e-8, 1e-7, 2e-7], 2) == expected


def test_the_tolerance_is_that_of_the_statements(paper):
    assert evidence.tick_factor(paper, "a") == 2
    changed = paper.copy()
    for statement in changed.statements:
        if statement["id"] == "a100.error.range.packed":
            statement["tolerance"]["factor"] = 3
    with pytest.raises(ValueError, match=r"Fig. 8a, got \[2.*, 3.*\]"):
        evidence.tick_factor(changed, "a")


def test_bytes_and_relative_errors(tmp_path, settings, paper):
    found = evidence.load_numerics(write_numerics(tmp_path, settings), paper)
    table = evidence.numerics_table(found)
    stored = table[table["implementation"] == "word_order"]
    assert dict(zip(stored["stored"], stored["bytes_per_nonzero"], strict=True)) == {
        "fp16": "4",
        "bf16": "4",
        "fp32": "6 or 8",
    }
    assert np.array_equal(table["relative_error"], table["max_abs_error"] / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "rows: expected 320, .*, got 319"),
        (lambda rows: [{**rows[0], "max_abs_error": -1.0}, *rows[1:]], "max_abs_error: expected"),
        (lambda rows: [{**row, "run": "other"} for row in rows], "run: expected"),
    ],
)
def test_rows_that_are_not_whole(tmp_path, settings, paper, change, message):
    folder = write_numerics(tmp_path, settings, change=change)
    with pytest.raises(ValueError, match=message):
        evidence.load_numerics(folder, paper)


def test_rows_of_another_file(tmp_path, settings, paper):
    folder = write_numerics(tmp_path, settings)
    (folder / "numerics.csv").write_text("layer\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected the rows that numerics\.json belongs to"):
        evidence.load_numerics(folder, paper)


def caption_of(figure):
    return next(text.get_text() for text in figure.texts if text.get_gid() == "caption")


def test_figure(tmp_path, settings, monkeypatch):
    folder = write_numerics(tmp_path / "results", settings)
    out = tmp_path / "numerics.pdf"
    arguments = ["--paper", ROOT / "config" / "paper.yaml", "--results", folder, "--out", out]
    monkeypatch.setattr(sys, "argv", ["figure_numerics", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "figure_numerics.py"), run_name="__main__")
    assert (tmp_path / "numerics.png").stat().st_size > 10_000
    assert len(pd.read_csv(tmp_path / "numerics.csv")) == 320


def test_caption_says_what_it_shows(tmp_path, settings, paper):
    from packedconv.plots.extended.numerics import numerics_figure

    zero = {**BASELINE_ERRORS, "winograd2": 0.0}
    found = evidence.load_numerics(write_numerics(tmp_path, settings, zero), paper)
    figure = numerics_figure(found, evidence.numerics_table(found))
    caption = " ".join(caption_of(figure).split())
    assert "one image of 8×12, cropped from 256×256, where the paper has 32" in caption
    assert "one image of 128×128, where the paper has 8" in caption
    assert "nothing is timed" in caption
    assert "Made-up CPU (device cpu, run paper), 2 threads, seed 1" in caption
    assert (
        "same to the last bit: Fig. 8a, Winograd F(2×2, 3×3) with the same rounded weights, "
        "S 0.90, 0.98; " in caption
    )
    assert "on the ticks: PyTorch, FP32 (0.5×; 4 of 4)" in caption
    assert "TF32 (1,000×; 4 of 4)" in caption
    bands = [
        axes for axes in figure.axes if any("printed" in text.get_text() for text in axes.texts)
    ]
    assert len(bands) == 2


def test_configured_experiment(tmp_path):
    source = ROOT / "config" / "extended.yaml"
    schema = ROOT / "config" / "schema" / "extended.schema.yaml"
    asked = config.load_yaml(source)
    config.validate(asked, schema, "extended")
    section = asked["numerics"]
    assert len(section["sparsities"]) >= 3
    assert set(section["inputs"]) == set(distributions.INPUTS)
    assert set(section["weights"]) == set(distributions.WEIGHTS)
    for key, value, message in (
        ("inputs", ["cauchy"], "cauchy"),
        ("weights", [], r"\[\]"),
        ("layers", [{**section["layers"][0], "height": 30}], "30"),
    ):
        wrong = {**asked, "numerics": {**section, key: value}}
        with pytest.raises(ValueError, match=f"numerics.{key}.*{message}"):
            config.validate(wrong, schema, "extended")
