"""Figures 2 and 5 to 8 by their data, and every figure script as a command."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from synthetic import SPARSITIES, write_results

from packedconv import roofline
from packedconv.evidence import NOT_MEASURED, statistics
from packedconv.evidence import published as paper
from packedconv.evidence.samples import Results
from packedconv.plots.arguments import figure_parser
from packedconv.plots.source import Source, load_source, panel_source
from packedconv.plots.style import PRINTED, out_channel_styles
from packedconv.script import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = ROOT / "config" / "paper.yaml"
DRAWINGS = ("fig1_sparse_convolution", "fig3_thread_mapping", "fig4_packed_word")
SCRIPTS = {
    2: "fig2_roofline",
    5: "fig5_speedup",
    6: "fig6_times",
    7: "fig7_measured_roofline",
    8: "fig8_errors",
}
CHANNELS = {"a": (48, 64, 80, 96, 112, 128), "b": (32, 40, 48)}
NANO = {"device": "tegra-x1", "batch": 8, "in_channels": 16, "size": 128}


def script(figure):
    spec = importlib.util.spec_from_file_location(
        SCRIPTS[figure], ROOT / "scripts" / f"{SCRIPTS[figure]}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(figure, results=(), panel=None, published=None):
    """The figure and its table, for a panel or for the one device in `results`."""
    results = [Results.load(folder) for folder in results]
    if panel is None:
        source = Source(figure, None, None, tuple(results))
    else:
        source = panel_source(figure, panel, published, results)
    return script(figure).draw(source)


def errorbars(axes):
    """x, y, SEM, colour and line style of every drawn series, by its label."""
    found = {}
    for container in axes.containers:
        line, _, bars = container.lines
        x, y = (np.asarray(values, dtype=float) for values in line.get_data())
        ends = np.array(bars[0].get_segments()) if bars else None
        half = (ends[:, 1, 1] - ends[:, 0, 1]) / 2 if bars else None
        if bars:
            np.testing.assert_allclose(ends[:, :, 1].mean(axis=1), y)
        found[container.get_label()] = (x, y, half, to_hex(line.get_color()), line.get_linestyle())
    return found


def hollow(axes):
    """Points of the hollow markers, by label."""
    found = {}
    for line in axes.lines:
        if line.get_label().startswith("printed") and line.get_linestyle() == "None":
            assert line.get_markerfacecolor() == "none"
            found.setdefault(line.get_label(), []).extend(
                zip(*(np.asarray(values, dtype=float) for values in line.get_data()), strict=True)
            )
    return found


def legend(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def caption(figure):
    """The caption, its line breaks undone."""
    (text,) = (text for text in figure.texts if text.get_gid() == "caption")
    return text.get_text().replace("\n", " ")


def note(axes):
    return "\n".join(text.get_text() for text in axes.texts if text.get_gid() == "note")


@pytest.fixture(scope="module")
def published():
    return paper.load(str(PAPER))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def cpu(folder):
    return write_results(folder, noise=0.05, rounds=5)


@pytest.fixture(scope="module")
def nano(folder):
    return write_results(folder, **NANO, out_channels=(32, 48), noise=0.05, rounds=5)


# Figure 5


def test_figure_5_draws_the_statistics(cpu):
    figure, data = draw(5, [cpu])
    expected = statistics.speedups(Results.load(cpu).samples)
    series = errorbars(figure.axes[0])
    assert set(series) == {"measured cpu paper 48", "measured cpu paper 64"}
    for out_channels, rows in expected.groupby("out_channels"):
        x, y, half, colour, _ = series[f"measured cpu paper {out_channels}"]
        np.testing.assert_array_equal(x, rows["sparsity"])
        np.testing.assert_array_equal(y, rows["mean"])
        np.testing.assert_allclose(half, rows["sem"])
        assert colour == out_channel_styles([out_channels])[out_channels][0].lower()
    np.testing.assert_array_equal(data["speedup"], expected["mean"])
    np.testing.assert_array_equal(data["sem"], expected["sem"])
    assert set(data["origin"]) == {"measured"}
    assert not hollow(figure.axes[0])
    assert PRINTED not in legend(figure)
    assert note(figure.axes[0]) == ""


def test_figure_5_marks_a_speedup_of_one_within_its_limits(cpu):
    figure, _ = draw(5, [cpu])
    low, high = figure.axes[0].get_ylim()
    assert low < 1 < high
    assert any(set(line.get_ydata()) == {1} for line in figure.axes[0].lines)


def test_figure_5_follows_the_measurement(tmp_path):
    slow = write_results(tmp_path / "slow", out_channels=(64,), rounds=4)
    fast = write_results(
        tmp_path / "fast", out_channels=(64,), rounds=4, speedup=lambda oc, s: 10.0, noise=0.2
    )
    before = errorbars(draw(5, [slow])[0].axes[0])["measured cpu paper 64"]
    after = errorbars(draw(5, [fast])[0].axes[0])["measured cpu paper 64"]
    assert (after[1] > 5).all()
    assert (before[1] < 5).all()
    assert after[2].mean() > 10 * before[2].mean()


def test_one_round_has_no_error_bar(tmp_path):
    single = write_results(tmp_path, out_channels=(64,), rounds=1)
    figure, data = draw(5, [single])
    assert data["sem"].isna().all()
    line, _, bars = figure.axes[0].containers[0].lines
    assert len(line.get_xdata()) == len(SPARSITIES)
    assert not any(len(segment) for segment in bars[0].get_segments())


@pytest.mark.parametrize("panel", ["a", "b"])
def test_panel_5_without_a_measurement_holds_printed_values_alone(published, panel):
    figure, data = draw(5, panel=panel, published=published)
    axes = figure.axes[0]
    assert NOT_MEASURED in note(axes)
    assert PRINTED in legend(figure)
    assert not errorbars(axes)
    expected = {}
    for point in published.points(panel, 5):
        key = f"printed {point['out_channels']}"
        expected.setdefault(key, []).append((point["sparsity"], point["value"]))
    assert hollow(axes) == expected
    assert set(data["origin"]) == {"printed"}
    assert data["where"].notna().all()
    assert data["device"].isna().all()


def test_panel_5_keeps_printed_and_measured_apart(published, nano):
    figure, data = draw(5, [nano], "b", published)
    axes = figure.axes[0]
    assert note(axes) == ""
    assert set(errorbars(axes)) == {"measured tegra-x1 paper 32", "measured tegra-x1 paper 48"}
    assert set(hollow(axes)) == {"printed 32", "printed 40", "printed 48"}
    assert data.loc[data["origin"] == "measured", "where"].isna().all()
    assert data.loc[data["origin"] == "printed", "sem"].isna().all()
    assert axes.get_title(loc="left") == published.devices["tegra-x1"]["title"]


def test_a_printed_value_moves_with_the_paper(published):
    changed = published.copy()
    point = next(p for p in changed.panels if (p["panel"], p["figure"]) == ("a", 5))
    point["value"] = 3.21
    drawn = hollow(draw(5, panel="a", published=changed)[0].axes[0])
    assert (point["sparsity"], 3.21) in drawn[f"printed {point['out_channels']}"]


def test_another_family_is_refused(published, cpu, nano):
    for given, panel in ((cpu, "a"), (cpu, "b"), (nano, "a")):
        with pytest.raises(ValueError, match=rf"expected a device of family .* for panel {panel}"):
            draw(5, [given], panel, published)


def test_layers_of_another_shape_are_left_out_of_a_panel(published, tmp_path):
    small = write_results(
        tmp_path, **dict(NANO, size=64), out_channels=(32,), rounds=2, run="smoke"
    )
    figure, data = draw(5, [small], "b", published)
    assert NOT_MEASURED in note(figure.axes[0])
    assert "other layer shapes" in note(figure.axes[0])
    assert not errorbars(figure.axes[0])
    assert set(data["origin"]) == {"printed"}


def test_two_devices_of_a_family_are_told_apart(published, tmp_path):
    common = {"batch": 32, "out_channels": (48,), "rounds": 2, "executions": 2}
    folders = [
        write_results(tmp_path, device=device, **common)
        for device in ("a100-sxm4-40gb", "a100-sxm4-80gb")
    ]
    figure, data = draw(5, folders, "a", published)
    fills = [container.lines[0].get_fillstyle() for container in figure.axes[0].containers]
    assert len(set(fills)) == 2
    assert "none" not in fills
    assert {"a100-sxm4-40gb, paper", "a100-sxm4-80gb, paper"} < set(legend(figure))
    assert set(data["device"].dropna()) == {"a100-sxm4-40gb", "a100-sxm4-80gb"}
    assert all(folder.parent.name in caption(figure) for folder in folders)


# Figure 6


def test_figure_6_has_the_bound_of_a_cpu_in_its_table(cpu, nano):
    figure, data = draw(6, [cpu])
    results = Results.load(cpu)
    bounds = statistics.bound_fractions(results.samples, results.peaks)
    sparse = data[data["implementation"] == "sparse"]
    np.testing.assert_array_equal(sparse["bound_seconds"], bounds["bound_seconds"])
    np.testing.assert_array_equal(sparse["bound_fraction"], bounds["bound_fraction"])
    assert sparse["bound_fraction"].between(0.01, 1.5).all()
    assert data.loc[data["implementation"] == "dense", "bound_fraction"].isna().all()
    assert "The CSV has the bound of the sparse convolution" in caption(figure)
    # The peak that is measured of a GPU is only a lower bound.
    figure, data = draw(6, [nano])
    assert data["bound_fraction"].isna().all()
    assert "bound" not in caption(figure)


def test_figure_6_draws_milliseconds_ours_solid_and_dense_dashed(cpu):
    figure, data = draw(6, [cpu])
    expected = statistics.times(Results.load(cpu).samples)
    series = errorbars(figure.axes[0])
    assert len(series) == 4
    for (channels, implementation), rows in expected.groupby(["out_channels", "implementation"]):
        x, y, half, _, line = series[f"measured cpu paper {channels} {implementation}"]
        np.testing.assert_array_equal(x, rows["sparsity"])
        np.testing.assert_allclose(y, 1e3 * rows["mean"], rtol=1e-12)
        np.testing.assert_allclose(half, 1e3 * rows["sem"], rtol=1e-6)
        assert line == {"sparse": "-", "dense": "--"}[implementation]
    assert legend(figure)[-2:] == ["sparse", "dense (PyTorch)"]
    assert len(data) == len(expected)
    assert set(data["layout"]) == {"packed", "channels_last"}
    assert figure.axes[0].get_ylim()[0] == 0


@pytest.mark.parametrize("panel", ["a", "b"])
def test_panel_6_holds_the_printed_ticks_alone(published, panel):
    figure, data = draw(6, panel=panel, published=published)
    axes = figure.axes[0]
    assert data.empty
    assert not axes.lines
    assert not axes.containers
    first, last = {"a": (2, 6), "b": (8, 15)}[panel]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        str(tick) for tick in range(first, last + 1)
    ]
    np.testing.assert_allclose(axes.get_yticks(), range(first, last + 1))
    low, high = axes.get_ylim()
    assert first - 1 < low < first
    assert last < high < last + 1
    assert NOT_MEASURED in note(axes)
    assert "only the ticks of the vertical axis" in note(axes)


@pytest.mark.parametrize(
    ("number", "panel", "first"), [(6, "a", 0.90), (6, "b", 0.91), (8, "b", 0.90)]
)
def test_an_empty_panel_spans_the_sparsities_of_the_paper(number, panel, first, published):
    axes = draw(number, panel=panel, published=published)[0].axes[0]
    assert axes.get_xticks()[[0, -1]].tolist() == [first, 0.98]


@pytest.mark.parametrize("number", [6, 8])
def test_a_panel_without_values_needs_its_ticks(number, published):
    changed = published.copy()
    changed.axis_ticks[:] = [entry for entry in changed.axis_ticks if entry["panel"] == "b"]
    with pytest.raises(ValueError, match=f"axis_ticks: expected those of figure {number}, panel a"):
        draw(number, panel="a", published=changed)


def test_panel_6_with_a_measurement(published, nano):
    figure, data = draw(6, [nano], "b", published)
    assert len(errorbars(figure.axes[0])) == 4
    assert set(data["origin"]) == {"measured"}
    assert note(figure.axes[0]) == ""


# Figures 2 and 7: rooflines


def roof(axes, name):
    (line,) = (line for line in axes.lines if line.get_label() == name)
    return np.asarray(line.get_data(), dtype=float)


@pytest.mark.parametrize(("panel", "ridge", "peak"), [("a", 9.75, 19500), ("b", 9.21875, 236)])
def test_panel_2_puts_the_nine_sparsities_on_the_roof(published, panel, ridge, peak):
    figure, data = draw(2, panel=panel, published=published)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    memory, compute = roof(axes, "bandwidth roof"), roof(axes, "peak roof")
    np.testing.assert_allclose(memory[:, 1], (ridge, peak))
    np.testing.assert_allclose(compute, [[ridge, axes.get_xlim()[1]], [peak, peak]])
    np.testing.assert_allclose(memory[1] / memory[0], peak / ridge)
    np.testing.assert_allclose(roof(axes, "ridge point")[0], ridge)
    points = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_array_equal(points, data[["arithmetic_intensity", "gflops"]])
    assert data["sparsity"].to_list() == list(SPARSITIES)
    np.testing.assert_allclose(
        data["gflops"], np.minimum(peak, data["arithmetic_intensity"] * peak / ridge)
    )
    assert data["arithmetic_intensity"].iloc[0] == pytest.approx(9.6, abs=0.05)
    assert (data["bound"].iloc[1:] == "memory").all()
    # 9.6 lies left of the A100's ridge point and right of the Tegra X1's.
    assert data["bound"].iloc[0] == {"a": "memory", "b": "compute"}[panel]
    labels = " ".join(text.get_text() for text in axes.texts)
    for words in {"a": ("19.5 TFLOP/s", "2 TB/s"), "b": ("236 GFLOP/s", "25.6 GB/s")}[panel]:
        assert words in labels


def test_panel_2_follows_the_printed_roofs(published):
    changed = published.copy()
    changed.devices["a100"]["bandwidth"] = 1.5e12
    figure, data = draw(2, panel="a", published=changed)
    np.testing.assert_allclose(roof(figure.axes[0], "ridge point")[0], 13)
    assert (data["ridge_point"] == 13).all()
    assert (data["bound"] == "memory").all()


def test_figure_2_of_a_device_takes_its_ceilings_and_layers(cpu):
    figure, data = draw(2, [cpu])
    axes, strip = figure.axes
    peaks = Results.load(cpu).peaks
    np.testing.assert_allclose(
        roof(axes, "ridge point")[0], peaks["peak_flops"] / peaks["bandwidth"]
    )
    assert set(data["out_channels"]) == {48, 64}
    drawn = np.asarray(axes.collections[0].get_offsets())
    chosen = data[data["out_channels"] == 64]
    np.testing.assert_array_equal(drawn, chosen[["arithmetic_intensity", "gflops"]])
    below = np.asarray(strip.collections[0].get_offsets())
    np.testing.assert_array_equal(below[:, 0], data["arithmetic_intensity"])
    assert [tick.get_text() for tick in strip.get_yticklabels()] == ["48", "64"]
    assert strip.get_xlim() == axes.get_xlim()


def test_figure_7_draws_throughputs_of_the_largest_layer(cpu):
    figure, data = draw(7, [cpu])
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    expected = statistics.throughputs(Results.load(cpu).samples)
    expected = expected[expected["out_channels"] == 64]
    assert set(data["out_channels"]) == {64}
    for implementation, rows in expected.groupby("implementation"):
        (line,) = (
            line
            for line in axes.lines
            if line.get_label() == f"measured cpu paper {implementation}"
        )
        np.testing.assert_array_equal(line.get_xdata(), rows["arithmetic_intensity"])
        np.testing.assert_array_equal(line.get_ydata(), rows["mean"])
    drawn = sorted(
        (
            *np.ravel(container.lines[0].get_data()),
            np.ptp(container.lines[2][0].get_segments()[0][:, 1]) / 2,
        )
        for container in axes.containers
    )
    table = expected[["arithmetic_intensity", "mean", "sem"]].to_numpy().tolist()
    np.testing.assert_allclose(drawn, sorted(table), rtol=1e-6)
    peaks = Results.load(cpu).peaks
    np.testing.assert_allclose(roof(axes, "peak roof")[1], peaks["peak_flops"] / 1e9)


@pytest.mark.parametrize(("panel", "channels", "scale"), [("a", 128, 1e3), ("b", 48, 1)])
def test_panel_7_shows_the_printed_throughputs(published, panel, channels, scale):
    figure, data = draw(7, panel=panel, published=published)
    (axes,) = figure.axes
    layer = published.layer(published.device_of_panel(panel), channels)
    printed = [p for p in published.panels if (p["panel"], p["figure"]) == (panel, 7)]
    for implementation in ("sparse", "dense"):
        points = [p for p in printed if p["implementation"] == implementation]
        expected = [
            (roofline.sparse_arithmetic_intensity(layer, p["sparsity"]), scale * p["value"])
            for p in points
        ]
        np.testing.assert_allclose(hollow(axes)[f"printed {implementation}"], expected)
    names = [f"{name},\n{PRINTED}" for name in ("sparse", "dense (PyTorch)")]
    assert legend(figure)[:2] == names
    assert NOT_MEASURED in note(axes)
    assert not axes.containers
    assert data["gflops"].to_list() == pytest.approx([scale * p["value"] for p in printed])
    assert ("9.6 and 1.9" in caption(figure)) == (panel == "a")


def test_panel_7_adds_the_measured_roofs_of_a_measured_device(published, nano):
    figure, _ = draw(7, [nano], "b", published)
    (axes,) = figure.axes
    peaks = Results.load(nano).peaks
    measured = roof(axes, "peak roof measured, tegra-x1")
    np.testing.assert_allclose(measured[1], peaks["peak_flops"] / 1e9)
    np.testing.assert_allclose(roof(axes, "peak roof")[1], 236)
    assert len(axes.containers) == 2 * len(SPARSITIES)


def test_panel_7_without_its_layer_says_so(published, tmp_path):
    other = write_results(tmp_path, **NANO, out_channels=(32,), rounds=2)
    figure, data = draw(7, [other], "b", published)
    assert "no results of OC = 48" in note(figure.axes[0])
    assert not figure.axes[0].containers
    assert set(data["origin"]) == {"printed"}


def test_the_note_hides_no_printed_point(published):
    for panel in ("a", "b"):
        for number in (5, 7):
            figure, data = draw(number, panel=panel, published=published)
            figure.draw_without_rendering()
            (axes,) = figure.axes
            (box,) = (text for text in axes.texts if text.get_gid() == "note")
            extent = box.get_window_extent()
            points = [point for points in hollow(axes).values() for point in points]
            assert len(points) == len(data)
            for point in points:
                assert not extent.contains(*axes.transData.transform(point))


# Figure 8


def test_figure_8_draws_both_readings_apart(cpu):
    figure, data = draw(8, [cpu])
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    errors = Results.load(cpu).errors
    series = errorbars(axes)
    assert len(series) == 4
    for (channels, weights), rows in errors[
        (errors["implementation"] == "sparse") & (errors["reference"] == "dense")
    ].groupby(["out_channels", "weights"]):
        x, y, half, _, line = series[f"measured cpu paper {channels} {weights}"]
        np.testing.assert_array_equal(x, rows["sparsity"])
        np.testing.assert_array_equal(y, rows["max_abs_error"])
        assert half is None
        assert line == {"packed": "-", "original": "--"}[weights]
    assert set(data["weights"]) == {"packed", "original"}
    assert sum("packed weights" in text for text in legend(figure)) == 1
    assert sum("original weights" in text for text in legend(figure)) == 1


def test_figure_8_needs_errors_against_dense(tmp_path):
    target = write_results(tmp_path, out_channels=(32,), rounds=2)
    lines = (target / "errors.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = "".join(line for line in lines if ",sparse,dense," not in line)
    (target / "errors.csv").write_text(kept, encoding="utf-8")
    with pytest.raises(ValueError, match=r"errors\.csv: expected rows .* got none; check again"):
        draw(8, [target])


@pytest.mark.parametrize("panel", ["a", "b"])
def test_panel_8_holds_the_printed_ticks_alone(published, panel):
    figure, data = draw(8, panel=panel, published=published)
    (axes,) = figure.axes
    assert data.empty
    assert not axes.lines
    assert axes.get_yscale() == "log"
    assert axes.get_yticks().tolist() == published.ticks(panel, 8)
    assert NOT_MEASURED in note(axes)
    assert "only the ticks" in note(axes)


# Captions


def test_caption_says_what_was_measured_and_how(cpu):
    results = Results.load(cpu)
    protocol = results.settings["protocol"]
    words = (
        results.title,
        "2 threads",
        "N = 1, IC = 32, 256×256",
        f"{protocol['rounds']} rounds of {protocol['executions']} executions",
        "Weights uniform on ±sqrt(6/(K²·IC))",
        "inputs uniform on [0, 1)",
        "Dense layout: channels_last",
        "standard error of the mean",
    )
    for number in (5, 6, 7):
        text = caption(draw(number, [cpu])[0])
        for word in words:
            assert word in text
    # Errors come from one input each: no rounds, and a reference of a fixed layout.
    errors = caption(draw(8, [cpu])[0])
    for word in ("standard error", "rounds", "Dense layout"):
        assert word not in errors
    for word in words[:3] + words[4:6]:
        assert word in errors


def test_caption_and_title_name_the_processor(tmp_path):
    target = write_results(tmp_path, out_channels=(48,), rounds=2)
    facts = json.loads((target / "bench" / "oc48.json").read_text(encoding="utf-8"))
    facts["machine"]["cpu"] = "Example Processor 9000"
    (target / "bench" / "oc48.json").write_text(json.dumps(facts), encoding="utf-8")
    figure, _ = draw(5, [target])
    assert figure.axes[0].get_title(loc="left") == "Example Processor 9000"
    assert "Example Processor 9000 (device cpu, run paper)" in caption(figure)


@pytest.mark.parametrize("number", SCRIPTS)
def test_a_long_processor_name_keeps_clear_of_the_legend(number, tmp_path):
    target = write_results(tmp_path, out_channels=(48, 128), rounds=2)
    facts = json.loads((target / "bench" / "oc48.json").read_text(encoding="utf-8"))
    facts["machine"]["cpu"] = "Example(R) Processor(R) Platinum 9999+ with 128 Cores @ 2.00GHz"
    for name in ("oc48", "oc128"):
        (target / "bench" / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")
    figure, _ = draw(number, [target])
    figure.draw_without_rendering()
    text = figure.axes[0].get_title(loc="left")
    (title,) = (found for found in figure.findobj(Text) if found.get_text() == text)
    (legend_box,) = (legend.get_window_extent() for legend in figure.legends)
    assert "128 Cores" in text.replace("\n", " ")
    assert title.get_window_extent().x1 < legend_box.x0
    assert title.get_window_extent().y1 <= figure.bbox.y1


def test_nothing_leaves_the_figure(published, cpu, nano):
    for number in SCRIPTS:
        for figure, _ in (
            draw(number, [cpu]),
            draw(number, panel="a", published=published),
            draw(number, [nano], "b", published),
        ):
            figure.draw_without_rendering()
            box = figure.get_tightbbox()
            width, height = figure.get_size_inches()
            assert box.x0 >= -0.01
            assert box.y0 >= -0.01
            assert box.x1 <= width + 0.01
            assert box.y1 <= height + 0.01
            (text,) = (text for text in figure.texts if text.get_gid() == "caption")
            top = text.get_window_extent().y1
            for part in [*figure.axes, *figure.legends]:
                assert part.get_window_extent().y0 > top


# Command lines


def options(*arguments):
    return figure_parser("").parse_args(["--out", "figure.pdf", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--results: expected one folder for the figure of a device, got 0"),
        (("--results", "one", "two"), "--results: expected one folder .* got 2"),
        (("--panel", "a"), "--paper: expected config/paper.yaml with --panel"),
    ],
)
def test_options_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_source(options(*arguments), figure=5)


def run_all(out, cpu, nano, hash_seed):
    """Every figure script in one new process; returns what it says about torch."""
    commands = [[name, "--out", str(out / f"{name}.pdf")] for name in DRAWINGS]
    for number, name in SCRIPTS.items():
        folder = str(out / str(number))
        panel = ["--paper", str(PAPER), "--panel"]
        commands += [
            [name, *panel, "b", "--results", str(nano), "--out", folder + "b.pdf"],
            [name, "--results", str(cpu), "--out", folder + ".pdf"],
        ]
    commands.append([SCRIPTS[5], *panel, "a", "--out", str(out / "5a.pdf")])
    program = """
