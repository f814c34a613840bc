"""Lower bounds of GPUs: hand arithmetic, conflicts by brute force, and the pages."""

import importlib.util
import pathlib

import numpy as np
import pandas as pd
import pytest

from packedconv.evidence import bounds, instructions
from packedconv.evidence import published as paper
from packedconv.layer import Layer
from packedconv.plots.bounds import TITLE
from packedconv.roofline import sparse_bytes, sparse_flops
from packedconv.weights import make_weight

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = ROOT / "config" / "paper.yaml"
A100_LAYER = Layer("oc128", 32, 32, 128, 256, 256)
NANO_LAYER = Layer("oc48", 8, 16, 48, 128, 128)
REASON = "no CUDA compiler"


@pytest.fixture(scope="module")
def published():
    return paper.load(str(PAPER))


@pytest.fixture(scope="module")
def gpus(published):
    return {
        family: bounds.load_gpu(ROOT, family, published) for family in ("a100", "h200", "tegra-x1")
    }


def counted(architecture, kernel, **values):
    """A row of the table of instructions."""
    return {
        "architecture": architecture,
        "kernel": kernel,
        "instructions_per_fma": 2.2,
        "fma": 32,
        "input_loads": 32,
        "weight_shared_loads": 2 if kernel == "column" else 0,
        "weight_global_loads": 4 if kernel == "paper" else 0,
        "rows_per_thread": 8,
        "picked": "",
        "compiler": "nvcc 13.0",
        **values,
    }


@pytest.fixture(scope="module")
def counts():
    """Counts of sm_80 and sm_90; none of sm_53."""
    rows = [{"architecture": 53, "missing": REASON, "picked": "", "kernel": ""}]
    for architecture, family in ((80, "a100"), (90, "h200")):
        common = {"column_groups": 2, "pitch": 72}
        rows += [
            counted(architecture, "column", picked=f"{family} 128 0.90", **common),
            counted(architecture, "column", **{**common, "pitch": 40}, instructions_per_fma=8.0),
        ]
        for columns in (4, 8, 16, 32):
            for per_thread, per_fma in ((1, 12.0), (8, 3.5)):
                rows += [
                    counted(
                        architecture,
                        "paper",
                        col_per_warp=columns,
                        rows_per_thread=per_thread,
                        warps_per_block=warps,
                        instructions_per_fma=per_fma,
                    )
                    for warps in (2, 4, 8)
                ]
    frame = pd.DataFrame(rows, columns=instructions.COLUMNS)
    frame["missing"] = frame["missing"].astype(object).where(frame["missing"].notna(), "")
    for name in ("rows_per_thread", "column_groups", "pitch", "warps_per_block", "col_per_warp"):
        frame[name] = frame[name].astype("Int64")
    return frame


def missing_counts():
    rows = [
        {"architecture": architecture, "missing": REASON, "picked": "", "kernel": ""}
        for architecture in instructions.ARCHITECTURES
    ]
    return pd.DataFrame(rows, columns=instructions.COLUMNS)


# Hand arithmetic


def test_a100_as_by_hand(gpus):
    gpu = gpus["a100"]
    moved = sparse_bytes(A100_LAYER, 0.9)
    # (32 · 256² · (32 + 128)) · 4 bytes, and 4 bytes for each of 3686 nonzeros.
    assert moved == pytest.approx(1.342e9, rel=5e-4)
    assert 1e3 * bounds.memory_floor(A100_LAYER, 0.9, 2.0e12) == pytest.approx(0.67, abs=0.005)
    assert 1e3 * bounds.memory_floor(A100_LAYER, 0.9, 1.555e12) == pytest.approx(0.86, abs=0.005)
    assert gpu.bandwidth == 2.0e12
    assert "a100-sxm4-40gb" in gpu.variants[1.555e12]
    seconds = bounds.shared_floor(A100_LAYER, 0.9, gpu)
    assert 1e3 * seconds == pytest.approx(1.59, abs=0.005)
    assert sparse_flops(A100_LAYER, 0.9) / seconds == pytest.approx(9.75e12, rel=1e-3)
    # Half of the FP32 peak.
    assert seconds == pytest.approx(2 * bounds.fp32_floor(A100_LAYER, 0.9, gpu))
    assert sparse_flops(A100_LAYER, 0.9) / bounds.fp32_floor(A100_LAYER, 0.9, gpu) == (
        pytest.approx(19.5e12, rel=1e-3)
    )


