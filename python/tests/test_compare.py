"""Two results side by side: what is in both, ratios and intervals, figures, targets."""

import json
import math
import os
import pathlib
import random
import runpy
import shutil
import statistics as plain
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from synthetic import write_results

from packedconv import compared
from packedconv import config as configuration
from packedconv.evidence.compare import ratios, speedups, words
from packedconv.evidence.compare.side import differing, load_side
from packedconv.plots.compare.rooflines import draw_measured_rooflines, draw_models
from packedconv.plots.compare.series import draw_errors, draw_speedups, draw_times

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = str(ROOT / "config/paper.yaml")
FEW = (0.90, 0.94, 0.98)
DRAW = {
    "fig2": draw_models,
    "fig5": draw_speedups,
    "fig6": draw_times,
    "fig7": draw_measured_rooflines,
    "fig8": draw_errors,
}


def faster(channels, sparsity):
    return 1.5 * (2 + 30 * (sparsity - 0.90) + channels / 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    few = {"sparsities": FEW, "rounds": 6}
    write_results(folder, run="paper", noise=0.1, **few)
    write_results(folder, run="fast", noise=0.1, speedup=faster, **few)
    gpu = {"device": "h200", "batch": 32, "dense_flops": 40e12, "peak_flops": 60e12}
    write_results(folder, out_channels=(64, 128), bandwidth=4e12, **gpu, **few)
    other = {"in_channels": 16, "size": 64}
    write_results(folder, run="small", out_channels=(48,), **other, **few)
    return folder


def side(folder, name):
    return load_side(folder / name.replace(".", "/"))


def compare(folder, left, right, between_runs=None):
    return ratios.compare(side(folder, left), side(folder, right), between_runs)


def seconds_by_round(results, layer, sparsity, implementation):
    """Mean seconds of each round, by the plainest of means."""
    found = {}
    for row in results.samples.itertuples():
        if (row.layer, row.sparsity, row.implementation) == (layer, sparsity, implementation):
            found.setdefault(row.round, []).append(row.seconds)
    return [plain.fmean(found[number]) for number in sorted(found)]


def bootstrap(draw, left, right):
    """Interval of 95 % of a ratio of speedups; left and right: (dense, sparse) rounds."""
    values = []
    for _ in range(4000):
        speedups = []
        for dense, sparse in (left, right):
            chosen = [draw.randrange(len(dense)) for _ in dense]
            above, below = ([one[index] for index in chosen] for one in (dense, sparse))
            speedups.append(plain.median(above) / plain.median(below))
        values.append(speedups[1] / speedups[0])
    values.sort()
    return values[100], values[-101]


def test_ratio_and_interval_are_those_of_an_independent_computation(folder):
    comparison = compare(folder, "cpu.paper", "cpu.fast")
    row = comparison.table.query("out_channels == 64 and sparsity == 0.94")
    row = row[row["quantity"] == "speedup"].iloc[0]
    sides = [
        [seconds_by_round(one.results, "oc64", 0.94, name) for name in ("dense", "sparse")]
        for one in (comparison.left, comparison.right)
    ]
    expected = [plain.median(dense) / plain.median(sparse) for dense, sparse in sides]
    assert row["left"] == pytest.approx(expected[0], rel=1e-12)
    assert row["right"] == pytest.approx(expected[1], rel=1e-12)
    assert row["ratio"] == pytest.approx(expected[1] / expected[0], rel=1e-12)
    low, high = bootstrap(random.Random(7), *sides)
    assert row["rounds_low"] == pytest.approx(low, rel=0.01)
    assert row["rounds_high"] == pytest.approx(high, rel=0.01)
    # Without anything between runs both intervals are one.
    assert (row["ratio_low"], row["ratio_high"]) == (row["rounds_low"], row["rounds_high"])


def test_what_moves_from_run_to_run_widens_the_interval(tmp_path):
    """Without noise it is that of two lognormal factors for times, four for speedups."""
    for run in ("one", "two"):
        write_results(tmp_path, run=run, out_channels=(48,), sparsities=FEW, noise=0.0)
    comparison = compare(tmp_path, "cpu.one", "cpu.two", {"cpu": 0.04})
    for quantity, factors in (("sparse", 2), ("dense", 2), ("speedup", 4)):
        rows = comparison.table[comparison.table["quantity"] == quantity]
        end = 1.96 * 0.04 * math.sqrt(factors)
        np.testing.assert_allclose(np.log(rows["ratio_high"].astype(float)), end, rtol=0.08)
        np.testing.assert_allclose(np.log(rows["ratio_low"].astype(float)), -end, rtol=0.08)
        np.testing.assert_allclose(rows["rounds_low"].astype(float), 1, rtol=1e-9)
        assert not rows["differs"].any()


def test_two_runs_that_share_noise_round_by_round_are_resampled_apart(tmp_path):
    """The same samples twice: paired rounds would give an interval of no length."""
    write_results(tmp_path, run="one", out_channels=(48,), sparsities=FEW, noise=0.2)
    write_results(tmp_path, run="two", out_channels=(48,), sparsities=FEW, noise=0.2)
    table = compare(tmp_path, "cpu.one", "cpu.two").table
    np.testing.assert_array_equal(table["ratio"], 1)
    assert (table["rounds_low"] < 1).all()
    assert (table["rounds_high"] > 1).all()


def test_overall_is_the_geometric_mean(folder):
    comparison = compare(folder, "cpu.paper", "cpu.fast", {"cpu": 0.04})
    rows = comparison.table[comparison.table["quantity"] == "speedup"]
    overall = comparison.overall["speedup"]
    assert overall.ratio == pytest.approx(math.exp(np.log(rows["ratio"]).mean()))
    assert overall.low < overall.ratio < overall.high
    assert overall.points == 6
    assert overall.above == 6
    assert words.answer("speedup", overall).startswith("speedup over PyTorch larger on the right")
    back = compare(folder, "cpu.fast", "cpu.paper", {"cpu": 0.04}).overall["speedup"]
    assert words.answer("speedup", back).startswith("speedup over PyTorch larger on the left: 1.5")


def test_devices_with_other_batches_are_compared_by_image(folder):
    comparison = compare(folder, "cpu.paper", "h200.paper")
    assert [pair.out_channels for pair in comparison.pairs] == [64]
    assert [layer.out_channels for layer in comparison.only_left] == [48]
    assert [layer.out_channels for layer in comparison.only_right] == [128]
    assert comparison.per_image
    row = comparison.table.query("quantity == 'dense' and out_channels == 64").iloc[0]
    seconds = [
        plain.median(seconds_by_round(one.results, "oc64", 0.90, "dense")) / images
        for one, images in ((comparison.left, 1), (comparison.right, 32))
    ]
    assert row["ratio"] == pytest.approx(seconds[0] / seconds[1])
    text = " ".join(words.warnings(comparison))
    assert "N = 1 | 32 (OC 64): times are compared per image" in text
    assert "Only in left, cpu.paper, so without a ratio: OC 48" in text
    assert "Only in right, h200.paper, so without a ratio: OC 128" in text
    _, data = draw_times(comparison)
    shown = data.query("panel == 'right' and implementation == 'dense' and out_channels == 64")
    assert shown["milliseconds"].iloc[0] == pytest.approx(1e3 * seconds[1], rel=0.05)


def test_layers_of_another_shape_are_kept_apart(folder):
    comparison = compare(folder, "cpu.paper", "cpu.small")
    assert comparison.pairs == ()
    assert comparison.overall == {}
    assert set(comparison.table["side"]) == {"left", "right"}
    assert comparison.table["ratio"].isna().all()
    text = speedups.preamble(comparison)
    assert text.startswith("No ratio: no layer has the same shape on both sides.")
    assert "OC 48, 64 (N = 1, IC = 32, 256×256, K = 3)" in text
    assert "OC 48 (N = 1, IC = 16, 64×64, K = 3)" in text


def test_a_sparsity_of_one_side_has_no_ratio(folder, tmp_path):
    shutil.copytree(folder / "cpu/paper", tmp_path / "cpu/paper")
    write_results(tmp_path, run="more", sparsities=(0.90, 0.95), rounds=6)
    comparison = compare(tmp_path, "cpu.paper", "cpu.more")
    assert comparison.sparsities == (0.90,)
    alone = comparison.table[comparison.table["sparsity"] == 0.95]
    assert set(alone["side"]) == {"right"}
    assert alone["ratio"].isna().all()
    assert "S 0.94, 0.98" in " ".join(words.warnings(comparison))


def test_what_differs_is_said(folder, tmp_path):
    left = shutil.copytree(folder / "cpu/paper", tmp_path / "cpu/paper")
    right = shutil.copytree(folder / "cpu/paper", tmp_path / "cpu/theirs")
    settings = json.loads((right / "settings.json").read_text())
    (right / "settings.json").write_text(json.dumps({**settings, "seed": 2}))
    peaks = json.loads((right / "peaks.json").read_text())
    (right / "peaks.json").write_text(json.dumps({**peaks, "busy_layers": ["oc48"]}))
    for one, torch in ((left, "2.13.0"), (right, "2.14.0")):
        for path in (one / "bench").glob("*.json"):
            facts = json.loads(path.read_text())
            facts["comparable"] = {"torch": torch, "cpu": f"Processor {torch}"}
            path.write_text(json.dumps(facts))
    comparison = compare(tmp_path, "cpu.paper", "cpu.theirs")
    assert differing(comparison.left, comparison.right) == {
        "hardware": ("Processor 2.13.0", "Processor 2.14.0"),
        "seed": ("1", "2"),
        "PyTorch": ("2.13.0", "2.14.0"),
    }
    text = "\n".join(words.warnings(comparison))
    assert "another machine under the same device name" in text
    assert "Right, cpu.theirs: The machine was busy with something else while OC 48" in text
    assert "cpu.theirs was brought here; where it was measured, its run is paper." in text
    figure, _ = draw_speedups(comparison)
    drawn = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert "machine busy: OC 48" in drawn
    (under,) = (text for text in figure.texts if text.get_gid() == "warnings")
    assert "PyTorch 2.13.0 | 2.14.0" in under.get_text().replace("\n", " ")


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize("right", ["cpu.fast", "h200.paper", "cpu.small"])
def test_panels_share_their_scales(folder, name, right):
    comparison = compare(folder, "cpu.paper", right, {"cpu": 0.04, "cuda": 0.01})
    figure, data = DRAW[name](comparison)
    left_axes, right_axes = figure.axes[:2]
    figure.draw_without_rendering()
    assert left_axes.get_ylim() == right_axes.get_ylim()
    assert left_axes.get_xlim() == right_axes.get_xlim()
    assert left_axes.get_yscale() == right_axes.get_yscale()
    assert left_axes.get_title(loc="left").startswith("cpu.paper")
    assert right_axes.get_title(loc="left").startswith(right)
    assert {"left", "right"} <= set(data["panel"])
    assert set(data.loc[data["panel"] == "right", "results"]) == {right}
    assert ("ratio" in set(data["panel"])) == bool(comparison.pairs)
    if not comparison.pairs and name != "fig2":
        notes = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert "no ratio: no layer has the same shape on both sides" in notes


def test_figure_5_draws_the_ratios_of_the_table(folder):
    comparison = compare(folder, "cpu.paper", "cpu.fast", {"cpu": 0.04})
    figure, data = draw_speedups(comparison)
    rows = comparison.table.query("quantity == 'speedup' and out_channels == 48")
    axes = figure.axes[-1]
    (drawn,) = (line for line in axes.lines if line.get_label() == "differs 48")
    np.testing.assert_array_equal(drawn.get_ydata(), rows.loc[rows["differs"], "ratio"])
    (bars,) = (one for one in axes.containers if one.get_label() == "ratio 48")
    segments = np.array(bars.lines[2][0].get_segments())
    np.testing.assert_allclose(segments[:, 0, 1], rows["ratio_low"].astype(float))
    np.testing.assert_allclose(segments[:, 1, 1], rows["ratio_high"].astype(float))
    low, high = axes.get_ylim()
    assert low < 1 < high
    shown = data[data["panel"] == "ratio"]
    np.testing.assert_array_equal(
        shown["ratio"], comparison.table.query("quantity == 'speedup'")["ratio"]
    )


def test_figure_8_says_where_errors_are_the_same(folder):
    figure, data = draw_errors(compare(folder, "cpu.paper", "cpu.fast"))
    assert "the same with packed weights" in figure.get_suptitle()
    assert set(data.loc[data["panel"] == "ratio", "ratio"]) == {1.0}


def test_the_same_results_twice_are_refused(folder):
    with pytest.raises(ValueError, match=r"expected two results, got cpu\.paper twice"):
        compare(folder, "cpu.paper", "cpu.paper")


def test_results_under_another_devices_name_are_refused(folder, tmp_path):
    shutil.copytree(folder / "cpu/paper", tmp_path / "h200/paper")
    with pytest.raises(ValueError, match="expected h200, as its folder is named, got cpu"):
        load_side(tmp_path / "h200/paper")


def test_script(folder, tmp_path, monkeypatch):
    for figure in ("fig5", None):
        chosen = ["--figure", figure] if figure else []
        out = tmp_path / (f"{figure}.pdf" if figure else "speedups.csv")
        sides = ["--left", f"{folder}/cpu/paper", "--right", f"{folder}/h200/paper"]
        monkeypatch.setattr(
            sys, "argv", ["compare", *sides, "--paper", PAPER, *chosen, "--out", str(out)]
        )
        runpy.run_path(str(ROOT / "scripts/compare.py"), run_name="__main__")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"fig5.{end}" for end in ("pdf", "png", "csv")} | {
        f"speedups.{end}" for end in ("csv", "md", "tex", "html")
    }
    table = pd.read_csv(tmp_path / "speedups.csv")
    assert list(table) == ratios.COLUMNS
    text = (tmp_path / "speedups.md").read_text()
    assert "### OC 48, only in cpu.paper" in text
    assert "### OC 128, only in h200.paper" in text
    assert "### Conditions" in text