import json, runpy, sys
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv[:] = [name, *arguments]
    runpy.run_path(f"{ROOT}/scripts/{name}.py", run_name="__main__")
print("torch" in sys.modules)
""".replace("{ROOT}", str(ROOT))
    return subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        env=dict(os.environ, PYTHONHASHSEED=hash_seed),
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_script_renders_without_torch_and_to_the_same_bytes(tmp_path, cpu, nano):
    pytest.importorskip("packedconv._core", reason="figure 3 reads the built extension")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        done = run_all(tmp_path / name, cpu, nano, hash_seed=str(len(name) + ord(name[0])))
        assert done.returncode == 0, done.stderr
        assert done.stdout == "False\n"
        assert done.stderr == ""
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 3 * (len(DRAWINGS) + 2 * len(SCRIPTS) + 1)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for path in (tmp_path / "one").glob("*.csv"):
        text = path.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert len(pd.read_csv(path).columns) > 3


@pytest.mark.parametrize("number", SCRIPTS)
def test_an_expected_error_is_one_line(number, tmp_path, capsys, monkeypatch):
    missing = ["--results", str(tmp_path / "none"), "--out", str(tmp_path / "figure.pdf")]
    with pytest.raises(SystemExit) as exit_:
        run(lambda: script(number).main(missing))
    assert exit_.value.code.startswith("error: ")
    assert "settings.json: not found" in exit_.value.code
    assert "\n" not in exit_.value.code
    assert not list(tmp_path.iterdir())