def test_h200_as_by_hand(gpus):
    gpu = gpus["h200"]
    assert 1e3 * bounds.shared_floor(A100_LAYER, 0.9, gpu) == pytest.approx(0.92, abs=0.005)
    # 0.28 ms at the data sheet's 4.8 TB/s; 0.31 at nine tenths of it.
    assert 1e3 * bounds.memory_floor(A100_LAYER, 0.9, gpu.bandwidth) == pytest.approx(
        0.28, abs=5e-3
    )
    assert 1e3 * bounds.memory_floor(A100_LAYER, 0.9, 0.9 * gpu.bandwidth) == (
        pytest.approx(0.31, abs=5e-3)
    )
    # A quarter of the FP32 peak.
    assert bounds.shared_floor(A100_LAYER, 0.9, gpu) == pytest.approx(
        4 * bounds.fp32_floor(A100_LAYER, 0.9, gpu)
    )


def test_jetson_nano_as_by_hand(gpus):
    gpu = gpus["tegra-x1"]
    assert 1e3 * bounds.memory_floor(NANO_LAYER, 0.9, gpu.bandwidth) == pytest.approx(
        1.31, abs=5e-3
    )
    # 8 · 128² · 48 · 144 · 0.1 FMAs, 32 a clock at 921.6 MHz.
    assert 1e3 * bounds.shared_floor(NANO_LAYER, 0.9, gpu) == pytest.approx(3.072, rel=1e-6)


def test_issue_floor_as_by_hand(gpus):
    gpu = gpus["a100"]
    warps = 32 * 256 * 256 * 128 * 9 * 32 * 0.1 / 32
    expected = warps * 2.5 / 4 / (108 * 1.41e9)
    assert bounds.issue_floor(A100_LAYER, 0.9, gpu, 2.5) == pytest.approx(expected)


def test_an_unknown_family(published):
    with pytest.raises(ValueError, match="family: expected one of a100, h200, tegra-x1, got 'cpu'"):
        bounds.load_gpu(ROOT, "cpu", published)


# Conflicts and imbalance


@pytest.mark.parametrize(
    ("starts", "active", "wavefronts"),
    [
        ((0, 16), (True, True), 1),  # neighbouring banks
        ((0, 32), (True, True), 2),  # the same banks, other words
        ((5, 5), (True, True), 1),  # the same words
        ((0, 8), (True, True), 1),  # words in common, the others in other banks
        ((0, 40), (True, True), 2),  # banks 8 to 15 twice
        ((0, 32), (True, False), 1),
        ((0, 32), (False, True), 1),
    ],
)
def test_wavefronts_of_two_lists(starts, active, wavefronts):
    found = bounds._wavefronts(np.array([starts]), np.array([active]), col_per_warp=16)
    assert found.tolist() == [wavefronts]


def test_lists_end_one_after_another():
    mask = np.zeros((3, 2, 3, 3), dtype=bool)
    mask[0, 0, 0, 1] = mask[0, 0, 2, 0] = mask[0, 1, 1, 1] = True
    mask[1, 1, 0, 2] = mask[2, 0, 0, 0] = True
    starts, active = bounds._lists(mask, tile_rows=4, pitch=10, lanes=2)
    # Channels 0 and 1 in three steps, then channel 2 alone in one.
    assert starts[:, 0].tolist() == [1, 20, 51, 0]
    assert starts[0, 1] == 42
    assert active.tolist() == [[True, True], [True, False], [True, False], [True, False]]