@pytest.fixture
def checkout(folder, tmp_path):
    for name in ("config", "python", "scripts", "csrc", "envs", "profiles", "figures"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "figures").unlink()
    (tmp_path / "figures").mkdir()
    shutil.copy2(ROOT / "figures/packedconv.mplstyle", tmp_path / "figures")
    shutil.copy2(ROOT / "Snakefile", tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("cpu/fast", "h200/paper"):
        shutil.copytree(folder / name, tmp_path / "results" / name)
    return tmp_path


def snakemake(checkout, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_target_renders_and_measures_nothing(checkout):
    done = snakemake(checkout, "compare", "--config", "left=cpu.fast", "right=h200.paper")
    assert done.returncode == 0, done.stdout
    folder = checkout / "figures/compare/cpu.fast--h200.paper"
    expected = {f"{name}.{end}" for name in compared.FIGURES for end in ("pdf", "png", "csv")}
    expected |= {f"speedups.{end}" for end in ("csv", "md", "tex", "html")}
    assert {path.name for path in folder.iterdir()} == expected
    assert not (checkout / "results/cpu/paper").exists()


def test_missing_results_name_those_that_are_there(checkout):
    for arguments in (
        ["figures/compare/cpu.fast--cpu.paper/fig5.pdf"],
        ["compare", "--config", "left=cpu.fast", "right=cpu.paper"],
    ):
        done = snakemake(checkout, "-n", *arguments)
        assert done.returncode != 0
        assert "got results/cpu/paper/ without settings.json, samples.csv" in done.stdout
        assert "under results/ there is cpu.fast, h200.paper" in done.stdout
    done = snakemake(checkout, "-n", "compare", "--config", "left=cpu.fast")
    assert done.returncode != 0
    assert "right: expected stored results as <device>.<run>, got none" in done.stdout


def test_no_run_may_be_named_compare():
    config = configuration.load_yaml(ROOT / "config/config.yaml")
    with pytest.raises(ValueError, match="run: expected a name other than compare"):
        configuration.resolve({**config, "run": "compare"}, ROOT)


def test_what_is_compared_makes_no_run():
    config = configuration.load_yaml(ROOT / "config/config.yaml")
    asked = {**config, "left": "cpu.paper", "right": "cpu.seed2"}
    assert configuration.resolve(asked, ROOT) == configuration.resolve(config, ROOT)
