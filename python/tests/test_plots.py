"""The drawings and what all figures share; figures from results: test_figure_scripts.py."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from packedconv.packed import encode_word, pack_array
from packedconv.plots import captions, style
from packedconv.plots.convolution import convolution_table, draw_convolution
from packedconv.plots.example import EXAMPLE, convolve, example_image, example_weight
from packedconv.plots.mapping import draw_mapping, mapping_table
from packedconv.plots.packed_word import FIELDS, draw_packed_word, packed_word_table
from packedconv.plots.roofline import quantity
from packedconv.plots.save import save_figure, trio

PAPER_MAPPING = {"col_per_warp": 4, "rows_per_thread": 2}


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def cells(axes):
    """Text, colour and upper left corner of every labelled cell."""
    boxes = {}
    for box in axes.patches:
        if isinstance(box, Rectangle) and box.get_fill():
            centre = (box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2)
            boxes[tuple(np.round(centre, 6))] = box
    found = []
    for text in axes.texts:
        box = boxes.get(tuple(np.round(text.get_position(), 6)))
        if box is not None:
            found.append((text.get_text(), to_hex(box.get_facecolor()), box.get_xy()))
    return found


# Style


@given(st.sets(st.integers(1, 1024), max_size=20))
def test_no_two_output_channels_look_alike(out_channels):
    styles = style.out_channel_styles(out_channels)
    assert list(styles) == sorted(out_channels)
    assert len(set(styles.values())) == len(styles)


def test_output_channels_of_the_paper_look_the_same_in_every_figure():
    everything = style.out_channel_styles([32, 40, 48, 64, 80, 96, 112, 128])
    assert style.out_channel_styles([48]) == {48: everything[48]}
    assert style.out_channel_styles([24, 48])[48] == everything[48]
    assert len({colour for colour, _ in everything.values()}) == 8
    assert len({marker for _, marker in everything.values()}) == 8


def test_sparsity_colours_do_not_depend_on_which_sparsities_are_drawn():
    nine = [0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98]
    assert len(set(style.sparsity_colours(nine).values())) == 9
    assert style.sparsity_colours([0.94])[0.94] == style.sparsity_colours(nine)[0.94]


def test_the_style_sheet_is_used_and_needed(monkeypatch, tmp_path):
    figure = style.new_figure()
    assert figure.get_layout_engine() is not None
    monkeypatch.setattr(style, "STYLE_FILE", tmp_path / "packedconv.mplstyle")
    with pytest.raises(FileNotFoundError, match=r"packedconv\.mplstyle is missing"):
        style.new_figure()


@pytest.mark.parametrize("word", ["word", "MW", "il", "±sqrt(6/(K²·IC))"])
def test_caption_wraps_within_the_figure(word):
    figure = style.new_figure()
    figure.add_subplot()
    style.write_caption(figure, [" ".join([word] * 60), "last"])
    (text,) = figure.texts
    assert text.get_text().endswith("\nlast")
    figure.draw_without_rendering()
    right = text.get_window_extent().x1
    assert 0.8 * figure.bbox.x1 < right <= figure.bbox.x1
    assert text.get_window_extent().y1 < figure.axes[0].get_tightbbox().y0


# Saving


def small_figure():
    figure = style.new_figure()
    figure.add_subplot().plot([1, 2], [3, 4])
    return figure


def test_saving_writes_three_files_with_the_same_bytes_each_time(tmp_path):
    data = pd.DataFrame({"x": [1, 2], "y": [0.1, 1 / 3]})
    for folder in ("one", "two"):
        save_figure(small_figure(), data, tmp_path / folder / "fig.pdf")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["fig.csv", "fig.pdf", "fig.png"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "one" / "fig.csv"), data)


def test_saved_files_hold_no_date_and_no_version_and_embed_truetype(tmp_path):
    save_figure(small_figure(), pd.DataFrame({"x": [1]}), tmp_path / "fig.png")
    pdf, png = (tmp_path / "fig.pdf").read_bytes(), (tmp_path / "fig.png").read_bytes()
    for word in (b"CreationDate", b"Creator", b"Producer"):
        assert word not in pdf
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"tEXt" not in png
    assert b"Software" not in png


@pytest.mark.parametrize("suffix", [".pdf", ".png", ".csv"])
def test_any_of_the_three_names_the_three(suffix, tmp_path):
    assert [path.suffix for path in trio(tmp_path / f"fig5a{suffix}")] == [".pdf", ".png", ".csv"]


def test_another_suffix_is_an_error():
    with pytest.raises(ValueError, match=r"out: expected .* got fig\.svg"):
        trio("fig.svg")


# Figure 1


@given(st.integers(1, 3), st.integers(1, 3), st.integers(3, 6), st.integers(0, 2), st.data())
def test_convolve_is_equation_1(in_channels, out_channels, size, padding, data):
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    image = draw.integers(-4, 5, (in_channels, size, size)).astype(np.float32)
    weight = draw.integers(-2, 3, (out_channels, in_channels, 3, 3)).astype(np.float32)
    output = convolve(image, weight, padding)
    for oc, h, w in np.ndindex(output.shape):
        total = 0.0
        for ic in range(in_channels):
            for kh in range(max(0, padding - h), min(3, size + padding - h)):
                for kw in range(max(0, padding - w), min(3, size + padding - w)):
                    pixel = image[ic, h + kh - padding, w + kw - padding]
                    total += float(weight[oc, ic, kh, kw]) * float(pixel)
        assert output[oc, h, w] == total


def test_figure_1_shows_the_weight_the_image_and_their_convolution():
    image, weight = example_image(), example_weight()
    table = convolution_table(image, weight, EXAMPLE.padding)
    figure = draw_convolution(image, weight, EXAMPLE.padding)
    shown = [text.replace("−", "-") for text, _, _ in cells(figure.axes[0])]
    by_tensor = {name: rows["value"].to_list() for name, rows in table.groupby("tensor")}
    expected = [f"{value:.0f}" for value in by_tensor["input"]]
    expected += [f"{value:.2f}" if value else "0" for value in by_tensor["weight"]]
    expected += [f"{value:.2f}" for value in by_tensor["output"]]
    assert sorted(shown) == sorted(expected)
    assert f"OC = 0: {np.count_nonzero(weight[0])} of 27 weights nonzero" in texts(figure)


def test_figure_1_colours_nonzeros_only():
    image, weight = example_image(), example_weight()
    figure = draw_convolution(image, weight, EXAMPLE.padding)
    zero = [text for text, colour, _ in cells(figure.axes[0]) if colour == "#f4f4f4"]
    assert zero == ["0"] * int(np.sum(weight == 0))


def test_figure_1_follows_the_weight():
    image, weight = example_image(), example_weight()
    changed = weight.copy()
    changed[0, 0, 1, 1] += 1
    before = texts(draw_convolution(image, weight))
    assert texts(draw_convolution(image, changed)) != before


def test_the_example_has_every_filter_and_no_value_that_rounds_away():
    weight = example_weight()
    assert weight.shape == (2, 3, 3, 3)
    assert (np.count_nonzero(weight, axis=(2, 3)) > 0).all()
    assert np.abs(weight[weight != 0]).min() > 0.05


# Figure 3


@given(
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(1, 4),
    st.integers(1, 70),
)
def test_mapping_computes_every_output_once(col_per_warp, rows, out_channels):
    config = {"col_per_warp": col_per_warp, "rows_per_thread": rows}
    table = mapping_table(config, out_channels)
    outputs = table[["row", "column", "out_channel"]].to_records(index=False).tolist()
    assert len(outputs) == len(set(outputs)) == rows * col_per_warp * out_channels
    channel_lanes = 32 // col_per_warp
    assert (table["lane"] == table["column"] * channel_lanes + table["channel_lane"]).all()
    assert (table["out_channel"] == table["channel_lane"] + table["step"] * channel_lanes).all()
    assert table["lane"].between(0, 31).all()


def test_the_kernel_maps_lanes_as_the_paper_does():
    _core = pytest.importorskip("packedconv._core", reason="needs the built extension")
    config = _core.mapping_config()
    assert {key: config[key] for key in PAPER_MAPPING} == PAPER_MAPPING
    pd.testing.assert_frame_equal(mapping_table(config), mapping_table(PAPER_MAPPING))


def test_the_tables_of_the_kernel_are_what_is_drawn():
    interleaved = {
        **PAPER_MAPPING,
        "column_of_lane": [lane % 4 for lane in range(32)],
        "channel_lane_of_lane": [lane // 4 for lane in range(32)],
    }
    table = mapping_table(interleaved)
    assert table.loc[table["lane"] == 5, ["column", "channel_lane"]].iloc[0].to_list() == [1, 1]
    found = cells(draw_mapping(interleaved).axes[0])
    top = min(y for _, _, (_, y) in found)
    line = sorted((x, int(text)) for text, _, (x, y) in found if y == top)
    assert [channel for _, channel in line] == [lane // 4 for lane in range(32)]
    with pytest.raises(ValueError, match="column_of_lane: expected 32 different lanes, got 1"):
        mapping_table(dict(interleaved, column_of_lane=[0] * 32, channel_lane_of_lane=[0] * 32))


def test_mapping_of_the_paper():
    table = mapping_table(PAPER_MAPPING).set_index(["row", "step", "lane"])
    assert table["column"].max() == 3
    assert table["channel_lane"].max() == 7
    assert table.loc[(0, 0, 8), "column"] == 1
    assert table.loc[(1, 3, 31), "out_channel"] == 31
    assert len(table) == 2 * 4 * 32


@pytest.mark.parametrize("col_per_warp", [4, 8, 16, 32])
def test_figure_3_follows_the_configuration(col_per_warp):
    config = {"col_per_warp": col_per_warp, "rows_per_thread": 2}
    table = mapping_table(config)
    figure = draw_mapping(config)
    found = cells(figure.axes[0])
    assert sorted(int(text) for text, _, _ in found) == sorted(table["out_channel"])
    # Lanes lie side by side: order along x within a line of cells.
    lines = {}
    for text, colour, (x, y) in found:
        lines.setdefault(round(y, 6), []).append((x, int(text), colour))
    steps = table.groupby(["row", "step"])["out_channel"].apply(list).to_list()
    drawn = [sorted(lines[y]) for y in sorted(lines)]
    assert [[channel for _, channel, _ in line] for line in drawn] == steps
    channel_lanes = 32 // col_per_warp
    for line in drawn:
        colours = [colour for _, _, colour in line]
        groups = [set(colours[i : i + channel_lanes]) for i in range(0, 32, channel_lanes)]
        assert all(len(group) == 1 for group in groups)
        assert all(one != two for one, two in zip(groups, groups[1:], strict=False))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"col_per_warp": 5, "rows_per_thread": 2}, "col_per_warp: expected a divisor of 32"),
        ({"col_per_warp": 0, "rows_per_thread": 2}, "col_per_warp: expected a divisor of 32"),
        ({"col_per_warp": 4, "rows_per_thread": 0}, "rows_per_thread: expected at least 1"),
    ],
)
def test_a_mapping_that_does_not_divide_a_warp_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        mapping_table(config)


# Figure 4


def hand_made():
    """Two output channels, the second empty but for its last weight."""
    weight = np.zeros((2, 2, 3, 3), dtype=np.float32)
    weight[0, 0, 1, 2] = 1.0
    weight[0, 1, 0, 1] = -2.5
    weight[1, 1, 2, 2] = 0.5
    return weight


def test_packed_words_of_a_hand_made_weight():
    table = packed_word_table(pack_array(hand_made()))
    assert table["word"].to_list() == ["0x3c000021", "0xc1000110", "0x38000122"]
    assert table["value"].to_list() == [1.0, -2.5, 0.5]
    assert table[["ic", "px", "py"]].to_numpy().tolist() == [[0, 2, 1], [1, 1, 0], [1, 2, 2]]
    assert table[["out_channel", "first", "last"]].to_numpy().tolist() == [
        [0, 0, 2],
        [0, 0, 2],
        [1, 2, 3],
    ]


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_table_of_words_says_what_the_packing_says(seed, out_channels, in_channels):
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=(out_channels, in_channels, 3, 3)).astype(np.float32)
    weight[draw.random(weight.shape) < 0.7] = 0
    packed = pack_array(weight)
    table = packed_word_table(packed)
    assert [int(word, 16) for word in table["word"]] == packed.words.tolist()
    rebuilt = np.zeros_like(weight)
    for row in table.itertuples():
        rebuilt[row.out_channel, row.ic, row.py, row.px] = row.value
        assert row.first <= row.position < row.last
        assert int(row.word, 16) == encode_word(int(row.value_bits, 16), row.ic, row.px, row.py)
    np.testing.assert_array_equal(rebuilt, packed.unpack_array())


def test_figure_4_shows_words_fields_offsets_and_positions():
    packed = pack_array(example_weight())
    table = packed_word_table(packed)
    figure = draw_packed_word(packed)
    shown = [text for text, _, _ in cells(figure.axes[0])]
    assert [text for text in shown if text.startswith("0x")] == table["word"].to_list()
    for name, high, low, _ in FIELDS:
        assert name in shown
        assert f"[{high}:{low}]" in texts(figure)
    for offset in packed.offsets.reshape(-1).tolist():
        assert str(offset) in shown
    arrows = [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == EXAMPLE.out_channels + 1
    # Every nonzero is numbered twice: in its filter and in the list.
    numbers = [int(text) for text in shown if re.fullmatch(r"\d+", text)]
    assert all(numbers.count(position) >= 2 for position in table["position"])


def test_fields_of_the_figure_are_the_fields_of_a_word():
    for index, (_, high, low, _) in enumerate(FIELDS):
        values = [0, 0, 0, 0]
        values[index] = 2 ** (high - low + 1) - 1
        word = encode_word(*values)
        assert word == sum(1 << bit for bit in range(low, high + 1))


def test_figure_4_follows_the_weight():
    assert texts(draw_packed_word(pack_array(hand_made()))) != texts(
        draw_packed_word(pack_array(-hand_made()))
    )


# Captions


def test_quantities_have_prefixes():
    assert quantity(19.5e12, "FLOP/s") == "19.5 TFLOP/s"
    assert quantity(25.6e9, "B/s") == "25.6 GB/s"


def test_dense_layouts_are_named_per_layer_where_they_differ():
    samples = pd.DataFrame(
        {
            "implementation": ["dense", "sparse", "dense", "dense"],
            "layout": ["nchw", "packed", "channels_last", "nchw"],
            "out_channels": [64, 64, 48, 32],
        }
    )
    assert captions.dense_layouts(samples) == "channels_last (OC\u00a048), nchw (OC\u00a032, 64)"
    assert captions.dense_layouts(samples[samples["out_channels"] != 48]) == "nchw"


def test_distributions_in_words():
    assert captions.distribution({"distribution": "uniform", "low": 0.0, "high": 1.0}) == (
        "uniform on [0, 1)"
    )
    bound = {"distribution": "uniform", "bound": "sqrt(6/(K^2*IC))"}
    assert captions.distribution(bound) == "uniform on ±sqrt(6/(K²·IC))"
    assert captions.distribution({}) == "not stated"