@pytest.mark.parametrize(("col_per_warp", "warps"), [(4, 8), (8, 2), (16, 4)])
def test_factors_by_brute_force(col_per_warp, warps):
    layer = Layer("oc20", 1, 8, 20, 16, 16)
    lanes, tile_rows, pitch = 32 // col_per_warp, 10, col_per_warp * warps + 2
    mask = make_weight(layer, 0.9, 1) != 0
    steps = wavefronts = 0
    for first in range(0, 20, lanes):
        lists = [list(zip(*np.nonzero(channel))) for channel in mask[first : first + lanes]]
        for step in range(max(map(len, lists))):
            served = {}
            for positions in lists:
                if step < len(positions):
                    ic, py, px = map(int, positions[step])
                    for column in range(col_per_warp):
                        word = (ic * tile_rows + py) * pitch + px + column
                        served.setdefault(word % 32, set()).add(word)
            steps += 1
            wavefronts += max(map(len, served.values()))
    found = bounds.mapping_factors(layer, 0.9, col_per_warp, tile_rows, pitch, draws=1)
    assert found.wavefronts == pytest.approx(wavefronts / steps)
    assert found.imbalance == pytest.approx(steps / (mask.sum() / lanes))


def test_factors_of_the_paper_layer():
    # An independent Monte Carlo gave 2.08 wavefronts and an imbalance of 1.18.
    found = bounds.mapping_factors(A100_LAYER, 0.9, 8, tile_rows=10, pitch=34)
    assert found.wavefronts == pytest.approx(2.08, abs=0.1)
    assert found.imbalance == pytest.approx(1.18, abs=0.03)
    assert bounds.mapping_factors(A100_LAYER, 0.9, 32, 10, 66) == (1.0, 1.0)
    assert bounds.mapping_factors(A100_LAYER, 0.98, 8, 10, 34).imbalance > found.imbalance


# The table


def bound_of(data, series, sparsity=0.9):
    rows = data[(data["series"] == series) & (data["sparsity"] == sparsity)]
    assert len(rows) == 1
    return rows.iloc[0]


def test_bounds_are_the_largest_floor(gpus, counts, published):
    gpu = gpus["a100"]
    data = bounds.bounds_table(gpu, [A100_LAYER], [0.9, 0.98], counts, published)
    column = bound_of(data, bounds.COLUMN)
    # 1 + 2/32 shared loads per FMA outweigh 2.2 / 4 issue slots and the memory.
    assert column["milliseconds"] == pytest.approx(1.5863 * (1 + 2 / 32), rel=1e-3)
    assert column["configuration"] == "R 8, column groups 2, pitch 72"
    assert column["issue_ms"] == pytest.approx(1.5863 * 2.2 / 4, rel=1e-3)
    memory = bound_of(data, bounds.MEMORY, 0.98)["milliseconds"]
    assert bound_of(data, bounds.COLUMN, 0.98)["milliseconds"] == memory
    # At COL_PER_WARP 32 there is no conflict, but a load of the weight for every 8 FMAs.
    wide = bound_of(data, "paper, COL_PER_WARP 32")
    assert wide["milliseconds"] == pytest.approx(1.5863 * (1 + 4 / 32), rel=1e-3)
    narrow = bound_of(data, "paper, COL_PER_WARP 8")
    expected = narrow["wavefronts_per_input_load"] + 4 / 32
    assert narrow["loads_per_fma"] == pytest.approx(expected)
    assert narrow["milliseconds"] == pytest.approx(
        1.5863 * expected * narrow["imbalance"], rel=1e-3
    )
    assert narrow["instructions_per_fma"] == 3.5
    slow = bound_of(data, "memory, 1.555 TB/s")["milliseconds"]
    assert slow == pytest.approx(0.863, abs=1e-3)


def test_issue_binds_where_instructions_are_many(gpus, counts, published):
    many = counts.assign(instructions_per_fma=40.0)
    data = bounds.bounds_table(gpus["a100"], [A100_LAYER], [0.9], many, published)
    column = bound_of(data, bounds.COLUMN)
    assert column["milliseconds"] == column["issue_ms"] == pytest.approx(15.863, rel=1e-3)


def test_the_device_moves_the_bounds(gpus, counts, published):
    slow = gpus["a100"]._replace(bandwidth=1e11)
    data = bounds.bounds_table(slow, [A100_LAYER], [0.9], counts, published)
    assert bound_of(data, bounds.COLUMN)["milliseconds"] == pytest.approx(13.42, rel=1e-3)
    half = gpus["a100"]._replace(multiprocessors=54)
    data = bounds.bounds_table(half, [A100_LAYER], [0.9], counts, published)
    assert bound_of(data, bounds.SHARED)["milliseconds"] == pytest.approx(3.1727, rel=1e-3)


def test_what_was_not_counted_is_left_out(gpus, counts, published):
    data = bounds.bounds_table(gpus["tegra-x1"], [NANO_LAYER], [0.9], counts, published)
    model = data[data["origin"] == "model"]
    assert model["issue_ms"].isna().all()
    assert bound_of(data, bounds.COLUMN)["milliseconds"] == pytest.approx(3.072)
    narrow = bound_of(data, "paper, COL_PER_WARP 8")
    assert narrow["milliseconds"] > 1.5 * 3.072
    lines = " ".join(bounds.assumptions(gpus["tegra-x1"], data, counts))
    assert f"no issue floor and no loads of weights: {REASON}" in lines


def test_what_the_printed_throughputs_imply(gpus, counts, published):
    def printed(family, layer, source):
        data = bounds.bounds_table(gpus[family], [layer], [0.9], counts, source)
        rows = data[data["origin"] == "printed"]
        return rows[rows["quantity"] == bounds.IMPLIED], rows[rows["quantity"] == bounds.FIXED]

    times, fixed = printed("a100", A100_LAYER, published)
    assert times["sparsity"].tolist() == [0.9, 0.98]
    assert times["milliseconds"].tolist() == pytest.approx([6.44, 3.87], abs=0.005)
    assert fixed["milliseconds"].tolist() == pytest.approx([3.22], abs=0.005)
    times, fixed = printed("tegra-x1", NANO_LAYER, published)
    assert times["milliseconds"].tolist() == pytest.approx([14.5, 11.0], abs=0.05)
    assert fixed["milliseconds"].tolist() == pytest.approx([10.1], abs=0.05)
    times, fixed = printed("h200", A100_LAYER, published)
    assert times.empty
    assert fixed.empty
    changed = published.copy()
    for point in changed.panels:
        if (point["panel"], point["figure"], point["sparsity"]) == ("a", 7, 0.98):
            point["value"] = 0.48
    _, fixed = printed("a100", A100_LAYER, changed)
    assert fixed["milliseconds"].tolist() == pytest.approx([6.44], abs=0.005)


# The pages


def page():
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "bounds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(published, counts):
    return {
        family: page().draw(ROOT, family, published, counts)
        for family in ("a100", "h200", "tegra-x1")
    }


def caption(figure):
    (text,) = (text for text in figure.texts if text.get_gid() == "caption")
    return text.get_text().replace("\n", " ")


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


def test_a_page_has_every_point_of_figure_5(drawn, published):
    for family, channels, first in (
        ("a100", (48, 64, 80, 96, 112, 128), 0.9),
        ("h200", (48, 64, 80, 96, 112, 128), 0.9),
        ("tegra-x1", (32, 40, 48), 0.9),
    ):
        figure, data = drawn[family]
        assert [axes.get_title(loc="left") for axes in figure.axes] == [
            f"OC = {count}" for count in channels
        ]
        assert figure.get_suptitle().endswith(f": {TITLE}")
        for axes, count in zip(figure.axes, channels, strict=True):
            for series in ("column kernel", *(f"paper, COL_PER_WARP {c}" for c in (8, 16, 32))):
                line = lines_of(axes)[f"bound {series}"]
                rows = data[(data["series"] == series) & (data["out_channels"] == count)]
                np.testing.assert_array_equal(line.get_xdata(), rows["sparsity"])
                np.testing.assert_array_equal(line.get_ydata(), rows["milliseconds"])
                assert rows["sparsity"].tolist() == pytest.approx(np.arange(90, 99) / 100)
                assert rows["sparsity"].iloc[0] == first
            low, high = axes.get_ylim()
            for line in axes.lines:
                assert low < min(line.get_ydata())
                assert max(line.get_ydata()) < high


def test_printed_values_are_hollow_and_where_they_belong(drawn):
    for family, count in (("a100", 128), ("tegra-x1", 48)):
        for axes in drawn[family][0].axes:
            there = bounds.IMPLIED in lines_of(axes)
            assert there == (axes.get_title(loc="left") == f"OC = {count}")
            if there:
                assert lines_of(axes)[bounds.IMPLIED].get_markerfacecolor() == "none"
                assert lines_of(axes)[bounds.IMPLIED].get_linestyle() == "None"
                assert bounds.FIXED in lines_of(axes)
    figure, data = drawn["h200"]
    assert not any(bounds.IMPLIED in lines_of(axes) for axes in figure.axes)
    assert set(data["origin"]) == {"model"}
    assert "The paper prints nothing for this device." in caption(figure)


def test_the_assumptions_are_on_the_page(drawn):
    text = caption(drawn["a100"][0])
    for words in (
        "108 multiprocessors at 1.41 GHz",
        "64 FP32 FMAs, 32 shared loads of 32 bits, 4 instructions of warps",
        "each moved once at 2 TB/s, as the paper states; halos, repeated reads",
        "1.555 TB/s (a100-pcie-40gb, a100-sxm4-40gb)",
        "overlapped fully",
        "Monte Carlo, 4 draws of weights (seeds 1 to 4)",
        "sm_80, nvcc 13.0",
        "6.44 ms at S 0.90 and 3.87 ms at 0.98",
        "3.2 ms at none",
    ):
        assert words in text, words
    assert REASON in caption(drawn["tegra-x1"][0])


def test_issue_floors_are_drawn_where_counted(drawn):
    for family, there in (("a100", True), ("h200", True), ("tegra-x1", False)):
        for axes in drawn[family][0].axes:
            assert ("issue column kernel" in lines_of(axes)) == there


def test_nothing_leaves_the_page_or_overlaps(drawn):
    for figure, _ in drawn.values():
        figure.draw_without_rendering()
        box, size = figure.get_tightbbox(), figure.get_size_inches()
        assert box.x0 >= -0.01
        assert box.y0 >= -0.01
        assert box.x1 <= size[0] + 0.01
        assert box.y1 <= size[1] + 0.01
        (text,) = (text for text in figure.texts if text.get_gid() == "caption")
        (legend,) = figure.legends
        for axes in figure.axes:
            area = axes.get_tightbbox()
            assert area.y0 > text.get_window_extent().y1
            assert area.x1 < legend.get_window_extent().x0
        assert legend.get_window_extent().y0 > text.get_window_extent().y1


def test_the_script_writes_the_same_bytes_twice(tmp_path):
    missing_counts().to_csv(tmp_path / "instructions.csv", index=False)
    command = ["--root", str(ROOT), "--family", "tegra-x1", "--paper", str(PAPER)]
    command += ["--instructions", str(tmp_path / "instructions.csv"), "--out"]
    for name in ("one", "two"):
        page().main([*command, str(tmp_path / name / "bounds.pdf")])
    for suffix in ("pdf", "png", "csv"):
        first, second = (tmp_path / name / f"bounds.{suffix}" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
    data = pd.read_csv(tmp_path / "one" / "bounds.csv")
    assert list(data.columns) == bounds.COLUMNS
    assert set(data["origin"]) == {"model", "printed"}


def test_no_other_figure_draws_bounds():
    others = [
        path
        for folder in ("scripts", "python/packedconv/plots")
        for path in (ROOT / folder).glob("*.py")
        if path.stem != "bounds"
    ]
    assert len(others) > 20
    assert [path.name for path in others if "bounds import" in path.read_text()] == []
